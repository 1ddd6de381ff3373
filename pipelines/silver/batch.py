"""A batch of rows on its way through the steps into a collection's table.

A step takes the batch as the step before left it and gives out the next one; it changes none. What a step acquires for
longer than itself (rows in memory, a search in another thread) is released when the batch's `resources` are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.typed import plan as typed
from pipelines.bronze import registry, survey
from pipelines.delta import upsert
from pipelines.silver.collection import SilverCollection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Deletes:
    """Deleted keys with the sequence of their delete, as columns `__key` and `__sequence`, and the number of delete
    events."""

    rows: DataFrame
    events: int


@dataclass(frozen=True)
class RowBatch:
    """Rows on their way into the table, and what is known about them without looking at them again.

    `rows` are bronze's events of `range_` until `reduction.reduced`, then one reduced row a key until `write.table_rows`, then rows
    of the table's columns with `__guard` and `__action`. `next_position` is what their commit carries.
    """

    rows: DataFrame
    range_: BatchRange
    next_position: registry.SilverPosition
    plan: typed.Plan
    counts: survey.EventCounts = field(default_factory=survey.EventCounts)
    keys: tuple[str, str] | None = None
    """The first and the last key, where they are known."""
    deletes: Deletes | None = None
    partial: int = 0
    """Events that are updates without their documents."""
    has_incomplete: bool = False
    is_late: bool = False
    """Some events may be older than what the table has seen: each row is compared with the table's, by a MERGE."""
    touched: upsert.Locating | None = None
    """Where the table holds the rows' keys, found without the rows."""
    pending_deletes: upsert.PendingDelete | None = None
    """The search for these keys in the table, where it has begun already."""
    unless: Callable[[], bool] | None = None
    """Says, once the rows are written, that they must not be committed."""
    merge_confs: Mapping[str, str] = field(default_factory=dict)
    """What the session says of plans, for a MERGE inside a block that is planned once."""
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def number(self) -> int:
        """The rows' `__batch`: bronze's last batch of the range."""
        return self.range_.to


Step = Callable[[SilverCollection, RowBatch], RowBatch]


def through(steps: Iterable[Step], collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """The batch after all steps, in their order."""
    for step in steps:
        batch = step(collection, batch)
    return batch


def keys(events: DataFrame, counts: survey.EventCounts) -> DataFrame:
    """The keys of the events; sent to every executor where they are not too many."""
    column = events.select(F.col("key").alias("__key"))
    # Half as many as offsets: a key is a text of any length, an offset has eight bytes.
    return F.broadcast(column) if counts.events <= survey.MAX_BROADCAST_EVENTS // 2 else column


def touched(collection: SilverCollection, events: DataFrame, counts: survey.EventCounts) -> upsert.Locating:
    """Where the table holds the events' keys."""
    spans = [(counts.first_key, counts.last_key)] if counts.first_key else []
    return lambda: located(collection, keys(events, counts), spans)


def located(collection: SilverCollection, keys: DataFrame, spans: Sequence[tuple[str, str]] = ()) -> DataFrame:
    """The `ROW_LOCATION` of these keys' rows in the table as it is now; `spans` as in `upsert.located`."""
    return upsert.located(collection.rows().select(upsert.KEY, *collection.writer.row_locations()), keys, spans)


def keeps_last(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether a delete may have to show the document that it deleted."""
    return batch.deletes is not None and collection.mode.marks_deleted
