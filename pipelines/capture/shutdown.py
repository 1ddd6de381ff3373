"""The end of a run: what brings it about, in which order its threads end, and how long each is waited for."""

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
"""How long a capture that is to stop waits for its threads."""


@dataclass
class Shutdown:
    """A run ends when `stop` is set, when a thread fails, or when the spark-submit that holds its session is gone."""

    stop: threading.Event
    threads: Threads
    _submitter: int | None = field(default_factory=sparks.submitter)
    _leave_at: float | None = None

    def is_due(self) -> bool:
        """Whether the run is to end now."""
        # Its session is gone with it: a driver that was orphaned could commit nothing, and would go on reading.
        if self._submitter is not None and os.getppid() != self._submitter:
            self.threads.halt.set()
        return self.stop.is_set() or self.threads.halt.is_set()

    def end_threads(self, queue: snapshot_queue.SnapshotQueue) -> None:
        """End the threads that no commit of the stream waits for; of a run that fails or is stopped none is waited for
        long."""
        # The stream's error becomes the run's only now: everything that was read before it has been handed over by then.
        self.threads.failure = self.threads.failure or self.threads.stream_failure
        self.threads.end()
        # The snapshot thread waits at the queue of snapshots, which `halt` alone does not wake.
        queue.wake()
        # One deadline for all of them: a capture ends within seconds, whatever the server does (#14).
        self._leave_at = time.monotonic() + STOP_SECONDS
        is_hurried = self.stop.is_set() or self.threads.failure is not None
        for name in (SNAPSHOT, SIGNALS, READER):
            self.threads.join(name, until=self._leave_at if is_hurried else None)

    def excuses(self, failure: BaseException) -> bool:
        """Whether the run ends without this error: where it is to stop, a source that is gone is none."""
        return self.stop.is_set() and isinstance(failure, errors.SourceUnreachable)

    def close(self, committer: Committer | None, log: bronze_log.BronzeLog | None) -> None:
        """End every thread, however far the run got; nothing that was not committed is committed after this."""
        self.threads.end()
        if committer is not None:
            # Before the threads are joined: the committer may be waiting for rows that will not come.
            committer.abandon()
        is_hurried = self.stop.is_set() or isinstance(self.threads.failure, errors.SourceUnreachable)
        leave_at = self._leave_at or time.monotonic() + STOP_SECONDS
        self.threads.join_all(leave_at=leave_at if is_hurried else None)
        # Who lost the table to another writer writes nothing to it, not even that it is free.
        if log is not None and not isinstance(self.threads.failure, errors.OwnershipLost):
            with contextlib.suppress(Exception):  # the error that ended the run is the one to tell of
                log.close(waits=False)
