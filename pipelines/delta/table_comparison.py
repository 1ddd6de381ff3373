"""Compares two tables of documents: which rows are gone, new or different, in which columns, and why."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_core.sql import arrow
from cdc_core.sql.names import identifier

EXAMPLES = 5
"""The most keys that are named for each kind of difference."""

_INNER = frozenset(("__key", "__batch", "__known", "__rescued"))
"""Columns that are not compared as values: `__batch` and `__known` may differ, the others are compared separately."""


@dataclass(frozen=True)
class ColumnDifference:
    """A column in which documents differ: their number, the reason, and some of their keys."""

    column: str
    documents: int
    why: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The differences between a table and the rebuilt one, as numbers of rows.

    `gone` are rows that only the live table has, also where a key has more rows there. `lost` are documents without a delete in bronze that
    would be gone, and complete ones that would become incomplete; `lost_keys` are some of their keys. `new` are rows that only the rebuilt
    table has, `differing` documents that differ.
    """

    rows: int
    rebuilt_rows: int
    gone: int
    lost: int
    lost_keys: tuple[str, ...]
    new: int
    differing: int
    differences: tuple[ColumnDifference, ...]
    rescued: int
    rebuilt_rescued: int


def compared(live: DataFrame, rebuilt: DataFrame, *, deletes: DataFrame | None = None) -> Comparison:
    """Compare the rows of two tables by key; `deletes` has the column `__key` of the keys that bronze deletes.

    Values are compared as JSON: null equals absent, and the order of fields does not count where the types are the same.
    """
    # As JSON, because the tables may have different columns, and different types for the same values.
    before, after = _texts(live), _texts(rebuilt)
    pairs = before.select("key", *_named(before, "before")).join(after.select("key", *_named(after, "after")), "key", "full")
    is_gone, is_other = F.col("after").isNull(), F.col("before") != F.col("after")
    before_rows, after_rows = (F.coalesce(name, F.lit(0)) for name in ("before_rows", "after_rows"))
    counts = pairs.agg(
        _sum(before_rows).alias("rows"),
        _sum(after_rows).alias("rebuilt_rows"),
        _sum(F.greatest(before_rows - after_rows, F.lit(0))).alias("gone"),
        _sum(F.greatest(after_rows - before_rows, F.lit(0))).alias("new"),
        F.count_if(is_other).alias("differing"),
        _sum("before_rescued").alias("rescued"),
        _sum("after_rescued").alias("rebuilt_rescued"),
    ).first()
    parts = pairs.where(is_gone), pairs.where(is_other), deletes
    lost, lost_keys = _lost(*parts) if counts.gone or counts.differing else (0, ())
    differences = _differences(pairs.where(is_other), live, rebuilt) if counts.differing else ()
    return Comparison(**counts.asDict(), lost=lost, lost_keys=lost_keys, differences=differences)


def _sum(number: Column | str) -> Column:
    return F.coalesce(F.sum(number), F.lit(0))


def _texts(table: DataFrame) -> DataFrame:
    """Rows `key, text, rescued, rows`: a key, the columns as one JSON object, the number of rescued values, and that of the key's rows."""
    # By name: a table that grew batch by batch may have its columns in another order than the rebuilt one.
    columns = [F.col(identifier(name)).alias(name) for name in sorted(table.columns) if name not in _INNER]
    rescued = F.col("__rescued") if "__rescued" in table.columns else F.lit(None).cast("MAP<STRING, STRING>")
    entries = F.when(F.size(rescued) > 0, F.array_sort(F.map_entries(rescued))).alias("__rescued")
    text = F.to_json(F.struct(F.col("__key"), *columns, entries))
    # A row without a key, which only another program writes, has a text as key: null would be no text to show, nor equal itself.
    key = F.coalesce("__key", F.lit("")).alias("key")
    rows = table.select(key, text.alias("text"), F.greatest(F.size(rescued), F.lit(0)).alias("rescued"))
    # A key may have two rows in a damaged table: joined as they are, both would be equal to the one of the other table.
    return rows.groupBy("key").agg(
        F.min("text").alias("text"), F.sum("rescued").alias("rescued"), F.count("*").alias("rows")
    )


def _named(texts: DataFrame, name: str) -> tuple[Column, ...]:
    return texts["text"].alias(name), *(texts[each].alias(f"{name}_{each}") for each in ("rescued", "rows"))


def _lost(removed_rows: DataFrame, other: DataFrame, deletes: DataFrame | None) -> tuple[int, tuple[str, ...]]:
    """The number of rows that are gone without a delete or would become incomplete, and some of their keys."""
    undeleted = removed_rows if deletes is None else removed_rows.join(deletes, F.col("key") == F.col("__key"), "left_anti")
    before, after = (F.get_json_object(name, "$.__incomplete").eqNullSafe("true") for name in ("before", "after"))
    lost_rows = undeleted.unionByName(other.where(after & ~before))
    return lost_rows.count(), tuple(row.key for row in lost_rows.select("key").orderBy("key").limit(EXAMPLES).collect())


def _differences(other: DataFrame, live: DataFrame, rebuilt: DataFrame) -> tuple[ColumnDifference, ...]:
    """The columns in which documents differ, by name."""
    parts = (F.from_json(name, "MAP<STRING, STRING>") for name in ("before", "after"))
    equalities = F.map_zip_with(*parts, lambda _, left, right: left.eqNullSafe(right))
    columns = F.explode(F.map_keys(F.map_filter(equalities, lambda _, is_equal: ~is_equal))).alias("column")
    counts = other.select("key", columns).mapInArrow(_counted, arrow.columns_ddl(_COUNTED)).groupBy("column")
    keys = F.array_sort(F.array_distinct(F.flatten(F.collect_list("keys"))))
    rows = (
        counts.agg(F.sum("documents").alias("documents"), F.slice(keys, 1, EXAMPLES).alias("keys"))
        .orderBy("column")
        .collect()
    )
    types = dict(live.dtypes), dict(rebuilt.dtypes)
    return tuple(ColumnDifference(row.column, row.documents, _why(row.column, *types), tuple(row["keys"])) for row in rows)


_COUNTED = pa.schema([("column", pa.string()), ("documents", pa.int64()), ("keys", pa.list_(pa.string()))])


def _counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For rows `key, column`, the number of rows of each column and the first keys.

    Aggregated per batch, because after a change of type all documents differ, and their keys would not fit into an executor's memory.
    """
    for batch in batches:
        keys: dict[str, list[str]] = {}
        for key, column in zip(batch.column("key").to_pylist(), batch.column("column").to_pylist()):
            keys.setdefault(column, []).append(key)
        examples = [heapq.nsmallest(EXAMPLES, each) for each in keys.values()]
        yield pa.record_batch([[*keys], [len(each) for each in keys.values()], examples], schema=_COUNTED)


def _why(column: str, before: dict[str, str], after: dict[str, str]) -> str:
    if column == "__rescued":
        return "what fits no column"
    if column not in before:
        return f"new column {after[column]}"
    if column not in after:
        return f"no column any more, was {before[column]}"
    return "the value" if before[column] == after[column] else f"type {before[column]} → {after[column]}"
