"""The evolution of a collection's document schema by batches of documents, and its record in the table `ops/schemas`.

`evolve` decodes a batch by the current schema, and infers only from documents that the schema does not cover. Where these are very many, it
infers from the first of them, and then only from those that still add something (`looks`). `append` and `latest` write and read the record.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.evolution import Change, join
from cdc_core.schema.pins import Pins
from cdc_core.schema.shape import Shape
from cdc_core.tables import layout as tables
from cdc_core.typed import plan as typed
from pipelines.delta import ops_tables, stored_files
from pipelines.delta import tables as delta
from pipelines.schema import looks

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

FEW_FIELDS = 100
"""A nested document with more fields than this among `looks.BEGINNING` documents may be used as a map."""


@dataclass(frozen=True)
class Evolution:
    """The changes of a batch to its collection's schema, and the plan to type the batch.

    `refused` counts texts that are not strict JSON: the exact path types them, or finds them unreadable. `seen_at` is the `sequence` of the
    batch's first event. `also` has the counts of `evolve`'s conditions. `beginning` is the inference of the first documents, where only
    these were read.
    """

    schema: DocumentSchema
    changes: tuple[Change, ...]
    plan: typed.Plan
    refused: int = 0
    seen_at: str | None = None
    also: Mapping[str, int] = field(default_factory=dict)
    beginning: typed.Inference | None = None


def unchanged(schema: DocumentSchema, pins: Pins) -> Evolution:
    """The evolution of a batch that changes nothing."""
    return Evolution(schema, (), typed.Plan(schema, pins))


def evolve(
    documents: looks.Documents,
    *,
    current: DocumentSchema = document_schema.EMPTY,
    options: unwrap_options.UnwrapOptions | None = None,
    pins: Pins | None = None,
    reserved: frozenset[str] = frozenset(),
    also: Mapping[str, str] = {},
    beginning: typed.Inference | None = None,
) -> Evolution:
    """The schema after a batch of documents, its changes, and the plan for `typed.documents` over the same documents or some of them.

    Reads the documents once. Without a current schema, the first documents are read before, unless `beginning` is their inference. Where
    very many documents show something new, all are read again after the first of these.

    Where a path has values of several kinds, the first one by `sequence` determines the type of its column. So the result depends only on
    the documents and the current schema, and is the same for any partitioning and any cut into batches.

    `also` are conditions, as SQL by name, whose rows are counted in the same read. `reserved` are column names that no field may get, in
    addition to those of the engine.
    """
    pins, naming = pins or {}, _naming(options or unwrap_options.UnwrapOptions(), reserved)
    sight, known_schema = beginning or typed.Inference(), current
    if beginning is None and not current.fields:
        sight = documents.first(typed.Plan(replace(current, naming=naming)))
    if sight.shape.kinds:
        known_schema, _ = join(current, sight.shape, pins=pins, naming=naming)
    count = looks.BEGINNING
    first_look = look = documents.new(typed.Plan(known_schema, pins), also, most=count if _is_of_columns(sight) else None)
    # Where very many documents show something new, most show the same: infer from the first of them, then from those that show more.
    while look.is_cut:
        longer_sight = sight.with_other(documents.first_new(typed.Plan(known_schema, pins), count))
        wider_schema, _ = join(current, longer_sight.shape, pins=pins, naming=naming)
        count *= 4
        is_narrower = wider_schema != known_schema and _is_of_columns(longer_sight)
        if is_narrower:
            sight, known_schema = longer_sight, wider_schema
        look = documents.new(typed.Plan(known_schema, pins), {}, most=count if is_narrower else None)
    # Documents that were not inferred from come later, and cannot change the types that the first documents determined.
    shape = look.with_other(sight).shape
    schema, changes = join(current, shape, pins=pins, naming=naming)
    counts = dict(zip(also, itertools.chain(first_look.also, itertools.repeat(0))))
    return Evolution(schema, changes, typed.Plan(schema, pins), first_look.refused, first_look.low, counts)


def begun(
    documents: looks.Documents,
    *,
    options: unwrap_options.UnwrapOptions,
    pins: Pins,
    reserved: frozenset[str] = frozenset(),
) -> Evolution | None:
    """The schema from the first `BEGINNING` documents, as if they were a batch of their own.

    None where all documents are needed: there is none, or one may be used as a map, or may go to quarantine, and then must not add a
    column.
    """
    naming = _naming(options, reserved)
    sight = documents.first(typed.Plan(replace(document_schema.EMPTY, naming=naming)))
    if not sight.shape.kinds or not _is_of_columns(sight):
        return None
    return _joined(document_schema.EMPTY, sight, pins, naming)


def start_here(
    texts: pa.Array,
    places: pa.Array,
    *,
    current: DocumentSchema,
    options: unwrap_options.UnwrapOptions,
    pins: Pins,
    reserved: frozenset[str],
) -> Evolution | None:
    """The schema to type documents of this process: the current one, and for many documents with the changes of the first of them.

    None where there is no current schema and the first documents cannot give one (`begun`).
    """
    if len(texts) <= looks.BEGINNING:
        return unchanged(current, pins)
    documents, plan = looks.LocalDocuments(texts, places), typed.Plan(current, pins)
    if not current.fields:
        return begun(documents, options=options, pins=pins, reserved=reserved)
    # A change that is missed here only costs time: all documents are then typed again.
    sight = typed.Inference() if documents.seem_known(plan) else documents.first_unknown(plan)
    if not sight.shape.kinds or not _is_of_columns(sight):
        return unchanged(current, pins)
    return _joined(current, sight, pins, _naming(options, reserved))


def _naming(options: unwrap_options.UnwrapOptions, reserved: frozenset[str]) -> column_names.ColumnNaming:
    naming = column_names.ColumnNaming.of(options)
    return replace(naming, reserved=naming.reserved | reserved)


def _joined(current: DocumentSchema, sight: typed.Inference, pins: Pins, naming: column_names.ColumnNaming) -> Evolution:
    schema, changes = join(current, sight.shape, pins=pins, naming=naming)
    return Evolution(schema, changes, typed.Plan(schema, pins), seen_at=sight.low, beginning=sight)


def _is_of_columns(sight: typed.Inference) -> bool:
    """Whether the inferred fields are certainly columns: none may be used as a map, and no document may go to quarantine."""
    return not sight.refused and _most_fields(sight.shape) <= FEW_FIELDS


def _most_fields(shape: Shape) -> int:
    """The greatest number of fields of a nested document."""
    inner = [*shape.fields.values(), *([] if shape.element is None else [shape.element])]
    return max((max(len(each.fields), _most_fields(each)) for each in inner), default=0)


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


def of_generations(found: Sequence[tuple[str, SchemaVersion]], generations: Mapping[str, str]) -> dict[str, SchemaVersion]:
    """The schema of each collection in its table's generation."""
    return {name: version for name, version in found if version.generation == generations.get(name, "")}


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
    writer: Writer, table: tables.TableRef, kept: SchemaVersion, evolution: Evolution, *, collection: str, batch: int
) -> SchemaVersion:
    """Record a batch's changes before they are in the writer's table; the new version of the schema.

    Raises `OwnershipLost` where the table was taken over.
    """
    if not evolution.changes:
        return kept
    # `ops/schemas` has no fence: a writer that took over may have recorded other changes under the same version.
    writer.check_ownership()
    new_version = replace(kept, version=kept.version + 1, schema=evolution.schema)
    append(
        writer.spark,
        table,
        collection=collection,
        version=new_version.version,
        generation=kept.generation,
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
    """Append the schema with its changes as the collection's `version`; does nothing where there are no changes.

    Called before the silver table is written: after a crash the same batch finds its schema, and changes nothing.
    """
    if not evolution.changes:
        return
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
