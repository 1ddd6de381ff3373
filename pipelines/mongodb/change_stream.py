"""Change streams, read with raw commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pymongo
from bson.int64 import Int64
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS, RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference

from cdc_core.stream import resume_token, split_events
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import cursor_reply
from pipelines.mongodb import failures as mongodb_failures


@dataclass(frozen=True)
class StreamOptions:
    """What the change stream is opened with; `stages` follow `$changeStream` on the server."""

    db: str | None = None
    collection: str | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    full_document: str | None = None
    full_document_before_change: str | None = None
    max_await_ms: int = 500
    show_expanded_events: bool = True


@dataclass(frozen=True)
class StreamStart:
    """Where a stream begins: after a token, at a cluster time (inclusive), or now."""

    token: str | None = None
    at: Timestamp | None = None


class EventBatch(NamedTuple):
    """One reply: raw events in stream order, and the token up to which they are whole: never one inside a split event."""

    events: list[bytes]
    token: str
    bytes: int


LONGEST_AWAIT_MS = 1_000
"""A longer `cursor.max.await.time.ms` is waited in pieces of this length, so that a stop does not wait for it."""

_VERSION = slice(18, 22)
"""Where a token says in which version of their format it is written."""

CAREFUL_BYTES = 64 * 1024 * 1024
"""So much is read one event at a time behind a failure at an event: more than one answer of the server holds."""


@dataclass
class ChangeStream:
    """A change stream that is read batch by batch and goes on after elections and lost connections by itself.

    Behind an event it is opened at the event's cluster time, and what comes again is dropped: `resume_token.resumes_alone`
    says why. Where the event itself does not come again, its position is lost.

    `retries` bounds the attempts in a row, -1 for any number; `attempts` are those since the server last answered.
    `begins` is the token that the server gave when it was first opened: everything that it reads comes after it.
    """

    connection: pymongo.MongoClient[Any]
    options: StreamOptions
    start: StreamStart
    retries: int = -1
    initial_delay: float = 0.3
    max_delay: float = 10.0
    stopped: threading.Event = field(default_factory=threading.Event)
    reconnects: int = 0
    resolved: Callable[[], StreamOptions] | None = None
    """What to open behind an invalidate: a database may be made anew in another spelling."""

    def __post_init__(self) -> None:
        self.token: str | None = self.start.token
        self.begins: str | None = None
        self._behind: str | None = None
        self._has_met = False
        self._probed: EventBatch | None = None
        self._careful = 0
        self._session: Any = None
        self._cursor = 0
        self._pinned: pymongo.MongoClient[Any] | None = None
        self._election: Any = None
        self.elections = 0
        self.attempts = 0

    @property
    def is_open(self) -> bool:
        """Whether a cursor is open on the server, as far as is known."""
        return self._cursor != 0

    def open(self) -> str | None:
        """Open the cursor; the token of its position (the server gives one from the first reply on)."""
        stage = self._stage()
        database = self._server()[self.options.db or "admin"]
        self._session = self._server().start_session()
        reply = database.command(
            {
                "aggregate": self.options.collection or 1,
                "pipeline": [{"$changeStream": stage}, *self.options.stages],
                "cursor": {"batchSize": 0},
            },
            session=self._session,
            read_preference=self._read_preference(),
        )
        self._cursor = reply["cursor"]["id"]
        token = reply["cursor"].get("postBatchResumeToken")
        if token:
            self.begins = self.begins or token["_data"]
            self._move_to(token["_data"])
        return self.token

    def _count_election(self) -> None:
        """Each election has an identifier, which the driver's monitor hears of: another one than before is counted."""
        election = self.connection.topology_description.max_election_id
        self.elections += int(None not in (self._election, election) and election != self._election)
        self._election = election or self._election

    def next(self) -> EventBatch:
        """The next batch, empty after `max_await_ms` without an event; reopened after a resumable error.

        Raises `HistoryLost`, or one of our errors when the retries are used up.
        """
        if self._probed is not None:
            probed, self._probed = self._probed, None
            return probed
        while True:
            try:
                if not self._cursor:
                    self.open()
                batch = self._more()
                self.attempts = 0
                return batch
            except driver.PyMongoError as error:
                self._forget_cursor()
                self.attempts += 1
                if mongodb_failures.is_resumable(error) and not self._is_last():
                    self.reconnects += 1
                    self.stopped.wait(self.delay())
                elif self._has_failed_at_an_event(error):
                    self._careful = CAREFUL_BYTES
                else:
                    raise mongodb_failures.stream_error(error) from error

    def delay(self) -> float:
        """The seconds to wait after so many attempts: doubled with each, up to the longest wait."""
        return min(self.initial_delay * 2.0 ** min(self.attempts - 1, 60), self.max_delay)

    def probe(self) -> None:
        """Read a first batch without waiting for events: a position that is lost shows only then. `next` gives it."""
        try:
            self._probed = self._more(max_await_ms=1)
        except driver.OperationFailure as error:
            if not self._has_failed_at_an_event(error):
                raise
            self._forget_cursor()
            self._careful = CAREFUL_BYTES

    def _has_failed_at_an_event(self, error: BaseException) -> bool:
        """Whether events come before the one that the server failed at: they are read one by one until it fails again."""
        return (
            mongodb_failures.is_about_an_event(error)
            and not mongodb_failures.is_resumable(error)
            and not self._careful
            and self.token is not None
        )

    def close(self) -> None:
        """Give the cursor back to the server, if it still listens."""
        cursor, session = self._cursor, self._session
        self._cursor, self._session = 0, None
        try:
            if cursor:
                self._server()[self.options.db or "admin"].command(
                    {"killCursors": self.options.collection or "$cmd.aggregate", "cursors": [Int64(cursor)]},
                    session=session,
                )
            if session:
                session.end_session()
        except driver.PyMongoError:
            pass
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _is_last(self) -> bool:
        return self.stopped.is_set() or 0 <= self.retries < self.attempts

    def _forget_cursor(self) -> None:
        if self._session is not None:
            try:
                self._session.end_session()
            except driver.PyMongoError:
                pass
        self._cursor, self._session = 0, None
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _more(self, *, max_await_ms: int | None = None) -> EventBatch:
        reply = self._server()[self.options.db or "admin"].command(
            {
                "getMore": Int64(self._cursor),
                "collection": self.options.collection or "$cmd.aggregate",
                "maxTimeMS": max_await_ms or min(self.options.max_await_ms, LONGEST_AWAIT_MS),
                **({"batchSize": 1} if self._careful else {}),
            },
            session=self._session,
            codec_options=DEFAULT_RAW_BSON_OPTIONS,
            read_preference=self._read_preference(),
        )
        raw = bytes(reply.raw)
        events, rest = cursor_reply.split_batch(raw, b"nextBatch")
        self._cursor = rest["id"]
        self._careful = max(0, self._careful - len(raw)) if events else 0
        self._count_election()
        token = rest.get("postBatchResumeToken")
        unseen = self._unseen(events)
        if events and split_events.is_unfinished(events[-1]):
            whole = [event for event in events if not split_events.is_unfinished(event)]
            self._move_to(event_token(whole[-1]) if whole else self.token or "")
        else:
            self._move_to(token["_data"] if token else event_token(events[-1]) if events else self.token or "")
        if not self._cursor and not events:
            raise driver.CursorNotFound("the server closed the change stream", mongodb_failures.CURSOR_NOT_FOUND)
        return EventBatch(unseen, self.token or "", len(raw))

    def _unseen(self, events: list[bytes]) -> list[bytes]:
        """The events without those up to the token that the stream was opened behind by its time."""
        if self._behind is None:
            return events
        for number, event in enumerate(events):
            token = event_token(event)
            if self._is_past(token):
                self._pass()
                return events[number:]
            self._has_met = self._has_met or not self._is_past(token, backwards=True)
        return []

    def _move_to(self, token: str) -> None:
        if self._behind is None:
            self.token = token
        elif self._is_past(token):
            self._pass()
            self.token = token

    def _pass(self) -> None:
        """The event that the stream was opened behind must have come again, or the oplog is another one.

        A stage that looks at the looked-up document may hide an event that it let through before: then its time must be there.
        """
        assert self._behind is not None
        if not self._has_met and not self.holds(self._behind):
            raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_FATAL)
        self._behind = None

    def holds(self, token: str) -> bool:
        """Whether the oplog has this event, for a stream of the same scope without further stages.

        A server of another version may write its token otherwise: then an event of its cluster time has to do.
        """
        at, event_token = resume_token.position(token), resume_token.without_fragment(token)
        target: Any = self._server() if self.options.db is None else self._server()[self.options.db]
        target = target if self.options.collection is None else target[self.options.collection]
        bare = target.watch(
            [{"$project": {"_id": 1}}],
            start_at_operation_time=Timestamp(at.seconds, at.increment),
            show_expanded_events=self.options.show_expanded_events or None,
            batch_size=1,
            max_await_time_ms=LONGEST_AWAIT_MS,
        )
        with bare as stream:
            while not self.stopped.is_set():
                event, mark = stream.try_next(), stream.resume_token
                found = event["_id"]["_data"] if event is not None else mark["_data"] if mark is not None else token
                if resume_token.position(found)[:2] > at[:2]:
                    return False
                is_other_format = found[_VERSION] != token[_VERSION]
                if event is not None and (is_other_format or resume_token.without_fragment(found) == event_token):
                    return True
        return True

    def _is_past(self, token: str, *, backwards: bool = False) -> bool:
        assert self._behind is not None
        this, behind = resume_token.without_fragment(token), resume_token.without_fragment(self._behind)
        return this < behind if backwards else this > behind

    def _stage(self) -> dict[str, Any]:
        stage: dict[str, Any] = {}
        if self.options.db is None:
            stage["allChangesForCluster"] = True
        if self.options.full_document:
            stage["fullDocument"] = self.options.full_document
        if self.options.full_document_before_change:
            stage["fullDocumentBeforeChange"] = self.options.full_document_before_change
        if self.options.show_expanded_events:
            stage["showExpandedEvents"] = True
        self._behind, self._has_met = None, False
        if self.token and self._is_moved():
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            self._behind, self._has_met = self.token, True
        elif self.token and resume_token.resumes_alone(self.token):
            stage["startAfter"] = {"_data": self.token}
        elif self.token:
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            self._behind = self.token
        elif self.start.at is not None:
            stage["startAtOperationTime"] = self.start.at
        return stage

    def _is_moved(self) -> bool:
        """Whether the stream is to go on elsewhere: behind an invalidate, where it has been asked and the place is another."""
        if self.resolved is None or not resume_token.is_invalidate(self.token or ""):
            return False
        before, self.options = self.options, self.resolved()
        return (before.db, before.collection) != (self.options.db, self.options.collection)

    def _server(self) -> pymongo.MongoClient[Any]:
        """The client to read with. A cursor lives on one server: with several to choose from, one is pinned."""
        if self._pinned is not None:
            return self._pinned
        self._pinned = mongodb.pinned(self.connection, self.connection.read_preference)
        return self._pinned or self.connection

    def _read_preference(self) -> Any:
        return ReadPreference.PRIMARY_PREFERRED if self._pinned is not None else self.connection.read_preference


def event_token(event: bytes) -> str:
    """An event's token; its documents are not looked into, as not every one can be decoded."""
    return str(RawBSONDocument(event)["_id"]["_data"])
