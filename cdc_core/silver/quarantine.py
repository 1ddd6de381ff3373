"""The quarantine: events that cannot be read, what waits for them, and when that ends.

An unreadable event is stored whole, with the reason. Until it is replayed, silver keeps the document as it was before
the event, marked incomplete:

* a later partial update follows it into the quarantine, because it is useless without its base;
* a later full document or delete supersedes it and all that followed it; so does one that the table already has, from a snapshot
  that was ahead of the stream. An update that is later still is then applied, also if it waited;
* when the event is replayed and can be read, it takes its own place in the order, by `sequence`. What followed it must be replayed
  with it (`pipelines.operations.quarantine.replay` does that).

Whether a text can be read is decided by the readers that silver types and folds with. Spark's own JSON reader accepts other texts.

The rows are append-only facts: bronze's columns, `reason` and `to`, the last batch of the range in which the fact was
found. The newest fact of an event counts; within one range, a fact that ends its stay counts before others, so applying
a range again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from cdc_core.silver import fold, reduce
from cdc_core.typed import exact

COLUMNS_DDL = f"{bronze.COLUMNS_DDL}, `reason` STRING, `to` BIGINT"

IDENTITY = ("resume_token", "kind", "key")
"""The columns that identify an event, however often it is delivered."""

IS_SAME = " AND ".join(f"`{name}` <=> `_{name}`" for name in IDENTITY)
"""SQL for whether two rows are of one event; the second one has the columns with a `_` before their names."""


class Reason(StrEnum):
    """Why an event is in the quarantine, or, for the last three, why it is not held."""

    NO_KEY = "it has no key"
    NO_SEQUENCE = "it has no place in the order"
    UNKNOWN_OPERATION = "op is not one of c, u, d, r"
    NO_DOCUMENT = "it has no document"
    UNREADABLE_AFTER = "after is not a JSON document"
    UNREADABLE_UPDATE = "updatedFields is not a JSON document"
    UNREADABLE_PATHS = "disambiguatedPaths is not a JSON document"
    FOLLOWS = "it follows an event that could not be read"
    UNREADABLE_BEFORE = "before is not a JSON document; it was applied without"
    SUPERSEDED = "superseded by a later document or delete"
    REPLAYED = "applied when it came again"


ENDINGS = (Reason.UNREADABLE_BEFORE, Reason.SUPERSEDED, Reason.REPLAYED)
"""The reasons that hold nothing back."""


@dataclass(frozen=True)
class QuarantineSplit:
    """A range's events, split.

    `events` has bronze's columns and is what silver applies. Where a document waits for a quarantined event, an update
    of which nothing is known (`op` u, without `after` or `updateDescription`) stands just before that event's place and
    leaves the document incomplete. `facts` are the quarantine's new rows.
    """

    events: DataFrame
    facts: DataFrame


# What can be read


def reason() -> Column:
    """Why an event cannot be read, as a `Reason`'s text; null if it can."""
    op, after = F.col("op"), F.col("after")
    problems = (
        (Reason.NO_KEY, F.col("key").isNull()),
        (Reason.NO_SEQUENCE, ~F.coalesce(F.col("sequence").rlike(bronze.SEQUENCE), F.lit(False))),
        (Reason.UNKNOWN_OPERATION, ~F.coalesce(op.isin([operation.value for operation in bronze.Op]), F.lit(False))),
        (Reason.NO_DOCUMENT, op.isin(bronze.Op.CREATE.value, bronze.Op.READ.value) & after.isNull()),
        (Reason.UNREADABLE_AFTER, (op != bronze.Op.DELETE.value) & _is_unreadable(after)),
        (Reason.UNREADABLE_UPDATE, _is_unreadable_in_update("updatedFields")),
        (Reason.UNREADABLE_PATHS, _is_unreadable_in_update("disambiguatedPaths")),
    )
    return F.coalesce(*(F.when(is_so, F.lit(problem.value)) for problem, is_so in problems))


def is_unreadable_update() -> Column:
    """Whether the event is an update without its document, whose description cannot be read."""
    return _is_unreadable_in_update("updatedFields") | _is_unreadable_in_update("disambiguatedPaths")


def is_suspect() -> Column:
    """Whether the event needs `split` in its own right."""
    return reason().isNotNull() | _is_unreadable(F.col("before"))


def _is_unreadable_in_update(name: str) -> Column:
    text = F.when(reduce.is_partial(), F.col("updateDescription")[name])
    return _is_unreadable(text, by=fold.is_document)


def _is_unreadable(text: Column, *, by: Callable[[str], bool] = exact.is_document) -> Column:
    """Whether the text is present and is not one JSON document."""

    def is_unreadable(texts: pa.Array) -> pa.Array:
        return pa.array([each is not None and not by(each) for each in texts.to_pylist()], pa.bool_())

    return F.arrow_udf(is_unreadable, "boolean")(text)


# Held events


def held(facts: DataFrame, *, before: int | None = None) -> DataFrame:
    """The newest fact of each event that is in the quarantine, as of the ranges up to batch `before`."""
    return current(facts, before=before).where(~is_ending())


def current(facts: DataFrame, *, before: int | None = None) -> DataFrame:
    """The newest fact of each event, as of the ranges up to batch `before`."""
    facts_before = facts if before is None else facts.where(F.col("to") <= before)
    # A range that is applied again adds its facts again: an ending must win over the fact that it ended in the same
    # range.
    order = Window.partitionBy(*IDENTITY).orderBy(F.col("to").desc(), is_ending().desc(), F.col("batch").desc())
    ranked = facts_before.withColumn("_place", F.row_number().over(order))
    return ranked.where("_place = 1").drop("_place")


def is_ending() -> Column:
    """Whether a fact ends its event's stay."""
    return F.col("reason").isin([ending.value for ending in ENDINGS])


# Splitting a range


def split(
    events: DataFrame, *, waiting: DataFrame, stored: DataFrame, to: int, keys: Collection[str] | None = None
) -> QuarantineSplit:
    """The events of a range that ends with batch `to`, split.

    `events` are bronze's rows of one collection (without deletes if the delete mode keeps rows), `waiting` is `held`
    for the earlier ranges, `stored` has the `key` of each document with a row, and the `sequence` up to which the row
    has everything. `keys`, if given, must include every key of `waiting` and of unreadable events; other events are
    then not inspected. The result depends on the arguments alone: the same range gives the same result.
    """
    # An event without a key belongs to no document, but must be inspected too.
    is_concerned = F.lit(True) if keys is None else F.col("key").isNull() | F.col("key").isin(list(keys))
    placed = _placed(events.where(is_concerned), waiting, stored)
    untouched = events.where(~is_concerned)
    applied = untouched.select(*map(_readable, bronze.SCHEMA.names)).unionByName(_given(placed))
    bad_pre_images = untouched.where(_is_unreadable(F.col("before")))
    pre_image_facts = bad_pre_images.withColumn("reason", F.lit(Reason.UNREADABLE_BEFORE.value)).select(*_fact_columns(to))
    return QuarantineSplit(applied, _facts(placed, to).unionByName(pre_image_facts))


_APPLIED, _WAITS, _SUPERSEDED = "applied", "waits", "superseded"
_NOWHERE = (Reason.NO_KEY.value, Reason.NO_SEQUENCE.value)
"""The reasons of events that belong to no document, or have no place in its history."""


def _placed(events: DataFrame, waiting: DataFrame, stored: DataFrame) -> DataFrame:
    """The events, and waiting ones that were not delivered again, each with its `_fate`.

    `_is_old` marks waiting events, `_is_again` events that waited and were delivered again. `_first` is the first event
    that its document still waits for, if the range has any event of the document.
    """
    new_events = events.withColumn("_reason", reason()).withColumn("_is_old", F.lit(False))
    # What only followed another event can be read: whether it waits is decided anew.
    old_reason = F.when(F.col("reason") != Reason.FOLLOWS.value, F.col("reason"))
    old_events = waiting.withColumn("_reason", old_reason).withColumn("_is_old", F.lit(True))
    columns = (*bronze.SCHEMA.names, "_reason", "_is_old")
    event, document = Window.partitionBy(*IDENTITY), Window.partitionBy("key")
    so_far = document.orderBy("sequence", "offset").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    all_events = new_events.select(*columns).unionByName(old_events.select(*columns))
    is_readable = F.col("_reason").isNull() & ~F.col("_is_old")
    event_columns = {
        "_is_again": F.max("_is_old").over(event),
        "_has_come": ~F.min("_is_old").over(event),
        "_mended": F.max(F.when(is_readable, F.col("offset"))).over(event),
    }
    # A rebuild finds an event and its replay in one range: then the unreadable one holds nothing back.
    is_mended = "coalesce(_reason IS NOT NULL AND offset < _mended, false)"
    delivered = (
        all_events.withColumns(event_columns)
        .where(f"NOT (_is_old AND _has_come) AND NOT {is_mended}")
        .join(stored.withColumnRenamed("sequence", "_stored"), "key", "left")
    )
    sequence, is_whole = F.col("sequence"), F.col("_reason").isNull() & ~reduce.is_partial()
    stored_before = F.when(F.col("_stored") < sequence, F.col("_stored"))
    with_fates = delivered.withColumns(
        {
            "_hole": F.max(F.when(_is_hole(), sequence)).over(so_far),
            "_whole": F.greatest(F.max(F.when(is_whole, sequence)).over(so_far), stored_before),
            "_last": F.greatest(F.max(F.when(is_whole, sequence)).over(document), "_stored"),
        }
    ).withColumn("_fate", _fate())
    is_awaited = (F.col("_fate") == _WAITS) & ~_has_no_place()
    first = F.when(~F.min("_is_old").over(document), F.min(F.when(is_awaited, sequence)).over(document))
    return with_fates.withColumn("_first", F.when(is_awaited, first))


def _has_no_place() -> Column:
    return F.coalesce(F.col("_reason").isin(*_NOWHERE), F.lit(False))


def _is_hole() -> Column:
    return F.col("_reason").isNotNull() & ~_has_no_place()


def _fate() -> Column:
    """What happens to an event: it is applied, it waits, or a later document or delete supersedes it."""
    follows = reduce.is_partial() & (F.col("_hole") > F.coalesce(F.col("_whole"), F.lit("")))
    is_out = F.coalesce(F.col("_reason").isNotNull() | follows, F.lit(False))
    is_superseded = F.coalesce((F.col("_last") > F.col("sequence")) & ~_has_no_place(), F.lit(False))
    return F.when(~is_out, _APPLIED).when(is_superseded, _SUPERSEDED).otherwise(_WAITS)


def _given(placed: DataFrame) -> DataFrame:
    """The events that silver applies, and a mark at the first event that a document waits for.

    A mark is an update of which nothing is known, just before that event.
    """
    is_mark = F.coalesce(F.col("_first") == F.col("sequence"), F.lit(False))
    columns = _or_nothing_known(is_mark, sequence=_just_before(F.col("sequence")))
    return placed.where((F.col("_fate") == _APPLIED) | is_mark).select(*columns)


def _facts(placed: DataFrame, to: int) -> DataFrame:
    """New facts: events to hold, and endings."""
    is_new, is_applied = ~F.col("_is_old"), F.col("_fate") == _APPLIED
    cases = (
        (is_new & ~is_applied, F.coalesce("_reason", F.lit(Reason.FOLLOWS.value))),
        (F.col("_fate") == _SUPERSEDED, F.lit(Reason.SUPERSEDED.value)),
        (is_applied & F.col("_is_again"), F.lit(Reason.REPLAYED.value)),
        (is_new & is_applied & _is_unreadable(F.col("before")), F.lit(Reason.UNREADABLE_BEFORE.value)),
    )
    reasons = F.array_compact(F.array(*(F.when(is_so, text) for is_so, text in cases)))
    return placed.withColumn("reason", F.explode(reasons)).select(*_fact_columns(to))


def _fact_columns(to: int) -> tuple[Column, ...]:
    return (*map(F.col, bronze.SCHEMA.names), F.col("reason"), F.lit(to).cast("bigint").alias("to"))


def readable(events: DataFrame, *, with_holes: bool = False) -> DataFrame:
    """The readable events, without unreadable pre-images, which are not needed.

    `with_holes` replaces each unreadable event that has a place with an update of which nothing is known.
    """
    if not with_holes:
        return events.where(reason().isNull()).select(*(_readable(name) for name in bronze.SCHEMA.names))
    with_reasons = events.withColumn("_reason", reason()).where(~_has_no_place())
    return with_reasons.select(*_or_nothing_known(F.col("_reason").isNotNull()))


def _or_nothing_known(is_hole: Column, **others: Column) -> list[Column]:
    """Bronze's columns, replaced with those of an update of which nothing is known where `is_hole`; `others` override its
    values.
    """
    nulls = dict.fromkeys(("before", "after", "updateDescription"), F.lit(None))
    replacements = {"op": F.lit(bronze.Op.UPDATE.value), **nulls, **others}
    return [
        F.when(is_hole, replacements[name]).otherwise(_readable(name)).alias(name) if name in replacements else F.col(name)
        for name in bronze.SCHEMA.names
    ]


def _readable(name: str) -> Column:
    """A bronze column; an unreadable pre-image is null."""
    if name != "before":
        return F.col(name)
    return F.when(~_is_unreadable(F.col("before")), F.col("before")).alias("before")


def _just_before(sequence: Column) -> Column:
    """A text that sorts after every smaller sequence, and before this one."""
    time, index = F.substring(sequence, 1, 16), F.conv(F.substring(sequence, 17, 8), 16, 10).cast("bigint")
    # `~` sorts after every hex digit, so this is after the previous sequence and before this one.
    previous = F.lower(F.lpad(F.hex(index - 1), 8, "0"))
    return F.when(index > 0, F.concat(time, previous, F.lit("~"))).otherwise(time)
