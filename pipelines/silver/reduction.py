"""The step `reduced`: one row per key from a batch's events, in one of three ways.

_latest     the last document or delete of each key; partial updates mark its row as incomplete
_folded     if whole documents are kept: partial updates are folded onto the table's documents
at_once     many whole documents, typed by the current schema without reading them first
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from cdc_core.silver import reduce
from cdc_core.typed import plan as typed
from pipelines.bronze import survey
from pipelines.delta import query_execution, upsert
from pipelines.silver import batch as batches
from pipelines.silver import deletes, evolve, partial_updates
from pipelines.silver.batch import RowBatch
from pipelines.silver.collection import SilverCollection
from pipelines.spark import session as sparks


def reduced(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: one row per key, with what the commit needs to know about the rows."""
    awaited = partial_updates.AwaitedEvents(batch.rows)
    if batch.is_late and collection.keeps_document:
        awaited = partial_updates.with_awaited(collection, batch)
    # Awaited events are partial updates that are not counted in `batch.partial`.
    has_partial = batch.partial > 0 or awaited.events is not batch.rows
    described_batch = replace(
        batch,
        deletes=deletes.last_deletes(collection, batch.rows, batch.counts),
        has_incomplete=has_partial,
        touched=batches.touched(collection, batch.rows, batch.counts),
    )
    if has_partial and collection.keeps_document:
        return _folded(collection, described_batch, awaited)
    return _latest(collection, described_batch, has_partial=has_partial)


def _latest(collection: SilverCollection, batch: RowBatch, *, has_partial: bool) -> RowBatch:
    keeps_last = batches.keeps_last(collection, batch)
    if is_large(batch.counts) and not (has_partial or keeps_last):
        latest = reduce.latest_of_many(batch.rows, columns=collection.bronze_columns)
    else:
        latest = reduce.latest(batch.rows, has_partial=has_partial, columns=collection.bronze_columns, keeps_last=keeps_last)
    return replace(batch, rows=reduce.decided(latest, mode=collection.mode, columns=collection.bronze_columns))


def _folded(collection: SilverCollection, batch: RowBatch, awaited: partial_updates.AwaitedEvents) -> RowBatch:
    """The rows with partial updates folded onto the stored documents, after the schema was grown for the resulting documents."""
    rows = batch.resources.enter_context(partial_updates.folded(collection, awaited, batch))
    pending_deletes = batch.resources.enter_context(_finding_places(collection, rows, batch))
    texts = rows.select("after", F.col("__sequence").alias("sequence"), "__incomplete")
    if batch.partial < batch.counts.events:  # the schema also covers documents that a later event of their key replaced
        events = evolve.looked_at(collection, batch.rows, batch.counts)
        replaced_texts = events.select("after", "sequence", F.lit(False).alias("__incomplete"))
        texts = replaced_texts.unionByName(texts)
    # Again: a field that an update set is in no document that the step `evolved` has read.
    also = {"incomplete": "`__incomplete`"}
    evolution = evolve.evolve(collection, texts, also=also, events=batch.counts.events)
    # Reduced rows have the sequences of their last events, so the first one comes from the counts.
    evolve.record(collection, replace(evolution, seen_at=batch.counts.low), batch.number)
    return replace(
        batch,
        rows=rows,
        plan=evolution.plan,
        has_incomplete=evolution.also["incomplete"] > 0,  # without any a MERGE reads and writes much less
        touched=lambda: batches.located(collection, F.broadcast(rows.select("__key"))),  # these rows are in memory
        pending_deletes=pending_deletes,
    )


@contextmanager
def _finding_places(collection: SilverCollection, rows: DataFrame, batch: RowBatch) -> Iterator[upsert.PendingDelete | None]:
    """The pending search for the rows in the table, whose locations were read with their documents; None for a MERGE."""
    if batch.is_late:  # a MERGE finds the rows itself
        yield None
        return
    places = rows.select(*upsert.ROW_LOCATION).where(F.col(upsert.ROW_LOCATION[0]).isNotNull())
    with collection.writer.finding_rows(lambda: places) as pending_deletes:
        yield pending_deletes


def at_once(collection: SilverCollection, batch: RowBatch) -> RowBatch | None:
    """Reduced rows of many events, typed by the current schema without reading them first; None if that is not possible.

    They are checked while they are written: `unless` is true if one of them would change the schema, cannot be read or is not a whole
    document, and then nothing may be committed.
    """
    if not is_at_once(collection, batch.counts) or not evolve.ensured_schema(collection, batch):
        return None
    # Events of a document that has an older event in quarantine must wait, which the check while writing does not see.
    if batches.applicable(collection, batch, has_suspects=False) is not None:
        return None
    plan = typed.Plan(collection.schema.schema, collection.options.pins)
    # An observation counts while the rows are written, so that the documents are parsed only once.
    doubts = Observation()
    is_doubtful = " OR ".join(["is_doubtful", *(f"({condition})" for condition in evolve.COUNTED.values())])
    documents = typed.documents(batch.rows, plan=plan).observe(doubts, F.count_if(F.expr(is_doubtful)).alias("events"))
    columns = (*collection.bronze_columns, "document", "rescued")
    latest = reduce.latest_of_many(documents, columns=columns, bare=batch.rows)
    return replace(
        batch,
        rows=reduce.decided(latest, mode=collection.mode, columns=columns),
        plan=plan,
        deletes=deletes.last_deletes(collection, batch.rows, batch.counts),
        touched=batches.touched(collection, batch.rows, batch.counts),
        unless=lambda: doubts.get["events"] > 0,
    )


def is_at_once(collection: SilverCollection, counts: survey.EventCounts) -> bool:
    """Whether `at_once` would type these events.

    It records the schema of a new collection's first documents as a version of its own. Other ways must do so too for such events, so that
    the schema history does not depend on the way.
    """
    is_plain = is_large(counts) and not collection.keeps_document and not collection.shows_deleted(counts)
    return is_plain and (collection.writer.is_direct or _is_held_first(collection))


def _is_held_first(collection: SilverCollection) -> bool:
    """Whether the rows are computed before the statement that commits them, with their observation."""
    spark = collection.spark
    # Spark Connect does not report the observation of held rows.
    return not collection.is_empty() and sparks.is_classic(spark) and query_execution.holds_rows(spark)


def is_large(counts: survey.EventCounts) -> bool:
    """Whether there are enough events for Spark jobs to pay off, and few enough to broadcast their offsets."""
    return survey.MAX_DRIVER_ROWS < counts.events <= survey.MAX_BROADCAST_EVENTS
