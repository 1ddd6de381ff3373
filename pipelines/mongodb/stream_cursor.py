"""The cursor of a change stream, read with raw commands."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pymongo
from bson.int64 import Int64
from pymongo import errors as driver

from pipelines.mongodb import client as mongodb
from pipelines.mongodb import cursor_reply


class StreamCursor:
    """A cursor on one server, with its session; after `close` or `forget` it can be opened again.

    Raises the driver's errors: its user decides which of them are resumable.
    """

    def __init__(self, connection: pymongo.MongoClient[Any]) -> None:
        self._connection = connection
        self._id = 0
        self._session: Any = None
        self._server: pymongo.MongoClient[Any] | None = None
        self._database, self._collection = "admin", "$cmd.aggregate"

    @property
    def is_open(self) -> bool:
        """Whether a cursor is open on the server, as far as this process knows."""
        return self._id != 0

    def open(self, db: str | None, collection: str | None, pipeline: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Open it over a collection, a database, or (without a `db`) the deployment; the `cursor` document of the reply."""
        self._database, self._collection = db or "admin", collection or "$cmd.aggregate"
        database = self.server()[self._database]
        self._session = self.server().start_session()
        reply = database.command(
            {"aggregate": collection or 1, "pipeline": pipeline, "cursor": {"batchSize": 0}},
            session=self._session,
            read_preference=self._connection.read_preference,
        )
        self._id = reply["cursor"]["id"]
        return reply["cursor"]

    def more(self, *, max_await_ms: int, batch_size: int | None) -> tuple[int, list[bytes], dict[str, Any]]:
        """The next reply: its size in bytes, its raw events, and the rest of its `cursor` document."""
        reply = self.server()[self._database].command(
            {
                "getMore": Int64(self._id),
                "collection": self._collection,
                "maxTimeMS": self._await_ms(max_await_ms),
                **({"batchSize": batch_size} if batch_size else {}),
            },
            session=self._session,
            codec_options=cursor_reply.RAW,
            read_preference=self._connection.read_preference,
        )
        raw = bytes(reply.raw)
        events, rest = cursor_reply.split_batch(raw, b"nextBatch")
        self._id = rest["id"]
        return len(raw), events, rest

    def _await_ms(self, wanted: int) -> int:
        """The wait for events: at most half of the client's timeouts, or a quiet server would look like an unreachable one."""
        options = self._connection.options
        limits = (options.pool_options.socket_timeout, options.timeout)
        return max(1, min((wanted, *(int(seconds * 500) for seconds in limits if seconds))))

    def close(self) -> None:
        """Kill the cursor and end the session on the server, if that still answers."""
        cursor, self._id = self._id, 0
        if cursor:
            with contextlib.suppress(driver.PyMongoError):
                command = {"killCursors": self._collection, "cursors": [Int64(cursor)]}
                self.server()[self._database].command(command, session=self._session)
        self.forget()

    def forget(self) -> None:
        """Drop a cursor that the server has lost or failed at."""
        if self._session is not None:
            with contextlib.suppress(driver.PyMongoError):
                self._session.end_session()
        if self._server is not None and self._server is not self._connection:
            self._server.close()
        self._id, self._session, self._server = 0, None, None

    def server(self) -> pymongo.MongoClient[Any]:
        """The client to read with. A cursor lives on one server: where there are several, one is pinned."""
        # Once per cursor: finding the server takes a round trip.
        if self._server is None:
            self._server = mongodb.pinned(self._connection, self._connection.read_preference) or self._connection
        return self._server
