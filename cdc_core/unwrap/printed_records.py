"""Records as `medallion unwrap` prints them; those of one collection share a schema, as in a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.schema import cast, document_schema, evolution
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.shape import Shape
from cdc_core.unwrap import json_converter as connect_json
from cdc_core.unwrap import new_document_state
from cdc_core.unwrap.change_event import Json

RESCUED = "__rescued"


@dataclass(frozen=True)
class JsonRow:
    """A record as Kafka's JsonConverter prints it: plain JSON without null fields."""

    key: Json
    value: dict[str, Json] | None
    headers: tuple[tuple[str, Json], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """The record as one JSON object."""
        return {"key": self.key, "value": self.value, "headers": [list(header) for header in self.headers]}


def records(
    events: Iterable[Json], *, options: UnwrapOptions
) -> Iterator[JsonRow | new_document_state.UnchangedRecord | new_document_state.DroppedRecord]:
    """The result of each event, in order; events of one collection share a schema. Holds all of them in memory.

    Raises `ValueError` as `extracted` does, before the first row.
    """
    results = [new_document_state.extracted(event, options=options) for event in events]
    tables = RecordTables()
    for result in results:
        tables.see(result)
    for result in results:
        yield tables.row(result) if isinstance(result, new_document_state.ExtractedRecord) else result


def passed(event: Json) -> Json:
    """Something that is not a change event, unchanged, as a record of the output."""
    if isinstance(event, dict) and ("key" in event or "value" in event):
        return {"key": event.get("key"), "value": event.get("value"), "headers": event.get("headers") or []}
    return {"key": None, "value": event, "headers": []}


class RecordTables:
    """The schemas of the collections; every event is given to `see`, in order, before the first `row`."""

    def __init__(self) -> None:
        self._shapes: dict[str, Shape] = {}
        self._schemas: dict[str, DocumentSchema] = {}
        self._seen = 0

    def see(
        self,
        result: new_document_state.ExtractedRecord | new_document_state.UnchangedRecord | new_document_state.DroppedRecord,
    ) -> None:
        """Add the document's fields and types to its collection's schema."""
        if isinstance(result, new_document_state.ExtractedRecord) and result.document:
            self._seen += 1
            shape = self._shapes.setdefault(result.collection, Shape())
            shape.see(result.document, f"{self._seen:012d}")
            self._schemas.pop(result.collection, None)

    def schema(self, collection: str) -> DocumentSchema:
        """The schema of `collection` (`db.collection`); empty if none of its documents was seen."""
        if collection not in self._schemas:
            shape = self._shapes.get(collection, Shape())
            self._schemas[collection], _ = evolution.join(document_schema.EMPTY, shape, naming=_NAMING)
        return self._schemas[collection]

    def row(self, result: new_document_state.ExtractedRecord) -> JsonRow:
        """The record, typed by its collection's schema; values that do not fit are in `__rescued`."""
        key = None if result.key is None else printed_key(result.key)
        if result.document is None:
            return JsonRow(key, None, result.headers)
        rescued = dict(result.displaced)
        value = connect_json.document(result.document, self.schema(result.collection).struct, rescued)
        if rescued and RESCUED in value:  # the document has a field with this name
            cast.rescue(rescued, RESCUED, cast.ejson(result.document[RESCUED]))
        return JsonRow(key, {**value, RESCUED: {**rescued}} if rescued else value, result.headers)


_NAMING = column_names.ColumnNaming(reserved=frozenset({RESCUED}))


def printed_key(key: EjsonValue) -> Json:
    """A printed key of an `ExtractedRecord`, typed by itself: keys do not share a schema."""
    if not debezium_json.is_document(key):
        return connect_json.untyped(key)
    tables = RecordTables()
    tables.see(new_document_state.ExtractedRecord("", None, key))
    rescued: dict[str, str] = {}
    return connect_json.document(key, tables.schema("").struct, rescued)
