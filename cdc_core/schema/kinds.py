"""The kinds of BSON value, as parsed type-exact Extended JSON v2 shows them.

Nothing here looks into a document: `shape` does, and `cast` makes values of columns. Which column type a kind has
where nothing pins one stands in `column_types` (a Decimal128 is a STRING), and how two kinds come together in `evolution`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from cdc_core.properties.unwrap import ArrayDocument, FieldValues


class Kind(enum.Enum):
    """What a value of parsed EJSON is; NON_FINITE is a double in a wrapper: NaN or an infinity. The order
    decides between kinds that one document shows at one path.
    """

    DOCUMENT = "document"
    ARRAY = "array"
    DOUBLE = "double"
    NON_FINITE = "nonFinite"
    INT64 = "int64"
    INT32 = "int32"
    DECIMAL = "decimal"
    STRING = "string"
    OBJECT_ID = "objectId"
    SYMBOL = "symbol"
    CODE = "code"
    MIN_KEY = "minKey"
    MAX_KEY = "maxKey"
    BOOLEAN = "bool"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BINARY = "binary"
    REGEX = "regex"
    CODE_WITH_SCOPE = "codeWithScope"
    DB_POINTER = "dbPointer"
    EMPTY_DOCUMENT = "{}"
    EMPTY_ARRAY = "[]"
    UNDEFINED = "undefined"
    NULL = "null"

    # Of the object and not of the name, which takes a call of Python: kinds are looked up for each value of a document.
    __hash__ = object.__hash__


NOTHING = frozenset({Kind.EMPTY_DOCUMENT, Kind.EMPTY_ARRAY, Kind.UNDEFINED, Kind.NULL})
"""Kinds from which no column can come."""
ABSENT = frozenset({Kind.UNDEFINED, Kind.NULL})

WRAPPERS: Mapping[str, Kind] = {
    "$oid": Kind.OBJECT_ID,
    "$numberInt": Kind.INT32,
    "$numberLong": Kind.INT64,
    "$numberDouble": Kind.NON_FINITE,
    "$numberDecimal": Kind.DECIMAL,
    "$date": Kind.DATE,
    "$timestamp": Kind.TIMESTAMP,
    "$binary": Kind.BINARY,
    "$regularExpression": Kind.REGEX,
    "$symbol": Kind.SYMBOL,
    "$code": Kind.CODE,
    "$minKey": Kind.MIN_KEY,
    "$maxKey": Kind.MAX_KEY,
    "$undefined": Kind.UNDEFINED,
    "$dbPointer": Kind.DB_POINTER,
}
"""The key by which each wrapper of Extended JSON is known; users' keys of these names are escaped."""

_INT32 = range(-(2**31), 2**31)


def kind(value: Any) -> Kind:
    """The kind of one value of parsed EJSON."""
    if isinstance(value, str):
        return Kind.STRING
    if isinstance(value, bool):
        return Kind.BOOLEAN
    if isinstance(value, int):
        return Kind.INT32 if value in _INT32 else Kind.INT64
    if isinstance(value, float):
        return Kind.DOUBLE
    if value is None:
        return Kind.NULL
    if isinstance(value, list):
        return Kind.ARRAY if value else Kind.EMPTY_ARRAY
    return _kind_of_object(value)


def _kind_of_object(value: Mapping[str, Any]) -> Kind:
    if not value:
        return Kind.EMPTY_ARRAY if isinstance(value, ArrayDocument) else Kind.EMPTY_DOCUMENT
    # No wrapper has more keys: larger documents are spared the search.
    if len(value) <= 2:
        for key in value:
            wrapper = WRAPPERS.get(key)
            # `$code` is the one wrapper that may have a second key, `$scope`.
            if wrapper is Kind.CODE and len(value) == 2:
                return Kind.CODE_WITH_SCOPE
            if wrapper is not None:
                return wrapper
    return Kind.DOCUMENT


def laid_out(value: Any, values: FieldValues) -> Any:
    """The value as the options want it, at every depth."""
    if values.are_kept:
        return value
    own = values.of(value)
    if isinstance(own, list):
        return [laid_out(item, values) for item in own]
    if isinstance(own, dict) and _kind_of_object(own) is Kind.DOCUMENT:
        return type(own)((key, laid_out(item, values)) for key, item in own.items())
    return own


DOUBLES = frozenset({Kind.DOUBLE, Kind.NON_FINITE})
NUMBERS = frozenset({Kind.INT32, Kind.INT64, *DOUBLES})
