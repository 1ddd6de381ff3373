"""Extended JSON that users write for the server to evaluate: find filters and aggregation stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import bson
from bson import json_util
from bson.errors import BSONError

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, BSONError)
"""The exceptions that parsers raise for invalid text: wrong content in a wrapper, a number too large, too deep nesting."""


def checked(text: str) -> Any:
    """The value of `loads`; raises `ValueError` if the text is invalid or its value does not fit into BSON."""
    try:
        value = loads(text)
    except UNREADABLE as error:
        raise ValueError(f"no Extended JSON: {error}") from error
    # JSON can hold what BSON cannot: a lone surrogate, an integer of more than 64 bits.
    try:
        bson.encode({"given": value})
    except UNREADABLE as error:
        raise ValueError(f"nothing that BSON holds: {error}") from error
    return value


def loads(text: str) -> Any:
    """A filter or stages from JSON text; raises what `json_util.loads` raises if the text is invalid."""
    return json.loads(text, object_hook=_value)


def _value(fields: Mapping[str, Any]) -> Any:
    # The driver turns any document with `$regex` into a regular expression and drops the operators beside it.
    is_one_of_several = "$regex" in fields and not fields.keys() <= {"$regex", "$options"}
    return fields if is_one_of_several else json_util.object_hook(fields)
