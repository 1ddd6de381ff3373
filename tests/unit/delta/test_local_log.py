"""What a table's log says of a RESTORE that names no version."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core.tables import claims
from pipelines.delta import local_log


def commit(folder: Path, version: int, *actions: dict[str, object], to: object = None, **info: object) -> None:
    """Writes one commit of a log, ours where it has a position."""
    log = folder / "_delta_log"
    log.mkdir(exist_ok=True)
    said = {"userMetadata": claims.WriterIdentity("w", "host", 1, "").metadata(now_ms=0, to=to)} if to is not None else {}
    lines = [{"commitInfo": {"timestamp": version, "operation": "WRITE", **said, **info}}, *actions]
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, lines)))


def add(path: str, vector: str | None = None) -> dict[str, object]:
    return {"add": {"path": path, **({"deletionVector": {"pathOrInlineDv": vector, "offset": 1}} if vector else {})}}


def remove(path: str, vector: str | None = None) -> dict[str, object]:
    return {"remove": {"path": path, **({"deletionVector": {"pathOrInlineDv": vector, "offset": 1}} if vector else {})}}


BY_TIME = {"operation": "RESTORE", "operationParameters": {"version": None, "timestamp": "2026-01-01 00:00:00"}}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Versions 0 to 4: two appends, a commit without rows, an upsert by a deletion vector, a rewrite."""
    commit(tmp_path, 0, add("a"), to=1)
    commit(tmp_path, 1, add("b"), to=2)
    commit(tmp_path, 2, to=3)
    commit(tmp_path, 3, remove("a"), add("a", "v"), add("c"), to=4)
    commit(tmp_path, 4, remove("a", "v"), remove("b"), remove("c"), add("d"), to=5)
    return tmp_path


@pytest.mark.parametrize(
    ("actions", "version"),
    [
        (
            [remove("d"), add("a"), add("b")],
            2,
        ),  # the newest that holds these files: a commit without rows moved its position
        ([remove("d"), add("a", "v"), add("b"), add("c")], 3),
        ([remove("d"), add("a")], 0),
        ([], 4),
        ([remove("d"), add("gone")], -1),  # before all that the log holds: no commit's position is that of the rows
    ],
)
def test_a_restore_to_a_time_is_told_by_its_files(table: Path, actions: list[dict[str, object]], version: int) -> None:
    """Versions with the same files hold the same rows."""
    commit(table, 5, *actions, **BY_TIME)
    newest = next(iter(local_log.commits(table)))
    assert (newest.version, newest.restored) == (5, version)


def test_a_restore_to_a_version_says_it(table: Path) -> None:
    commit(table, 5, operation="RESTORE", operationParameters={"version": "1", "timestamp": None})
    assert next(iter(local_log.commits(table))).restored == 1


def test_what_was_appended_is_told_across_a_compaction_that_says_nothing(tmp_path: Path) -> None:
    """Bronze's own compaction carries no position, and neither does an operator's."""
    commit(tmp_path, 0, add("a"), to=1)
    commit(tmp_path, 1, add("b"), to=2)
    commit(tmp_path, 2, remove("a"), remove("b"), add("ab"), operation="OPTIMIZE")
    commit(tmp_path, 3, add("c"), to=3)

    def is_before(each: local_log.Commit) -> bool:
        return each.metadata is not None and each.metadata["to"] == 1

    found = local_log.appended(tmp_path, is_before)
    assert found is not None
    assert {each.path.name for each in found} == {"c", "ab"}


def test_what_columns_take_counts_those_with_dots_in_their_names(tmp_path: Path) -> None:
    rows = pa.table({"a": [{"b": "x" * 10}], "a.b": ["y" * 1000], "a.c": [["z" * 500]], "other": ["w" * 5000]})
    pq.write_table(rows, tmp_path / "f.parquet", use_dictionary=False, write_statistics=False)
    sizes = [local_log.columns_bytes(tmp_path / "f.parquet", {name}) for name in ("a.b", "a.c", "other")]
    assert [size // 500 for size in sizes] == [2, 1, 10]
