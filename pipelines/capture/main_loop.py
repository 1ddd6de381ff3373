"""The main thread of a run: what the reader read becomes commits, by size or by time, until the end of the run."""

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
from pipelines.capture.heartbeats import Heartbeats
from pipelines.capture.intake import Intake
from pipelines.capture.progress import ProgressReporter
from pipelines.capture.shutdown import Shutdown
from pipelines.capture.threads import IDLE_WAIT, Threads
from pipelines.mongodb import change_stream


@dataclass(frozen=True)
class StreamPosition:
    """How far the stream was read: to `token`, and with it all events of its cluster time where it `is_drained`."""

    token: str
    is_drained: bool


@dataclass(frozen=True)
class RunEnd:
    """When a run is over: it is stopped or fails, is caught up with `until` (`--once`), or has no stream to follow."""

    until: Timestamp | None
    follows_stream: bool
    control: ControlEvents
    threads: Threads
    shutdown: Shutdown

    def is_reached(self, read: StreamPosition) -> bool:
        """Whether nothing more is to be read."""
        if self.shutdown.is_due() or self._has_read_to_failure():
            return True
        if self.until is not None and self._is_caught_up(read, self.until):
            return True
        return not self.follows_stream and self.control.is_idle

    def _has_read_to_failure(self) -> bool:
        """Whether the reader has failed, and everything that it read before is in rows, or waits for a snapshot anyway."""
        # While a blocking snapshot is read nothing leaves the queue, so that it would never be empty.
        return self.threads.stream_failure is not None and (self.threads.queue.is_empty() or self.control.is_blocking)

    def _is_caught_up(self, read: StreamPosition, until: Timestamp) -> bool:
        """Whether all events up to `until` were read. A high-water mark at a time does not hold that time's events yet."""
        # The queue counts, too: the token of the last batch says how far the reader is only when nothing waits behind it.
        if not self.control.is_idle or not self.threads.queue.is_empty():
            return False
        at = tokens.cluster_time(read.token)
        return at > until or (at == until and read.is_drained)


@dataclass(frozen=True)
class MainLoop:
    """Moves batches from the reader's queue through the encoder to the committer, and acts on what comes between them."""

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
        """Read on from the position `token` to the end of the run; rows that wait then are left in the encoder.

        `first_at` is since when rows wait for their commit, `idle_since` since when there was nothing to commit.
        """
        encoder = self.encoder
        first_at = idle_since = time.monotonic()
        read = StreamPosition(token, is_drained=False)
        while True:
            if len(encoder.rows) and self.control.is_blocking:
                self._hand_over()  # what came before a blocking snapshot does not wait for its end
            batch = self._next(first_at)
            if batch is not None:
                try:
                    first_at = self._add(batch, first_at)
                except errors.MedallionError as error:
                    self.threads.stream_failure = error  # of an event: those before it are committed
                    break
                # An empty batch says how far the stream is: a transaction whose time is over has ended there.
                if not batch.events:
                    encoder.end_transaction(batch.token)
                read = StreamPosition(resume_token.later(batch.token, read.token), is_drained=batch.is_drained)
            # The interval of a commit begins with its first row, and not with the commit before it.
            first_at = time.monotonic() if len(encoder.rows) == 0 else first_at
            # After the batch: a signal of a channel has no place of its own in the stream, and gets the one that was
            # reached.
            before = encoder.rows.length
            try:
                self.control.handle_received(encoder.rows, token=read.token)
            except errors.MedallionError as error:
                # What could not be done is read again from its channel; what the stream gave before it is committed.
                encoder.rows.cut(before)
                self.threads.stream_failure = error
                break
            if len(encoder.rows) and self._is_due(first_at):
                self._hand_over()
                first_at = idle_since = time.monotonic()
            self.committer.count_left_out(encoder.rows)
            # Behind the hand-over and before the heartbeat: the end of a run commits its position by itself
            # (`Heartbeats.last`).
            if self.end.is_reached(read):
                break
            if self.heartbeats.asked.is_set() and len(encoder.rows) == 0 and self.committer.has_committed_all:
                self.heartbeats.answer(read.token, is_drained=read.is_drained)
            if len(encoder.rows) == 0 and time.monotonic() - idle_since >= self.heartbeats.idle_seconds:
                self.heartbeats.idle(read.token, has_committed_all=self.committer.has_committed_all)
                self.committer.compact()
                idle_since = time.monotonic()
            self.reporter.show()
        return read

    def _next(self, first_at: float) -> change_stream.EventBatch | None:
        """The next batch of the stream, or None after a while; none while a blocking snapshot is read."""
        if self.control.is_blocking:
            self.threads.halt.wait(IDLE_WAIT)
            return None
        return self.threads.queue.get(timeout=self._wait(first_at))

    def _add(self, batch: change_stream.EventBatch, first_at: float) -> float:
        """Add a batch's events, and hand the rows over each time that a commit is full; since when rows wait.

        What is done about a control event is added behind its rows, before the next event: it belongs to this place of the
        stream, and is committed with it.
        """
        for event in self.intake.events(batch):
            before = self.encoder.rows.length
            control_event = self.encoder.add(event)
            if control_event is not None:
                try:
                    self.control.handle(self.encoder.rows, control_event)
                except errors.MedallionError:
                    # What could not be done is not behind the position: the next start does it.
                    self.encoder.rows.cut(before)
                    raise
            if self.encoder.is_full:
                self._hand_over()
                first_at = time.monotonic()
        return first_at

    def _hand_over(self) -> None:
        """Give the rows to the committer; the next event begins new ones."""
        self.heartbeats.rows_come()
        self.committer.submit(self.encoder.take())

    def _wait(self, first_at: float) -> float:
        """How long a batch is waited for: no longer than until rows that wait are to be committed."""
        if len(self.encoder.rows) == 0:
            return IDLE_WAIT
        return min(IDLE_WAIT, max(0.0, first_at + self.commit_seconds - time.monotonic()))

    def _is_due(self, first_at: float) -> bool:
        """Whether rows have waited long enough, and the committer has room: else they grow into a larger commit
        meanwhile."""
        return time.monotonic() - first_at >= self.commit_seconds and self.committer.has_room
