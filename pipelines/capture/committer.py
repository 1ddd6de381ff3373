"""The thread that commits the stream's rows to bronze, in order, while the next rows are encoded."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from cdc_core.bronze import event_rows as events
from pipelines import clock, memory
from pipelines.bronze import log as bronze_log
from pipelines.capture import metrics, threads
from pipelines.capture.logger import log
from pipelines.capture.progress import ProgressReporter, RunCounts, StreamCounts

LARGE_BYTES = 16 * 2**20
"""Memory is trimmed after commits of this size, of which there are a few per second at most."""


@dataclass
class Committer:
    """Takes rows from the main thread and commits them in that order; at most one full commit waits.

    `sessions` creates the Spark session of a compaction; without it there are none.
    """

    log: bronze_log.BronzeLog
    threads: threads.Threads
    counts: RunCounts
    metrics: metrics.Metrics
    reporter: ProgressReporter
    sessions: Callable[[], SparkSession] | None
    # One place: the next commit is encoded while one is written, and memory holds no more rows than that.
    _queue: queue.Queue[events.EventRows | None] = field(default_factory=lambda: queue.Queue(maxsize=1))
    _submitted: int = 0
    _committed: int = 0
    _submitted_bytes: int = 0
    _committed_bytes: int = 0
    _names_in_use: set[str] = field(default_factory=set)

    # --- called by the main thread

    def submit(self, rows: events.EventRows | None) -> bool:
        """Wait for room and hand rows over; False, and the rows are dropped, where a thread fails first. None ends the thread."""
        size = rows.bytes if rows is not None else 0
        # Before the wait: rows that wait for room use memory as well.
        self._submitted_bytes += size
        # Rows that are dropped count too: no position after them may be committed as complete.
        self._submitted += 1
        while self.threads.failure is None:
            try:
                self._queue.put(rows, timeout=threads.IDLE_WAIT)
            except queue.Full:
                self.reporter.show()
            else:
                return True
        self._submitted_bytes -= size
        return False

    def finish(self, rows: events.EventRows) -> None:
        """Hand the last rows over, and wait until everything is committed."""
        if len(rows):
            self.submit(rows)
        # Where another thread has failed, None is not queued, and `abandon` ends the committer.
        if self.submit(None):
            self.threads.join(threads.COMMITTER)

    def abandon(self) -> None:
        """End the thread of a run that failed before `finish`."""
        deadline = time.monotonic() + threads.CLOSE_SECONDS
        # The queue may stay full: None is offered until the thread has ended, or the time is up.
        while self.threads.is_alive(threads.COMMITTER) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                return self._queue.put(None, timeout=threads.IDLE_WAIT)

    def compact(self) -> None:
        """Compact bronze where that is due; snapshot commits and heartbeats count as well."""
        if self.sessions is not None:
            self.log.compact(self.sessions)

    def count_left_out(self, rows: events.EventRows) -> None:
        """Count filtered events without waiting for a commit, which a source that is filtered entirely never has.

        Only while nothing waits for its commit: then no other thread counts.
        """
        if rows.filtered and len(rows) == 0 and self.has_committed_all:
            self.metrics.streaming.filtered += rows.filtered
            rows.filtered = 0

    @property
    def has_room(self) -> bool:
        """Whether no rows wait for their commit."""
        return self._queue.empty()

    @property
    def has_committed_all(self) -> bool:
        """Whether all rows handed over are in bronze."""
        return self._committed == self._submitted

    @property
    def uncommitted_bytes(self) -> int:
        """The bytes of the rows that are handed over, or wait for room, and are not in bronze yet."""
        return self._submitted_bytes - self._committed_bytes

    # --- the thread

    def run(self) -> None:
        """Commit the rows that are handed over, until None comes."""
        while (rows := self._queue.get()) is not None:
            self._commit(rows)
            # Written by this thread only, as `_submitted` by the main thread: comparing them needs no lock.
            size = rows.bytes
            self._committed += 1
            self._committed_bytes += size
            del rows  # Or they stay in memory until the next ones come.
            if size >= LARGE_BYTES:
                memory.trim()

    def _commit(self, rows: events.EventRows) -> None:
        """Commit the rows, then run what waits for them: a snapshot begins, a channel drops its signal."""
        ts_ms, operations, newest_time = clock.now_ms(), rows.operations(), rows.newest_time
        self.log.append(lambda batch, first: rows.table(batch=batch, first_offset=first, ts_ms=ts_ms))
        # After the commit. If the capture is killed before it, the next run reads the signal or the event again.
        for action in rows.then:
            action()
        for name in rows.name_conflicts - self._names_in_use:
            log.warning(
                "field.renames: some documents already have a field %s; in these documents the field is not renamed", name
            )
        self._names_in_use |= rows.name_conflicts
        streaming = self.metrics.streaming
        streaming.committed(operations, position=newest_time, at=time.time())
        streaming.filtered += rows.filtered
        streaming.erroneous += rows.skipped
        streaming.transactions += rows.ended_transactions
        self._count(rows, newest_time)
        self.compact()

    def _count(self, rows: events.EventRows, newest: tuple[int, int] | None) -> None:
        """Add the commit to the run's counts."""
        previous = self.counts.stream
        self.counts.stream = StreamCounts(
            events=previous.events + rows.changes,
            lossy=previous.lossy + rows.lossy,
            skipped=previous.skipped + rows.skipped,
            batches=self.log.commits,
            # A commit without a change of the source, such as one of signals, has no lag.
            lag_seconds=None if newest is None else max(0.0, time.time() - newest[0]),
        )
