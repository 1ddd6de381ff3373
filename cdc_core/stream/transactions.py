"""Transaction metadata: which transaction an event belongs to, its place in it, and where transactions begin and end.

Follows Debezium's `provide.transaction.metadata`: the identifier is ``<lsid as strict JSON>:<txnNumber>``, `total_order`
counts the captured events of the transaction from 1, `data_collection_order` those of the event's collection. An END is
given once, with the first event that is not the transaction's or as soon as the stream is past its cluster time; where
a restart falls into a transaction the counting goes on.

And the order of the two events by which a transaction moves a document to another shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cdc_core.stream import resume_token

BEGIN = "BEGIN"
END = "END"


@dataclass(frozen=True)
class OpenTransaction:
    """The transaction whose events are being read: how many there were of each collection."""

    id: str
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def with_event(self, namespace: str) -> OpenTransaction:
        return OpenTransaction(self.id, {**self.counts, namespace: self.counts.get(namespace, 0) + 1})

    def block(self, namespace: str) -> dict[str, Any]:
        """The `transaction` struct of the event that was counted last."""
        return {"id": self.id, "total_order": self.total, "data_collection_order": self.counts[namespace]}


@dataclass(frozen=True)
class TransactionStep:
    """What one event means for transactions: one that ended before it, its own that begins with it, and its place."""

    ended: OpenTransaction | None = None
    began: str | None = None
    block: dict[str, Any] | None = None


NOTHING = TransactionStep()


class TransactionTracker:
    """The transaction that is open as events come; `token` is that of the last event."""

    def __init__(self, found: OpenTransaction | None = None, *, token: str = "") -> None:
        self.current = found
        self.token = token

    def see(self, id_: str | None, namespace: str) -> TransactionStep:
        """Count one captured event of the transaction `id_`, or outside of any."""
        before = self.current
        if id_ is None:
            # Debezium ends a transaction with the first event that is none of it.
            self.current = None
            return NOTHING if before is None else TransactionStep(ended=before)
        is_new = before is None or before.id != id_
        current = (OpenTransaction(id_) if before is None or is_new else before).with_event(namespace)
        self.current = current
        return TransactionStep(before if is_new else None, id_ if is_new else None, current.block(namespace))

    def end(self) -> OpenTransaction | None:
        """The transaction that is over because the stream is past it."""
        ended, self.current = self.current, None
        return ended


def identifier(lsid: str | None, txn_number: int | None) -> str | None:
    """The identifier of an event's transaction; None for an event outside of any."""
    if lsid is None or txn_number is None:
        return None
    return f"{lsid}:{txn_number}"


def begin_payload(id_: str, *, ts_ms: int) -> dict[str, Any]:
    """Debezium's BEGIN record."""
    return {"status": BEGIN, "id": id_, "event_count": None, "data_collections": None, "ts_ms": ts_ms}


def end_payload(transaction: OpenTransaction, *, ts_ms: int) -> dict[str, Any]:
    """Debezium's END record, with the counts of each collection."""
    return {
        "status": END,
        "id": transaction.id,
        "event_count": transaction.total,
        "data_collections": [
            {"data_collection": namespace, "event_count": count} for namespace, count in transaction.counts.items()
        ],
        "ts_ms": ts_ms,
    }


class ShardWrite(NamedTuple):
    """An insert or a delete in a transaction: of which document, by the key that its shard knows it by, and its sequence."""

    document: tuple[str | None, ...]
    document_key: bytes
    is_delete: bool
    sequence: str


class ShardMoves:
    """Puts the delete of a document before its insert where one transaction does both, on two shards.

    That is how a new value of the shard key becomes two events. Each has a time of its own shard: the delete may come last, or
    at the same time, and it would take away the document that is there now. Debezium hands on what comes.

    The last `held` events are remembered, in memory alone: the two are milliseconds apart, but for an election in between.
    """

    def __init__(self, *, held: int = 10_000) -> None:
        self._held = held
        self._last: dict[tuple[str | None, ...], ShardWrite] = {}

    def sequence(self, event: ShardWrite) -> str:
        """The sequence of an event, which is its own but where it is the other half of a move."""
        other = self._last.pop(event.document, event)
        if other.document_key == event.document_key or other.is_delete == event.is_delete:
            moved = event
        elif event.is_delete:
            moved = event._replace(sequence=resume_token.neighbour(other.sequence, -1))
        else:
            moved = event._replace(sequence=max(event.sequence, resume_token.neighbour(other.sequence, 1)))
        self._last[event.document] = moved
        if len(self._last) > self._held:
            del self._last[next(iter(self._last))]
        return moved.sequence
