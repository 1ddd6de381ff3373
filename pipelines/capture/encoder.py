"""Encodes events as the rows of the next commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import document_column
from cdc_core.bronze import event_rows as events
from cdc_core.signals import signal as signals
from cdc_core.stream import transactions
from pipelines import clock
from pipelines.capture import tokens
from pipelines.capture.logger import log
from pipelines.capture.selection import Selection

SHARDS_SECONDS = 60
"""Cluster time after which a transaction has no more events of another shard: they are milliseconds apart, or an election."""


@dataclass
class Encoder:
    """Collects the rows of the next commit of the pipeline `name`, which is full at `max_rows` or `max_bytes`.

    `tracker` counts the events of transactions (`provide.transaction.metadata`). `moves` orders the two events of a document
    that moves between shards; None for a replica set.
    """

    name: str
    selection: Selection
    max_rows: int
    max_bytes: int
    tracker: transactions.TransactionTracker | None = None
    moves: transactions.ShardMoves | None = None
    rows: events.EventRows = field(init=False)
    _columns: document_column.DocumentColumns = field(default_factory=document_column.DocumentColumns)
    _incomplete: set[str] = field(default_factory=set)
    """Collections with a skipped event whose gap was recorded after the last commit that could plan a snapshot."""

    def __post_init__(self) -> None:
        self.rows = events.EventRows(self.name, self._columns)

    def add(self, event: bytes) -> Mapping[str, Any] | None:
        """Add an event's rows; returns the event where it is a control event (`control`), else None."""
        rows = self.rows
        skipped_before = rows.skipped
        control_event = rows.add(
            event,
            includes=self.selection.includes,
            fields=self.selection.fields,
            tracker=self.tracker,
            moves=self.moves,
            # The clock is read per event only where transactions have their own rows.
            ts_ms=clock.now_ms() if self.tracker is not None else 0,
            is_signal_collection=self.selection.is_signal_collection,
            skipped=self.selection.skipped,
        )
        if control_event is not None:
            self._incomplete.clear()  # A drop or a rename ends the gap of its collection.
        if rows.skipped > skipped_before:
            self._note_gap(rows)
        return control_event

    def _note_gap(self, rows: events.EventRows) -> None:
        """Record that a collection is incomplete, until a snapshot reads it: the last row is that of a skipped event."""
        token, namespace = rows.token or "", rows.namespace
        # Where these rows plan a snapshot (`then`), that snapshot may lack an event that is skipped after the plan.
        if namespace in self._incomplete and not rows.then:
            return
        self._incomplete.add(namespace)
        log.warning(
            "%s: skipped an event that was too large (cursor.oversize.handling.mode); its row keeps its old values. To read it again, run %s",
            namespace,
            signals.snapshot_command(namespace),
        )
        cause = "an event was too large and was skipped"
        gap = {"from": token, "to": token, "since": tokens.utc(token), "cause": cause, "collections": [namespace]}
        rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, {"gap": gap}))

    def end_transaction(self, token: str) -> None:
        """Add the END of the open transaction where the stream, at `token`, is past it.

        On a replica set all its events share a cluster time; each shard of a cluster commits its part at a time of its own.
        """
        tracker = self.tracker
        if tracker is None or tracker.current is None or not tracker.token:
            return
        newest, now = tokens.cluster_time(tracker.token), tokens.cluster_time(token)
        if now > newest if self.moves is None else now.time > newest.time + SHARDS_SECONDS:
            self.rows.end_transaction(tracker, token=token, ts_ms=clock.now_ms())

    @property
    def is_full(self) -> bool:
        """Whether the rows fill one commit, by number or by bytes."""
        # Rows, because silver applies at least one whole batch at a time; bytes, because this process holds them in memory.
        return len(self.rows) >= self.max_rows or self.rows.bytes >= self.max_bytes

    def take(self) -> events.EventRows:
        """The rows to commit; the next event begins new ones."""
        rows, self.rows = self.rows, events.EventRows(self.name, self._columns)
        if rows.then:
            self._incomplete.clear()
        return rows
