"""The quarantine table of a collection: rows of bronze that cannot be read, set aside before their range is applied.

Facts about an event are appended before the range that it is of is applied. A range that is applied again appends them
again, which changes nothing: the newest fact of an event counts.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.tables import layout as tables
from pipelines.delta import live_files, ops_tables, query_execution, table_errors, table_files, table_schema
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY_FACTS = 1_000_000
"""Of more facts a query says which events they hold. Of each some hundred bytes are kept, and of its texts none."""

FEW = 1000
"""At most so many keys are named in a query; with more of them all events of a range are looked at."""


def applicable(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    events: DataFrame,
    keys: DataFrame,
    span: BatchRange,
    has_suspects: bool,
) -> DataFrame | None:
    """The events of `span`, whose keys are the `keys`, as silver may apply them; None where all of them may be, as nearly always.

    `has_suspects` says whether `quarantine_rules.is_suspect` holds for any of them. Facts are appended to `table`,
    which is made where it is needed. The result may hold updates of which nothing is known
    (`cdc_core.silver.quarantine.QuarantineSplit`).
    """
    # Readable events are held back too where an earlier one of their document waits: applied before it, they would build on
    # a document that lacks its change.
    waiting = _waiting(spark, table, keys, before=span.after)
    if not has_suspects and (waiting is None or waiting.isEmpty()):
        return None
    delta.create(spark, table, columns=quarantine_rules.COLUMNS_DDL, properties=ops_tables.PROPERTIES)
    known = spark.table(str(table)).limit(0) if waiting is None else waiting
    split = quarantine_rules.split(events, waiting=known, to=span.to, keys=_concerned(events, known))
    # Noted before the range is applied: a crash in between repeats the range, and no event is in neither place.
    split.facts.writeTo(str(table)).append()
    return split.events


def count(spark: SparkSession, table: tables.TableRef) -> int:
    """How many events a collection's quarantine holds."""
    if not delta.exists(spark, table):
        return 0
    here = HeldEvents.of(spark, table)
    found = None if here is None else here.count()
    return quarantine_rules.held(spark.table(str(table))).count() if found is None else found


_FACTS = pa.schema(
    [("event", pa.binary(16)), ("key", pa.string()), ("to", pa.int64()), ("is_ending", pa.bool_()), ("batch", pa.int64())]
)
"""What decides whether an event is held: facts by a digest of its `IDENTITY`."""

_READ = (*quarantine_rules.IDENTITY, "reason", "to", "batch")


@dataclass
class HeldEvents:
    """Of which documents a quarantine holds events, as this process sees its files, without a query."""

    live: live_files.LiveFiles
    _files: frozenset[tuple[Any, ...]] = frozenset()
    """Those that were read: where some were appended, they are not read again."""
    _facts: pa.Table | None = None
    _told: tuple[int, frozenset[str]] | None = None

    @staticmethod
    def of(spark: SparkSession, table: tables.TableRef) -> HeldEvents | None:
        """None where this process does not see the table."""
        live = live_files.of(spark, table)
        return None if live is None else HeldEvents(live)

    def keys(self, *, before: int = sys.maxsize) -> frozenset[str] | None:
        """The keys of the documents, for a range behind the batch `before`; None where that cannot be told from here.

        By the facts up to that batch, and by all of them: a larger range that was not applied in the end may have left some of
        later batches. An event without a key holds nothing back.
        """
        facts = self._read()
        if facts is None:
            return None
        newest = pc.max(facts["to"]).as_py() or 0
        at = min(before, newest)
        if self._told is None or self._told[0] != at:
            held = [_held(facts)] if at == newest else [_held(facts), _held(facts.filter(pc.less_equal(facts["to"], at)))]
            self._told = at, frozenset(itertools.chain.from_iterable(each["key"].drop_null().to_pylist() for each in held))
        return self._told[1]

    def count(self) -> int | None:
        """How many events are held; None where that cannot be told from here."""
        facts = self._read()
        return None if facts is None else len(_held(facts))

    def _read(self) -> pa.Table | None:
        """The facts, read anew where the table's files are others; None where they are not to be read from here."""
        try:
            if not self.live.at_newest() or self.live.row_count() > MANY_FACTS:
                return None
            files = {table_files.identity(each): each for each in self.live.files()}
            if self._facts is None or files.keys() != self._files:
                kept = self._facts if self._facts is not None and self._files <= files.keys() else None
                new = [each for name, each in files.items() if kept is None or name not in self._files]
                found = map(_narrow, self.live.parts(new, columns=_READ))
                self._facts = pa.concat_tables([_FACTS.empty_table() if kept is None else kept, *found])
                self._files, self._told = frozenset(files), None
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return None
        return self._facts


def _narrow(facts: pa.Table) -> pa.Table:
    """Facts as `_FACTS` has them."""
    # A mark for null, which no key has.
    identities = pc.binary_join_element_wise(
        *(facts[name] for name in quarantine_rules.IDENTITY), "\0", null_handling="replace", null_replacement="\1"
    )
    events = [xxhash.xxh3_128_digest(each) for each in identities.cast(pa.binary()).to_pylist()]
    is_ending = pc.is_in(facts["reason"], value_set=pa.array([*_ENDING_REASONS]))
    return pa.table([pa.array(events, pa.binary(16)), facts["key"], facts["to"], is_ending, facts["batch"]], schema=_FACTS)


def _held(facts: pa.Table) -> pa.Table:
    """The newest fact of each event that none ends the stay of."""
    ordered = facts.sort_by([(name, "ascending") for name in ("to", "is_ending", "batch")])
    numbered = ordered.append_column("number", pa.array(range(len(ordered)), pa.int64()))
    newest = ordered.take(numbered.group_by("event").aggregate([("number", "max")])["number_max"])
    return newest.filter(pc.invert(newest["is_ending"]))


_ENDING_REASONS = frozenset(each.value for each in quarantine_rules.ENDINGS)


def held_among(spark: SparkSession, table: tables.TableRef, keys: Sequence[str]) -> set[str]:
    """Those of the keys of whose documents events are held, by a query."""
    held = quarantine_rules.held(query_execution.with_values(spark.table(str(table)), "key", keys))
    return {row.key for row in held.select("key").distinct().collect()}


def waiting_keys(spark: SparkSession, table: tables.TableRef, *, since: str) -> DataFrame | None:
    """The keys, as `__key`, of documents with events of this sequence or later that are held; None where nothing is."""
    if not delta.exists(spark, table):
        return None
    held = quarantine_rules.held(spark.table(str(table))).where((F.col("sequence") >= since) & F.col("key").isNotNull())
    return held.select(F.col("key").alias("__key")).distinct()


def supersede(spark: SparkSession, table: tables.TableRef, *, before: str, to: int) -> None:
    """End what is held with a sequence before this one: the collection was dropped, renamed or read as a whole since."""
    if not delta.exists(spark, table):
        return
    held = quarantine_rules.held(spark.table(str(table))).where(F.col("sequence") < before)
    # A fact like any other, and no DELETE: what became of an event can be listed, and the table is only appended to.
    ended = {"reason": F.lit(quarantine_rules.Reason.SUPERSEDED.value), "to": F.lit(to).cast("bigint")}
    facts = held.withColumns(ended).select(*spark.table(str(table)).columns)
    if not facts.isEmpty():
        facts.writeTo(str(table)).append()


def adopt(spark: SparkSession, table: tables.TableRef, *, found: tables.TableRef, to: int, replaces: bool) -> None:
    """Append what another quarantine of the same events, `found`, says in its range up to batch `to` and this one does not: which events
    are held, and which no longer are. With `replaces` what this one held goes: it is of another bronze, whose numbers mean nothing here."""
    if replaces and delta.exists(spark, table):
        ops_tables.delete(spark, table, "true")
    if not delta.exists(spark, found):
        return
    delta.create(spark, table, columns=quarantine_rules.COLUMNS_DDL, properties=ops_tables.PROPERTIES)
    known = quarantine_rules.held(spark.table(str(table))).select(
        *(F.col(name).alias(f"_{name}") for name in quarantine_rules.IDENTITY)
    )
    is_same = functools.reduce(
        operator.and_, (F.col(name).eqNullSafe(F.col(f"_{name}")) for name in quarantine_rules.IDENTITY)
    )
    newest = quarantine_rules.current(spark.table(str(found)))
    is_ending = F.col("reason").isin(*_ENDING_REASONS)
    changed = (
        newest.where(~is_ending)
        .join(known, is_same, "left_anti")
        .unionByName(newest.where(is_ending).join(known, is_same, "left_semi"))
    )
    # As of the whole range: what is appended has to come after what this one says.
    facts = changed.withColumn("to", F.lit(to).cast("bigint")).select(*spark.table(str(table)).columns)
    if not facts.isEmpty():
        facts.writeTo(str(table)).append()


def dismiss(spark: SparkSession, table: tables.TableRef, *, before_ms: int, applied: int) -> int:
    """Remove the facts about events from before a time whose stay ended in a batch up to `applied`; how many events.

    All facts of an event go in one commit: an older one that stayed behind would hold the event again. Raises
    `CommitConflict`.
    """
    ended = quarantine_rules.current(spark.table(str(table))).where(
        F.col("reason").isin([each.value for each in quarantine_rules.ENDINGS])
        & (F.col("ts_ms") < before_ms)
        & (F.col("to") <= applied)
    )
    view = f"ended_{uuid.uuid4().hex[:8]}"
    same = " AND ".join(f"t.`{name}` <=> s.`{name}`" for name in quarantine_rules.IDENTITY)
    with query_execution.held(ended.select(*quarantine_rules.IDENTITY)) as chosen:
        count = chosen.count()
        if count:
            chosen.createOrReplaceTempView(view)
            try:
                with table_errors.translating(table):
                    spark.sql(f"MERGE INTO {table} AS t USING {view} AS s ON {same} WHEN MATCHED THEN DELETE").collect()
            finally:
                spark.catalog.dropTempView(view)
        return count


def _waiting(spark: SparkSession, table: tables.TableRef, keys: DataFrame, *, before: int) -> DataFrame | None:
    """What is held of these documents: of any other nothing comes in a range without an event of it, and there may be a million."""
    if not delta.exists(spark, table):
        return None
    facts = spark.table(str(table)).join(keys, F.col("key") == F.col("__key"), "left_semi")
    return quarantine_rules.held(facts, before=before)


def _concerned(events: DataFrame, waiting: DataFrame) -> list[str] | None:
    """The keys that the quarantine has anything to do with; None where there are too many to name."""
    # One more than may be named is enough to know that they are too many.
    broken = events.where(quarantine_rules.reason().isNotNull()).select("key")
    keys = broken.union(waiting.select("key")).where("key IS NOT NULL").distinct().limit(FEW + 1).collect()
    return [row.key for row in keys] if len(keys) <= FEW else None
