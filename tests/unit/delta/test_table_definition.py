"""A table's definition, read from a log that was written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.delta import table_definition

METADATA = pa.struct(
    [("id", pa.string()), ("configuration", pa.map_(pa.string(), pa.string())), ("schemaString", pa.string())]
)


def commit(folder: Path, version: int, **actions: Any) -> None:
    lines = [{"commitInfo": {}}, *({kind: action} for kind, action in actions.items())]
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def metadata(**properties: str) -> dict[str, Any]:
    return {"id": "i", "configuration": properties, "schemaString": '{"fields":[{"name":"n"}]}'}


def test_only_new_commits_are_read_for_a_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service asks for it again and again, and a table may have hundreds of commits after its checkpoint."""
    folder = tmp_path / "t"
    commit(folder, 0, protocol={"readerFeatures": ["f"]}, metaData=metadata(a="b"))
    for version in range(1, 100):
        commit(folder, version)
    assert table_definition.properties(folder) == {"a": "b"} and table_definition.features(folder) == {"f"}
    reads: list[str] = []
    read = Path.read_text

    def counted(path: Path, *given: Any) -> str:
        reads.append(path.name)
        return read(path, *given)

    monkeypatch.setattr(Path, "read_text", counted)
    commit(folder, 100)
    for _ in range(3):
        assert table_definition.properties(folder) == {"a": "b"} and table_definition.features(folder) == {"f"}
        assert table_definition.columns(folder) == ["n"] and table_definition.table_id(folder) == "i"
    assert [name for name in reads if name.endswith(".json")] == [f"{100:020}.json"] * 2  # once for each kind
    commit(folder, 101, metaData=metadata(a="c"))
    commit(folder, 102)
    assert table_definition.properties(folder) == {"a": "c"}


def test_a_definition_is_read_anew_where_the_commits_of_the_last_call_are_gone(tmp_path: Path) -> None:
    """They are cleaned up after a month: then it is in the checkpoint."""
    commit(tmp_path, 0, metaData=metadata(a="b"))
    assert table_definition.properties(tmp_path) == {"a": "b"}
    (tmp_path / "_delta_log" / f"{0:020}.json").unlink()
    commit(tmp_path, 2)
    row = pa.array([metadata(a="c") | {"configuration": [("a", "c")]}], METADATA)
    pq.write_table(pa.table({"metaData": row}), tmp_path / "_delta_log" / f"{2:020}.checkpoint.parquet")
    (tmp_path / "_delta_log" / "_last_checkpoint").write_text('{"version": 2}')
    assert table_definition.properties(tmp_path) == {"a": "c"}


def test_a_table_that_is_made_anew_has_its_own_definition(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for version in range(3):
        commit(folder, version, metaData=metadata(a="b"))
    assert table_definition.properties(folder) == {"a": "b"}
    shutil.move(folder, tmp_path / "moved")
    for version in range(5):
        commit(folder, version, metaData=metadata(a=str(version)))
        assert table_definition.properties(folder) == {"a": str(version)}
