"""Each layer's backlog in bronze, and recent rates, from narrow columns of bronze: read in this process if it can, else by a query."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from cdc_core.bronze import collection_ends
from cdc_core.bronze import columns as bronze
from cdc_core.sql.names import literal
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows, registry, survey
from pipelines.bronze import log as bronze_log

MANY_ROWS = 5_000_000
"""More rows than this are counted by Spark's executors."""


class Backlog(NamedTuple):
    """The backlog of one layer of a collection: events, their batches, and the oldest event's time in milliseconds since 1970; `done`
    counts the events that it applied lately. A drop and a rename, which end all rows, count as events."""

    events: int = 0
    batches: int = 0
    since: int | None = None
    done: int = 0


Bounds = Sequence[tuple[int, int]]
"""For each layer its table's position some time ago and its position now, as bronze batches."""


def captured_rate(
    spark: SparkSession, log: tables.TableRef, batch: int, *, within_seconds: int, within_batches: int
) -> float | None:
    """Document events per second, in the seconds before the newest row of `batch`, the last one; None if there are too few.

    Limited by batches, too: files are skipped by batch, and a limit on `ts_ms` alone would read all of bronze.
    """
    after, columns = batch - within_batches, ["kind", "batch", "ts_ms"]
    rows = batch_rows.behind(log, after, columns, limit=MANY_ROWS)
    if rows is None:
        row = spark.sql(
            f"""SELECT count(*) AS events, min(ts_ms) AS first, max(ts_ms) AS last FROM {log}
                WHERE {bronze_log.DOCUMENT_EVENTS} AND batch > {after}
                  AND ts_ms >= (SELECT max(ts_ms) FROM {log} WHERE batch = {batch}) - {within_seconds * 1000}"""
        ).collect()[0]
        events, first, last = row.events, row.first, row.last
    else:
        newest_ms = pc.max(rows.filter(pc.equal(rows["batch"], batch))["ts_ms"]).as_py() or 0
        times = rows.filter(survey.are_of_documents(rows))["ts_ms"]
        times = times.filter(pc.greater_equal(times, newest_ms - within_seconds * 1000))
        events, (first, last) = len(times), pc.min_max(times).as_py().values()
    return events / ((last - first) / 1000) if events and last > first else None


def collections(spark: SparkSession, log: tables.TableRef, after: int) -> set[registry.Namespace]:
    """The collections with document events after the batch `after`."""
    rows = batch_rows.behind(log, after, ["kind", "db", "collection"], limit=MANY_ROWS)
    if rows is None:
        found = spark.sql(
            f"SELECT DISTINCT db, collection FROM {log} WHERE {bronze_log.DOCUMENT_EVENTS} AND batch > {after}"
        ).collect()
        return {registry.Namespace(row.db, row.collection) for row in found}
    names = rows.filter(survey.are_of_documents(rows)).group_by(["db", "collection"]).aggregate([])
    return {registry.Namespace(**row) for row in names.to_pylist()}


def of_layers(
    spark: SparkSession, log: tables.TableRef, bounds: Mapping[registry.Namespace, Bounds]
) -> Mapping[registry.Namespace, Sequence[Backlog]]:
    """The backlog of each layer, for each collection with events after its bounds: bronze is read once for all of them."""
    if not bounds:
        return {}
    after = min(batch for pairs in bounds.values() for pair in pairs for batch in pair)
    rows = batch_rows.behind(log, after, ["kind", "db", "collection", "batch", "ts_ms", "payload"], limit=MANY_ROWS)
    if rows is None:
        return _by_query(spark, log, after, bounds)
    is_end = pc.equal(rows["kind"], bronze.RowKind.SCHEMA_CHANGE.value)
    has_end_payload = functools.reduce(
        pc.or_kleene, (pc.starts_with(rows["payload"], start) for start in collection_ends.PAYLOAD_STARTS)
    )
    is_counted = pc.or_(survey.are_of_documents(rows), pc.fill_null(pc.and_kleene(is_end, has_end_payload), False))
    return _counted_here(rows.filter(is_counted), bounds)


def _counted_here(events: pa.Table, bounds: Mapping[registry.Namespace, Bounds]) -> dict[registry.Namespace, list[Backlog]]:
    indices = survey.places(events, bounds)
    events, indices = events.filter(pc.is_valid(indices)), indices.drop_null().combine_chunks()
    backlogs: dict[registry.Namespace, list[Backlog]] = {}
    for layer in zip(*bounds.values()):  # (from, to) of each collection
        before, to = (pa.array(each, pa.int64()).take(indices) for each in zip(*layer))
        batch, is_waiting = events["batch"], pc.greater(events["batch"], to)
        is_done = pc.and_(pc.greater(batch, before), pc.invert(is_waiting))
        table = pa.table(
            {
                "place": indices,
                "events": is_waiting.cast(pa.int64()),
                "batches": pc.if_else(is_waiting, batch, None),
                "since": pc.if_else(is_waiting, events["ts_ms"], None),
                "done": is_done.cast(pa.int64()),
            }
        )
        grouped = table.group_by("place").aggregate(
            [("events", "sum"), ("batches", "count_distinct"), ("since", "min"), ("done", "sum")]
        )
        namespaces = [*bounds]
        for index, *counts in zip(*(column.to_pylist() for column in grouped.columns)):
            backlogs.setdefault(namespaces[index], []).append(Backlog(*counts))
    return backlogs


def _by_query(
    spark: SparkSession, log: tables.TableRef, after: int, bounds: Mapping[registry.Namespace, Bounds]
) -> dict[registry.Namespace, list[Backlog]]:
    # Join a table of bounds, instead of a condition per collection: the plan stays small with hundreds of collections.
    layers = range(len(next(iter(bounds.values()))))
    names = ", ".join(f"from_{layer}, to_{layer}" for layer in layers)
    values = ", ".join(
        f"({literal(namespace.db)}, {literal(namespace.collection)}, {', '.join(str(at) for pair in pairs for at in pair)})"
        for namespace, pairs in bounds.items()
    )
    begins = " OR ".join(f"payload LIKE {literal(each + '%')}" for each in collection_ends.PAYLOAD_STARTS)
    is_end = f"(kind = {literal(bronze.RowKind.SCHEMA_CHANGE.value)} AND ({begins}))"
    rows = spark.sql(
        f"""SELECT db, collection, {", ".join(map(_counted, layers))}
            FROM {log} JOIN (SELECT * FROM VALUES {values}
                 AS bounds(db, collection, {names})) USING (db, collection)
            WHERE ({bronze_log.DOCUMENT_EVENTS} OR {is_end}) AND batch > {after}
            GROUP BY db, collection"""
    ).collect()
    return {
        registry.Namespace(row.db, row.collection): [
            Backlog(*(row[f"{name}_{layer}"] for name in Backlog._fields)) for layer in layers
        ]
        for row in rows
    }


def _counted(layer: int) -> str:
    """The fields of a `Backlog` as SQL columns."""
    waits = f"batch > to_{layer}"
    return (
        f"count_if({waits}) AS events_{layer}, count(DISTINCT IF({waits}, batch, NULL)) AS batches_{layer}, "
        f"min(IF({waits}, ts_ms, NULL)) AS since_{layer}, "
        f"count_if(batch > from_{layer} AND batch <= to_{layer}) AS done_{layer}"
    )
