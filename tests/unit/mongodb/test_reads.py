"""Reads that stay on one server: of several mongos, or of a secondary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference

from pipelines.mongodb import catalog, snapshot_read, stream_cursor
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures

HOST = "mongodb://localhost/?connect=false"


class Server:
    """A server with nothing to read, which records the read preferences of its commands."""

    read_preference = ReadPreference.PRIMARY

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.awaited: list[int] = []

    def __getitem__(self, db: str) -> Server:
        return self

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_session(self) -> Server:
        return self

    def close(self) -> None:
        """Nothing to close."""

    end_session = close

    def command(self, command: dict[str, Any], *, read_preference: Any, **_: Any) -> RawBSONDocument:
        self.asked.append(read_preference)
        self.awaited += [command["maxTimeMS"]] if "getMore" in command else []
        return RawBSONDocument(
            bson.encode({"cursor": {"firstBatch": [], "nextBatch": [], "id": Int64(0), "atClusterTime": Timestamp(1, 1)}})
        )


def test_a_mongos_is_told_which_members_of_its_shards_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the read preference of the connection string, not the driver's default for a single server, which prefers primaries."""
    mongos = Server()
    connection: Any = SimpleNamespace(read_preference=ReadPreference.SECONDARY, options=mongodb.client(HOST).options)
    monkeypatch.setattr(mongodb, "pinned", lambda *_: mongos)
    cursor = stream_cursor.StreamCursor(connection)
    cursor.open("shop", None, [])
    cursor.more(max_await_ms=1, batch_size=None)
    orders = catalog.SourceCollection("shop", "orders", None)
    assert [
        chunk.documents
        for chunk in snapshot_read.read_chunk(connection, orders, snapshot_read.IdRange(), after=Timestamp(1, 1))
    ] == [[]]
    assert mongos.asked == [ReadPreference.SECONDARY] * 3


def test_a_cursor_is_asked_once_which_server_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a replica set that is the primary. Asking with each reply would cost a second round trip."""
    connection: Any = Server()
    connection.options = mongodb.client(HOST).options
    asked: list[Any] = []
    monkeypatch.setattr(mongodb, "pinned", lambda *given: asked.append(given))
    cursor = stream_cursor.StreamCursor(connection)
    for opened in (1, 2):
        cursor.open("shop", None, [])
        cursor.more(max_await_ms=1, batch_size=None)
        cursor.more(max_await_ms=1, batch_size=None)
        cursor.forget()  # another server may be the primary now
        assert len(asked) == opened


@pytest.mark.parametrize(
    ("options", "awaited"),
    [
        ("", 1000),
        ("&socketTimeoutMS=5000", 1000),
        ("&socketTimeoutMS=700", 350),
        ("&timeoutMS=500&socketTimeoutMS=700", 250),
    ],
)
def test_a_quiet_server_answers_before_the_client_gives_it_up(
    monkeypatch: pytest.MonkeyPatch, options: str, awaited: int
) -> None:
    """Otherwise the stream would be opened again and again, and its position would never advance."""
    server = Server()
    monkeypatch.setattr(mongodb, "pinned", lambda *_: server)
    with mongodb.client(f"{HOST}{options}") as client:
        stream_cursor.StreamCursor(client).more(max_await_ms=1000, batch_size=None)
    assert server.awaited == [awaited]


def test_a_server_that_has_not_heard_of_a_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secondary or another mongos learns of the primary's time seconds later: that is no reason to give up a collection."""
    behind = driver.OperationFailure(
        "readConcern afterClusterTime value must not be greater than the current clusterTime", 72
    )

    class Behind(Server):
        def command(self, command: dict[str, Any], *, read_preference: Any, **_: Any) -> RawBSONDocument:
            raise behind

    client: Any = SimpleNamespace(read_preference=ReadPreference.SECONDARY)
    monkeypatch.setattr(mongodb, "pinned", lambda *_: Behind())
    orders = catalog.SourceCollection("shop", "orders", None)
    with pytest.raises(mongodb_failures.SnapshotExpired):
        list(snapshot_read.read_chunk(client, orders, snapshot_read.IdRange(), after=Timestamp(1, 1)))


def test_a_user_who_may_only_find_gets_a_size() -> None:
    """The estimate needs the privilege `collStats`, which reading does not: the server's count is enough to plan chunks."""
    refused = driver.OperationFailure("not authorized", mongodb_failures.UNAUTHORIZED)

    class Finding(Server):
        def get_database(self, *_: object, **__: object) -> Finding:
            return self

        def cursor_command(self, *_: object, **__: object) -> Any:
            raise refused

        def command(self, command: dict[str, Any], **_: Any) -> Any:
            assert command == {"count": "orders"}
            return {"n": 7}

    connection: Any = Finding()
    assert catalog.size(connection, catalog.SourceCollection("shop", "orders", None)) == catalog.CollectionSize(7, 1024)
    refused = driver.OperationFailure("$collStats is not allowed in this atlas tier", mongodb_failures.ATLAS_REFUSED)
    assert catalog.size(connection, catalog.SourceCollection("shop", "orders", None)) == catalog.CollectionSize(7, 1024)
    refused = driver.OperationFailure("no", 8)
    with pytest.raises(mongodb_failures.ReadRefused):
        catalog.size(connection, catalog.SourceCollection("shop", "orders", None))
