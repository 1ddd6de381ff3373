"""One collection's current documents as a gold table: what silver changed since the table's position, and the commit of it.

Silver is read at one version: the newest whose rows are those of silver's position, so that OPTIMIZE and VACUUM of silver take
nothing away. The whole table is rewritten from it at its first load, when a column's type changed (gold has plain types), and when silver
went back behind gold or was rebuilt. A new column is added before the MERGE, and only where it is missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.types import StructField, StructType

from cdc_core.gold import key_ranges
from cdc_core.schema import names as column_names
from cdc_core.silver import merge
from cdc_core.sql import merge as sql_merge
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from pipelines.bronze import registry, survey
from pipelines.delta import query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold.candidate import Audit, Candidate, no_audit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

PROPERTIES = {
    "delta.enableTypeWidening": "false",
    "delta.enableChangeDataFeed": "false",
    "delta.checkpointPolicy": "classic",
    "delta.checkpointInterval": "50",
    "delta.dataSkippingNumIndexedCols": "200",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}

HIDDEN = frozenset(column_names.ENGINE)
"""Silver's columns that are not the document's. Gold has two of them, as its last columns: `__rescued` and `__key`."""

MERGE_CONFS = {"spark.databricks.delta.merge.materializeSource": "none"}
"""The source reads silver at a fixed version, or is held: Delta need not write it down."""

REBUILT = "rebuilt"
"""What the commit of a rebuild says. The position has not moved, and models have to be made again: they may be made of rows that other
hands had changed."""

ROWS = "rows"
"""What a commit says that moved the position and no row: what identifies the rows (`rows_of`)."""

FEW_KEYS = 1_000
"""Up to so many keys the ranges in which the table is read are made from the keys; for more it is one, from the first key to the last."""


@dataclass(frozen=True)
class GoldPosition:
    """Where a gold table stands; None for `to` where nothing says so.

    `high` is the greatest sequence that silver had seen by then, None where it was not said or tells nothing of deletes; `generation` and `origin` are those of
    silver's rows.
    """

    to: int | None = None
    generation: str = ""
    high: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class GoldWork:
    """A gold table that is behind its silver table, or of another generation of it."""

    namespace: registry.Namespace
    silver: registry.SilverPosition
    gold: GoldPosition

    @property
    def is_rewrite(self) -> bool:
        """Whether silver cannot tell what changed since gold's position: it went back, was rebuilt, or gold has none."""
        # Rows of silver carry the batch that wrote them: after a step back, or in another generation, that says nothing of
        # what gold has.
        is_other = (self.gold.generation, self.gold.origin) != (self.silver.generation, self.silver.origin)
        return self.gold.to is None or self.gold.to > self.silver.to or is_other


def forgotten_to(spark: SparkSession, deletes: tables.TableRef) -> int:
    """The newest batch of which remembered deletes were thrown away: a gold table below it may have missed one, and is written anew.

    Only where silver has come that far. Where it has not, the batch is one of another bronze, and gold would be written anew at each
    look until silver came there.
    """
    return int((delta.found(spark, deletes) or {}).get(registry.FORGOTTEN_TO) or 0)


def at_silver(
    spark: SparkSession, layout: tables.Layout, namespace: registry.Namespace, *, audit: Audit = no_audit
) -> GoldTable:
    """One collection's gold table as it would be made whole from silver now, whatever the table holds."""
    position = registry.silver_position(spark, layout.silver(*namespace))
    work = GoldWork(namespace, position, GoldPosition())
    return GoldTable(spark, work, layout.silver(*namespace), layout.deletes(*namespace), audit=audit)


@dataclass(frozen=True)
class _KeyChanges:
    """Which keys changed: how many, in which ranges, and whether any of their rows has rescued values."""

    count: int
    spans: tuple[key_ranges.KeyRange, ...]
    has_rescued: bool


@dataclass(frozen=True)
class GoldTable:
    """One gold table, to be brought from its position to silver's."""

    spark: SparkSession
    work: GoldWork
    silver: tables.TableRef
    deletes: tables.TableRef
    is_few: bool = False
    audit: Audit = no_audit
    said: list[Mapping[str, object]] = field(default_factory=list)
    """What the audit adds to the metadata of the publishing commit; empty until the table was judged."""

    def judge(
        self, table: tables.TableRef, changed: DataFrame | None = None, live: Mapping[str, object] | None = None
    ) -> None:
        """Run the audit over the rows that the table would have; `changed` are the new ones among them. Raises what the audit raises."""
        has_rescued = changed is None or "__rescued" in changed.columns

        def whole() -> DataFrame:
            return self.current().select(*self._columns(has_rescued=has_rescued))

        candidate = Candidate(str(self.work.namespace), table, whole, changed, keys=("__key",), live=live or {})
        self.said[:] = [self.audit(self.spark, candidate)]

    @functools.cached_property
    def _counts(self) -> Row:
        """How many current documents there are, `n`, and how many with `rescued` values: of one version of silver, counted once."""
        return self.current().agg(F.count("*").alias("n"), F.count("__rescued").alias("rescued")).first()

    @property
    def is_empty(self) -> bool:
        """Whether silver holds no current document."""
        return not self._counts.n

    def rewritten(self, writer: Writer, *, extra: Mapping[str, object] | None = None) -> int:
        """Replace the table by the current documents; their number. The commit says `extra`, too."""
        current, seen = self.current(), self._counts
        present = self.spark.table(str(writer.table)).schema
        # The column comes with the first rescued value, and stays when there is none any more: readers may name it.
        has_rescued = seen.rescued > 0 or "__rescued" in present.names
        columns = self._columns(has_rescued=has_rescued)
        if not self.said:
            self.judge(writer.table)
        self._settle_statistics(writer, present, self.wanted(has_rescued))
        said = self.extra() | dict(extra or {})
        writer.overwrite(current.select(*columns), to=self.work.silver.to, extra=said, overwrite_schema=True)
        return seen.n

    def _settle_statistics(self, writer: Writer, present: StructType, wanted: StructType) -> None:
        """Stop statistics of columns that go, or change to a type without an order: Delta would refuse the rows."""
        listed = delta.properties(self.spark, writer.table).get(STATISTICS)
        held = table_columns.fields_by_name(present)
        common = statistics_columns(each for each in wanted if each.name in held and _has_order(held[each.name]))
        if listed not in (None, common):
            writer.alter(f"SET TBLPROPERTIES ('{STATISTICS}' = '{common}')")

    def documents(self) -> DataFrame:
        """All rows that the table is to have, with `__rescued`."""
        return self.current().select(*self._columns(has_rescued=True))

    def merged(self, writer: Writer) -> int:
        """Publish the rows of the changed keys; how many keys."""
        if writer.is_direct and not self.is_few:
            return self._merged(writer, self._changed())
        # A MERGE plans its source three times, and reads it twice.
        with query_execution.held(self._changed()) as changed:
            return self._merged(writer, changed)

    def _merged(self, writer: Writer, changed: DataFrame) -> int:
        changes = self._key_changes(changed)
        present = self.spark.table(str(writer.table)).schema
        wanted = self.wanted("__rescued" in present.names or changes.has_rescued)
        alteration = table_columns.alterations(present, wanted)
        # Readers of gold are to need no table feature for wider types: the rows are written anew with the new type.
        # And a column that somebody dropped, or gave another name, would be null in every row that is there.
        if (
            alteration.widened
            or alteration.impossible
            or (alteration.added and delta.has_mapped_columns(self.spark, writer.table))
        ):
            return self.rewritten(writer)
        # Without a changed key the rows are those that were judged already, and the commit repeats their judgement.
        if changes.count:
            columns = self._columns(has_rescued="__rescued" in wanted.names)
            self.judge(writer.table, changed.where("NOT `__gone`").select(*columns), writer.metadata)
        else:
            self.said[:] = [unmoved(writer)]
        for statement in alteration.added:
            writer.alter(statement)
        if not changes.count:
            # The position moves all the same: the next run would look through the same batches once more.
            writer.mark(to=self.work.silver.to, extra=self.extra())
        elif not self._upserted(writer, changed, changes, wanted):
            self._merge(writer, changed, changes, wanted)
        return changes.count

    def _upserted(self, writer: Writer, changed: DataFrame, changes: _KeyChanges, wanted: StructType) -> bool:
        """Replace the changed keys' rows without a MERGE; False where that is not possible, and nothing was written."""
        if not writer.can_upsert() or not table_columns.is_same(self.spark.table(str(writer.table)).schema, wanted):
            return False
        rows = changed.where("NOT `__gone`").select(*self._columns(has_rescued="__rescued" in wanted.names))
        made = writer.upsert(
            rows,
            touched=lambda: self._held(writer, changed, changes),
            to=self.work.silver.to,
            extra=self.extra(),
            confs=MERGE_CONFS,
            few=changes.count <= survey.MAX_DRIVER_ROWS,
        )
        return made is not None

    def _held(self, writer: Writer, changed: DataFrame, changes: _KeyChanges) -> DataFrame:
        """The places (file and row) of the rows that the table holds of the changed keys."""
        keys = changed.select("__key")
        rows = self.spark.table(str(writer.table)).select("__key", *writer.row_locations())
        few = F.broadcast(keys) if changes.count <= survey.MAX_BROADCAST_EVENTS else keys
        return upsert.located(rows, few, changes.spans)

    def _merge(self, writer: Writer, changed: DataFrame, changes: _KeyChanges, wanted: StructType) -> None:
        source = changed.select(*self._columns(has_rescued="__rescued" in wanted.names), "__gone")
        statement = _statement(wanted.names, changes)
        writer.merge(source, statement, to=self.work.silver.to, extra=self.extra(), confs=MERGE_CONFS)

    def current(self) -> DataFrame:
        """The rows of silver that are current documents."""
        rows = self._rows
        return rows.where(~self._is_gone(rows))

    def wanted(self, has_rescued: bool) -> StructType:
        """The columns that the table is to have, with gold's plain types."""
        rows = self._rows.select(*self._columns(has_rescued=has_rescued))
        return StructType([StructField(each.name, each.dataType) for each in rows.schema])

    def extra(self) -> dict[str, object]:
        """What the publishing commit says beside its position."""
        return {
            **(self.said[-1] if self.said else {}),
            "silver": self.work.silver.version,
            "generation": self.work.silver.generation,
            "high": self.work.silver.high,
            "origin": self.work.silver.origin,
            "bronze": self.work.silver.bronze,
        }

    @functools.cached_property
    def _rows(self) -> DataFrame:
        """Silver's rows at the version that is published; by version, because silver goes on meanwhile."""
        return self.spark.sql(f"SELECT * FROM {self.silver} VERSION AS OF {self.work.silver.version}")

    def _columns(self, *, has_rescued: bool) -> list[Column]:
        """Silver's columns as gold has them: the document's, then `__rescued` where it is wanted, and `__key`."""
        documents = [name for name in self._rows.columns if name not in HIDDEN]
        engine = ["__rescued", "__key"] if has_rescued else ["__key"]
        # Without metadata: Delta notes there which type a widened column had, and a plain table must not say that.
        return [F.col(identifier(name)).alias(name, metadata={}) for name in (*documents, *engine)]

    def _is_gone(self, rows: DataFrame) -> Column:
        """Whether a row of silver is no current document: it is deleted, or silver has updates of it and never had the document."""
        unknown = F.expr(merge.HAS_NO_BASE)
        if "__deleted" not in rows.columns:
            return unknown
        return unknown | F.coalesce(F.col("__deleted"), F.lit(False))

    def _changed(self) -> DataFrame:
        """Each key that changed since gold's position, with its row in silver; `__gone` where it has no current document."""
        present = self._rows
        rows = present.where(f"`__batch` > {self.work.gold.to}")
        written = rows.withColumn("__gone", self._is_gone(rows))
        if not delta.exists(self.spark, self.deletes):
            return written
        span = f"`__batch` > {self.work.gold.to} AND `__batch` <= {self.work.silver.to}"
        deleted = self.spark.table(str(self.deletes)).where(span)
        removed = deleted.groupBy("__key").agg(F.max("__sequence").alias("__sequence"))
        if self.is_few:  # this frame is used more than once below, and mostly it is empty: on the driver both cost least
            found = removed.toArrow()
            if not found.num_rows:
                return written
            removed = self.spark.createDataFrame(found)
        alive = present if self._has_late(removed) else rows
        # A key that was deleted and written again has a row: its delete is not the last that is known of it.
        gone = removed.join(alive.select("__key"), "__key", "left_anti").select("__key", F.lit(True).alias("__gone"))
        return written.unionByName(gone, allowMissingColumns=True)

    def _has_late(self, removed: DataFrame) -> bool:
        """Whether one of these deletes may be older than the document of its key that silver held already at gold's position.

        Such a delete came late: silver remembers it, and it removed no row. Any other delete removed the row of its key, or a
        later batch has written the key again. So only then do the deleted keys have to be compared with all of silver's rows.
        """
        high = self.work.gold.high
        return high is None or not removed.where(F.col("__sequence") <= high).isEmpty()

    def _key_changes(self, changed: DataFrame) -> _KeyChanges:
        rescued = F.when(~F.col("__gone"), F.col("__rescued")).isNotNull()
        if self.is_few:
            found = changed.select("__key", rescued.alias("is_rescued")).toArrow()
            return _changes(found["__key"].to_pylist(), any(found["is_rescued"].to_pylist()))
        row = changed.agg(
            F.count("*").alias("n"),
            F.min("__key").alias("low"),
            F.max("__key").alias("high"),
            F.count_if(rescued).alias("rescued"),
        ).first()
        # One key is its own first and last; of very many the list would be longer than what it lets Delta skip.
        if 1 < row.n <= FEW_KEYS:
            return _changes(changed.select("__key").toArrow()["__key"].to_pylist(), row.rescued > 0)
        return _KeyChanges(row.n, ((row.low, row.high),) if row.n else (), row.rescued > 0)


def interpreted(table: GoldTable, place: tables.TableRef, stack: ExitStack) -> GoldTable:
    """The table, which lies at `place`: where it is small its queries run without compiled code until the stack ends."""
    if table.is_few or not query_execution.are_small(table.silver, place):
        return table
    stack.enter_context(query_execution.session_confs(table.spark, query_execution.INTERPRETED))
    return replace(table, is_few=True)


def rows_of(metadata: Mapping[str, object]) -> str:
    """What identifies the rows of a table, or of a model's, whose newest commit says this: it changes with them, and with them alone."""
    if isinstance(handed_on := metadata.get(ROWS), str):
        return handed_on
    # Not the whole metadata: lease, owner and identifier of a commit differ although its rows are the same. A silver that was made again
    # counts versions from the start, a bronze that was, or of which an older copy was brought back, batches.
    names = ("to", "silver", "generation", "origin", "log", "bronze", "model", REBUILT)
    said = {each: metadata.get(each) for each in names}
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=12).hexdigest()


def unmoved(writer: Writer) -> dict[str, object]:
    """What the table's last commit says of its rows, for a commit that changes none: the audit's result, and what identifies them."""
    held: dict[str, object] = {name: writer.metadata[name] for name in ("suite", "expectations") if name in writer.metadata}
    return {**held, ROWS: rows_of(writer.metadata)}


def _changes(keys: Sequence[str], has_rescued: bool) -> _KeyChanges:
    covering = key_ranges.covering(keys, limit=16 if len(keys) <= FEW_KEYS else 1)
    return _KeyChanges(len(keys), covering, has_rescued)


STATISTICS = "delta.dataSkippingStatsColumns"
MEASURED = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")


def statistics_columns(columns: Iterable[StructField]) -> str:
    """The columns of which Delta keeps the least and greatest values of each file, so that readers skip files.

    They are the first ones with an order, and the key: statistics of every column, nested ones too, would slow each write down.
    """
    names = [each.name for each in columns if _has_order(each) and _PLAIN_NAME.fullmatch(each.name)]
    return ",".join(map(identifier, dict.fromkeys([*names[: MEASURED - 1], "__key"])))


def _has_order(column: StructField) -> bool:
    return isinstance(column.dataType, (T.StringType, T.NumericType, T.DateType, T.TimestampType))


def _statement(columns: Sequence[str], changes: _KeyChanges) -> sql_merge.Merge:
    """The MERGE of the changed keys; literal bounds on the key let Delta skip files."""
    among = " OR ".join(f"t.`__key` BETWEEN {literal(low)} AND {literal(high)}" for low, high in changes.spans)
    return sql_merge.Merge("t.`__key` = s.`__key`", sql_merge.replacing(columns), pruning=among)
