"""The bronze rows of a capture's stream and snapshot, without Spark."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from bson import json_util
from bson.timestamp import Timestamp

from cdc_core.bronze import event_rows as events
from cdc_core.settings.parse import Settings
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters, transactions
from pipelines.capture import tokens
from pipelines.capture.control import ControlEvents
from pipelines.capture.deployment import Deployment
from pipelines.capture.encoder import Encoder
from pipelines.capture.intake import Intake
from pipelines.capture.selection import Selection
from pipelines.capture.signal_reader import Inbox
from pipelines.capture.stream_opener import StreamOpener
from pipelines.channels import notifier
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source
from pipelines.snapshot import bronze_rows, chunks
from pipelines.snapshot import queue as snapshots

TS_MS = 1
"""The `ts_ms` of all rows: the time of the capture's clock."""


@dataclass
class Stream:
    """The capture's reader and encoder over one stream that begins at `start`; `read` may be called repeatedly."""

    settings: Settings
    client: mongodb.Client
    start: Timestamp

    def __post_init__(self) -> None:
        at = self.start.time << 32 | self.start.inc
        begun = dataclasses.replace(self.settings.source, capture_start_op_time=at, cursor_max_await_time_ms=20)
        settings = dataclasses.replace(self.settings, source=begun)
        deployment = Deployment.of(begun, source.connection(begun), self.client)
        opener = StreamOpener(deployment, deployment.stream_options(), threading.Event())
        opened = opener.open(None)
        self._stream = opened.stream
        self._intake = Intake.of(begun, bronze_token=opened.bronze_token)
        selection = Selection.of(begun, deployment.filter)
        tracker = transactions.TransactionTracker() if begun.provide_transaction_metadata else None
        self._encoder = Encoder(
            settings.name, selection, begun.max_batch_size, begun.commit_max_bytes, tracker, transactions.ShardMoves()
        )
        self._control = ControlEvents(deployment, _snapshots(settings), Inbox())

    def read(self, until: Timestamp) -> None:
        """Read everything up to a cluster time."""
        while True:
            batch = self._stream.next()
            for event in self._intake.events(batch):
                control_event = self._encoder.add(event)
                if control_event is not None:
                    self._control.handle(self._encoder.rows, control_event)
                assert not self._encoder.is_full, "one commit holds all of it"
            if not batch.events:
                self._encoder.end_transaction(batch.token)
            at = tokens.cluster_time(batch.token)
            if at > until or (at == until and not batch.events):
                return

    @property
    def rows(self) -> events.EventRows:
        """The rows so far."""
        return self._encoder.rows

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows so far, as bronze holds them."""
        found: list[dict[str, Any]] = self.rows.table(batch=1, first_offset=0, ts_ms=TS_MS).to_pylist()
        return found

    def close(self) -> None:
        self._stream.close()


def _snapshots(settings: Settings) -> snapshots.SnapshotQueue:
    """A queue of snapshots that are planned but never run, because there is no Spark."""
    told = notifier.Notifier(None, settings)  # type: ignore[arg-type]
    return snapshots.SnapshotQueue(lambda state, controls: None, told, threading.Event(), snapshots.SnapshotMetrics())


def snapshot_rows(
    settings: Settings, client: mongodb.Client, *, after: Timestamp, kind: str = "true"
) -> list[dict[str, Any]]:
    """The rows of a snapshot of all captured collections, each read as one chunk at or after a cluster time."""
    chosen = filters.of(settings.source)
    found = source.captured(settings.source, client)
    read = [each for each in found if chosen.is_snapshotted(each.db, each.name)]
    try:
        return [
            row
            for each in read
            for row in _collection_rows(settings, each, after=after, kind=kind, is_last=each == read[-1])
        ]
    finally:
        close_worker_clients(source.connection(settings.source))


def documents(rows: Sequence[Mapping[str, Any]], collection: str) -> dict[str, Any]:
    """A collection's documents by key after all rows: what silver would hold."""
    found: dict[str, Any] = {}
    of_documents = [each for each in rows if each["collection"] == collection and each["op"] is not None]
    for row in sorted(of_documents, key=lambda row: row["sequence"]):
        if row["op"] == "d":
            found.pop(row["key"], None)
        elif row["after"] is not None:
            found[row["key"]] = json_util.loads(row["after"])
    return found


def close_worker_clients(*connections: source.Connection) -> None:
    """Close the clients that an executor keeps until its process ends: in a test this process keeps them, and goes on."""
    for connection in connections:
        source.worker_client(connection).close()
    source._worker_client.cache_clear()


def _collection_rows(
    settings: Settings, collection: catalog.SourceCollection, *, after: Timestamp, kind: str, is_last: bool
) -> list[dict[str, Any]]:
    listed = field_filters.read(settings.source.field_exclude_list, settings.source.field_renames)
    spec = chunks.ChunkSpec(
        connection=source.connection(settings.source),
        collection=collection,
        bounds=snapshot_read.IdRange(),
        after=(after.time, after.inc),
        fetch_size=0,
        max_bytes=1 << 30,
        fields=listed.of(collection.db, collection.name),
    )
    pieces = list(chunks.encoded_chunk(spec))
    chunk = chunks.chunk_rows(pieces[-1][0] or {}, pa.concat_tables(rows for _, rows in pieces if rows is not None))
    rows = bronze_rows.snapshot_rows(
        chunk.rows,
        name=settings.name,
        collection=collection,
        at=chunk.at,
        label=f"snapshot:captured:{collection.namespace}:1",
        batch=1,
        first_offset=0,
        ts_ms=TS_MS,
        is_last=is_last,
        snapshot=kind,
    )
    found: list[dict[str, Any]] = rows.to_pylist()
    return found
