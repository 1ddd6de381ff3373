"""A `Source` from property names, also with properties that a settings file may not use yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdc_core.properties import source as properties
from cdc_core.properties import types as values


def source(given: Mapping[str, Any]) -> properties.Source:
    """The properties as a settings file holds them, each read by its type, without checks across them."""
    read: dict[str, Any] = {"mongodb_connection_string": values.Reference("mongodb://localhost")}
    is_literal = given.get("filters.match.mode") == "literal"
    for name, value in given.items():
        each = properties.BY_NAME[name]
        type_ = values.NameList() if is_literal and isinstance(each.type, values.Patterns) else each.type
        read[each.attribute] = type_.read(value)
    return properties.Source(**read)
