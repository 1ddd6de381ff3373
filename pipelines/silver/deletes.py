"""The remembered deletes of a collection: a late event does not bring a deleted document back.

After a delete has removed its row, the table itself has no trace of it. So the delete is stored in a table of its own, and late events are
compared with that (`not_resurrected`).

A late *delete* removes no newer row because of the guard of the MERGE (`cdc_core.silver.merge`), to which `ranges` sends each batch with
late events (`_is_late`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from pipelines.bronze import registry, survey
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.silver import batch as batches
from pipelines.silver import tables as silver_tables
from pipelines.silver.batch import Deletes, RowBatch
from pipelines.silver.collection import SilverCollection


def last_deletes(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> Deletes | None:
    """The last delete of each key, from bronze's narrow columns; None if there are no deletes, or the mode keeps rows."""
    if not counts.deletes or collection.mode.keeps_row:
        return None
    # Also if events follow the delete: they are newer than it, and pass the comparison.
    deletes = events.where(f"op = '{bronze.Op.DELETE.value}'").groupBy(F.col("key").alias("__key"))
    return Deletes(deletes.agg(F.max("sequence").alias("__sequence")), counts.deletes)


def not_resurrected(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: drops the events that are older than their key's remembered delete.

    Deletes stay, also those that are remembered: they may not be applied yet.
    """
    if not batch.is_late:  # then every event is newer than all that the table has seen
        return batch
    if not delta.exists(collection.spark, collection.deletes):
        return batch
    # Only the batch's keys, and only deletes that are not older than all of the batch: for a handful of late events, or a snapshot's chunk
    # that is late by seconds, a table of millions of deletes is neither sorted nor read whole.
    newer_deletes = collection.spark.table(str(collection.deletes)).where(F.col("__sequence") >= batch.counts.low)
    batch_deletes = newer_deletes.join(batches.keys(batch.rows, batch.counts), "__key", "left_semi")
    latest_deletes = batch_deletes.groupBy("__key").agg(F.max("__sequence").alias("__deleted_at"))
    rows = batch.rows.join(latest_deletes, F.col("key") == F.col("__key"), "left")
    is_delete = F.col("op") == bronze.Op.DELETE.value
    is_alive = F.col("__deleted_at").isNull() | (F.col("sequence") > F.col("__deleted_at"))
    return replace(batch, rows=rows.where(is_delete | is_alive).drop("__key", "__deleted_at"))


def remembered(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: stores deletes that remove rows, before the rows are removed, so that a crash in between loses none."""
    if batch.deletes is None or not collection.mode.removes_row:
        return batch
    silver_tables.create_deletes(collection.spark, collection.deletes)
    facts = batch.deletes.rows.select("__key", "__sequence", F.lit(batch.number).cast("bigint").alias("__batch"))
    # Without a fence, unlike documents: a delete stays true, whoever stores it and however often.
    if batch.deletes.events > survey.MAX_DRIVER_ROWS:
        ops_tables.append(facts, collection.deletes)
        collection.remembered = registry.deletes_version(collection.spark, collection.deletes)
    else:
        _append(collection, facts.toArrow())
    return batch


def remember_rows(collection: SilverCollection, deleted_at: Mapping[str, str], number: int) -> None:
    """Store deletes, given as each key's last sequence, before their rows are removed."""
    silver_tables.create_deletes(collection.spark, collection.deletes)
    columns = [pa.array(deleted_at.keys(), pa.string()), pa.array(deleted_at.values(), pa.string())]
    facts = pa.table([*columns, pa.array([number] * len(deleted_at), pa.int64())], names=[*silver_tables.DELETES])
    _append(collection, facts)


@contextmanager
def remembering(collection: SilverCollection, deleted_at: Mapping[str, str], number: int) -> Iterator[None]:
    """Runs `remember_rows` in a thread beside the block, if deletes remove rows; the deletes are stored when the block ends.

    The first delete of a collection creates a table, for which the JVM needs a second.
    """
    if not deleted_at or not collection.mode.removes_row:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="medallion-deletes") as pool:
        future = pool.submit(remember_rows, collection, deleted_at, number)
        yield
        future.result()


def _append(collection: SilverCollection, facts: pa.Table) -> None:
    version = ops_tables.append_rows(collection.spark, collection.deletes, facts, statistics=[*silver_tables.DELETES])
    # Over Spark Connect this process reads the version of a table on a disk, although Spark appends.
    collection.remembered = registry.deletes_version(collection.spark, collection.deletes) if version is None else version
