"""Transaction metadata (Debezium's `provide.transaction.metadata`), and the order of events that move a document to another shard.

The identifier is ``<lsid as strict JSON>:<txnNumber>``, `total_order` counts the captured events of the transaction
from 1, `data_collection_order` those of the event's collection. END is written once, with the first event after the
transaction or as soon as the stream is past its cluster time, of a sharded cluster a minute later. After a restart
inside a transaction the counts continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from cdc_core.stream import resume_token

BEGIN = "BEGIN"
END = "END"


class OpenTransaction:
    """The transaction that is being read, with its number of events by collection.

    It counts in place: a transaction may have a hundred thousand events, in thousands of collections.
    """

    def __init__(self, id_: str, counts: Mapping[str, int] = MappingProxyType({})) -> None:
        self.id = id_
        self.total = sum(counts.values())
        self._counts = dict(counts)

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    def count(self, namespace: str) -> None:
        """Count one more event of a collection."""
        self._counts[namespace] = self._counts.get(namespace, 0) + 1
        self.total += 1

    def block(self, namespace: str) -> dict[str, Any]:
        """The `transaction` struct of the event that was counted last."""
        return {"id": self.id, "total_order": self.total, "data_collection_order": self._counts[namespace]}


@dataclass(frozen=True)
class TransactionStep:
    """What one event means for transactions.

    `ended` is the transaction that ended before it, `began` the id of the one that begins with it, `block` its place in
    its own.
    """

    ended: OpenTransaction | None = None
    began: str | None = None
    block: dict[str, Any] | None = None


NOTHING = TransactionStep()


class TransactionTracker:
    """The open transaction while events are read; `token` is that of the last event."""

    def __init__(self, current: OpenTransaction | None = None, *, token: str = "") -> None:
        self.current = current
        self.token = token

    def see(self, id_: str | None, namespace: str) -> TransactionStep:
        """Count one captured event of the transaction `id_`, or of none."""
        previous = self.current
        if id_ is None:
            # As in Debezium, the first event outside of it ends a transaction.
            self.current = None
            return NOTHING if previous is None else TransactionStep(ended=previous)
        is_new = previous is None or previous.id != id_
        self.current = current = OpenTransaction(id_) if previous is None or is_new else previous
        current.count(namespace)
        return TransactionStep(previous if is_new else None, id_ if is_new else None, current.block(namespace))

    def end(self) -> OpenTransaction | None:
        """Close the open transaction, because the stream is past it, and return it."""
        transaction, self.current = self.current, None
        return transaction


def identifier(lsid: str | None, txn_number: int | None) -> str | None:
    """The identifier of an event's transaction; None for an event outside of any."""
    if lsid is None or txn_number is None:
        return None
    return f"{lsid}:{txn_number}"


def begin_payload(id_: str, *, ts_ms: int) -> dict[str, Any]:
    """Debezium's BEGIN record."""
    return {"status": BEGIN, "id": id_, "event_count": None, "data_collections": None, "ts_ms": ts_ms}


def end_payload(transaction: OpenTransaction, *, ts_ms: int) -> dict[str, Any]:
    """Debezium's END record, with the number of events by collection."""
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
    """An event of a transaction: its document, the document key on its shard, its `op` and its sequence."""

    transaction: str
    document: str
    document_key: bytes
    op: str
    sequence: str


def document(namespace: Mapping[str, str], key: str) -> str:
    """A document's name, unique across collections."""
    # One string, which is smaller than a tuple: it is kept for each document that a transaction writes.
    return f"{namespace['db']}.{namespace['coll']}\0{key}"


class _Place(NamedTuple):
    """What a transaction did with a document on one shard: the sequences of its insert, if any, and of its last event."""

    document_key: bytes
    inserted: str | None
    newest: str


class ShardMoves:
    """Orders the delete of a document before its insert, if one transaction does both on two shards.

    A new value of the shard key becomes such a pair. Each event has its own shard's cluster time, so the delete may
    come last, or at the same time, and would remove the document that exists now. Debezium passes the events on as they
    come.

    A delete goes just before the insert on the other shard. Every other event goes after the document's earlier events
    in the transaction. Transactions are kept for `seconds` of cluster time: the two events are milliseconds apart,
    unless there is an election in between. Each of at most `most_documents` documents takes about 500 bytes.
    """

    def __init__(self, *, seconds: int = 600, most_documents: int = 100_000) -> None:
        self._seconds = seconds
        self._most_documents = most_documents
        self._count = 0
        self._transactions: dict[str, dict[str, tuple[_Place, ...]]] = {}
        self._began: dict[str, int] = {}

    def __len__(self) -> int:
        return self._count

    def sequence(self, write: ShardWrite) -> str:
        """The sequence of an event: its own, unless the transaction also wrote the document on another shard."""
        places = self._places(write)
        inserts = [place.inserted for place in places if place.inserted and place.document_key != write.document_key]
        newest = max((place.newest for place in places), default="")
        sequence = write.sequence
        if write.op == "d" and inserts:
            sequence = resume_token.neighbour(min(inserts), -1)
        # An update whose key has no insert may belong to the document before its move.
        elif sequence <= newest and (write.op != "u" or _is_inserted(places, write.document_key)):
            sequence = resume_token.neighbour(newest, 1)
        self.remember(write._replace(sequence=sequence))
        return sequence

    def remember(self, write: ShardWrite) -> None:
        """Register an event that already has its final sequence."""
        places = self._places(write)
        if write.op == "u" and not _is_inserted(places, write.document_key):
            return
        place = next((other for other in places if other.document_key == write.document_key), None)
        inserted = place.inserted if write.op == "u" and place else write.sequence if write.op == "c" else None
        newest = max(write.sequence, place.newest if place else "")
        others = (other for other in places if other is not place)
        if not places:
            self._make_room(write)
        self._transactions[write.transaction][write.document] = (*others, _Place(write.document_key, inserted, newest))

    def _places(self, write: ShardWrite) -> tuple[_Place, ...]:
        return self._transactions.get(write.transaction, {}).get(write.document, ())

    def _make_room(self, write: ShardWrite) -> None:
        """Forget transactions that are too old for this event, and the oldest one if there are too many documents."""
        time = int(write.sequence[:8], 16)
        while self._began and time - next(iter(self._began.values())) > self._seconds:
            self._forget_oldest()
        if self._count >= self._most_documents:
            self._forget_oldest()
        self._began.setdefault(write.transaction, time)
        self._transactions.setdefault(write.transaction, {})
        self._count += 1

    def _forget_oldest(self) -> None:
        oldest = next(iter(self._began))
        del self._began[oldest]
        self._count -= len(self._transactions.pop(oldest))


def _is_inserted(places: tuple[_Place, ...], document_key: bytes) -> bool:
    return any(place.inserted and place.document_key == document_key for place in places)
