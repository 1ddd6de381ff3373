"""A document as a row of the table: each value as its column's type, an absent field as null, and what did not fit.

A field is absent where it never was, and where a `$unset` took it away: the row of a full document has all columns. Of a partial
update the folded document (`cdc_core.silver.fold`) is typed anew where whole documents are kept (`keep.document`); elsewhere the
row stays as it was and is marked `__incomplete`.

Which type a column has is said in `column_types` (`BASE`: a Decimal128 is a STRING), `pins` and `evolution`.

This is the exact way, value by value; `cdc_core.typed` is held to the same result.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from cdc_core.extended_json import wrappers
from cdc_core.properties.unwrap import ArrayDocument
from cdc_core.schema.column_types import BASE, Array, ColumnType, Decimal, Map, Scalar, Struct
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.kinds import ABSENT, DOUBLES, Kind, kind, laid_out


class _Misfit(Exception):
    """A value that its column cannot hold."""


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
MIN_DATE_MS = -62_135_424_000_000
"""0001-01-03T00:00:00Z: Python's clocks, which PySpark's `collect()` goes by, do not reach the two days before it in
every zone."""
MAX_DATE_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last."""


def ejson(value: Any) -> str:
    """The Extended JSON text of a value of parsed EJSON."""
    try:
        return orjson.dumps(_arrays_back(value)).decode()
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits, which no BSON has
        return json.dumps(_arrays_back(value), separators=(",", ":"), ensure_ascii=False)


def _arrays_back(value: Any) -> Any:
    if isinstance(value, ArrayDocument):
        return [_arrays_back(item) for item in value.values()]
    if isinstance(value, dict):
        return {key: _arrays_back(item) for key, item in value.items()}
    return [_arrays_back(item) for item in value] if isinstance(value, list) else value


def cast(parsed_value: Any, column_type: ColumnType, *, path: str = "") -> tuple[Any, dict[str, str]]:
    """One value as its column type holds it, and what did not fit: dotted path -> Extended JSON text.

    Structs are dicts by column name, arrays lists, maps dicts, timestamps aware datetimes in UTC, decimals
    `decimal.Decimal`, binary bytes. What did not fit is None in its place. Never raises for a value of
    parsed EJSON.
    """
    rescued: dict[str, str] = {}
    return _cast(parsed_value, column_type, path or None, rescued), rescued


def row(parsed_document: Any, schema: DocumentSchema) -> tuple[dict[str, Any], dict[str, str]]:
    """One document as a row of the table (column name -> value, as `cast` gives it), and what did not fit.

    Where documents are flattened, one whose columns are all null is rescued as `{}`, or it could not be told from one that
    is not there; an array that is laid out as a document as `[]`.
    """
    given = laid_out(parsed_document, schema.naming.values)
    value, rescued = cast(given, schema.struct)
    if not schema.naming.flatten:
        return {column.name: (value or {}).get(column.name) for column in schema.columns}, rescued
    # Flattened, a document has no column of its own that could say that it is there.
    for path, text in _emptied(value, schema.struct, given, ""):
        rescue(rescued, path, text)
    return {column.name: _value_at(value, schema.struct, column.path) for column in schema.columns}, rescued


def _value_at(value: Any, type_: ColumnType, path: Sequence[str]) -> Any:
    for name in path:
        if value is None:
            return None
        if isinstance(type_, Struct):
            item = type_.by_name[name]
            value, type_ = value.get(item.column), item.type
        else:
            value = value.get(name)
    return value


def _emptied(value: Any, type_: Struct, given: Any, prefix: str) -> list[tuple[str, str]]:
    """The paths of documents that are there but have no value in any column, outer ones first, and their texts."""
    found: list[tuple[str, str]] = []
    if value is None:
        return found
    # Of two keys that are one name the first has the column.
    held = {wrappers.unescape_key(key): item for key, item in reversed(given.items())}
    for item in type_.fields:
        inner = value.get(item.column)
        if isinstance(item.type, Struct) and inner is not None:
            path = f"{prefix}{item.name[1:] if isinstance(given, ArrayDocument) else item.name}"
            if _is_blank(inner, item.type):
                found.append((path, "[]" if isinstance(held[item.name], ArrayDocument) else "{}"))
            found += _emptied(inner, item.type, held[item.name], f"{path}.")
    return found


def _is_blank(value: Any, type_: ColumnType) -> bool:
    if value is None or not isinstance(type_, Struct):
        return value is None
    return all(_is_blank(value.get(item.column), item.type) for item in type_.fields)


def _cast(value: Any, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> Any:
    seen = kind(value)
    if seen in ABSENT:
        return None
    try:
        match type_:
            case Scalar():  # most values are
                return _TO_SCALAR[type_](value, seen)
            case Struct():
                return _cast_document(value, seen, type_, path, rescued)
            case Array(element):
                return _cast_array(value, element, path, rescued)
            case Map(item_type):
                return _cast_map(value, seen, item_type, path, rescued)
            case Decimal(precision, scale):
                return _to_decimal(value, seen, precision, scale)
    # A wrapper with malformed content is a misfit, too: one value must not stop a batch.
    except (_Misfit, KeyError, TypeError, ValueError, ArithmeticError):
        rescue(rescued, path or "", ejson(value))
        return None


def rescue(rescued: dict[str, str], path: str, text: str) -> None:
    """Keeps the value's text; names with dots can give two values one path, the later is then `path#2`,
    `#3`, …
    """
    free, number = path, 1
    while free in rescued:
        number += 1
        free = f"{path}#{number}"
    rescued[free] = text


def _cast_document(value: Any, seen: Kind, type_: Struct, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if seen not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT) and not isinstance(value, ArrayDocument):
        raise _Misfit
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = wrappers.unescape_key(key)
        step = key[1:] if isinstance(value, ArrayDocument) else name
        below = step if path is None else f"{path}.{step}"
        known = type_.by_name.get(name)
        # Two keys may be one name once they are unescaped: the first has the column, the other is rescued.
        if known is not None and known.column not in result:
            result[known.column] = _cast(item, known.type, below, rescued)
        elif kind(item) not in ABSENT:
            rescue(rescued, below, ejson(item))
    return result


def _cast_array(value: Any, element: ColumnType, path: str | None, rescued: dict[str, str]) -> list[Any]:
    if not isinstance(value, list):
        raise _Misfit
    return [_cast(item, element, f"{path}.{index}", rescued) for index, item in enumerate(value)]


def _cast_map(value: Any, seen: Kind, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if seen not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT):
        raise _Misfit
    return {
        name: _cast(item, type_, f"{path}.{name}", rescued)
        for name, item in ((wrappers.unescape_key(key), item) for key, item in value.items())
    }


def _to_int(value: Any, seen: Kind) -> int:
    if seen is not Kind.INT32:
        raise _Misfit
    return value if isinstance(value, int) else int(value["$numberInt"])


def _to_bigint(value: Any, seen: Kind) -> int:
    match seen:
        case Kind.INT32:
            return _to_int(value, seen)
        case Kind.INT64:
            number = value if isinstance(value, int) else int(value["$numberLong"])
            if not -(2**63) <= number < 2**63:
                raise _Misfit
            return number
        case _:
            raise _Misfit


def _to_double(value: Any, seen: Kind) -> float:
    if seen in DOUBLES:
        return value if isinstance(value, float) else float(value["$numberDouble"])
    number = _to_bigint(value, seen)
    # Rescued rather than rounded: the column would hold another number than the document.
    if float(number) != number:
        raise _Misfit
    return float(number)


def _to_string(value: Any, seen: Kind) -> str:
    match seen:
        case Kind.STRING:
            return str(value)
        case Kind.OBJECT_ID:
            return str(value["$oid"])
        case Kind.DECIMAL:
            return str(value["$numberDecimal"])
        case Kind.SYMBOL:
            return str(value["$symbol"])
        case Kind.CODE:
            return str(value["$code"])
        case Kind.MIN_KEY:
            return "MinKey"
        case Kind.MAX_KEY:
            return "MaxKey"
        case _:
            raise _Misfit


def _to_text(value: Any, seen: Kind) -> str:
    return _to_string(value, seen) if BASE.get(seen) is Scalar.STRING else ejson(value)


def _to_boolean(value: Any, seen: Kind) -> bool:
    if seen is not Kind.BOOLEAN:
        raise _Misfit
    return bool(value)


def _to_timestamp(value: Any, seen: Kind) -> datetime.datetime:
    match seen:
        case Kind.DATE:
            milliseconds = int(value["$date"]["$numberLong"])
        case Kind.TIMESTAMP:
            # The increment `i` orders events inside a second, and is no part of the time.
            milliseconds = int(value["$timestamp"]["t"]) * 1000
        case _:
            raise _Misfit
    if not MIN_DATE_MS <= milliseconds <= MAX_DATE_MS:
        raise _Misfit
    return _EPOCH + datetime.timedelta(milliseconds=milliseconds)


def _to_binary(value: Any, seen: Kind) -> bytes:
    if seen is not Kind.BINARY:
        raise _Misfit
    return base64.b64decode(value["$binary"]["base64"], validate=True)


def _to_regex(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.REGEX:
        raise _Misfit
    expression = value["$regularExpression"]
    return {"regex": str(expression["pattern"]), "options": str(expression["options"])}


def _to_code_with_scope(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.CODE_WITH_SCOPE:
        raise _Misfit
    return {"code": str(value["$code"]), "scope": ejson(value["$scope"])}


def _to_db_pointer(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.DB_POINTER:
        raise _Misfit
    pointer = value["$dbPointer"]
    return {"$ref": str(pointer["$ref"]), "$id": str(pointer["$id"]["$oid"])}


def _to_decimal(value: Any, seen: Kind, precision: int, scale: int) -> decimal.Decimal:
    """The number where its shortest decimal writing has no more digits than the column."""
    match seen:
        case Kind.INT32 | Kind.INT64:
            number = decimal.Decimal(_to_bigint(value, seen))
        case Kind.DOUBLE | Kind.NON_FINITE:
            # By its shortest writing: a user who wrote 0.1 means 0.1, and not the 55 digits of the double.
            number = decimal.Decimal(repr(_to_double(value, seen)))
        case Kind.DECIMAL:
            number = decimal.Decimal(value["$numberDecimal"])
        case _:
            raise _Misfit
    with decimal.localcontext() as context:
        # quantize fails where a result has more digits than the context, and the default of 28 is less than DECIMAL allows.
        context.prec = 80
        exact = number.quantize(decimal.Decimal(1).scaleb(-scale))
    if exact != number or len(exact.as_tuple().digits) > precision:
        raise _Misfit
    return exact or abs(exact)  # a DECIMAL has one zero, a decimal128 and a double two


_TO_SCALAR: Mapping[Scalar, Callable[[Any, Kind], Any]] = {
    Scalar.INT: _to_int,
    Scalar.BIGINT: _to_bigint,
    Scalar.DOUBLE: _to_double,
    Scalar.STRING: _to_string,
    Scalar.TEXT: _to_text,
    Scalar.BOOLEAN: _to_boolean,
    Scalar.TIMESTAMP: _to_timestamp,
    Scalar.BINARY: _to_binary,
    Scalar.REGEX: _to_regex,
    Scalar.CODE_WITH_SCOPE: _to_code_with_scope,
    Scalar.DB_POINTER: _to_db_pointer,
}
