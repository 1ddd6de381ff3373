"""Reads each collection's columns, and the history of their changes, from `ops/schemas`. Claims and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from cdc_core.schema import column_types, evolution
from cdc_core.settings.parse import Settings
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.schema import log as schemas


@dataclass(frozen=True)
class SilverColumn:
    """One column of the silver table that comes from the documents."""

    name: str
    type: str


@dataclass(frozen=True)
class SchemaLogEntry:
    """One change of a field's column.

    `path` is dotted, `what` an `evolution.ChangeKind`. `batch` is the last bronze batch of the range with the change, `event` the
    sequence of that range's first event, and `at` its time in seconds since 1970; both are None for changes by a rebuild.
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
    """One collection's schema and its changes, those from before a rebuild included; `version` counts the changes."""

    collection: str
    version: int
    columns: tuple[SilverColumn, ...]
    changes: tuple[SchemaLogEntry, ...]


def read(spark: SparkSession, settings: Settings, *, collection: str | None = None) -> tuple[SchemaHistory, ...]:
    """The schemas of all captured collections, or of one; without documents a collection has no columns.

    Raises `SettingsError` for a collection that silver does not know.
    """
    layout = delta.layout(settings.lakehouse)
    namespaces = registry.chosen(spark, settings, collection)
    table = layout.ops("schemas")
    if not delta.exists(spark, table):
        return tuple(SchemaHistory(str(namespace), 0, (), ()) for namespace in namespaces)
    generations = {str(each): registry.silver_position(spark, layout.silver(*each)).generation for each in namespaces}
    schema_versions = schemas.latest(spark, table, generations=generations)
    rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in generations}
    for row in schemas.changes(spark, table, of=generations):
        rows[row["collection"]].append(row)
    return tuple(
        _evolution(name, changes, schema_versions[name]) if name in schema_versions else SchemaHistory(name, 0, (), ())
        for name, changes in rows.items()
    )


def _evolution(collection: str, rows: Sequence[Mapping[str, Any]], now: schemas.SchemaVersion) -> SchemaHistory:
    """The changes that led to the table's current generation; incomplete rebuilds are left out."""
    columns = tuple(SilverColumn(name, column_types.ddl(type_)) for name, type_ in now.schema.table())
    lineage = _line(rows, now.generation)
    changes = [row for row in rows if row["generation"] in lineage]
    changes.sort(key=lambda row: (lineage.index(row["generation"]), row["version"]))
    return SchemaHistory(collection, now.version, columns, tuple(map(_change, changes)))


def _line(rows: Sequence[Mapping[str, Any]], generation: str) -> list[str]:
    """The generations that led to this one, oldest first: the first row of a rebuild names the generation that it replaced."""
    predecessors = {
        row["generation"]: row["from"] or "" for row in rows if row["change"] == evolution.ChangeKind.REBUILT.value
    }
    lineage = [generation]
    while lineage[0] in predecessors and predecessors[lineage[0]] not in lineage:
        lineage.insert(0, predecessors[lineage[0]])
    return lineage


def _change(row: Mapping[str, Any]) -> SchemaLogEntry:
    is_rebuilt, event = row["change"] == evolution.ChangeKind.REBUILT.value, row["seen_at"]
    from_type, to_type = (None, None) if is_rebuilt else (row["from"], row["to"])
    at = int(event[:8], 16) if event else None
    return SchemaLogEntry(row["version"], row["path"], row["change"], from_type, to_type, row["batch"], event, at)
