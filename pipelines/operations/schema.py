"""What each collection's documents look like now, and how they came to: the columns, and a line for each change.

Reads `ops/schemas` and the positions of the silver tables; claims nothing, changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_core.schema import column_types, document_schema, evolution
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.schema import log as schemas

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from cdc_core.settings.parse import Settings


@dataclass(frozen=True)
class SilverColumn:
    """One column of the silver table that comes from the documents."""

    name: str
    type: str


@dataclass(frozen=True)
class SchemaLogEntry:
    """One change: the dotted path of a field, what became of its column, and when.

    `batch` is the last bronze batch of the range that brought it and `event` the sequence of that range's first event,
    which happened at second `at`; both are None for what a rebuild changed.
    """

    version: int
    path: str
    what: str
    from_type: str | None
    to_type: str | None
    batch: int
    event: str | None
    at: int | None


@dataclass(frozen=True)
class SchemaHistory:
    """One collection's schema: `version` counts its changes; changes from before a rebuild are among them."""

    collection: str
    version: int
    columns: tuple[SilverColumn, ...]
    changes: tuple[SchemaLogEntry, ...]


def read(spark: SparkSession, settings: Settings, *, collection: str | None = None) -> tuple[SchemaHistory, ...]:
    """The evolution of each captured collection, or of one; a collection without documents has no columns.

    Raises `SettingsError` for a collection that silver does not know.
    """
    layout = delta.layout(settings.lakehouse)
    chosen = registry.chosen(spark, settings, collection)
    table = layout.ops("schemas")
    if not delta.exists(spark, table):
        return tuple(SchemaHistory(str(namespace), 0, (), ()) for namespace in chosen)
    rows = schemas.facts(spark, table).collect()
    found = []
    for namespace in chosen:
        position = registry.silver_position(spark, layout.silver(*namespace))
        own = [row for row in rows if row.collection == str(namespace)]
        found.append(_evolution(str(namespace), own, position.generation))
    return tuple(found)


def _evolution(collection: str, rows: Sequence[Row], generation: str) -> SchemaHistory:
    """The evolution that led to the table's generation; attempts at a rebuild that were not completed led to nothing."""
    whole = [row for row in rows if row.schema is not None and row.generation == generation]
    if not whole:
        return SchemaHistory(collection, 0, (), ())
    last = max(whole, key=lambda row: row.version)
    schema = document_schema.DocumentSchema.from_json(last.schema)
    columns = tuple(SilverColumn(name, column_types.ddl(type_)) for name, type_ in schema.table())
    line = _line(rows, generation)
    changes = [row for row in rows if row.generation in line]
    changes.sort(key=lambda row: (line.index(row.generation), row.version))
    return SchemaHistory(collection, last.version, columns, tuple(map(_change, changes)))


def _line(rows: Sequence[Row], generation: str) -> list[str]:
    """The generations that led to this one, oldest first: a rebuild's first row says which table it took the place of."""
    before = {row.generation: row["from"] or "" for row in rows if row.change == evolution.ChangeKind.REBUILT.value}
    line = [generation]
    while line[0] in before and before[line[0]] not in line:
        line.insert(0, before[line[0]])
    return line


def _change(row: Row) -> SchemaLogEntry:
    is_rebuilt = row.change == evolution.ChangeKind.REBUILT.value
    from_type, to_type = (None, None) if is_rebuilt else (row["from"], row["to"])
    at = int(row.seen_at[:8], 16) if row.seen_at else None
    return SchemaLogEntry(row.version, row.path, row.change, from_type, to_type, row.batch, row.seen_at, at)


def to_json(found: Sequence[SchemaHistory]) -> str:
    """The evolutions as one JSON object, with the names of the dataclasses' fields."""
    return json.dumps({"collections": [dataclasses.asdict(each) for each in found]}, indent=2)
