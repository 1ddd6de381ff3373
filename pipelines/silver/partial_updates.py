"""Folds partial updates (update events without a document) onto the documents in the table.

With `keep.document` the stored documents of a batch's keys are read, changed by each update as `cdc_core.silver.fold` defines it, and
written whole. The base is the later of the stored document and the range's own. A document that is unknown stays incomplete; when it comes,
the updates since then are read from bronze again. Without `keep.document` an update only marks its row as incomplete.

`reduction.reduced` calls this; batches that skip the steps are folded by `in_process_fold`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.silver import reduce
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier
from pipelines.bronze import survey
from pipelines.delta import query_execution, upsert
from pipelines.silver import batch as batches
from pipelines.silver.batch import RowBatch
from pipelines.silver.collection import SilverCollection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@contextmanager
def folded(collection: SilverCollection, events: DataFrame, batch: RowBatch) -> Iterator[DataFrame]:
    """Reduced rows with partial updates folded onto the stored documents; held in memory until the block ends.

    Computed instead of cached: Spark would plan a cached query again when the table changes.
    """
    keeps_last = batches.keeps_last(collection, batch)
    histories = reduce.histories(events, columns=collection.bronze_columns, keeps_last=keeps_last)
    based_rows = _with_stored(histories, _stored(collection, events, batch))
    with query_execution.held(_folded(based_rows, mode=collection.mode, columns=collection.bronze_columns)) as rows:
        yield rows


def with_awaited(collection: SilverCollection, batch: RowBatch) -> DataFrame:
    """The batch's events and, for late documents of incomplete rows, the later updates of these rows from bronze.

    `batch.rows` itself if no row waits for one of them.
    """
    events = batch.rows
    table = collection.rows().where("`__incomplete`")
    waiting_rows = table.select(F.col("__key").alias("key"), "__sequence", "__known")
    late_documents = (
        events.where("after IS NOT NULL")
        .join(waiting_rows, "key")
        # A document after the row's last event replaces the row, and one from before `__known` changes nothing.
        .where("sequence < `__sequence` AND sequence > coalesce(`__known`, '')")
        .groupBy("key")
        .agg(F.min("sequence").alias("__since"))
    )
    # One value bounds the search, so that older files of bronze are skipped; the join then compares by key.
    oldest_since = late_documents.agg(F.min("__since")).first()[0]
    if oldest_since is None:
        return events
    earlier_updates = collection.events(BatchRange(0, batch.range_.after)).where(reduce.is_partial())
    updates = (
        earlier_updates.where(F.col("sequence") > oldest_since)
        .join(F.broadcast(late_documents), "key")
        .where("sequence > `__since`")
    )
    return events.unionByName(updates.select(*events.columns))


def _stored(collection: SilverCollection, events: DataFrame, batch: RowBatch) -> DataFrame:
    """The table's rows of the events' keys: the document, its sequences and state, and the row's location."""
    table = collection.rows().select("*", *collection.writer.row_locations())
    if batch.keys is not None:
        table = table.where(F.col("__key").between(*batch.keys))
    if batch.counts.events <= survey.MAX_BROADCAST_EVENTS:
        keys = events.select(F.col("key").alias("__key"))
        table = table.join(F.broadcast(keys), "__key", "left_semi")  # so that only these documents are shuffled
    # If the setting is newer than the table, this batch adds the column.
    if "__document" not in table.columns:
        table = table.withColumn("__document", F.lit(None).cast("string"))
    deleted = F.coalesce("__deleted", F.lit(False)) if "__deleted" in table.columns else F.lit(False)
    return table.select(
        F.col("__key").alias("key"),
        F.col("__sequence").alias("stored_sequence"),
        F.coalesce("__known", "__sequence").alias("stored_known"),
        # A deleted document is no base: an update after a delete belongs to another document of this key.
        F.when(~deleted, F.col("__document")).alias("stored_document"),
        deleted.alias("stored_is_deleted"),
        F.coalesce("__incomplete", F.lit(False)).alias("stored_incomplete"),
        *upsert.ROW_LOCATION,
    )


def _with_stored(histories: DataFrame, stored: DataFrame) -> DataFrame:
    """Histories with the base of their updates, and only the updates that the base does not contain.

    `base` is the later of the stored document and the range's own, `base_known` its sequence, `is_doubtful` whether the stored one was
    incomplete. `is_foldable` is false for a row whose document was not kept (it is older than the setting): it can only be marked.
    """
    range_sequence = F.coalesce("sequence", F.lit(""))
    is_whole = F.col("sequence").isNotNull() & ~F.coalesce("is_delete", F.lit(False))
    on_stored = F.coalesce(F.col("stored_known") > range_sequence, F.lit(False)) | (
        F.col("stored_sequence").isNotNull() & F.col("sequence").isNull()
    )
    since = F.when(on_stored, F.col("stored_sequence")).otherwise(range_sequence)
    based_rows = histories.join(stored, "key", "left").withColumns(
        {
            "since": since,
            "base": F.when(on_stored, F.col("stored_document")).when(is_whole, F.col("after")),
            "base_known": F.when(on_stored & ~F.col("stored_is_deleted"), F.col("stored_known"))
            .when(~on_stored & is_whole, range_sequence)
            .otherwise(F.lit("")),
            "is_doubtful": on_stored & F.col("stored_incomplete"),
            "is_foldable": ~on_stored
            | F.col("stored_is_deleted")
            | F.col("stored_document").isNotNull()
            | (F.col("stored_known") == ""),
        }
    )
    later_updates = F.filter("updates", lambda update: update["sequence"] > F.col("since"))
    return based_rows.withColumn("updates", later_updates)


def _folded(placed: DataFrame, *, mode: unwrap_options.DeleteMode, columns: Sequence[str]) -> DataFrame:
    """Rows of `_with_stored` as reduced rows, with the updates folded onto their base if that is known."""
    has_updates = F.coalesce(F.size("updates"), F.lit(0)) > 0
    is_folded = has_updates & F.col("is_foldable")
    prepared = placed.where(has_updates | F.col("sequence").isNotNull()).withColumns(
        {
            "base": F.when(is_folded, F.col("base")),
            "updates": F.when(is_folded, F.col("updates")),
            "sequence": F.when(~has_updates, F.col("sequence")),
            "after": F.when(~has_updates, F.col("after")),
            "partial_sequence": F.when(has_updates, F.col("partial_sequence")),
        }
    )
    extras = ("partial_sequence", "base_known", "is_doubtful")
    reduced = reduce.decided(prepared, mode=mode, columns=(*columns, *extras, *upsert.ROW_LOCATION, "base", "updates"))
    schema = reduced.drop("base", "updates").schema
    ddl = ", ".join(f"{identifier(field.name)} {table_columns.ddl(field.dataType)}" for field in schema)
    folded_rows = reduced.mapInArrow(reduce.fold_rows, f"{ddl}, {reduce.FOLDED_DDL}")
    has_document = F.col("document").isNotNull()
    is_incomplete = F.col("incomplete") | F.col("is_doubtful") | ~has_document
    # A folded document is written like any other, at the last update's sequence; a row without one is only marked.
    values = {
        "__action": F.when(has_document, reduce.Action.DOCUMENT.value).otherwise(reduce.Action.MARK.value),
        "__sequence": F.col("partial_sequence"),
        "__guard": F.when(has_document, F.col("partial_sequence")).otherwise(""),
        "__known": F.when(is_incomplete, F.col("base_known")),
        "__incomplete": is_incomplete,
        "__deleted": F.lit(False),
        "after": F.col("document"),
    }
    was_folded = F.col("incomplete").isNotNull()
    final_values = {name: F.when(was_folded, value).otherwise(F.col(name)) for name, value in values.items()}
    return folded_rows.withColumns(final_values).drop(*extras, "document", "incomplete")
