"""Whether a bronze is the one that a table was made from, decided by the commit that was its newest then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.delta import local_log
from tests.harness import without_spark


def made(folder: Path) -> tables.TableRef:
    """A log that was cleaned up to before version 7, and ends with 8."""
    (folder / "_delta_log").mkdir(parents=True)
    for version, name in ((7, "seven"), (8, "eight")):
        said = f'{{"writer": "w", "commit": "{name}"}}'
        without_spark.write(folder, version, [], userMetadata=said)
    return tables.TableRef.at(str(folder))


@pytest.mark.parametrize(
    ("commit", "is_held"),
    [
        ((8, "eight"), True),
        ((7, "seven"), True),
        ((7, "another"), False),
        ((9, "nine"), False),
        ((6, "six"), None),
        (None, None),
    ],
)
def test_a_commit_is_held_or_not_or_nobody_knows(commit: Any, is_held: bool | None, tmp_path: Path) -> None:
    assert bronze.is_held(without_spark.SPARK, made(tmp_path / "bronze"), commit) is is_held


def test_of_a_table_that_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert bronze.is_held(without_spark.SPARK, tables.TableRef.at(str(tmp_path)), (1, "one")) is None
    assert bronze.is_held(without_spark.SPARK, tables.TableRef.named("main", "bronze", "shop"), (1, "one")) is None


def test_a_store_that_does_not_answer_is_no_other_bronze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> None:
        raise OSError(5, "away")

    monkeypatch.setattr(local_log, "commit", away)
    with pytest.raises(errors.StoreUnreachable):
        bronze.is_held(without_spark.SPARK, made(tmp_path / "bronze"), (8, "eight"))
