"""What was seen in the documents of a collection: the kinds of BSON value at each path, and when each was seen first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdc_core.schema import names as column_names
from cdc_core.schema.kinds import NOTHING, Kind, kind


@dataclass
class Shape:
    """What was seen at one path.

    `kinds` says of each kind the least `mark` it was seen at; marks are texts that sort as the events do. A
    document or an array that holds nothing a column could come from counts as empty. `fields` are those of
    the documents (by their own names, in the order seen), `element` what was in the arrays.
    """

    kinds: dict[Kind, str] = field(default_factory=dict)
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None

    def see(self, value: Any, mark: str) -> bool:
        """Adds one value. True where a column could come from it: not from null, nor from what holds only nulls."""
        seen = kind(value)
        if seen is Kind.DOCUMENT and not self._see_fields(value, mark):
            seen = Kind.EMPTY_DOCUMENT
        elif seen is Kind.ARRAY and not self._see_elements(value, mark):
            seen = Kind.EMPTY_ARRAY
        if seen is Kind.NULL:
            return False
        first = self.kinds.get(seen)
        if first is None or mark < first:
            self.kinds[seen] = mark
        return seen not in NOTHING

    def _see_fields(self, value: Mapping[str, Any], mark: str) -> bool:
        # A list, for `any` over a generator would stop before every field is seen.
        seen_fields = [
            self._field(column_names.unescaped(key)).see(item, mark) for key, item in value.items() if item is not None
        ]
        return any(seen_fields)

    def _see_elements(self, value: Sequence[Any], mark: str) -> bool:
        if self.element is None:
            self.element = Shape()
        # Here, too, every element has to be seen.
        seen_elements = [self.element.see(item, mark) for item in value if item is not None]
        return any(seen_elements)

    def _field(self, name: str) -> Shape:
        shape = self.fields.get(name)
        if shape is None:
            shape = self.fields[name] = Shape()
        return shape

    def add(self, other: Shape) -> None:
        """Adds what another shape has seen."""
        for seen, mark in other.kinds.items():
            self.kinds[seen] = min(mark, self.kinds.get(seen, mark))
        for name, shape in other.fields.items():
            self._field(name).add(shape)
        if other.element is not None:
            if self.element is None:
                self.element = Shape()
            self.element.add(other.element)

    def ordered(self, like: Any) -> Shape:
        """The same with fields in the order of the document `like`, those that it has not by name."""
        names = [column_names.unescaped(key) for key in like] if isinstance(like, dict) else []
        # Shapes of partitions are merged in any order: columns follow a document instead.
        rank = {name: number for number, name in enumerate(names)}
        values = dict(zip(names, like.values())) if names else {}
        elements = like if isinstance(like, list) else []
        sample = next((item for item in elements if isinstance(item, dict)), None)
        return Shape(
            kinds=self.kinds,
            fields={
                name: self.fields[name].ordered(values.get(name))
                for name in sorted(self.fields, key=lambda name: (rank.get(name, len(rank)), name))
            },
            element=None if self.element is None else self.element.ordered(sample),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kinds": {seen.value: mark for seen, mark in self.kinds.items()},
            "fields": {name: shape.to_json() for name, shape in self.fields.items()},
            "element": None if self.element is None else self.element.to_json(),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Shape:
        """The inverse of `to_json`."""
        return Shape(
            kinds={Kind(seen): mark for seen, mark in value["kinds"].items()},
            fields={name: Shape.from_json(shape) for name, shape in value["fields"].items()},
            element=None if value["element"] is None else Shape.from_json(value["element"]),
        )


def observe(parsed_document: Any, *, mark: str = "") -> Shape:
    """The shape of one document; `mark` sorts as its event does among those that are joined together."""
    shape = Shape()
    shape.see(parsed_document, mark)
    return shape
