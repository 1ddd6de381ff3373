"""The thread that measures how long the oplog will hold bronze's position."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

from pipelines.bronze import log as bronze_log
from pipelines.capture import metrics, tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log
from pipelines.mongodb import server as mongodb_server

OPLOG_EVERY = 60.0
"""Seconds between two measurements."""
WARN_EVERY = 3600.0


@dataclass(frozen=True)
class OplogWatch:
    """Warns while the oplog would hold the position for less than `oplog.headroom.warning.hours` if the capture stopped."""

    deployment: Deployment
    log: bronze_log.BronzeLog
    metrics: metrics.Metrics
    halt: threading.Event

    def run(self) -> None:
        """Measure the headroom until the run ends, and warn once an hour while it is short."""
        warned_at = -WARN_EVERY  # The first measurement may warn.
        while not self.halt.is_set():
            seconds = None
            with contextlib.suppress(Exception):  # Nothing depends on it, and the next measurement may succeed.
                seconds = self._headroom_seconds()
            self.metrics.headroom_hours = None if seconds is None else seconds / 3600
            limit = self.deployment.source.oplog_headroom_warning_hours * 3600
            if seconds is not None and seconds < limit and time.monotonic() - warned_at >= WARN_EVERY:
                warned_at = time.monotonic()
                log.warning(
                    "if this capture stops, the oplog will hold its position for only %.1f more hours: make the oplog larger "
                    "(source.oplog.headroom.warning.hours is %d)", seconds / 3600, limit // 3600,
                )  # fmt: skip
            self.halt.wait(OPLOG_EVERY)

    def _headroom_seconds(self) -> float | None:
        """Seconds for which the oplog will hold the position; None where that is unknown."""
        position = self.log.position
        # A user without clusterMonitor cannot read the oplog, which is no error.
        oplog = mongodb_server.oplog(self.deployment.client) if position is not None else None
        if position is None or oplog is None:
            return None
        return oplog.headroom_seconds(tokens.cluster_time(position.token).time)
