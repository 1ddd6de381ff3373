"""Gold: the current documents of each collection, for analysts and any Delta reader.

For each collection, from the bronze batch that its gold table is at to the one that silver is at, at silver's version v:

    changed     rows of silver@v that a later batch wrote, and keys whose deletes a later batch remembered
    shaped      the documents' columns, what was rescued (once anything was), and `__key`, last
    published   the keys' rows marked as deleted and the new ones written, or one MERGE where that cannot be; the commit carries
                the batch and v, the table's new position
    compacted   now and then: small files, and those of which much is marked as deleted

v is the newest version that holds what silver's position says, so that OPTIMIZE and VACUUM of silver take nothing away. The whole
table is rewritten from silver@v at its first load, when a column's type changed (gold has plain types), and when silver went
back behind gold or was rebuilt.

Exactly once: what is published is a function of silver@v and of the table's own position, which moves in the same commit.
A new column is added before the MERGE, and only where it is missing.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.types import StructField, StructType

from cdc_core import errors
from cdc_core.gold import spans
from cdc_core.schema import names as column_names
from cdc_core.silver import merge
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.bronze import collections as registry
from pipelines.delta import maintenance, query_execution, table_history, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import history
from pipelines.gold.candidate import Audit, Candidate, unjudged
from pipelines.news import News
from pipelines.silver import collection as silver_collection
from pipelines.spark import parallel
from pipelines.spark.parallel import Outcome

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

PROPERTIES = {
    "delta.enableTypeWidening": "false",
    "delta.enableChangeDataFeed": "false",
    "delta.columnMapping.mode": "none",
    "delta.checkpointPolicy": "classic",
    "delta.checkpointInterval": "50",
    "delta.dataSkippingNumIndexedCols": "200",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}

HIDDEN = frozenset(column_names.ENGINE)
"""Silver's columns that are not the document's; of these `__rescued` and `__key` come back at the end."""

MERGE_CONFS = {"spark.databricks.delta.merge.materializeSource": "none"}
"""The source reads silver at a fixed version: reading it twice is cheaper than writing it down once."""

FEW_KEYS = 1_000
"""So many keys are looked for by their own ranges; of more keys by the range from the first to the last."""


@dataclass(frozen=True)
class CollectionResult:
    """What one run did to one gold table: bronze batches (`after`, `to`] are in its `version`."""

    namespace: str
    after: int
    to: int
    changed: int
    rewritten: bool
    version: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """What one run did; `changed` counts keys, over all collections."""

    changed: int
    seconds: float
    collections: tuple[CollectionResult, ...] = ()


@dataclass(frozen=True)
class Position:
    """Where a gold table stands; None for `to` where nothing says so.

    `high` is the greatest sequence that silver had seen by then, None where it was not said.
    """

    to: int | None = None
    generation: str = ""
    high: str | None = None


@dataclass(frozen=True)
class Work:
    """A gold table that is not where its silver table is."""

    namespace: registry.Namespace
    silver: registry.SilverPosition
    gold: Position

    @property
    def is_rewrite(self) -> bool:
        """Whether the changes since gold's position cannot be told from silver."""
        return self.gold.to is None or self.gold.to > self.silver.to or self.gold.generation != self.silver.generation


@dataclass(frozen=True)
class _Versions:
    """A history that is not where its silver table is."""

    namespace: registry.Namespace
    silver: registry.SilverPosition
    at: history.Position


Due = TypeVar("Due", Work, _Versions)


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = True,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
    pause_seconds: float = 1.0,
    audit: Audit = unjudged,
    silver_news: News | None = None,
) -> Result:
    """Bring every gold table to where its silver table is; without `once`, go on until `stop` is set.

    `audit` judges each version before it is published. What it refuses stays at the last good version, and hinders no other
    table: with `once` the refusal is raised when all are done; otherwise it is logged, and the next version judged anew.

    Where silver has nothing new it waits, at most `pause_seconds`, for what `silver_news` says.
    A table that is there already gets no commit. A killed run leaves every table at a position of its own, and the next
    one goes on from there. A collection that fails is named and the others go on; at the end, or when all have failed, its
    error is raised (`errors.together` where there are several): `TableOwned`, `LeaseHeld`, `OwnershipLost`, `CommitConflict`
    among them; a refused run has committed nothing.
    """
    ended = stop or threading.Event()
    gold = _Gold(spark, settings, take_over, parallel.Pool(spark, sessions), ended, audit)
    started = time.monotonic()
    found: list[CollectionResult] = []
    try:
        while True:
            published = gold.published()
            found += published
            if once or ended.is_set():
                break
            if not published:
                (silver_news or News()).wait(pause_seconds, stop=ended)
        gold.failures.raised()
    finally:
        gold.close()
    if once and gold.refused:
        raise _refusal(gold.refused.values())
    return Result(sum(each.changed for each in found), time.monotonic() - started, tuple(found if once else ()))


@dataclass(frozen=True)
class _Refused:
    """What was said of the version that was made from silver at `version`."""

    version: int
    error: errors.GateFailed | errors.SettingsError


def _refusal(refused: Iterable[_Refused]) -> errors.MedallionError:
    """One error for all that was refused."""
    found = [each.error for each in refused]
    gates = [each for each in found if isinstance(each, errors.GateFailed)]
    return errors.GateFailed("\n".join(map(str, found))) if gates else found[0]


@dataclass
class _Gold:
    """The gold tables of one pipeline, with the claims that are held while it runs."""

    spark: SparkSession
    settings: Settings
    take_over: bool
    pool: parallel.Pool
    stop: threading.Event
    audit: Audit = unjudged
    refused: dict[registry.Namespace, _Refused] = field(default_factory=dict)
    writers: dict[tables.TableRef, Writer] = field(default_factory=dict)
    switched: set[registry.Namespace] = field(default_factory=set)
    failures: parallel.Failures = field(default_factory=parallel.Failures)

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)

    def close(self) -> None:
        """Release what is held; a claim that was lost already is nobody's to release."""
        for writer in self.writers.values():
            with suppress(errors.MedallionError):
                writer.release()
        self.writers.clear()

    def published(self) -> list[CollectionResult]:
        """Bring every table to where silver is now."""
        found = registry.read(self.spark, self.settings)
        for namespace, error in found.refused.items():
            self.failures.note(str(namespace), error)
        known = [each for each in found.namespaces if not self.failures.waits(str(each))]
        due = [work for work in map(self._looked_at, known) if work is not None]
        results = self.pool.each(due, self._guarded(self._applied), stop=self.stop)
        going = [each for each in known if str(each) not in self.failures.found]
        results += self.pool.each(self._histories(going), self._guarded(self._versioned), stop=self.stop)
        if known and all(str(each) in self.failures.found for each in found.namespaces):
            self.failures.raised()
        self._switch(going)
        return [result for result in results if result is not None]

    def _switch(self, known: Sequence[registry.Namespace]) -> None:
        """Bring tables that nothing changed in to what the settings say of deletion vectors; the others were when they were claimed."""
        wanted = self.settings.gold.deletion_vectors
        for namespace in known:
            if wanted is None or namespace in self.switched or self.stop.is_set():
                continue
            try:
                self._switched(namespace, wanted)
            except Exception as error:
                self.failures.note(str(namespace), error)
            self.switched.add(namespace)

    def _switched(self, namespace: registry.Namespace, wanted: bool) -> None:
        for table in (
            self.layout.gold(namespace.db, namespace.collection),
            self.layout.history(namespace.db, namespace.collection),
        ):
            if table in self.writers or not delta.exists(self.spark, table):
                continue
            if (delta.properties(self.spark, table).get(definition.DELETION_VECTORS) == "true") is not wanted:
                self._claimed(self.spark, table)

    def _looked_at(self, namespace: registry.Namespace) -> Work | None:
        try:
            return self._work(namespace)
        except Exception as error:
            self.failures.note(str(namespace), error)
            return None

    def _guarded(self, act: Callable[[SparkSession, Due], Outcome]) -> Callable[[SparkSession, Due], Outcome | None]:
        """What is done for a collection; one that fails lets go of its tables, and the others go on."""

        def done(spark: SparkSession, item: Due) -> Outcome:
            try:
                return act(spark, item)
            except Exception:
                self._let_go(item)
                raise

        return self.failures.guarding(done, name=_name)

    def _let_go(self, work: Work | _Versions) -> None:
        place = self.layout.gold if isinstance(work, Work) else self.layout.history
        writer = self.writers.pop(place(work.namespace.db, work.namespace.collection), None)
        if writer is not None:
            with suppress(errors.MedallionError):
                writer.release()

    def _histories(self, known: Sequence[registry.Namespace]) -> list[_Versions]:
        """The collections whose versions are kept, and not up to date."""
        found = []
        for namespace in known:
            name = _history_of(namespace)
            if not self.settings.silver.for_collection(str(namespace)).history or self.failures.waits(name):
                continue
            try:
                work = self._history(namespace, known)
            except Exception as error:
                self.failures.note(name, error)
            else:
                found += [work] if history.is_due(work.at, work.silver) else []
        return found

    def _history(self, namespace: registry.Namespace, known: Sequence[registry.Namespace]) -> _Versions:
        table = self.layout.history(namespace.db, namespace.collection)
        if registry.Namespace(namespace.db, f"{namespace.collection}_history") in known:
            raise errors.DecisionNeeded(
                f"{table.label}: the history of {namespace} would lie where the collection {namespace}_history has its "
                "table; take one of them out of the pipeline, or history out of the settings"
            )
        silver = registry.silver_position(self.spark, self._silver(namespace))
        return _Versions(namespace, silver, history.position(self.spark, table))

    def _versioned(self, spark: SparkSession, work: _Versions) -> CollectionResult:
        started = time.monotonic()
        table = self.layout.history(work.namespace.db, work.namespace.collection)
        history.create(spark, table, properties=PROPERTIES | self._vectors())
        writer = self._claimed(spark, table)
        few = query_execution.are_small(self._silver(work.namespace), table)
        with query_execution.session_confs(spark, query_execution.INTERPRETED if few else {}):
            kept = history.History(spark, self.settings, self.layout, work.namespace, writer)
            events = kept.brought_up(work.at, work.silver, stop=self.stop)
            maintenance.compact(writer)
        name = _history_of(work.namespace)
        return CollectionResult(name, work.at.to, work.silver.to, events, False, writer.version, time.monotonic() - started)

    def _work(self, namespace: registry.Namespace) -> Work | None:
        silver = registry.silver_position(self.spark, self._silver(namespace))
        if silver.version < 0:
            return None
        refused = self.refused.get(namespace)
        if refused is not None and refused.version == silver.version:
            return None
        work = Work(namespace, silver, self._position(namespace))
        return work if work.is_rewrite or work.gold.to != silver.to else None

    def _position(self, namespace: registry.Namespace) -> Position:
        table = self._table(namespace)
        if table not in self.writers and not delta.exists(self.spark, table):
            return Position()
        commit = table_history.position(self.spark, table)
        metadata = {} if commit is None or commit.metadata is None else commit.metadata
        return Position(metadata.get("to"), metadata.get("generation") or "", metadata.get("high"))

    def _applied(self, spark: SparkSession, work: Work) -> CollectionResult | None:
        touched = (self._silver(work.namespace), self._table(work.namespace))
        few = query_execution.are_small(*touched)
        with query_execution.session_confs(spark, query_execution.INTERPRETED if few else {}):
            try:
                return self._published(spark, work, few)
            except (errors.GateFailed, errors.SettingsError) as error:
                log.warning("%s", str(error).partition("\n")[0])
                self.refused[work.namespace] = _Refused(work.silver.version, error)
                return None

    def _published(self, spark: SparkSession, work: Work, few: bool) -> CollectionResult | None:
        started = time.monotonic()
        table = Table(spark, work, self._silver(work.namespace), self._deletes(work.namespace), few, self.audit)
        if self._table(work.namespace) not in self.writers and not delta.exists(spark, self._table(work.namespace)):
            if table.current().isEmpty():
                return None
            table.judge(self._table(work.namespace))
            wanted = table.wanted(False)
            columns = ", ".join(f"{identifier(each.name)} {merge.ddl(each.dataType)}" for each in wanted)
            properties = PROPERTIES | self._vectors() | {STATISTICS: _with_statistics(wanted)}
            delta.create(spark, self._table(work.namespace), columns=columns, properties=properties)
        writer = self._claimed(spark, self._table(work.namespace))
        changed = table.rewritten(writer) if work.is_rewrite else table.merged(writer)
        maintenance.compact(writer)
        return CollectionResult(
            str(work.namespace),
            work.gold.to or 0,
            work.silver.to,
            changed,
            work.is_rewrite,
            writer.version,
            time.monotonic() - started,
        )

    def _claimed(self, spark: SparkSession, table: tables.TableRef) -> Writer:
        writer = self.writers.get(table)
        if writer is None:
            writer = self.writers[table] = Writer.claim(spark, table, take_over=self.take_over)
            if self.settings.gold.deletion_vectors is not None:
                maintenance.set_deletion_vectors(writer, self.settings.gold.deletion_vectors)
        writer.spark = spark
        return writer

    def _vectors(self) -> dict[str, str]:
        """What a new table says of deletion vectors."""
        return {definition.DELETION_VECTORS: "false" if self.settings.gold.deletion_vectors is False else "true"}

    def _silver(self, namespace: registry.Namespace) -> tables.TableRef:
        return self.layout.silver(namespace.db, namespace.collection)

    def _deletes(self, namespace: registry.Namespace) -> tables.TableRef:
        return self.layout.deletes(namespace.db, namespace.collection)

    def _table(self, namespace: registry.Namespace) -> tables.TableRef:
        return self.layout.gold(namespace.db, namespace.collection)


def _name(work: Work | _Versions) -> str:
    """Under which name it fails: a history that stands still hinders its collection's documents as little as another's."""
    return str(work.namespace) if isinstance(work, Work) else _history_of(work.namespace)


def _history_of(namespace: registry.Namespace) -> str:
    return f"{namespace} (history)"


def at_silver(spark: SparkSession, layout: tables.Layout, namespace: registry.Namespace) -> Table:
    """One collection's gold table as silver is now, whatever it holds."""
    names = (namespace.db, namespace.collection)
    position = registry.silver_position(spark, layout.silver(*names))
    return Table(spark, Work(namespace, position, Position()), layout.silver(*names), layout.deletes(*names))


@dataclass(frozen=True)
class _Changes:
    """What there is to publish: how many keys, in which ranges of keys, and whether anything of it was rescued."""

    count: int
    spans: tuple[spans.Span, ...]
    has_rescued: bool


@dataclass(frozen=True)
class Table:
    """One gold table on its way from its position to silver's."""

    spark: SparkSession
    work: Work
    silver: tables.TableRef
    deletes: tables.TableRef
    is_few: bool = False
    audit: Audit = unjudged
    said: list[Mapping[str, object]] = field(default_factory=list)
    """What the audit wants said by the commit that publishes; empty until the table was judged."""

    def judge(
        self, table: tables.TableRef, changed: DataFrame | None = None, live: Mapping[str, object] | None = None
    ) -> None:
        """Have the table judged as it would be; `changed` are those of its rows that are new. Raises what the audit raises."""
        has_rescued = changed is None or "__rescued" in changed.columns

        def whole() -> DataFrame:
            return self.current().select(*self._columns(has_rescued=has_rescued))

        candidate = Candidate(str(self.work.namespace), table, whole, changed, keys=("__key",), live=live or {})
        self.said[:] = [self.audit(self.spark, candidate)]

    def rewritten(self, writer: Writer) -> int:
        """Replace the table by the current documents; their number."""
        current = self.current()
        seen = current.agg(F.count("*").alias("n"), F.count("__rescued").alias("rescued")).first()
        present = self.spark.table(str(writer.table)).schema
        has_rescued = seen.rescued > 0 or "__rescued" in present.names
        columns = self._columns(has_rescued=has_rescued)
        if not self.said:
            self.judge(writer.table)
        self._settle_statistics(writer, present, self.wanted(has_rescued))
        writer.overwrite(current.select(*columns), to=self.work.silver.to, extra=self._extra(), overwrite_schema=True)
        return seen.n

    def _settle_statistics(self, writer: Writer, present: StructType, wanted: StructType) -> None:
        """Keep statistics of no column that goes, or changes to a type without an order: Delta would refuse the rows."""
        listed = delta.properties(self.spark, writer.table).get(STATISTICS)
        common = _with_statistics(each for each in wanted if each.name in present.names and _has_order(present[each.name]))
        if listed not in (None, common):
            writer.alter(f"SET TBLPROPERTIES ('{STATISTICS}' = '{common}')")

    def documents(self) -> DataFrame:
        """The rows that the table is to have, with what was rescued."""
        return self.current().select(*self._columns(has_rescued=True))

    def merged(self, writer: Writer) -> int:
        """Bring the changed keys up to date; their number."""
        changed = query_execution.computed(self._changed()) if self.is_few else self._changed()
        changes = self._looked_at(changed)
        present = self.spark.table(str(writer.table)).schema
        wanted = self.wanted("__rescued" in present.names or changes.has_rescued)
        alteration = merge.alterations(present, wanted)
        if alteration.widened or alteration.impossible:
            return self.rewritten(writer)
        if changes.count:
            columns = self._columns(has_rescued="__rescued" in wanted.names)
            self.judge(writer.table, changed.where("NOT `__gone`").select(*columns), writer.metadata)
        else:
            self.said[:] = [{name: writer.metadata[name] for name in ("suite", "expectations") if name in writer.metadata}]
        for statement in alteration.added:
            writer.alter(statement)
        if not changes.count:
            writer.mark(to=self.work.silver.to, extra=self._extra())
        elif not self._upserted(writer, changed, changes, wanted):
            self._merge(writer, changed, changes, wanted)
        return changes.count

    def _upserted(self, writer: Writer, changed: DataFrame, changes: _Changes, wanted: StructType) -> bool:
        """Whether the changed keys' rows could be replaced without a MERGE."""
        if not writer.can_upsert() or not merge.is_same(self.spark.table(str(writer.table)).schema, wanted):
            return False
        rows = changed.where("NOT `__gone`").select(*self._columns(has_rescued="__rescued" in wanted.names))
        made = writer.upsert(
            rows,
            touched=self._held(writer, changed, changes),
            to=self.work.silver.to,
            extra=self._extra(),
            confs=MERGE_CONFS,
            few=changes.count <= silver_collection.SMALL,
        )
        return made is not None

    def _held(self, writer: Writer, changed: DataFrame, changes: _Changes) -> DataFrame:
        """Where the table holds rows of the changed keys."""
        keys = changed.select("__key")
        among = functools.reduce(operator.or_, (F.col("__key").between(*span) for span in changes.spans))
        rows = self.spark.table(str(writer.table)).where(among).select("__key", *writer.places())
        few = F.broadcast(keys) if changes.count <= silver_collection.MANY else keys
        return rows.join(few, "__key", "left_semi").select(*upsert.ROW_LOCATION)

    def _merge(self, writer: Writer, changed: DataFrame, changes: _Changes, wanted: StructType) -> None:
        view = f"gold_{threading.get_ident()}"
        changed.select(*self._columns(has_rescued="__rescued" in wanted.names), "__gone").createOrReplaceTempView(view)
        try:
            sql = _statement(str(writer.table), view, wanted.names, changes)
            writer.merge(sql, to=self.work.silver.to, extra=self._extra(), confs=MERGE_CONFS)
        finally:
            self.spark.catalog.dropTempView(view)

    def current(self) -> DataFrame:
        """The rows of silver that are current documents."""
        rows = self._rows
        return rows.where(~self._is_gone(rows))

    def wanted(self, has_rescued: bool) -> StructType:
        """The table's columns for silver's, by name and plain type."""
        rows = self._rows.select(*self._columns(has_rescued=has_rescued))
        return StructType([StructField(each.name, each.dataType) for each in rows.schema])

    def _extra(self) -> dict[str, object]:
        return {
            **(self.said[-1] if self.said else {}),
            "silver": self.work.silver.version,
            "generation": self.work.silver.generation,
            "high": self.work.silver.high,
        }

    @functools.cached_property
    def _rows(self) -> DataFrame:
        """Silver's rows at the version that holds what its position says."""
        return self.spark.sql(f"SELECT * FROM {self.silver} VERSION AS OF {self.work.silver.version}")

    def _columns(self, *, has_rescued: bool) -> list[Column]:
        """Silver's columns for gold: without the engine's, but for the rescued values and the key, last."""
        documents = [name for name in self._rows.columns if name not in HIDDEN]
        engine = ["__rescued", "__key"] if has_rescued else ["__key"]
        return [F.col(identifier(name)).alias(name, metadata={}) for name in (*documents, *engine)]

    def _is_gone(self, rows: DataFrame) -> Column:
        """Whether a row of silver is no current document: deleted, or of a document that was never known."""
        unknown = F.expr(merge.HAS_NO_BASE)
        if "__deleted" not in rows.columns:
            return unknown
        return unknown | F.coalesce(F.col("__deleted"), F.lit(False))

    def _changed(self) -> DataFrame:
        """Each key that changed since gold's position, with its row as it is now; `__gone` where there is none."""
        present = self._rows
        rows = present.where(f"`__batch` > {self.work.gold.to}")
        written = rows.withColumn("__gone", self._is_gone(rows))
        if not delta.exists(self.spark, self.deletes):
            return written
        span = f"`__batch` > {self.work.gold.to} AND `__batch` <= {self.work.silver.to}"
        deleted = self.spark.table(str(self.deletes)).where(span)
        removed = deleted.groupBy("__key").agg(F.max("__sequence").alias("__sequence"))
        if self.is_few:  # they are asked more than once, and mostly there are none
            found = removed.toArrow()
            if not found.num_rows:
                return written
            removed = self.spark.createDataFrame(found)
        alive = present if self._has_late(removed) else rows
        gone = removed.join(alive.select("__key"), "__key", "left_anti").select("__key", F.lit(True).alias("__gone"))
        return written.unionByName(gone, allowMissingColumns=True)

    def _has_late(self, removed: DataFrame) -> bool:
        """Whether a delete among these may have come after a later document of its key, which silver held already at gold's
        position: it is remembered, and took nothing away. Any other took away what was there, or a row of a later batch follows it.
        """
        high = self.work.gold.high
        return high is None or not removed.where(F.col("__sequence") <= high).isEmpty()

    def _looked_at(self, changed: DataFrame) -> _Changes:
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
        if 1 < row.n <= FEW_KEYS:
            return _changes(changed.select("__key").toArrow()["__key"].to_pylist(), row.rescued > 0)
        return _Changes(row.n, ((row.low, row.high),) if row.n else (), row.rescued > 0)


def _changes(keys: Sequence[str], has_rescued: bool) -> _Changes:
    covering = spans.covering(keys, limit=16 if len(keys) <= FEW_KEYS else 1)
    return _Changes(len(keys), covering, has_rescued)


STATISTICS = "delta.dataSkippingStatsColumns"
MEASURED = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")


def _with_statistics(columns: Iterable[StructField]) -> str:
    """The columns whose least and greatest values are kept, for readers to skip files by: the first ones with an order, and the key.

    Those of every column, nested ones too, would be paid for with each row that is written.
    """
    names = [each.name for each in columns if _has_order(each) and _PLAIN_NAME.fullmatch(each.name)]
    return ",".join(map(identifier, dict.fromkeys([*names[: MEASURED - 1], "__key"])))


def _has_order(column: StructField) -> bool:
    return isinstance(column.dataType, (T.StringType, T.NumericType, T.DateType, T.TimestampType))


def _statement(target: str, source: str, columns: Sequence[str], changes: _Changes) -> str:
    """The MERGE of the changed keys; literal bounds on the key let Delta skip files."""
    among = " OR ".join(f"t.`__key` BETWEEN {literal(low)} AND {literal(high)}" for low, high in changes.spans)
    names = ", ".join(map(identifier, columns))
    values = ", ".join(f"s.{identifier(name)}" for name in columns)
    assigned = ", ".join(f"t.{identifier(name)} = s.{identifier(name)}" for name in columns)
    return (
        f"MERGE INTO {target} AS t USING {identifier(source)} AS s ON t.`__key` = s.`__key` AND ({among})\n"
        f"WHEN MATCHED AND s.`__gone` THEN DELETE\n"
        f"WHEN MATCHED THEN UPDATE SET {assigned}\n"
        f"WHEN NOT MATCHED AND NOT s.`__gone` THEN INSERT ({names}) VALUES ({values})"
    )
