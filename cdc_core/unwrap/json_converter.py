"""Documents as Kafka's JsonConverter prints them, typed by the schema of their table.

Dates and timestamps are milliseconds since 1970, binary is base64, `NaN` and infinities are strings, and null fields
are left out. A BSON timestamp has signed 32-bit seconds and loses its increment, as in the SMT.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.properties.unwrap import ArrayDocument
from cdc_core.schema import cast, document_schema, evolution
from cdc_core.schema.column_types import Array, ColumnType, Map, Scalar, Struct
from cdc_core.schema.shape import observe
from cdc_core.unwrap.change_event import Json


def document(value: Mapping[str, EjsonValue], type_: Struct, rescued: dict[str, str], *, path: str = "") -> dict[str, Json]:
    """The fields of a document that are not null; values that do not fit their type go to `rescued`, by dotted path."""
    types = {field.name: field.type for field in type_.fields}
    printed: dict[str, Json] = {}
    is_array = isinstance(value, ArrayDocument)
    for index, (stored_name, item) in enumerate(value.items()):
        name = wrappers.unescape_key(stored_name)
        step = str(index) if is_array else name
        field_path = f"{path}.{step}" if path else step
        result = _printed(item, types.get(name), field_path, rescued)
        if result is not None:
            printed[name] = result
    return printed


def untyped(value: EjsonValue) -> Json:
    """A value by its own type, without a schema."""
    if isinstance(value, list):
        return [untyped(item) for item in value]
    if debezium_json.is_document(value):
        return {wrappers.unescape_key(name): untyped(item) for name, item in value.items() if item is not None}
    shape = observe({"value": value})
    schema, _ = evolution.join(document_schema.EMPTY, shape)
    return document({"value": value}, schema.struct, {}).get("value")


def _printed(value: EjsonValue, type_: ColumnType | None, path: str, rescued: dict[str, str]) -> Json:
    if value is None:
        return None
    match type_:
        case None:
            return _without_type(value, path, rescued)
        case Struct() if debezium_json.is_document(value):
            return document(value, type_, rescued, path=path)
        case Map(item_type) if debezium_json.is_document(value):
            return {
                wrappers.unescape_key(name): _printed(item, item_type, f"{path}.{name}", rescued)
                for name, item in value.items()
            }
        case Array(element) if isinstance(value, list):
            items = [_printed(item, element, f"{path}.{index}", rescued) for index, item in enumerate(value)]
            return _ordered(items, value) if isinstance(element, Struct) else items
        case Scalar.TIMESTAMP if (milliseconds := _milliseconds(value)) is not None:
            return milliseconds
        case _:
            cell, misfits = cast.cast(value, type_, path=path)
            for misfit_path, text in misfits.items():
                cast.rescue(rescued, misfit_path, text)
            return _plain(cell)


def _ordered(items: list[Json], values: list[EjsonValue]) -> list[Json]:
    """The printed documents of an array, all with the fields in the order in which its documents first have them."""
    documents = (value for value in values if debezium_json.is_document(value))
    names = dict.fromkeys(wrappers.unescape_key(name) for document in documents for name in document)
    return [{name: item[name] for name in names if name in item} if isinstance(item, dict) else item for item in items]


def _without_type(value: EjsonValue, path: str, rescued: dict[str, str]) -> Json:
    """A value for which the table has no type: empty arrays and documents, also nested, as they are; others are rescued."""
    if _is_without_value(value):
        return untyped(value)
    cast.rescue(rescued, path, cast.ejson(value))
    return None


def _is_without_value(value: EjsonValue) -> bool:
    if isinstance(value, list):
        return all(map(_is_without_value, value))
    if debezium_json.is_document(value):
        return all(map(_is_without_value, value.values()))
    return value is None


def _milliseconds(value: EjsonValue) -> int | None:
    match value:
        case {"$date": {"$numberLong": str(milliseconds)}}:
            return int(milliseconds)
        case {"$timestamp": {"t": int(seconds)}}:
            return (seconds - 2**32 if seconds >= 2**31 else seconds) * 1000
        case _:
            return None


def _plain(value: object) -> Json:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case float() if value != value:
            return "NaN"
        case float() if value in (float("inf"), float("-inf")):
            return "Infinity" if value > 0 else "-Infinity"
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {name: item for name, item in value.items() if item is not None}
        case _:
            return str(value)
