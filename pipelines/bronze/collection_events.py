"""The events of one collection in a range of batches, in order, read by this process without Spark."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from cdc_core.bronze import batch_range
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.silver import reduce
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows, registry, survey
from pipelines.delta import live_files
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_EVENTS = 250_000
"""The events that this process applies at once without Spark; with more, Spark is faster, even with compiling its first plan."""

SPAN_EVENTS = 10_000_000
"""The events that this process applies range by range without Spark, with up to `FEW_CORES`; with more Spark is faster (`span_events`)."""

FEW_CORES = 8

PORTION_EVENTS = 100_000
"""The events of such a range, which bound its memory together with `PORTION_BYTES`. With fewer, the data files would be so small
that they would need compaction."""

PORTION_BYTES = 128 * 2**20

LARGE_FILE_BYTES = PORTION_BYTES // 8
"""The bytes of a span's files from which on fewer events may be too large for one range: documents are several times as large as in
files."""

MANY_BYTES = 384 * 2**20
"""The bytes of documents above which Spark reads them: this process holds them as text and as columns, a gigabyte at most."""

_READ = ("kind", "db", "collection", "key", "sequence", "offset", "op", "after")
_OPS = pa.array([each.value for each in bronze.Op])


def span_events(spark: SparkSession) -> int:
    """The most events that this process applies range by range; more are left to Spark, with this machine's many cores or its executors."""
    has_few_cores = (os.cpu_count() or 1) <= FEW_CORES and sparks.is_local(spark)
    return SPAN_EVENTS if has_few_cores else LOCAL_EVENTS


def by_batch(
    spark: SparkSession,
    table: tables.TableRef,
    namespace: registry.Namespace,
    span: BatchRange,
    *,
    events: int,
    many: int,
) -> survey.EventsByBatch | None:
    """The collection's events of the span by batch, if they are more than `many` or large, so that this process applies them range by
    range; None for one range, and where they are left to Spark."""
    if events > span_events(spark):
        return None
    is_long = events > many
    if not is_long and span.to - span.after > 1:
        is_long = survey.are_large(
            spark, table, namespace, span, events=events, file_bytes=LARGE_FILE_BYTES, size_bytes=PORTION_BYTES
        )
    return survey.by_batch(spark, table, namespace, span) if is_long else None


def in_order(
    spark: SparkSession,
    table: tables.TableRef,
    namespace: registry.Namespace,
    range_: BatchRange,
    columns: Sequence[str],
    *,
    limit: int,
    size_bytes: int,
) -> pa.Table | None:
    """The events in order of `sequence` and `offset`, with these columns and `_READ`; None where this process cannot read them, or
    where the range's files have more than `limit` rows or `size_bytes`."""
    names = list(dict.fromkeys((*_READ, *columns)))
    among = {"db": namespace.db, "collection": namespace.collection}
    rows = batch_rows.few_rows(spark, table, range_, names, limit=limit, size_bytes=size_bytes, among=among)
    if rows is None:
        return None
    order = pc.sort_indices(rows.select(["sequence", "offset"]), [("sequence", "ascending"), ("offset", "ascending")])
    events = _taken(rows, order.filter(survey.are_of_documents(rows).combine_chunks().take(order)))
    return events.combine_chunks()  # Once here, for all callers that need columns as single arrays.


def _taken(rows: pa.Table, places: pa.Array) -> pa.Table:
    """The rows of these places; the same table, without a copy of its documents, where they are all rows in order."""
    return rows if places.equals(pa.array(range(rows.num_rows), places.type)) else rows.take(places)


def has_partial(
    spark: SparkSession, table: tables.TableRef, namespace: registry.Namespace, span: BatchRange, *, is_last: bool
) -> bool:
    """Whether an event of a span, or with `is_last` the last event of a document in it, is an update without its document."""
    limit, size_bytes = survey.MAX_DRIVER_ROWS, batch_rows.MANY_BYTES
    events_here = in_order(spark, table, namespace, span, (), limit=limit, size_bytes=size_bytes)
    if events_here is not None:
        partial_flags = reduce.are_partial(events_here).to_pylist()
        return any(dict(zip(events_here["key"].to_pylist(), partial_flags)).values() if is_last else partial_flags)
    events = survey.events(spark, table, namespace, span).select("key", "sequence", reduce.is_partial().alias("is_partial"))
    if is_last:
        events = events.groupBy("key").agg(F.max_by("is_partial", "sequence").alias("is_partial"))
    return not events.where("is_partial").isEmpty()


def are_readable(events: pa.Table) -> bool:
    """Whether no event would be quarantined: each is a delete, a partial update, or has a whole document."""
    op, after = events["op"], events["after"]
    is_document = pc.and_(pc.starts_with(after, "{"), pc.ends_with(after, "}"))
    is_document = pc.or_kleene(is_document, reduce.are_partial(events))
    conditions = (
        pc.is_valid(events["key"]),
        pc.match_substring_regex(events["sequence"], bronze.SEQUENCE),
        pc.is_in(op, value_set=_OPS),
        pc.or_(pc.equal(op, bronze.Op.DELETE.value), pc.fill_null(is_document, False)),
    )
    return all(pc.all(pc.fill_null(each, False), min_count=0).as_py() for each in conditions)


def value(events: pa.Table, path: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    """The values at a path of bronze's columns, for `add.fields`; nulls for an empty path. Structs, and arrays of them, are the text that
    Spark's `to_json` writes."""
    if not path:
        return pa.nulls(events.num_rows, pa.string())
    column = events[path[0]]
    found = pc.struct_field(column, path[1:]) if len(path) > 1 else column
    inner = found.type.value_type if pa.types.is_list(found.type) else found.type
    if not pa.types.is_struct(inner):
        return found
    return pa.array([None if value is None else _json(value) for value in found.to_pylist()], pa.string())


def _json(value: object) -> str:
    text = orjson.dumps(_without_nulls(value)).decode()
    # Spark's writer has capitals for the codes of control characters.
    return _CODE.sub(lambda code: code[0][:2] + code[0][2:].upper(), text) if "\\u00" in text else text


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return value


_CODE = re.compile(r"\\(?:u00..|.)")


def portions(
    counts: survey.EventsByBatch, span: BatchRange, *, most: int, row_bytes: int = 0, looked_through: int = 0
) -> Sequence[BatchRange] | None:
    """The span in ranges that this process applies one after the other, with documents of about `row_bytes`; None for one range.

    Each range searches `looked_through` rows for its keys, which Spark does once for all: also None where that is too many.
    """
    limit = min(PORTION_EVENTS, max(1, PORTION_BYTES // max(1, row_bytes, counts.row_bytes)), most)
    events = sum(count for _, count in counts.events)
    if events <= limit or looked_through * (events // limit + 1) > live_files.MANY_ROWS:
        return None
    return batch_range.ranges(counts.events, span=span, limit=limit)
