"""The ends of a collection's rows in bronze: a finished snapshot of the whole, a drop or a rename."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.snapshot.state import SnapshotKind


class SweepCause(StrEnum):
    """Why rows are swept; a drop or a rename also invalidates late events from before it."""

    SNAPSHOT = "snapshot"
    DROP = "drop"
    RENAME = "rename"


@dataclass(frozen=True)
class Sweep:
    """The end of a collection's previous content: rows older than `first` are documents that are gone.

    It is caused by a finished snapshot of the whole collection, or by its drop or rename. `is_replacement`: the snapshot
    was planned because a rename replaced the collection, and `first` is the rename's sequence.
    """

    db_collection: str
    batch: int
    first: str
    cause: SweepCause = SweepCause.SNAPSHOT
    is_replacement: bool = False

    def is_due(self, *, after: int, swept: str) -> bool:
        """Whether a table that is applied up to the batch `after`, and whose newest sweep has the mark `swept`, still needs it.

        Heartbeats repeat a snapshot's end, so one with an older mark is done. A drop or a rename has a single row, and so
        has the end of a replacement's snapshot. They may have an older mark than another snapshot and still be new, if
        the stream lags behind that snapshot.
        """
        has_one_row = self.cause is not SweepCause.SNAPSHOT or self.is_replacement
        return self.batch > after and (has_one_row or self.first > swept)

    def floor(self, before: str, *, keeps_row: bool) -> str:
        """The sequence below which nothing may arrive any more, which was `before`; not raised if deletes keep their row."""
        # Late events from before a snapshot are compared with the rows, as always. After a drop there may be no such row.
        return before if self.cause is SweepCause.SNAPSHOT or keeps_row else max(before, self.first)


def of_heartbeats(heartbeats: Iterable[tuple[int, str]]) -> tuple[Sweep, ...]:
    """The sweeps in heartbeat rows, which are pairs of batch and payload.

    Payloads repeat a finished collection until the snapshot ends: the first one counts. A payload that cannot be read,
    or has no snapshot, is ignored.
    """
    sweeps: dict[tuple[str, str], Sweep] = {}
    for batch, payload in heartbeats:
        snapshot = _snapshot(payload)
        is_replacement = snapshot.get("type") == SnapshotKind.REPLACED.value
        for namespace, state in _collections(snapshot):
            first = state.get("first")
            if state.get("completed") is True and state.get("sweep") is True and isinstance(first, str):
                sweep = Sweep(namespace, batch, first, is_replacement=is_replacement)
                sweeps.setdefault((namespace, first), sweep)
    return tuple(sweeps.values())


def of_schema_changes(changes: Iterable[tuple[int, str, str, str, str]]) -> tuple[Sweep, ...]:
    """The sweeps in `schema_change` rows, which are tuples of batch, db, collection, sequence and payload.

    A drop ends its collection, a rename the one with the old name; other operations remove no documents.
    """
    sweeps = []
    for batch, db, collection, sequence, payload in changes:
        operation = json.loads(payload).get("operation")
        if operation in (SweepCause.DROP.value, SweepCause.RENAME.value):
            sweeps.append(Sweep(f"{db}.{collection}", batch, sequence, SweepCause(operation)))
    return tuple(sweeps)


PAYLOAD_STARTS = tuple(f'{{"operation":"{each.value}"' for each in (SweepCause.DROP, SweepCause.RENAME))
"""The beginnings of the payloads of such `schema_change` rows."""


def within(sweeps: Iterable[Sweep], range_: BatchRange) -> tuple[Sweep, ...]:
    """The sweeps of a range of batches, in order.

    Each is done right after its range, so none is forgotten if a run ends between two ranges.
    """
    return tuple(sweep for sweep in sweeps if range_.after < sweep.batch <= range_.to)


def _snapshot(payload: str) -> Mapping[str, object]:
    """The snapshot of a heartbeat; empty if it has none."""
    try:
        heartbeat = json.loads(payload)
    except ValueError:
        return {}
    snapshot = heartbeat.get("snapshot") if isinstance(heartbeat, dict) else None
    return snapshot if isinstance(snapshot, dict) else {}


def _collections(snapshot: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    collections = snapshot.get("collections")
    if isinstance(collections, dict):
        yield from ((name, state) for name, state in collections.items() if isinstance(state, dict))
