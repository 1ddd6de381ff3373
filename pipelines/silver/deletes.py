"""The deletes that a collection's table remembers: a document that was deleted does not come back with a late event.

Where a delete takes the row away, the table itself no longer says that the key had one. So the delete is noted in a table of its own,
and events that come late are compared with it (`not_resurrected`).

A *delete* that comes late removes no newer row, by the guard of the MERGE: `cdc_core.silver.merge`. `ranges` sends every batch with late
events there (`_is_late`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from pipelines.bronze import registry, survey
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.silver import batch as batches
from pipelines.silver import tables as silver_tables
from pipelines.silver.batch import Deletes, RowBatch
from pipelines.silver.collection import SilverCollection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


FACTS = ("__key", "__sequence", "__batch")
"""The columns of the remembered deletes."""


def last_deletes(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> Deletes | None:
    """The last delete of each key, from bronze's narrow columns; None where deletes do nothing, or there is none."""
    if not counts.deletes or collection.mode.keeps_row:
        return None
    # Whether something came after a delete does not matter: later events of its key are newer than it, and pass.
    deletes = events.where(f"op = '{bronze.Op.DELETE.value}'").groupBy(F.col("key").alias("__key"))
    return Deletes(deletes.agg(F.max("sequence").alias("__sequence")), counts.deletes)


def not_resurrected(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: the events that are later than their key's remembered delete.

    A delete that is remembered stays in: it may be remembered and not yet applied.
    """
    if not batch.is_late:  # then every event is later than anything that the table has seen
        return batch
    if not delta.exists(collection.spark, collection.deletes):
        return batch
    # Of the batch's keys alone: a table of millions of deletes would be sorted for a handful of late events. And of these a delete from
    # before all of them takes none: of what a year has deleted, a snapshot's chunk, which is late by seconds, reads the last files.
    later = collection.spark.table(str(collection.deletes)).where(F.col("__sequence") >= batch.counts.low)
    table = later.join(batches.keys(batch.rows, batch.counts), "__key", "left_semi")
    deleted = table.groupBy("__key").agg(F.max("__sequence").alias("__deleted_at"))
    joined = batch.rows.join(deleted, F.col("key") == F.col("__key"), "left")
    is_delete = F.col("op") == bronze.Op.DELETE.value
    is_alive = F.col("__deleted_at").isNull() | (F.col("sequence") > F.col("__deleted_at"))
    return replace(batch, rows=joined.where(is_delete | is_alive).drop("__key", "__deleted_at"))


def remembered(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: deletes that take rows away are noted before the rows go."""
    if batch.deletes is not None and collection.mode.removes_row:
        remember(collection, batch.deletes, batch.number)
    return batch


def remember_rows(collection: SilverCollection, deleted_at: Mapping[str, str], number: int) -> None:
    """Append deletes, given as keys with the sequence of the last one each, before their rows go."""
    silver_tables.create_deletes(collection.spark, collection.deletes)
    columns = [pa.array(deleted_at.keys(), pa.string()), pa.array(deleted_at.values(), pa.string())]
    facts = pa.table([*columns, pa.array([number] * len(deleted_at), pa.int64())], names=FACTS)
    ops_tables.append_rows(collection.spark, collection.deletes, facts, statistics=FACTS)
    collection.remembered = registry.deletes_version(collection.deletes)


@contextmanager
def remembering(collection: SilverCollection, deleted_at: Mapping[str, str], number: int) -> Iterator[None]:
    """`remember_rows` beside what is done within, where deletes take rows away; they are remembered when it ends.

    A collection's first delete makes a table, which keeps the JVM busy for a second.
    """
    if not deleted_at or not collection.mode.removes_row:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="medallion-deletes") as pool:
        remembered_rows = pool.submit(remember_rows, collection, deleted_at, number)
        yield
        remembered_rows.result()


def remember(collection: SilverCollection, deletes: Deletes, number: int) -> None:
    """Append the deletes, before the MERGE, so that a crash in between forgets none."""
    silver_tables.create_deletes(collection.spark, collection.deletes)
    facts = deletes.rows.select("__key", "__sequence", F.lit(number).cast("bigint").alias("__batch"))
    # Without a fence, unlike the rows of documents: a delete stays true, however often and by whomever it is noted.
    if deletes.events > survey.MAX_DRIVER_ROWS:
        facts.writeTo(str(collection.deletes)).append()
    else:
        ops_tables.append_rows(collection.spark, collection.deletes, facts.toArrow(), statistics=FACTS)
    collection.remembered = registry.deletes_version(collection.deletes)
