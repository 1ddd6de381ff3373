"""Capture from a real server into real tables: which rows are written, which sources are refused, and what a restart does."""

from __future__ import annotations

import datetime
import errno
import json
import threading
from pathlib import Path
from typing import Any

import bson
import pyarrow.parquet as pq
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from cdc_core import errors
from cdc_core.bronze import columns
from cdc_core.settings import parse as settings
from pipelines.bronze import log as bronze
from pipelines.capture import heartbeats
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureProgress
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import status
from pipelines.silver import run as silver
from pipelines.snapshot import snapshot
from tests.harness import without_spark
from tests.harness.captures import (
    Running,
    check_numbers,
    held_snapshots,
    once,
    pipeline,
    rows,
    step_down,
    table,
    until,
)
from tests.harness.layers import table_rows


def test_snapshot_and_stream_land_in_order(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """The first run captures the existing documents and the second the changes since then, each row once and in order."""
    database.orders.insert_many([{"_id": number, "total": number * 1.5} for number in range(300)])
    found = pipeline(mongodb_uri, lakehouse, database.name)
    assert once(spark, found).snapshot_documents == 300
    database.orders.update_one({"_id": 5}, {"$set": {"total": 70.5}, "$unset": {"gone": 1}})
    database.orders.replace_one({"_id": 6}, {"total": Decimal128("1.50")})
    database.orders.delete_one({"_id": 7})
    database.orders.insert_one({"_id": "x", "at": datetime.datetime(2024, 5, 6)})
    result = once(spark, found)
    landed = rows(spark, found)
    check_numbers(landed)
    assert result.events == 4
    snapshot = [row for row in landed if row.kind == "snapshot"]
    assert sorted(json.loads(row.key) for row in snapshot) == list(range(300))
    assert {row.source.snapshot for row in snapshot} == {"true", "last"}
    assert all(row.sequence.endswith("ffffffff") and row.op == "r" for row in snapshot)
    changes = [row for row in landed if row.kind == "change"]
    assert [row.op for row in changes] == ["u", "u", "d", "c"]
    assert [row.key for row in changes] == ["5", "6", "7", '"x"']
    assert json.loads(changes[0].after) == {"_id": 5, "total": 70.5}
    assert json.loads(changes[0].updateDescription.updatedFields) == {"total": 70.5}
    assert json.loads(changes[1].after)["total"] == {"$numberDecimal": "1.50"}
    assert changes[1].updateDescription is None
    assert changes[2].after is None
    assert json.loads(changes[2].documentKey) == {"_id": 7}
    assert changes[3].source.db == database.name and changes[3].source.collection == "orders"
    assert [row.sequence for row in changes] == sorted(row.sequence for row in changes)
    assert max(row.sequence for row in snapshot) < changes[0].sequence


def test_the_last_row_is_marked_where_the_last_collection_is_empty(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    database.a.insert_many([{"_id": number} for number in range(3)])
    database.create_collection("z")
    found = pipeline(mongodb_uri, lakehouse, database.name)
    assert once(spark, found).snapshot_documents == 3
    marks = [row.source.snapshot for row in rows(spark, found) if row.kind == "snapshot"]
    assert marks == ["true", "true", "last"]


def test_chunks_hold_ids_of_all_types(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A snapshot in many small chunks contains every document once, whatever the types of the ids."""
    ids: list[Any] = [
        bson.ObjectId(), "text", 5, Int64(2**40), 1.5, float("nan"), True, None, datetime.datetime(2024, 1, 1),
        {"a": 1}, Decimal128("7.5"), bson.Binary(b"12345678" * 2, 4), bson.MinKey(), bson.MaxKey(), bson.Timestamp(1, 2), b"raw",
    ]  # fmt: skip
    database.mixed.insert_many([{"_id": each, "pad": "x" * 300} for each in [*ids, *range(100, 300)]])
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"commit.max.bytes": 10_000})
    assert once(spark, found).snapshot_documents == len(ids) + 200
    landed = [row for row in rows(spark, found) if row.kind == "snapshot"]
    assert len(landed) == len({row.key for row in landed}) == len(ids) + 200
    assert len({row.resume_token for row in landed}) > 3


def test_stopped_snapshot_goes_on(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A stopped snapshot continues after its last chunk and reads nothing twice."""
    database.orders.insert_many([{"_id": number, "pad": "x" * 1000} for number in range(800)])
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"commit.max.bytes": 50_000, "snapshot.max.threads": 1})
    stop = threading.Event()

    def stop_early(progress: CaptureProgress) -> None:
        if progress.snapshot is not None and progress.snapshot.documents > 100:
            stop.set()

    with held_snapshots(100):
        first = capture.run(spark, found, stop=stop, progress=stop_early)
    assert 0 < first.snapshot_documents < 800
    once(spark, found)
    landed = [row for row in rows(spark, found) if row.kind == "snapshot"]
    assert sorted(json.loads(row.key) for row in landed) == list(range(800))
    check_numbers(rows(spark, found))


def test_second_capture_is_refused(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """While a capture runs, a second one on its table ends at once and commits nothing."""
    found = pipeline(mongodb_uri, lakehouse, database.name)
    with Running(spark, found) as running:
        until(lambda: delta.exists(spark, table(found)) and bronze.newest(spark, table(found)).batch > 0)
        before = table_history.version(spark, table(found))
        with pytest.raises(errors.TableOwned) as refused:
            once(spark, found)
        assert refused.value.exit_code == 3
        assert table_history.version(spark, table(found)) == before
        del running


def test_replaced_capture_stops(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A capture whose table was taken over stops at its next commit, and none of its later rows are in the table."""
    found = pipeline(mongodb_uri, lakehouse, database.name)
    replaced = Running(spark, found)
    with pytest.raises(errors.OwnershipLost), replaced:
        until(lambda: delta.exists(spark, table(found)) and bronze.newest(spark, table(found)).batch > 0)
        database.orders.insert_one({"_id": 0})
        once(spark, found, take_over=True)
        database.orders.insert_many([{"_id": number} for number in range(1, 20)])
        until(lambda: not replaced.is_alive)
    assert isinstance(replaced.error, errors.OwnershipLost)
    once(spark, found)
    landed = rows(spark, found)
    check_numbers(landed)
    assert sorted(json.loads(row.key) for row in landed if row.kind == "change") == list(range(20))


def test_changed_settings_lose_and_double_nothing(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A capture continues from its position with another filter, scope, pipeline or mode, even if the server refuses its token.

    The rows of each run follow its settings, and a post-image shows the document at its event, not a later state.
    """
    name = database.name
    for collection in ("a", "b"):
        database.create_collection(collection, changeStreamPreAndPostImages={"enabled": True})
    changes: list[dict[str, Any]] = [
        {},
        {"collection.include.list": f"{name}.b"},
        {"capture.mode": "change_streams_with_pre_image"},
        {"capture.scope": "collection", "capture.target": f"{name}.b"},
        {"cursor.pipeline": '[{"$match": {"fullDocument.hidden": {"$ne": true}}}]'},
        {"capture.mode.full.update.type": "post_image", "field.exclude.list": f"{name}.b.secret"},
        {},
    ]
    database.b.insert_one({"_id": "begun"})
    for number, change in enumerate(changes):
        once(spark, pipeline(mongodb_uri, lakehouse, name, **{"snapshot.mode": "no_data", **change}))
        for collection in ("a", "b"):
            database[collection].insert_one({"_id": number, "secret": 1})
            database[collection].update_many({"_id": number}, {"$set": {"v": 1}})
            database[collection].update_many({"_id": number}, {"$set": {"v": 2}})
    only_b = (1, 3)
    landed = [row for row in rows(spark, pipeline(mongodb_uri, lakehouse, name)) if row.kind == "change"]
    expected = [
        (collection, str(number), op)
        for number in range(len(changes) - 1)
        for collection in ("ab" if number + 1 not in only_b else "b")
        for op in "cuu"
    ]
    assert [(row.collection, row.key, row.op) for row in landed] == expected
    by_number = {number: [row for row in landed if (row.collection, row.key) == ("b", str(number))] for number in range(6)}
    assert [json.loads(row.before)["v"] for row in by_number[1][2:]] == [1]
    assert [row.after for row in by_number[1]][1:] == [None, None]
    assert [json.loads(row.after) for row in by_number[4]] == [{"_id": 4}, {"_id": 4, "v": 1}, {"_id": 4, "v": 2}]


def test_a_collection_that_is_let_in_later_is_offered_a_snapshot(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Existing documents are not read again. The new collection is named once, with the command that takes its snapshot."""
    name = database.name
    database.a.insert_one({"_id": 1})
    database.b.insert_one({"_id": 1})
    once(spark, pipeline(mongodb_uri, lakehouse, name, **{"collection.include.list": f"{name}.a"}))
    both = pipeline(mongodb_uri, lakehouse, name, **{"collection.include.list": f"{name}.a, {name}.b"})
    for offers in (1, 0):
        caplog.clear()
        assert once(spark, both).snapshot_documents == 0
        told = [record.getMessage() for record in caplog.records if "captured from now on" in record.getMessage()]
        assert len(told) == offers
        assert all(f"--data-collections {name}.b" in each and f"{name}.a" not in each for each in told)


def test_another_database_is_captured_by_its_reader_from_its_first_event(
    protected_mongodb: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then bronze's position is an event of the first database, which a reader of the other one cannot look up in the oplog."""
    with without_spark.running(), mongodb.client(protected_mongodb.uri) as root:

        def captured(db: str) -> list[Any]:
            monkeypatch.setenv("READER", f"mongodb://reader:r@{protected_mongodb.address}/?authSource={db}")
            found = pipeline("${env:READER}", lakehouse, db, **{"snapshot.mode": "no_data"})
            capture.run(without_spark.SPARK, found, once=True)
            return [(row.db, row.key) for row in rows(None, found) if row.kind == "change"]

        for db in ("first", "other"):
            root[db].command("createUser", "reader", pwd="r", roles=["read"])
        captured("first")
        root.first.orders.insert_one({"_id": 1})
        for db in ("first", "other", "other"):
            assert captured(db) == [("first", "1")]
        root.other.orders.insert_one({"_id": 2})
        assert captured("other") == [("first", "1"), ("other", "2")]


def test_lost_position_changes_nothing(spark: Any, start_mongodb: Any, lakehouse: Path) -> None:
    """A position that the oplog no longer contains needs a person's decision, and the table stays as it is."""
    server = start_mongodb(embedded_mongodb.ServerOptions(oplog_mb=4, arguments=("--syncdelay", "2")))
    found = pipeline(server.uri, lakehouse, "shop")
    client = mongodb.client(server.uri)
    client.shop.orders.insert_many([{"_id": number} for number in range(3)])
    client.shop.gone.insert_one({"_id": 1})
    once(spark, found)
    before = table_history.version(spark, table(found))
    client.shop.orders.delete_one({"_id": 1})
    client.shop.gone.drop()
    first = mongodb_server.oplog_window(client)
    assert first is not None

    def rolled() -> bool:
        client.other.bulk.insert_many([{"pad": "x" * 100_000} for _ in range(50)])
        window = mongodb_server.oplog_window(client)
        return window is not None and window.first > first.last + 1

    until(rolled, 90)
    with pytest.raises(errors.PositionLost) as lost:
        once(spark, found)
    assert lost.value.exit_code == 3
    assert "snapshot.mode: when_needed" in str(lost.value)
    assert table_history.version(spark, table(found)) == before
    check_when_needed(spark, pipeline(server.uri, lakehouse, "shop", **{"snapshot.mode": "when_needed"}))
    client.close()


def check_when_needed(spark: Any, found: settings.Settings) -> None:
    """The gap and the plan of the new snapshot are one commit. Status shows the gap until gold equals the source."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(snapshot.Snapshot, "run", unread)
        with pytest.raises(KeyboardInterrupt):
            capture.run(spark, found, once=True)
    since = {each.collection: each.incomplete_since for each in status.read(spark, found).collections}
    assert set(since) == {"shop.gone", "shop.orders"} and None not in since.values()
    once(spark, found)
    silver.run(spark, found)
    for collection, left in (("orders", [0, 2]), ("gone", [])):
        held = table_rows(spark, delta.layout(found.lakehouse).silver("shop", collection))
        assert sorted(row["_id"] for row in held) == left
    assert {each.incomplete_since for each in status.read(spark, found).collections} == {None}


def unread(_: snapshot.Snapshot) -> None:
    raise KeyboardInterrupt


def test_full_disk_commits_nothing(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a temporary error: nothing of the commit is in the table, and the next run captures everything."""
    found = pipeline(mongodb_uri, lakehouse, database.name)
    once(spark, found)
    before = rows(spark, found)
    database.orders.insert_one({"_id": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(errors.StorageExhausted) as exhausted:
            once(spark, found)
    assert exhausted.value.exit_code == 75
    assert rows(spark, found) == before
    once(spark, found)
    assert [row.key for row in rows(spark, found) if row.kind == "change"] == ["1"]


def test_election_is_survived(spark: Any, start_mongodb: Any, lakehouse: Path) -> None:
    """No event is lost when the primary steps down while the stream runs."""
    server = start_mongodb(embedded_mongodb.ServerOptions())
    found = pipeline(server.uri, lakehouse, "shop")
    client = mongodb.client(server.uri)
    with Running(spark, found):
        until(lambda: delta.exists(spark, table(found)) and bronze.newest(spark, table(found)).batch > 0)
        client.shop.orders.insert_one({"_id": 0})
        step_down(client, 2)
        for number in range(1, 50):
            client.shop.orders.insert_one({"_id": number})
        until(lambda: len([row for row in rows(spark, found) if row.kind == "change"]) == 50)
    once(spark, found)
    client.close()
    landed = rows(spark, found)
    check_numbers(landed)
    assert [json.loads(row.key) for row in landed if row.kind == "change"] == list(range(50))


def test_unusual_documents_land(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """Repeated fields, invalid UTF-8 and fields named like Extended JSON types are captured."""
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"snapshot.mode": "no_data"})
    once(spark, found)
    repeated = b"\x10_id\x00\x01\x00\x00\x00\x10a\x00\x01\x00\x00\x00\x10a\x00\x02\x00\x00\x00"
    broken = b"\x10_id\x00\x02\x00\x00\x00\x02t\x00\x03\x00\x00\x00\xff\xfe\x00"
    for body in (repeated, broken):
        raw = (len(body) + 5).to_bytes(4, "little") + body + b"\0"
        database.orders.insert_one(RawBSONDocument(raw))
    database.orders.insert_one({"_id": 3, "w": {"$numberLong": "5"}})
    result = once(spark, found)
    assert result.lossy_documents == 1
    after = {row.key: row.after for row in rows(spark, found) if row.kind == "change"}
    assert set(after) == {"1", "2", "3"}
    assert '"$$numberLong"' in after["3"]


def test_quiet_stream_moves_on(
    spark: Any, mongodb_uri: str, database: Any, mongo: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats move the position of a quiet collection with the server's time. A position of another replica set is recognized by its
    name.
    """
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"heartbeat.interval.ms": 1000})
    with Running(spark, found):
        until(lambda: delta.exists(spark, table(found)) and bronze.newest(spark, table(found)).batch > 0)
        first = bronze.read_position(spark, table(found))
        assert first is not None
        mongo[f"{database.name}_other"].noise.insert_one({})
        until(lambda: (bronze.read_position(spark, table(found)) or first).token > first.token, 30)
    mongo.drop_database(f"{database.name}_other")
    assert {row.kind for row in rows(spark, found)} == {"heartbeat"}
    info, version = mongodb_server.server_info(mongo), table_history.version(spark, table(found))
    monkeypatch.setattr(mongodb_server, "server_info", lambda _: info._replace(replica_set="staging"))
    with pytest.raises(errors.PositionLost):
        once(spark, found)
    assert table_history.version(spark, table(found)) == version


def test_without_heartbeats_only_the_lease_is_renewed(
    spark: Any, mongodb_uri: str, database: Any, mongo: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `heartbeat.interval.ms: 0` the position of a quiet stream stays at the last row."""
    monkeypatch.setattr(heartbeats, "LEASE_EVERY_MS", 300)
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"heartbeat.interval.ms": 0, "snapshot.mode": "no_data"})
    with Running(spark, found):
        until(lambda: delta.exists(spark, table(found)) and bronze.newest(spark, table(found)).batch > 0)
        version, position = table_history.version(spark, table(found)), bronze.read_position(spark, table(found))
        mongo[f"{database.name}_other"].noise.insert_one({})
        until(lambda: table_history.version(spark, table(found)) >= version + 3)
    mongo.drop_database(f"{database.name}_other")
    assert bronze.read_position(spark, table(found)) == position


def test_capped_collections_are_snapshotted_and_views_are_refused(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """A capped collection is read at its operation time; a view that is named in the settings is refused with its name."""
    database.create_collection("ring", capped=True, size=100_000)
    database.ring.insert_many([{"_id": number} for number in range(20)])
    database.create_collection("seen", viewOn="ring", pipeline=[])
    found = pipeline(mongodb_uri, lakehouse, database.name)
    assert once(spark, found).snapshot_documents == 20
    named = pipeline(mongodb_uri, lakehouse / "two", database.name, **{"collection.include.list": f"{database.name}.seen"})
    with pytest.raises(errors.SourceUnsuitable, match="seen is a view"):
        once(spark, named)


def test_table_of_somebody_else_is_refused(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A foreign Delta table in bronze's place is not changed."""
    found = pipeline(mongodb_uri, lakehouse, database.name)
    spark.sql("SELECT 1 AS one").write.format("delta").save(table(found).path)
    with pytest.raises(errors.TableNotOurs) as refused:
        once(spark, found)
    assert refused.value.exit_code == 3
    assert table_history.version(spark, table(found)) == 0


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300", errors.SourceUnreachable),
        ("mongodb://127.0.0.1:notaport/", errors.SettingsError),
    ],
)
def test_source_that_cannot_be_reached(spark: Any, lakehouse: Path, uri: str, expected: type[errors.MedallionError]) -> None:
    """An unreachable server is a temporary error and an invalid connection string a mistake; neither creates a table."""
    with pytest.raises(expected):
        once(spark, pipeline(uri, lakehouse, "shop"))
    assert not delta.exists(spark, table(pipeline(uri, lakehouse, "shop")))


def test_wrong_password_is_refused(spark: Any, protected_mongodb: Any, lakehouse: Path) -> None:
    """A wrong password needs a person's correction, and the message does not contain it."""
    found = pipeline(f"mongodb://{protected_mongodb.address}/", lakehouse, "shop")
    client = mongodb.client(f"mongodb://someone:hunter2@{protected_mongodb.address}/?authSource=admin")
    with pytest.raises(errors.AccessRefused) as refused:
        mongodb_server.server_info(client)
    client.close()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(errors.AccessRefused):
        once(spark, found)


def test_columns_are_the_contract(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """The bronze table has the columns of the schema in their order, and is clustered by batch."""
    found = pipeline(mongodb_uri, lakehouse, database.name)
    once(spark, found)
    assert spark.table(str(table(found))).columns == columns.SCHEMA.names
    detail = spark.sql(f"DESCRIBE DETAIL {table(found)}").collect()[0]
    assert detail.clusteringColumns == ["batch"]
