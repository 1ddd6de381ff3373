"""What may be removed from the folder of a table that cannot be created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdc_core.tables import layout as tables
from pipelines.delta import abandoned


def test_a_folder_with_files_of_others_is_for_a_person(tmp_path: Path) -> None:
    """Trying again cannot help there, as it does where a killed process left a log without a commit."""
    spark: Any = None
    for name in ("killed", "foreign", "made"):
        (tmp_path / name / "_delta_log").mkdir(parents=True)
        (tmp_path / name / "_delta_log" / ".draft.tmp").touch()
    for name in ("foreign", "made"):
        (tmp_path / name / "part-0.parquet").touch()
    (tmp_path / "made" / "_delta_log" / f"{0:020}.json").touch()

    def cleared(name: str) -> bool:
        return abandoned.clear(spark, tables.TableRef.at(str(tmp_path / name)), str(tmp_path / name))

    assert (cleared("killed"), cleared("foreign"), cleared("made"), cleared("never")) == (True, False, True, True)
    assert not (tmp_path / "killed").exists()
    assert [each.name for each in (tmp_path / "foreign").iterdir()] == ["part-0.parquet"]
