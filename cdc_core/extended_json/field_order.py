"""The fields that documents of a collection have, in the order in which they have them."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_FIELDS = 1000
"""Names that are data, as in a map, are no fields: beyond so many nothing is learned."""


@dataclass
class FieldOrder:
    """The names of a document's fields, in an order that every document that was learned from keeps."""

    names: tuple[bytes, ...] = ()
    _before: dict[bytes, frozenset[bytes]] = field(default_factory=dict)

    def learn(self, documents: Iterable[Sequence[bytes]]) -> bool:
        """Whether something was learned: no order has names that stand twice, or once before and once behind another."""
        has_learned = False
        for names in documents:
            before = dict(self._before)
            for name, previous in zip(names, (None, *names), strict=False):
                before[name] = before.get(name, frozenset()) | ({previous} if previous is not None else set())
            if len(before) > MAX_FIELDS or before == self._before:
                continue
            try:
                self.names, self._before = tuple(graphlib.TopologicalSorter(before).static_order()), before
            except graphlib.CycleError:
                continue
            has_learned = True
        return has_learned
