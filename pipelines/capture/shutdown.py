"""The end of a run: its causes, the order in which threads end, and how long each one may take."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field

from cdc_core import errors
from pipelines.bronze import log as bronze_log
from pipelines.capture.committer import Committer
from pipelines.capture.threads import READER, SIGNALS, SNAPSHOT, Threads
from pipelines.snapshot import queue as snapshot_queue
from pipelines.spark import session as sparks

STOP_SECONDS = 3.0
"""Seconds for which a capture that is stopped waits for its threads."""


@dataclass
class Shutdown:
    """Ends a run when `stop` is set, when a thread fails, or when the spark-submit process of its session is gone."""

    stop: threading.Event
    threads: Threads
    _submitter: int | None = field(default_factory=sparks.submitter)
    _leave_at: float | None = None

    def is_due(self) -> bool:
        """Whether the run must end now."""
        # An orphaned driver has lost its session: it would read on without being able to commit.
        if self._submitter is not None and os.getppid() != self._submitter:
            self.threads.halt.set()
        return self.stop.is_set() or self.threads.halt.is_set()

    def end_threads(self, queue: snapshot_queue.SnapshotQueue) -> None:
        """End all threads but the committer, within `STOP_SECONDS` where the run is stopped or has failed."""
        # Only now: everything that was read before the stream's error has been handed to the committer.
        self.threads.failure = self.threads.failure or self.threads.stream_failure
        self.threads.end()
        # The snapshot thread waits for the queue's condition, which `halt` does not wake.
        queue.wake()
        # One deadline for all of them: a capture ends within seconds, whatever the server does (#14).
        self._leave_at = time.monotonic() + STOP_SECONDS
        is_hurried = self.stop.is_set() or self.threads.failure is not None
        for name in (SNAPSHOT, SIGNALS, READER):
            self.threads.join(name, until=self._leave_at if is_hurried else None)

    def excuses(self, failure: BaseException) -> bool:
        """Whether the run ends cleanly despite this error: an unreachable source does not matter to a run that is stopped."""
        return self.stop.is_set() and isinstance(failure, errors.SourceUnreachable)

    def close(self, committer: Committer | None, log: bronze_log.BronzeLog | None) -> None:
        """End every thread, however far the run got; nothing is committed after this."""
        self.threads.end()
        if committer is not None:
            # Before the join: the committer may be waiting for rows that will not come.
            committer.abandon()
        is_hurried = self.stop.is_set() or isinstance(self.threads.failure, errors.SourceUnreachable)
        leave_at = self._leave_at or time.monotonic() + STOP_SECONDS
        self.threads.join_all(leave_at=leave_at if is_hurried else None)
        # A capture that lost the table to another writer does not write to it, not even to release the claim.
        if log is not None and not isinstance(self.threads.failure, errors.OwnershipLost):
            with contextlib.suppress(Exception):  # The error that ended the run is the one to report.
                log.close(waits=False)
