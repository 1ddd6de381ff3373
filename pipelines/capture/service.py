"""The capture service: every change event of the source lands in bronze, once, in order.

    reader thread     change stream ─→ raw batches ─→ bounded queue
    main thread       queue ─→ rows (decode, number, encode) ─→ at most one full commit waiting
    committer thread  rows ─→ Parquet ─→ one Delta commit
    snapshot thread   chunks from executors ─→ commits in between (`pipelines.snapshot.queue`)
    signals thread    a file, a table ─→ what the snapshot thread is asked for (`pipelines.channels.signals`)

The position is in the table (`pipelines.bronze.log`): after `kill -9` at any instant the next start reads it there and goes
on behind it. A first start commits the stream's token before anything is read, so that a snapshot's stream begins
before its first chunk.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.stream import filters, transactions
from pipelines.bronze import log as bronze
from pipelines.capture import byte_queue, metrics, snapshot_start, start, stream_opener, threads
from pipelines.capture import position as positions
from pipelines.capture import progress as progresses
from pipelines.capture.committer import Committer
from pipelines.capture.control import ControlEvents
from pipelines.capture.deployment import Deployment
from pipelines.capture.encoder import Encoder
from pipelines.capture.heartbeats import Heartbeats
from pipelines.capture.intake import Intake
from pipelines.capture.logger import log
from pipelines.capture.oplog_watch import OplogWatch
from pipelines.capture.reader import Reader
from pipelines.capture.selection import Selection
from pipelines.capture.signal_reader import Inbox, SignalReader
from pipelines.capture.threads import IDLE_WAIT
from pipelines.channels import notifier
from pipelines.delta import tables as delta
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source
from pipelines.snapshot import queue as snapshots
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

STOP_SECONDS = 3.0
"""So long a capture that was asked to stop waits for its threads."""
ONCE_AWAIT_MS = 100
"""So long a run with an end waits for events: that there are none is what it waits for."""


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = False,
    take_over: bool = False,
    stop: threading.Event | None = None,
    progress: Callable[[progresses.Progress], None] | None = None,
    sessions: Callable[[], SparkSession] | None = None,
) -> progresses.CaptureResult:
    """Capture until `stop` is set, or with `once` until everything up to the start of the run is in bronze.

    When the source is lost on the way, the capture starts over after `retriable.restart.connector.wait.ms`, so often in a
    row as `errors.max.retries` says; a first start that does not reach the source ends at once.

    Safe to repeat and to kill: the table carries the position. Raises one of `errors`, and has then committed all that
    it had read in order up to the error.
    """
    stop = stop or threading.Event()
    counted = metrics.Metrics(settings.name)

    def capturing(connection: source.Connection, client: mongodb.Client) -> _Capture:
        return _Capture(spark, settings, connection, client, stop, progress, sessions, counted)

    def page() -> str:
        from pipelines.page import page as pages

        return pages.rendered(pages.read(sessions() if sessions else spark, settings))

    port, address = settings.source.metrics_port, settings.source.metrics_address
    with metrics.served(counted, port=port, address=address, page=page):
        done, spent = None, 0
        while True:
            capture = None
            try:
                with _connected(settings, capturing, stop) as capture:
                    return progresses.joined(done, capture.run(once=once, take_over=take_over))
            except Stopped:
                return done or progresses.NOTHING
            except errors.SourceUnreachable as error:
                has_begun = capture is not None and capture.has_begun
                spent = (0 if capture is not None and capture.has_progressed else spent) + (
                    capture.attempts if capture else 1
                )
                if stop.is_set():
                    return (
                        progresses.joined(done, capture.result())
                        if capture is not None and has_begun
                        else done or progresses.NOTHING
                    )
                is_last = 0 <= settings.source.errors_max_retries < spent
                if is_last or not (has_begun or done):
                    raise
                wait = settings.source.retriable_restart_connector_wait_ms / 1000
                log.warning("%s; the capture starts over in %.1f s", error, wait)
            if capture is not None and has_begun:
                done = progresses.joined(done, capture.result())
            counted.restarts += 1
            if stop.wait(wait) and done is not None:
                return done


class Stopped(Exception):
    """The run was stopped while it waited for a server that had not answered yet: nothing was begun."""


def check_source(settings: Settings, stop: threading.Event | None = None) -> None:
    """Raises what `run` would raise of a source that it cannot reach, log in to or follow: before Spark is started for it.

    Raises `Stopped` where `stop` is set before the server has answered.
    """
    with _suitable(settings, stop or threading.Event()):
        pass


def _answered(asked: Callable[[], mongodb.ServerInfo], stop: threading.Event) -> mongodb.ServerInfo:
    """What a server answers; `Stopped` where the run is to end before: nobody waits for a server that may be gone."""
    answer: queue.SimpleQueue[mongodb.ServerInfo | BaseException] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(asked())
        except BaseException as error:  # the thread that waits raises it
            answer.put(error)

    threading.Thread(target=ask, name="capture-connecting", daemon=True).start()
    while True:
        try:
            found = answer.get(timeout=IDLE_WAIT)
        except queue.Empty:
            if stop.is_set():
                raise Stopped from None
        else:
            if isinstance(found, BaseException):
                raise found
            return found


@contextlib.contextmanager
def _suitable(settings: Settings, stop: threading.Event) -> Iterator[tuple[source.Connection, mongodb.Client]]:
    """A connection and a client of a source that can be captured, closed at the end."""
    connection = source.connection(settings.source)
    client = connection.client()
    try:
        info = _answered(functools.partial(mongodb.server_info, client), stop)
        mongodb.check_suitable(info)
        source.check_oversize(settings.source, info)
        yield connection, client
    finally:
        mongodb.close(client)


@contextlib.contextmanager
def _connected(
    settings: Settings, capturing: Callable[[source.Connection, mongodb.Client], _Capture], stop: threading.Event
) -> Iterator[_Capture]:
    """A capture with a client of its own, both closed at the end."""
    with _suitable(settings, stop) as (connection, client):
        capture = capturing(connection, client)
        try:
            yield capture
        finally:
            capture.close()


@dataclass
class _Capture:
    """One run of the service: the threads and what they share."""

    spark: SparkSession
    settings: Settings
    connection: source.Connection
    client: mongodb.Client
    stop: threading.Event
    report: Callable[[progresses.Progress], None] | None
    sessions: Callable[[], SparkSession] | None
    metrics: metrics.Metrics

    def __post_init__(self) -> None:
        self._source = self.settings.source
        self._leave_at: float | None = None
        self._queue = self.metrics.streaming.queue = byte_queue.ByteQueue(self._source.max_queue_size_in_bytes)
        self._threads = threads.Threads(self._queue)
        self._halt = self._threads.halt
        self._made_at = time.monotonic()
        self._counts = progresses.RunCounts()
        self._stream_read: mongodb.ChangeStream | None = None
        self._deployment = Deployment.of(self._source, self.connection, self.client)
        self._selection = Selection.of(self._source, self._deployment.filter)
        self._custom = _snapshotter(self._source.snapshot_mode_custom_name)
        self._fingerprint = filters.fingerprint(self._source)
        self._log: bronze.Log | None = None
        self._notifier = notifier.Notifier(self.spark, self.settings)
        self._committer: Committer | None = None
        self._parent = sparks.submitter()

    def run(self, *, once: bool, take_over: bool) -> progresses.CaptureResult:
        if self._source.guardrail_collections_max > 0 or self._source.metrics_port is not None:
            captured = self._deployment.namespaces()
            self.metrics.streaming.captured = tuple(captured)
            self._deployment.check_guardrail(len(captured))
        options = self._deployment.stream_options()
        if once:
            options = replace(options, max_await_ms=min(options.max_await_ms, ONCE_AWAIT_MS))
        table = delta.layout(self.settings.lakehouse).bronze(self.settings.name)
        until = mongodb.operation_time(self.client) if once else None
        existing = stream_opener.ExistingBronze.read(self.spark, table, fingerprint=self._fingerprint)
        opener = stream_opener.StreamOpener(
            self._deployment, options, self._halt, custom=self._custom, is_other_stream=existing.is_other_stream
        )
        opened = opener.open_or_restart(existing.position)
        extra = {"stream": self._fingerprint}
        self._log = bronze.Log.open(self.spark, table, take_over=take_over, extra=extra, found=existing.found)
        if self._log.position != existing.position:  # another capture has written in between
            opened.stream.close()
            opened = opener.open_or_restart(self._log.position)
        stream = opened.stream
        begins = start.Start(
            self.spark, self._deployment, self._log, self._fingerprint, self._custom, existing.is_other_stream
        )
        plan = begins.begin(opened)
        self._stream_read = stream
        self.metrics.streaming.opened(stream)
        self._intake = Intake.of(self._source, bronze_token=opened.bronze_token)
        self._encoder = self._new_encoder()
        turns = snapshot_start.SnapshotStart(
            name=self.settings.name,
            session=self._session,
            deployment=self._deployment,
            log=self._log,
            fields=self._selection.fields,
            halt=self._halt,
            counts=self._counts,
            metrics=self.metrics.snapshot,
        )
        self._snapshots = snapshots.Snapshots(turns.ready, self._notifier, self._halt, self.metrics.snapshot)
        inbox = Inbox()
        self._control = ControlEvents(self._deployment, self._snapshots, inbox)
        self._reporter = progresses.Reporter(self._counts, self.report, lambda: self._control.is_idle)
        self._committer = Committer(self._log, self._threads, self._counts, self.metrics, self._reporter, self.sessions)
        self._heartbeats = Heartbeats(self._log, self._source.heartbeat_interval_ms, self._made_at)
        if plan.streams:
            reader = Reader(stream, self._threads, self._log, self._counts, self.metrics.streaming)
            self._threads.start(threads.READER, reader.run)
        self._threads.start(threads.COMMITTER, self._committer.run)
        oplog = OplogWatch(self._deployment, self._log, self.metrics, self._halt)
        threading.Thread(target=oplog.run, name="capture-oplog", daemon=True).start()
        snapshot_start.add_planned(self._snapshots, plan, self._notifier)
        self._threads.start(threads.SNAPSHOT, self._snapshots.run)
        signals = SignalReader(self.settings, self._session, self._log, self._notifier, self._halt, inbox)
        self._threads.start(threads.SIGNALS, signals.run)
        self._counts.begin(commits=self._log.commits)
        self._encode(until, ends_with_snapshot=not plan.streams)
        self._log.close()
        return self.result()

    def _new_encoder(self) -> Encoder:
        assert self._log is not None
        tracker = None
        if self._source.provide_transaction_metadata:
            opened = bronze.open_transaction(self.spark, self._log.table)
            tracker = transactions.Tracker(opened, token=self._position_token())
        return Encoder(
            self.settings.name,
            self._selection,
            max_rows=self._source.max_batch_size,
            max_bytes=self._source.commit_max_bytes,
            tracker=tracker,
        )

    @property
    def has_begun(self) -> bool:
        """Whether the run got as far as reading."""
        return self._counts.began_at is not None

    @property
    def has_progressed(self) -> bool:
        """Whether the run committed something that it read."""
        return self.has_begun and self._log is not None and self._log.commits > self._counts.commits_before

    @property
    def attempts(self) -> int:
        """How often the stream was tried in vain since it last answered; at least the one that ended the run."""
        return max(1, self._stream_read.attempts if self._stream_read is not None else 0)

    def close(self) -> None:
        """End every thread; nothing that was not committed is committed after this."""
        self._threads.end()
        if self._committer is not None:
            self._committer.abandon()
        is_hurried = self.stop.is_set() or isinstance(self._threads.failure, errors.SourceUnreachable)
        leave_at = self._leave_at or time.monotonic() + STOP_SECONDS
        self._threads.join_all(leave_at=leave_at if is_hurried else None)
        if self._log is not None and not isinstance(self._threads.failure, errors.OwnershipLost):
            with contextlib.suppress(Exception):  # the error that ended the run is the one to tell of
                self._log.close()

    def _session(self) -> SparkSession:
        return self.sessions() if self.sessions else self.spark

    # --- the main thread ---

    def _encode(self, until: Timestamp | None, *, ends_with_snapshot: bool) -> None:
        """Turn what the reader read into commits, by size or time, until the end of the run."""
        encoder = self._encoder
        assert self._committer is not None
        first_at = idle_since = time.monotonic()
        token, is_drained = self._position_token(), False
        while True:
            if len(encoder.rows) and self._snapshots.is_blocking:
                self._hand_over()
            batch = self._next(first_at)
            if batch is not None:
                try:
                    first_at = self._add(batch, first_at)
                except errors.MedallionError as error:
                    self._threads.stream_failure = error  # of an event: those before it are committed
                    break
                if is_drained_now := not batch.events:
                    encoder.end_transaction(batch.token)
                token, is_drained = max(token, batch.token), is_drained_now
            first_at = time.monotonic() if len(encoder.rows) == 0 else first_at
            self._control.handle_received(encoder.rows, token=token)
            if len(encoder.rows) and self._is_due(first_at):
                self._hand_over()
                first_at = idle_since = time.monotonic()
            if self._ended() or self._has_read_to_failure():
                break
            if until is not None and self._is_caught_up(token, until, is_drained=is_drained):
                break
            if ends_with_snapshot and self._control.is_idle:
                break
            if len(encoder.rows) == 0 and time.monotonic() - idle_since >= self._heartbeats.idle_seconds:
                self._heartbeats.idle(token, has_committed_all=self._committer.has_committed_all)
                idle_since = time.monotonic()
            self._reporter.show()
        self._finish(encoder.rows, token, is_drained=is_drained)

    def _add(self, batch: mongodb.Batch, first_at: float) -> float:
        """Add a batch's events, and hand the rows over each time that a commit is full; since when rows wait."""
        for event in self._intake.events(batch):
            before = self._encoder.rows.length
            control_event = self._encoder.add(event)
            if control_event is not None:
                try:
                    self._control.handle(self._encoder.rows, control_event)
                except errors.MedallionError:
                    # What could not be done is not behind the position: the next start does it.
                    self._encoder.rows.cut(before)
                    raise
            if self._encoder.is_full:
                self._hand_over()
                first_at = time.monotonic()
        return first_at

    def _next(self, first_at: float) -> mongodb.Batch | None:
        """The next batch of the stream, or None after a while; none while a blocking snapshot is read."""
        if self._snapshots.is_blocking:
            self._halt.wait(IDLE_WAIT)
            return None
        return self._queue.get(timeout=self._wait(self._encoder.rows, first_at))

    def _has_read_to_failure(self) -> bool:
        """Whether the reader has failed, and everything that it read before is in rows, or waits for a snapshot anyway."""
        return self._threads.stream_failure is not None and (self._queue.is_empty() or self._snapshots.is_blocking)

    def _hand_over(self) -> None:
        """Give the rows to the committer."""
        assert self._committer is not None
        self._heartbeats.rows_come()
        self._committer.submit(self._encoder.take())

    def _wait(self, rows: events.Rows, first_at: float) -> float:
        if len(rows) == 0:
            return IDLE_WAIT
        due = first_at + self._source.commit_interval_ms / 1000
        return min(IDLE_WAIT, max(0.0, due - time.monotonic()))

    def _is_due(self, first_at: float) -> bool:
        assert self._committer is not None
        is_waiting = time.monotonic() - first_at >= self._source.commit_interval_ms / 1000
        return is_waiting and self._committer.has_room

    def _ended(self) -> bool:
        if self._parent is not None and os.getppid() != self._parent:
            self._halt.set()
        return self.stop.is_set() or self._halt.is_set()

    def _is_caught_up(self, token: str, until: Timestamp, *, is_drained: bool) -> bool:
        """Whether all events up to `until` were read. A high-water mark at a time does not hold that time's events yet."""
        if not self._control.is_idle or not self._queue.is_empty():
            return False
        at = positions.cluster_time(token)
        return at > until or (at == until and is_drained)

    def _finish(self, rows: events.Rows, token: str, *, is_drained: bool) -> None:
        """Commit what was read in order, end the threads, and raise what one of them met."""
        assert self._committer is not None
        if self._threads.failure is None:
            self._committer.finish(rows)
        self._counts.end()
        self._threads.failure = self._threads.failure or self._threads.stream_failure
        self._threads.end()
        self._snapshots.wake()
        self._leave_at = time.monotonic() + STOP_SECONDS
        is_hurried = self.stop.is_set() or self._threads.failure is not None
        for name in (threads.SNAPSHOT, threads.SIGNALS, threads.READER):
            self._threads.join(name, until=self._leave_at if is_hurried else None)
        self._notifier.close()
        failure = self._threads.failure
        if failure is not None:
            if self.stop.is_set() and isinstance(failure, errors.SourceUnreachable):
                return  # a clean end; what was read may not be committed, so that the position stays
            raise failure
        self._heartbeats.last(token, is_drained=is_drained)

    def _position_token(self) -> str:
        return positions.token_of(self._log) if self._log is not None else ""

    def result(self) -> progresses.CaptureResult:
        """What the run has done."""
        assert self._log is not None
        token = self._position_token() or None
        return self._counts.result(commits=self._log.commits, token=token)


def _snapshotter(name: str | None) -> snapshot_mode.Snapshotter | None:
    """The class of `snapshot.mode.custom.name`, `package.module:Class`, made."""
    if name is None:
        return None
    where = "source.snapshot.mode.custom.name"
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        made: snapshot_mode.Snapshotter = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise errors.SettingsError(
            errors.Problem(where, f"{name} is no class that can be imported and made without arguments: {error}")
        ) from error
    return made
