"""Applies a collection's work to its table, range by range, each with the sweeps that fall into it.

A range is a run of bronze batches. Its rows go through `STEPS` together; the last step is the commit that moves the position. Small plain
ranges are applied by this process itself (`pipelines.silver.in_process`).
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze import collection_ends
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.signals import signal as signals
from cdc_core.sql.names import literal
from cdc_core.typed import plan as typed
from pipelines.bronze import registry, survey
from pipelines.delta import query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.silver import batch as batches
from pipelines.silver import deletes, evolve, in_process, reduction, sweeps, write
from pipelines.silver.batch import RowBatch, Step
from pipelines.silver.collection import CollectionWork, SilverCollection
from pipelines.spark import session as sparks

# Log lines show this name: searches in logs must not depend on how the code is split into modules.
log = logging.getLogger("pipelines.silver.collection")

STEPS: tuple[Step, ...] = (evolve.evolved, deletes.not_resurrected, reduction.reduced, *write.STEPS)
"""The steps of a range's rows, from bronze's events to their commit."""

ADAPTIVE = "spark.sql.adaptive.enabled"
NOT_ADAPTIVE = {ADAPTIVE: "false"}
"""Without adaptive planning. On one machine it gains little, and each new plan lists the table's files again."""

_HAS_NO_TEXT = "`__document` IS NULL AND NOT coalesce(`__incomplete`, false)"


class Progress(NamedTuple):
    """How far the work came: the position, and the number of events in the applied ranges."""

    position: registry.SilverPosition
    events: int


def apply(
    collection: SilverCollection,
    work: CollectionWork,
    *,
    stop: threading.Event,
    seconds: float = math.inf,
    is_alone: bool = False,
    hear: Callable[[int], None] = lambda events: None,
) -> Progress:
    """Apply the work range by range, each with its sweeps; ends between two ranges when `stop` is set or `seconds` have passed.

    If the collection `is_alone`, the next range is read meanwhile; with others beside it no core is idle. `hear` is called with the number
    of events of each range that was applied.
    """
    position = _under_these_settings(collection, work)
    portions = in_process.ranges(collection, work)
    ranges = portions or _ranges(collection, work, work.span)
    needless_sweeps, due_sweeps = sweeps.split(collection, work)
    for sweep in needless_sweeps:
        # Nothing to delete, but the position must name the sweep: its floor refuses events from before it.
        position = sweeps.position_after(collection, sweep, position)
    events, end = 0, time.monotonic() + seconds
    # The first range in any case, so that each turn makes progress.
    while ranges and not stop.is_set() and not (events and time.monotonic() > end):
        range_, *ranges = ranges
        collection.ahead.expect(ranges[0] if is_alone and portions and ranges else None)
        # The survey counted the whole span; whether a part of it is late depends on the part's own events.
        is_whole = range_ == work.span
        counts = (
            work.counts if is_whole else survey.counts_of(collection.spark, collection.bronze, collection.namespace, range_)
        )
        due = collection_ends.within(due_sweeps, range_)
        position, is_local = _with_sweeps(collection, range_, counts, position, due)
        events += counts.events
        hear(counts.events)
        if ranges and portions and not is_local:
            # The rest goes through Spark, in as few ranges as the settings allow.
            ranges, portions = _ranges(collection, work, BatchRange(range_.to, work.to)), None
    collection.ahead.forget()
    return Progress(position, events)


def _with_sweeps(
    collection: SilverCollection,
    range_: BatchRange,
    counts: survey.EventCounts,
    position: registry.SilverPosition,
    due: Sequence[Sweep],
) -> tuple[registry.SilverPosition, bool]:
    """Apply one range and its sweeps. The position moves with the last of them, so that a crash in between repeats the range.

    Also returns whether this process applied the events itself.
    """
    position, is_local = _range(collection, range_, counts, position, to=position.to if due else range_.to)
    for sweep in due:
        to = range_.to if sweep is due[-1] else position.to
        position = replace(sweeps.position_after(collection, sweep, position), to=to)
        sweeps.apply(collection, sweep, position, range_=range_)
    return position, is_local


def _range(
    collection: SilverCollection,
    range_: BatchRange,
    counts: survey.EventCounts,
    position: registry.SilverPosition,
    *,
    to: int,
) -> tuple[registry.SilverPosition, bool]:
    next_position = replace(position, to=to, high=max(position.high or "", counts.high))
    if not counts.events:
        # No events of this collection: a commit without rows moves the position.
        collection.move(next_position)
        return next_position, True
    is_late = _is_late(collection, counts, position)
    is_after_floor = counts.low >= position.floor
    if is_after_floor and in_process.applied(collection, range_, counts, next_position, is_late=is_late):
        return next_position, True
    collection.lacks_quarantine = False  # the steps may create it
    collection.ahead.forget()  # up to some hundred megabytes that Spark does not use
    events = _wanted(collection, collection.events(range_), counts)
    if counts.low < position.floor:
        # An event without a sequence is kept: it belongs to quarantine.
        is_in_order = f"coalesce(sequence RLIKE {literal(bronze.SEQUENCE)}, false)"
        events = events.where(f"NOT {is_in_order} OR sequence >= {literal(position.floor)}")
    with ExitStack() as resources:
        confs, merge_confs = _confs(collection, counts)
        resources.enter_context(query_execution.session_confs(collection.spark, confs))
        pending_deletes = resources.enter_context(_finding_keys(collection, events, counts, is_late=is_late))
        batch = RowBatch(
            rows=events,
            range_=range_,
            next_position=next_position,
            plan=typed.Plan(collection.schema.schema),
            counts=counts,
            keys=(counts.first_key, counts.last_key) if counts.first_key else None,
            is_late=is_late,
            pending_deletes=pending_deletes,
            merge_confs=merge_confs,
            resources=resources,
        )
        # A late row must be compared with the table's row, which only the full steps do.
        if batch.is_late or not _written_at_once(collection, batch):
            batches.through(STEPS, collection, batch)
    return next_position, False


def _confs(collection: SilverCollection, counts: survey.EventCounts) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Spark settings for a batch's queries, and those for a MERGE among them."""
    if counts.events <= survey.MAX_DRIVER_ROWS and query_execution.are_small(collection.writer.table):
        return query_execution.INTERPRETED, {}
    if not sparks.is_local(collection.spark):
        return {}, {}
    # A MERGE keeps the session's own setting: adaptive planning lets it broadcast more.
    return NOT_ADAPTIVE, {ADAPTIVE: collection.spark.conf.get(ADAPTIVE) or "true"}


def _is_late(collection: SilverCollection, counts: survey.EventCounts, position: registry.SilverPosition) -> bool:
    """Whether a range may have events older than what the table has seen, so that they must be compared with its rows.

    After a repair the position is 0 but the rows exist: events that are applied again are late. Events older than a sweep are late, too:
    the row to compare with may be gone. An event whose `sequence` equals the newest is not late: all rows of a chunk share one, and of two
    equal ones the later in bronze wins, as within a range.
    """
    return not collection.is_empty() and (position.high is None or counts.low < max(position.high, position.swept))


def _written_at_once(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether the batch was committed without reading its documents first; if not, nothing was committed."""
    rows = reduction.at_once(collection, batch)
    if rows is None:
        return False
    try:
        batches.through(write.STEPS, collection, rows)
    except upsert.NotCommitted:
        return False
    return True


@contextmanager
def _finding_keys(
    collection: SilverCollection, events: DataFrame, counts: survey.EventCounts, *, is_late: bool
) -> Iterator[upsert.PendingDelete | None]:
    """Searches the table for the events' keys while their documents are read: the driver mostly waits in both."""
    is_large = reduction.is_large(counts) and not collection.is_empty()
    if is_large and collection.keeps_document:
        with collection.writer.listing_files():  # row locations come with the stored documents
            yield None
        return
    if is_late or not is_large or collection.shows_deleted(counts):
        yield None
        return
    with collection.writer.finding_rows(batches.touched(collection, events, counts)) as pending_deletes:
        yield pending_deletes


def _wanted(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> DataFrame:
    """The events, without deletes if the mode keeps rows."""
    if collection.mode.keeps_row and counts.deletes:
        return events.where(f"NOT (op <=> '{bronze.Op.DELETE.value}')")  # an event without an op goes to quarantine
    return events


def _ranges(collection: SilverCollection, work: CollectionWork, span: BatchRange) -> Sequence[BatchRange]:
    """The span, all or the rest of the work's, cut into ranges of at most `max_batch_events`."""
    limit = collection.options.max_batch_events
    if work.counts.events <= limit:
        return (span,)
    return survey.bounded(collection.events(span), span=span, limit=limit)


def _under_these_settings(collection: SilverCollection, work: CollectionWork) -> registry.SilverPosition:
    """The position with the row layout of the current settings; logs a warning if existing rows lack documents they now need."""
    position, have_documents = work.position, collection.keep_documents(work.position, work.span)
    if have_documents and position.documents is not True and _lacks_documents(collection):
        log.warning(
            "%s: rows of silver were written without their whole documents. A row that gets a partial update stays "
            "incomplete until its document is read again: %s",
            collection.namespace,
            signals.snapshot_command(str(collection.namespace)),
        )
    # A name stays reserved when the setting is removed: the column still exists, and a field must not mix with its values.
    collection.reserved = frozenset(position.added)
    collection.reserved |= {each.name for each in collection.added(collection.schema.schema)}
    # An earlier version noted any text.
    high = None if position.high and not re.fullmatch(bronze.SEQUENCE, position.high) else position.high
    if high is None and not collection.is_empty():
        # After a repair, of a copy without the log: else only the first range would count as late, and the next ones replace newer rows.
        high = _greatest_sequence(collection)
    return replace(
        position,
        high=high,
        documents=have_documents,
        added=tuple(sorted(collection.reserved)),
        kept=work.to if collection.mode.keeps_row else position.kept,
        origin=collection.origin or position.origin,
    )


def _greatest_sequence(collection: SilverCollection) -> str:
    """The greatest sequence of the table's rows and its remembered deletes: nothing that is newer can be late."""
    found = [collection.rows()]
    if delta.exists(collection.spark, collection.deletes):
        found.append(collection.spark.table(str(collection.deletes)))
    return max(rows.agg(F.max("__sequence")).first()[0] or "" for rows in found)


def _lacks_documents(collection: SilverCollection) -> bool:
    if collection.is_empty():
        return False
    rows = collection.rows()
    return "__document" not in rows.columns or not rows.where(_HAS_NO_TEXT).isEmpty()
