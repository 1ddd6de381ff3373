"""What refused documents showed, by place in the schema: keys without a column, and wrappers of scalars.

It changes how fast similar documents are decoded, never a result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from cdc_core.extended_json.wrappers import escape_key, unescape_key
from cdc_core.schema import kinds
from cdc_core.schema.column_types import ELEMENT, VALUE, Array, ColumnType, Map, Steps, Struct
from cdc_core.schema.kinds import WRAPPERS, Kind

LEARNED = 4000
"""Maximum keys without a column that are learned for one place."""

NAMEABLE = re.compile(r'[^"\\\x00-\x1f]*')
"""Keys that a msgspec struct can have. Documents with other keys take the exact path, or, if they are frequent, are decoded
key by key.
"""

FREQUENT = 8
"""A place is decoded key by key if one document in so many has a key there that a struct cannot have, or that was not learned before."""

_MANY = 50
"""The documents with keys that were not learned before, at least: fewer may show all of a place's keys."""


@dataclass
class Lesson:
    """What refused documents showed at one place."""

    keys: dict[str, None] = field(default_factory=dict)
    wrappers: set[str] = field(default_factory=set)
    unnameable: int = 0
    """The number of documents with a key that a struct cannot have."""
    unlearned: int = 0
    """The number of documents with a key without a column that no document before had."""


class Lessons:
    """What was learned, by place."""

    def __init__(self) -> None:
        self.at: dict[Steps, Lesson] = {}

    def irregular(self, documents: int) -> set[Steps]:
        """The places where many of so many documents have keys that a struct cannot have, or ever new ones."""
        return {
            place
            for place, lesson in self.at.items()
            if max(lesson.unnameable, lesson.unlearned if lesson.unlearned >= _MANY else 0) * FREQUENT >= max(1, documents)
        }

    def learn(self, value: Any, type_: ColumnType, place: Steps = ()) -> None:
        """Records what a document shows beyond the schema."""
        match type_:
            case Struct():
                if kinds.kind(value) is Kind.DOCUMENT:
                    self._learn_fields(value, type_, place)
            case Array(inner):
                for item in value if isinstance(value, list) else ():
                    self.learn(item, inner, (*place, ELEMENT))
            case Map(inner):
                for item in value.values() if isinstance(value, dict) else ():
                    self.learn(item, inner, (*place, VALUE))
            case _:
                if isinstance(value, dict):
                    self._lesson(place).wrappers.add(next((key for key in value if key in WRAPPERS), ""))

    def _learn_fields(self, value: dict[str, Any], type_: Struct, place: Steps) -> None:
        if not all(map(NAMEABLE.fullmatch, value)):
            self._lesson(place).unnameable += 1
        known_keys = self.at[place].keys.keys() if place in self.at else ()
        unlearned_keys = []
        for key, item in value.items():
            name = unescape_key(key)
            known_field = type_.by_name.get(name)
            if known_field is not None:
                self.learn(item, known_field.type, (*place, name))
            is_expected = known_field is not None and escape_key(name) == key
            if not is_expected and key not in WRAPPERS and key not in known_keys:
                unlearned_keys.append(key)
        if unlearned_keys:
            lesson = self._lesson(place)
            lesson.unlearned += 1
            # Each key becomes a member of the struct for every later document: unbounded keys (ids) must not slow them all down.
            lesson.keys.update(dict.fromkeys(unlearned_keys[: max(0, LEARNED - len(lesson.keys))]))

    def _lesson(self, place: Steps) -> Lesson:
        return self.at.setdefault(place, Lesson())
