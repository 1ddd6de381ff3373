"""A `Source` from property names, also from properties that a settings file does not accept yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdc_core.properties import source as properties
from cdc_core.properties import types as values


def source(given: Mapping[str, Any]) -> properties.Source:
    """A `Source` of properties as in a settings file, each read by its type, without checks between them."""
    read: dict[str, Any] = {"mongodb_connection_string": values.Reference("mongodb://localhost")}
    is_literal = given.get("filters.match.mode") == "literal"
    for name, value in given.items():
        each = properties.BY_NAME[name]
        has_names = is_literal and isinstance(each.type, values.Patterns) and not name.startswith("snapshot.")
        type_ = values.NameList() if has_names else each.type
        read[each.attribute] = type_.read(value)
    return properties.Source(**read)
