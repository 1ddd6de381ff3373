"""Heartbeats: commits that move the position of a quiet stream, and empty commits that renew the lease."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from cdc_core.stream import resume_token
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens

LEASE_EVERY_MS = 60_000
"""The lease is renewed at least this often, whatever `heartbeat.interval.ms` and `commit.interval.ms` say."""


@dataclass
class Heartbeats:
    """The heartbeats of one run.

    `interval_ms` is `heartbeat.interval.ms` (0: none), `moved_at` the monotonic time of the last rows. Setting `commit_requested` requests a
    commit that says how far bronze is complete.
    """

    log: bronze_log.BronzeLog
    interval_ms: int
    moved_at: float
    commit_requested: threading.Event = field(default_factory=threading.Event)
    _answered: tuple[str, int] | None = None

    def rows_come(self) -> None:
        """Note that rows are handed to the committer, which moves the position."""
        self.moved_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds without rows after which `idle` is due."""
        # Without heartbeats the lease must still be renewed, or another host may take the table from a quiet capture.
        return min(self.interval_ms or LEASE_EVERY_MS, LEASE_EVERY_MS) / 1000

    def idle(self, token: str, *, has_committed_all: bool) -> None:
        """Commit the position of a quiet stream, so that it does not age out of the oplog, or renew the lease."""
        interval = self.interval_ms / 1000
        is_due = interval > 0 and time.monotonic() - self.moved_at >= interval
        # Uncommitted rows lie before `token`: a position there would lose them.
        if is_due and has_committed_all and resume_token.compare(token, tokens.token_of(self.log)) > 0:
            self.moved_at = time.monotonic()
            self.log.heartbeat({}, token=token, ts_ms=clock.now_ms())
        else:
            self.log.renew(complete=token if has_committed_all else None)

    def answer(self, token: str, *, is_drained: bool) -> None:
        """Commit how far bronze is complete, where that is further than its rows say and has changed since the last answer.

        Everything that was read up to `token` must be committed.
        """
        complete = _complete(token, is_drained=is_drained)
        answer = complete, self.log.numbered
        if answer == self._answered or resume_token.compare(complete, tokens.token_of(self.log)) <= 0:
            return
        self.log.renew(complete=complete)
        self._answered = answer
        self.commit_requested.clear()

    def last(self, token: str, *, is_drained: bool) -> None:
        """Set the position at the end of a run; everything that was read up to `token` must be committed.

        The release of the claim says how far the stream was read (`complete`). Where the position lies far behind that, a heartbeat
        row moves it.
        """
        self.log.complete = _complete(token, is_drained=is_drained)
        if self._is_far_behind(token):
            self.log.heartbeat({}, token=token, ts_ms=clock.now_ms())

    def _is_far_behind(self, token: str) -> bool:
        """Whether the position is a heartbeat interval or more behind `token`."""
        bronze_token = tokens.token_of(self.log)
        gap = tokens.cluster_time(token).time - tokens.cluster_time(bronze_token).time
        return resume_token.compare(token, bronze_token) > 0 and 0 < self.interval_ms / 1000 <= gap


def _complete(token: str, *, is_drained: bool) -> str:
    """The token before which everything was read."""
    # A token may stand between two events of one cluster time; only a drained stream has returned all of that time.
    return resume_token.behind(token) if is_drained else token
