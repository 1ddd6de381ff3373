"""Change streams: batches of raw events, and where to resume after an interruption.

They are read with raw commands, because decoding a batch takes ten times as long as keeping it as bytes. Which errors are
resumable, and where to resume, follows the rules of the driver's own change stream (MongoDB specification "Change Streams",
section "Resumable Error"). `_stage` chooses from where the server reads: after a token (`startAfter`), or from a cluster time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pymongo
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import errors as driver

from cdc_core.stream import resume_token, split_events
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from pipelines.mongodb import stream_cursor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamOptions:
    """The options of a change stream; `stages` follow `$changeStream` on the server.

    `careful_stages` let the same events through, slower, and are used where the server fails at an event: with `stages` it may fail at
    one that they do not let through, of another database even, because a name there is not UTF-8.
    """

    db: str | None = None
    collection: str | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    careful_stages: Sequence[Mapping[str, Any]] = ()
    full_document: str | None = None
    full_document_before_change: str | None = None
    max_await_ms: int = 500
    show_expanded_events: bool = True


@dataclass(frozen=True)
class StreamStart:
    """Where a stream begins: after a token, at a cluster time (inclusive), or now.

    `event` is the token of the last event before it, by which the oplog is known (`_check_oplog`).
    """

    token: str | None = None
    at: Timestamp | None = None
    event: str | None = None


class EventBatch(NamedTuple):
    """One reply: raw events in stream order, the token after them, which is never inside a split event, and the reply's size.

    `is_drained`: the server had no further event of the token's cluster time, and has repeated all events from before an interruption.
    Without events and with False, only repeated events came, or the wait was too short to tell.
    """

    events: list[bytes]
    token: str
    bytes: int
    is_drained: bool


LONGEST_AWAIT_MS = 1_000
"""The longest wait of one `getMore`, also for a longer `cursor.max.await.time.ms`, so that a stop does not wait for it."""

_VERSION = slice(18, 22)
"""The place of the format version in a token."""

OUTAGE_SECONDS = 5.0
LOG_AGAIN_SECONDS = 60.0

CAREFUL_BYTES = 64 * 1024 * 1024
"""Bytes that are read one event at a time after the server failed at an event: more than one reply holds."""


@dataclass
class Outage:
    """Since when the server does not answer, and when that was last logged, in monotonic seconds."""

    since: float
    logged_at: float | None = None

    @property
    def is_logged(self) -> bool:
        return self.logged_at is not None

    def is_due(self) -> bool:
        """Whether to log the outage now: not during an election, which is over in seconds."""
        now = time.monotonic()
        due_at = self.since + OUTAGE_SECONDS if self.logged_at is None else self.logged_at + LOG_AGAIN_SECONDS
        if now < due_at:
            return False
        self.logged_at = now
        return True


@dataclass
class Replay:
    """The events that a stream repeats when it is opened at the cluster time of its last event: all up to the token `behind`.

    `has_met`: the event of that token has come again, so that the oplog is the same one.
    """

    behind: str
    has_met: bool = False

    def unseen(self, events: list[bytes]) -> list[bytes]:
        """The events after the token."""
        for number, event in enumerate(events):
            order = resume_token.compare(event_token(event), self.behind)
            if order > 0:
                return events[number:]
            self.has_met = self.has_met or order == 0
        return []

    def is_past(self, token: str) -> bool:
        return resume_token.compare(token, self.behind) > 0

    def is_over(self, mark: str) -> bool:
        """Whether an empty reply with this post-batch token came after all events of the cluster time, and not before the first."""
        return self.is_past(resume_token.behind(mark))


@dataclass
class ChangeStream:
    """A change stream that is read batch by batch, and reopened after elections and lost connections.

    After an event it is opened at the event's cluster time, and repeated events are dropped (`resume_token.resumes_alone` says
    why). Where the event itself does not come again, the position is lost.

    `retries` limits the failed attempts in a row (-1: no limit); `attempts` counts them since the server last answered. Delays are
    in seconds. `begins` is the token from when the stream was first opened: everything that it reads comes after it.
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
    """Returns the options to reopen with after an invalidate: a database may be created again in another spelling."""

    def __post_init__(self) -> None:
        self.token: str | None = self.start.token
        self.begins: str | None = None
        self._event: str | None = self.start.event  # The last event, also of earlier runs.
        self._cursor = stream_cursor.StreamCursor(self.connection)
        self._replay: Replay | None = None
        self._probed: EventBatch | None = None
        self._behind: str | None = None  # The token of `startAfter`, until an event comes.
        self._foreign: str | None = None  # The token of an invalidate of another namespace than this stream's.
        self._is_merged = False  # Whether a mongos merges the streams of shards.
        self._is_inside = False  # Whether further fragments of an event are to come.
        self._careful = 0  # The bytes that are still to be read one event at a time.
        self.elections: frozenset[Any] = frozenset()  # The identifiers of those that the driver's monitor has seen.
        self.attempts = 0
        self._outage: Outage | None = None

    @property
    def is_open(self) -> bool:
        """Whether a cursor is open on the server, as far as this process knows."""
        return self._cursor.is_open

    @property
    def server(self) -> pymongo.MongoClient[Any]:
        """A client of the server that the stream reads, or will read."""
        return self._cursor.server()

    def open(self) -> str | None:
        """Open the cursor; returns the token of its position."""
        stage = self._stage()
        stages = (self._careful and self.options.careful_stages) or self.options.stages
        reply = self._cursor.open(self.options.db, self.options.collection, [{"$changeStream": stage}, *stages])
        self._is_merged = mongodb.is_router(self.connection)
        # `capture.start.op.time` may lie before the oplog.
        is_at_beginning = self.start.at is not None and self._event is None and self._behind == self.begins
        if self._behind is not None and not is_at_beginning and not resume_token.is_invalidate(self._behind):
            _check_oplog(self, self._behind, self._event)
        token = reply.get("postBatchResumeToken")
        if token:
            self.begins = self.begins or token["_data"]
            self._move_to(token["_data"])
        return self.token

    def _count_election(self) -> None:
        """Add the identifier of the newest election, which the driver's monitor keeps."""
        if election := self.connection.topology_description.max_election_id:
            self.elections |= {election}

    def next(self) -> EventBatch:
        """The next batch, empty after `max_await_ms` without an event; reopens the stream after a resumable error.

        Raises `HistoryLost`, or one of `errors` when the retries are used up.
        """
        if self._probed is not None:
            # Read by `probe`; its events are in no other batch.
            first_batch, self._probed = self._probed, None
            return first_batch
        while True:
            asked_at = time.monotonic()
            try:
                if not self._cursor.is_open:
                    self.open()
                batch = self._more()
                if self._outage is not None and self._outage.is_logged:
                    log.warning("the source answers again after %d attempts", self.attempts)
                self.attempts, self._outage = 0, None
                return batch
            except driver.PyMongoError as error:
                self._cursor.forget()
                self.attempts += 1
                if mongodb_failures.is_resumable(error) and not self._is_last():
                    self.reconnects += 1
                    self._log_outage(error, asked_at)
                    self.stopped.wait(self.delay())
                elif self._is_refused_for_its_scope(error):
                    self._foreign = self._behind
                elif self._has_failed_at_an_event(error):
                    self._careful = CAREFUL_BYTES
                else:
                    raise mongodb_failures.stream_error(error) from error

    def _is_refused_for_its_scope(self, error: driver.PyMongoError) -> bool:
        """Whether the server refuses the token because it is an invalidate of another namespace, which it says with the first event.

        The only captured database was dropped: now the whole deployment is read, or it was created again in another case. Replies
        without an event may have moved the position: no event came before it, and the stream continues there.
        """
        is_refused = getattr(error, "code", None) in mongodb_failures.TOKEN_REFUSED
        return is_refused and resume_token.is_invalidate(self._behind or "")

    def _log_outage(self, error: Exception, asked_at: float) -> None:
        """Log a lasting outage repeatedly: endless attempts look like a quiet source."""
        # Not since the last answer: the stream may not have been read for long.
        self._outage = self._outage or Outage(asked_at)
        if self._outage.is_due():
            # An error of the server may quote a document.
            is_of_driver = isinstance(error, driver.ConnectionFailure)
            reason = mongodb_failures.first_line(error) if is_of_driver else type(error).__name__
            log.warning("the source does not answer (%s): %d attempts, and no end", reason, self.attempts)

    def delay(self) -> float:
        """The seconds to wait before the next attempt: doubled with each, up to `max_delay`."""
        return min(self.initial_delay * 2.0 ** min(self.attempts - 1, 60), self.max_delay)

    def probe(self) -> None:
        """Read a first batch without waiting for events, for `next` to return: only then does the server report a lost position."""
        # A mongos waits for its shards' first replies as long as for events, and does not report those that are missing.
        max_await_ms = LONGEST_AWAIT_MS if self._is_merged else 1
        try:
            # After so short a wait, an empty reply does not mean that there are no events.
            self._probed = self._more(max_await_ms=max_await_ms)._replace(is_drained=False)
        except driver.OperationFailure as error:
            if not self._has_failed_at_an_event(error):
                raise
            self._cursor.forget()
            self._careful = CAREFUL_BYTES

    def _has_failed_at_an_event(self, error: BaseException) -> bool:
        """Whether there may be events before the one that the server failed at: they are read one by one until it fails again."""
        return (
            mongodb_failures.is_about_an_event(error)
            and not mongodb_failures.is_resumable(error)
            and not self._careful
            and self.token is not None
        )

    def close(self) -> None:
        """Kill the cursor on the server, if that still answers."""
        self._cursor.close()

    def _is_last(self) -> bool:
        return self.stopped.is_set() or 0 <= self.retries < self.attempts

    def _more(self, *, max_await_ms: int | None = None) -> EventBatch:
        # One event at a time where the server fails at one of them: those before it are captured.
        size, events, rest = self._cursor.more(
            max_await_ms=max_await_ms or min(self.options.max_await_ms, LONGEST_AWAIT_MS),
            batch_size=1 if self._careful else None,
        )
        self._careful = max(0, self._careful - size) if events else 0
        self._count_election()
        token = rest.get("postBatchResumeToken")
        new_events = self._unseen(events)
        self._behind = None if events else self._behind
        if events and not resume_token.resumes_alone(last_token := event_token(events[-1])):
            self._event = last_token
        # A mongos that waits long for a shard's next fragment replies without events, and with the token of the last one.
        self._is_inside = split_events.is_unfinished(events[-1]) if events else self._is_inside
        # Never a position inside a split event: the stream would resume with its second fragment.
        if self._is_inside:
            whole_events = [event for event in events if not split_events.is_unfinished(event)]
            self._move_to(event_token(whole_events[-1]) if whole_events else self.token or "")
        else:
            self._move_to(token["_data"] if token else event_token(events[-1]) if events else self.token or "")
        if not self._cursor.is_open and self.token == self._foreign:
            # The database exists again: this stream has returned the invalidate as well, and can resume after its token.
            self._foreign = None
        if not self._cursor.is_open and not events:
            # As the driver would raise it: `next` reopens the stream at the position, and counts the attempt.
            raise driver.CursorNotFound("the server closed the change stream", mongodb_failures.CURSOR_NOT_FOUND)
        # A mongos also replies without events where it waits for a shard, which may have more of the last event's cluster time.
        may_have_more = self._is_merged and not resume_token.resumes_alone(self.token or "")
        is_replayed = self._replay is None or self._replay.is_over(token["_data"] if token else "")
        is_drained = not (events or self._is_inside or may_have_more) and is_replayed
        return EventBatch(new_events, self.token or "", size, is_drained)

    def _unseen(self, events: list[bytes]) -> list[bytes]:
        """The events without those that a stream opened at a cluster time repeats."""
        if self._replay is None:
            return events
        new_events = self._replay.unseen(events)
        if new_events:
            self._end_replay(self._replay)
        return new_events

    def _move_to(self, token: str) -> None:
        if self._replay is not None:
            if not self._replay.is_past(token):
                return
            self._end_replay(self._replay)
        self.token = token

    def _end_replay(self, replay: Replay) -> None:
        """End the replay; raises `HistoryLost` where the event of its token has not come again: it is another oplog.

        A stage that matches the looked-up document may hide an event that it let through before: then the oplog must hold it.
        """
        if not replay.has_met and not self.holds(replay.behind):
            raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_FATAL)
        self._replay = None

    def holds(self, token: str) -> bool:
        """Whether the oplog has this event, by a stream of the same scope without stages, or else of the whole deployment.

        The stream that read the event may have had a wider scope, while the only captured database did not exist. Another server
        version may format the token differently: then any event of its cluster time counts.
        """
        if self.options.db is None:
            return _is_in(self, None, None, token)
        if _is_in(self, self.options.db, self.options.collection, token):
            return True
        try:
            return _is_in(self, None, None, token)
        except driver.OperationFailure:  # The user may read one database only.
            return False

    def _stage(self) -> dict[str, Any]:
        if self._is_moved():
            self._foreign = self.token
        stage: dict[str, Any] = {}
        if self.options.db is None:
            stage["allChangesForCluster"] = True
        if self.options.full_document:
            stage["fullDocument"] = self.options.full_document
        if self.options.full_document_before_change:
            stage["fullDocumentBeforeChange"] = self.options.full_document_before_change
        if self.options.show_expanded_events:
            stage["showExpandedEvents"] = True
        self._replay, self._behind, self._is_inside = None, None, False
        if self.token and self.token == self._foreign:
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            # This stream does not read the token's namespace: the event cannot come again.
            self._replay = Replay(self.token, has_met=True)
        elif self.token and resume_token.resumes_alone(self.token):
            # Not `resumeAfter`, which refuses the token of an invalidate.
            stage["startAfter"] = {"_data": self.token}
            self._behind = self.token
        elif self.token:
            position = resume_token.position(self.token)
            stage["startAtOperationTime"] = Timestamp(position.seconds, position.increment)
            self._replay = Replay(self.token)
        elif self.start.at is not None:
            stage["startAtOperationTime"] = self.start.at
        return stage

    def _is_moved(self) -> bool:
        """Whether `resolved` names another namespace after an invalidate; updates the options."""
        if self.resolved is None or not resume_token.is_invalidate(self.token or ""):
            return False
        old_options, self.options = self.options, self.resolved()
        self._event = None  # The new namespace may not have it.
        return (old_options.db, old_options.collection) != (self.options.db, self.options.collection)


def event_token(event: bytes) -> str:
    """The token of a raw event. Its documents are not decoded, because some cannot be."""
    return str(RawBSONDocument(event)["_id"]["_data"])


def reaches(server: pymongo.MongoClient[Any], token: str) -> bool:
    """Whether a server's oplog begins before this token, as far as the user may know.

    The server accepts any earlier time for an oplog that has never been truncated, such as another deployment's.
    """
    window = mongodb_server.window(server)
    return window is None or resume_token.position(token).seconds >= window.first


def _check_oplog(stream: ChangeStream, mark: str, event: str | None) -> None:
    """Raise `HistoryLost` where the stream resumes after `mark`, a time without an event, and the oplog lacks the event before it, or
    begins later where there was none.

    The server accepts such a time whatever it holds: also where an older copy of its data was restored, or in another deployment. An
    event that an oplog no longer reaches says nothing, nor does one of a sharded cluster, of which a shard may have been removed.
    """
    try:
        is_known = stream._is_merged or (reaches(stream.server, mark) if event is None else stream.holds(event))
    except driver.OperationFailure as error:
        if mongodb_failures.is_resumable(error):
            raise
        return
    if not is_known:
        stream.close()
        raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)


def _is_in(stream: ChangeStream, db: str | None, collection: str | None, token: str) -> bool:
    """Whether a stream over this namespace, without further stages, returns the event of this token."""
    position, wanted_token = resume_token.position(token), resume_token.without_fragment(token)
    stage: dict[str, Any] = {"startAtOperationTime": Timestamp(position.seconds, position.increment)}
    if db is None:
        stage["allChangesForCluster"] = True
    if stream.options.show_expanded_events:
        stage["showExpandedEvents"] = True
    # Read raw: the driver's own stream decodes the events, and refuses some collection names.
    cursor, batch_size = stream_cursor.StreamCursor(stream.connection), 1
    try:
        cursor.open(db, collection, [{"$changeStream": stage}, {"$project": {"_id": 1}}])
        while cursor.is_open and not stream.stopped.is_set():
            _, events, rest = cursor.more(max_await_ms=LONGEST_AWAIT_MS, batch_size=batch_size)
            for event in map(event_token, events):
                if resume_token.position(event)[:2] > position[:2]:
                    return False
                if event[_VERSION] != token[_VERSION] or resume_token.without_fragment(event) == wanted_token:
                    return True
            batch_token = rest.get("postBatchResumeToken")
            if not events and batch_token and resume_token.position(batch_token["_data"])[:2] > position[:2]:
                return False
            # Usually it is the first event. Behind it a transaction may have a hundred thousand.
            batch_size = min(2 * batch_size, 1000)
    finally:
        cursor.close()
    # A stop ended it, and nothing is known; or an invalidate did, and the event would have come before that.
    return stream.stopped.is_set()
