"""Maintenance of real tables: what is removed, what stays, and that no position is lost."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from cdc_core.snapshot import state as snapshot_state
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.bronze import registry
from pipelines.delta import live_files, maintenance, ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import history_position
from pipelines.gold import run as gold
from pipelines.operations import cut, maintain, rebuild
from pipelines.silver import run as silver
from pipelines.spark import parallel
from pipelines.verify import run as verify
from tests.harness import bronze_rows, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 86_400


def settings(root: Path, **sections: Any) -> Any:
    from cdc_core.settings import parse

    return parse.parse(
        {
            "name": "shop",
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "mongodb://localhost"},
            **sections,
        }
    )


NAME = 'cases.it\'s "a" $name'
WITHOUT_END = snapshot_state.SnapshotState("s1", (NAME, "cases.failed"), kind=snapshot_state.SnapshotKind.INCREMENTAL)
CHUNKS = [WITHOUT_END.begun()] + [
    WITHOUT_END.advanced(name, snapshot_state.CollectionState(chunks=chunks, hi=b"\5\0\0\0\0", **ended)).progress(name)
    for name, chunks, ended in (
        (NAME, 1, {}),
        ("cases.failed", 1, {"failed": "why"}),
        (NAME, 2, {}),
        ("cases.failed", 2, {}),
        (NAME, 3, {"completed": True}),
    )
]
KEPT = [CHUNKS[0], CHUNKS[2], *CHUNKS[4:]]
"""A snapshot's plan and the heartbeats of its chunks, without those that later heartbeats replace."""


def maintained(spark: SparkSession, chosen: Any) -> maintain.MaintenanceResult:
    """The result of one run in which no table failed."""
    found = maintain.run(spark, chosen, failures=(failures := parallel.Failures()))
    failures.raised()
    return found


def applied(spark: SparkSession, chosen: Any) -> None:
    for layer in (silver, gold):
        layer.run(spark, chosen, sessions=sessions.kept(spark))


def positions(spark: SparkSession, chosen: Any) -> list[Any]:
    layout = delta.layout(chosen.lakehouse)
    found = [
        table_history.standing(spark, table(bronze_rows.DB, "things")).position for table in (layout.silver, layout.gold)
    ]
    return [(each.metadata["to"], each.metadata.get("generation")) for each in found if each and each.metadata]


def held(spark: SparkSession, table: Any) -> list[dict[str, Any]]:
    """A table's rows, without a query."""
    live = live_files.LiveFiles(Path(table.path or ""))
    assert live.move_to(table_history.version(spark, table))
    found: list[dict[str, Any]] = live.rows(live.files()).to_pylist()
    return found


def rows(spark: SparkSession, table: Any) -> list[Any]:
    return sorted(map(str, held(spark, table)))


def test_old_events_go_up_to_the_batch_that_each_collection_is_applied_to(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are removed day by day, and all other rows stay. If a day fails, nothing else is removed from bronze either."""
    chosen = settings(lakehouse, maintenance={"bronze.retention.days": 1})
    table = delta.layout(chosen.lakehouse).bronze("shop")
    log = bronze_rows.Log(spark, table, is_timed=True)
    names = ("it's", "a.b", "kept")
    for number in range(1, 5):
        log.append({name: [{"op": "c", "key": f"k{number}", "at": number, "after": {"_id": number}}] for name in names})
        log.idle("transaction")
    applied = {registry.Namespace(bronze_rows.DB, "it's"): 5, registry.Namespace(bronze_rows.DB, "a.b"): 3}
    monkeypatch.setattr(maintain._MaintenanceRun, "_trimmed", lambda *given: applied)
    monkeypatch.setattr(maintain, "IDLE_ROWS", "false")
    monkeypatch.setattr(maintain, "DAY_MS", 1)  # each batch counts as a day
    before = rows(spark, table)
    now_ms = int(time.time() * 1000) + 2 * DAY * 1000
    words, deleted, days = maintain._ResultLines(), maintenance.delete_claimed, []
    run = maintain._MaintenanceRun(spark, chosen, beside_writers=False, now_ms=now_ms)

    def second_refused(writer: Writer, where: str, among: str | None = None) -> int:
        days.append(among)
        if len(days) == 2:
            raise errors.CommitConflict("refused")
        return deleted(writer, where, among)

    altered = Writer.alter

    def interrupted(writer: Writer, change: str) -> None:
        monkeypatch.setattr(Writer, "alter", altered)
        altered(writer, change)
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "alter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run._trim(table, words)
    assert delta.properties(spark, table)["delta.appendOnly"] == "true"
    monkeypatch.setattr(maintenance, "delete_claimed", second_refused)
    for _ in range(2):
        run._trim(table, words)
        assert delta.properties(spark, table)["delta.appendOnly"] == "true"
    to = {each.collection: batch for each, batch in applied.items()}
    assert not [row for row in held(spark, table) if row["batch"] < to.get(row["collection"], 0)]
    assert days == ["batch >= 1 AND batch <= 1", *["batch >= 3 AND batch <= 3"] * 2, None]
    assert words.done == ["1 events older than 1 days removed"]
    assert len(rows(spark, table)) == len(before) - 3 and set(rows(spark, table)) <= set(before)


@pytest.mark.journey
def test_tables_are_compacted_and_what_is_old_goes(spark: SparkSession, lakehouse: Path) -> None:
    """Many files become few. Old facts are removed, and bronze's events are removed up to the batch that all layers have applied. Rows and
    positions stay, and a rebuild asks for a snapshot. A table with a running writer is skipped with a message, or compacted without its
    claim. With a longer retention bronze still records up to when it was trimmed.
    """
    chosen = settings(
        lakehouse, maintenance={"bronze.retention.days": 1, "ops.retention.days": 1, "deletes.retention.days": 1}
    )
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze("shop"))
    for number in range(2):
        log.append(
            {
                "things": [
                    {"op": "c", "key": f"k{number}", "at": 10 + number, "after": {"_id": f"k{number}", "n": number}},
                    {"op": "d", "key": "gone", "at": 10 + number},
                    {
                        "op": "c",
                        "key": "odd",
                        "at": 10 + number,
                        **([{"text": "{odd"}, {"after": {"_id": "odd", "n": 5}}][number]),
                    },
                ],
                **({"others": [{"op": "c", "key": "odd", "at": 10, "text": "{odd"}]} if number else {}),
            }
        )
        applied(spark, chosen)
        if not number:
            log.idle("heartbeat", "transaction", "schema_change")
            for payload in CHUNKS:
                log.idle("heartbeat", payload=json.dumps(payload, separators=(",", ":")))
    _noted(spark, chosen, days_ago=(0, 30))
    dismissed, waiting = (layout.quarantine(bronze_rows.DB, name) for name in ("things", "others"))
    assert spark.table(str(dismissed)).count() == 2
    silver_table, gold_table = layout.silver(bronze_rows.DB, "things"), layout.gold(bronze_rows.DB, "things")
    before = (positions(spark, chosen), rows(spark, silver_table), rows(spark, gold_table))
    held = Writer.claim(spark, gold_table)
    found = {each.table: each for each in maintained(spark, chosen).tables}
    assert "its writer is running" in found[gold_table.label].left[0]
    maintaining = maintain._MaintenanceRun(spark, chosen, beside_writers=True, now_ms=int(time.time() * 1000))
    (beside,) = [each for each in maintaining.tables(None) if each.ref == gold_table]
    assert maintaining.maintained(beside).after.files == 1
    held.release()
    assert (positions(spark, chosen), rows(spark, silver_table), rows(spark, gold_table)) == before
    assert found[silver_table.label].after.files == 1 < found[silver_table.label].before.files
    left = spark.table(str(layout.bronze("shop")))
    assert {row.batch for row in left.where("kind = 'change'").collect()} == {9}
    assert [row.kind for row in left.where("batch = 2").collect()] == ["schema_change"]
    assert bronze.newest(spark, layout.bronze("shop")).batch == 9
    assert bronze.snapshot_heartbeats(spark, layout.bronze("shop")) == KEPT
    assert snapshot_state.states(CHUNKS) == snapshot_state.states(KEPT)
    deletes = layout.deletes(bronze_rows.DB, "things")
    assert (spark.table(str(deletes)).count(), delta.properties(spark, deletes)[registry.FORGOTTEN_TO]) == (0, "9")
    assert [spark.table(str(layout.ops(name))).count() for name in ("verifications", "cuts")] == [1, 1]
    assert [spark.table(str(table)).count() for table in (dismissed, waiting)] == [0, 1]
    assert (Path(silver_table.label) / "_delta_log" / "_last_checkpoint").exists()
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
        rebuild.run(spark, chosen, collection=f"{bronze_rows.DB}.things")
    log.append({"things": [{"op": "c", "key": "new", "at": 50, "after": {"_id": "new", "n": 9}}]})
    applied(spark, chosen)
    assert [row["n"] for row in spark.table(str(gold_table)).orderBy("n").collect()] == [0, 1, 5, 9]
    assert registry.silver_position(spark, silver_table).to == 10
    trimmed = delta.properties(spark, layout.bronze("shop"))[bronze.TRIMMED]
    maintained(spark, settings(lakehouse, maintenance={"bronze.retention.days": 2}))
    events = spark.table(str(layout.bronze("shop"))).where("kind = 'change' AND collection = 'things'")
    assert [row.batch for row in events.collect()] == [10]
    assert delta.properties(spark, layout.bronze("shop"))[bronze.TRIMMED] == trimmed


@pytest.mark.journey
def test_a_history_that_was_not_kept_knows_its_gap(spark: SparkSession, lakehouse: Path) -> None:
    """Events of the time without a history were removed from bronze. If the history is switched on again, it waits for a snapshot, which
    ends the versions of missing documents. While the capture runs nothing is removed, and there is no gap.
    """

    def chosen(**defaults: Any) -> Any:
        return settings(lakehouse, maintenance={"bronze.retention.days": 1}, silver={"defaults": defaults})

    layout = delta.layout(chosen().lakehouse)
    log = bronze_rows.Log(spark, layout.bronze("shop"))
    log.append({"things": [{"op": "c", "key": key, "at": 10, "after": {"_id": key}} for key in (1, 2)]})
    applied(spark, chosen(history=True))
    log.append({"things": [{"op": "d", "key": 1, "at": 20}]})
    log.append({"things": [{"op": "u", "key": 2, "at": 30, "after": {"_id": 2}}]})
    applied(spark, chosen())
    capture = Writer.claim(spark, layout.bronze("shop"))
    maintained(spark, chosen())
    assert not history_position.position(spark, layout.history(bronze_rows.DB, "things")).has_gap
    capture.release()
    maintained(spark, chosen())
    log.append({"things": [{"op": "r", "key": 2, "at": 40, "after": {"_id": 2}}]})
    for _ in range(2):
        with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
            applied(spark, chosen(history=True))
    spark.sql(f"ALTER TABLE {layout.bronze('shop')} SET TBLPROPERTIES ('{bronze.TRIMMED}' = '4')").collect()
    log.append({"things": [{"sweep": 40}]})
    applied(spark, chosen(history=True))
    versions = spark.table(str(layout.history(bronze_rows.DB, "things")))
    assert [row["_id"] for row in versions.where("`__until` IS NULL").collect()] == [2]


@pytest.mark.journey
def test_a_capture_of_this_process_goes_on_between_what_is_taken(spark: SparkSession, tmp_path: Path) -> None:
    """`medallion run` always holds bronze: old events are removed day by day, with the capture's own claim."""
    chosen = settings(tmp_path, maintenance={"bronze.retention.days": 1})
    table = delta.layout(chosen.lakehouse).bronze("shop")
    log = bronze_rows.Log(spark, table)
    for number in range(4):
        log.append({"things": [{"op": "c", "key": number, "at": 10 + number, "after": {"_id": number}}]})
    applied(spark, chosen)
    spark.sql(f"UPDATE {table} SET ts_ms = batch * {maintain.DAY_MS}")
    capture = bronze.BronzeLog.open(spark, table)
    done = maintain.run(spark, chosen, beside_writers=True, capture=capture, failures=parallel.Failures())
    assert "3 events older than 1 days removed" in done.tables[0].done
    position = capture.heartbeat({}, token="token-5", ts_ms=1)
    assert position == bronze.BronzePosition("token-5", 5, 5)
    assert [row.batch for row in spark.table(str(table)).orderBy("batch").collect()] == [4, 5]
    said = delta.properties(spark, table)
    assert (said["delta.appendOnly"], said[bronze.TRIMMED_TO]) == ("true", "3")
    capture.close()
    failures = parallel.Failures()
    log.batch, log.offset = 5, 5
    log.append({"things": [{"op": "c", "key": 9, "at": 20, "after": {"_id": 9}}]})
    applied(spark, chosen)
    maintain.run(spark, chosen, beside_writers=True, capture=capture, failures=failures)
    assert isinstance(failures.by_name[table.label], errors.Temporary)


@pytest.mark.journey
def test_a_capture_that_comes_during_a_compaction_is_not_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path)
    log = bronze_rows.Log(spark, delta.layout(chosen.lakehouse).bronze("shop"))
    for number in range(2):
        log.append({"things": [{"op": "c", "key": number, "at": 10 + number, "after": {"_id": number}}]})
    optimized, came = maintenance.optimize, []

    def optimize(session: SparkSession, table: tables.TableRef, **options: Any) -> None:
        if table == log.table:
            writer = Writer.claim(session, table)
            came.append(writer)
            writer.release()
        optimized(session, table, **options)

    monkeypatch.setattr(maintenance, "optimize", optimize)
    (found,) = [each for each in maintained(spark, chosen).tables if each.kind is maintain.TableKind.BRONZE]
    assert came and found.after.files == 1


@pytest.mark.journey
def test_nothing_goes_from_a_bronze_that_no_layer_has_read(spark: SparkSession, tmp_path: Path) -> None:
    """Silver has applied batches of the previous bronze, whose numbers are greater."""
    chosen = settings(tmp_path, maintenance={"bronze.retention.days": 1, "deletes.retention.days": 1})
    table = delta.layout(chosen.lakehouse).bronze("shop")
    first = bronze_rows.Log(spark, table, log="first")
    for number in range(4):
        kept = {"op": "c", "key": f"k{number}", "at": 10 + number, "after": {"_id": f"k{number}"}}
        first.append({"things": [kept, {"op": "d", "key": number, "at": 10 + number}]})
    applied(spark, chosen)
    shutil.rmtree(tmp_path / "bronze")
    second = bronze_rows.Log(spark, table, log="second")
    for number in range(2):
        second.append({"things": [{"op": "c", "key": number, "at": 20 + number, "after": {"_id": number}}]})
    maintained(spark, chosen)
    assert spark.table(str(table)).where("kind = 'change'").count() == 2
    assert spark.table(str(delta.layout(chosen.lakehouse).deletes(bronze_rows.DB, "things"))).count() == 4


@pytest.mark.journey
def test_a_log_is_not_cleaned_up_behind_a_compaction(spark: SparkSession, tmp_path: Path) -> None:
    """A compaction's commit contains no position: the last position of a collection without events for weeks must stay in the log."""
    chosen = settings(tmp_path)
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze("shop"))
    for number in range(2):
        log.append({"things": [{"op": "c", "key": number, "at": 10 + number, "after": {"_id": number}}]})
        applied(spark, chosen)
    rebuild.run(spark, chosen, collection=f"{bronze_rows.DB}.things")
    applied(spark, chosen)
    log.append({"things": [{"op": "c", "key": 9, "at": 20, "after": {"_id": 9}}]})
    applied(spark, chosen)
    before = positions(spark, chosen)
    maintained(spark, chosen)
    for number, file in enumerate(sorted(tmp_path.rglob("_delta_log/0*"))):
        os.utime(file, (time.time() - 40 * DAY + number,) * 2)
    maintained(spark, chosen)
    assert before == positions(spark, chosen)
    assert [to for to, generation in before if generation] == [3, 3]


@pytest.mark.journey
def test_a_damaged_table_keeps_no_other_from_its_maintenance(spark: SparkSession, tmp_path: Path) -> None:
    """Bronze is not trimmed, because silver must say which updates it has folded. The other tables are compacted, and the error says what
    to do.
    """
    chosen = settings(tmp_path, maintenance={"bronze.retention.days": 1}, silver={"defaults": {"keep.document": True}})
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze("shop"))
    for number in range(2):
        events = [{"op": "c", "key": number, "at": 10 + number, "after": {"_id": number}}]
        log.append({"things": events, "others": events})
        applied(spark, chosen)
    for file in delta.data_files(spark, layout.silver(bronze_rows.DB, "others")) or []:
        (tmp_path / "silver" / bronze_rows.DB / "others" / file.name).unlink()
    failures = parallel.Failures()
    done = {each.table for each in maintain.run(spark, chosen, failures=failures).tables}
    with pytest.raises(errors.CollectionsFailed, match="medallion repair"):
        failures.raised()
    assert layout.silver(bronze_rows.DB, "things").label in done, "what was done to others is told all the same"
    assert layout.silver(bronze_rows.DB, "others").label not in done
    assert delta.size(spark, layout.silver(bronze_rows.DB, "things")).files == 1


@pytest.mark.journey
def test_what_was_compacted_once_is_not_written_anew(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction only rewrites files since the last one, not the whole table."""
    monkeypatch.setattr(maintenance, "CUBE_BYTES", 1, raising=False)
    log = bronze_rows.Log(spark, tables.TableRef.at(str(tmp_path / "log")))

    def appended() -> set[str]:
        for number in range(2):
            log.append({"things": [{"op": "c", "key": number, "at": 10, "after": {"_id": number}}]})
        maintenance.optimize(spark, log.table)
        return {file.name for file in delta.data_files(spark, log.table) or []}

    first, second = appended(), appended()
    assert len(first) == 1 and first < second and len(second) == 2


def _noted(spark: SparkSession, chosen: Any, *, days_ago: tuple[int, ...]) -> None:
    now = int(time.time())
    facts = [{"run": "x", "name": "shop", "at_ms": (now - days * DAY) * 1000} for days in days_ago]
    table = delta.layout(chosen.lakehouse).ops("verifications")
    ops_tables.note(spark, table, facts, verify.SCHEMA)
    cuts = [{"cut": "1-1", "made_ms": fact["at_ms"], "table": "things"} for fact in facts]
    ops_tables.note(spark, delta.layout(chosen.lakehouse).ops("cuts"), cuts, cut.SCHEMA)
