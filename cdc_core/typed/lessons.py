"""What documents that the decoder refused have shown, by place in the schema: keys without a column, wrappers of a scalar.

It changes how fast the next documents like them are decoded, and never a result.
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
"""So many keys without a column are learned for one place."""

NAMEABLE = re.compile(r'[^"\\\x00-\x1f]*')
"""Keys that a struct of msgspec can have; documents with others go the exact way."""


@dataclass
class Lesson:
    """What refused documents showed at one place."""

    keys: dict[str, None] = field(default_factory=dict)
    wrappers: set[str] = field(default_factory=set)


class Lessons:
    """What was learned, by place."""

    def __init__(self) -> None:
        self.at: dict[Steps, Lesson] = {}

    def learn(self, value: Any, type_: ColumnType, place: Steps = ()) -> None:
        """Records what a document shows that the schema does not say."""
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
        for key, item in value.items():
            name = unescape_key(key)
            known = type_.by_name.get(name)
            if known is not None:
                self.learn(item, known.type, (*place, name))
            is_expected = known is not None and escape_key(name) == key
            if not is_expected and key not in WRAPPERS and NAMEABLE.fullmatch(key):
                lesson = self._lesson(place)
                # Each key is a member of the struct in every later document: keys without end (ids as keys) must not slow all of them.
                if len(lesson.keys) < LEARNED:
                    lesson.keys[key] = None

    def _lesson(self, place: Steps) -> Lesson:
        return self.at.setdefault(place, Lesson())
