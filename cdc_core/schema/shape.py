"""What was seen in a collection's documents: the kinds of BSON value at each path, and when each was first seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from cdc_core.extended_json import wrappers
from cdc_core.schema.kinds import INT32_RANGE, NOTHING, Kind, kind


@dataclass
class Shape:
    """What was seen at one path.

    `kinds` has the least mark of each kind; marks are texts that sort like the events. Documents and arrays without
    anything that a column could hold count as empty. `first` is the least mark, and the place in its document, of a
    value that a column could hold. `fields` are the fields of documents (by their own names), `element` the elements of
    arrays.
    """

    kinds: dict[Kind, str] = field(default_factory=dict)
    first: tuple[str, int] | None = None
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None

    def see(self, value: Any, mark: str, places: Iterator[int] | None = None) -> bool:
        """Adds one value; `places` numbers the values of a document. Returns whether a column could hold it (not null, and
        not only nulls).
        """
        places = itertools.count() if places is None else places
        place = next(places)
        value_kind = kind(value)
        if value_kind is Kind.DOCUMENT and not self._see_fields(value, mark, places):
            value_kind = Kind.EMPTY_DOCUMENT
        elif value_kind is Kind.ARRAY and not self._see_elements(value, mark, places):
            value_kind = Kind.EMPTY_ARRAY
        if value_kind is Kind.NULL:
            return False
        first = self.kinds.get(value_kind)
        if first is None or mark < first:
            self.kinds[value_kind] = mark
        if value_kind in NOTHING:
            return False
        self._begin((mark, place))
        return True

    def _begin(self, first: tuple[str, int] | None) -> None:
        if self.first is None or (first is not None and first < self.first):
            self.first = first

    def _see_fields(self, value: Mapping[str, Any], mark: str, places: Iterator[int]) -> bool:
        # A list, because `any` over a generator would stop before all fields are seen.
        fields = self.fields
        seen_fields = [
            (fields.get(name := wrappers.unescape_key(key)) or self._field(name)).see(item, mark, places)
            for key, item in value.items()
            if item is not None
        ]
        return any(seen_fields)

    def _see_elements(self, value: Sequence[Any], mark: str, places: Iterator[int]) -> bool:
        if self.element is None:
            self.element = Shape()
        # A list again: all of these must be seen.
        seen_elements = [self.element.see(item, mark, places) for item in _distinct(value)]
        return any(seen_elements)

    def _field(self, name: str) -> Shape:
        shape = self.fields.get(name)
        if shape is None:
            shape = self.fields[name] = Shape()
        return shape

    def add(self, other: Shape) -> None:
        """Adds what another shape has seen."""
        for value_kind, mark in other.kinds.items():
            self.kinds[value_kind] = min(mark, self.kinds.get(value_kind, mark))
        self._begin(other.first)
        for name, shape in other.fields.items():
            self._field(name).add(shape)
        if other.element is not None:
            if self.element is None:
                self.element = Shape()
            self.element.add(other.element)

    def in_order(self) -> list[tuple[str, Shape]]:
        """The fields in order of appearance: by the first document that could give each a column, then by place in it."""
        # Deterministic although partitions merge in any order: of two fields that get one column name, the later is
        # renamed.
        return sorted(self.fields.items(), key=lambda item: (item[1].first is None, item[1].first, item[0]))


_PLAIN = {str, bool, int, float, NoneType}


def _distinct(elements: Sequence[Any]) -> list[Any]:
    """The elements that may show different things, without nulls: of thousands of numbers, one of each kind."""
    types = {*map(type, elements)}
    if not types <= _PLAIN:
        return [item for item in elements if item is not None]
    distinct = [next(item for item in elements if type(item) is each) for each in types.difference((int, NoneType))]
    if int in types:
        distinct += {item in INT32_RANGE: item for item in elements if type(item) is int}.values()
    return distinct


def observe(parsed_document: Any, *, mark: str = "") -> Shape:
    """The shape of one document; `mark` sorts like its event among those that are merged."""
    shape = Shape()
    shape.see(parsed_document, mark)
    return shape
