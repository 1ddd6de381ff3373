"""Runs of silver and gold: which tables have a backlog, what stops a run, and where the next one continues."""

from __future__ import annotations

import functools
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from cdc_core.bronze.batch_range import BatchRange
from pipelines.bronze import collection_events, registry, survey
from pipelines.delta import table_history
from pipelines.delta.writer import Writer
from pipelines.gold import in_process as gold_small_batch
from pipelines.gold import run as gold
from pipelines.operations import quarantine, rebuild
from pipelines.schema import log as schemas
from pipelines.silver import deletes, evolve
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from tests.harness import bronze_rows, environments, processes
from tests.harness.environments import Environment
from tests.harness.layers import (
    Hop,
    Killed,
    Row,
    document,
    forget_claims,
    killing,
    pipeline,
    table_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = "orders"


@pytest.fixture
def hop(spark: SparkSession, lakehouse: Path) -> Hop:
    return Hop(spark, pipeline(lakehouse))


@pytest.mark.journey
def test_late_events_are_compared_with_those_deletes_that_may_be_later(hop: Hop) -> None:
    """A snapshot's chunk is late by seconds, and a collection may have deleted a hundred million documents in a year."""
    hop.bronze.append({"t": [document(key, 10, "c") for key in range(3)]})
    hop.bronze.append({"t": [{"op": "d", "key": 0, "at": 20}]})
    hop.silver()
    (old,) = Path(hop.layout.deletes(bronze_rows.DB, "t").path or "").glob("*.parquet")
    hop.bronze.append({"t": [{"op": "d", "key": 1, "at": 40}, document(3, 50, "c")]})
    hop.silver()
    old.unlink()
    hop.bronze.append({"t": [document(1, 35, "r"), document(2, 35, "r"), document(4, 45, "r")]})
    hop.silver()
    assert sorted(row["_id"] for row in hop.rows("t")) == [2, 3, 4]


def test_a_drop_that_overtook_a_snapshots_rows(hop: Hop) -> None:
    """Silver applies the drop before it knows the collection. Rows that were read before the drop are removed all the same."""
    hop.bronze.append({"other": [{"op": "c", "key": 1, "at": 10, "after": {"_id": 1}}], "late": [{"drop": 50}]})
    hop.silver()
    read = [{"op": "r", "key": key, "at": 20, "after": {"_id": key}} for key in (1, 2)]
    hop.bronze.append({"late": [*read, {"op": "c", "key": 3, "at": 60, "after": {"_id": 3}}]})
    hop.run()
    assert [row["_id"] for row in hop.documents("late")] == [3]


def test_a_drop_that_the_stream_comes_to_after_a_snapshots_end(hop: Hop) -> None:
    """The snapshot has already swept. A drop from before its end still removes events from before the drop that arrive late."""
    hop.bronze.append({"late": [{"op": "r", "key": 2, "at": 100, "after": {"_id": 2}}, {"sweep": 100}]})
    hop.silver()
    hop.bronze.append({"late": [{"op": "c", "key": 1, "at": 80, "after": {"_id": 1}}, {"drop": 90}]})
    hop.run()
    assert [row["_id"] for row in hop.documents("late")] == [2]


def test_a_replacement_that_the_stream_comes_to_after_a_snapshots_end(hop: Hop) -> None:
    """The snapshot read the new collection and has swept. What the old one held until it was replaced comes late, and no event removes
    it but the replacement's own sweep."""
    hop.bronze.append({"late": [{"op": "r", "key": 2, "at": 100, "after": {"_id": 2}}, {"sweep": 100}]})
    hop.silver()
    hop.bronze.append({"late": [{"op": "c", "key": 1, "at": 80, "after": {"_id": 1}}]})
    hop.silver()
    replaced = {"sweep": 90, "type": "replaced"}
    hop.bronze.append({"late": [{"op": "r", "key": 2, "at": 120, "after": {"_id": 2}}, replaced]})
    hop.run()
    assert [row["_id"] for row in hop.documents("late")] == [2]


def test_an_update_that_overtook_a_snapshots_document_is_folded_onto_it(spark: SparkSession, lakehouse: Path) -> None:
    """Changes were lost, and a snapshot reads the documents again. The update of one comes before the document that was read before it:
    the row had been made from a document that lacks the lost changes.

    Documents that were replaced or deleted after the snapshot's read do not go back.
    """
    hop = Hop(spark, pipeline(lakehouse, {"t": {"history": True}}, **{"keep.document": True}))
    hop.bronze.append({"t": [document(key, 10, "c", v=1, lost="no") for key in range(5)]})
    hop.run()
    later = [{"op": "u", "key": key, "at": 60, "update": {"v": 2}} for key in (1, 2)]
    hop.bronze.append({"t": [document(2, 58, v=1, lost="new"), {"op": "d", "key": 3, "at": 57}, *later]})
    hop.run()
    read = [document(key, 55, "r", v=1, lost="yes") for key in range(5)]
    hop.bronze.append({"t": [*read, {"op": "u", "key": 4, "at": 70, "update": {"v": 3}}, {"sweep": 55}]})
    hop.run()
    found = {0: (1, "yes"), 1: (2, "yes"), 2: (2, "new"), 4: (3, "yes")}
    rows = {row["_id"]: (row["v"], row["lost"]) for row in hop.rows("t")}
    assert rows == {row["_id"]: (row["v"], row["lost"]) for row in hop.documents("t")} == found
    versions = table_rows(spark, hop.layout.gold(bronze_rows.DB, "t_history"))
    assert {row["_id"]: (row["v"], row["lost"]) for row in versions if row["valid_to"] is None} == found


def test_an_incomplete_row_that_holds_a_later_state_awaits_the_document_of_a_snapshot(
    spark: SparkSession, lakehouse: Path
) -> None:
    """Changes were lost, and a snapshot reads the documents again. The update that shows it comes after another one that could be folded, and
    both before the document that was read before them: the row already holds a later state than that document, but not the whole."""
    hop = Hop(spark, pipeline(lakehouse, **{"keep.document": True}))
    hop.bronze.append({"t": [document(1, 10, "c", v=1), document(2, 10, "c", v=1)]})
    hop.run()
    first, second = {"op": "u", "at": 60, "update": {"v": 2}}, {"op": "u", "at": 65, "update": {"lost.b": 3}}
    hop.bronze.append({"t": [{"key": 1, **first}, {"key": 2, **first}]})
    hop.run()
    hop.bronze.append({"t": [{"key": 1, **second}, {"key": 2, **second}]})
    hop.run()
    hop.bronze.append({"t": [document(key, 55, "r", v=1, lost={"a": 1}) for key in (1, 2)] + [{"sweep": 55}]})
    hop.run()
    hop.bronze.append({"t": [{"op": "u", "key": 2, "at": 70, "update": {"v": 4}}]})
    hop.run()
    rows = {row["_id"]: (row["v"], row["lost"], row.get("__incomplete", False)) for row in hop.rows("t")}
    assert rows == {1: (2, {"a": 1, "b": 3}, False), 2: (4, {"a": 1, "b": 3}, False)}


def test_a_document_from_before_a_delete_is_no_base_of_a_later_one(spark: SparkSession, lakehouse: Path) -> None:
    """Where deleted rows stay and inserts are skipped, the update of a document that was inserted again makes it an incomplete row. What a
    snapshot had read before the delete comes late, alone or with the update: it is of the deleted document."""
    chosen = {"keep.document": True, "delete.tombstone.handling.mode": "rewrite"}
    hop = Hop(spark, pipeline(lakehouse, **chosen))
    hop.bronze.append({"t": [document(key, 10, "c", v=1, old=1) for key in (1, 2, 3)]})
    hop.run()
    deletes, updates = (
        [{"key": key, **event} for key in (1, 3)]
        for event in ({"op": "d", "at": 57}, {"op": "u", "at": 60, "update": {"v": 2}})
    )
    hop.bronze.append({"t": [*deletes, updates[0]]})
    hop.run()
    hop.bronze.append({"t": [*(document(key, 55, "r", v=1, old=1) for key in (1, 2, 3)), updates[1]]})
    hop.run()
    told = ("v", "old", "__incomplete", "__deleted")
    rows = {row["_id"]: tuple(row.get(name, False) for name in told) for row in hop.rows("t") if "_id" in row}
    assert rows == {2: (1, 1, False, False)}
    assert [row["_id"] for row in hop.documents("t")] == [2]


def test_a_document_that_comes_late_is_no_base_of_what_waits_in_quarantine(spark: SparkSession, lakehouse: Path) -> None:
    """What a snapshot has read before an event that cannot be read gets the updates before that event. The others come with the replay."""
    hop = Hop(spark, pipeline(lakehouse, **{"keep.document": True}))
    hop.bronze.append({"t": [document(key, 10, "c", v=1) for key in (1, 2)]})
    hop.run()
    updates = [{"op": "u", "key": key, "at": 17, "update": {"x": 1}} for key in (1, 2)]
    unreadable = [{"op": "u", "key": 1, "at": 20, "text": "{"}, {"op": "u", "key": 2, "at": 20, "update": "{"}]
    hop.bronze.append({"t": [*updates, *unreadable, {"op": "u", "key": 1, "at": 30, "update": {"y": 1}}]})
    hop.run()
    hop.bronze.append({"t": [document(key, 15, "r", v=1, lost=1) for key in (1, 2)]})
    hop.run()

    def rows() -> list[tuple[Any, ...]]:
        return [tuple(row.get(name) for name in ("v", "x", "y", "lost", "__incomplete")) for row in hop.rows("t")]

    assert rows() == [(1, 1, None, 1, True)] * 2
    held = {
        each.key: each.resume_token for each in quarantine.listed(spark, hop.layout.quarantine(bronze_rows.DB, "t"), most=2)
    }
    corrections = {held["1"]: {"after": '{"_id":1,"v":2}'}, held["2"]: {"updatedFields": '{"y":2}'}}
    namespace = (bronze_rows.DB, "t")
    quarantine.replay(spark, hop.layout, name="hand", namespace=namespace, corrections=corrections, now_ms=5)
    hop.run()
    assert rows() == [(2, None, 1, None, None), (1, 1, 2, 1, True)]


KILLS = [
    (silver.registry, "note", False),
    (silver.registry, "note", True),
    (schemas, "append", False),
    (schemas, "append", True),
    (Writer, "alter", True),
    (deletes, "remember", True),
    (Writer, "merge", False),
    (Writer, "merge", True),
    (Writer, "upsert", False),
    (Writer, "upsert", True),
    (Writer, "mark", True),
]


@pytest.mark.journey
def test_killed_anywhere(spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill before or after any step of silver and gold, the next run gives the same result as without the kill.

    All steps are those of Spark. A late event in each batch needs a MERGE in silver; gold replaces its rows without one.
    """
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", -1)
    monkeypatch.setattr(gold_small_batch.SourceFiles, "of", lambda *_: None)
    hop = Hop(spark, pipeline(lakehouse))
    wanted: dict[int, Row] = {}
    for number, (owner, name, after) in enumerate(KILLS):
        at, is_killed = 100 * number + 101, False
        events = [document(number, at, "c", **{f"f{number}": number}), document(0, at + 1, v=number)]
        events += [document(1000, at - 150 if number else 2, v=-number)]  # older than the batch before
        if number:
            events += [{"op": "d", "key": number - 1, "at": at + 2}] if number - 1 else []
        hop.bronze.append({ORDERS: events, f"other{number}": [document(1, at, "c")]})
        for job in (hop.silver, hop.gold):
            with pytest.MonkeyPatch.context() as patch:
                killing(patch, owner, name, after=after)
                try:
                    job()
                except Killed:
                    is_killed = True
            forget_claims(hop)
            job()
        assert is_killed, (name, after)
        wanted = {number: {"_id": number, f"f{number}": number}, 0: {"_id": 0, "v": number}}
        wanted[1000] = {"_id": 1000, "v": -number}
        assert {row["_id"]: {n: v for n, v in row.items() if n != "__key"} for row in hop.documents(ORDERS)} == wanted
        assert hop.documents(f"other{number}") == [{"_id": 1, "__key": "1"}]


def test_a_second_writer_changes_nothing(hop: Hop) -> None:
    """While another run holds a table, silver and gold stop with TableOwned and commit nothing."""
    hop.bronze.append({ORDERS: [document(1, 10, "c")]})
    hop.run()
    hop.bronze.append({ORDERS: [document(1, 20, v=2)]})
    for job, ref in ((hop.silver, hop.silver_table(ORDERS)), (hop.gold, hop.gold_table(ORDERS))):
        owner = Writer.claim(hop.spark, ref)
        before = table_history.version(hop.spark, ref)
        with pytest.raises(errors.TableOwned):
            job()
        assert table_history.version(hop.spark, ref) == before
        owner.release()
        job()
    assert hop.documents(ORDERS) == [{"_id": 1, "v": 2, "__key": "1"}]


def test_ranges_are_bounded(spark: SparkSession, lakehouse: Path) -> None:
    """A long backlog is cut into ranges of at most `max.batch.events`, with the same result."""
    hop = Hop(spark, pipeline(lakehouse, **{"max.batch.events": 4}))
    hop.bronze.append({ORDERS: [document(n % 3, n + 1, v=n) for n in range(12)]}, batches=4)
    hop.silver()
    applied = [c.metadata["to"] for c in table_history.newest_first(spark, hop.silver_table(ORDERS)) if c.metadata]
    assert sorted({to for to in applied if to}) == [1, 2, 3, 4]
    assert [row["v"] for row in hop.rows(ORDERS)] == [9, 10, 11]


@pytest.mark.journey
def test_a_restored_silver_table_goes_on_from_there(hop: Hop) -> None:
    """After a RESTORE silver applies the events after the restored version again, and gold follows."""
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1), document(2, 11, "c", v=1)]})
    hop.run()
    version = table_history.version(hop.spark, hop.silver_table(ORDERS))
    hop.bronze.append({ORDERS: [document(1, 20, v=2), {"op": "d", "key": 2, "at": 21}]})
    hop.run()
    hop.spark.sql(f"RESTORE TABLE {hop.silver_table(ORDERS)} TO VERSION AS OF {version}")
    hop.gold()
    assert [row["v"] for row in hop.documents(ORDERS)] == [1, 1]
    hop.run()
    assert hop.documents(ORDERS) == [{"_id": 1, "v": 2, "__key": "1"}]


def test_two_pipelines_share_a_lakehouse(spark: SparkSession, lakehouse: Path) -> None:
    """Each only knows its own collections, and finds them in the batches of its own bronze."""
    first, second = (Hop(spark, pipeline(lakehouse, name=name), log=name) for name in ("first", "second"))
    first.bronze.append({"a": [document(n, 10 + n, "c") for n in range(3)]}, batches=3)
    assert first.silver().events == 3
    second.bronze.append({"b": [document(1, 10, "c")]})
    assert [each.namespace for each in second.silver().collections] == ["cases.b"]
    assert [each.namespace for each in second.gold().collections] == ["cases.b"]
    second.bronze.append({"a": [document(1, 20, "c")]})
    with pytest.raises(errors.DecisionNeeded, match=r"cases\.a: .* another pipeline captures the same collection"):
        second.silver()
    assert len(first.rows("a")) == 3


@pytest.mark.journey
def test_a_bronze_that_was_made_anew(spark: SparkSession, lakehouse: Path) -> None:
    """Batch numbers of a new bronze are unrelated to those of the old one: silver stops until a rebuild."""
    old = Hop(spark, pipeline(lakehouse), log="old")
    old.bronze.append({ORDERS: [document(n, 10 + n, "c", v=1) for n in range(4)]}, batches=4)
    old.run()
    shutil.rmtree(str(old.layout.bronze("hand").path))
    new = Hop(spark, pipeline(lakehouse), log="new")
    new.bronze.append({ORDERS: [document(n, 30 + n, "r", v=2) for n in range(3)], "later": [document(1, 30, "r")]})
    with pytest.raises(errors.DecisionNeeded, match=r"cases\.orders: .* medallion rebuild"):
        new.silver()
    name = f"{bronze_rows.DB}.{ORDERS}"
    assert rebuild.run(spark, new.settings, collection=name).comparison.lost_keys == ("3",)
    rebuild.run(spark, new.settings, collection=name, drops_lost=True)
    new.bronze.append({ORDERS: [document(9, 40, "c", v=2)]})
    new.run()
    assert [(row["_id"], row["v"]) for row in new.documents(ORDERS)] == [(0, 2), (1, 2), (2, 2), (9, 2)]
    assert len(new.rows("later")) == 1, "a collection that the old one had not"


def test_idle_collections_cost_nothing(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection without events gets no commit until its position is far behind; then the position moves."""
    hop.bronze.append({"busy": [document(1, 10, "c")], "idle": [document(1, 11, "c")]})
    hop.silver()
    before = table_history.version(hop.spark, hop.silver_table("idle"))
    hop.bronze.append({"busy": [document(1, 20)]})
    hop.silver()
    assert table_history.version(hop.spark, hop.silver_table("idle")) == before
    monkeypatch.setattr(registry, "IDLE_BATCHES", 2)
    hop.bronze.append({"busy": [document(1, 30)]})
    hop.silver()
    assert registry.silver_position(hop.spark, hop.silver_table("idle")).to == 3


@pytest.mark.journey
def test_a_start_reads_no_batch_that_all_collections_have_behind_them(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions of idle collections do not move, but their batches are not read again. A table that was restored to an older version
    gets its events again.
    """
    spans: list[BatchRange] = []
    surveyed = survey.surveyed

    def noted(*arguments: Any, **named: Any) -> Any:
        spans.append(arguments[2])
        return surveyed(*arguments, **named)

    monkeypatch.setattr(survey, "surveyed", noted)
    hop.bronze.append({"busy": [document(1, 10, "c")], "idle": [document(1, 11, "c")]})
    hop.silver()
    hop.bronze.append({"idle": [document(2, 12, "c")]})
    hop.silver()
    hop.bronze.append({"busy": [document(1, 20)]})
    hop.silver()
    assert [span.after for span in spans] == [0, 1, 2]
    idle = hop.silver_table("idle")
    first = max(
        commit.version for commit in table_history.newest_first(hop.spark, idle) if (commit.metadata or {}).get("to") == 1
    )
    hop.spark.sql(f"RESTORE TABLE {idle} TO VERSION AS OF {first}").collect()
    assert len(hop.rows("idle")) == 1
    hop.bronze.append({"busy": [document(1, 40)]})
    hop.silver()
    assert len(hop.rows("idle")) == 2
    assert [span.after for span in spans] == [0, 1, 2, 1]


@pytest.mark.journey
def test_continuous_until_stopped(hop: Hop) -> None:
    """Without `once`, silver and gold run until they are stopped, and then release their tables."""
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1)]})
    stop = threading.Event()
    results: list[Any] = []
    sessions = sparks.sessions(hop.spark)
    until = functools.partial(processes.until, seconds=240, what="the documents in gold")

    def body(job: Any) -> None:
        results.append(job.run(sessions(), hop.settings, once=False, sessions=sessions, stop=stop, pause_seconds=0.1))

    threads = [threading.Thread(target=body, args=(job,)) for job in (silver, gold)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: hop.documents(ORDERS) == [{"_id": 1, "v": 1, "__key": "1"}])
        hop.bronze.append({ORDERS: [document(1, 20, v=2)], "new": [document(5, 21, "c")]})
        until(lambda: hop.documents(ORDERS) == [{"_id": 1, "v": 2, "__key": "1"}] and bool(hop.documents("new")))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(results) == 2
    for ref in (hop.silver_table(ORDERS), hop.gold_table(ORDERS)):
        last = table_history.last_commit(hop.spark, ref)
        assert last is not None and last.metadata is not None and last.metadata.get("released")


@pytest.mark.journey
@pytest.mark.parametrize("place", [Environment.DISK, Environment.STATEMENTS])
def test_many_events_at_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Environment
) -> None:
    """Many events are typed by the current schema. If an event would change the schema or is unreadable, this is handled before the
    commit.
    """
    with environments.session(spark, place) as session:
        _apply_many(session, tmp_path, monkeypatch)


def _apply_many(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_DRIVER_ROWS", 3)
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", -1)
    looks, look, hop = [], evolve.evolve, Hop(spark, pipeline(tmp_path))
    monkeypatch.setattr(evolve, "evolve", lambda *given, **named: looks.append(hop.bronze.batch) or look(*given, **named))

    def applied(*events: Row) -> list[Row]:
        before = [] if hop.bronze.batch == 0 else [*table_history.newest_first(spark, hop.silver_table("many"))]
        hop.bronze.append({"many": list(events)})
        hop.silver()
        writes = [
            commit
            for commit in [*table_history.newest_first(spark, hop.silver_table("many"))][: -len(before) or None]
            if commit.metadata
        ]
        assert [commit.metadata["to"] for commit in writes if commit.metadata][0] == hop.bronze.batch
        return [{name: value for name, value in row.items() if name != "__sequence"} for row in hop.rows("many")]

    def document(key: int, **values: Any) -> Row:
        return {"_id": key, "n": key, "deep": {"items": [{"price": 1.5}]}, "nothing": None, "empty": [], **values}

    def row(key: int, **values: Any) -> Row:
        return {
            "_id": key,
            "n": key,
            "deep": {"items": [{"price": 1.5}]},
            "__key": str(key),
            "__rescued": {"empty": "[]"},
            **values,
        }

    created = [{"op": "c", "key": key, "at": 10 + key, "after": document(key)} for key in range(1, 6)]
    assert applied(*created) == [row(key) for key in range(1, 6)]
    fits = [{"op": "u", "key": key, "at": 20 + key, "after": document(key, n=key + 10)} for key in range(1, 4)]
    misfit = {"op": "u", "key": 1, "at": 30, "after": document(1, n="x")}
    rescued = {"__rescued": {"empty": "[]", "n": '"x"'}}
    told = row(1, **rescued)
    del told["n"]
    gone = {"op": "d", "key": 5, "at": 31}
    assert applied(*fits, misfit, gone) == [told, row(2, n=12), row(3, n=13), row(4)]
    wider = [
        {"op": "u", "key": key, "at": 40 + key, "after": document(key, n={"$numberLong": "5"}, new=key)}
        for key in (1, 2, 3, 4)
    ]
    assert applied(*wider) == [row(key, n=5, new=key) for key in range(1, 5)]
    held = {"op": "u", "key": 1, "at": 51, "text": '{"_id":1'}
    last = [{"op": "u", "key": key, "at": 50 + key, "after": document(key)} for key in (2, 3, 4)]
    assert applied(held, *last) == [row(1, n=5, new=1, __incomplete=True), *(row(key) for key in (2, 3, 4))]
    # Not for the second batch, and twice for the one with a held event; the first one creates the table.
    assert [batch for batch in looks if batch > 1] == [3, 4, 4]
