"""The rows of a range of batches are the same whether they are read from the files of recent commits or by Delta."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.bronze import columns
from cdc_core.bronze import event_rows as events
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows
from pipelines.bronze import log as bronze
from pipelines.delta import direct_log, maintenance, table_definition, table_history
from pipelines.delta import tables as delta
from pipelines.operations import cut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def log(spark: SparkSession, tmp_path: Path) -> Iterator[bronze.BronzeLog]:
    """A bronze table with six batches of one row each."""
    opened = bronze.BronzeLog.open(spark, tables.TableRef.at(str(tmp_path / "a b" / "bronze")))
    beat(opened, 6)
    yield opened
    with contextlib.suppress(errors.MedallionError):  # a test may have taken the table over
        opened.close()


def beat(log: bronze.BronzeLog, count: int) -> None:
    for number in range(count):
        log.heartbeat({"n": number}, token=f"82{log.commits:04}", ts_ms=number)


def check(log: bronze.BronzeLog, after: int, to: int, *, of_files: bool) -> None:
    """Check that the rows are those of the batches, and whether Spark read them from named files (`of_files`) instead of asking Delta."""
    found = batch_rows.rows(log.spark, log.table, BatchRange(after, to))
    assert found.columns == log.spark.table(str(log.table)).columns
    assert sorted(row.batch for row in found.collect()) == list(range(after + 1, to + 1))
    plan = found._jdf.queryExecution().optimizedPlan().toString()
    assert ("Filter" not in plan) == of_files


def test_the_last_commits_are_read_from_their_files(log: bronze.BronzeLog) -> None:
    check(log, 2, 6, of_files=True)
    check(log, 2, 4, of_files=True)
    log.renew()
    check(log, 5, 6, of_files=True)


def test_the_first_batches_are_read_from_their_files(log: bronze.BronzeLog) -> None:
    """The log's first commit shows that no earlier batches exist."""
    check(log, 0, 6, of_files=True)


def test_the_first_batches_are_asked_of_delta_where_the_log_has_lost_its_beginning(
    spark: SparkSession, log: bronze.BronzeLog
) -> None:
    """The log no longer shows that no earlier batches exist."""
    assert maintenance.checkpoint(spark, log.table)
    Path(log.table.path, "_delta_log", f"{0:020}.json").unlink()
    check(log, 0, 6, of_files=False)


def test_many_files_are_asked_of_delta(log: bronze.BronzeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rows, "MANY_FILES", 3)
    check(log, 2, 6, of_files=False)
    check(log, 3, 6, of_files=True)


def test_large_documents_are_read_by_executors(
    spark: SparkSession, log: bronze.BronzeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = batch_rows.few_rows(log.spark, log.table, BatchRange(0, 6), ["batch", "after"], limit=6)
    assert found is not None and found.num_rows == 6
    monkeypatch.setattr(batch_rows, "MANY_BYTES", 10)
    assert batch_rows.few_rows(log.spark, log.table, BatchRange(0, 6), ["batch", "after"], limit=6) is None


def test_files_of_other_values_are_left_out(log: bronze.BronzeLog) -> None:
    """Delta's statistics of a file are used as Delta uses them; a column without statistics excludes no file."""
    span = BatchRange(1, 6)
    assert len(batch_rows._files(log.table, span, {"kind": "heartbeat", "db": "shop"})) == 5
    assert not batch_rows._files(log.table, span, {"kind": "change"})


def test_what_was_compacted_is_not_read_twice(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """If a compacted file holds more than the range, Spark asks Delta, and this process picks the rows itself. Later commits are read as
    before.
    """
    maintenance.optimize(spark, log.table)
    check(log, 2, 6, of_files=False)
    for limit, among in ((4, None), (3, None), (4, {"kind": "heartbeat"})):
        found = batch_rows.few_rows(spark, log.table, BatchRange(2, 6), ["payload"], limit=limit, among=among)
        numbers = None if found is None else sorted(json.loads(text)["n"] for text in found["payload"].to_pylist())
        assert numbers == (None if limit == 3 else [2, 3, 4, 5])
    beat(log, 2)
    check(log, 6, 8, of_files=True)
    check(log, 5, 8, of_files=False)


def test_a_compaction_leaves_what_was_compacted_before(
    spark: SparkSession, log: bronze.BronzeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bronze's rows come in the order of its clustering. With a group of a gigabyte, a capture would rewrite a gigabyte of old events every
    few minutes.
    """
    monkeypatch.setattr(bronze, "COMPACT_EVERY", 3)
    monkeypatch.setattr(maintenance, "SMALL_CUBE_BYTES", 1, raising=False)  # of a gigabyte this would have to write one

    def compacted() -> set[str]:
        beat(log, 3)
        log.compact(lambda: spark)
        assert log._compaction is not None
        log._compaction.join()
        return {file.name for file in delta.data_files(spark, log.table) or []}

    first, second = compacted(), compacted()
    assert len(first) == 1 and first < second and len(second) == 2


def test_rows_that_others_appended_are_there(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """The rows are found even if a later claim still names the batch before them."""
    row = spark.table(str(log.table)).where("batch = 6").selectExpr("* EXCEPT (`batch`)", "batch + 1 AS batch")
    row.select(spark.table(str(log.table)).columns).write.format("delta").mode("append").save(log.table.path)
    log.close()
    again = bronze.BronzeLog.open(spark, log.table)
    beat(again, 1)
    check(again, 6, 8, of_files=False)
    beat(again, 1)
    check(again, 8, 9, of_files=True)
    again.close()


def test_a_restored_table_is_asked_of_delta(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """The log still names the files of the batches that the RESTORE removed."""
    restored(spark, log, batches=1)
    check(log, 2, 5, of_files=False)


def test_numbers_that_a_restore_took_back_do_not_come_again(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """Silver has already applied these numbers. A writer that was open during the RESTORE stops, and the next one continues after the last
    remaining row.
    """
    restored(spark, log, batches=2)
    with pytest.raises(errors.CommitConflict, match="restored"):
        beat(log, 1)
    for batch in (7, 8):
        again = bronze.BronzeLog.open(spark, log.table, take_over=True)
        assert again.position is not None
        assert (again.position.token, again.position.batch) == (("820003", 4) if batch == 7 else ("829999", 7))
        assert bronze.newest(spark, log.table) == bronze.BronzeHead(batch - 1, log.log)
        assert again.heartbeat({}, token="829999", ts_ms=1) == bronze.BronzePosition("829999", batch, batch - 3)
        again.close()


def test_the_position_never_goes_back(log: bronze.BronzeLog) -> None:
    """A heartbeat that began before another thread's commit keeps the token of that commit."""
    assert log.heartbeat({}, token="820009", ts_ms=1).token == "820009"
    assert log.heartbeat({}, token="820004", ts_ms=1).token == "820009"
    assert bronze.read_position(log.spark, log.table) == log.position


def test_a_renewal_says_which_stream_the_rows_are_of(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """The next start compares the recorded lists with its own, and so notices changed lists."""
    log.extra = {"stream": "those lists"}
    beat(log, 1)
    log.renew(complete="82")
    log.renew()
    last = table_history.last_commit(spark, log.table)
    assert last is not None and last.metadata is not None and last.metadata["stream"] == "those lists"


def test_bronze_keeps_its_log_id_where_the_commits_with_it_are_gone(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """While a capture is stopped for weeks, other commits are made and Delta cleans the log up. Silver must still recognize bronze by its
    log's ID.
    """
    log.close()
    spark.sql(f"ALTER TABLE {log.table} SET TBLPROPERTIES ('of.somebody' = '1')")
    direct = direct_log.of(spark, log.table)
    assert direct is not None and direct.checkpoint()
    commits = sorted(Path(log.table.label, "_delta_log").glob("*.json"))
    for commit in commits[:-1]:
        commit.unlink()
    assert table_history.last_commit(spark, log.table) is None
    again = bronze.BronzeLog.open(spark, log.table)
    assert (again.log, again.position) == (log.log, log.position)
    again.close()


def test_a_compaction_does_not_hide_how_far_the_capture_had_read(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """Maintenance after the capture's last commit adds no events, so a cut needs no new commit of the capture; a RESTORE removes events."""
    log.complete = "826B06ED3A00000004"
    log.close()
    assert cut._reached(spark, log.table) == ("6b06ed3a00000004", 6)
    spark.sql(f"OPTIMIZE {log.table}").collect()
    assert cut._reached(spark, log.table) == ("6b06ed3a00000004", 6)
    restored(spark, log, batches=5)
    assert cut._reached(spark, log.table)[0] is None


def test_a_start_makes_bronze_append_only_again(spark: SparkSession, log: bronze.BronzeLog) -> None:
    """A trim that was killed, or a person who restored it, left the table open to any DELETE."""
    log.close()
    spark.sql(f"ALTER TABLE {log.table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    again = bronze.BronzeLog.open(spark, log.table)
    assert delta.properties(spark, log.table)["delta.appendOnly"] == "true"
    beat(again, 1)
    assert bronze.newest(spark, log.table) == bronze.BronzeHead(7, log.log)


def restored(spark: SparkSession, log: bronze.BronzeLog, *, batches: int) -> None:
    """RESTORE the table to before its last batches."""
    version = table_history.version(spark, log.table)
    spark.sql(f"ALTER TABLE {log.table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    spark.sql(f"RESTORE TABLE {log.table} TO VERSION AS OF {version - batches}").collect()


def told(log: bronze.BronzeLog) -> tuple[object, ...]:
    """What a start reads from bronze."""
    return (
        bronze.read_position(log.spark, log.table),
        bronze.gap_and_snapshot_heartbeats(log.spark, log.table),
        bronze.notes(log.spark, log.table),
        bronze.handled_signals(log.spark, log.table),
        delta.properties(log.spark, log.table).get("delta.appendOnly"),
    )


def test_a_start_reads_from_files_what_spark_reads(
    spark: SparkSession, log: bronze.BronzeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position, snapshot progress, notes and signals are the same from files and from Spark, after the checkpoint of a compaction and
    after a RESTORE.
    """

    def check_both() -> None:
        here = told(log)
        with monkeypatch.context() as without:
            without.setattr(bronze.local_log, "files", lambda _: None)
            without.setattr(table_definition, "properties", lambda _: None)
            assert here == told(log)

    payloads = ({"snapshot": {"id": "1"}}, {"gap": {"from": "81"}}, {"stream": "x", "captured": ["a.b"]}, {"start": "82"})
    log.heartbeat(*payloads, token="829998", ts_ms=1)
    ended = events.EventRows("shop")
    for operation in ("drop", "dropIndexes"):
        row = events.OtherRow("829998", columns.RowKind.SCHEMA_CHANGE, {"operation": operation}, "a", operation)
        ended.mark(row)
    log.append(lambda batch, first: ended.table(batch=batch, first_offset=first, ts_ms=1))
    beat(log, 2)
    check_both()
    expected = [{"snapshot": {"id": "1"}}, {"gap": {"from": "81"}}, {"ended": "a.drop"}]
    assert told(log)[1] == expected and len(told(log)[2]) == 1
    maintenance.optimize(spark, log.table)
    beat(log, 1)
    assert maintenance.checkpoint(spark, log.table)
    beat(log, 1)
    check_both()
    restored(spark, log, batches=3)
    check_both()


def test_all_events_of_an_open_transaction_are_counted(log: bronze.BronzeLog) -> None:
    """Events that were captured while `provide.transaction.metadata` was off are counted, too; otherwise END would report too few."""
    begun, own, other = ({"lsid": '{"id": "it\'s 1"}', "txnNumber": number} for number in (6, 7, 8))
    id_ = f"{own['lsid']}:7"
    change = {"kind": "change", "db": "shop", "collection": "a"}
    rows: list[dict[str, object]] = [
        change | {"source": own},
        {"kind": "transaction", "payload": json.dumps({"status": "BEGIN", "id": id_})},
        change | {"source": own, "transaction": {"id": id_, "total_order": 1, "data_collection_order": 1}},
        change | {"source": own},
        change | {"source": own, "collection": "b"},
        change | {"source": other},
        change | {"source": begun},
        change,
    ]

    def numbered(batch: int, first: int) -> pa.Table:
        places = ({"resume_token": "82", "batch": batch, "offset": first + place} for place in range(len(rows)))
        return pa.Table.from_pylist([{**place, **row} for place, row in zip(places, rows)], schema=columns.SCHEMA)

    log.append(numbered)
    found = bronze.open_transaction(log.spark, log.table)
    assert found is not None and (found.id, found.counts) == (id_, {"shop.a": 2, "shop.b": 1})
