"""The thread that watches how far bronze's position is from the end of the oplog."""

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
"""Seconds between two looks at the oplog."""
WARN_EVERY = 3600.0


@dataclass(frozen=True)
class OplogWatch:
    """Warns while a capture that stops now could soon not go on: `oplog.headroom.warning.hours`."""

    deployment: Deployment
    log: bronze_log.BronzeLog
    metrics: metrics.Metrics
    halt: threading.Event

    def run(self) -> None:
        """Look now and then at how long the oplog will hold the position, and warn while that is short."""
        # So that the first look may warn at once: the monotonic clock begins anywhere.
        warned_at = -WARN_EVERY
        while not self.halt.is_set():
            seconds = None
            with contextlib.suppress(Exception):  # nothing depends on it, and the next look may know
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
        """How long the oplog will hold the position; None where that cannot be known."""
        position = self.log.position
        # A user without clusterMonitor may not see the oplog: then nothing is known, and nothing is wrong.
        found = mongodb_server.oplog(self.deployment.client) if position is not None else None
        if position is None or found is None:
            return None
        return found.headroom_seconds(tokens.cluster_time(position.token).time)
