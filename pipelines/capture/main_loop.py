"""The main thread of a run: turns the reader's batches into commits, by size or by time, until the run ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.stream import resume_token
from pipelines.capture import tokens
from pipelines.capture.committer import Committer
from pipelines.capture.control import ControlEvents
from pipelines.capture.encoder import Encoder
from pipelines.capture.heartbeats import LEASE_EVERY_MS, Heartbeats
from pipelines.capture.intake import Intake
from pipelines.capture.progress import ProgressReporter
from pipelines.capture.shutdown import Shutdown
from pipelines.capture.threads import IDLE_WAIT, Threads
from pipelines.mongodb import change_stream


@dataclass(frozen=True)
class StreamPosition:
    """How far the stream was read: up to `token`, and where it `is_drained`, all events of that cluster time."""

    token: str
    is_drained: bool


@dataclass(frozen=True)
class RunEnd:
    """Decides when a run is over: it is stopped, fails, has caught up with `until` (`--once`), or follows no stream."""

    until: Timestamp | None
    follows_stream: bool
    control: ControlEvents
    threads: Threads
    shutdown: Shutdown

    def is_reached(self, read: StreamPosition) -> bool:
        """Whether the run is over."""
        if self.shutdown.is_due() or self._has_read_to_failure():
            return True
        if self.until is not None and self._is_caught_up(read, self.until):
            return True
        return not self.follows_stream and self.control.is_idle

    def _has_read_to_failure(self) -> bool:
        """Whether the reader has failed, and everything that it read before is encoded or held by a blocking snapshot."""
        # During a blocking snapshot nothing leaves the queue: it would never become empty.
        return self.threads.stream_failure is not None and (self.threads.queue.is_empty() or self.control.is_blocking)

    def _is_caught_up(self, read: StreamPosition, until: Timestamp) -> bool:
        """Whether all events up to `until` were read. A high-water mark at a time precedes the events of that time."""
        read_time = tokens.cluster_time(read.token)
        return self.control.is_idle and (read_time > until or (read_time == until and read.is_drained))


@dataclass(frozen=True)
class MainLoop:
    """Moves batches from the reader's queue through the encoder to the committer, and handles control events."""

    threads: Threads
    intake: Intake
    encoder: Encoder
    control: ControlEvents
    committer: Committer
    heartbeats: Heartbeats
    reporter: ProgressReporter
    end: RunEnd
    commit_seconds: float

    def run(self, token: str) -> StreamPosition:
        """Read from the position `token` to the end of the run; uncommitted rows stay in the encoder."""
        encoder = self.encoder
        # Since when rows wait for their commit, and since when nothing was handed over.
        first_at = idle_since = time.monotonic()
        position = StreamPosition(token, is_drained=False)
        while True:
            if len(encoder.rows) and self.control.is_blocking:
                self._hand_over()  # Rows from before a blocking snapshot do not wait for its end.
            batch = self._next(first_at)
            if batch is not None:
                waiting_since = first_at
                try:
                    first_at = self._add(batch, first_at)
                except errors.MedallionError as error:
                    self.threads.stream_failure = error  # An error of one event: those before it are committed.
                    break
                idle_since = idle_since if first_at == waiting_since else first_at
                # An empty batch moves the stream's token: a transaction from before that time has ended.
                if not batch.events:
                    encoder.end_transaction(batch.token)
                position = StreamPosition(resume_token.later(batch.token, position.token), is_drained=batch.is_drained)
            # The commit interval begins with the first row, not with the previous commit.
            first_at = time.monotonic() if len(encoder.rows) == 0 else first_at
            # After the batch: a signal from a channel has no place in the stream, and gets the current one.
            length = encoder.rows.length
            try:
                self.control.handle_received(encoder.rows, token=position.token)
            except errors.MedallionError as error:
                # The signal is read again from its channel; the events before it are committed.
                encoder.rows.cut(length)
                self.threads.stream_failure = error
                break
            if self._is_due(first_at):
                self._hand_over()
                first_at = idle_since = time.monotonic()
            self.committer.count_left_out(encoder.rows)
            # After the hand-over and before the heartbeat: `Heartbeats.last` commits the position at the end of a run.
            if self.end.is_reached(position):
                break
            if self.heartbeats.commit_requested.is_set() and len(encoder.rows) == 0 and self.committer.has_committed_all:
                self.heartbeats.answer(position.token, is_drained=position.is_drained)
            # Rows may wait for their commit for longer than the lease lasts (`commit.interval.ms`).
            is_waiting = len(encoder.rows) > 0
            if time.monotonic() - idle_since >= (LEASE_EVERY_MS / 1000 if is_waiting else self.heartbeats.idle_seconds):
                has_committed_all = not is_waiting and self.committer.has_committed_all
                self.heartbeats.idle(position.token, has_committed_all=has_committed_all)
                self.committer.compact()
                idle_since = time.monotonic()
            self.reporter.show()
        return position

    def _next(self, first_at: float) -> change_stream.EventBatch | None:
        """The next batch of the stream, or None after a short wait; always None during a blocking snapshot."""
        if self.control.is_blocking:
            self.threads.halt.wait(IDLE_WAIT)
            return None
        return self.threads.queue.get(timeout=self._wait(first_at))

    def _add(self, batch: change_stream.EventBatch, first_at: float) -> float:
        """Encode a batch's events, and hand the rows over whenever a commit is full; returns since when rows wait.

        The rows of a control event's effects follow its own row, before the next event, and are committed with it.
        """
        for event in self.intake.events(batch):
            length = self.encoder.rows.length
            control_event = self.encoder.add(event)
            if control_event is not None:
                try:
                    self.control.handle(self.encoder.rows, control_event)
                except errors.MedallionError:
                    # The event stays after the position: the next start reads it again.
                    self.encoder.rows.cut(length)
                    raise
            # Each signal of many may take its time, and without a commit in between the lease would expire.
            if self.encoder.is_full or (control_event is not None and self._is_due(first_at)):
                self._hand_over()
                first_at = time.monotonic()
        return first_at

    def _hand_over(self) -> None:
        """Pass the rows to the committer; the next event begins new rows."""
        self.heartbeats.rows_come()
        self.committer.submit(self.encoder.take())

    def _wait(self, first_at: float) -> float:
        """Seconds to wait for a batch: at most until waiting rows are due for their commit."""
        if len(self.encoder.rows) == 0:
            return IDLE_WAIT
        return min(IDLE_WAIT, max(0.0, first_at + self.commit_seconds - time.monotonic()))

    def _is_due(self, first_at: float) -> bool:
        """Whether rows have waited for the commit interval and the committer has room; until then the commit grows."""
        has_waited = len(self.encoder.rows) > 0 and time.monotonic() - first_at >= self.commit_seconds
        return has_waited and self.committer.has_room
