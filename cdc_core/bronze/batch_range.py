"""A range of bronze's batches, and how a long one is cut."""

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
        """The range as SQL over bronze, with literals, so that Delta skips files."""
        return f"batch > {self.after} AND batch <= {self.to}"


def ranges(batches: Iterable[tuple[int, int]], *, span: BatchRange, limit: int) -> tuple[BatchRange, ...]:
    """The span cut between batches so that each range holds at most `limit` events, or one batch.

    `batches` are pairs of batch and count of events, in order; batches without events may be left out. The ranges
    cover the whole span; there is none for an empty span.
    """
    cuts: list[int] = []
    held = 0
    previous = span.after
    for batch, events in batches:
        # A batch that alone is larger than the limit is a range by itself: a position is a whole batch.
        if held and held + events > limit:
            cuts.append(previous)
            held = 0
        held += events
        previous = batch
    edges = [span.after, *cuts, span.to]
    return tuple(BatchRange(low, high) for low, high in zip(edges, edges[1:]) if low < high)
