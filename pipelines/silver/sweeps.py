"""A sweep deletes the rows that are older than a finished snapshot of the whole collection, or than its drop or rename.

Why a drop is a sweep, and what the floor is for: docs/decisions/a-drop-is-a-sweep.md.
"""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.silver import reduce
from cdc_core.sql.names import literal
from cdc_core.typed import plan as typed
from pipelines.bronze import quarantine_table, registry, survey
from pipelines.silver import batch as batches
from pipelines.silver import in_process, write
from pipelines.silver.batch import Deletes, RowBatch
from pipelines.silver.collection import CollectionWork, SilverCollection


def split(collection: SilverCollection, work: CollectionWork) -> tuple[list[Sweep], list[Sweep]]:
    """The sweeps that delete nothing (the table is empty, and all of this work is newer), and those that must run."""
    due = survey.sweeps_to_apply(work.sweeps, collection.options)
    oldest = work.counts.low if collection.is_empty() else ""
    needless = [sweep for sweep in due if oldest >= sweep.first]
    return needless, [sweep for sweep in due if oldest < sweep.first]


def position_after(collection: SilverCollection, sweep: Sweep, position: registry.SilverPosition) -> registry.SilverPosition:
    """The position after the sweep."""
    floor = sweep.floor(position.floor, keeps_row=collection.mode.keeps_row)
    return replace(position, swept=max(position.swept, sweep.first), floor=floor)


def apply(collection: SilverCollection, sweep: Sweep, next_position: registry.SilverPosition, *, range_: BatchRange) -> None:
    """Delete the rows that are older than the sweep, at its sequence, in a commit that carries `next_position`."""
    # Older events in quarantine can never be applied, or belong to documents that the snapshot has read, or did not find.
    if next_position.floor >= sweep.first or not collection.mode.keeps_row:
        quarantine_table.supersede(collection.spark, collection.quarantine, before=sweep.first, to=range_.to)
    if in_process.swept(collection, sweep, next_position, number=range_.to):
        return
    older_rows = collection.rows().where(f"`__sequence` < {literal(sweep.first)}")
    swept_rows = quarantine_table.without_waiting(older_rows, collection.quarantine, since=sweep.first)
    if collection.mode.marks_deleted and "__deleted" in swept_rows.columns:  # the mode may be newer than all rows
        swept_rows = swept_rows.where("NOT coalesce(`__deleted`, false)")
    bounds = swept_rows.agg(F.min("__key").alias("low"), F.max("__key").alias("high"), F.count("*").alias("rows")).first()
    # A sweep consists of deletes: a mode that keeps rows ignores them.
    if collection.mode.keeps_row or bounds.low is None:
        collection.move(next_position)
        return
    latest = reduce.swept(sweep.first, keys=swept_rows, columns=collection.bronze_columns)
    batch = RowBatch(
        rows=reduce.decided(latest, mode=collection.mode, columns=collection.bronze_columns),
        range_=range_,
        next_position=next_position,
        # Deletes bring no documents, so the schema stays as it is.
        plan=typed.Plan(collection.schema.schema),
        keys=(bounds.low, bounds.high),
        deletes=Deletes(swept_rows.select("__key", F.lit(sweep.first).alias("__sequence")), bounds.rows),
    )
    batches.through(write.STEPS, collection, batch)
