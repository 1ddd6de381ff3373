"""The cursor of a change stream, read with raw commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pymongo
from bson.int64 import Int64
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS
from pymongo import errors as driver

from pipelines.mongodb import client as mongodb
from pipelines.mongodb import cursor_reply


class StreamCursor:
    """One cursor on one server, with its session: opened, read, and given back; then it can be opened again.

    What it raises is the driver's: its user decides which errors a stream goes on after.
    """

    def __init__(self, connection: pymongo.MongoClient[Any]) -> None:
        self._connection = connection
        self._id = 0
        self._session: Any = None
        self._server: pymongo.MongoClient[Any] | None = None
        self._database, self._collection = "admin", "$cmd.aggregate"

    @property
    def is_open(self) -> bool:
        """Whether a cursor is open on the server, as far as is known."""
        return self._id != 0

    def open(self, db: str | None, collection: str | None, pipeline: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Open it over a database or a collection of it, or (without a `db`) the deployment; what the server says of it."""
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
        """The next reply: its bytes, its raw events, and the rest of its `cursor` document."""
        reply = self.server()[self._database].command(
            {
                "getMore": Int64(self._id),
                "collection": self._collection,
                "maxTimeMS": self._await_ms(max_await_ms),
                **({"batchSize": batch_size} if batch_size else {}),
            },
            session=self._session,
            codec_options=DEFAULT_RAW_BSON_OPTIONS,
            read_preference=self._connection.read_preference,
        )
        raw = bytes(reply.raw)
        events, rest = cursor_reply.split_batch(raw, b"nextBatch")
        self._id = rest["id"]
        return len(raw), events, rest

    def _await_ms(self, wanted: int) -> int:
        """Half of the time, at most, that the client waits for an answer: a quiet server would pass for one that is gone."""
        options = self._connection.options
        limits = (options.pool_options.socket_timeout, options.timeout)
        return max(1, min((wanted, *(int(each * 500) for each in limits if each))))

    def close(self) -> None:
        """Give the cursor back to the server, if it still listens."""
        cursor, session = self._id, self._session
        self._id, self._session = 0, None
        try:
            if cursor:
                self.server()[self._database].command(
                    {"killCursors": self._collection, "cursors": [Int64(cursor)]}, session=session
                )
            if session:
                session.end_session()
        except driver.PyMongoError:
            pass
        self._unpin()

    def forget(self) -> None:
        """Let go of a cursor that the server no longer has, or that it failed in."""
        if self._session is not None:
            try:
                self._session.end_session()
            except driver.PyMongoError:
                pass
        self._id, self._session = 0, None
        self._unpin()

    def server(self) -> pymongo.MongoClient[Any]:
        """The client to read with. A cursor lives on one server: with several to choose from, one is pinned."""
        # Found once a cursor: to ask which server it is takes as long as a reply without events.
        if self._server is None:
            self._server = mongodb.pinned(self._connection, self._connection.read_preference) or self._connection
        return self._server

    def _unpin(self) -> None:
        if self._server is not None and self._server is not self._connection:
            self._server.close()
        self._server = None
