"""The thread that reads the change stream into the queue."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cdc_core import errors
from pipelines.bronze import log as bronze_log
from pipelines.capture import metrics, tokens
from pipelines.capture.progress import RunCounts
from pipelines.capture.threads import Threads
from pipelines.mongodb import change_stream
from pipelines.mongodb import failures as mongodb_failures


@dataclass(frozen=True)
class StreamReader:
    """Reads ahead of the encoder, as far as the queue has room.

    `replaces_lost_position`: whether a start that finds its position lost takes a new snapshot.
    """

    stream: change_stream.ChangeStream
    threads: Threads
    log: bronze_log.BronzeLog
    counts: RunCounts
    metrics: metrics.StreamingMetrics
    replaces_lost_position: bool

    def run(self) -> None:
        """Read until the run ends or the stream fails; everything read before a failure is committed."""
        try:
            self._read()
        except Exception as error:
            # Not raised: that would end all threads at once, and discard what is in the queue.
            self.threads.stream_failure = error

    def _read(self) -> None:
        try:
            while not self.threads.halt.is_set():
                try:
                    batch = self.stream.next()
                # The stream was too slow: the oplog overtook it while it was open.
                except mongodb_failures.HistoryLost as error:
                    raise self._lost(error) from error
                self.counts.reconnects = self.stream.reconnects
                self.metrics.polled(len(batch.events), at=time.time())
                self.threads.queue.put(batch)
        finally:
            self.stream.close()

    def _lost(self, error: mongodb_failures.HistoryLost) -> errors.MedallionError:
        if not self.replaces_lost_position:
            return tokens.lost(self.log.position, error)
        # The next run finds the position lost, records the gap and takes the snapshot.
        return errors.SourceUnreachable(
            f"reading the change stream: the oplog no longer holds its position (error {error.code}); everything "
            "before is captured, and the next start takes a new snapshot"
        )
