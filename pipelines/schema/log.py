"""A batch of documents and its collection's schema: what the batch adds, how it is typed, and the record of
both.

`evolve` runs Spark's own inference over the batch (`schema_of_variant_agg`: one pass, no Python) and looks
closer only where that shows a mix whose order matters for a column's type. `append` and `latest` keep a
collection's schema with its evolution in the table `ops/schemas`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema import variant_shape as variant_shapes
from cdc_core.schema.document_schema import DocumentSchema, Shape
from cdc_core.sql import arrow
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from cdc_core.typed import plan as typed
from pipelines.delta import tables as delta
from pipelines.schema import mixed_kinds as closer_look

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAMES = ("collection", "version", "batch", "path", "change", "from", "to", "seen_at", "schema", "generation")
SCHEMA = pa.schema([(name, pa.int64() if name in ("version", "batch") else pa.string()) for name in _NAMES])
"""Columns of `ops/schemas`: a row a change; the first row of a version holds the whole schema as JSON.

`generation` is what the rebuild called the silver table that the version is of, null before any: a schema counts as
soon as the table's own commit names its generation, and never before.
"""

_MARKS = ("sequence", "__sequence", "offset")


@dataclass(frozen=True)
class Evolution:
    """What a batch did to its collection's schema, and how it is typed.

    `refused` counts documents that `try_parse_json` does not take: they go through the exact path, and come
    out typed or unreadable. `seen_at` is the mark of the batch's first event. `also` has the counts that
    `evolve` was asked for.
    """

    schema: DocumentSchema
    changes: tuple[document_schema.Change, ...]
    plan: typed.Plan
    refused: int = 0
    seen_at: str | None = None
    also: Mapping[str, int] = field(default_factory=dict)


def evolve(
    df: DataFrame,
    *,
    current: DocumentSchema = document_schema.EMPTY,
    column: str = "after",
    options: unwrap_options.UnwrapOptions | None = None,
    pins: document_schema.Pins | None = None,
    mark: str | None = None,
    also: Mapping[str, str] | None = None,
    reserved: frozenset[str] = frozenset(),
) -> Evolution:
    """The schema after the batch `df`, its changes, and the plan for `typed.documents` over the same rows
    (or fewer).

    Reads `df` once, and once or twice more where a mix has to be looked into: persist what is dear to
    compute. `mark` is a column that sorts as the events do (`sequence`, `__sequence` or `offset` by
    default): where one path shows values of several kinds, the first one gives the column its type, so that
    the result depends on the documents and the current schema alone, and is the same for any partitioning
    and any cut into batches. `also` are conditions over `df`, as SQL by name, whose rows are counted on the
    way. `reserved` are names that no field's column may take, beside the engine's.
    """
    mark = mark or next((name for name in _MARKS if name in df.columns), None)
    naming = column_names.Naming.of(options or unwrap_options.UnwrapOptions())
    naming = replace(naming, reserved=naming.reserved | reserved)
    sight = _seen(df, column, mark, also or {})
    shape = sight.shape
    marked = closer_look.marked(df, column, mark)
    if naming.arrays_as_documents:
        shape = closer_look.in_python(marked, arrays_as_documents=True)
    else:
        shape = closer_look.settled(marked, shape, schema=current, pins=pins)
        if sight.refused:
            shape.add(closer_look.in_python(marked.where("try_parse_json(text) IS NULL")))
    schema, changes = document_schema.join(current, shape.ordered(sight.first), pins=pins, naming=naming)
    plan = typed.plan(schema, shape, column=column, refused=sight.refused)
    return Evolution(schema, changes, plan, sight.refused, sight.first_mark, sight.also)


@dataclass(frozen=True)
class _Sight:
    shape: Shape
    refused: int
    first: Any
    first_mark: str | None
    also: Mapping[str, int]


def _seen(df: DataFrame, column: str, mark: str | None, also: Mapping[str, str]) -> _Sight:
    """Spark's inference over the batch, and its first document, which gives new columns their order."""
    text = identifier(column)
    order = identifier(mark) if mark else text
    conditions = [f"({condition}) AS also_{number}" for number, condition in enumerate(also.values())]
    row = (
        df.selectExpr(f"{text} AS text", f"CAST({order} AS STRING) AS mark", f"try_parse_json({text}) AS v", *conditions)
        .selectExpr(
            "schema_of_variant_agg(v) AS schema",
            "count_if(text IS NOT NULL AND v IS NULL) AS refused",
            "min_by(text, struct(mark, text)) FILTER (WHERE v IS NOT NULL) AS first",
            "min(mark) AS first_mark",
            *(f"count_if(also_{number}) AS also_{number}" for number in range(len(also))),
        )
        .first()
    )
    first: Any = None
    if row.first is not None:
        first = json.loads(row.first)
    counted = {name: row[f"also_{number}"] for number, name in enumerate(also)}
    shape = variant_shapes.shape(row.schema or "VOID")
    return _Sight(shape, row.refused, first, row.first_mark if mark else None, counted)


@dataclass(frozen=True)
class Kept:
    """A collection's schema as `ops/schemas` keeps it, with its number there; 0 and empty where it keeps none."""

    version: int = 0
    schema: DocumentSchema = document_schema.EMPTY
    generation: str = ""


def latest(spark: SparkSession, table: tables.TableRef, *, generations: Mapping[str, str] | None = None) -> dict[str, Kept]:
    """The schema that each collection has now; `generations` are those of the silver tables that a rebuild made."""
    return of_generations(newest(spark, table), generations or {})


def newest(spark: SparkSession, table: tables.TableRef) -> list[tuple[str, Kept]]:
    """The newest schema of each collection, and of each generation of its table."""
    if not delta.exists(spark, table):
        return []
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for row in delta.rows(spark, table, SCHEMA).to_pylist():
        if row["schema"] is not None:
            of = (row["collection"], row["generation"] or "")
            last[of] = max(last.get(of, (0, "")), (row["version"], row["schema"]))
    return [
        (collection, Kept(version, DocumentSchema.from_json(text), generation))
        for (collection, generation), (version, text) in last.items()
    ]


def of_generations(found: Sequence[tuple[str, Kept]], generations: Mapping[str, str]) -> dict[str, Kept]:
    """The schema of each collection in its table's generation."""
    return {name: kept for name, kept in found if kept.generation == generations.get(name, "")}


def facts(spark: SparkSession, table: tables.TableRef) -> DataFrame:
    """The rows of `ops/schemas`; `generation` is empty before any rebuild."""
    rows = spark.table(str(table))
    found = F.col("generation") if "generation" in rows.columns else F.lit(None).cast("string")
    return rows.withColumn("generation", F.coalesce(found, F.lit("")))


def keep(
    spark: SparkSession, table: tables.TableRef, kept: Kept, evolution: Evolution, *, collection: str, batch: int
) -> Kept:
    """The schema that a batch led to; what changed is appended, before any table holds it."""
    if not evolution.changes:
        return kept
    changed = replace(kept, version=kept.version + 1, schema=evolution.schema)
    of = {"collection": collection, "version": changed.version, "generation": kept.generation}
    append(spark, table, batch=batch, evolution=evolution, **of)
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
    if generation:
        delta.create(spark, table, columns=arrow.columns_ddl(SCHEMA))
        if "generation" not in spark.table(str(table)).columns:
            spark.sql(f"ALTER TABLE {table} ADD COLUMNS (generation STRING)")
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
    delta.note(spark, table, [dict(zip(_NAMES, row)) for row in rows], SCHEMA)
