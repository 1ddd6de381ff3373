"""The field names of a collection's documents, in the order in which they appear."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_FIELDS = 1000
"""Nothing is learned beyond this many names: such documents are maps, whose keys are data."""


@dataclass
class FieldOrder:
    """Field names in an order that agrees with every document that was learned from."""

    names: tuple[bytes, ...] = ()
    _before: dict[bytes, frozenset[bytes]] = field(default_factory=dict)

    def learn(self, documents: Iterable[Sequence[bytes]]) -> bool:
        """Add documents' field names; returns whether anything was added.

        A document is ignored if it repeats a name or contradicts the order.
        """
        has_learned = False
        for names in documents:
            predecessors = dict(self._before)
            for name, previous in zip(names, (None, *names), strict=False):
                predecessors[name] = predecessors.get(name, frozenset()) | ({previous} if previous is not None else set())
            if len(predecessors) > MAX_FIELDS or predecessors == self._before:
                continue
            try:
                self.names, self._before = tuple(graphlib.TopologicalSorter(predecessors).static_order()), predecessors
            except graphlib.CycleError:
                continue
            has_learned = True
        return has_learned
