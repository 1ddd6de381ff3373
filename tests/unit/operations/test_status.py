"""How `status` reads positions, snapshots and counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from pymongo.errors import AutoReconnect

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.silver import quarantine
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from cdc_core.stream import resume_token
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta.local_log import Commit
from pipelines.mongodb.server import ServerInfo
from pipelines.operations import backlog, status
from pipelines.terminal import tables as report
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop

TABLE = tables.TableRef("catalog.schema.t")


def test_a_restore_takes_the_position_back() -> None:
    """Commits between the restored version and the RESTORE are undone; commits without a position are skipped."""
    history = [Commit(6, 6, None), Commit(5, 5, None, restored=2), *(Commit(n, n, {"to": n * 10}) for n in (4, 3, 2, 1))]
    assert [to for _, to in status._with_position(history)] == [20, 10]


def test_a_table_whose_position_was_taken_back_is_at_its_beginning() -> None:
    """After `medallion repair` of gold, the next run writes it again. A first claim has no such meaning."""
    history = [
        *(Commit(n, n, {"to": None}) for n in (5, 4)),
        Commit(3, 3, None),
        Commit(2, 2, {"to": 7}),
        Commit(1, 1, {"to": None}),
    ]
    assert [(commit.version, to) for commit, to in status._with_position(history)] == [(5, 0), (2, 7)]
    assert [to for _, to in status._with_position(history[3:])] == [7]
    assert [*status._with_position(history[4:])] == []


@pytest.mark.parametrize(("seconds", "most"), [(60, 30), (10, 150), (1, 1630)])
def test_a_rate_is_read_from_few_commits(monkeypatch: pytest.MonkeyPatch, seconds: int, most: int) -> None:
    """A table with a commit every ten seconds needs 61 commits for its rate: hundreds of such tables are shown in seconds."""
    reads: list[int] = []

    def commits(spark: Any, table: Any, *, limit: int) -> list[Commit]:
        reads.append(limit)
        return [Commit(n, n * seconds * 1000, {"to": n, "writer": "w"}) for n in range(5000, 5000 - limit, -1)]

    monkeypatch.setattr(status.table_history, "commits", commits)
    positions = status._StatusReader(SPARK, SPARK, TABLE, 0)._recent_commits(TABLE)
    assert positions[0][1] - positions[-1][1] >= min(600 // seconds, 999)
    assert sum(reads) <= most


def test_a_server_that_goes_away_meanwhile_is_a_line_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers the first command, and the connection ends at the next one: the tables' status is still shown."""

    def ends(asked: object) -> None:
        raise AutoReconnect("connection closed")

    client = SimpleNamespace(admin=SimpleNamespace(command=ends), close=lambda: None)
    monkeypatch.setattr(status.connections, "connection", lambda _: SimpleNamespace(client=lambda **_: client))
    monkeypatch.setattr(status.mongodb_server, "server_info", lambda _: ServerInfo((7, 0, 0), False, "rs"))
    unused: Any = SimpleNamespace(source=None)
    assert "the connection failed: connection closed" in (status._source(unused).problem or "")


def test_a_snapshot_that_is_paused_is_shown_so() -> None:
    """Otherwise nothing shows why it stands still. A collection that was read completely is done."""
    read = CollectionState(chunks=1, documents=5, completed=True)
    state = SnapshotState("s", ("shop.a", "shop.b"), {"shop.a": read}, SnapshotKind.INCREMENTAL, is_paused=True)
    found = status._snapshots([state.begun(), state.progress("shop.a"), state.controlled()])
    assert found == {
        "shop.a": status.SnapshotStatus(5, is_done=True),
        "shop.b": status.SnapshotStatus(0, is_done=False, is_paused=True),
    }
    told = [status.CollectionStatus(name, held, None, None, 0, 0) for name, held in found.items()]
    assert [report._snapshot_cell(each) for each in told] == ["done", "0 so far, paused"]


@pytest.mark.parametrize("raised", (errors.FilesMissing("its log names a file"), errors.StoreUnreachable("its log is away")))
def test_a_damaged_table_hides_no_other_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: errors.MedallionError
) -> None:
    """The others are shown with it, and its line has the error; the command then ends with that error's exit code."""

    def counts(reader: Any, progress: Any) -> dict[str, int]:
        if progress.table == hop.silver_table:
            raise raised
        return {"rows": 7, "deleted": 0, "incomplete": 0, "rescued": 0}

    monkeypatch.setattr(status._StatusReader, "_counts", counts)
    with without_spark.running():
        hop = Hop(tmp_path)
        for collection in ("t", "u"):
            hop.append((1, bson.encode({"_id": 1})), collection=collection)
        hop.silver()
        found = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert [(each.silver and each.silver.rows, each.problem and each.problem[:9]) for each in found] == [
        (None, "its log n" if raised.exit_code == 3 else "its log i"),
        (7, None),
    ]
    told = status.PipelineStatus("hand", 0, status.ServerStatus(), None, found)
    report.status(told)
    assert f"{found[0].collection}: {raised}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(errors.CollectionsFailed, match=f"{found[0].collection}: a table cannot be read") as refused:
        status.refuse(told)
    assert refused.value.exit_code == raised.exit_code


@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_a_table_of_another_program_is_a_problem(tmp_path: Path, layer: str) -> None:
    """Silver or gold, which would make their table there, end with the same: exit code 3."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        if layer == "gold":
            hop.silver()
        without_spark.make_foreign(getattr(hop, f"{layer}_table"))
        [found] = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert found.problem is not None and "did not create" in found.problem and found.exit_code == 3


def test_for_what_has_no_table_bronze_is_not_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty collection in a snapshot's plan, and one that gold has not published."""
    looked_behind: list[int] = []

    def behind(table: Any, batch: int, columns: Any, **more: Any) -> Any:
        looked_behind.append(batch)
        return batch_rows_behind(table, batch, columns, **more)

    batch_rows_behind = backlog.batch_rows.behind
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        plan = {"snapshot": {"id": "s", "planned": ["shop.nothing"], "collections": {}}}
        monkeypatch.setattr(status.bronze_log, "gap_and_snapshot_heartbeats", lambda *_: [plan])
        monkeypatch.setattr(backlog.batch_rows, "behind", behind)
        found = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert {each.collection: each.waiting_events for each in found}["shop.nothing"] == 0 and len(found) == 2
    assert looked_behind == [1]


def test_a_collection_whose_tables_name_is_anothers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a catalog two names may become one. Silver refuses the second collection, whatever its snapshot has read; the status must not show
    the first one's rows for it, nor read all of bronze.
    """
    looked_behind: list[int] = []
    behind = backlog.batch_rows.behind
    monkeypatch.setattr(
        backlog.batch_rows,
        "behind",
        lambda table, batch, *rest, **more: looked_behind.append(batch) or behind(table, batch, *rest, **more),
    )
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.append((1, bson.encode({"_id": 1})), collection="u")
        hop.silver()
        known = registry.read(SPARK, hop.settings)
        second = registry.Namespace("cases", "u")
        refusal = errors.DecisionNeeded("cases.u: its table would be t, which already belongs to cases.t")
        known = replace(known, namespaces=known.namespaces[:1], refused={second: refusal})
        monkeypatch.setattr(registry, "read", lambda *_, **__: known)
        plan = {"snapshot": {"id": "s", "planned": ["cases.u"], "collections": {}}}
        monkeypatch.setattr(status.bronze_log, "gap_and_snapshot_heartbeats", lambda *_: [plan])
        found = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert [(each.collection, each.silver and each.silver.rows, each.problem) for each in found] == [
        ("cases.t", 1, None),
        ("cases.u", None, str(refusal)),
    ]
    assert 0 not in looked_behind
    with pytest.raises(errors.CollectionsFailed) as refused:
        status.refuse(status.PipelineStatus("hand", 0, status.ServerStatus(), None, found))
    assert refused.value.exit_code == 3


def test_tables_on_a_disk_are_counted_without_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted from the log, without those that deletion vectors hide; deleted, incomplete and rescued rows from three columns.

    The backlog and the rate are counted in bronze's files.
    """
    with without_spark.running():
        hop = Hop(tmp_path)
        commit = hop.commit
        monkeypatch.setattr(hop, "commit", lambda rows: commit([row | {"ts_ms": row["offset"] * 1000} for row in rows]))
        hop.append(*((key, bson.encode({"_id": key, "n": key})) for key in range(4)))
        hop.run()
        hop.append((1, None), (2, bson.encode({"_id": 2, "n": {"a": 1}})), (3, bson.encode({"_id": 3, "n": 7})))
        hop.run()
        hop.note_fact(9, quarantine.Reason.UNREADABLE_AFTER, to=2)
        hop.append((4, bson.encode({"_id": 4})))
        reader = status._StatusReader(SPARK, hop.settings, hop.bronze, 5)
        (found,) = reader.collections()
        rate = backlog.captured_rate(SPARK, hop.bronze, 3, within_seconds=600, within_batches=1000)
    assert rate == 8 / 7
    assert found.problem is None and found.silver is not None and found.gold is not None
    assert (found.silver.lag_events, found.silver.lag_batches, found.gold.lag_events, found.waiting_events) == (1, 1, 1, 1)
    assert (found.silver.rows, found.silver.deleted, found.silver.incomplete, found.silver.rescued) == (3, 0, 0, 1)
    assert (found.gold.rows, found.gold.deleted, found.gold.rescued, found.quarantined) == (3, 0, 1, 1)


def test_a_drop_that_was_not_applied_waits(tmp_path: Path) -> None:
    """All rows are to be removed, so the layers have a backlog."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        hop.drop()
        hop.drop("u")
        (before,) = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
        hop.run()
        (after,) = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    found = [(each.waiting_events, each.silver, each.gold) for each in (before, after)]
    assert [
        (waits, silver and (silver.rows, silver.lag_events), gold and gold.lag_events) for waits, silver, gold in found
    ] == [(1, (1, 1), 1), (0, (0, 0), 0)]


def test_events_of_a_bronze_that_was_made_anew_wait(tmp_path: Path) -> None:
    """Batch numbers start again: silver, which stays unchanged until a decision, has not applied them, whatever its own number is."""
    with without_spark.running():
        hop = Hop(tmp_path, history=True)
        for key in range(3):
            hop.append((key, bson.encode({"_id": key})))
            hop.run()
        shutil.rmtree(hop.bronze.path or "")
        hop.log, hop._batch, hop._offset = "two", 0, 0
        without_spark.create(SPARK, hop.bronze, columns=bronze.COLUMNS_DDL)
        hop.append((7, bson.encode({"_id": 7})))
        hop.append((8, bson.encode({"_id": 8})))
        (found,) = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert found.silver is not None and found.gold is not None and found.history is not None
    layers = (found.silver, found.gold, found.history)
    assert [(each.batch, each.lag_events, each.lag_batches) for each in layers] == [(0, 2, 2)] * 3
    assert found.waiting_events == 2


def test_a_collection_that_silver_has_not_found_waits(tmp_path: Path) -> None:
    """Without a snapshot only its events tell of it: it must show while silver stands still, and before silver ever ran."""

    def read() -> dict[str, int]:
        found = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
        return {each.collection: each.waiting_events for each in found}

    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        first = read()
        hop.run()
        hop.append((1, bson.encode({"_id": 1})), (2, bson.encode({"_id": 2})), collection="u")
        stands = read()
        hop.run()
        after = read()
    assert (first, stands, after) == ({"cases.t": 1}, {"cases.t": 0, "cases.u": 2}, {"cases.t": 0, "cases.u": 0})


def test_a_bronze_that_is_gone_does_not_look_like_one_that_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told to begin with a capture makes another bronze, while the old one may be on a disk that is not mounted."""
    monkeypatch.setattr(status, "_source", lambda _: status.ServerStatus())
    with without_spark.running():
        hop = Hop(tmp_path)
        assert status.read(SPARK, replace(hop.settings, name="other")).bronze is None
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        shutil.rmtree(hop.layout.bronze(hop.settings.name).path or "")
        with pytest.raises(errors.DecisionNeeded, match="bronze is gone"):
            status.read(SPARK, hop.settings)


def _mark(seconds: int) -> str:
    return f"82{seconds:08X}000000022B0229296E04"


def _behind_an_event(seconds: int) -> str:
    """What a drained stream says after an event: the beginning of a token."""
    return resume_token.behind(f"82{seconds:08X}000000012B042C0100296E5A1004{'AB' * 16}461E5F6964002B02000004")


@pytest.mark.parametrize(
    ("restored", "complete", "lag"), [(None, 1000, 5), (None, None, 905), (2, 1000, 905), (None, 50, 905)]
)
@pytest.mark.parametrize("complete_token", [_mark, _behind_an_event])
def test_a_quiet_source_without_heartbeats_is_not_behind(
    monkeypatch: pytest.MonkeyPatch,
    restored: int | None,
    complete: int | None,
    lag: int,
    complete_token: Callable[[int], str],
) -> None:
    """Only the renewals of the lease say that everything was read. A capture still resumes from the last row, which ages."""
    said = {} if complete is None else {"complete": complete_token(complete)}
    renewal = Commit(3, 3, {"to": "token", "writer": "w", **said})
    standing = status.table_history.Standing(3, renewal, renewal, restored is not None)
    monkeypatch.setattr(status.table_history, "standing", lambda *_: standing)
    monkeypatch.setattr(status.table_history, "last_commit", lambda *_: renewal)
    row = SimpleNamespace(token=f"82{100:08X}000000012B0229296E04", batch=7, offset=9)
    monkeypatch.setattr(status.bronze_log, "read_position", lambda *_: row)
    monkeypatch.setattr(status.backlog, "captured_rate", lambda *_, **__: None)
    monkeypatch.setattr(status._StatusReader, "_why_slow", lambda _: None)
    found = status._StatusReader(SPARK, SPARK, TABLE, 0).bronze(status.ServerStatus("MongoDB", 1005, 40))
    assert found is not None and (found.lag_seconds, found.position, found.headroom_seconds) == (lag, 1005 - lag, 60)
