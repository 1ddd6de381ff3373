"""What a user gives the server to evaluate, as Extended JSON: a find filter, the stages of an aggregation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import bson
from bson import json_util
from bson.errors import BSONError

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, BSONError)
"""What parsers say of a text that is none of theirs: a wrapper with the wrong content, a number too large, too many
levels."""


def checked(text: str) -> Any:
    """What `loads` gives; raises `ValueError` for a text that is none, or that no server could be sent."""
    try:
        parsed = loads(text)
    except UNREADABLE as error:
        raise ValueError(f"no Extended JSON: {error}") from error
    # JSON has texts and numbers that BSON has not: half a surrogate, or an integer of more than 64 bits.
    try:
        bson.encode({"given": parsed})
    except UNREADABLE as error:
        raise ValueError(f"nothing that BSON holds: {error}") from error
    return parsed


def loads(text: str) -> Any:
    """A filter or stages from their JSON; raises what `json_util.loads` raises for a text that is none."""
    return json.loads(text, object_hook=_value)


def _value(fields: Mapping[str, Any]) -> Any:
    # Of a `$regex` the driver makes the value that it is alone; the operators beside it would be gone.
    is_one_of_several = "$regex" in fields and not fields.keys() <= {"$regex", "$options"}
    return fields if is_one_of_several else json_util.object_hook(fields)
