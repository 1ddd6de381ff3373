"""The quarantine table of a collection: events of bronze that cannot be applied, with the reason.

Each row is a fact about an event, appended before the event's range is applied. A range that is applied again appends its facts
again, which changes nothing: the newest fact of an event counts.
"""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyspark.sql import functions as F

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.silver import quarantine_split
from cdc_core.tables import layout as tables
from pipelines.delta import live_files, ops_tables, query_execution, table_errors, table_files, table_schema
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY_FACTS = 1_000_000
"""The number of facts up to which this process reads them; it keeps some hundred bytes of each."""

READ_BYTES = 256 * 2**20
"""The most bytes of files that are searched for the held events of a few documents."""

FEW = 1000
"""The number of keys up to which a query names them; with more, all events of a range are read."""


def applicable(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    events: DataFrame,
    keys: DataFrame,
    rows: Callable[[], DataFrame],
    span: BatchRange,
    has_suspects: bool,
) -> DataFrame | None:
    """The events of `span` that silver may apply; None for all of them, as nearly always. `keys` are the events' keys, `rows` reads silver's rows.

    `has_suspects`: whether `quarantine_rules.is_suspect` is true for any event. Appends the facts to `table`, which is created where
    necessary. The result may have updates without a known document (`cdc_core.silver.quarantine.QuarantineSplit`).
    """
    # A readable event is held as well where an earlier one of its document is: applied first, it would lack that change.
    waiting_events = _waiting(spark, table, keys, before=span.after)
    if not has_suspects and (waiting_events is None or waiting_events.isEmpty()):
        return None
    delta.create(spark, table, columns=quarantine_rules.COLUMNS_DDL, properties=ops_tables.PROPERTIES)
    held_events = spark.table(str(table)).limit(0) if waiting_events is None else waiting_events
    concerned_keys = _concerned(events, held_events)
    stored = _stored(rows(), events, concerned_keys)
    split = quarantine_rules.split(events, waiting=held_events, stored=stored, to=span.to, keys=concerned_keys)
    # Before the range is applied: after a crash in between the range is repeated, and no event is lost.
    ops_tables.append(split.facts, table)
    return split.events


def append(spark: SparkSession, table: tables.TableRef, facts: pa.Table) -> None:
    """Append facts of this process, with the columns `quarantine_split.SCHEMA`, to a quarantine, which is created where necessary."""
    delta.create(spark, table, columns=quarantine_rules.COLUMNS_DDL, properties=ops_tables.PROPERTIES)
    ops_tables.append_rows(spark, table, facts, statistics=("key", "to"))


def count(spark: SparkSession, table: tables.TableRef) -> int:
    """The number of events that a collection's quarantine holds."""
    if delta.found(spark, table) is None:
        return 0
    held_events = HeldEvents.of(spark, table)
    number = None if held_events is None else held_events.count()
    return quarantine_rules.held(spark.table(str(table))).count() if number is None else number


_FACTS = pa.schema(
    [("event", pa.binary(16)), ("key", pa.string()), ("to", pa.int64()), ("is_ending", pa.bool_()), ("batch", pa.int64())]
)
"""The facts as this process keeps them, with a digest of the event's `IDENTITY`."""

_READ = (*quarantine_rules.IDENTITY, "reason", "to", "batch")


@dataclass
class HeldEvents:
    """The held events of a quarantine, read from its files without a query."""

    live: live_files.LiveFiles
    _files: frozenset[tuple[Any, ...]] = frozenset()
    """The files that were read: after an append only the new ones are read."""
    _facts: pa.Table | None = None
    _keys: tuple[int, frozenset[str]] | None = None

    @staticmethod
    def of(spark: SparkSession, table: tables.TableRef) -> HeldEvents | None:
        """The held events of a table; None where this process cannot read it."""
        live = live_files.of(spark, table)
        return None if live is None else HeldEvents(live)

    def keys(self, *, before: int = sys.maxsize) -> frozenset[str] | None:
        """The keys of documents with held events, for a range after the batch `before`; None where this process cannot read them.

        By the facts up to that batch, and by all facts: a larger range that was not applied may have left facts of later batches. An
        event without a key holds nothing back.
        """
        facts = self._read()
        if facts is None:
            return None
        newest = pc.max(facts["to"]).as_py() or 0
        to = min(before, newest)
        if self._keys is None or self._keys[0] != to:
            parts = [_held(facts)] if to == newest else [_held(facts), _held(facts.filter(pc.less_equal(facts["to"], to)))]
            self._keys = to, frozenset(itertools.chain.from_iterable(part["key"].drop_null().to_pylist() for part in parts))
        return self._keys[1]

    def waiting(self, keys: Collection[str], *, before: int) -> pa.Table | None:
        """The held events of these documents, as of the ranges up to batch `before`, with the columns `quarantine_split.SCHEMA`; None where
        this process cannot read them, or they are large."""
        try:
            if not self.live.move_to_newest() or not {*quarantine_split.SCHEMA.names} <= {*self.live.schema.names}:
                return None
            facts = live_files.rows_at(
                self.live,
                self.live.places("key", [*keys]),
                columns=quarantine_split.SCHEMA.names,
                size_bytes=live_files.MANY_BYTES,
                read_bytes=READ_BYTES,
            )
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return None
        facts = facts.filter(pc.less_equal(facts["to"], before))
        numbered_facts = _narrow(facts).append_column("row", pa.array(range(len(facts)), pa.int64()))
        return facts.take(_held(numbered_facts)["row"])

    def count(self) -> int | None:
        """The number of held events; None where this process cannot read them."""
        facts = self._read()
        return None if facts is None else len(_held(facts))

    def _read(self) -> pa.Table | None:
        """The facts, up to date with the table's files; None where this process cannot read them, or they are too many."""
        try:
            if not self.live.move_to_newest() or self.live.row_count() > MANY_FACTS:
                return None
            files = {table_files.identity(file): file for file in self.live.files()}
            if self._facts is None or files.keys() != self._files:
                cached = self._facts if self._facts is not None and self._files <= files.keys() else None
                new_files = [file for name, file in files.items() if cached is None or name not in self._files]
                new_facts = map(_narrow, self.live.parts(new_files, columns=_READ))
                self._facts = pa.concat_tables([_FACTS.empty_table() if cached is None else cached, *new_facts])
                self._files, self._keys = frozenset(files), None
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return None
        return self._facts


def _narrow(facts: pa.Table) -> pa.Table:
    """Facts in the schema `_FACTS`."""
    # Null as a character that no key has.
    identities = pc.binary_join_element_wise(
        *(facts[name] for name in quarantine_rules.IDENTITY), "\0", null_handling="replace", null_replacement="\1"
    )
    events = [xxhash.xxh3_128_digest(identity) for identity in identities.cast(pa.binary()).to_pylist()]
    is_ending = pc.is_in(facts["reason"], value_set=pa.array([each.value for each in quarantine_rules.ENDINGS]))
    return pa.table([pa.array(events, pa.binary(16)), facts["key"], facts["to"], is_ending, facts["batch"]], schema=_FACTS)


def _held(facts: pa.Table) -> pa.Table:
    """The newest fact of each event that is held: whose newest fact has no ending reason."""
    sorted_facts = facts.sort_by([(name, "ascending") for name in ("to", "is_ending", "batch")])
    numbered_facts = sorted_facts.append_column("number", pa.array(range(len(sorted_facts)), pa.int64()))
    newest_facts = sorted_facts.take(numbered_facts.group_by("event").aggregate([("number", "max")])["number_max"])
    return newest_facts.filter(pc.invert(newest_facts["is_ending"]))


def held_among(spark: SparkSession, table: tables.TableRef, keys: Sequence[str]) -> set[str]:
    """The keys whose documents have held events, by a query."""
    held_events = quarantine_rules.held(query_execution.with_values(spark.table(str(table)), "key", keys))
    return {row.key for row in held_events.select("key").distinct().collect()}


def without_held(events: DataFrame, table: tables.TableRef, *, before: int) -> DataFrame:
    """The events without those that are held, as of the ranges up to batch `before`."""
    spark = events.sparkSession
    if not delta.exists(spark, table):
        return events
    return events.join(
        _held_identities(spark.table(str(table)), before=before), F.expr(quarantine_rules.IS_SAME), "left_anti"
    )


def without_waiting(rows: DataFrame, table: tables.TableRef, *, since: str) -> DataFrame:
    """The rows without those of documents, by `__key`, that have held events of this sequence or later: these documents exist."""
    spark = rows.sparkSession
    if not delta.exists(spark, table):
        return rows
    held_events = quarantine_rules.held(spark.table(str(table))).where(
        (F.col("sequence") >= since) & F.col("key").isNotNull()
    )
    return rows.join(held_events.select(F.col("key").alias("__key")).distinct(), "__key", "left_anti")


def supersede(spark: SparkSession, table: tables.TableRef, *, before: str, to: int) -> None:
    """End the stay of events with a sequence before this one, after a drop, a rename or a whole snapshot of the collection."""
    if not delta.exists(spark, table):
        return
    held_events = quarantine_rules.held(spark.table(str(table))).where(F.col("sequence") < before)
    # A fact and not a DELETE: the table is append-only, and the history of an event can be listed.
    end_columns = {"reason": F.lit(quarantine_rules.Reason.SUPERSEDED.value), "to": F.lit(to).cast("bigint")}
    facts = held_events.withColumns(end_columns).select(*spark.table(str(table)).columns)
    if not facts.isEmpty():
        ops_tables.append(facts, table)


def adopt(spark: SparkSession, table: tables.TableRef, *, other: tables.TableRef, to: int, replaces: bool) -> None:
    """Append the facts of another quarantine of the same events (`other`) that differ from this one's, as of batch `to`.

    With `replaces` the facts of this one are deleted first: they are of another bronze, whose batch numbers have no meaning here.
    """
    if replaces and delta.exists(spark, table):
        ops_tables.delete(spark, table, "true")
    if not delta.exists(spark, other):
        return
    delta.create(spark, table, columns=quarantine_rules.COLUMNS_DDL, properties=ops_tables.PROPERTIES)
    held_identities = _held_identities(spark.table(str(table)))
    is_same = F.expr(quarantine_rules.IS_SAME)
    newest_facts = quarantine_rules.current(spark.table(str(other)))
    is_ending = quarantine_rules.is_ending()
    changed_facts = (
        newest_facts.where(~is_ending)
        .join(held_identities, is_same, "left_anti")
        .unionByName(newest_facts.where(is_ending).join(held_identities, is_same, "left_semi"))
    )
    # As of the whole range: these facts must be newer than this quarantine's own.
    facts = changed_facts.withColumn("to", F.lit(to).cast("bigint")).select(*spark.table(str(table)).columns)
    if not facts.isEmpty():
        ops_tables.append(facts, table)


def _held_identities(facts: DataFrame, *, before: int | None = None) -> DataFrame:
    """The second rows of `quarantine_rules.IS_SAME`, of the held events."""
    held_events = quarantine_rules.held(facts, before=before)
    return held_events.select(*(F.col(name).alias(f"_{name}") for name in quarantine_rules.IDENTITY))


def dismiss(spark: SparkSession, table: tables.TableRef, *, before_ms: int, applied: int) -> int:
    """Delete the facts of events from before a time (ms since 1970) whose stay ended in a batch up to `applied`; the number of events.

    In one commit: an older fact that remained would hold its event again. A newer one, of a range that holds the event again
    meanwhile, stays. Raises `CommitConflict`.
    """
    ended_facts = quarantine_rules.current(spark.table(str(table))).where(
        quarantine_rules.is_ending() & (F.col("ts_ms") < before_ms) & (F.col("to") <= applied)
    )
    view = f"ended_{uuid.uuid4().hex[:8]}"
    same = " AND ".join(f"t.`{name}` <=> s.`{name}`" for name in quarantine_rules.IDENTITY)
    with query_execution.held(ended_facts.select(*quarantine_rules.IDENTITY, "to")) as endings:
        count = endings.count()
        if count:
            endings.createOrReplaceTempView(view)
            matched = f"{same} AND t.`to` <= s.`to`"
            try:
                with table_errors.translating(table):
                    spark.sql(f"MERGE INTO {table} AS t USING {view} AS s ON {matched} WHEN MATCHED THEN DELETE").collect()
            finally:
                spark.catalog.dropTempView(view)
        return count


def _waiting(spark: SparkSession, table: tables.TableRef, keys: DataFrame, *, before: int) -> DataFrame | None:
    """The held events of these documents; None without a quarantine. A range cannot release those of other documents."""
    if delta.found(spark, table) is None:
        return None
    facts = spark.table(str(table)).join(keys, F.col("key") == F.col("__key"), "left_semi")
    return quarantine_rules.held(facts, before=before)


def _concerned(events: DataFrame, waiting: DataFrame) -> list[str] | None:
    """The keys with broken or held events; None where they are more than `FEW`."""
    broken_keys = events.where(quarantine_rules.reason().isNotNull()).select("key")
    keys = broken_keys.union(waiting.select("key")).where("key IS NOT NULL").distinct().limit(FEW + 1).collect()
    return [row.key for row in keys] if len(keys) <= FEW else None


def _stored(rows: DataFrame, events: DataFrame, keys: Sequence[str] | None) -> DataFrame:
    """The `key` and the `sequence` up to which the row has everything, of the rows with these keys, or else with the events' keys."""
    stored = rows.select(F.col("__key").alias("key"), F.coalesce("__known", "__sequence").alias("sequence"))
    if keys is None:
        stored = stored.join(events.select("key").distinct(), "key", "left_semi")
    else:
        stored = stored.where(F.col("key").isin(list(keys)))  # literals, so that Delta skips files
    # Now: the events are applied after the table may have got other columns.
    return query_execution.materialized(stored)
