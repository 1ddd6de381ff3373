"""Queues the snapshots of a start, and prepares each snapshot when its turn comes.

A snapshot that was killed resumes after its last committed chunk, which `cdc_core.snapshot.state` finds in bronze's heartbeats. A
chunk and its heartbeat are one commit (`pipelines.snapshot.snapshot`): a chunk that was not committed is read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from cdc_core.bronze import event_rows as events
from cdc_core.signals import notification as notifications
from cdc_core.snapshot import state as snapshot_state
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.progress import RunCounts
from pipelines.capture.start import StartPlan, new_id
from pipelines.channels.notifier import Notifier
from pipelines.mongodb import server as mongodb_server
from pipelines.snapshot import chunk_reader, snapshot
from pipelines.snapshot import queue as snapshot_queue
from pipelines.snapshot.controls import SnapshotControls
from pipelines.spark import jvm


def add_planned(queue: snapshot_queue.SnapshotQueue, plan: StartPlan, notifier: Notifier) -> None:
    """Queue the initial snapshot of a start, and the unfinished snapshots of earlier runs."""
    if plan.initial is not None:
        queue.add(plan.initial)
    else:
        queue.metrics.is_skipped = queue.metrics.newest is None
        notifier.notify(notifications.INITIAL, notifications.NotificationType.SKIPPED, id_=new_id())
    for state in plan.states:
        # `plan.initial` is the initial one, where the mode continues it.
        if state.kind is not snapshot_state.SnapshotKind.INITIAL and not state.is_done:
            queue.add(state, is_new=False)


@dataclass(frozen=True)
class SnapshotStart:
    """Prepares snapshots of the pipeline `name`, with bronze's position and the source's collections at that moment."""

    name: str
    session: Callable[[], SparkSession]
    deployment: Deployment
    log: bronze_log.BronzeLog
    fields: events.FieldsOf | None
    halt: threading.Event
    counts: RunCounts
    metrics: snapshot_queue.SnapshotMetrics

    def ready(self, state: snapshot_state.SnapshotState, controls: SnapshotControls) -> snapshot.Snapshot | None:
        """The snapshot, ready to run; None where the capture ends within `snapshot.delay.ms`."""
        # The position of before the delay is early enough: chunks are read at or after it.
        position = self.log.position
        assert position is not None
        source, client = self.deployment.source, self.deployment.client
        is_initial = state.kind is snapshot_state.SnapshotKind.INITIAL
        if is_initial and self.halt.wait(source.snapshot_delay_ms / 1000):
            return None
        spark = self.session()
        is_incremental = state.kind is snapshot_state.SnapshotKind.INCREMENTAL
        collections = self.deployment.collections()
        reader = chunk_reader.ChunkReader(
            spark=spark,
            connection=self.deployment.connection,
            # For `afterClusterTime`: the server waits until its data reaches this time, and refuses a time ahead of its clock.
            after=min(tokens.cluster_time(position.token), mongodb_server.operation_time(client)),
            chunk_bytes=source.commit_max_bytes,
            fetch_size=source.snapshot_fetch_size,
            fields=self.fields,
            stopped=self.halt,
        )
        return snapshot.Snapshot(
            log=self.log,
            name=self.name,
            reader=reader,
            collections=collections,
            state=state,
            threads=_threads(spark, source.snapshot_max_threads, source.commit_max_bytes),
            filters={} if is_incremental else source.snapshot_collection_filter_overrides,
            stopped=self.halt,
            report=self._report,
            controls=controls,
            # Planned by an earlier run, and excluded by the settings now.
            left_out=[name for name in state.planned if not self.deployment.filter.includes(*name.split(".", 1))],
            documents_max=source.incremental_snapshot_chunk_size if is_incremental else None,
        )

    def _report(self, progress: snapshot.SnapshotProgress) -> None:
        self.metrics.last_chunk_at = time.time()
        self.counts.snapshot = progress


CHUNK_COPIES = 4
"""JVM memory per chunk, in `commit.max.bytes`: a chunk has up to two, and several compressed copies during its transfer."""


def _threads(spark: SparkSession, configured: int | None, chunk_bytes: int) -> int:
    """`snapshot.max.threads`; by default as many as Spark has cores, and as chunks fit into the driver's memory."""
    if configured:
        return configured
    try:
        heap = jvm.java_class(spark, "java.lang.Runtime").getRuntime().maxMemory()
        return max(1, min(spark.sparkContext.defaultParallelism, heap // (CHUNK_COPIES * chunk_bytes)))
    except Exception:  # Spark Connect has no SparkContext.
        return 2
