"""A batch of documents and its collection's schema: what the batch adds, how it is typed, and the record of
both.

`evolve` decodes the batch by the schema as it is, and looks only into documents that the schema does not cover: of very many into the
first ones, then only into those that still show something new (`looks`). `append` and `latest` keep a collection's schema with its evolution in the table `ops/schemas`.
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
"""Columns of `ops/schemas`: a row a change; the first row of a version holds the whole schema as JSON.

`generation` is what the rebuild called the silver table that the version is of, null before any: a schema counts as
soon as the table's own commit names its generation, and never before.
"""

FEW_FIELDS = 100
"""A document inside others that shows more fields among so many documents may be used as a map."""


@dataclass(frozen=True)
class Evolution:
    """What a batch did to its collection's schema, and how it is typed.

    `refused` counts texts that are not JSON to the letter: they go through the exact path, and come out typed or
    unreadable. `seen_at` is the mark of the batch's first event. `also` has the counts that `evolve` was given. `beginning` is what the first
    documents showed, where they alone were looked at.
    """

    schema: DocumentSchema
    changes: tuple[Change, ...]
    plan: typed.Plan
    refused: int = 0
    seen_at: str | None = None
    also: Mapping[str, int] = field(default_factory=dict)
    beginning: typed.Inference | None = None


def unchanged(schema: DocumentSchema, pins: Pins) -> Evolution:
    """What a batch did that the schema holds already."""
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
    """The schema after a batch of documents, its changes, and the plan for `typed.documents` over the same ones (or fewer).

    Reads them once; where there is no schema yet, the first documents are looked at before, unless `beginning` is what they showed, and
    where very many show something new, all once more after the first of these. Where one path shows values of several kinds, the
    first one by `sequence` gives the column its type, so that the result depends on the documents and the current schema alone, and is
    the same for any partitioning and any cut into batches. `also` are conditions, as SQL by name, whose rows are
    counted on the way. `reserved` are names that no field's column may take, beside the engine's.
    """
    pins, naming = pins or {}, _naming(options or unwrap_options.UnwrapOptions(), reserved)
    begun, known = beginning or typed.Inference(), current
    if beginning is None and not current.fields:
        begun = documents.first(typed.Plan(replace(current, naming=naming)))
    if begun.shape.kinds:
        known, _ = join(current, begun.shape, pins=pins, naming=naming)
    count = looks.BEGINNING
    found = look = documents.new(typed.Plan(known, pins), also, most=count if _is_of_columns(begun) else None)
    # Where very many documents show something new, most of them show the same: the first of them are looked into, and then those that
    # show more than these.
    while look.is_cut:
        more = begun.with_other(documents.first_new(typed.Plan(known, pins), count))
        wider, _ = join(current, more.shape, pins=pins, naming=naming)
        count *= 4
        is_narrower = wider != known and _is_of_columns(more)
        if is_narrower:
            begun, known = more, wider
        look = documents.new(typed.Plan(known, pins), {}, most=count if is_narrower else None)
    # Nothing that the first documents gave a type is changed by what is not looked into: all of it comes later.
    shape = look.with_other(begun).shape
    schema, changes = join(current, shape, pins=pins, naming=naming)
    counted = dict(zip(also, itertools.chain(found.also, itertools.repeat(0))))
    return Evolution(schema, changes, typed.Plan(schema, pins), found.refused, found.low, counted)


def begun(
    documents: looks.Documents,
    *,
    options: unwrap_options.UnwrapOptions,
    pins: Pins,
    reserved: frozenset[str] = frozenset(),
) -> Evolution | None:
    """The schema of the first of the documents, as a first batch of `BEGINNING` of them would lead to it.

    None where it shall be made of all: there is no document, or one of them may be used as a map, or may belong to quarantine,
    where it must leave no column behind.
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
    """The schema to type documents by that this process has: of many, the current one with what the first of them add; None where there
    is none, and they cannot give one."""
    if len(texts) <= looks.BEGINNING:
        return unchanged(current, pins)
    documents, plan = looks.LocalDocuments(texts, places), typed.Plan(current, pins)
    if not current.fields:
        return begun(documents, options=options, pins=pins, reserved=reserved)
    # What is new and was not seen here costs time: all are typed once more.
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
    """Whether no later document can make another column of what these showed, as a map or by going to quarantine."""
    return not sight.refused and _most_fields(sight.shape) <= FEW_FIELDS


def _most_fields(shape: Shape) -> int:
    """The fields of the document inside documents that has the most."""
    inner = [*shape.fields.values(), *([] if shape.element is None else [shape.element])]
    return max((max(len(each.fields), _most_fields(each)) for each in inner), default=0)


@dataclass(frozen=True)
class SchemaVersion:
    """A collection's schema as `ops/schemas` keeps it, with its number there; 0 and empty where it keeps none."""

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
    """The schema that each collection has now, or had at a batch; `generations` are those of the silver tables that a
    rebuild made."""
    found = newest(spark, table, until=until, of=None if generations is None else [*generations])
    return of_generations(found, generations or {})


@stored_files.one_look()
def newest(
    spark: SparkSession, table: tables.TableRef, *, until: int | None = None, of: Sequence[str] | None = None
) -> list[tuple[str, SchemaVersion]]:
    """The newest schema of each collection, or of some, and of each generation of its table; `until` is the last batch that counts."""
    if not delta.exists(spark, table):
        return []
    last: dict[tuple[str, str], tuple[int, int, str]] = {}
    # Part by part: each version holds its whole schema, and all of them, in one file perhaps, are more than there is room for.
    for part in ops_tables.parts(spark, table, SCHEMA, among=None if of is None else (_COLLECTION, of)):
        for row in part.to_pylist():
            if row["schema"] is not None and (until is None or row["batch"] <= until):
                key, text = (row["collection"], row["generation"] or ""), row["schema"]
                # Of two with one number the longer one has more: who was killed before its commit has noted what its range showed, and
                # whoever did not see that, and applied that range with others, all of it and more.
                last[key] = max(last.get(key, (0, 0, "")), (row["version"], len(text), text))
    return [
        (collection, SchemaVersion(version, DocumentSchema.from_json(text), generation))
        for (collection, generation), (version, _, text) in last.items()
    ]


def of_generations(found: Sequence[tuple[str, SchemaVersion]], generations: Mapping[str, str]) -> dict[str, SchemaVersion]:
    """The schema of each collection in its table's generation."""
    return {name: kept for name, kept in found if kept.generation == generations.get(name, "")}


def changes(spark: SparkSession, table: tables.TableRef, *, of: Container[str]) -> list[dict[str, Any]]:
    """The rows of `ops/schemas` of some collections, without the schemas; `generation` is empty before any rebuild."""
    found = {}
    for part in ops_tables.parts(spark, table, SCHEMA):
        for row in part.drop_columns(["schema"]).to_pylist():
            if row["collection"] in of:
                row["generation"] = row["generation"] or ""
                found[tuple(row.values())] = row  # once, though it may come twice
    return list(found.values())


def record(
    writer: Writer, table: tables.TableRef, kept: SchemaVersion, evolution: Evolution, *, collection: str, batch: int
) -> SchemaVersion:
    """The schema that a batch led to; what changed is appended, before the writer's table holds it.

    Raises `OwnershipLost` where that table was taken over.
    """
    if not evolution.changes:
        return kept
    # Who took it over in a pause of this process has noted more under the same number: nothing else fences what is noted.
    writer.check_ownership()
    changed = replace(kept, version=kept.version + 1, schema=evolution.schema)
    append(
        writer.spark,
        table,
        collection=collection,
        version=changed.version,
        generation=kept.generation,
        batch=batch,
        evolution=evolution,
    )
    return changed


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
    """Keeps the schema as the collection's number `version`, with its changes; nothing where there are none.

    Appended before the table is written: run again after a crash, the same batch finds its schema and
    changes nothing.
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
