"""The thread that reads the change stream into the queue."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipelines.bronze import log as bronze_log
from pipelines.capture import metrics, tokens
from pipelines.capture.progress import RunCounts
from pipelines.capture.threads import Threads
from pipelines.mongodb import change_stream
from pipelines.mongodb import failures as mongodb_failures


@dataclass(frozen=True)
class StreamReader:
    """Reads ahead of the encoder, as far as the queue has room."""

    stream: change_stream.ChangeStream
    threads: Threads
    log: bronze_log.BronzeLog
    counts: RunCounts
    metrics: metrics.StreamingMetrics

    def run(self) -> None:
        """Read until the end of the run, or to where the stream fails: what came before that is committed first."""
        try:
            self._read()
        except Exception as error:
            # Not raised, which would end every thread at once and leave what the queue holds.
            self.threads.stream_failure = error

    def _read(self) -> None:
        try:
            while not self.threads.halt.is_set():
                try:
                    batch = self.stream.next()
                # A stream that was too slow: the oplog overtook it while it was open.
                except mongodb_failures.HistoryLost as error:
                    raise tokens.lost(self.log.position, error) from error
                self.counts.reconnects = self.stream.reconnects
                self.metrics.polled(len(batch.events), at=time.time())
                self.threads.queue.put(batch)
        finally:
            self.stream.close()
