"""`ExtractNewDocumentState`: change events in, records out.

    for row in printed_records.records(events, options=unwrap_options.parse({"flatten.struct": "true"})):
        ...

An event has any form that `change_event` reads. It becomes a `JsonRow`, an `UnchangedRecord` or `DROPPED`, in two steps that can
also be used alone. `extracted` applies all options to one event and returns a key, a document and headers as type-exact JSON.
`cdc_core.unwrap.printed_records.RecordTables` derives one schema for the documents of each collection, and prints them with
it as Kafka's JsonConverter does. `cdc_core.unwrap.frames.unwrapped` is both steps over a Spark DataFrame, with typed columns.

Debezium's documentation describes the SMT, and `docs/unwrap.md` the intended differences: arrays may mix types, `$unset` becomes
null, two fields that get one name both keep their values, dots in flattened names are treated alike in whole and partial
documents, and the options of older versions work.

This is for records only: silver builds the rows of its tables from `after` (`cdc_core.schema.cast`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.unwrap import added_fields, change_event, legacy_patches, record_fields
from cdc_core.unwrap.change_event import ChangeEvent, Json

DELETED = "__deleted"


@dataclass(frozen=True)
class ExtractedRecord:
    """A change event after the SMT, not yet part of a table.

    `key` and `document` are parsed type-exact JSON; a null document is a delete. `displaced` holds, by path, the
    type-exact JSON of values whose name another field took (the last one in the document keeps it).
    """

    collection: str
    key: EjsonValue
    document: dict[str, EjsonValue] | None
    headers: tuple[tuple[str, Json], ...] = ()
    displaced: Mapping[str, str] = field(default_factory=dict)
    is_delete: bool = False


@dataclass(frozen=True)
class UnchangedRecord:
    """Something that is not a change event: it passes unchanged."""

    event: Json


class DroppedRecord:
    """An event that the delete mode removes from the stream."""

    def __repr__(self) -> str:
        return "DROPPED"


DROPPED = DroppedRecord()


def extracted(event: Json, *, options: UnwrapOptions) -> ExtractedRecord | UnchangedRecord | DroppedRecord:
    """The result of one event.

    Raises `ValueError` if a JSON text inside the event (`after`, `updatedFields`, …) cannot be read, or the envelope of a create, read or
    update has no field that tells of the document.
    """
    change = change_event.read(event)
    if change is None:
        return UnchangedRecord(event)
    if change.envelope is None:
        return _tombstone(change, options)
    identity = _identity(change)
    state = _state(change, identity)
    # Before the fields are built: a dropped delete needs none, and its pre-image may be large.
    if state is None and options.delete_tombstone_handling_mode.drops_delete:
        return DROPPED
    displaced: dict[str, str] = {}
    document = None
    # Nothing is added to a record without document fields: a delete, or an update whose fields are all excluded.
    if state or options.delete_tombstone_handling_mode.rewrites_delete:
        document = record_fields.joined(_fields(change, state, identity, options, displaced), displaced)
    key = _key(change, identity, options)
    headers = added_fields.added_headers(change, options)
    return ExtractedRecord(change.collection, key, document, headers, displaced, state is None)


def _tombstone(change: ChangeEvent, options: UnwrapOptions) -> ExtractedRecord | DroppedRecord:
    if not options.delete_tombstone_handling_mode.keeps_tombstone:
        return DROPPED
    headers = tuple((header.name, "d") for header in options.add_headers if header.field == "op")
    return ExtractedRecord("", _key(change, _identity(change), options), None, headers, is_delete=True)


def _identity(change: ChangeEvent) -> EjsonValue | legacy_patches.NoId:
    """The `_id` of a legacy event's `filter`, else that of the key; `legacy_patches.NO_ID` if neither has one."""
    criteria = (change.envelope or {}).get("filter")
    # Debezium 1.x puts an update's `_id` into `filter`; a `patch` of operators does not hold it.
    if criteria is not None:
        filter_document = _parsed_document(criteria)
        if "_id" in filter_document:
            return filter_document["_id"]
    return _key_id(change.key)


def _key_id(key: Json) -> EjsonValue | legacy_patches.NoId:
    if not (isinstance(key, dict) and "id" in key):
        return legacy_patches.NO_ID
    # The connector writes the key's `id` as JSON text. Other sources write plain strings, which are used as they are.
    try:
        return _parsed(key["id"])
    except ValueError:
        return key["id"]


def _key(change: ChangeEvent, identity: EjsonValue | legacy_patches.NoId, options: UnwrapOptions) -> EjsonValue:
    """The key with its `id` typed; one of another shape as it is; None if the value came without a key."""
    key_id = _key_id(change.key)
    if key_id is legacy_patches.NO_ID and change.key is not None:
        return _parsed(json.dumps(change.key))
    id_ = identity if key_id is legacy_patches.NO_ID else key_id
    return None if id_ is legacy_patches.NO_ID else {"id": record_fields.record_value(id_, ("id",), options, {})}


def _parsed(value: Json) -> EjsonValue:
    """The value of a JSON text of Debezium, or of JSON that is already expanded."""
    return debezium_json.parse(value if isinstance(value, str) else json.dumps(value))


def _parsed_document(value: Json) -> record_fields.Document:
    document = _parsed(value)
    if not debezium_json.is_document(document):
        raise ValueError("a JSON text of the event holds no document")
    return document


def _state(change: ChangeEvent, identity: EjsonValue | legacy_patches.NoId) -> record_fields.Document | None:
    """The document of the event, whole or partial; None for a delete."""
    envelope = change.envelope or {}
    if envelope.get("after") is not None:
        # With both, `after` is the looked-up document without the removed fields. They become null, because a record
        # without a field would not clear its column at the reader.
        return _with_nulls(_parsed_document(envelope["after"]), _removed(change))
    if envelope.get("updateDescription") is not None:
        return _partial(_updated(change), _removed(change), identity)
    if envelope.get("patch") is not None:
        return legacy_patches.patched(_parsed_document(envelope["patch"]), identity)
    if "after" not in envelope and envelope.get("op") in ("c", "r", "u"):
        raise ValueError("the envelope has no field after, which is null where there is no document")
    return None


def _updated(change: ChangeEvent) -> record_fields.Document:
    """The fields that an update sets. They are never one typed value, even if the only one has the name of a wrapper."""
    fields = change.part("updateDescription").get("updatedFields")
    if fields is None:
        return {}
    return debezium_json.parse_fields(fields if isinstance(fields, str) else json.dumps(fields))


def _removed(change: ChangeEvent) -> list[str]:
    paths = change.part("updateDescription").get("removedFields")
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _partial(
    updated: record_fields.Document, removed: Iterable[str], identity: EjsonValue | legacy_patches.NoId
) -> record_fields.Document:
    """The fields of an update under their dotted paths, removed ones as null, with `_id` last."""
    nulls = {name: None for name in map(wrappers.escape_key, removed) if name not in updated}
    return legacy_patches.identified({**updated, **nulls}, identity)


def _with_nulls(document: record_fields.Document, removed: Iterable[str]) -> record_fields.Document:
    """The whole document with removed fields as null, unless it has them because it is newer than the update."""
    return functools.reduce(lambda whole, path: _with_null(whole, path.split(".")), removed, document)


def _with_null(document: record_fields.Document, path: Sequence[str]) -> record_fields.Document:
    name = wrappers.escape_key(path[0])
    if len(path) == 1:
        return {**document, name: document.get(name)}
    # A path through something other than a document is ignored: the looked-up document is newer than the update.
    value = document.get(name)
    return {**document, name: _with_null(value, path[1:])} if debezium_json.is_document(value) else document


def _fields(
    change: ChangeEvent,
    state: record_fields.Document | None,
    identity: EjsonValue | legacy_patches.NoId,
    options: UnwrapOptions,
    displaced: dict[str, str],
) -> Iterator[record_fields.RecordField]:
    """The fields of the document, then `__deleted`, `_id` and `add.fields`."""
    mode = options.delete_tombstone_handling_mode
    document = _before(change) if state is None else state
    yield from record_fields.document_fields(document, options, displaced, flat=options.flatten_struct)
    if mode.adds_deleted:
        yield record_fields.RecordField(options.field_names.of(DELETED), state is None, DELETED)
        # A delete without a pre-image lacks its `_id`: the connector's event only has the key.
        if options.rewrite_with_id and "_id" not in document and identity is not legacy_patches.NO_ID:
            yield from record_fields.document_fields({"_id": identity}, options, displaced, flat=options.flatten_struct)
    for added_field in options.add_fields:
        yield from added_fields.added_field(change, added_field, options, displaced)


def _before(change: ChangeEvent) -> record_fields.Document:
    pre_image = (change.envelope or {}).get("before")
    return {} if pre_image is None else _parsed_document(pre_image)
