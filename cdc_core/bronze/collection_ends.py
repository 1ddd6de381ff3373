"""Where a collection's rows end: what bronze says of a snapshot of the whole, a drop or a rename."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from cdc_core.bronze.batch_range import BatchRange


class SweepCause(str, Enum):
    """Why rows are swept; a drop or a rename also makes void what comes late from before it."""

    SNAPSHOT = "snapshot"
    DROP = "drop"
    RENAME = "rename"


@dataclass(frozen=True)
class Sweep:
    """The end of a collection as it was: rows older than `first` are documents that are gone.

    A snapshot of the whole collection that is finished, or a drop or a rename of it.
    """

    db_collection: str
    batch: int
    first: str
    cause: SweepCause = SweepCause.SNAPSHOT

    def is_due(self, *, after: int, swept: str) -> bool:
        """Whether a table that is applied up to the batch `after`, and whose newest sweep has the mark `swept`, still
        needs it.

        Heartbeats repeat a snapshot's end, so that one with an older mark is done. A drop or a rename has one row, and a
        stream that lags behind a snapshot brings one from before its mark together with the events before that.
        """
        return self.batch > after and (self.cause is not SweepCause.SNAPSHOT or self.first > swept)

    def floor(self, before: str, *, keeps_row: bool) -> str:
        """The sequence before which nothing may arrive any more, where it was `before`; none is raised where a delete keeps its row."""
        # A snapshot raises no floor: what comes late from before it is compared with the rows, as always. After a drop there
        # may be no row to compare with.
        return before if self.cause is SweepCause.SNAPSHOT or keeps_row else max(before, self.first)


def of_heartbeats(heartbeats: Iterable[tuple[int, str]]) -> tuple[Sweep, ...]:
    """The sweeps that heartbeat rows, as pairs of batch and payload, call for.

    Payloads repeat a finished collection until the snapshot ends: the first that names it counts, and one that
    cannot be read, or says nothing of a snapshot, counts for nothing.
    """
    found: dict[tuple[str, str], Sweep] = {}
    for batch, payload in heartbeats:
        for namespace, state in _collections(payload):
            first = state.get("first")
            if state.get("completed") is True and state.get("sweep") is True and isinstance(first, str):
                found.setdefault((namespace, first), Sweep(namespace, batch, first))
    return tuple(found.values())


def of_schema_changes(changes: Iterable[tuple[int, str, str, str, str]]) -> tuple[Sweep, ...]:
    """The sweeps that `schema_change` rows call for: tuples of batch, db, collection, sequence and payload.

    A drop ends its collection, a rename the one whose name was given up; the other operations take no documents away.
    """
    found = []
    for batch, db, collection, sequence, payload in changes:
        operation = json.loads(payload).get("operation")
        if operation in (SweepCause.DROP.value, SweepCause.RENAME.value):
            found.append(Sweep(f"{db}.{collection}", batch, sequence, SweepCause(operation)))
    return tuple(found)


PAYLOAD_STARTS = tuple(f'{{"operation":"{each.value}"' for each in (SweepCause.DROP, SweepCause.RENAME))
"""How the payloads of such `schema_change` rows begin."""


def within(sweeps: Iterable[Sweep], range_: BatchRange) -> tuple[Sweep, ...]:
    """The sweeps that a range of batches calls for, in their order.

    Each comes right after its range, so that a run that ends between two ranges has forgotten none.
    """
    return tuple(sweep for sweep in sweeps if range_.after < sweep.batch <= range_.to)


def _collections(payload: str) -> Iterator[tuple[str, dict[str, object]]]:
    try:
        parsed = json.loads(payload)
    except ValueError:
        return
    snapshot = parsed.get("snapshot") if isinstance(parsed, dict) else None
    collections = snapshot.get("collections") if isinstance(snapshot, dict) else None
    if isinstance(collections, dict):
        yield from ((name, state) for name, state in collections.items() if isinstance(state, dict))
