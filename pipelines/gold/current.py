"""Publishes one collection's current documents as a gold table: the rows that silver has changed since the table's position.

Silver is read at its newest version, whose rows are those of its position, so that OPTIMIZE and VACUUM of silver do no harm. The whole
table is rewritten at its first load, when a column's type changes (gold has plain types), and when silver's position went back behind
gold's or silver was rebuilt. New columns are added before the MERGE.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.types import StructField, StructType

from cdc_core.gold import key_ranges
from cdc_core.schema import names as column_names
from cdc_core.silver import merge
from cdc_core.sql import merge as sql_merge
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from pipelines.bronze import registry, survey
from pipelines.delta import query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold.candidate import Audit, Candidate, no_audit, selected

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
"""Silver's columns beside the document's. Gold has two of them, as its last columns: `__rescued` and `__key`."""

MERGE_CONFS = {"spark.databricks.delta.merge.materializeSource": "none"}
"""Delta need not materialize the source: it reads silver at a fixed version, or is computed already."""

REBUILT = "rebuilt"
"""In the metadata of a rebuild's commit. The position has not moved, but models must be made again: they may contain rows that somebody had
changed by hand."""

ROWS = "rows"
"""In the metadata of a commit that moves the position and no rows: the identity of the rows (`rows_of`)."""

FEW_KEYS = 1_000
"""Up to this many keys, the ranges in which the table is read are made from the keys; for more there is one, from the first to the last."""


@dataclass(frozen=True)
class GoldPosition:
    """The position of a gold table; `to` is None if it is unknown.

    `high` is the greatest sequence that silver had seen by then, None if that is unknown or says nothing about deletes; `generation` and
    `origin` are those of silver's rows.
    """

    to: int | None = None
    generation: str = ""
    high: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class GoldWork:
    """A gold table with the positions of its silver table and of its own."""

    namespace: registry.Namespace
    silver: registry.SilverPosition
    gold: GoldPosition

    @property
    def is_rewrite(self) -> bool:
        """Whether the table must be rewritten: silver went back or was rebuilt, or gold has no position."""
        # Changed rows are found by the batch that wrote them, which says nothing after a step back or in another generation.
        is_other = (self.gold.generation, self.gold.origin) != (self.silver.generation, self.silver.origin)
        return self.gold.to is None or self.gold.to > self.silver.to or is_other


def why_it_waits(silver: registry.SilverPosition, published_to: int | None) -> str:
    """Why a gold table at the batch `published_to` stays as it is: silver was restored to an earlier one, and its rows are older until it
    has applied something. Empty if it need not wait."""
    if not silver.is_restored or silver.to >= (published_to or 0):
        return ""
    return (
        f"silver was restored to batch {silver.to}, and gold has published batch {published_to}: gold stays as it is until "
        "silver has applied the later events again"
    )


def forgotten_to(spark: SparkSession, deletes: tables.TableRef) -> int:
    """The newest batch from which maintenance has removed remembered deletes: a gold table before it may have missed one, and is rewritten.

    That holds only if silver has reached the batch. Otherwise it is one of another bronze, and gold would be rewritten in each round until
    silver reaches it.
    """
    return int((delta.found(spark, deletes) or {}).get(registry.FORGOTTEN_TO) or 0)


def at_silver(
    spark: SparkSession, layout: tables.Layout, namespace: registry.Namespace, *, audit: Audit = no_audit
) -> GoldTable:
    """One collection's gold table as it would be rewritten from silver now."""
    position = registry.silver_position(spark, layout.silver(*namespace))
    work = GoldWork(namespace, position, GoldPosition())
    return GoldTable(spark, work, layout.silver(*namespace), layout.deletes(*namespace), audit=audit)


@dataclass(frozen=True)
class _KeyChanges:
    """The changed keys: how many, their ranges, and whether a row of them has rescued values."""

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
    audited: list[Mapping[str, object]] = field(default_factory=list)
    """What the audit adds to the metadata of the publishing commit; empty before the audit."""

    def judge(
        self,
        table: tables.TableRef,
        changed: DataFrame | None = None,
        live: Mapping[str, object] | None = None,
        *,
        read: Callable[[Collection[str]], DataFrame | None] = lambda names: None,
    ) -> None:
        """Run the audit over the rows that the table would have, of which `changed` are new. Raises what the audit raises.

        `read` returns all rows with some columns if that is faster than a query.
        """
        has_rescued = changed is None or "__rescued" in changed.columns

        def whole(names: Collection[str] | None) -> DataFrame:
            rows = None if names is None else read(names)
            return selected(self.current().select(*self._columns(has_rescued=has_rescued)), names) if rows is None else rows

        candidate = Candidate(str(self.work.namespace), table, whole, changed, keys=("__key",), live=live or {})
        self.audited[:] = [self.audit(self.spark, candidate)]

    @functools.cached_property
    def _counts(self) -> Row:
        """The number of current documents, `n`, and of those with rescued values, `rescued`, at this version of silver."""
        return self.current().agg(F.count("*").alias("n"), F.count("__rescued").alias("rescued")).first()

    @property
    def is_empty(self) -> bool:
        """Whether silver holds no current document."""
        return not self._counts.n

    def rewritten(self, writer: Writer, *, extra: Mapping[str, object] | None = None) -> int:
        """Replace all rows by the current documents, and return their number; `extra` is added to the commit's metadata."""
        documents, counts = self.current(), self._counts
        schema = self.spark.table(str(writer.table)).schema
        # The column comes with the first rescued value, and stays when there are none left: queries may name it.
        has_rescued = counts.rescued > 0 or "__rescued" in schema.names
        columns = self._columns(has_rescued=has_rescued)
        if not self.audited:
            self.judge(writer.table)
        self._settle_statistics(writer, schema, self.wanted(has_rescued))
        metadata = self.extra() | dict(extra or {})
        writer.overwrite(documents.select(*columns), to=self.work.silver.to, extra=metadata)
        return counts.n

    def _settle_statistics(self, writer: Writer, present: StructType, row_type: StructType) -> None:
        """Stop statistics of columns that are dropped, or get a type without an order: Delta would refuse the rows."""
        setting = delta.properties(self.spark, writer.table).get(STATISTICS)
        fields = table_columns.fields_by_name(present)
        common = statistics_columns(each for each in row_type if each.name in fields and _has_order(fields[each.name]))
        if setting not in (None, common):
            writer.alter(f"SET TBLPROPERTIES ('{STATISTICS}' = '{common}')")

    def documents(self) -> DataFrame:
        """All rows that the table should have, with `__rescued`."""
        return self.current().select(*self._columns(has_rescued=True))

    def merged(self, writer: Writer) -> int:
        """Publish the rows of the changed keys, and return the number of keys."""
        if writer.is_direct and not self.is_few:
            return self._merged(writer, self._changed())
        # A MERGE plans its source three times and reads it twice.
        with query_execution.held(self._changed()) as changed:
            return self._merged(writer, changed)

    def _merged(self, writer: Writer, changed: DataFrame) -> int:
        changes = self._key_changes(changed)
        schema = self.spark.table(str(writer.table)).schema
        new_schema = self.wanted("__rescued" in schema.names or changes.has_rescued)
        alteration = table_columns.alterations(schema, new_schema)
        # The type widening feature would exclude readers of gold: the rows are rewritten with the new type. So they are if a column that
        # somebody dropped or renamed has to be added: it would be null in all existing rows.
        if (
            alteration.widened
            or alteration.impossible
            or (alteration.added and delta.has_mapped_columns(self.spark, writer.table))
        ):
            return self.rewritten(writer)
        # Without a changed key the rows have been audited already, and the commit repeats the result.
        if changes.count:
            columns = self._columns(has_rescued="__rescued" in new_schema.names)
            self.judge(writer.table, changed.where("NOT `__gone`").select(*columns), writer.metadata)
        else:
            self.audited[:] = [unmoved(writer)]
        for statement in alteration.added:
            writer.alter(statement)
        if not changes.count:
            # The position moves too: the next run would read the same batches again.
            writer.mark(to=self.work.silver.to, extra=self.extra())
        elif not self._upserted(writer, changed, changes, new_schema):
            self._merge(writer, changed, changes, new_schema)
        return changes.count

    def _upserted(self, writer: Writer, changed: DataFrame, changes: _KeyChanges, row_type: StructType) -> bool:
        """Replace the changed keys' rows without a MERGE; False if that is not possible, with nothing committed."""
        if not writer.can_upsert() or not table_columns.is_same(self.spark.table(str(writer.table)).schema, row_type):
            return False
        rows = changed.where("NOT `__gone`").select(*self._columns(has_rescued="__rescued" in row_type.names))
        version = writer.upsert(
            rows,
            touched=lambda: self._held(writer, changed, changes),
            to=self.work.silver.to,
            extra=self.extra(),
            confs=MERGE_CONFS,
            few=changes.count <= survey.MAX_DRIVER_ROWS,
        )
        return version is not None

    def _held(self, writer: Writer, changed: DataFrame, changes: _KeyChanges) -> DataFrame:
        """The locations (file and row index) of the changed keys' rows in the table."""
        keys = changed.select("__key")
        rows = self.spark.table(str(writer.table)).select("__key", *writer.row_locations())
        join_keys = F.broadcast(keys) if changes.count <= survey.MAX_BROADCAST_EVENTS else keys
        return upsert.located(rows, join_keys, changes.spans)

    def _merge(self, writer: Writer, changed: DataFrame, changes: _KeyChanges, row_type: StructType) -> None:
        source = changed.select(*self._columns(has_rescued="__rescued" in row_type.names), "__gone")
        statement = _statement(row_type.names, changes)
        writer.merge(source, statement, to=self.work.silver.to, extra=self.extra(), confs=MERGE_CONFS)

    def current(self) -> DataFrame:
        """The rows of silver that are current documents."""
        rows = self._rows
        return rows.where(~self._is_gone(rows))

    def wanted(self, has_rescued: bool) -> StructType:
        """The columns that the table should have, with gold's plain types."""
        rows = self._rows.select(*self._columns(has_rescued=has_rescued))
        return StructType([StructField(each.name, each.dataType) for each in rows.schema])

    def extra(self) -> dict[str, object]:
        """The metadata of the publishing commit beside `to`."""
        return {
            **(self.audited[-1] if self.audited else {}),
            "silver": self.work.silver.version,
            "generation": self.work.silver.generation,
            "high": self.work.silver.high,
            "origin": self.work.silver.origin,
            "bronze": self.work.silver.bronze,
        }

    @functools.cached_property
    def _rows(self) -> DataFrame:
        """Silver's rows at the version that is published; silver may change meanwhile."""
        return self.spark.sql(f"SELECT * FROM {self.silver} VERSION AS OF {self.work.silver.version}")

    def _columns(self, *, has_rescued: bool) -> list[Column]:
        """Silver's columns as gold has them: the document's, then `__rescued` if `has_rescued`, and `__key`."""
        documents = [name for name in self._rows.columns if name not in HIDDEN]
        engine = ["__rescued", "__key"] if has_rescued else ["__key"]
        # Without metadata, in which Delta records earlier types of widened columns: gold has plain types.
        return [F.col(identifier(name)).alias(name, metadata={}) for name in (*documents, *engine)]

    def _is_gone(self, rows: DataFrame) -> Column:
        """Whether a row of silver is not a current document: it is deleted, or silver has only partial updates of it."""
        has_no_base = F.expr(merge.HAS_NO_BASE)
        if "__deleted" not in rows.columns:
            return has_no_base
        return has_no_base | F.coalesce(F.col("__deleted"), F.lit(False))

    def _changed(self) -> DataFrame:
        """Each key that changed since gold's position, with its row in silver; `__gone` if it has no current document."""
        all_rows = self._rows
        rows = all_rows.where(f"`__batch` > {self.work.gold.to}")
        changed_rows = rows.withColumn("__gone", self._is_gone(rows))
        if not delta.exists(self.spark, self.deletes):
            return changed_rows
        span = f"`__batch` > {self.work.gold.to} AND `__batch` <= {self.work.silver.to}"
        deletes = self.spark.table(str(self.deletes)).where(span)
        deleted_keys = deletes.groupBy("__key").agg(F.max("__sequence").alias("__sequence"))
        if self.is_few:  # used more than once below, and mostly empty: cheapest on the driver
            key_table = deleted_keys.toArrow()
            if not key_table.num_rows:
                return changed_rows
            deleted_keys = self.spark.createDataFrame(key_table)
        live_rows = all_rows if self._has_late(deleted_keys) else rows
        # A key that was deleted and written again has a row, and is not gone.
        gone_keys = deleted_keys.join(live_rows.select("__key"), "__key", "left_anti").select(
            "__key", F.lit(True).alias("__gone")
        )
        return changed_rows.unionByName(gone_keys, allowMissingColumns=True)

    def _has_late(self, removed: DataFrame) -> bool:
        """Whether one of these deletes may be older than the document that silver held of its key at gold's position.

        Such a late delete is remembered, but removed no row, so that deleted keys must be compared with all of silver's rows. After any
        other delete, a key with a row in silver was written again by a later batch.
        """
        high = self.work.gold.high
        return high is None or not removed.where(F.col("__sequence") <= high).isEmpty()

    def _key_changes(self, changed: DataFrame) -> _KeyChanges:
        is_rescued = F.when(~F.col("__gone"), F.col("__rescued")).isNotNull()
        if self.is_few:
            flags = changed.select("__key", is_rescued.alias("is_rescued")).toArrow()
            return _changes(flags["__key"].to_pylist(), any(flags["is_rescued"].to_pylist()))
        row = changed.agg(
            F.count("*").alias("n"),
            F.min("__key").alias("low"),
            F.max("__key").alias("high"),
            F.count_if(is_rescued).alias("rescued"),
        ).first()
        # A single key is a range already, and very many keys cost more to list than Delta can skip with them.
        if 1 < row.n <= FEW_KEYS:
            return _changes(changed.select("__key").toArrow()["__key"].to_pylist(), row.rescued > 0)
        return _KeyChanges(row.n, ((row.low, row.high),) if row.n else (), row.rescued > 0)


def interpreted(table: GoldTable, place: tables.TableRef, stack: ExitStack) -> GoldTable:
    """The table, published at `place`; if it is small, its queries run without generated code until the stack is closed."""
    if table.is_few or not query_execution.are_small(table.silver, place):
        return table
    stack.enter_context(query_execution.session_confs(table.spark, query_execution.INTERPRETED))
    return replace(table, is_few=True)


def rows_of(metadata: Mapping[str, object]) -> str:
    """The identity of the rows of a gold table, or of a model's, with this metadata in its last commit; it changes with the rows only."""
    if isinstance(rows_id := metadata.get(ROWS), str):
        return rows_id
    # Not the whole metadata: lease, owner and commit identifier differ for equal rows. Batches and versions alone do not identify rows:
    # they start again after silver or bronze was created again, or an older copy of bronze was restored.
    names = ("to", "silver", "generation", "origin", "log", "bronze", "model", REBUILT)
    identity = {name: metadata.get(name) for name in names}
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()


def unmoved(writer: Writer) -> dict[str, object]:
    """Metadata for a commit that changes no rows: the audit's result, and the identity of the rows, as the table's last commit has them."""
    audit_result: dict[str, object] = {
        name: writer.metadata[name] for name in ("suite", "expectations") if name in writer.metadata
    }
    return {**audit_result, ROWS: rows_of(writer.metadata)}


def _changes(keys: Sequence[str], has_rescued: bool) -> _KeyChanges:
    spans = key_ranges.covering(keys, limit=16 if len(keys) <= FEW_KEYS else 1)
    return _KeyChanges(len(keys), spans, has_rescued)


STATISTICS = "delta.dataSkippingStatsColumns"
MEASURED = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")


def statistics_columns(columns: Iterable[StructField]) -> str:
    """The value of `STATISTICS`: the columns for which Delta keeps minima and maxima of each file.

    They are the first columns with an order, and the key: statistics of all columns, also nested ones, would slow down each write.
    """
    names = [each.name for each in columns if _has_order(each) and _PLAIN_NAME.fullmatch(each.name)]
    return ",".join(map(identifier, dict.fromkeys([*names[: MEASURED - 1], "__key"])))


def _has_order(column: StructField) -> bool:
    return isinstance(column.dataType, (T.StringType, T.NumericType, T.DateType, T.TimestampType))


def _statement(columns: Sequence[str], changes: _KeyChanges) -> sql_merge.Merge:
    """The MERGE of the changed keys, with literal bounds on the key, so that Delta skips files."""
    key_bounds = key_ranges.condition("t.`__key`", changes.spans)
    return sql_merge.Merge("t.`__key` = s.`__key`", sql_merge.replacing(columns), pruning=key_bounds)
