"""Interruptions of a capture: a killed cursor, the network, an invalidate, an end after any commit."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from bson import decode
from bson.raw_bson import RawBSONDocument
from pymongo.errors import ConnectionFailure

from cdc_core.settings import parse as settings
from pipelines.bronze import log as bronze
from pipelines.capture import service as capture
from pipelines.capture.main_loop import MainLoop
from pipelines.capture.progress import CaptureProgress
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.mongodb import catalog, change_stream, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import status
from pipelines.silver import run as silver
from pipelines.snapshot import snapshot
from tests.harness import sessions
from tests.harness.captures import Running, check_numbers, held_snapshots, once, pipeline, rows, table, until
from tests.harness.layers import table_rows
from tests.harness.network import Proxy

HASTY = "directConnection=true&connectTimeoutMS=500&heartbeatFrequencyMS=500&serverSelectionTimeoutMS=500"


@contextlib.contextmanager
def stream(uri: str, db: str) -> Iterator[change_stream.ChangeStream]:
    with contextlib.closing(mongodb.client(uri)) as client:
        until(lambda: answers(client))
        opened = change_stream.ChangeStream(
            client, change_stream.StreamOptions(db=db, max_await_ms=50), change_stream.StreamStart(), max_delay=0.5
        )
        opened.open()
        with contextlib.closing(opened):
            yield opened


def answers(client: Any) -> bool:
    """Whether the server answers; on a busy machine it may need more than half a second."""
    with contextlib.suppress(ConnectionFailure):
        return bool(client.admin.command("ping")["ok"])
    return False


def inserted(opened: change_stream.ChangeStream, count: int) -> list[Any]:
    """The `_id` values of the next inserts."""
    found: list[Any] = []
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} events"
        for raw in opened.next().events:
            event = decode(raw)
            if event["operationType"] == "insert":
                found.append(event["documentKey"]["_id"])
    return found


def test_a_killed_cursor_is_opened_again(mongodb_uri: str, database: Any) -> None:
    """The server forgets a cursor (`killCursors` or a restart): the stream continues after its last event."""
    admin = database.client.admin
    with stream(mongodb_uri, database.name) as opened:
        for number in range(3):
            database.orders.insert_many([{"_id": 2 * number}, {"_id": 2 * number + 1}])
            assert inserted(opened, 2) == [2 * number, 2 * number + 1]
            idle = admin.aggregate(
                [{"$currentOp": {"idleCursors": True}}, {"$match": {"ns": f"{database.name}.$cmd.aggregate"}}]
            )
            cursors = [operation["cursor"]["cursorId"] for operation in idle if operation["type"] == "idleCursor"]
            assert len(database.command({"killCursors": "$cmd.aggregate", "cursors": cursors})["cursorsKilled"]) == 1
        database.orders.insert_one({"_id": "last"})
        assert inserted(opened, 1) == ["last"]
        assert opened.reconnects == 3


@pytest.mark.parametrize("broken", [Proxy.cut, Proxy.stall])
def test_a_network_that_fails_costs_no_event(mongodb_uri: str, database: Any, broken: Callable[[Proxy], None]) -> None:
    """Connections are closed, or stay open without any data."""
    address = mongodb_uri.removeprefix("mongodb://").split("/")[0]
    with Proxy(address) as proxy, stream(f"mongodb://{proxy.address}/?{HASTY}", database.name) as opened:
        database.orders.insert_one({"_id": 0})
        assert inserted(opened, 1) == [0]
        before = opened.reconnects
        broken(proxy)
        database.orders.insert_many([{"_id": number} for number in range(1, 20)])

        def mend() -> None:
            """Restore the network after the failure was noticed and several attempts failed."""
            until(lambda: opened.reconnects >= before + 3)
            proxy.mend()

        mending = threading.Thread(target=mend)
        mending.start()
        assert inserted(opened, 19) == list(range(1, 20))
        mending.join()


@pytest.mark.parametrize(
    ("scope", "is_silent"),
    [
        ("collection", True),
        *(
            pytest.param(*each, marks=pytest.mark.journey)
            for each in (("collection", False), ("database", True), ("database", False))
        ),
    ],
)
def test_a_stream_goes_on_behind_an_invalidate(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, scope: str, is_silent: bool
) -> None:
    """A stream of a collection ends with the collection and a stream of a database with the database; a pipeline may hide the
    invalidate event.

    A collection that is created again with the name is captured in the same run and in the next.
    """
    name = f"{database.name}.orders"
    given: dict[str, Any] = {"capture.scope": scope, "capture.target": name if scope == "collection" else database.name}
    if is_silent:
        only = [{"$match": {"operationType": "insert"}}]
        given |= {"cursor.pipeline": json.dumps(only), "cursor.pipeline.order": "user_first"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"collection.include.list": name, **given})
    database.orders.insert_one({"_id": 0})

    def landed(*keys: int) -> bool:
        held = (
            {row.key for row in rows(spark, found) if row.kind in ("change", "snapshot")}
            if delta.exists(spark, table(found))
            else {}
        )
        return {str(key) for key in keys} <= set(held)

    def anew() -> None:
        database.orders.drop() if scope == "collection" else database.client.drop_database(database.name)

    with Running(spark, found):
        until(lambda: landed(0))
        for number in (1, 2):
            anew()
            database.orders.insert_one({"_id": number})
            until(lambda number=number: landed(number))
        anew()
        database.orders.insert_one({"_id": 3})
    anew()
    database.orders.insert_one({"_id": 4})
    once(spark, found)
    once(spark, found)
    assert [json.loads(row.key) for row in rows(spark, found) if row.kind == "change"] == [1, 2, 3, 4]
    check_numbers(rows(spark, found))


class Pipeline:
    """All layers over one database."""

    def __init__(self, spark: Any, found: settings.Settings) -> None:
        self.spark, self.found = spark, found

    def merge(self) -> None:
        for hop in (silver, gold):
            hop.run(self.spark, self.found, sessions=sessions.kept(self.spark))

    def gold(self, db: str, collection: str) -> dict[Any, Any]:
        """A gold table's `v` by `_id`."""
        return self._read(delta.layout(self.found.lakehouse).gold(db, collection))

    def silver(self, db: str, collection: str) -> dict[Any, Any]:
        """A silver table's `v` by `_id`."""
        return self._read(delta.layout(self.found.lakehouse).silver(db, collection))

    def _read(self, of: Any) -> dict[Any, Any]:
        return {row["_id"]: row["v"] for row in table_rows(self.spark, of)}


def test_a_rename_in_the_middle_of_a_snapshot(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were read under the old name are removed. The new name is read completely, and so is a new collection with the old name."""
    database.first.insert_many([{"_id": number, "v": "old", "pad": "x" * 1000} for number in range(400)])
    given = {"commit.max.bytes": 50_000, "snapshot.max.threads": 1}
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    land = snapshot.Snapshot._land
    renamed: list[str] = []

    def interrupted(taking: snapshot.Snapshot, collection: catalog.SourceCollection, *rest: Any) -> None:
        land(taking, collection, *rest)
        if not renamed:
            renamed.append(collection.namespace)
            database.first.rename("second")
            database.second.update_one({"_id": 5}, {"$set": {"v": "changed"}})
            database.first.insert_one({"_id": 1, "v": "new"})

    monkeypatch.setattr(snapshot.Snapshot, "_land", interrupted)
    result = once(spark, found)
    assert renamed and result.snapshot_documents >= 400
    layers = Pipeline(spark, found)
    silver.run(spark, found, sessions=sessions.kept(spark))
    assert layers.silver(database.name, "first") == {1: "new"}
    assert layers.silver(database.name, "second") == {number: "changed" if number == 5 else "old" for number in range(400)}
    assert {each.incomplete_since for each in status.read(spark, found).collections} == {None}


def test_a_collection_that_is_left_out_in_the_middle_of_its_snapshot(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the collection nor its rows count as completely read. When it is captured again its snapshot is finished, and a new one
    is offered.
    """
    name = database.name
    database.a.insert_many([{"_id": number, "v": "old", "pad": "x" * 1000} for number in range(300)])
    database.create_collection("b")
    given = {"commit.max.bytes": 30_000, "snapshot.max.threads": 1}
    found = pipeline(mongodb_uri, lakehouse, name, **given)
    stop = threading.Event()

    def stop_early(progress: CaptureProgress) -> None:
        if progress.snapshot is not None and progress.snapshot.documents > 50:
            stop.set()

    layers = Pipeline(spark, found)
    with held_snapshots(50):
        assert 50 < capture.run(spark, found, stop=stop, progress=stop_early).snapshot_documents < 300
    without = pipeline(mongodb_uri, lakehouse, name, **given, **{"collection.include.list": f"{name}.b"})
    once(spark, without)
    silver.run(spark, found)
    assert 50 < len(layers.silver(name, "a")) < 300
    caplog.clear()
    once(spark, found)
    assert f"{name}.a: captured from now on" in caplog.text
    silver.run(spark, found)
    assert layers.silver(name, "a") == dict.fromkeys(range(300), "old")


def test_a_first_start_that_is_killed_loses_nothing(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first position in bronze is the stream's start, not how far it has read."""
    database.create_collection("orders")
    at = mongodb_server.operation_time(database.client)
    database.orders.insert_many([{"_id": number} for number in range(10)])
    given = {"snapshot.mode": "no_data", "capture.start.op.time": (at.time << 32) + at.inc}
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(MainLoop, "run", killed)
        with pytest.raises(Killed):
            once(spark, found)
    once(spark, found)
    assert [row.key for row in rows(spark, found) if row.kind == "change"] == [str(number) for number in range(10)]


def test_a_chunk_whose_cursor_is_gone_is_read_again(database: Any) -> None:
    """An election or a restart of the server ends the cursor."""
    database.orders.insert_many([{"_id": number} for number in range(50)])
    client = database.client
    (collection,) = catalog.collections(client, [database.name])
    after = mongodb_server.operation_time(client)
    with contextlib.closing(
        snapshot_read.read_chunk(client, collection, snapshot_read.IdRange(), after=after, fetch_size=10)
    ) as chunk:
        next(chunk)
        idle = client.admin.aggregate([{"$currentOp": {"idleCursors": True}}, {"$match": {"ns": f"{database.name}.orders"}}])
        cursors = [operation["cursor"]["cursorId"] for operation in idle if operation["type"] == "idleCursor"]
        assert len(database.command({"killCursors": "orders", "cursors": cursors})["cursorsKilled"]) == 1
        with pytest.raises(mongodb_failures.SnapshotExpired):
            next(chunk)


def test_a_stream_stands_between_whole_events(mongodb_uri: str, database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token never points into a split event: after a restart the rest of the event would not be read."""

    def event(place: str, **more: Any) -> dict[str, Any]:
        return {"_id": {"_data": place}, "operationType": "insert", **more}

    def fragment(place: str, number: int) -> dict[str, Any]:
        return event(place, splitEvent={"fragment": number, "of": 3})

    replies = [
        ([event("82a1"), event("82a2"), fragment("82a3", 1)], "82a2"),
        ([fragment("82a4", 2)], "82a2"),
        ([fragment("82a5", 3)], "82a5"),
        ([event("82a6")], "82a6"),
    ]
    with stream(mongodb_uri, database.name) as opened:
        for events, expected in replies:
            cursor = {"nextBatch": events, "id": 5, "ns": "x.y", "postBatchResumeToken": events[-1]["_id"]}
            reply = RawBSONDocument(bson.encode({"cursor": cursor, "ok": 1}))
            server = SimpleNamespace(command=lambda *_, answer=reply, **__: answer)
            with monkeypatch.context() as answering:
                answering.setattr(opened._cursor, "server", lambda where=server: {database.name: where})
                assert opened.next().token == opened.token == expected


class Killed(BaseException):
    """Ends a capture as if it had been killed."""


def test_an_end_at_every_commit(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run ends after a commit or in place of the next one: nothing is lost or repeated, and transactions are counted correctly."""
    database.a.insert_many([{"_id": number, "pad": "x" * 1000} for number in range(20)])
    database.create_collection("b")
    given = {
        "max.batch.size": 3,
        "commit.max.bytes": 30_000,
        "snapshot.max.threads": 1,
        "provide.transaction.metadata": True,
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    append = bronze.BronzeLog.append
    runs = commits = 0

    def killed(log: bronze.BronzeLog, *args: Any, **kwargs: Any) -> Any:
        nonlocal commits
        if log.commits and runs % 2:
            raise Killed
        position = append(log, *args, **kwargs)
        commits += 1
        if not runs % 2:
            raise Killed
        return position

    monkeypatch.setattr(bronze.BronzeLog, "append", killed)

    def run_to_its_end() -> None:
        nonlocal runs
        while True:
            runs += 1
            with contextlib.suppress(Killed):
                once(spark, found)
                return

    run_to_its_end()
    client = database.client
    with client.start_session() as session, session.start_transaction():
        for number in range(100, 105):
            database["ab"[number % 2]].insert_one({"_id": number}, session=session)
    database.a.insert_one({"_id": 200})
    run_to_its_end()
    assert runs >= commits >= 5
    landed = rows(spark, found)
    check_numbers(landed)
    assert sorted(json.loads(row.key) for row in landed if row.kind == "snapshot") == list(range(20))
    changes = [row for row in landed if row.kind == "change"]
    assert [json.loads(row.key) for row in changes] == [*range(100, 105), 200]
    orders = [(row.transaction.total_order, row.transaction.data_collection_order) for row in changes if row.transaction]
    assert orders == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    told = [json.loads(row.payload) for row in landed if row.kind == "transaction"]
    assert [(each["status"], each["event_count"]) for each in told] == [("BEGIN", None), ("END", 5)]


@pytest.mark.journey
def test_a_clock_that_is_wrong(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and position come from the server: a clock that was 30 hours ahead only affects the times of rows. No lag is negative."""
    database.orders.insert_one({"_id": 0, "v": "read"})
    layers = Pipeline(spark, pipeline(mongodb_uri, lakehouse, database.name))
    right = time.time
    with monkeypatch.context() as skewed:
        skewed.setattr(time, "time", lambda: right() + 30 * 3600)
        once(spark, layers.found)
        database.orders.insert_many([{"_id": number, "v": "new"} for number in (1, 2)])
        once(spark, layers.found)
        silver.run(spark, layers.found)
        database.orders.update_one({"_id": 1}, {"$set": {"v": "later"}})
        once(spark, layers.found)
    # The event that waits came 30 hours from now.
    [waits] = status.read(spark, layers.found).collections
    assert waits.silver is not None and (waits.silver.lag_events, waits.silver.lag_seconds) == (1, 0)
    layers.merge()
    assert layers.gold(database.name, "orders") == {0: "read", 1: "later", 2: "new"}
    check_numbers(rows(spark, layers.found))
