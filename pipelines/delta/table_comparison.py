"""Compares two tables of documents: which rows are gone, new or different, in which columns, and why."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_core.sql import arrow
from cdc_core.sql.names import identifier
from pipelines.delta import query_execution

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
    pairs = _joined(_digests(live), _digests(rebuilt), ("digest", "rescued", "rows"))
    before_rows, after_rows = (F.coalesce(name, F.lit(0)) for name in ("before_rows", "after_rows"))
    # A key may have two rows in a damaged table, whose digests do not tell which of them is compared.
    is_seen = (F.col("before_digest") != F.col("after_digest")) | (F.greatest(before_rows, after_rows) > 1)
    is_seen |= F.col("after_digest").isNull()
    counts = pairs.agg(
        _sum(before_rows).alias("rows"),
        _sum(after_rows).alias("rebuilt_rows"),
        _sum(F.greatest(before_rows - after_rows, F.lit(0))).alias("gone"),
        _sum(F.greatest(after_rows - before_rows, F.lit(0))).alias("new"),
        _sum("before_rescued").alias("rescued"),
        _sum("after_rescued").alias("rebuilt_rescued"),
        F.count_if(is_seen).alias("seen"),
    ).first()
    sums = {name: count for name, count in counts.asDict().items() if name != "seen"}
    if not counts.seen:
        return Comparison(**sums, lost=0, lost_keys=(), differing=0, differences=())
    # Only of these rows the texts are compared: mostly they are few, and in a shuffle texts are as large as the tables.
    with query_execution.held(pairs.where(is_seen).select("key")) as keys:
        texts = _joined(_texts_of(live, keys), _texts_of(rebuilt, keys), ("text",))
        other = texts.where(F.col("before_text") != F.col("after_text"))
        differing = other.count()
        lost, lost_keys = _lost(texts.where(F.col("after_text").isNull()), other, deletes)
        differences = _differences(other, live, rebuilt) if differing else ()
    return Comparison(**sums, lost=lost, lost_keys=lost_keys, differing=differing, differences=differences)


def _sum(number: Column | str) -> Column:
    return F.coalesce(F.sum(number), F.lit(0))


def _texts(table: DataFrame) -> DataFrame:
    """Rows `key, text, rescued`: a key, the columns as one JSON object, and the number of rescued values.

    As JSON, because the tables may have different columns, and different types for the same values.
    """
    # By name: a table that grew batch by batch may have its columns in another order than the rebuilt one.
    columns = [F.col(identifier(name)).alias(name) for name in sorted(table.columns) if name not in _INNER]
    rescued = F.col("__rescued") if "__rescued" in table.columns else F.lit(None).cast("MAP<STRING, STRING>")
    entries = F.when(F.size(rescued) > 0, F.array_sort(F.map_entries(rescued))).alias("__rescued")
    text = F.to_json(F.struct(F.col("__key"), *columns, entries))
    return table.select(_key(), text.alias("text"), F.greatest(F.size(rescued), F.lit(0)).alias("rescued"))


def _key() -> Column:
    # A row without a key, which only another program writes, has a text as key: null would be no text to show, nor equal itself.
    return F.coalesce("__key", F.lit("")).alias("key")


def _digests(table: DataFrame) -> DataFrame:
    """Rows `key, digest, rescued, rows`: a key, the digest of one of its texts, and the numbers of its rescued values and of its rows."""
    digest = F.min(F.xxhash64("text")).alias("digest")
    return _texts(table).groupBy("key").agg(digest, F.sum("rescued").alias("rescued"), F.count("*").alias("rows"))


def _texts_of(table: DataFrame, keys: DataFrame) -> DataFrame:
    """Rows `key, text` of these keys, of several rows of one the first text: joined as they are, two rows would both be equal to the one of
    the other table."""
    return _texts(table.join(keys, _key() == keys["key"], "left_semi")).groupBy("key").agg(F.min("text").alias("text"))


def _joined(before: DataFrame, after: DataFrame, names: Sequence[str]) -> DataFrame:
    """The rows of both by `key`, with these columns as `before_…` and `after_…`."""
    left, right = (
        side.select("key", *(F.col(name).alias(f"{what}_{name}") for name in names))
        for what, side in (("before", before), ("after", after))
    )
    return left.join(right, "key", "full")


def _lost(removed_rows: DataFrame, other: DataFrame, deletes: DataFrame | None) -> tuple[int, tuple[str, ...]]:
    """The number of rows that are gone without a delete or would become incomplete, and some of their keys."""
    undeleted = removed_rows if deletes is None else removed_rows.join(deletes, F.col("key") == F.col("__key"), "left_anti")
    before, after = (F.get_json_object(name, "$.__incomplete").eqNullSafe("true") for name in ("before_text", "after_text"))
    lost_rows = undeleted.unionByName(other.where(after & ~before))
    count = lost_rows.count()
    keys = lost_rows.select("key").orderBy("key").limit(EXAMPLES).collect() if count else []
    return count, tuple(row.key for row in keys)


def _differences(other: DataFrame, live: DataFrame, rebuilt: DataFrame) -> tuple[ColumnDifference, ...]:
    """The columns in which documents differ, by name."""
    types = dict(live.dtypes), dict(rebuilt.dtypes)
    # In a map of texts the number 5 and the text "5" are equal.
    respelled = [
        name for name, type_ in types[0].items() if name in types[1] and _is_quoted(type_) != _is_quoted(types[1][name])
    ]

    def is_equal(name: Column, left: Column, right: Column) -> Column:
        return left.eqNullSafe(right) & (left.isNull() | ~name.isin(respelled)) if respelled else left.eqNullSafe(right)

    parts = (F.from_json(name, "MAP<STRING, STRING>") for name in ("before_text", "after_text"))
    equalities = F.map_zip_with(*parts, is_equal)
    columns = F.explode(F.map_keys(F.map_filter(equalities, lambda _, is_equal: ~is_equal))).alias("column")
    counts = other.select("key", columns).mapInArrow(_counted, arrow.columns_ddl(_COUNTED)).groupBy("column")
    keys = F.array_sort(F.array_distinct(F.flatten(F.collect_list("keys"))))
    rows = (
        counts.agg(F.sum("documents").alias("documents"), F.slice(keys, 1, EXAMPLES).alias("keys"))
        .orderBy("column")
        .collect()
    )
    return tuple(ColumnDifference(row.column, row.documents, _why(row.column, *types), tuple(row["keys"])) for row in rows)


def _is_quoted(type_: str) -> bool:
    """Whether JSON has values of a type in quotes."""
    return type_ in ("string", "binary", "date", "timestamp", "timestamp_ntz")


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
