"""`ExtractNewDocumentState`: change events in, documents as rows out.

    for row in unwrap.records(events, options=unwrap_options.parse({"flatten.struct": "true"})):
        ...

An event is any form that `change_event` reads; what comes of it is a `Row`, `Unchanged` or `DROPPED`. Two steps, each
usable alone: `extracted` applies every option to one event, and gives a key, a document and headers as type-exact JSON;
`Tables` gives the documents of each collection one schema, and `row` prints them by it as Kafka's JsonConverter does.
`unwrap_frames.unwrapped` is both steps over a Spark DataFrame, with typed columns.

What the SMT does is in Debezium's documentation; the differences that are meant are in `docs/unwrap.md`:
arrays of any mixture work, `$unset` is a null, a name that two fields meet in keeps both values, dots of flattened
names are treated alike in whole and partial documents, and the options of older versions count.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json.dialects import Parsed
from cdc_core.properties.unwrap import AddedField, ArrayEncoding, FieldNameAdjustment, UnwrapOptions
from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.unwrap import change_event
from cdc_core.unwrap import json_converter as connect_json
from cdc_core.unwrap.change_event import ChangeEvent, Json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Document = dict[str, Parsed]

DELETED = "__deleted"
RESCUED = "__rescued"


@dataclass(frozen=True)
class Extracted:
    """A change event after the SMT, not yet part of a table.

    `key` and `document` are parsed type-exact JSON; a null document is a delete. `displaced` holds, by path, the
    type-exact JSON of values whose name another field took (the last one in the document has it).
    """

    collection: str
    key: Parsed
    document: dict[str, Parsed] | None
    headers: tuple[tuple[str, Json], ...] = ()
    displaced: Mapping[str, str] = field(default_factory=dict)
    is_delete: bool = False


@dataclass(frozen=True)
class Unchanged:
    """Something that is no change event: it passes as it came."""

    event: Json


class Dropped:
    """An event that the delete mode takes out of the stream."""

    def __repr__(self) -> str:
        return "DROPPED"


DROPPED = Dropped()


def extracted(event: Json, *, options: UnwrapOptions) -> Extracted | Unchanged | Dropped:
    """One event under the options.

    Raises `ValueError` where one of the JSON texts inside the event (`after`, `updatedFields`, …) cannot be read.
    """
    change = change_event.read(event)
    if change is None:
        return Unchanged(event)
    if change.envelope is None:
        return _tombstone(change, options)
    identity = _identity(change)
    state = _state(change, identity)
    if state is None and options.delete_tombstone_handling_mode.drops_delete:
        return DROPPED
    displaced: dict[str, str] = {}
    document = _joined(_fields(change, state, identity, options, displaced), displaced)
    key = _key(change, identity, options)
    return Extracted(change.collection, key, document or None, _headers(change, options), displaced, state is None)


def _tombstone(change: ChangeEvent, options: UnwrapOptions) -> Extracted | Dropped:
    if not options.delete_tombstone_handling_mode.keeps_tombstone:
        return DROPPED
    headers = tuple((added.name, "d") for added in options.add_headers if added.field == "op")
    return Extracted("", _key(change, _identity(change), options), None, headers, is_delete=True)


# --- key and document of an event ------------------------------------------------------------------------------------

_NO_ID = object()


def _identity(change: ChangeEvent) -> object:
    """The `_id`: as a legacy event's `filter` has it, else as the key has it; `_NO_ID` where neither is there."""
    criteria = (change.envelope or {}).get("filter")
    if criteria is not None:
        selected = _parsed_document(criteria)
        if "_id" in selected:
            return selected["_id"]
    return _key_id(change.key)


def _key_id(key: Json) -> object:
    if not (isinstance(key, dict) and "id" in key):
        return _NO_ID
    try:
        return _parsed(key["id"])
    except ValueError:
        return key["id"]


def _key(change: ChangeEvent, identity: object, options: UnwrapOptions) -> Parsed:
    """The key with its `id` typed; one of another shape as it is; none for a value that came alone."""
    own = _key_id(change.key)
    if own is _NO_ID and change.key is not None:
        return _parsed(json.dumps(change.key))
    found = identity if own is _NO_ID else own
    return None if found is _NO_ID else {"id": _value(found, ("id",), options, {})}


def _parsed(value: Json) -> Parsed:
    """A JSON text of Debezium's; or the JSON itself, where something has expanded it already."""
    return debezium_json.parse(value if isinstance(value, str) else json.dumps(value))


def _parsed_document(value: Json) -> Document:
    document = _parsed(value)
    if not debezium_json.is_document(document):
        raise ValueError("a JSON text of the event holds no document")
    return document


def _state(change: ChangeEvent, identity: object) -> Document | None:
    """What the event says of the document, whole or partial; None for a delete."""
    envelope = change.envelope or {}
    if envelope.get("after") is not None:
        return _with_nulls(_parsed_document(envelope["after"]), _removed(change))
    if envelope.get("updateDescription") is not None:
        updated = change.part("updateDescription").get("updatedFields")
        return _partial({} if updated is None else _parsed_document(updated), _removed(change), identity)
    if envelope.get("patch") is not None:
        return _patched(_parsed_document(envelope["patch"]), identity)
    return None


def _removed(change: ChangeEvent) -> list[str]:
    removed = change.part("updateDescription").get("removedFields")
    return [path for path in removed if isinstance(path, str)] if isinstance(removed, list) else []


def _partial(updated: Document, removed: Iterable[str], identity: object) -> Document:
    """The fields that an update names, under their dotted paths, removed ones null; `_id` last."""
    nulls = {debezium_json.escaped(path): None for path in removed}
    return _identified({**updated, **_without(nulls, updated)}, identity)


def _without(fields: Mapping[str, Parsed], others: Mapping[str, Parsed]) -> Document:
    return {name: value for name, value in fields.items() if name not in others}


def _identified(document: Document, identity: object) -> Document:
    return document if "_id" in document or identity is _NO_ID else {**document, "_id": identity}


def _with_nulls(document: Document, removed: Iterable[str]) -> Document:
    """The whole document, in which a removed field is null, unless a newer look-up brought it back."""
    return functools.reduce(lambda whole, path: _with_null(whole, path.split(".")), removed, document)


def _with_null(document: Document, path: Sequence[str]) -> Document:
    name = debezium_json.escaped(path[0])
    if len(path) == 1:
        return {**document, name: document.get(name)}
    inner = document.get(name)
    return {**document, name: _with_null(inner, path[1:])} if debezium_json.is_document(inner) else document


def _patched(patch: Document, identity: object) -> Document:
    """The document of a legacy event: the fields that `$set` names, `$unset` as nulls, or a replacement as it is."""
    operators = {name: value for name, value in patch.items() if name in _PATCH_OPERATORS}
    fields = {name: value for name, value in patch.items() if name not in _PATCH_OPERATORS and name != "$v"}
    unknown = [name for name in fields if name.startswith("$") and not name.startswith("$$")]
    if unknown:
        raise ValueError(f"a patch with {unknown[0]} says nothing about the fields")
    for name, value in operators.items():
        fields.update(_diff_fields(value, "") if name == "diff" else _patch_fields(name, value))
    return _identified(fields, identity)


_PATCH_OPERATORS = ("$set", "$unset", "diff")


def _patch_fields(operator: str, fields: Parsed) -> Iterator[tuple[str, Parsed]]:
    for name, value in fields.items() if isinstance(fields, dict) else ():
        yield name, value if operator == "$set" else None


def _diff_fields(diff: Parsed, prefix: str) -> Iterator[tuple[str, Parsed]]:
    """The fields of an oplog entry of version 2: `u`, `i` and `d` name fields, `s<name>` goes on below a field.

    In the diff of an array (`"a": true`) `u<index>` and `s<index>` name elements.
    """
    if not isinstance(diff, dict):
        return
    is_array = diff.get("a") is True
    for name, value in diff.items():
        if name[:1] == "s" and len(name) > 1:
            yield from _diff_fields(value, f"{prefix}{name[1:]}.")
        elif is_array and name[:1] == "u":
            yield prefix + name[1:], value
        elif name in ("u", "i", "d") and isinstance(value, dict):
            for field_name, field_value in value.items():
                yield prefix + field_name, None if name == "d" else field_value


# --- fields of the output --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """A field of the output: its name (escaped, as in type-exact JSON), its value, and where it stood."""

    name: str
    value: Parsed
    path: str


def _fields(
    change: ChangeEvent, state: Document | None, identity: object, options: UnwrapOptions, displaced: dict[str, str]
) -> Iterator[_Field]:
    """The fields of the document, then `__deleted`, then `_id`, then `add.fields`; none for a delete without value."""
    mode = options.delete_tombstone_handling_mode
    if not state and not mode.rewrites_delete:
        return
    document = _before(change) if state is None else state
    yield from _document_fields(document, options, displaced, flat=options.flatten_struct)
    if mode.adds_deleted:
        yield _engine_field(DELETED, state is None, options)
        if options.rewrite_with_id and "_id" not in document and identity is not _NO_ID:
            yield from _document_fields({"_id": identity}, options, displaced, flat=options.flatten_struct)
    for added in options.add_fields:
        yield from _added_field(change, added, options, displaced)


def _before(change: ChangeEvent) -> Document:
    before = (change.envelope or {}).get("before")
    return {} if before is None else _parsed_document(before)


def _engine_field(name: str, value: Parsed, options: UnwrapOptions) -> _Field:
    adjusted = options.field_name_adjustment_mode.adjusted(name)
    return _Field(adjusted, value, name)


def _joined(fields: Iterable[_Field], displaced: dict[str, str]) -> Document:
    """One document of the fields. Of two that meet in a name the last has it; the other goes to `displaced`."""
    taken: dict[str, _Field] = {}
    for each in fields:
        other = taken.get(each.name)
        if other is not None and each.value is None:
            continue
        if other is not None and other.value is not None:
            displaced[_free(other.path, displaced)] = _text(other.value)
        taken[each.name] = each
    return {name: each.value for name, each in taken.items()}


def _free(path: str, displaced: Mapping[str, str]) -> str:
    """The path, with a mark where another value is rescued under it already."""
    return _free(path + "'", displaced) if path in displaced else path


def _text(value: Parsed) -> str:
    return orjson.dumps(value).decode()


def _document_fields(
    document: Document,
    options: UnwrapOptions,
    displaced: dict[str, str],
    *,
    flat: bool,
    prefix: str = "",
    path: tuple[str, ...] = (),
) -> Iterator[_Field]:
    """The fields of a document under their new names; flat ones of its sub-documents among them."""
    for stored_name, value in document.items():
        if _is_undefined(value):
            continue
        own = debezium_json.unescaped(stored_name)
        name = prefix + _name(own, options, flat=flat)
        here = (*path, own)
        struct = _struct(value, options) if flat else None
        if struct is None:
            rest = None if _is_left_out(value, options) else _value(value, here, options, displaced)
            yield _Field(debezium_json.escaped(name), rest, ".".join(here))
        else:
            below = name + options.flatten_struct_delimiter
            yield from _document_fields(struct, options, displaced, flat=True, prefix=below, path=here)


def _name(own: str, options: UnwrapOptions, *, flat: bool) -> str:
    plain = own.replace(".", options.flatten_struct_delimiter) if flat else own
    return options.field_name_adjustment_mode.adjusted(plain)


def _is_undefined(value: Parsed) -> bool:
    return isinstance(value, dict) and "$undefined" in value


def _is_left_out(value: Parsed, options: UnwrapOptions) -> bool:
    """Empty arrays are null in the modes for Avro, as in the SMT."""
    return value == [] and options.field_name_adjustment_mode is not FieldNameAdjustment.NONE


def _struct(value: Parsed, options: UnwrapOptions) -> Document | None:
    """The value as a document, where its column is a struct."""
    match value:
        case {"$regularExpression": {"pattern": pattern, "options": flags}}:
            return {"regex": pattern, "options": flags}
        case {"$code": code, "$scope": scope}:
            return {"code": code, "scope": _text(scope)}
        case {"$dbPointer": {"$ref": namespace, "$id": pointer}}:
            return {"$$ref": namespace, "$id": pointer}
        case _:
            return _document(value, options)


def _document(value: Parsed, options: UnwrapOptions) -> Document | None:
    """A document, or the one that an array is encoded as."""
    if isinstance(value, list) and options.array_encoding is ArrayEncoding.DOCUMENT:
        return {f"_{index}": item for index, item in enumerate(value)}
    return value if debezium_json.is_document(value) else None


def _value(value: Parsed, path: tuple[str, ...], options: UnwrapOptions, displaced: dict[str, str]) -> Parsed:
    """A value with the names and the arrays of the output, in parsed type-exact JSON."""
    if not isinstance(value, (dict, list)):
        return value
    if _is_undefined(value):
        return None
    document = _document(value, options)
    if document is not None:
        return _joined(_document_fields(document, options, displaced, flat=False, path=path), displaced)
    if isinstance(value, list):
        return [_value(item, (*path, str(index)), options, displaced) for index, item in enumerate(value)]
    return value


# --- what add.fields and add.headers bring ---------------------------------------------------------------------------

_MISSING = object()

_KNOWN_FIELDS: Mapping[str, frozenset[str]] = {
    "": frozenset("before after updateDescription source op ts_ms transaction".split()),
    "source": frozenset(
        "version connector name ts_ms snapshot db sequence ts_us ts_ns collection ord lsid txnNumber wallTime".split()
    ),
    "transaction": frozenset("id total_order data_collection_order".split()),
    "updateDescription": frozenset("removedFields updatedFields truncatedArrays".split()),
}
_INT64_FIELDS = frozenset("ts_ms ts_us ts_ns txnNumber wallTime total_order data_collection_order h".split())


def _headers(change: ChangeEvent, options: UnwrapOptions) -> tuple[tuple[str, Json], ...]:
    """The headers that the options ask for and the event has; one that is null in the event is there with null."""
    found = ((added.name, _looked_up(change, added)) for added in options.add_headers)
    return tuple((name, value) for name, value in found if value is not _MISSING)


def _added_field(
    change: ChangeEvent, added: AddedField, options: UnwrapOptions, displaced: dict[str, str]
) -> Iterator[_Field]:
    found = _looked_up(change, added)
    value = None if found is _MISSING else _typed_metadata(found, added.field)
    if options.flatten_struct and debezium_json.is_document(value):
        below = added.name + options.flatten_struct_delimiter
        yield from _document_fields(value, options, displaced, flat=True, prefix=below, path=(added.name,))
    else:
        yield _Field(debezium_json.escaped(added.name), value, added.name)


def _looked_up(change: ChangeEvent, added: AddedField) -> Json | object:
    """The field in its struct, else in the envelope; null where the struct could have it; else `_MISSING`."""
    envelope = change.envelope or {}
    part = change.part(added.struct) if added.struct else envelope
    if added.field in part:
        return _without_default(added, part[added.field])
    if added.field in envelope:
        return _without_default(added, envelope[added.field])
    known = added.field in _KNOWN_FIELDS.get(added.struct, frozenset()) or added.field in _KNOWN_FIELDS[""]
    return None if known else _MISSING


def _without_default(added: AddedField, value: Json) -> Json:
    """`source.snapshot` is null in a streamed event; JSON prints the default of its schema, the string `false`."""
    if added.field == "source" and isinstance(value, dict) and value.get("snapshot") == "false":
        return {**value, "snapshot": None}
    return None if (added.struct, added.field, value) == ("source", "snapshot", "false") else value


def _typed_metadata(value: Json, name: str) -> Parsed:
    match value:
        case bool():
            return value
        case int() if name in _INT64_FIELDS or value not in debezium_json.INT32:
            return {"$numberLong": str(value)}
        case list():
            return [_typed_metadata(item, name) for item in value]
        case dict():
            return {debezium_json.escaped(key): _typed_metadata(item, key) for key, item in value.items()}
        case _:
            return value


# --- rows of a table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A record of the output, as Kafka's JsonConverter prints it: plain JSON, null fields left out."""

    key: Json
    value: dict[str, Json] | None
    headers: tuple[tuple[str, Json], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """The record as one JSON object."""
        return {"key": self.key, "value": self.value, "headers": [list(header) for header in self.headers]}


def records(events: Iterable[Json], *, options: UnwrapOptions) -> Iterator[Row | Unchanged | Dropped]:
    """What each event becomes, in order; the events of one collection are one table. Holds all of them in memory.

    Raises `ValueError` as `extracted` does, before the first row.
    """
    results = [extracted(event, options=options) for event in events]
    tables = Tables()
    for result in results:
        tables.see(result)
    for result in results:
        yield tables.row(result) if isinstance(result, Extracted) else result


def passed(event: Json) -> Json:
    """Something that is no change event, as a record of the output: unchanged, in the same form as the others."""
    if isinstance(event, dict) and ("key" in event or "value" in event):
        return {"key": event.get("key"), "value": event.get("value"), "headers": event.get("headers") or []}
    return {"key": None, "value": event, "headers": []}


class Tables:
    """The schemas of the collections: first `see` every event, in order, then ask for rows."""

    def __init__(self) -> None:
        self._shapes: dict[str, document_schema.Shape] = {}
        self._schemas: dict[str, DocumentSchema] = {}
        self._seen = 0

    def see(self, result: Extracted | Unchanged | Dropped) -> None:
        """Takes the document's fields and types into its collection's schema."""
        if isinstance(result, Extracted) and result.document:
            self._seen += 1
            shape = self._shapes.setdefault(result.collection, document_schema.Shape())
            shape.see(result.document, f"{self._seen:012d}")
            self._schemas.pop(result.collection, None)

    def schema(self, collection: str) -> DocumentSchema:
        """The schema of a collection, `db.collection`; empty where none of its documents was seen."""
        if collection not in self._schemas:
            shape = self._shapes.get(collection, document_schema.Shape())
            self._schemas[collection], _ = document_schema.join(document_schema.EMPTY, shape, naming=_NAMING)
        return self._schemas[collection]

    def row(self, result: Extracted) -> Row:
        """The record, its document typed by the collection's schema; what does not fit is under `__rescued`."""
        key = None if result.key is None else printed_key(result.key)
        if result.document is None:
            return Row(key, None, result.headers)
        rescued = dict(result.displaced)
        value = connect_json.document(result.document, self.schema(result.collection).struct, rescued)
        return Row(key, {**value, RESCUED: rescued} if rescued else value, result.headers)


_NAMING = column_names.Naming(reserved=frozenset({RESCUED}))


def printed_key(key: Parsed) -> Json:
    """A key of `Extracted` as it is printed, typed by itself: no two keys share a schema."""
    if not debezium_json.is_document(key):
        return connect_json.untyped(key)
    tables = Tables()
    tables.see(Extracted("", None, key))
    rescued: dict[str, str] = {}
    return connect_json.document(key, tables.schema("").struct, rescued)


def unwrapped(df: DataFrame, *, options: UnwrapOptions, schema: DocumentSchema | None = None) -> DataFrame:
    """The same over a DataFrame of `key` and `value`: see `unwrap_frames.unwrapped`."""
    from cdc_core.unwrap import frames as unwrap_frames

    return unwrap_frames.unwrapped(df, options=options, schema=schema)
