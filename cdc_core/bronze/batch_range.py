"""A range of bronze's batches, and how it is divided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRange:
    """Bronze batches after `after`, up to and including `to`."""

    after: int
    to: int

    @property
    def predicate(self) -> str:
        """The range as SQL over bronze, with literals for Delta's file skipping."""
        return f"batch > {self.after} AND batch <= {self.to}"


def ranges(batches: Iterable[tuple[int, int]], *, span: BatchRange, limit: int) -> tuple[BatchRange, ...]:
    """The span divided into ranges that each hold at most `limit` events, or one batch.

    `batches` are ordered pairs of batch and number of events; batches without events may be missing. The ranges cover
    the whole span; an empty span has none.
    """
    cuts: list[int] = []
    range_events = 0
    previous = span.after
    for batch, events in batches:
        # A batch is never divided, because a position is a whole batch.
        if range_events and range_events + events > limit:
            cuts.append(previous)
            range_events = 0
        range_events += events
        previous = batch
    edges = [span.after, *cuts, span.to]
    return tuple(BatchRange(low, high) for low, high in zip(edges, edges[1:]) if low < high)
