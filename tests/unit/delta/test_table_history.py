"""How much of a long history is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, table_history
from pipelines.delta.local_log import Commit

TABLE = tables.TableRef("catalog.schema.t")
SPARK: Any = None


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of commits that each look reads, in a history of 20,000 whose version 19,900 is the last of ours."""
    counts: list[int] = []

    def commits(spark: Any, table: Any, *, limit: int) -> list[Commit]:
        found = [Commit(n, 0, {"to": n} if n <= 19_900 else None) for n in range(19_999, max(-1, 19_999 - limit), -1)]
        counts.append(len(found))
        return found

    monkeypatch.setattr(table_history, "commits", commits)
    return counts


def test_commits_of_others_are_read_and_no_more(read: list[int]) -> None:
    """The last commit of ours is found behind a hundred commits of others, without reading the 20,000 before it."""
    found = table_history.last_commit(SPARK, TABLE)
    assert found is not None and found.version == 19_900
    assert sum(read) < 1000


def test_what_came_since_a_version_is_read(read: list[int]) -> None:
    """Looking for commits after the writer's own version reads one commit more than there are."""
    assert [commit.version for commit in table_history.since(SPARK, TABLE, 19_989)] == [*range(19_999, 19_989, -1)]
    assert read == [1, 10]


def test_a_history_without_any_of_ours_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        table_history, "commits", lambda *_, limit: [Commit(n, 0, None) for n in range(99, max(-1, 99 - limit), -1)]
    )
    assert table_history.last_commit(SPARK, TABLE) is None


def ours(version: int, base: int | None = None) -> Commit:
    """A commit of this project at the position of its version, by a writer that had read the version `base`."""
    name = "" if base is None else claims.commit_name(base, "a")
    return Commit(version, 0, {"writer": "w", "to": version, "commit": name})


@pytest.mark.parametrize(
    ("newest_first", "position", "before_void"),
    (
        ([ours(5, 4)], 5, None),
        ([ours(5)], 5, None),  # of an earlier version of this project
        ([ours(5, 2), Commit(4, 0, None), Commit(3, 0, None)], 5, None),  # behind compactions
        ([ours(5, 3), Commit(4, 0, None), Commit(3, 0, None, 1)], 5, None),  # its writer had seen the RESTORE
        ([ours(5, 2), Commit(4, 0, None), Commit(3, 0, None, 1)], 1, 4),
        ([ours(5, 3), Commit(4, 0, None, local_log.UNKNOWN), ours(3, 2)], None, 4),
        ([Commit(6, 0, None, 4), ours(5, 3), Commit(4, 0, None, 1), ours(3, 2)], 1, None),  # it was undone
        ([Commit(9, 0, None), ours(8, 6), Commit(7, 0, None, 5), ours(5, 3), Commit(4, 0, None, 1)], 1, 4),
    ),
)
def test_a_commit_onto_a_restore_that_its_writer_had_not_seen_has_no_position(
    newest_first: list[Commit], position: int | None, before_void: int | None
) -> None:
    """Its metadata has the position of rows that the RESTORE took away."""
    standing = table_history._standing([*newest_first, ours(1, 0), Commit(0, 0, None)])
    assert standing.metadata.get("to") == position
    assert standing.void == (None if before_void is None else table_history.VoidCommit(before_void, None))


@pytest.mark.parametrize(
    ("later", "foreign"),
    (
        ([Commit(7, 0, None, is_foreign=True), Commit(6, 0, None)], 7),
        ([Commit(7, 0, None), Commit(6, 0, None)], None),  # compactions
        ([Commit(7, 0, None, 5), Commit(6, 0, None, is_foreign=True)], None),  # taken away again
        ([Commit(7, 0, None, is_foreign=True), Commit(6, 0, None, 5)], 7),  # it was restored itself
    ),
)
def test_rows_of_others_after_such_a_commit_are_told(later: list[Commit], foreign: int | None) -> None:
    """Who empties a table and fills it from a copy beside a running writer would lose the copy's rows with that commit."""
    before = [Commit(4, 0, None, 1), Commit(3, 0, None, is_foreign=True), ours(1, 0), Commit(0, 0, None)]
    standing = table_history._standing([*later, ours(5, 3), *before])
    assert standing.void == table_history.VoidCommit(4, foreign)


def test_files_that_only_moved_are_no_change(tmp_path: Path) -> None:
    """Commits without rows, and compactions, count on neither side of a change. At the end of the log the result is the version that was
    asked for."""
    moved, changed = ({"add": {"path": "a", "dataChange": is_change}} for is_change in (False, True))
    gone = {"remove": {"path": "a", "dataChange": True}}
    log = tmp_path / "_delta_log"
    log.mkdir()
    for version, action in enumerate([changed, moved, {}, changed, gone, moved, {}]):
        (log / f"{version:020}.json").write_text(f'{{"commitInfo":{{}}}}\n{json.dumps(action)}\n')
    table = tables.TableRef.at(str(tmp_path))
    assert table_history.changed_between(SPARK, table, 0, 6) == (2, 4)
    assert table_history.changed_between(SPARK, table, 1, 2) == (2, 2)
    (log / f"{2:020}.json").write_text('{"remove":{"path":"a","dataChange":false}}')  # as a repair writes it
    assert table_history.changed_between(SPARK, table, 0, 3) == (1, 3)
    (log / f"{1:020}.json").unlink()
    assert table_history.changed_between(SPARK, table, 0, 6) == (0, 6)


def test_the_last_commit_before_a_time_is_found_by_a_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit 100 + n was made at second n, each tenth by another program, and those before 100 are cleaned up."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    for number in range(1000):
        info: dict[str, Any] = {"timestamp": number * 1000}
        if number % 10:
            info["userMetadata"] = json.dumps({"batch": number, "writer": "w", "to": number})
        (log / f"{100 + number:020}.json").write_text(json.dumps({"commitInfo": info}) + "\n")
    reads: list[int] = []
    read = local_log.commit

    def counted(folder: Path, version: int) -> Commit | None:
        reads.append(version)
        return read(folder, version)

    monkeypatch.setattr(local_log, "commit", counted)

    def before(time_ms: int) -> Any:
        commit = table_history.last_before(
            SPARK, tables.TableRef.at(str(tmp_path)), time_ms, matching=lambda each: "batch" in each
        )
        return None if commit is None else (commit.metadata or {})["batch"]

    assert [before(seconds * 1000) for seconds in (0, 1, 2, 500, 511, 10_000)] == [None, None, 1, 499, 509, 999]
    assert len(reads) < 6 * 16
    assert table_history.last_before(SPARK, TABLE, 0, matching=bool) is None  # a catalog's table
