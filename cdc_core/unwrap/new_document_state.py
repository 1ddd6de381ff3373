"""`ExtractNewDocumentState`: change events in, records out. What a `$unset` and a missing field become in a record is here.

    for row in printed_records.records(events, options=unwrap_options.parse({"flatten.struct": "true"})):
        ...

An event is any form that `change_event` reads; what comes of it is a `JsonRow`, an `UnchangedRecord` or `DROPPED`. Two
steps, each usable alone: `extracted` applies every option to one event, and gives a key, a document and headers as
type-exact JSON; `cdc_core.unwrap.printed_records.RecordTables` gives the documents of each collection one schema, and `row` prints
them by it as Kafka's JsonConverter does. `cdc_core.unwrap.frames.unwrapped` is both steps over a Spark DataFrame, with
typed columns.

What the SMT does is in Debezium's documentation; the differences that are meant are in `docs/unwrap.md`:
arrays of any mixture work, `$unset` is a null, a name that two fields meet in keeps both values, dots of flattened
names are treated alike in whole and partial documents, and the options of older versions count.

Records only: silver makes the rows of its tables of `after` itself (`cdc_core.schema.cast`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import Parsed
from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.unwrap import added_fields, change_event, legacy_patches, record_fields
from cdc_core.unwrap.change_event import ChangeEvent, Json

DELETED = "__deleted"


@dataclass(frozen=True)
class ExtractedRecord:
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
class UnchangedRecord:
    """Something that is no change event: it passes as it came."""

    event: Json


class DroppedRecord:
    """An event that the delete mode takes out of the stream."""

    def __repr__(self) -> str:
        return "DROPPED"


DROPPED = DroppedRecord()


def extracted(event: Json, *, options: UnwrapOptions) -> ExtractedRecord | UnchangedRecord | DroppedRecord:
    """One event under the options.

    Raises `ValueError` where one of the JSON texts inside the event (`after`, `updatedFields`, …) cannot be read.
    """
    change = change_event.read(event)
    if change is None:
        return UnchangedRecord(event)
    if change.envelope is None:
        return _tombstone(change, options)
    identity = _identity(change)
    state = _state(change, identity)
    # Asked before the fields are made: a delete that is dropped needs none of them, and its pre-image may be large.
    if state is None and options.delete_tombstone_handling_mode.drops_delete:
        return DROPPED
    displaced: dict[str, str] = {}
    document = record_fields.joined(_fields(change, state, identity, options, displaced), displaced)
    key = _key(change, identity, options)
    return ExtractedRecord(
        change.collection, key, document or None, added_fields.added_headers(change, options), displaced, state is None
    )


def _tombstone(change: ChangeEvent, options: UnwrapOptions) -> ExtractedRecord | DroppedRecord:
    if not options.delete_tombstone_handling_mode.keeps_tombstone:
        return DROPPED
    headers = tuple((added.name, "d") for added in options.add_headers if added.field == "op")
    return ExtractedRecord("", _key(change, _identity(change), options), None, headers, is_delete=True)


def _identity(change: ChangeEvent) -> Parsed | legacy_patches.NoId:
    """The `_id`: as a legacy event's `filter` has it, else as the key has it; `legacy_patches.NO_ID` where neither is
    there."""
    criteria = (change.envelope or {}).get("filter")
    # Debezium 1.x puts an update's `_id` into `filter`; a `patch` of operators does not hold it.
    if criteria is not None:
        selected = _parsed_document(criteria)
        if "_id" in selected:
            return selected["_id"]
    return _key_id(change.key)


def _key_id(key: Json) -> Parsed | legacy_patches.NoId:
    if not (isinstance(key, dict) and "id" in key):
        return legacy_patches.NO_ID
    # The connector writes the key's `id` as JSON text; a plain string that is no JSON, as other sources write it,
    # stands for itself.
    try:
        return _parsed(key["id"])
    except ValueError:
        return key["id"]


def _key(change: ChangeEvent, identity: Parsed | legacy_patches.NoId, options: UnwrapOptions) -> Parsed:
    """The key with its `id` typed; one of another shape as it is; none for a value that came alone."""
    own = _key_id(change.key)
    if own is legacy_patches.NO_ID and change.key is not None:
        return _parsed(json.dumps(change.key))
    found = identity if own is legacy_patches.NO_ID else own
    return None if found is legacy_patches.NO_ID else {"id": record_fields.record_value(found, ("id",), options, {})}


def _parsed(value: Json) -> Parsed:
    """A JSON text of Debezium's; or the JSON itself, where something has expanded it already."""
    return debezium_json.parse(value if isinstance(value, str) else json.dumps(value))


def _parsed_document(value: Json) -> record_fields.Document:
    document = _parsed(value)
    if not debezium_json.is_document(document):
        raise ValueError("a JSON text of the event holds no document")
    return document


def _state(change: ChangeEvent, identity: Parsed | legacy_patches.NoId) -> record_fields.Document | None:
    """What the event says of the document, whole or partial; None for a delete."""
    envelope = change.envelope or {}
    if envelope.get("after") is not None:
        # With both, `after` is the look-up, which lacks what the update removed. A record without the field would not empty
        # its reader's column. So `$unset` becomes a null.
        return _with_nulls(_parsed_document(envelope["after"]), _removed(change))
    if envelope.get("updateDescription") is not None:
        updated = change.part("updateDescription").get("updatedFields")
        return _partial({} if updated is None else _parsed_document(updated), _removed(change), identity)
    if envelope.get("patch") is not None:
        return legacy_patches.patched(_parsed_document(envelope["patch"]), identity)
    return None


def _removed(change: ChangeEvent) -> list[str]:
    removed = change.part("updateDescription").get("removedFields")
    return [path for path in removed if isinstance(path, str)] if isinstance(removed, list) else []


def _partial(
    updated: record_fields.Document, removed: Iterable[str], identity: Parsed | legacy_patches.NoId
) -> record_fields.Document:
    """The fields that an update names, under their dotted paths, removed ones null; `_id` last."""
    nulls = {wrappers.escape_key(path): None for path in removed}
    return legacy_patches.identified({**updated, **_without(nulls, updated)}, identity)


def _without(fields: Mapping[str, Parsed], others: Mapping[str, Parsed]) -> record_fields.Document:
    return {name: value for name, value in fields.items() if name not in others}


def _with_nulls(document: record_fields.Document, removed: Iterable[str]) -> record_fields.Document:
    """The whole document, in which a removed field is null, unless a newer look-up brought it back."""
    return functools.reduce(lambda whole, path: _with_null(whole, path.split(".")), removed, document)


def _with_null(document: record_fields.Document, path: Sequence[str]) -> record_fields.Document:
    name = wrappers.escape_key(path[0])
    if len(path) == 1:
        return {**document, name: document.get(name)}
    # A path that leads through something else than a document says nothing here: the look-up is newer than the update.
    inner = document.get(name)
    return {**document, name: _with_null(inner, path[1:])} if debezium_json.is_document(inner) else document


def _fields(
    change: ChangeEvent,
    state: record_fields.Document | None,
    identity: Parsed | legacy_patches.NoId,
    options: UnwrapOptions,
    displaced: dict[str, str],
) -> Iterator[record_fields.RecordField]:
    """The fields of the document, then `__deleted`, then `_id`, then `add.fields`; none for a delete without value."""
    mode = options.delete_tombstone_handling_mode
    # Nothing is added to a record without a field of the document: a delete's key and null, or an update whose fields
    # were all left out.
    if not state and not mode.rewrites_delete:
        return
    document = _before(change) if state is None else state
    yield from record_fields.document_fields(document, options, displaced, flat=options.flatten_struct)
    if mode.adds_deleted:
        yield record_fields.engine_field(DELETED, state is None, options)
        # Only a delete without a pre-image lacks its `_id`: the connector's event of it holds nothing but the key.
        if options.rewrite_with_id and "_id" not in document and identity is not legacy_patches.NO_ID:
            yield from record_fields.document_fields({"_id": identity}, options, displaced, flat=options.flatten_struct)
    for added in options.add_fields:
        yield from added_fields.added_field(change, added, options, displaced)


def _before(change: ChangeEvent) -> record_fields.Document:
    before = (change.envelope or {}).get("before")
    return {} if before is None else _parsed_document(before)
