"""A batch of rows, as the steps pass it on to a collection's table.

A step takes a batch and returns a new one. What must outlive a step (rows in memory, a search in another thread) is released when the
batch's `resources` are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.typed import plan as typed
from pipelines.bronze import quarantine_table, registry, survey
from pipelines.delta import upsert
from pipelines.silver.collection import SilverCollection


@dataclass(frozen=True)
class Deletes:
    """Deleted keys with the sequence of their delete (`rows` has `__key` and `__sequence`), and the number of delete events."""

    rows: DataFrame
    events: int


@dataclass(frozen=True)
class RowBatch:
    """Rows to be committed, and what is known about them.

    `rows` are bronze's events of `range_` until `reduction.reduced`, then one reduced row per key until `write.table_rows`, then rows with
    the table's columns, `__guard` and `__action`. Their commit carries `next_position`.
    """

    rows: DataFrame
    range_: BatchRange
    next_position: registry.SilverPosition
    plan: typed.Plan
    counts: survey.EventCounts = field(default_factory=survey.EventCounts)
    keys: tuple[str, str] | None = None
    """The first and the last key, if known."""
    deletes: Deletes | None = None
    partial: int = 0
    """The number of partial updates: update events without a document."""
    has_incomplete: bool = False
    is_late: bool = False
    """Some events may be older than what the table has seen: a MERGE compares each row with the table's."""
    touched: upsert.RowFinder | None = None
    """Finds the locations of the keys' rows in the table, from the events alone."""
    pending_deletes: upsert.PendingDelete | None = None
    """The search for these keys in the table, if it has started already."""
    unless: Callable[[], bool] | None = None
    """Once the rows are written: whether they must not be committed."""
    merge_confs: Mapping[str, str] = field(default_factory=dict)
    """The session's own planner settings, for a MERGE inside a block that overrides them."""
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def number(self) -> int:
        """The rows' `__batch`: bronze's last batch of the range."""
        return self.range_.to


class NeedsSteps(Exception):
    """This process cannot apply a batch without a query (`pipelines.silver.in_process`); nothing was committed."""


class Unreadable(NeedsSteps):
    """The batch has, or may have, events that cannot be read or have to wait in quarantine."""


Step = Callable[[SilverCollection, RowBatch], RowBatch]


def through(steps: Iterable[Step], collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """The batch after these steps, in order."""
    for step in steps:
        batch = step(collection, batch)
    return batch


def keys(events: DataFrame, counts: survey.EventCounts) -> DataFrame:
    """The keys of the events as `__key`; broadcast if there are not too many."""
    column = events.select(F.col("key").alias("__key"))
    # Half as many as offsets: a key is a string of any length, an offset has eight bytes.
    return F.broadcast(column) if counts.events <= survey.MAX_BROADCAST_EVENTS // 2 else column


def touched(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> upsert.RowFinder:
    """Finds the locations of the events' keys in the table."""
    spans = [(counts.first_key, counts.last_key)] if counts.first_key else []
    return lambda: located(collection, keys(events, counts), spans)


def located(collection: SilverCollection, keys: DataFrame, spans: Sequence[tuple[str, str]] = ()) -> DataFrame:
    """The `upsert.ROW_LOCATION` of the keys' rows in the table as it is now; `spans` as in `upsert.located`."""
    return upsert.located(collection.rows().select(upsert.KEY, *collection.writer.row_locations()), keys, spans)


def applicable(collection: SilverCollection, batch: RowBatch, *, has_suspects: bool) -> DataFrame | None:
    """The events that may be applied, as `quarantine_table.applicable` finds them; None for all of them."""
    return quarantine_table.applicable(
        collection.spark,
        collection.quarantine,
        events=batch.rows,
        keys=keys(batch.rows, batch.counts),
        rows=collection.rows,
        span=batch.range_,
        has_suspects=has_suspects,
    )


def keeps_last(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether deleted documents stay visible, so that a delete may need the last document of its key."""
    return batch.deletes is not None and collection.mode.marks_deleted
