"""Transient errors: the server returns each of their codes once, and all reads continue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bson import decode

from cdc_core import errors
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import catalog, change_stream, document_keys, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server

CODES = sorted(mongodb_failures.TRANSIENT - {249, 343, 13388})
"""These errors are only returned by shards: a stale version, or one that cannot be refreshed."""
HASTY: dict[str, Any] = {"heartbeatFrequencyMS": 50, "retryReads": False}
"""After the codes of an election the driver checks the server at once, instead of after ten seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded_mongodb.EmbeddedMongoDB]:
    """A server with fail points."""
    options = embedded_mongodb.ServerOptions(parameters={"enableTestCommands": 1})
    with embedded_mongodb.EmbeddedMongoDB(tmp_path_factory.mktemp("failing"), options) as started:
        yield started


@pytest.fixture(scope="module")
def telling(server: embedded_mongodb.EmbeddedMongoDB) -> Iterator[Any]:
    """A client without fail points, which sets those of the others."""
    with contextlib.closing(mongodb.client(server.uri, appname="test")) as client:
        yield client


def fail(telling: Any, code: int, command: str, times: int = 1) -> None:
    """The server returns an error for the next `times` of these commands."""
    data = {"failCommands": [command], "errorCode": code, "appName": mongodb.APP_NAME}
    telling.admin.command({"configureFailPoint": "failCommand", "mode": {"times": times}, "data": data})


def test_no_code_ends_a_stream(server: embedded_mongodb.EmbeddedMongoDB, telling: Any) -> None:
    """Each code is returned twice in a row for getMore, and once when the stream is reopened: no event is missing."""
    telling.streamed.create_collection("a")
    keys: list[int] = []
    with contextlib.closing(mongodb.client(server.uri, **HASTY)) as client:
        options = change_stream.StreamOptions(db="streamed", max_await_ms=20)
        stream = change_stream.ChangeStream(client, options, change_stream.StreamStart(), initial_delay=0.01, max_delay=0.05)
        stream.open()
        with contextlib.closing(stream):
            for code in CODES:
                fail(telling, code, "getMore", 2)
                stream.next()
                stream._cursor.forget()
                fail(telling, code, "aggregate")
                telling.streamed.a.insert_one({"_id": code})
                end = time.monotonic() + 30
                while code not in keys:
                    assert time.monotonic() < end, code
                    keys += [decode(event)["documentKey"]["_id"] for event in stream.next().events]
    assert keys == list(CODES)


def test_an_election_before_the_first_event_ends_no_stream(server: embedded_mongodb.EmbeddedMongoDB, telling: Any) -> None:
    """Then the stream asks how far back the oplog reaches, whenever it is reopened."""
    with contextlib.closing(mongodb.client(server.uri, **HASTY)) as client:
        stream = change_stream.ChangeStream(
            client, change_stream.StreamOptions(db="quiet", max_await_ms=20), change_stream.StreamStart(), initial_delay=0.01
        )
        stream.open()
        with contextlib.closing(stream):
            stream._cursor.forget()
            fail(telling, 10107, "serverStatus")
            stream.next()
    assert stream.reconnects == 1


@pytest.mark.parametrize("command", ["find", "getMore"])
def test_no_code_gives_a_chunk_up(server: embedded_mongodb.EmbeddedMongoDB, telling: Any, command: str) -> None:
    """The chunk is read again: the error does not mean that the server would always refuse it."""
    telling.chunks[command].insert_many([{"_id": number} for number in range(4)])
    with contextlib.closing(mongodb.client(server.uri, **HASTY)) as client:
        collection = next(each for each in catalog.collections(client, ["chunks"]) if each.name == command)
        after = mongodb_server.operation_time(client)
        for code in CODES:
            fail(telling, code, command)
            with pytest.raises((mongodb_failures.SnapshotExpired, errors.SourceUnreachable)):
                list(snapshot_read.read_chunk(client, collection, snapshot_read.IdRange(), after=after, fetch_size=2))
            assert (
                len(list(snapshot_read.read_chunk(client, collection, snapshot_read.IdRange(), after=after, fetch_size=2)))
                >= 2
            )


def test_no_code_ends_what_is_asked_before_a_chunk(server: embedded_mongodb.EmbeddedMongoDB, telling: Any) -> None:
    """The chunk's boundary and the collection's size, which are read without a session, and `verify`'s random sample."""
    telling.asked.a.insert_many([{"_id": number} for number in range(4)])
    with contextlib.closing(mongodb.client(server.uri, **HASTY)) as client:
        (collection,) = catalog.collections(client, ["asked"])
        for code in CODES:
            fail(telling, code, "find")
            with pytest.raises(errors.SourceUnreachable):
                snapshot_read.boundary(client, collection, lo=None, documents=2)
            fail(telling, code, "aggregate")
            with pytest.raises(errors.SourceUnreachable):
                catalog.size(client, collection)
            fail(telling, code, "aggregate")
            with pytest.raises(errors.SourceUnreachable):
                document_keys.sampled_ids(client, collection, documents=2)
