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
    """What one event means for transactions: the one that `ended` before it, the id of the one that `began` with it, and the event's
    place inside its own (`block`)."""

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
    """An event of a transaction: of which document, by the key that its shard knows it by, its `op`, and its sequence."""

    transaction: str
    document: str
    document_key: bytes
    op: str
    sequence: str


def document(namespace: Mapping[str, str], key: str) -> str:
    """A document's name among those of all collections."""
    # One text, and not a tuple of them: it is held for each document that a transaction writes.
    return f"{namespace['db']}.{namespace['coll']}\0{key}"


class _Place(NamedTuple):
    """What a transaction did with a document on one shard: where its insert stands, if it is there, and the last event."""

    document_key: bytes
    inserted: str | None
    newest: str


class ShardMoves:
    """Puts the delete of a document before its insert where one transaction does both, on two shards.

    That is how a new value of the shard key becomes two events. Each has a time of its own shard: the delete may come last, or
    at the same time, and it would take away the document that is there now. Debezium hands on what comes.

    A delete stands just before the insert of another shard that holds the document by then. Every other event comes behind
    what the transaction did with the document before. Transactions are remembered for `seconds` of cluster time: the
    two events are milliseconds apart, but for an election in between. Each of the `held` documents takes about 500 bytes.
    """

    def __init__(self, *, seconds: int = 600, held: int = 100_000) -> None:
        self._seconds = seconds
        self._held = held
        self._count = 0
        self._transactions: dict[str, dict[str, tuple[_Place, ...]]] = {}
        self._began: dict[str, int] = {}

    def __len__(self) -> int:
        return self._count

    def sequence(self, write: ShardWrite) -> str:
        """The sequence of an event, which is its own but where the document was written on another shard, too."""
        places = self._places(write)
        elsewhere = [each.inserted for each in places if each.inserted and each.document_key != write.document_key]
        newest = max((each.newest for each in places), default="")
        sequence = write.sequence
        if write.op == "d" and elsewhere:
            sequence = resume_token.neighbour(min(elsewhere), -1)
        # An update of a key that was not inserted may be one of the document before it moved.
        elif sequence <= newest and (write.op != "u" or _is_inserted(places, write.document_key)):
            sequence = resume_token.neighbour(newest, 1)
        self.remember(write._replace(sequence=sequence))
        return sequence

    def remember(self, write: ShardWrite) -> None:
        """Take an event into account that has its sequence."""
        places = self._places(write)
        if write.op == "u" and not _is_inserted(places, write.document_key):
            return
        before = next((each for each in places if each.document_key == write.document_key), None)
        inserted = before.inserted if write.op == "u" and before else write.sequence if write.op == "c" else None
        newest = max(write.sequence, before.newest if before else "")
        others = (each for each in places if each is not before)
        if not places:
            self._make_room(write)
        self._transactions[write.transaction][write.document] = (*others, _Place(write.document_key, inserted, newest))

    def _places(self, write: ShardWrite) -> tuple[_Place, ...]:
        return self._transactions.get(write.transaction, {}).get(write.document, ())

    def _make_room(self, write: ShardWrite) -> None:
        """Forget the transactions that began long before this event, and the oldest where there are too many documents."""
        time = int(write.sequence[:8], 16)
        while self._began and time - next(iter(self._began.values())) > self._seconds:
            self._forget_oldest()
        if self._count >= self._held:
            self._forget_oldest()
        self._began.setdefault(write.transaction, time)
        self._transactions.setdefault(write.transaction, {})
        self._count += 1

    def _forget_oldest(self) -> None:
        oldest = next(iter(self._began))
        del self._began[oldest]
        self._count -= len(self._transactions.pop(oldest))


def _is_inserted(places: tuple[_Place, ...], document_key: bytes) -> bool:
    return any(each.inserted and each.document_key == document_key for each in places)
