"""The kinds of BSON value in parsed type-exact Extended JSON v2.

`shape` looks into documents, `cast` converts values to columns. The column type of each kind is in `column_types` (a
Decimal128 is a STRING); `evolution` joins two kinds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from cdc_core.properties.unwrap import ArrayDocument, FieldValues


class Kind(enum.Enum):
    """The kind of a parsed value; NON_FINITE is a double in a wrapper: NaN or an infinity.

    The order decides between kinds that one document shows at one path.
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

    # By object instead of by name, which would call a Python method: kinds are looked up for every value.
    __hash__ = object.__hash__


NOTHING = frozenset({Kind.EMPTY_DOCUMENT, Kind.EMPTY_ARRAY, Kind.UNDEFINED, Kind.NULL})
"""Kinds that never make a column."""
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
"""The key of each Extended JSON wrapper; users' keys with these names are escaped."""

INT32_RANGE = range(-(2**31), 2**31)


def kind(value: Any) -> Kind:
    """The kind of one parsed value."""
    if isinstance(value, str):
        return Kind.STRING
    if isinstance(value, bool):
        return Kind.BOOLEAN
    if isinstance(value, int):
        return Kind.INT32 if value in INT32_RANGE else Kind.INT64
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
    # No wrapper has more keys, so larger documents are not searched.
    if len(value) <= 2:
        for key in value:
            wrapper = WRAPPERS.get(key)
            # Only `$code` can have a second key, `$scope`.
            if wrapper is Kind.CODE and len(value) == 2:
                return Kind.CODE_WITH_SCOPE
            if wrapper is not None:
                return wrapper
    return Kind.DOCUMENT


def holds_something(value: Any) -> bool:
    """Whether a column could hold the value or a part of it: what `Shape.see` returns, without looking at all of it."""
    value_kind = kind(value)
    if value_kind is Kind.DOCUMENT:
        return any(map(holds_something, value.values()))
    if value_kind is Kind.ARRAY:
        return any(map(holds_something, value))
    return value_kind not in NOTHING


def laid_out(value: Any, values: FieldValues) -> Any:
    """The value with `array.encoding` and the other options of `FieldValues` applied at every depth."""
    if values.are_kept:
        return value
    converted = values.of(value)
    if isinstance(converted, list):
        return [laid_out(item, values) for item in converted]
    if isinstance(converted, dict) and _kind_of_object(converted) is Kind.DOCUMENT:
        return type(converted)((key, laid_out(item, values)) for key, item in converted.items())
    return converted


DOUBLES = frozenset({Kind.DOUBLE, Kind.NON_FINITE})
NUMBERS = frozenset({Kind.INT32, Kind.INT64, *DOUBLES})
