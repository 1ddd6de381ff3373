"""History: one row per version of a document, with the source time during which it was valid.

For each collection with `history: true`, from the bronze batch of its table to that of silver:

    touched     the collection's events of a range, and the stored versions of their keys that end at the first event or later
    laid out    each key's versions are computed again (`cdc_core.gold.versions`); each partial update is folded to a version of its own
    typed       by a schema of its own, because versions in between have fields that silver never saw
    written     new versions, and the ends of those before them, replace the rows that were read, or go into a MERGE; the one commit
                carries the position
    swept       a drop, a rename or the end of a snapshot ends the versions of documents that are gone

`valid_from` and `valid_to` are cluster times in whole seconds, so that one second is a consistent cut over all collections: no transaction
lies on both sides of it. The table is a function of the events, in whatever order and ranges they come, so that runs may be repeated, or
killed at any point.

Smaller ranges need no query: `in_process_history`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.bronze import collection_ends
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep, SweepCause
from cdc_core.gold import versions
from cdc_core.properties.source import FullUpdateType
from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.settings.parse import CollectionSettings, Settings
from cdc_core.signals import signal as signals
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.silver import reduce
from cdc_core.sql import merge as sql_merge
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from cdc_core.typed import plan as typed
from pipelines.bronze import collection_events, quarantine_table, registry, survey
from pipelines.bronze import log as bronze_log
from pipelines.delta import query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold.history_position import HistoryPosition
from pipelines.schema import batch_evolution, dropped, looks
from pipelines.schema import log as schemas
from pipelines.schema.document_typer import DocumentTyper
from pipelines.spark import parallel

log = logging.getLogger(__name__)

GENERATION = "history"
"""The generation of the schemas of these tables in `ops/schemas`."""

ENGINE_DDL = (
    "`__rescued` MAP<STRING, STRING>, `__incomplete` BOOLEAN, `__as_captured` BOOLEAN, "
    "`__key` STRING, `__sequence` STRING, `__until` STRING, `valid_from` TIMESTAMP, `valid_to` TIMESTAMP"
)
SAME_VERSION = "t.`__key` = s.`__key` AND t.`__sequence` = s.`__sequence`"

RESERVED = frozenset({"__as_captured", "__until", "valid_from", "valid_to"})

_MARKS = T.StructType().add("__until", "string").add("__deleted", "boolean")
"""The column that marks deletes, and the one before it."""


def check(spark: SparkSession, settings: Settings, namespace: registry.Namespace, at: HistoryPosition) -> None:
    """Raise `DecisionNeeded` if bronze lacks events after the history's position: documents that were deleted there would stay open for
    ever. A snapshot of the whole collection ends them."""
    layout = delta.layout(settings.lakehouse)
    table, bronze_table = layout.history(*namespace), layout.bronze(settings.name)
    if not at.to and not at.has_gap:
        return
    is_behind = at.has_gap
    if not is_behind and at.to < bronze_log.trimmed_to(spark, bronze_table):
        first_batches = bronze_log.first_batches(spark, bronze_table, where=namespace.predicate)
        is_behind = first_batches.get(namespace, 0) > at.to
    if is_behind and not bronze_log.is_whole(spark, bronze_table, str(namespace)):
        raise errors.DecisionNeeded(
            f"{table.label}: events after its last version were removed from bronze, while no history was kept or "
            "before it was restored or repaired. To read the documents again, run "
            f"{signals.snapshot_command(str(namespace))}"
        )


def create(spark: SparkSession, table: tables.TableRef, *, properties: Mapping[str, str]) -> None:
    """Create a collection's table if it does not exist, without columns of documents."""
    delta.create(spark, table, columns=ENGINE_DDL, properties=properties)


class LocalHistory(Protocol):
    """The part of a history's work that this process does without queries: `in_process_history`."""

    def ranges(self, history: History, span: BatchRange, events: int) -> Sequence[BatchRange] | None:
        """A span with this number of events, cut into ranges for `is_applied`; None if a query has to cut it."""

    def is_applied(self, history: History, range_: BatchRange, position: HistoryPosition) -> bool:
        """Apply a range's events, with this position; False if queries have to, with nothing committed."""

    def is_swept(self, history: History, sweep: Sweep, position: HistoryPosition) -> bool:
        """The same for a sweep."""


@dataclass
class History:
    """One collection's table of versions, claimed by `writer`."""

    spark: SparkSession
    settings: Settings
    layout: tables.Layout
    namespace: registry.Namespace
    writer: Writer
    local: LocalHistory

    def __post_init__(self) -> None:
        self.options: CollectionSettings = self.settings.silver.for_collection(str(self.namespace))
        self.typer = DocumentTyper(self.options)
        self.folds = self.settings.keeps_document(str(self.namespace))
        self.bronze = self.layout.bronze(self.settings.name)
        self.mode = self.options.unwrap.delete_tombstone_handling_mode
        schema_versions = schemas.latest(
            self.spark, self.layout.ops("schemas"), generations={str(self.namespace): GENERATION}
        )
        self.schema = schema_versions.get(str(self.namespace), schemas.SchemaVersion(generation=GENERATION))
        added_names = {*(self.writer.metadata.get("added") or ()), *(each.name for each in self.added())}
        reserved = {*column_names.ENGINE, *RESERVED, *added_names}
        columns = _columns_of(self.writer, self._stored)
        # An existing column is kept up when the mode changes: it would be wrong for versions that a late event ends.
        self.marks_deleted = self.mode.adds_deleted or "__deleted" in columns
        if not schema_versions and not reserved.issuperset(columns):
            raise errors.DecisionNeeded(
                f"{self.writer.table.label}: ops/schemas no longer describes its columns. Remove this table, and gold "
                "rebuilds it from bronze, which may lack old versions: keep a copy"
            )
        # After the table was removed, the columns are laid out by the present settings.
        if {name for name, _ in self.schema.schema.table()}.isdisjoint(columns):
            self.schema = replace(self.schema, schema=document_schema.EMPTY)

    def brought_up(
        self, at: HistoryPosition, silver: registry.SilverPosition, *, stop: threading.Event, seconds: float = math.inf
    ) -> int:
        """Apply the events between a position and silver's, and return their number; 0 if it ended early, between two ranges, because
        `stop` was set or `seconds` have passed."""
        # A name stays reserved when the setting is removed: the column still exists, and a field must not mix with its values.
        added_names = {*at.added, *(each.name for each in self.added())}
        always_folds = self.settings.keeps_document(str(self.namespace))
        start = at.start(silver, folds=always_folds)
        span = BatchRange(start, silver.to)
        # Also partial updates of an earlier capture mode, if the history has documents to fold them onto. They may come after ranges without
        # one: the capture may go on in that mode for a while. From the beginning they are those of versions that come again, however long
        # ago they were folded.
        self.folds = self.settings.keeps_document(
            str(self.namespace),
            has_waiting=lambda: (
                "__document" in _columns_of(self.writer, self._stored)
                and collection_events.has_partial(self.spark, self.bronze, self.namespace, span, is_last=False)
            ),
        )
        # From the beginning, also versions from before a drop are made again; it is in bronze, too, and sets its floor again.
        floor = at.floor if start else ""
        start_position = replace(at, to=start, floor=floor, log=silver.log, bronze=silver.bronze, has_gap=False)
        # Versions of a range without folding lack their documents: back in the old mode, they are made again.
        are_all_folded = self.folds and (always_folds or not start or at.folds is True)
        position = replace(start_position, added=tuple(sorted(added_names)), folds=are_all_folded)
        if not position.to and not bronze_log.is_whole(self.spark, self.bronze, str(self.namespace)):
            log.warning(
                "%s: old events were removed from bronze, so the history begins with what bronze still has. To get a "
                "version of documents that did not change since, run %s",
                self.namespace,
                signals.snapshot_command(str(self.namespace)),
            )
        began = time.monotonic()
        counts, sweeps = survey.surveyed(self.spark, self.bronze, span, only=self.namespace)
        seconds = max(seconds, parallel.TURN_SHARE * (time.monotonic() - began))
        event_counts = counts.get(self.namespace, survey.EventCounts())
        due_sweeps = survey.sweeps_to_apply(sweeps, self.options)
        ranges = self.local.ranges(self, span, event_counts.events) or (span,)
        if len(ranges) == 1 and event_counts.events > self.options.max_batch_events:
            ranges = survey.bounded(self._events(span), span=span, limit=self.options.max_batch_events)
        end = time.monotonic() + seconds
        for range_ in ranges:
            if stop.is_set() or (range_ is not ranges[0] and time.monotonic() > end):
                return 0
            position = self._with_sweeps(range_, position, collection_ends.within(due_sweeps, range_), event_counts.events)
        return event_counts.events

    def _with_sweeps(
        self, range_: BatchRange, position: HistoryPosition, sweeps: Sequence[Sweep], events: int
    ) -> HistoryPosition:
        """Apply one range and its sweeps; `events` is the number in the whole span. The position moves with the last of them, so that a
        crash in between repeats the range."""
        position = replace(position, to=position.to if sweeps else range_.to)
        if not self.local.is_applied(self, range_, position):
            tables_read = (self.writer.table, self.layout.silver(*self.namespace))
            is_few = events <= survey.MAX_DRIVER_ROWS and query_execution.are_small(*tables_read)
            with query_execution.session_confs(self.spark, query_execution.INTERPRETED if is_few else {}):
                self._range(range_, position)
        for sweep in sweeps:
            floor = sweep.floor(position.floor, keeps_row=self.mode.keeps_row)
            position = replace(position, floor=floor, to=range_.to if sweep is sweeps[-1] else position.to)
            self._sweep(sweep, position)
        return position

    # --- events

    def _events(self, span: BatchRange) -> DataFrame:
        return survey.events(self.spark, self.bronze, self.namespace, span)

    def _range(self, range_: BatchRange, position: HistoryPosition) -> None:
        # An unreadable event leaves the versions after it incomplete, until it comes again or a whole document does.
        events = quarantine_rules.readable(self._events(range_), with_holes=True)
        if position.floor:
            # After a drop the key belongs to another document: an older event would open a version of one that is gone.
            events = events.where(f"sequence >= {literal(position.floor)}")
        if self.mode.keeps_row:
            events = events.where(f"op <> '{bronze.Op.DELETE.value}'")
        bounds = (F.min("sequence").alias("low"), F.min("key").alias("first"), F.max("key").alias("last"))
        summary = events.agg(*bounds, F.count("*").alias("events")).first()
        if not summary.events:
            self.writer.mark(to=position.to, extra=position.of_the_same_rows(self.writer.metadata))
            return
        with ExitStack() as stack:
            if self.folds:
                events = self._with_awaited(events, range_, summary, stack)
            stored_versions = self._versions_of(events, summary)
            if self.writer.can_upsert():  # replaced by location: a MERGE would search for them twice more
                stored_versions = stack.enter_context(query_execution.held(stored_versions))
            # Computed once: two queries of `_write` read it.
            version_changes = stack.enter_context(query_execution.held(self._laid_out(events, stored_versions)))
            self._write(
                events, stored_versions, version_changes, range_, position, few=summary.events <= survey.MAX_DRIVER_ROWS
            )

    def _stored(self) -> DataFrame:
        return self.spark.table(str(self.writer.table))

    def reserved(self, position: HistoryPosition) -> frozenset[str]:
        """The column names, beside the engine's, that no field may get."""
        return RESERVED | {*position.added, *(each.name for each in self.added())}

    def record(self, evolution: batch_evolution.Evolution, number: int) -> None:
        """Append changes to the schemas; to be called before the table has the columns."""
        ops, name = self.layout.ops("schemas"), str(self.namespace)
        self.schema = schemas.record(self.writer, ops, self.schema, evolution, collection=name, batch=number)

    def _with_awaited(self, events: DataFrame, range_: BatchRange, seen: Row, stack: ExitStack) -> DataFrame:
        """The events and, for late documents, the updates after them from bronze, to be folded again.

        An incomplete version waits for its document. Versions after a snapshot's document may lack changes that were lost before it.
        """
        stored = self._stored().where(F.col("__key").between(seen.first, seen.last) & (F.col("__sequence") > seen.low))
        stored = stored.select(F.col("__key").alias("key"), F.col("__sequence").alias("at"), "__incomplete")
        is_late = F.coalesce("__incomplete", F.lit(False)) | (F.col("op") == bronze.Op.READ.value)
        late = events.where("after IS NOT NULL").join(stored, "key").where((F.col("sequence") < F.col("at")) & is_late)
        since = stack.enter_context(query_execution.held(late.groupBy("key").agg(F.min("sequence").alias("since"))))
        first = since.agg(F.min("since")).first()[0]
        if first is None:
            return events
        # Also by a literal, so that older files of bronze are skipped.
        earlier = self._events(BatchRange(0, range_.after)).where(reduce.is_partial() & (F.col("sequence") > first))
        return events.unionByName(earlier.join(F.broadcast(since), "key").where("sequence > since").select(*events.columns))

    def _versions_of(self, events: DataFrame, seen: Row) -> DataFrame:
        """The stored versions of the events' keys that end at the first event or later: all columns, and the row location."""
        keys = events.select(F.col("key").alias("__key"))
        join_keys = F.broadcast(keys) if seen.events <= survey.MAX_BROADCAST_EVENTS else keys
        ends_later = f"`__until` IS NULL OR `__until` >= {literal(seen.low)}"
        rows = self._stored().select("*", *self.writer.row_locations()).where(F.col("__key").between(seen.first, seen.last))
        return rows.where(ends_later).join(join_keys, "__key", "left_semi")

    def _laid_out(self, whole_events: DataFrame, stored: DataFrame) -> DataFrame:
        """Each key's versions that are new or have another end."""
        is_whole = F.col("after").isNotNull().alias("is_whole")
        # Large columns only where a fold reads them.
        needed = {"after": F.lit(self.folds), "before": reduce.is_partial(), "updateDescription": reduce.is_partial()}
        fold_columns = [F.when(is_needed, F.col(name)).alias(name) for name, is_needed in needed.items()]
        events = whole_events.select("key", "sequence", "offset", "op", is_whole, *fold_columns)
        grouped = events.groupBy(F.col("key").alias("__key")).agg(F.collect_list(F.struct(*versions.EVENT)).alias("events"))
        stored_versions = stored.select(
            "__key",
            F.struct(
                F.col("__sequence").alias("sequence"),
                F.col("__until").alias("until"),
                F.col("__incomplete").alias("is_incomplete"),
                (F.coalesce("__deleted", F.lit(False)) if "__deleted" in stored.columns else F.lit(False)).alias(
                    "is_deleted"
                ),
                (F.col("__document") if "__document" in stored.columns else F.lit(None).cast("string")).alias("document"),
            ).alias("version"),
        )
        versions_by_key = stored_versions.groupBy("__key").agg(F.collect_list("version").alias("stored"))
        joined = grouped.join(versions_by_key, "__key", "left").select("__key", "events", "stored")
        return joined.mapInArrow(versions.laid_out(self.folds), versions.LAID_OUT_DDL)

    # --- the table

    def _write(
        self,
        events: DataFrame,
        stored: DataFrame,
        laid_out: DataFrame,
        range_: BatchRange,
        position: HistoryPosition,
        *,
        few: bool,
    ) -> None:
        remedy = "remove this table, and gold rebuilds it from bronze"
        ops, present, name = self.layout.ops("schemas"), self._stored().schema, str(self.namespace)
        dropped.check(self.writer, ops, self.schema, present, collection=name, before=range_.after, remedy=remedy)
        columns = reduce.needed(self.options.unwrap)
        envelope = events.select(*dict.fromkeys(("offset", "after", "updateDescription", *columns)))
        rows = laid_out.where("offset IS NOT NULL").join(envelope, "offset").withColumn("is_folded", F.col("after").isNull())
        rows = rows.withColumn("after", F.coalesce("document", "after")).drop("document")
        with query_execution.held(rows) as new_versions:
            evolution = batch_evolution.evolve(
                looks.SparkDocuments(new_versions.select("after", "sequence")),
                current=self.schema.schema,
                options=self.options.unwrap,
                pins=self.options.pins,
                reserved=self.reserved(position),
            )
            self.record(evolution, range_.to)
            source = self._typed(new_versions, evolution.plan)
            names = self._made_room(source.schema)
            # A version without an event of this range exists already and only gets another end: its document stays.
            ended_versions = laid_out.where("offset IS NULL").select(*self._ends())
            if not self._upserted(source, ended_versions, stored, position, few=few):
                self._merge(source, ended_versions, names, position)

    def _upserted(
        self, new: DataFrame, ended: DataFrame, stored: DataFrame, position: HistoryPosition, *, few: bool
    ) -> bool:
        """Replace the changed versions by location, and add the new ones; False if a MERGE has to, with nothing committed."""
        schema = self._stored().schema
        if not self.writer.can_upsert() or not table_columns.are_alike(schema, new.schema):
            return False
        is_altered = not table_columns.are_alike(schema, stored.drop(*upsert.ROW_LOCATION).schema)
        if is_altered and not stored.isEmpty():  # the table has other columns than were read, or was rewritten
            return False
        id_columns, names = ["__key", "__sequence"], [F.col(identifier(name)) for name in schema.names]
        ends = [name for name in ended.columns if name not in id_columns]
        rows = new.select(*names)
        if not is_altered:
            rows = rows.unionByName(stored.drop(*ends, *upsert.ROW_LOCATION).join(ended, id_columns).select(*names))
        version_ids = new.select(*id_columns).unionByName(ended.select(*id_columns))
        base_version = self.writer.version
        try:
            version = self.writer.upsert(
                rows,
                touched=lambda: stored.join(version_ids, id_columns, "left_semi").select(*upsert.ROW_LOCATION),
                to=position.to,
                extra=position.extra,
                unless=lambda: self.writer.version != base_version,
                few=few,
            )
        except Exception:
            # Another commit may have moved or changed the rows since they were read: a MERGE reads them again.
            if self.writer.version == base_version:
                raise
            return False
        return version is not None

    def _merge(self, new: DataFrame, ended: DataFrame, names: Sequence[str], position: HistoryPosition) -> None:
        parts = new.withColumn("__is_new", F.lit(True)), ended.withColumn("__is_new", F.lit(False))
        with query_execution.held(parts[0].unionByName(parts[1], allowMissingColumns=True)) as source:
            self.writer.merge(
                source, _statement(names, marks_deleted=self.marks_deleted), to=position.to, extra=position.extra
            )

    def _ends(self) -> list[Column | str]:
        """The columns with a version's identity and validity."""
        deleted = [F.col("is_deleted").alias("__deleted")] if self.marks_deleted else []
        return [
            "__key",
            F.col("sequence").alias("__sequence"),
            F.col("until").alias("__until"),
            *deleted,
            _time("sequence").alias("valid_from"),
            _time("until").alias("valid_to"),
        ]

    def _typed(self, versions: DataFrame, plan: typed.Plan) -> DataFrame:
        """The new versions with the table's columns."""
        is_looked_up = self.settings.source.capture_mode_full_update_type is FullUpdateType.LOOKUP
        is_update = F.expr(f"op = '{bronze.Op.UPDATE.value}' AND updateDescription IS NOT NULL AND NOT is_folded")
        documents = typed.documents(versions, plan=plan)
        return documents.where("NOT unreadable").select(
            "document.*",
            *(each.value.alias(each.name) for each in self.added()),
            F.col("rescued").alias("__rescued"),
            F.col("is_incomplete").alias("__incomplete"),
            (F.lit(is_looked_up) & is_update).alias("__as_captured"),
            *([F.col("after").alias("__document")] if self.folds else []),
            *self._ends(),
        )

    def added(self, schema: document_schema.DocumentSchema | None = None) -> tuple[reduce.AddedColumn, ...]:
        documents = (name for name, _ in (schema or self.schema.schema).table())
        earlier = self.writer.metadata.get("added") or ()
        return reduce.added(self.options.unwrap, documents=(*documents, *RESERVED), earlier=earlier)

    def _made_room(self, row_type: T.StructType) -> list[str]:
        """Add missing columns to the table, and rewrite it if a type is wider now, as gold has plain types; returns the names of
        `row_type`."""
        changes = table_columns.alterations(self._stored().schema, row_type)
        if changes.impossible:
            raise errors.DecisionNeeded(
                f"{self.writer.table.label}: columns cannot be changed in place ({'; '.join(changes.impossible)}). Settings "
                "of its columns were changed, a column was added by hand, or ops/schemas is an older copy than this table: undo "
                "that, or remove this table, and gold rebuilds it from bronze, which may lack old versions: keep a copy"
            )
        for statement in changes.added:
            self.writer.alter(statement)
        # Rewritten, so that readers need not support type widening.
        if changes.widened:
            rows = self._stored()
            types = table_columns.widened(rows.schema, row_type)
            casts = [F.col(identifier(each.name)).cast(each.dataType).alias(each.name) for each in types]
            metadata = self.writer.metadata
            extra = {name: metadata.get(name) for name in HistoryPosition().extra}
            self.writer.overwrite(rows.select(*casts), to=metadata.get("to"), extra=extra)
        return row_type.names

    # --- sweeps

    def _sweep(self, sweep: Sweep, position: HistoryPosition) -> None:
        """End the versions of documents that a drop or rename removed, or that a snapshot of the whole collection did not find."""
        if self.mode.keeps_row:
            self.writer.mark(to=position.to, extra=position.of_the_same_rows(self.writer.metadata))
            return
        if self.local.is_swept(self, sweep, position):
            return
        if self.marks_deleted:  # the mode may be newer than all versions
            self._made_room(_MARKS)
        sequence, stored_versions = literal(sweep.first), self._stored()
        is_snapshot = sweep.cause is SweepCause.SNAPSHOT  # a document that changed after its start existed
        is_open = "`__until` IS NULL" if is_snapshot else f"(`__until` IS NULL OR `__until` > {sequence})"
        ended_versions = stored_versions.where(f"{is_open} AND `__sequence` < {sequence}").select("__key", "__sequence")
        if is_snapshot:
            ended_versions = quarantine_table.without_waiting(
                ended_versions, self.layout.quarantine(*self.namespace), since=sweep.first
            )
        end = {"__until": sequence, "valid_to": f"timestamp_seconds({int(sweep.first[:8], 16)})"}
        if self.marks_deleted:
            end["__deleted"] = "true"
        statement = sql_merge.Merge(SAME_VERSION, (sql_merge.Clause(end),))
        self.writer.merge(ended_versions, statement, to=position.to, extra=position.extra)


def _statement(names: Sequence[str], *, marks_deleted: bool) -> sql_merge.Merge:
    """The MERGE that writes all columns of a new version, and only the end of an existing one."""
    ends = ["__until", *(["__deleted"] if marks_deleted else []), "valid_to"]
    all_columns, is_new = sql_merge.from_source(names), "s.`__is_new`"
    clauses = (
        sql_merge.Clause(all_columns, is_new),
        sql_merge.Clause(sql_merge.from_source(ends)),
        sql_merge.Clause(all_columns, is_matched=False),
    )
    return sql_merge.Merge(SAME_VERSION, clauses)


def _columns_of(writer: Writer, stored: Callable[[], DataFrame]) -> Sequence[str]:
    """The names of the table's columns, without a query if possible."""
    live = writer.live
    return live.schema.names if live is not None and live.move_to(writer.version) else stored().columns


def _time(sequence: str) -> Column:
    """The cluster time of the column `sequence`, whose first 8 hexadecimal digits are seconds, as TIMESTAMP."""
    return F.expr(f"timestamp_seconds(CAST(conv(substr({sequence}, 1, 8), 16, 10) AS BIGINT))")
