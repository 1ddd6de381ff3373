"""`add.fields` and `add.headers`: metadata of the event as fields and headers of its record."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.properties.unwrap import AddedField, UnwrapOptions
from cdc_core.unwrap import record_fields
from cdc_core.unwrap.change_event import ChangeEvent, Json


class _Missing(enum.Enum):
    MISSING = enum.auto()


_MISSING: Final = _Missing.MISSING

_KNOWN_FIELDS: Mapping[str, frozenset[str]] = {
    "": frozenset("before after updateDescription source op ts_ms transaction".split()),
    "source": frozenset(
        "version connector name ts_ms snapshot db sequence ts_us ts_ns collection ord lsid txnNumber wallTime".split()
    ),
    "transaction": frozenset("id total_order data_collection_order".split()),
    "updateDescription": frozenset("removedFields updatedFields truncatedArrays".split()),
}

_INT64_FIELDS = frozenset("ts_ms ts_us ts_ns txnNumber wallTime total_order data_collection_order h".split())


def added_headers(change: ChangeEvent, options: UnwrapOptions) -> tuple[tuple[str, Json], ...]:
    """The configured headers that the event has; a field that is null in the event is included."""
    headers = ((header.name, _looked_up(change, header)) for header in options.add_headers)
    return tuple((name, value) for name, value in headers if value is not _MISSING)


def added_field(
    change: ChangeEvent, added: AddedField, options: UnwrapOptions, displaced: dict[str, str]
) -> Iterator[record_fields.RecordField]:
    metadata = _looked_up(change, added)
    value = None if metadata is _MISSING else _typed_metadata(metadata, added.field)
    if options.flatten_struct and debezium_json.is_document(value):
        prefix = added.name + options.flatten_struct_delimiter
        yield from record_fields.document_fields(value, options, displaced, flat=True, prefix=prefix, path=(added.name,))
    else:
        yield record_fields.RecordField(wrappers.escape_key(added.name), value, added.name)


def _looked_up(change: ChangeEvent, added: AddedField) -> Json | _Missing:
    """The field in its struct, else in the envelope; null if one of them may have it, or the struct is null; else `_MISSING`."""
    envelope = change.envelope or {}
    if added.struct not in _KNOWN_FIELDS:
        return _MISSING
    if envelope.get(added.struct, {}) is not None:
        for part in (change.part(added.struct) if added.struct else envelope, envelope):
            if added.field in part:
                return _without_default(added, part[added.field])
    return None if added.field in _KNOWN_FIELDS[added.struct] | _KNOWN_FIELDS[""] else _MISSING


def _without_default(added: AddedField, value: Json) -> Json:
    """`source.snapshot` as null in a streamed event, whose JSON has the schema's default, the string `false`."""
    if added.field == "source" and isinstance(value, dict) and value.get("snapshot") == "false":
        return {**value, "snapshot": None}
    return None if (added.struct, added.field, value) == ("source", "snapshot", "false") else value


def _typed_metadata(value: Json, name: str) -> EjsonValue:
    match value:
        case bool():
            return value
        case int() if name in _INT64_FIELDS or value not in debezium_json.INT32:
            return {"$numberLong": str(value)}
        case list():
            return [_typed_metadata(item, name) for item in value]
        case dict():
            return {wrappers.escape_key(key): _typed_metadata(item, key) for key, item in value.items()}
        case _:
            return value
