"""Surveys a span of bronze's batches: the events of each collection, and the sweeps.

A survey reads bronze's narrow columns and no documents. It decides which collections have work, and where a long span is cut into
ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from cdc_core.bronze import batch_range, collection_ends
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep, SweepCause
from cdc_core.settings.parse import OnGone
from cdc_core.sql.names import literal
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows, registry
from pipelines.bronze import log as bronze_log
from pipelines.delta import local_log

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from cdc_core.settings.parse import CollectionSettings

MAX_DRIVER_ROWS = 20_000
"""The number of rows up to which this process reads and writes them, without a Spark job."""

MAX_SURVEYED_ROWS = 1_000_000
"""The number of rows up to which this process surveys them: it reads only their narrow columns."""

MAX_SURVEYED_BYTES = 256 * 2**20

MAX_BROADCAST_EVENTS = 2_000_000
"""The number of events up to which the winners' offsets are broadcast; with more, the documents are shuffled."""

# LIKE also matches heartbeats that end no snapshot: `collection_ends.of_heartbeats` parses those few.
_CALLS_FOR_SWEEP = (
    """(kind = 'heartbeat' AND payload LIKE '%"completed"%') OR (kind = 'schema_change' AND sequence IS NOT NULL)"""
)


@dataclass(frozen=True)
class EventCounts:
    """The events of one collection in a range: their number, and the least and greatest sequence and key.

    What is no sequence does not count as one: as the greatest that a table has seen, it would make all later events late, for ever.
    """

    events: int = 0
    deletes: int = 0
    low: str = ""
    high: str = ""
    first_key: str = ""
    last_key: str = ""


def surveyed(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    span: BatchRange,
    *,
    only: registry.Namespace | None = None,
    starts: Mapping[registry.Namespace, int] = {},
) -> tuple[dict[registry.Namespace, EventCounts], tuple[Sweep, ...]]:
    """The event counts of each collection, or of `only` one, in a span of batches, and their sweeps, in order.

    For the collections in `starts`, only events after that batch are counted. One query for any number of collections, and none for a
    few rows in files that this process can read.
    """
    # For a small span a Spark query takes longer than reading the files.
    rows_here = batch_rows.few_rows(
        spark, bronze_table, span, SURVEYED, limit=MAX_SURVEYED_ROWS, size_bytes=MAX_SURVEYED_BYTES
    )
    if rows_here is not None:
        return _surveyed_here(rows_here, only, starts)
    condition = "true" if only is None else only.predicate
    rows = batch_rows.rows(spark, bronze_table, span).where(
        f"({bronze_log.DOCUMENT_EVENTS} AND {condition}) OR {_CALLS_FOR_SWEEP}"
    )
    is_event = F.expr(bronze_log.DOCUMENT_EVENTS)
    if starts:
        # A collection that failed or runs ahead has a position inside the span, after which its events count. As a table and not as
        # a condition, which takes minutes with thousands of collections.
        starts_table = pa.Table.from_pylist([{**namespace._asdict(), "start": start} for namespace, start in starts.items()])
        rows = rows.join(F.broadcast(spark.createDataFrame(starts_table)), ["db", "collection"], "left")
        rows = rows.where(~is_event | F.col("start").isNull() | (F.col("batch") > F.col("start")))
    sweep_rows = F.struct(*SWEEP_ROW)
    groups = (
        rows.groupBy(is_event.alias("is_event"), "db", "collection")
        .agg(*_counting(), F.collect_list(F.when(~is_event, sweep_rows)).alias("sweep_rows"))
        .collect()
    )
    counts = {registry.Namespace(row.db, row.collection): _counts(row.asDict()) for row in groups if row.is_event}
    # collect_list has no order, and the first heartbeat of a completed collection counts.
    return counts, _sweeps(sorted((each for row in groups for each in row.sweep_rows), key=lambda each: each.offset), only)


def counts_of(
    spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace, span: BatchRange
) -> EventCounts:
    """The event counts of one collection in a span of batches."""
    counts, _ = surveyed(spark, bronze_table, span, only=namespace)
    return counts.get(namespace, EventCounts())


SWEEP_ROW = batch_rows.SweepRow._fields
SURVEYED = ("offset", "kind", "batch", "db", "collection", "sequence", "key", "op", "payload")
"""The columns of bronze that a survey reads."""


def _surveyed_here(
    rows: pa.Table, only: registry.Namespace | None, starts: Mapping[registry.Namespace, int]
) -> tuple[dict[registry.Namespace, EventCounts], tuple[Sweep, ...]]:
    """`surveyed` for rows that this process has read."""
    is_event = are_of_documents(rows)
    other_rows = rows.filter(pc.invert(is_event)).select(SWEEP_ROW).to_pylist()
    sweep_rows = [batch_rows.SweepRow(**row) for row in other_rows if _calls_for_sweep(row)]
    counts = _counted_here(_wanted_events(rows.filter(is_event), only, starts))
    return counts, _sweeps(sorted(sweep_rows, key=lambda each: each.offset), only)


def _wanted_events(events: pa.Table, only: registry.Namespace | None, starts: Mapping[registry.Namespace, int]) -> pa.Table:
    """The events of one collection or of all, each collection's after its start."""
    if only is not None:
        events = events.filter(_is_of(events, only))
    if not starts:
        return events
    start = pa.array(starts.values(), pa.int64()).take(places(events, starts).combine_chunks())
    return events.filter(pc.fill_null(pc.greater(events["batch"], start), True))


def places(events: pa.Table, of: Iterable[registry.Namespace]) -> pa.ChunkedArray:
    """The index of each event's collection in `of`; null for any other. Vectorized, because there may be thousands."""
    names = pc.binary_join_element_wise(events["db"], events["collection"], _BETWEEN)
    return pc.index_in(names, value_set=pa.array(map(_BETWEEN.join, of), pa.string()))


_BETWEEN = "\0"
"""A character that names of databases and collections cannot contain."""


def _is_of(events: pa.Table, namespace: registry.Namespace) -> pa.ChunkedArray:
    return pc.and_(pc.equal(events["db"], namespace.db), pc.equal(events["collection"], namespace.collection))


def _calls_for_sweep(row: Mapping[str, Any]) -> bool:
    """`_CALLS_FOR_SWEEP` for one row."""
    if row["kind"] == bronze.RowKind.HEARTBEAT.value:
        return '"completed"' in (row["payload"] or "")
    return row["kind"] == bronze.RowKind.SCHEMA_CHANGE.value and row["sequence"] is not None


def _counted_here(events: pa.Table) -> dict[registry.Namespace, EventCounts]:
    """The counts by collection. Arrow compares strings by their UTF-8 bytes, as Spark does."""
    is_delete = pc.fill_null(pc.equal(events["op"], bronze.Op.DELETE.value), False).cast(pa.int64())
    sequence = pc.if_else(pc.match_substring_regex(events["sequence"], bronze.SEQUENCE), events["sequence"], None)
    events = events.set_column(events.column_names.index("sequence"), "sequence", sequence)
    aggregates = [("is_delete", "count"), ("is_delete", "sum")]
    aggregates += [(column, bound) for column in ("sequence", "key") for bound in ("min", "max")]
    grouped = events.append_column("is_delete", is_delete).group_by(["db", "collection"]).aggregate(aggregates)
    return {
        registry.Namespace(row["db"], row["collection"]): EventCounts(
            row["is_delete_count"],
            row["is_delete_sum"],
            *(row[f"{column}_{bound}"] or "" for column in ("sequence", "key") for bound in ("min", "max")),
        )
        for row in grouped.to_pylist()
    }


def are_of_documents(rows: pa.Table) -> pa.ChunkedArray:
    """Which rows are document events: `bronze_log.DOCUMENT_EVENTS` for an Arrow table."""
    return pc.is_in(rows["kind"], value_set=pa.array(bronze.DOCUMENT_KINDS))


@dataclass(frozen=True)
class EventsByBatch:
    """Each batch, in order, with its number of events of one collection, and the average bytes of an event's documents and changes."""

    events: Sequence[tuple[int, int]]
    row_bytes: int


_DOCUMENTS = ("before", "after", "updateDescription")


def by_batch(
    spark: SparkSession, bronze_table: tables.TableRef, of: registry.Namespace, span: BatchRange
) -> EventsByBatch | None:
    """The events of a collection by batch; None where this process cannot read all files of the span."""
    among = {"db": of.db, "collection": of.collection}
    files = batch_rows.here(spark, bronze_table, span, among)
    size_bytes = batch_rows.bytes_of(files, _DOCUMENTS)
    if not files or size_bytes is None:
        return None
    batch_counts: Counter[int] = Counter()
    row_count = 0
    for file in files:  # One by one: a long span has many rows.
        rows = batch_rows.of_file(file, ("batch", "kind", *among), among)
        if rows is None:
            return None
        batch_counts.update(rows["batch"].filter(are_of_documents(rows)).to_pylist())
        row_count += file.stats.get("numRecords") or rows.num_rows
    return EventsByBatch(sorted(batch_counts.items()), size_bytes // max(1, row_count))


def are_large(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    of: registry.Namespace,
    span: BatchRange,
    *,
    events: int,
    file_bytes: int,
    size_bytes: int,
) -> bool:
    """Whether the files of a collection's `events` have more than `file_bytes`, and the events' documents more than `size_bytes`, by the files'
    average; false where this process cannot read all of them.

    Only from the log and the files' ends: thousands of collections may have a few events each in the same files.
    """
    files = batch_rows.here(spark, bronze_table, span, {"db": of.db, "collection": of.collection})
    if sum(file.size or 0 for file in files) <= file_bytes:
        return False
    row_count = sum(file.stats.get("numRecords") or 0 for file in files)
    return events * (batch_rows.bytes_of(files, _DOCUMENTS) or 0) > size_bytes * row_count


def sweeps(
    spark: SparkSession, bronze_table: tables.TableRef, span: BatchRange, *, among: Sequence[registry.Namespace]
) -> tuple[Sweep, ...]:
    """The sweeps for drops and renames of these collections in a span of batches."""
    folder, kind = local_log.folder(bronze_table), bronze.RowKind.SCHEMA_CHANGE
    rows = None if folder is None else batch_rows.of_kinds(folder, [*SWEEP_ROW], kind, limit=MAX_SURVEYED_ROWS)
    if rows is not None:
        is_own = pc.and_(pc.is_valid(rows["sequence"]), pc.is_valid(places(rows, among)))
        is_in = pc.and_(pc.greater(rows["batch"], span.after), pc.less_equal(rows["batch"], span.to))
        chosen_rows = rows.filter(pc.and_(is_own, is_in)).sort_by("offset")
        return _sweeps([batch_rows.SweepRow(**row) for row in chosen_rows.to_pylist()])
    namespace_table = spark.createDataFrame(pa.Table.from_pylist([each._asdict() for each in among]))
    is_gone = f"kind = {literal(bronze.RowKind.SCHEMA_CHANGE.value)} AND sequence IS NOT NULL"
    change_rows = batch_rows.rows(spark, bronze_table, span).where(is_gone)
    sweep_rows = change_rows.join(F.broadcast(namespace_table), ["db", "collection"], "left_semi").orderBy("offset")
    return _sweeps(sweep_rows.select("kind", "batch", "db", "collection", "sequence", "payload").collect())


def _counting() -> list[Column]:
    sequence = F.when(F.col("sequence").rlike(bronze.SEQUENCE), F.col("sequence"))
    return [
        F.count("*").alias("events"),
        F.count_if(F.col("op") == bronze.Op.DELETE.value).alias("deletes"),
        F.min(sequence).alias("low"),
        F.max(sequence).alias("high"),
        F.min("key").alias("first_key"),
        F.max("key").alias("last_key"),
    ]


def _counts(row: dict[str, Any]) -> EventCounts:
    return EventCounts(
        row["events"], row["deletes"], *(row[name] or "" for name in ("low", "high", "first_key", "last_key"))
    )


def events(spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace, span: BatchRange) -> DataFrame:
    """One collection's events in a span of batches, in no order."""
    # `among` skips whole files, the predicate filters rows: a file holds many collections.
    among = {"db": namespace.db, "collection": namespace.collection}
    return batch_rows.rows(spark, bronze_table, span, among=among).where(
        f"{bronze_log.DOCUMENT_EVENTS} AND {namespace.predicate}"
    )


def bounded(of: DataFrame, *, span: BatchRange, limit: int) -> tuple[BatchRange, ...]:
    """The span cut into ranges of at most `limit` of these events, or of one batch."""
    # Never inside a batch, because a position is a whole batch.
    batches = of.groupBy("batch").count().orderBy("batch").toArrow()  # A log has millions of batches.
    return batch_range.ranges(zip(*(column.to_pylist() for column in batches.columns)), span=span, limit=limit)


def _sweeps(rows: Sequence[Row | batch_rows.SweepRow], only: registry.Namespace | None = None) -> tuple[Sweep, ...]:
    """The sweeps of these rows: ends of snapshots, drops and renames, of all collections or `only` one."""
    ends = collection_ends.of_heartbeats(
        (row.batch, row.payload) for row in rows if row.kind == bronze.RowKind.HEARTBEAT.value
    )
    changes = collection_ends.of_schema_changes(
        (row.batch, row.db, row.collection, row.sequence, row.payload)
        for row in rows
        if row.kind == bronze.RowKind.SCHEMA_CHANGE.value and row.collection is not None
    )
    wanted = (each for each in (*ends, *changes) if only is None or each.db_collection == str(only))
    return tuple(sorted(wanted, key=lambda sweep: sweep.batch))


def sweeps_to_apply(sweeps: Iterable[Sweep], options: CollectionSettings) -> list[Sweep]:
    """The sweeps, without those whose rows `collection.drop.handling.mode` or `collection.rename.handling.mode` keeps."""
    handling = {SweepCause.DROP: options.on_drop, SweepCause.RENAME: options.on_rename}
    return [sweep for sweep in sweeps if handling.get(sweep.cause) is not OnGone.KEEP]


def old_events(last: Mapping[registry.Namespace, int], before: int) -> str:
    """The events from before a time (ms since 1970), and before a batch of each collection, as a SQL condition over bronze."""
    if not last:
        return "false"
    # A map and not a condition per collection: Spark takes half a minute to plan thousands of terms.
    batches = ", ".join(f"{literal(str(namespace))}, {batch}" for namespace, batch in last.items())
    condition = f"batch < {max(last.values())} AND batch < element_at(map({batches}), concat(db, '.', collection))"
    return f"{bronze_log.DOCUMENT_EVENTS} AND ts_ms < {before} AND {condition}"
