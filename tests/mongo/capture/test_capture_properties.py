"""Single properties of `source`, with a real server and a real table."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.snapshot import state as snapshot_state
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog, change_stream, snapshot_read
from pipelines.mongodb import connection as sources
from pipelines.mongodb import server as mongodb_server
from tests.harness.captures import check_numbers, once, pipeline, rows, table
from tests.harness.sources import source


def landed(spark: Any, found: Any, kind: str) -> list[Any]:
    return [row for row in rows(spark, found) if row.kind == kind]


def test_a_first_start_refuses_collections_of_one_table(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """In a catalog `a.b` and `a_b` get the same table name; nothing is created."""
    for name in ("a.b", "a_b"):
        database[name].insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name)
    in_catalog = dataclasses.replace(found, lakehouse=settings.Lakehouse(catalog="spark_catalog", schema_prefix="met_"))
    with pytest.raises(
        errors.SourceUnsuitable, match=r"a\.b and .*a_b would both become the table spark_catalog\.met_silver"
    ):
        once(spark, in_catalog)


def test_a_stream_begins_at_an_operation_time(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, mongo: Any
) -> None:
    """`capture.start.op.time`: a first start reads the changes since then, and none before."""
    database.orders.insert_one({"_id": 1})
    at = mongodb_server.operation_time(mongo)
    database.orders.insert_one({"_id": 2})
    since = {"snapshot.mode": "no_data", "capture.start.op.time": (at.time << 32 | at.inc) + 1}
    found = pipeline(mongodb_uri, lakehouse, database.name, **since)
    assert once(spark, found).events == 1
    assert [row.key for row in landed(spark, found, "change")] == ["2"]


def test_transactions_have_a_beginning_an_end_and_counts(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, mongo: Any
) -> None:
    """`provide.transaction.metadata`: events contain their transaction, and rows mark its beginning and end."""
    for name in ("orders", "lines"):
        database.create_collection(name)
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"provide.transaction.metadata": True})
    once(spark, found)
    with mongo.start_session() as session, session.start_transaction():
        database.orders.insert_one({"_id": 1}, session=session)
        database.lines.insert_one({"_id": 1}, session=session)
        database.lines.insert_one({"_id": 2}, session=session)
    database.orders.insert_one({"_id": 2})
    once(spark, found)
    begin, end = (json.loads(row.payload) for row in landed(spark, found, "transaction"))
    assert (begin["status"], end["status"], end["event_count"]) == ("BEGIN", "END", 3)
    assert {each["data_collection"].rpartition(".")[2]: each["event_count"] for each in end["data_collections"]} == {
        "orders": 1,
        "lines": 2,
    }
    changes = [row.transaction for row in landed(spark, found, "change")]
    orders = [(each.total_order, each.data_collection_order) for each in changes[:3]]
    assert orders == [(1, 1), (2, 1), (3, 2)]
    assert {each.id for each in changes[:3]} == {begin["id"]} and changes[3] is None


def test_a_snapshot_reads_what_it_is_asked_for(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`snapshot.include.collection.list`, `snapshot.collection.filter.overrides` and `snapshot.delay.ms` are applied."""
    db = database.name
    for name in ("orders", "customers", "other"):
        database[name].insert_many([{"_id": number} for number in range(10)])
    given = {
        "snapshot.delay.ms": 1500,
        "snapshot.include.collection.list": rf"{db}\.orders,{db}\.customers",
        "snapshot.collection.filter.overrides": f"{db}.orders",
        f"snapshot.collection.filter.overrides.{db}.orders": '{"_id": {"$gte": 7}}',
    }
    found = pipeline(mongodb_uri, lakehouse, db, **given)
    assert once(spark, found).snapshot_documents == 13
    every = rows(spark, found)
    assert {row.collection for row in every if row.kind == "snapshot"} == {"orders", "customers"}
    assert sorted(row.key for row in every if row.kind == "snapshot" and row.collection == "orders") == ["7", "8", "9"]
    assert min(row.ts_ms for row in every if row.kind == "snapshot") - every[0].ts_ms >= 1500


def test_fields_are_left_out_and_renamed(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`field.exclude.list` and `field.renames` apply to snapshots, events and update descriptions."""
    db = database.name
    database.customers.insert_one({"_id": 1, "card": "4111", "name": {"first": "Ann"}})
    given = {"field.exclude.list": f"{db}.customers.card", "field.renames": f"{db}.customers.name.first:given"}
    found = pipeline(mongodb_uri, lakehouse, db, **given)
    once(spark, found)
    database.customers.update_one({"_id": 1}, {"$set": {"card": "5111", "name.first": "Eve"}})
    once(spark, found)
    (read,), (update,) = landed(spark, found, "snapshot"), landed(spark, found, "change")
    assert json.loads(read.after) == {"_id": 1, "name": {"given": "Ann"}}
    assert json.loads(update.after) == {"_id": 1, "name": {"given": "Eve"}}
    assert json.loads(update.updateDescription.updatedFields) == {"name.given": "Eve"}


def test_what_the_stream_leaves_out(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`skipped.operations`, `cursor.pipeline`, `capture.scope` and `filters.match.mode` decide which events the server sends."""
    db = database.name
    given = {
        "collection.include.list": f"{db}.orders",
        "filters.match.mode": "literal",
        "capture.scope": "collection",
        "capture.target": f"{db}.orders",
        "skipped.operations": "d",
        "cursor.pipeline": '[{"$match": {"fullDocument.test": {"$ne": true}}}]',
        "cursor.pipeline.order": "user_first",
        "snapshot.mode": "no_data",
    }
    found = pipeline(mongodb_uri, lakehouse, db, **given)
    database.create_collection("orders")
    once(spark, found)
    database.orders.insert_many([{"_id": 1}, {"_id": 2, "test": True}, {"_id": 3}])
    database.orders.delete_one({"_id": 1})
    database.other.insert_one({"_id": 4})
    assert once(spark, found).events == 2
    assert [row.key for row in landed(spark, found, "change")] == ["1", "3"]


def test_commits_hold_no_more_than_max_batch_size(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`max.batch.size` is the maximum number of events in a commit."""
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"max.batch.size": 10, "snapshot.mode": "no_data"})
    once(spark, found)
    database.orders.insert_many([{"_id": number} for number in range(35)])
    once(spark, found)
    every = rows(spark, found)
    check_numbers(every)
    changes = [row.batch for row in every if row.kind == "change"]
    assert len(changes) == 35
    assert max(changes.count(batch) for batch in set(changes)) == 10


def test_an_event_that_is_too_large_is_skipped_and_reported(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """`cursor.oversize.handling.mode: skip`: events above the threshold are counted and reported, and the others are captured, also the
    delete of a skipped document.
    """
    given = {"cursor.oversize.handling.mode": "skip", "cursor.oversize.skip.threshold": 5000, "snapshot.mode": "no_data"}
    given["capture.mode"] = "change_streams_update_full_with_pre_image"
    database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    once(spark, found)
    database.orders.insert_many([{"_id": 1}, {"_id": 2, "pad": "x" * 6000}, {"_id": 3}])
    result = once(spark, found)
    assert (result.events, result.skipped_events) == (2, 1)
    assert [row.key for row in landed(spark, found, "change")] == ["1", "3"]
    assert len(landed(spark, found, "notification")) == 1
    payloads = [json.loads(row.payload) for row in landed(spark, found, "heartbeat")]
    assert snapshot_state.unrepaired(payloads).keys() == {f"{database.name}.orders"}
    database.orders.delete_one({"_id": 2})
    assert once(spark, found).events == 1
    assert [(row.op, row.key) for row in landed(spark, found, "change")] == [("c", "1"), ("c", "3"), ("d", "2")]


def test_a_snapshotter_of_ones_own(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`snapshot.mode: custom`: the class decides; a class that does not exist is a mistake in the settings."""
    database.orders.insert_one({"_id": 1})
    given = {"snapshot.mode": "custom", "snapshot.mode.custom.name": "tests.harness.snapshotters:Never"}
    assert once(spark, pipeline(mongodb_uri, lakehouse, database.name, **given)).snapshot_documents == 0
    with pytest.raises(errors.SettingsError, match="cannot be imported, or created without arguments"):
        once(
            spark, pipeline(mongodb_uri, lakehouse, database.name, **{**given, "snapshot.mode.custom.name": "no.such:Class"})
        )


def test_a_snapshot_without_a_stream(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`configuration_based` with data and without a stream ends when the snapshot is complete."""
    database.orders.insert_many([{"_id": number} for number in range(5)])
    given = {"snapshot.mode": "configuration_based", "snapshot.mode.configuration.based.snapshot.data": True}
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    result = capture.run(spark, found)
    assert (result.snapshot_documents, result.events) == (5, 0)


def test_too_many_collections(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`guardrail.collections.max`: more collections end the start before anything is created, or cause a warning."""
    for name in ("a", "b"):
        database.create_collection(name)
    fail = {"guardrail.collections.max": 1, "guardrail.collections.limit.action": "fail"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **fail)
    with pytest.raises(errors.SourceUnsuitable, match="2 collections are captured, the limit is 1"):
        once(spark, found)
    assert not delta.exists(spark, table(found))
    with caplog.at_level(logging.WARNING, "pipelines.capture.service"):
        once(spark, pipeline(mongodb_uri, lakehouse, database.name, **{"guardrail.collections.max": 1}))
    assert "the limit is 1" in caplog.text


def test_how_much_one_answer_holds(database: Any, mongo: Any) -> None:
    """`snapshot.fetch.size` is the number of documents in each reply of a snapshot read."""
    database.orders.insert_many([{"_id": number} for number in range(10)])
    (collection,) = catalog.collections(mongo, [database.name])
    after = mongodb_server.operation_time(mongo)
    chunks = snapshot_read.read_chunk(mongo, collection, snapshot_read.IdRange(), after=after, fetch_size=4)
    assert [len(chunk.documents) for chunk in chunks] == [4, 4, 2]


def test_how_long_the_server_waits_for_an_event(database: Any, mongo: Any) -> None:
    """`cursor.max.await.time.ms` limits the wait of an idle stream; 0 uses the default."""
    given = {"database.include.list": database.name, "cursor.max.await.time.ms": 50}
    options = sources.stream_options(source(given), mongo)
    assert options.max_await_ms == 50
    assert sources.stream_options(source({}), mongo).max_await_ms == 1000
    stream = change_stream.ChangeStream(mongo, options, change_stream.StreamStart())
    stream.open()

    def waited() -> float:
        began = time.monotonic()
        assert stream.next().events == []
        return time.monotonic() - began

    assert any(waited() < 0.9 for _ in range(10))  # a busy machine may delay some of the waits, but not all
    stream.close()
