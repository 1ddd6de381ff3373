"""A document as a row of the table: each value in its column's type, absent fields as null, and the values that did not
fit.

A field is absent if the document never had it or a `$unset` removed it: the row of a full document has all columns.
After a partial update, the folded document (`cdc_core.silver.fold`) is typed again where whole documents are kept
(`keep.document`); elsewhere the row stays as it is and is marked `__incomplete`.

A column's type is decided in `column_types` (`BASE`: a Decimal128 is a STRING), `pins` and `evolution`.

This module is the reference, value by value; `cdc_core.typed` must give the same results.
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


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MIN_DATE_MS = -62_135_424_000_000
"""0001-01-03T00:00:00Z. In some time zones, Python's datetime (used by PySpark's `collect()`) cannot represent the two
days before it.
"""
MAX_DATE_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the maximum of Python's datetime."""


def ejson(value: Any) -> str:
    """The Extended JSON text of a parsed value."""
    try:
        return orjson.dumps(_arrays_back(value)).decode()
    except orjson.JSONEncodeError:  # integers beyond 64 bits, which BSON does not have
        return json.dumps(_arrays_back(value), separators=(",", ":"), ensure_ascii=False)


def _arrays_back(value: Any) -> Any:
    if isinstance(value, ArrayDocument):
        return [_arrays_back(item) for item in value.values()]
    if isinstance(value, dict):
        return {key: _arrays_back(item) for key, item in value.items()}
    return [_arrays_back(item) for item in value] if isinstance(value, list) else value


def cast(parsed_value: Any, column_type: ColumnType, *, path: str = "") -> tuple[Any, dict[str, str]]:
    """One value in its column type, and what did not fit: dotted path -> Extended JSON text.

    Structs are dicts by column name, arrays lists, maps dicts, timestamps aware datetimes in UTC, decimals
    `decimal.Decimal`, binary bytes. A value that does not fit is None in its place. Never raises for parsed EJSON.
    """
    rescued: dict[str, str] = {}
    return _cast(parsed_value, column_type, path or None, rescued), rescued


def row(parsed_document: Any, schema: DocumentSchema) -> tuple[dict[str, Any], dict[str, str]]:
    """One document as a row of the table (column name -> value, as in `cast`), and what did not fit.

    With flattening, a document whose columns are all null is rescued as `{}` (`[]` for an array laid out as a
    document), which distinguishes it from an absent one.
    """
    values, rescued = present(parsed_document, schema)
    return {column.name: values.get(column.name) for column in schema.columns}, rescued


def present(parsed_document: Any, schema: DocumentSchema) -> tuple[dict[str, Any], dict[str, str]]:
    """`row` without columns of fields that the document does not have; of thousands of columns, most documents have few."""
    document = laid_out(parsed_document, schema.naming.values)
    value, rescued = cast(document, schema.struct)
    if not schema.naming.flatten:
        return value or {}, rescued
    # A flattened document has no column of its own to show that it exists.
    for path, text in _emptied(value, schema.struct, document, ""):
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


def _emptied(value: Any, type_: Struct, document: Any, prefix: str) -> list[tuple[str, str]]:
    """The paths of documents that exist but have no value in any column, outer ones first, and their texts."""
    blank_documents: list[tuple[str, str]] = []
    if value is None:
        return blank_documents
    # Of two keys with one unescaped name, the first has the column.
    items = {wrappers.unescape_key(key): item for key, item in reversed(document.items())}
    for item in type_.fields:
        item_value = value.get(item.column)
        if isinstance(item.type, Struct) and item_value is not None:
            path = f"{prefix}{item.name[1:] if isinstance(document, ArrayDocument) else item.name}"
            if _is_blank(item_value, item.type):
                blank_documents.append((path, "[]" if isinstance(items[item.name], ArrayDocument) else "{}"))
            blank_documents += _emptied(item_value, item.type, items[item.name], f"{path}.")
    return blank_documents


def _is_blank(value: Any, type_: ColumnType) -> bool:
    if value is None or not isinstance(type_, Struct):
        return value is None
    return all(_is_blank(value.get(item.column), item.type) for item in type_.fields)


def _cast(value: Any, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> Any:
    value_kind = kind(value)
    if value_kind in ABSENT:
        return None
    try:
        match type_:
            case Scalar():  # most values are
                return _TO_SCALAR[type_](value, value_kind)
            case Struct():
                return _cast_document(value, value_kind, type_, path, rescued)
            case Array(element):
                return _cast_array(value, element, path, rescued)
            case Map(item_type):
                return _cast_map(value, value_kind, item_type, path, rescued)
            case Decimal(precision, scale):
                return _to_decimal(value, value_kind, precision, scale)
    # A malformed wrapper does not fit either: one value must not stop a batch.
    except (_Misfit, KeyError, TypeError, ValueError, ArithmeticError):
        rescue(rescued, path or "", ejson(value))
        return None


def rescue(rescued: dict[str, str], path: str, text: str, *, taken: int = 1) -> int:
    """Stores the value's text under its path; if the path is taken (names may contain dots), under `path#2`, `#3`, …

    Returns the number under which it is stored. `taken` is one up to which all are known to be in use.
    """
    free_path, number = path, 1
    while free_path in rescued:
        number = max(number, taken) + 1
        free_path = f"{path}#{number}"
    rescued[free_path] = text
    return number


def _cast_document(value: Any, value_kind: Kind, type_: Struct, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if value_kind not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT) and not isinstance(value, ArrayDocument):
        raise _Misfit
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = wrappers.unescape_key(key)
        step = _step(value, key, name)
        item_path = step if path is None else f"{path}.{step}"
        field = type_.by_name.get(name)
        # Two keys can unescape to one name: the first has the column, the other is rescued.
        if field is not None and field.column not in result:
            result[field.column] = _cast(item, field.type, item_path, rescued)
        elif kind(item) not in ABSENT:
            rescue(rescued, item_path, ejson(item))
    return result


def _step(value: Any, key: str, name: str) -> str:
    """The step of a rescued value's path: the field's own name, also where an array is laid out as a document."""
    return key[1:] if isinstance(value, ArrayDocument) else name


def _cast_array(value: Any, element: ColumnType, path: str | None, rescued: dict[str, str]) -> list[Any]:
    if not isinstance(value, list):
        raise _Misfit
    return [_cast(item, element, f"{path}.{index}", rescued) for index, item in enumerate(value)]


def _cast_map(value: Any, value_kind: Kind, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if value_kind not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT):
        raise _Misfit
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = wrappers.unescape_key(key)
        result[name] = _cast(item, type_, f"{path}.{_step(value, key, name)}", rescued)
    return result


def _to_int(value: Any, value_kind: Kind) -> int:
    if value_kind is not Kind.INT32:
        raise _Misfit
    return value if isinstance(value, int) else int(value["$numberInt"])


def _to_bigint(value: Any, value_kind: Kind) -> int:
    match value_kind:
        case Kind.INT32:
            return _to_int(value, value_kind)
        case Kind.INT64:
            number = value if isinstance(value, int) else int(value["$numberLong"])
            if not -(2**63) <= number < 2**63:
                raise _Misfit
            return number
        case _:
            raise _Misfit


def _to_double(value: Any, value_kind: Kind) -> float:
    if value_kind in DOUBLES:
        return value if isinstance(value, float) else float(value["$numberDouble"])
    number = _to_bigint(value, value_kind)
    # Rescued instead of rounded: the column would hold another number than the document.
    if float(number) != number:
        raise _Misfit
    return float(number)


def _to_string(value: Any, value_kind: Kind) -> str:
    match value_kind:
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


def _to_text(value: Any, value_kind: Kind) -> str:
    return _to_string(value, value_kind) if BASE.get(value_kind) is Scalar.STRING else ejson(value)


def _to_boolean(value: Any, value_kind: Kind) -> bool:
    if value_kind is not Kind.BOOLEAN:
        raise _Misfit
    return bool(value)


def _to_timestamp(value: Any, value_kind: Kind) -> datetime.datetime:
    match value_kind:
        case Kind.DATE:
            milliseconds = int(value["$date"]["$numberLong"])
        case Kind.TIMESTAMP:
            # The increment `i` only orders events within one second.
            milliseconds = int(value["$timestamp"]["t"]) * 1000
        case _:
            raise _Misfit
    if not MIN_DATE_MS <= milliseconds <= MAX_DATE_MS:
        raise _Misfit
    return _EPOCH + datetime.timedelta(milliseconds=milliseconds)


def _to_binary(value: Any, value_kind: Kind) -> bytes:
    if value_kind is not Kind.BINARY:
        raise _Misfit
    return base64.b64decode(value["$binary"]["base64"], validate=True)


def _to_regex(value: Any, value_kind: Kind) -> dict[str, str]:
    if value_kind is not Kind.REGEX:
        raise _Misfit
    expression = value["$regularExpression"]
    return {"regex": str(expression["pattern"]), "options": str(expression["options"])}


def _to_code_with_scope(value: Any, value_kind: Kind) -> dict[str, str]:
    if value_kind is not Kind.CODE_WITH_SCOPE:
        raise _Misfit
    return {"code": str(value["$code"]), "scope": ejson(value["$scope"])}


def _to_db_pointer(value: Any, value_kind: Kind) -> dict[str, str]:
    if value_kind is not Kind.DB_POINTER:
        raise _Misfit
    pointer = value["$dbPointer"]
    return {"$ref": str(pointer["$ref"]), "$id": str(pointer["$id"]["$oid"])}


def _to_decimal(value: Any, value_kind: Kind, precision: int, scale: int) -> decimal.Decimal:
    """The number, if its shortest decimal notation fits the column exactly."""
    match value_kind:
        case Kind.INT32 | Kind.INT64:
            number = decimal.Decimal(_to_bigint(value, value_kind))
        case Kind.DOUBLE | Kind.NON_FINITE:
            # By its shortest notation: a user who wrote 0.1 means 0.1, not the 55 digits of the double.
            number = decimal.Decimal(repr(_to_double(value, value_kind)))
        case Kind.DECIMAL:
            number = decimal.Decimal(value["$numberDecimal"])
        case _:
            raise _Misfit
    with decimal.localcontext() as context:
        # quantize fails if the result has more digits than the context; the default of 28 is less than DECIMAL allows.
        context.prec = 80
        exact = number.quantize(decimal.Decimal(1).scaleb(-scale))
    if exact != number or len(exact.as_tuple().digits) > precision:
        raise _Misfit
    return exact or abs(exact)  # a DECIMAL has one zero, Decimal128 and double have two


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
