"""The record of the collections' document schemas, version by version, in the table `ops/schemas`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cdc_core.schema import document_schema
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.tables import layout as tables
from pipelines.delta import ops_tables, stored_files
from pipelines.delta import tables as delta
from pipelines.schema.batch_evolution import Evolution

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipelines.delta.writer import Writer

_COLLECTION = "collection"
_NAMES = (_COLLECTION, "version", "batch", "path", "change", "from", "to", "seen_at", "schema", "generation")
SCHEMA = pa.schema([(name, pa.int64() if name in ("version", "batch") else pa.string()) for name in _NAMES])
"""Columns of `ops/schemas`: one row per change; the first row of a version has the whole schema as JSON.

`generation` is the name that a rebuild gave to the version's silver table, null before any rebuild. A schema counts as soon as a commit of
the silver table names its generation.
"""


@dataclass(frozen=True)
class SchemaVersion:
    """A collection's schema in `ops/schemas` with its version; version 0 and empty where there is none."""

    version: int = 0
    schema: DocumentSchema = document_schema.EMPTY
    generation: str = ""


def latest(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    generations: Mapping[str, str] | None = None,
    until: int | None = None,
) -> dict[str, SchemaVersion]:
    """The newest schema of each collection, or that of the batch `until`. `generations` of rebuilt silver tables, by collection; where
    they are given, only these collections are read."""
    versions = newest(spark, table, until=until, of=None if generations is None else [*generations])
    return of_generations(versions, generations or {})


@stored_files.one_look()
def newest(
    spark: SparkSession, table: tables.TableRef, *, until: int | None = None, of: Sequence[str] | None = None
) -> list[tuple[str, SchemaVersion]]:
    """The newest schema of each collection and generation, up to the batch `until`; `of` limits the collections."""
    if not delta.exists(spark, table):
        return []
    newest_rows: dict[tuple[str, str], tuple[int, int, str]] = {}
    # In parts: each version has its whole schema, and a single file may have more of them than fit into memory.
    for part in ops_tables.parts(spark, table, SCHEMA, among=None if of is None else (_COLLECTION, of)):
        for row in part.to_pylist():
            if row["schema"] is not None and (until is None or row["batch"] <= until):
                key, text = (row["collection"], row["generation"] or ""), row["schema"]
                # Of two schemas with the same version the longer one counts. A run that is killed before its commit has recorded its
                # range. A later run that did not see this record applies that range with others, and records all of it and more.
                newest_rows[key] = max(newest_rows.get(key, (0, 0, "")), (row["version"], len(text), text))
    return [
        (collection, SchemaVersion(version, DocumentSchema.from_json(text), generation))
        for (collection, generation), (version, _, text) in newest_rows.items()
    ]


def of_generations(
    versions: Sequence[tuple[str, SchemaVersion]], generations: Mapping[str, str]
) -> dict[str, SchemaVersion]:
    """The schema of each collection in its table's generation."""
    return {name: version for name, version in versions if version.generation == generations.get(name, "")}


def changes(spark: SparkSession, table: tables.TableRef, *, of: Container[str]) -> list[dict[str, Any]]:
    """The rows of `ops/schemas` of some collections, without `schema`, in no order; `generation` is empty before any rebuild."""
    change_rows = {}
    for part in ops_tables.parts(spark, table, SCHEMA):
        for row in part.drop_columns(["schema"]).to_pylist():
            if row["collection"] in of:
                row["generation"] = row["generation"] or ""
                change_rows[tuple(row.values())] = row  # `ops_tables.parts` may return a row twice
    return list(change_rows.values())


def record(
    writer: Writer, table: tables.TableRef, current: SchemaVersion, evolution: Evolution, *, collection: str, batch: int
) -> SchemaVersion:
    """Record a batch's changes before they are in the writer's table; the new version of the schema.

    Raises `OwnershipLost` where the table was taken over.
    """
    if not evolution.changes:
        return current
    # `ops/schemas` has no fence: a writer that took over may have recorded other changes under the same version.
    writer.check_ownership()
    new_version = replace(current, version=current.version + 1, schema=evolution.schema)
    append(
        writer.spark,
        table,
        collection=collection,
        version=new_version.version,
        generation=current.generation,
        batch=batch,
        evolution=evolution,
    )
    return new_version


def append(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    collection: str,
    version: int,
    batch: int,
    evolution: Evolution,
    generation: str = "",
) -> None:
    """Append the schema with its changes, one at least, as the collection's `version`.

    Called before the silver table is written: after a crash the same batch finds its schema, and changes nothing.
    """
    rows = [
        (
            collection,
            version,
            batch,
            change.path,
            change.what.value,
            change.from_type,
            change.to_type,
            evolution.seen_at,
            evolution.schema.to_json() if number == 0 else None,
            generation or None,
        )
        for number, change in enumerate(evolution.changes)
    ]
    ops_tables.note(spark, table, [dict(zip(_NAMES, row)) for row in rows], SCHEMA, statistics=(_COLLECTION,))
