"""One run of the capture service: creates its parts, and starts and ends its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession

from cdc_core.settings.parse import Settings
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.stream import filters, transactions
from pipelines.bronze import log as bronze_log
from pipelines.bronze import shard_moves
from pipelines.capture import byte_queue, custom_mode, gaps, metrics, snapshot_start, threads, tokens
from pipelines.capture.committer import Committer
from pipelines.capture.control import ControlEvents
from pipelines.capture.deployment import Deployment
from pipelines.capture.encoder import Encoder
from pipelines.capture.heartbeats import Heartbeats
from pipelines.capture.intake import Intake
from pipelines.capture.main_loop import MainLoop, RunEnd, StreamPosition
from pipelines.capture.oplog_watch import OplogWatch
from pipelines.capture.progress import CaptureProgress, CaptureResult, ProgressReporter, RunCounts
from pipelines.capture.reader import StreamReader
from pipelines.capture.selection import Selection
from pipelines.capture.shutdown import Shutdown
from pipelines.capture.signal_reader import Inbox, SignalReader
from pipelines.capture.start import CaptureStart, StartPlan
from pipelines.capture.stream_opener import ExistingBronze, OpenStream, StreamOpener
from pipelines.channels import notifier
from pipelines.delta import tables as delta
from pipelines.mongodb import change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server
from pipelines.snapshot import queue as snapshot_queue

ONCE_AWAIT_MS = 100
"""Milliseconds for which `--once` waits for events: short, because an empty batch ends the run."""


@dataclass(frozen=True)
class CaptureService:
    """The arguments of the capture service, the same for each of its runs.

    `failed_snapshots` are the collections that the last snapshot of them could not read, in this run or an earlier one.
    """

    spark: SparkSession
    settings: Settings
    stop: threading.Event
    report: Callable[[CaptureProgress], None] | None
    sessions: Callable[[], SparkSession] | None
    metrics: metrics.Metrics
    commit_requested: threading.Event
    opened: Callable[[bronze_log.BronzeLog], None] | None = None
    failed_snapshots: dict[str, str] = field(default_factory=dict)

    def session(self) -> SparkSession:
        """A Spark session for another thread: a new one where the platform can create it."""
        return self.sessions() if self.sessions else self.spark


class Capture:
    """One run of the service, with one client of the source."""

    def __init__(self, service: CaptureService, connection: connections.Connection, client: mongodb.Client) -> None:
        source = service.settings.source
        self._service = service
        # The first heartbeat is due one interval after this, even if no row has come by then.
        self._made_at = time.monotonic()
        batches = service.metrics.streaming.queue = byte_queue.ByteQueue(source.max_queue_size_in_bytes)
        self._threads = threads.Threads(batches)
        self._counts = RunCounts()
        self._deployment = Deployment.of(source, connection, client)
        self._selection = Selection.of(source, self._deployment.filter)
        self._custom = custom_mode.snapshotter(source)
        self._notifier = notifier.Notifier(service.spark, service.settings)
        self._shutdown = Shutdown(service.stop, self._threads)
        self._log: bronze_log.BronzeLog | None = None
        self._stream: change_stream.ChangeStream | None = None
        self._committer: Committer | None = None

    def run(self, *, once: bool, take_over: bool) -> CaptureResult:
        """Capture until the run is stopped, or with `once` until everything up to its start is in bronze."""
        service, halt = self._service, self._threads.halt
        self._check_collections()
        options = self._deployment.stream_options()
        if once:
            options = replace(options, max_await_ms=min(options.max_await_ms, ONCE_AWAIT_MS))
        # Before the stream is opened: later writes do not belong to this run, or `--once` would never end.
        until = mongodb_server.operation_time(self._deployment.client) if once else None
        log, open_stream, plan = self._begin(options, take_over=take_over)
        snapshots = self._snapshots(log)
        inbox = Inbox()
        control = ControlEvents(self._deployment, snapshots, inbox)
        loop = self._loop(log, open_stream, control, RunEnd(until, plan.streams, control, self._threads, self._shutdown))
        if plan.streams:
            replaces_position = snapshot_mode.replaces_lost_position(self._deployment.source, custom=self._custom)
            reader = StreamReader(
                open_stream.stream, self._threads, log, self._counts, service.metrics.streaming, replaces_position
            )
            self._threads.start(threads.READER, reader.run)
        self._threads.start(threads.COMMITTER, loop.committer.run)
        oplog = OplogWatch(self._deployment, log, service.metrics, halt)
        # Not one of the run's threads: nothing waits for it, and its errors do not end the run.
        threading.Thread(target=oplog.run, name="capture-oplog", daemon=True).start()
        # Before the snapshot and signal threads: a signal that stops a snapshot must find it in the queue.
        snapshot_start.add_planned(snapshots, plan, self._notifier)
        self._threads.start(threads.SNAPSHOT, snapshots.run)
        signals = SignalReader(service.settings, service.session, log, self._notifier, halt, inbox)
        self._threads.start(threads.SIGNALS, signals.run)
        # The commits of the start are not progress: a run that only starts, and then fails, counts as a failed attempt.
        self._counts.begin(commits=log.commits)
        position = loop.run(tokens.token_of(log))
        self._finish(loop, position, snapshots)
        log.close(waits=not service.stop.is_set())
        return self.result()

    @property
    def has_begun(self) -> bool:
        """Whether the run has started to read."""
        return self._counts.began_at is not None

    @property
    def has_progressed(self) -> bool:
        """Whether the run has committed something that it read."""
        return self.has_begun and self._log is not None and self._log.commits > self._counts.commits_before

    @property
    def attempts(self) -> int:
        """How many attempts to open the stream have failed in a row; at least 1, for the one that ended the run."""
        return max(1, self._stream.attempts if self._stream is not None else 0)

    def result(self) -> CaptureResult:
        """The result of the run so far."""
        assert self._log is not None
        counts = self._counts.result(commits=self._log.commits, token=tokens.token_of(self._log) or None)
        return replace(counts, failed_snapshots=dict(self._service.failed_snapshots))

    def close(self) -> None:
        """End every thread; nothing is committed after this."""
        self._shutdown.close(self._committer, self._log)

    def _check_collections(self) -> None:
        """Count the captured collections, where the guardrail or the metrics need the number."""
        source, streaming = self._deployment.source, self._service.metrics.streaming
        if source.guardrail_collections_max > 0 or source.metrics_port is not None:
            namespaces = self._deployment.namespaces()
            streaming.captured = tuple(namespaces)
            self._deployment.check_guardrail(len(namespaces))

    def _begin(
        self, options: change_stream.StreamOptions, *, take_over: bool
    ) -> tuple[bronze_log.BronzeLog, OpenStream, StartPlan]:
        """Open the stream, claim bronze, and commit the position where the run begins.

        The stream comes first: a capture that cannot resume has changed nothing.
        """
        service, source = self._service, self._deployment.source
        layout = delta.layout(service.settings.lakehouse)
        table = layout.bronze(service.settings.name)
        fingerprint = filters.fingerprint(source)
        existing = ExistingBronze.read(service.spark, table, fingerprint=fingerprint)
        if existing.position is None:  # later the stream goes on, and silver refuses the one that came second
            self._deployment.check_tables(service.settings)
        replica_set = mongodb_server.server_info(self._deployment.client).replica_set
        opener = StreamOpener.of(
            existing, self._deployment, options, self._threads.halt, replica_set=replica_set, custom=self._custom
        )
        open_stream = opener.open_or_restart(existing.position)
        extra = {**gaps.settings_metadata(source), "replica_set": replica_set}
        log = self._log = bronze_log.BronzeLog.open(
            service.spark, table, take_over=take_over, extra=extra, unclaimed=existing.unclaimed
        )
        service.metrics.opened(log)
        # Another capture has committed in between: from the old position, events would be missing or come twice.
        if log.position != existing.position:
            open_stream.stream.close()
            open_stream = opener.open_or_restart(log.position)
        if service.opened is not None:
            service.opened(log)
        start = CaptureStart(service.spark, self._deployment, log, fingerprint, self._custom, existing.is_other_stream)
        plan = start.begin(open_stream)
        self._stream = open_stream.stream
        service.metrics.streaming.opened(open_stream.stream)
        return log, open_stream, plan

    def _snapshots(self, log: bronze_log.BronzeLog) -> snapshot_queue.SnapshotQueue:
        service = self._service
        start = snapshot_start.SnapshotStart(
            name=service.settings.name,
            session=service.session,
            deployment=self._deployment,
            log=log,
            fields=self._selection.fields,
            halt=self._threads.halt,
            counts=self._counts,
            metrics=service.metrics.snapshot,
        )
        return snapshot_queue.SnapshotQueue(
            start.ready, self._notifier, self._threads.halt, service.metrics.snapshot, service.failed_snapshots
        )

    def _loop(self, log: bronze_log.BronzeLog, opened: OpenStream, control: ControlEvents, end: RunEnd) -> MainLoop:
        service, source = self._service, self._deployment.source
        reporter = ProgressReporter(self._counts, service.report, has_read_snapshots=lambda: control.is_idle)
        committer = Committer(log, self._threads, self._counts, service.metrics, reporter, service.sessions)
        self._committer = committer
        encoder = self._encoder(log)
        self._threads.queue.uncommitted = lambda: encoder.rows.bytes + committer.uncommitted_bytes
        return MainLoop(
            threads=self._threads,
            intake=Intake.of(source, bronze_token=opened.bronze_token),
            encoder=encoder,
            control=control,
            committer=committer,
            heartbeats=Heartbeats(log, source.heartbeat_interval_ms, self._made_at, service.commit_requested),
            reporter=reporter,
            end=end,
            commit_seconds=source.commit_interval_ms / 1000,
        )

    def _encoder(self, log: bronze_log.BronzeLog) -> Encoder:
        source, tracker, moves = self._deployment.source, None, None
        if source.provide_transaction_metadata:
            transaction = bronze_log.open_transaction(self._service.spark, log.table)
            tracker = transactions.TransactionTracker(transaction, token=tokens.token_of(log))
        if mongodb_server.server_info(self._deployment.client).is_sharded:
            moves = shard_moves.remembered(self._service.spark, log.table, log.position)
        return Encoder(
            self._service.settings.name,
            self._selection,
            max_rows=source.max_batch_size,
            max_bytes=source.commit_max_bytes,
            tracker=tracker,
            moves=moves,
        )

    def _finish(self, loop: MainLoop, read: StreamPosition, snapshots: snapshot_queue.SnapshotQueue) -> None:
        """Commit the last rows, end the threads, and raise the error of a thread that failed."""
        if self._threads.failure is None:
            loop.committer.finish(loop.encoder.rows)
        # Before the threads end: that may take seconds, which must not lower the measured rate.
        self._counts.end()
        self._shutdown.end_threads(snapshots)
        self._notifier.close()
        failure = self._threads.failure
        if failure is not None:
            if self._shutdown.excuses(failure):
                return  # A clean end. What was read may not be committed, so the position stays.
            raise failure
        # Last: only now is everything up to this token known to be in bronze.
        loop.heartbeats.last(read.token, is_drained=read.is_drained)
