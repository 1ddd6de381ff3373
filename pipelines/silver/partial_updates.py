"""Folds partial updates (update events without a document) onto the documents in the table.

With `keep.document` the stored documents of a batch's keys are read, changed by each update as `cdc_core.silver.fold` defines it, and
written whole. The base is the later of the stored document and the range's own. A document that is unknown stays incomplete; when it comes,
the updates since then are read from bronze again. So are those of a document that a snapshot has read before them and that comes after
them: changes before it may have been lost, and the stored document lacks them. Without `keep.document` an update only marks its row as
incomplete.

`reduction.reduced` calls this; batches that skip the steps are folded by `in_process_fold`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.silver import reduce
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier
from pipelines.bronze import quarantine_table, survey
from pipelines.delta import query_execution, upsert
from pipelines.silver import batch as batches
from pipelines.silver.batch import RowBatch
from pipelines.silver.collection import SilverCollection


class AwaitedEvents(NamedTuple):
    """A batch's events, with those of earlier batches that must be applied again.

    `reread` has the `key` of each document that a snapshot has read before its last updates, which are all among the events again; None if
    there is none.
    """

    events: DataFrame
    reread: DataFrame | None = None


@contextmanager
def folded(collection: SilverCollection, awaited: AwaitedEvents, batch: RowBatch) -> Iterator[DataFrame]:
    """Reduced rows with partial updates folded onto the stored documents; held in memory until the block ends.

    Computed instead of cached: Spark would plan a cached query again when the table changes.
    """
    keeps_last = batches.keeps_last(collection, batch)
    histories = reduce.histories(awaited.events, columns=collection.bronze_columns, keeps_last=keeps_last)
    based_rows = _with_stored(histories, _stored(collection, awaited, batch))
    with query_execution.held(_reduced(based_rows, mode=collection.mode, columns=collection.bronze_columns)) as rows:
        yield rows


def with_awaited(collection: SilverCollection, batch: RowBatch) -> AwaitedEvents:
    """The batch's events and, for late documents, the later updates of their rows from bronze.

    A late document is one that an incomplete row waits for, or one that a snapshot has read before the row's last update. `batch.rows`
    itself if there is none.
    """
    late_documents = batch.resources.enter_context(query_execution.held(_late_documents(collection, batch)))
    # One value bounds the search, so that older files of bronze are skipped; the join then compares by key.
    oldest_since, has_reread = late_documents.agg(F.min("__since"), F.max("is_reread")).first()
    if oldest_since is None:
        return AwaitedEvents(batch.rows)
    earlier_events = (
        collection.events(BatchRange(0, batch.range_.after))
        .where(F.col("sequence") > oldest_since)
        .join(F.broadcast(late_documents), "key")
        .where("sequence > `__since`")
    )
    reread = None
    if has_reread:
        # After a later document or delete the row is not made of what the snapshot read.
        decided = earlier_events.where(~reduce.is_partial()).select("key")
        reread_keys = late_documents.where("is_reread").select("key").join(decided, "key", "left_anti")
        reread = batch.resources.enter_context(query_execution.held(reread_keys))
    # What waits in quarantine comes with its replay: of a row that contained it, the replay would be a repetition.
    updates = quarantine_table.without_held(
        earlier_events.where(reduce.is_partial()), collection.quarantine, before=batch.range_.after
    )
    events = batch.rows
    if collection.mode.marks_deleted:
        events = _not_ended(events, earlier_events)
    return AwaitedEvents(events.unionByName(updates.select(*events.columns)), reread)


def _not_ended(events: DataFrame, earlier_events: DataFrame) -> DataFrame:
    """The events without those from before a delete of earlier batches.

    Such a mode remembers its deletes in their rows, and an update after one may have made the row that of another document of this key.
    """
    is_delete = F.col("op") == bronze.Op.DELETE.value
    ends = earlier_events.where(is_delete).groupBy("key").agg(F.max("sequence").alias("__end"))
    is_ended = F.coalesce(F.col("sequence") < F.col("__end"), F.lit(False))
    return events.join(ends, "key", "left").where(is_delete | ~is_ended).select(*events.columns)


def _late_documents(collection: SilverCollection, batch: RowBatch) -> DataFrame:
    """The `key` of each late document, with the document's sequence (`__since`), and whether a snapshot has read it (`is_reread`)."""
    is_incomplete = F.coalesce("__incomplete", F.lit(False))
    table = collection.rows().where(is_incomplete | (F.col("__sequence") > batch.counts.low))
    if batch.keys is not None:
        table = table.where(F.col("__key").between(*batch.keys))
    stored_rows = table.select(
        F.col("__key").alias("key"),
        "__sequence",
        "__known",
        is_incomplete.alias("is_incomplete"),
        _are_deleted(table).alias("is_deleted"),
    )
    # A document after the row's last event replaces the row. One from before `__known` changes nothing, unless a snapshot has read it: the
    # row may be incomplete only because changes before that were lost.
    is_awaited = F.col("is_incomplete") & (F.col("sequence") > F.coalesce("__known", F.lit("")))
    is_reread = ~F.col("is_deleted") & (F.col("op") == bronze.Op.READ.value)
    return (
        batch.rows.where("after IS NOT NULL")
        .select("key", "sequence", "op")
        .join(stored_rows, "key")
        .where("sequence < `__sequence`")
        .where(is_awaited | is_reread)
        .groupBy("key")
        .agg(F.min("sequence").alias("__since"), F.max(is_reread).alias("is_reread"))
    )


def _are_deleted(rows: DataFrame) -> Column:
    return F.coalesce("__deleted", F.lit(False)) if "__deleted" in rows.columns else F.lit(False)


def _stored(collection: SilverCollection, awaited: AwaitedEvents, batch: RowBatch) -> DataFrame:
    """The table's rows of the events' keys: the document, its sequences and state, and the row's location."""
    table = collection.rows().select("*", *collection.writer.row_locations())
    if batch.keys is not None:
        table = table.where(F.col("__key").between(*batch.keys))
    if batch.counts.events <= survey.MAX_BROADCAST_EVENTS:
        keys = awaited.events.select(F.col("key").alias("__key"))
        table = table.join(F.broadcast(keys), "__key", "left_semi")  # so that only these documents are shuffled
    # If the setting is newer than the table, this batch adds the column.
    if "__document" not in table.columns:
        table = table.withColumn("__document", F.lit(None).cast("string"))
    deleted = _are_deleted(table)
    table = table.withColumn("is_reread", F.lit(False))
    if awaited.reread is not None:
        flags = awaited.reread.select(F.col("key").alias("__key"), F.lit(True).alias("is_reread"))
        table = table.drop("is_reread").join(F.broadcast(flags), "__key", "left")
    return table.select(
        F.col("__key").alias("key"),
        F.col("__sequence").alias("stored_sequence"),
        F.coalesce("__known", "__sequence").alias("stored_known"),
        # A deleted document is no base: an update after a delete belongs to another document of this key.
        F.when(~deleted, F.col("__document")).alias("stored_document"),
        deleted.alias("stored_is_deleted"),
        F.coalesce("__incomplete", F.lit(False)).alias("stored_incomplete"),
        F.coalesce("is_reread", F.lit(False)).alias("stored_is_reread"),
        *upsert.ROW_LOCATION,
    )


def _with_stored(histories: DataFrame, stored: DataFrame) -> DataFrame:
    """Histories with the base of their updates, and only the updates that the base does not contain.

    `base` is the later of the stored document and the range's own, `base_known` its sequence, `is_doubtful` whether the stored one was
    incomplete, `is_reread` whether a snapshot's document is taken although the stored one is later: all its updates are folded onto it again.
    `is_foldable` is false for a row whose document was not kept (it is older than the setting): it can only be marked.
    """
    range_sequence = F.coalesce("sequence", F.lit(""))
    is_whole = F.col("sequence").isNotNull() & ~F.coalesce("is_delete", F.lit(False))
    # Only if the row's last update is at hand: of a row that another bronze made, it may not be.
    has_last = F.exists("updates", lambda update: update["sequence"] == F.col("stored_sequence"))
    is_reread = F.coalesce(F.col("stored_is_reread") & has_last, F.lit(False))
    # What a deleted row shows may be older than a document of the range, and both are of another document than an update after the delete.
    is_ended = F.col("stored_is_deleted") & (F.col("partial_sequence") > F.col("stored_sequence"))
    stored_until = F.when(is_ended, F.col("stored_sequence")).otherwise(F.col("stored_known"))
    on_stored = ~is_reread & (
        F.coalesce(stored_until > range_sequence, F.lit(False))
        | (F.col("stored_sequence").isNotNull() & F.col("sequence").isNull())
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
            "is_reread": is_reread,
            "is_foldable": ~on_stored
            | F.col("stored_is_deleted")
            | F.col("stored_document").isNotNull()
            | (F.col("stored_known") == ""),
        }
    )
    later_updates = F.filter("updates", lambda update: update["sequence"] > F.col("since"))
    return based_rows.withColumn("updates", later_updates)


def _reduced(based_rows: DataFrame, *, mode: unwrap_options.DeleteMode, columns: Sequence[str]) -> DataFrame:
    """Rows of `_with_stored` as reduced rows, with the updates folded onto their base if that is known."""
    has_updates = F.coalesce(F.size("updates"), F.lit(0)) > 0
    is_folded = has_updates & F.col("is_foldable")
    prepared = based_rows.where(has_updates | F.col("sequence").isNotNull()).withColumns(
        {
            "base": F.when(is_folded, F.col("base")),
            "updates": F.when(is_folded, F.col("updates")),
            "sequence": F.when(~has_updates, F.col("sequence")),
            "after": F.when(~has_updates, F.col("after")),
            "partial_sequence": F.when(has_updates, F.col("partial_sequence")),
        }
    )
    extras = ("partial_sequence", "base_known", "is_doubtful", "is_reread")
    reduced = reduce.decided(prepared, mode=mode, columns=(*columns, *extras, *upsert.ROW_LOCATION, "base", "updates"))
    schema = reduced.drop("base", "updates").schema
    ddl = ", ".join(f"{identifier(field.name)} {table_columns.ddl(field.dataType)}" for field in schema)
    folded_rows = reduced.mapInArrow(reduce.fold_rows, f"{ddl}, {reduce.FOLDED_DDL}")
    has_document = F.col("document").isNotNull()
    is_incomplete = F.col("incomplete") | F.col("is_doubtful") | ~has_document
    # Behind the sequence, and before every later one: the row is replaced, although its document is as of the same update.
    behind = F.when(F.col("is_reread"), F.concat("partial_sequence", F.lit("+"))).otherwise(F.col("partial_sequence"))
    # A folded document is written like any other, at the last update's sequence; a row without one is only marked.
    values = {
        "__action": F.when(has_document, reduce.Action.DOCUMENT.value).otherwise(reduce.Action.MARK.value),
        "__sequence": F.col("partial_sequence"),
        "__guard": F.when(has_document, behind).otherwise(""),
        "__known": F.when(is_incomplete, F.col("base_known")),
        "__incomplete": is_incomplete,
        "__deleted": F.lit(False),
        "after": F.col("document"),
    }
    was_folded = F.col("incomplete").isNotNull()
    final_values = {name: F.when(was_folded, value).otherwise(F.col(name)) for name, value in values.items()}
    return folded_rows.withColumns(final_values).drop(*extras, "document", "incomplete")
