"""The fields of a document as the fields of a record: flattened, renamed, arrays encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import orjson

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.properties.unwrap import ArrayDocument, FieldNameAdjustment, UnwrapOptions
from cdc_core.schema import cast

Document = dict[str, EjsonValue]


@dataclass(frozen=True)
class RecordField:
    """A field of the output: its name (escaped, as in type-exact JSON), its value, and its path in the event."""

    name: str
    value: EjsonValue
    path: str


def joined(fields: Iterable[RecordField], displaced: dict[str, str]) -> Document:
    """One document of the fields. The last of several fields with one name keeps it; other values go to `displaced`."""
    fields_by_name: dict[str, RecordField] = {}
    for field in fields:
        previous = fields_by_name.get(field.name)
        if previous is not None and field.value is None:
            continue
        if previous is not None and previous.value is not None:
            displaced[_free(previous.path, displaced)] = cast.ejson(previous.value)
        fields_by_name[field.name] = field
    return {name: field.value for name, field in fields_by_name.items()}


def _free(path: str, displaced: Mapping[str, str]) -> str:
    """The path, with a mark appended while another value is stored under it."""
    return _free(path + "'", displaced) if path in displaced else path


def _text(value: EjsonValue) -> str:
    return orjson.dumps(value).decode()


def document_fields(
    document: Document,
    options: UnwrapOptions,
    displaced: dict[str, str],
    *,
    flat: bool,
    prefix: str = "",
    path: tuple[str, ...] = (),
) -> Iterator[RecordField]:
    """The fields of a document under their new names; with `flat`, fields of sub-documents are flattened."""
    is_array = isinstance(document, ArrayDocument)
    for index, (stored_name, value) in enumerate(document.items()):
        if _is_undefined(value) and not is_array:
            continue
        field_name = wrappers.unescape_key(stored_name)
        name = prefix + _name(field_name, options, flat=flat)
        field_path = (*path, str(index) if is_array else field_name)
        struct = _struct(value, options) if flat else None
        if struct is None:
            converted = None if _is_left_out(value, options) else record_value(value, field_path, options, displaced)
            yield RecordField(wrappers.escape_key(name), converted, ".".join(field_path))
        else:
            inner_prefix = name + options.flatten_struct_delimiter
            yield from document_fields(struct, options, displaced, flat=True, prefix=inner_prefix, path=field_path)


def _name(own: str, options: UnwrapOptions, *, flat: bool) -> str:
    if not flat:
        return options.field_names.of(own)
    first, *others = own.split(".")
    # An index is not adjusted: the SMT's names for elements of arrays have none of the signs for a leading digit.
    adjusted = (part if part.isdecimal() else options.field_names.of(part) for part in others)
    return options.flatten_struct_delimiter.join((options.field_names.of(first), *adjusted))


def _is_undefined(value: EjsonValue) -> bool:
    return isinstance(value, dict) and "$undefined" in value


def _is_left_out(value: EjsonValue, options: UnwrapOptions) -> bool:
    """Empty arrays are null in the Avro modes, as in the SMT."""
    return value == [] and options.field_names.adjustment is not FieldNameAdjustment.NONE


def _struct(value: EjsonValue, options: UnwrapOptions) -> Document | None:
    """The value as a document, if its column is a struct."""
    match value:
        case {"$regularExpression": {"pattern": pattern, "options": flags}}:
            return {"regex": pattern, "options": flags}
        case {"$code": code, "$scope": scope}:
            return {"code": code, "scope": _text(scope)}
        case {"$dbPointer": {"$ref": namespace, "$id": pointer}}:
            return {"$$ref": namespace, "$id": pointer}
        case _:
            converted = options.field_values.of(value)
            return converted if debezium_json.is_document(converted) else None


def record_value(value: EjsonValue, path: tuple[str, ...], options: UnwrapOptions, displaced: dict[str, str]) -> EjsonValue:
    """A value as parsed type-exact JSON, with the names and values inside it adjusted."""
    if _is_undefined(value):
        return None
    converted: EjsonValue = options.field_values.of(value)
    if debezium_json.is_document(converted):
        fields = joined(document_fields(converted, options, displaced, flat=False, path=path), displaced)
        return ArrayDocument(fields) if isinstance(converted, ArrayDocument) else fields
    if isinstance(converted, list):
        return [record_value(item, (*path, str(index)), options, displaced) for index, item in enumerate(converted)]
    return converted
