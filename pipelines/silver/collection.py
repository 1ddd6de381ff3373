"""One collection's silver table, while ranges of bronze are applied to it. The steps are those of `pipelines.silver.run`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.settings.parse import OnGone
from cdc_core.silver import merge, reduce
from cdc_core.silver import quarantine as unreadable
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from cdc_core.typed import plan as typed
from pipelines.bronze import collections as registry
from pipelines.bronze import log as bronze_log
from pipelines.delta import ops_tables, query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.operations import quarantine
from pipelines.schema import log as schemas
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.types import StructField, StructType

    from cdc_core.settings.parse import CollectionSettings, Settings

log = logging.getLogger(__name__)

PROPERTIES = {
    "delta.enableDeletionVectors": "true",
    "delta.enableTypeWidening": "true",
    "delta.dataSkippingStatsColumns": "`__key`,`__sequence`,`__batch`",
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
ENGINE_DDL = (
    "`__incomplete` BOOLEAN, `__known` STRING, `__rescued` MAP<STRING, STRING>, "
    "`__key` STRING, `__sequence` STRING, `__batch` BIGINT"
)
"""The columns that a new table has; the documents' come with the documents."""

ALWAYS = ("__incomplete", "__known", "__rescued", "__key", "__sequence", "__batch")
"""The columns of `ENGINE_DDL`."""

_HAS_NO_TEXT = "`__document` IS NULL AND NOT coalesce(`__incomplete`, false)"

DELETES_DDL = "`__key` STRING, `__sequence` STRING, `__batch` BIGINT"
DELETES_PROPERTIES = {"delta.enableDeletionVectors": "false", "delta.checkpointInterval": "50"}

MERGE_CONFS = {
    "spark.databricks.delta.merge.materializeSource": "none",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "64m",
}
"""A MERGE reads its source up to three times, twice for the keys alone: it is computed before, here and not by Delta."""

ADAPTIVE = "spark.sql.adaptive.enabled"
STATIC = {ADAPTIVE: "false"}
"""Planned once. On one machine there is little to adapt, and each look at the plan asks Delta for the table's files again."""

SMALL = 20_000
"""So many rows are written without a Spark job."""

MANY = 2_000_000
"""So many events' offsets are sent to every executor; of more events the documents are shuffled."""

ABOUT = f"kind IN ({', '.join(literal(kind) for kind in reduce.KINDS)})"
"""The rows of bronze that are about one document, as SQL."""

_CALLS_FOR_SWEEP = (
    """(kind = 'heartbeat' AND payload LIKE '%"completed"%') OR (kind = 'schema_change' AND sequence IS NOT NULL)"""
)


def _braced(text: str) -> str:
    """Whether a text begins and ends as a document does; LIKE would count its characters besides."""
    return f"(startswith({text}, '{{') AND endswith({text}, '}}'))"


_PARTIAL = "(op = 'u' AND `after` IS NULL)"
_LOOKED_FOR = {
    "partial": _PARTIAL,
    "suspect": (
        "key IS NULL OR sequence IS NULL OR length(sequence) <> 24 OR op IS NULL OR op NOT IN ('c', 'u', 'd', 'r') "
        f"OR (op IN ('c', 'r') AND `after` IS NULL) OR (op <> 'd' AND NOT {_braced('`after`')})"
    ),
}
"""What is counted while the documents are looked at for their schema."""
_LOOKED_FOR_IN_UPDATES = (
    f"({_PARTIAL} AND (NOT {_braced('updateDescription.updatedFields')} OR NOT {_braced('updateDescription.disambiguatedPaths')} "
    "OR (updateDescription.updatedFields IS NOT NULL AND json_object_keys(updateDescription.updatedFields) IS NULL)))"
)


def create(spark: SparkSession, table: tables.TableRef) -> None:
    """Make a collection's table where there is none, without any column of documents."""
    delta.create(spark, table, columns=ENGINE_DDL, properties=PROPERTIES, cluster_by=("__key",))


def create_deletes(spark: SparkSession, table: tables.TableRef) -> None:
    """Make the table of a collection's remembered deletes where there is none."""
    delta.create(spark, table, columns=DELETES_DDL, properties=DELETES_PROPERTIES)


def keeps_document(settings: Settings, namespace: registry.Namespace) -> bool:
    """Whether a collection's table holds whole documents: where the settings ask for it, or the capture mode needs it."""
    kept = settings.silver.for_collection(str(namespace)).keep_document
    return not settings.source.capture_mode.has_full_updates if kept is None else kept


@dataclass(frozen=True)
class Counts:
    """What bronze holds of one collection in a range, from its narrow columns."""

    events: int = 0
    deletes: int = 0
    low: str = ""
    high: str = ""
    first_key: str = ""
    last_key: str = ""


def counted(events: DataFrame) -> dict[registry.Namespace, Counts]:
    """The counts of each collection among bronze's rows."""
    rows = events.groupBy("db", "collection").agg(*_counting()).collect()
    return {registry.Namespace(row.db, row.collection): _counts(row.asDict()) for row in rows}


def surveyed(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    span: reduce.Range,
    *,
    only: registry.Namespace | None = None,
    behind: Mapping[registry.Namespace, int] = {},
) -> tuple[dict[registry.Namespace, Counts], tuple[reduce.Sweep, ...]]:
    """What a span of batches holds of each collection, or of one, and the sweeps that it calls for, in its order.

    Of the collections of `behind` the events after a batch are counted. One query, however many collections there are, and none
    for a few rows in files that this process sees.
    """
    few = bronze_log.few_rows(bronze_table, span, SURVEYED, limit=SMALL)
    if few is not None:
        return _surveyed_here(few.to_pylist(), only, behind)
    own = "true" if only is None else only.predicate
    if behind:
        start = " ".join(f"WHEN {namespace.predicate} THEN {to}" for namespace, to in behind.items())
        own = f"({own}) AND batch > CASE {start} ELSE {span.after} END"
    rows = bronze_log.rows(spark, bronze_table, span).where(f"({ABOUT} AND {own}) OR {_CALLS_FOR_SWEEP}")
    is_event = F.expr(ABOUT)
    told = F.struct("offset", "kind", "batch", "db", "collection", "sequence", "payload")
    found = (
        rows.groupBy(is_event.alias("is_event"), "db", "collection")
        .agg(*_counting(), F.collect_list(F.when(~is_event, told)).alias("told"))
        .collect()
    )
    counts = {registry.Namespace(row.db, row.collection): _counts(row.asDict()) for row in found if row.is_event}
    return counts, _sweeps(sorted((each for row in found for each in row.told), key=lambda each: each.offset))


SURVEYED = ("offset", "kind", "batch", "db", "collection", "sequence", "key", "op", "payload")
"""The columns of bronze that a survey looks at."""


def _surveyed_here(
    rows: Sequence[Mapping[str, Any]], only: registry.Namespace | None, behind: Mapping[registry.Namespace, int]
) -> tuple[dict[registry.Namespace, Counts], tuple[reduce.Sweep, ...]]:
    """The same of rows that this process holds."""
    by_namespace: dict[registry.Namespace, list[Mapping[str, Any]]] = {}
    told: list[bronze_log.SweepRow] = []
    for row in rows:
        if row["kind"] in reduce.KINDS:
            namespace = registry.Namespace(row["db"], row["collection"])
            if only in (None, namespace) and row["batch"] > behind.get(namespace, 0):
                by_namespace.setdefault(namespace, []).append(row)
        elif _calls_for_sweep(row):
            told.append(bronze_log.SweepRow(*(row[name] for name in bronze_log.SweepRow._fields)))
    counts = {namespace: _counted_here(events) for namespace, events in by_namespace.items()}
    return counts, _sweeps(sorted(told, key=lambda each: each.offset))


def _calls_for_sweep(row: Mapping[str, Any]) -> bool:
    """`_CALLS_FOR_SWEEP` of one row."""
    if row["kind"] == bronze.Kind.HEARTBEAT.value:
        return '"completed"' in (row["payload"] or "")
    return row["kind"] == bronze.Kind.SCHEMA_CHANGE.value and row["sequence"] is not None


def _counted_here(events: Sequence[Mapping[str, Any]]) -> Counts:
    """The counts of one collection's rows. Spark compares the bytes of UTF-8, which have the order of the code points."""
    sequences = [row["sequence"] for row in events if row["sequence"] is not None] or [""]
    keys = [row["key"] for row in events if row["key"] is not None] or [""]
    deletes = sum(row["op"] == bronze.Op.DELETE.value for row in events)
    return Counts(len(events), deletes, min(sequences), max(sequences), min(keys), max(keys))


def sweeps(
    spark: SparkSession, bronze_table: tables.TableRef, span: reduce.Range, *, among: Sequence[registry.Namespace]
) -> tuple[reduce.Sweep, ...]:
    """The sweeps that drops and renames of these collections call for in a span of batches."""
    own = " OR ".join(f"({namespace.predicate})" for namespace in among)
    is_gone = f"kind = {literal(bronze.Kind.SCHEMA_CHANGE.value)} AND sequence IS NOT NULL AND ({own})"
    told = bronze_log.rows(spark, bronze_table, span).where(is_gone).orderBy("offset")
    return _sweeps(told.select("kind", "batch", "db", "collection", "sequence", "payload").collect())


def _counting() -> list[Column]:
    return [
        F.count("*").alias("events"),
        F.count_if(F.col("op") == bronze.Op.DELETE.value).alias("deletes"),
        F.min("sequence").alias("low"),
        F.max("sequence").alias("high"),
        F.min("key").alias("first_key"),
        F.max("key").alias("last_key"),
    ]


def _counts(row: dict[str, Any]) -> Counts:
    return Counts(row["events"], row["deletes"], *(row[name] or "" for name in ("low", "high", "first_key", "last_key")))


def events(
    spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace, span: reduce.Range
) -> DataFrame:
    """One collection's events in a span of batches, in no order."""
    among = {"db": namespace.db, "collection": namespace.collection}
    return bronze_log.rows(spark, bronze_table, span, among=among).where(f"{ABOUT} AND {namespace.predicate}")


def bounded(found: DataFrame, *, span: reduce.Range, limit: int) -> tuple[reduce.Range, ...]:
    """The span cut into ranges of at most `limit` of these events, or of one batch."""
    batches = found.groupBy("batch").count().orderBy("batch").collect()
    return reduce.ranges(((row.batch, row["count"]) for row in batches), span=span, limit=limit)


def _sweeps(rows: Sequence[Row | bronze_log.SweepRow]) -> tuple[reduce.Sweep, ...]:
    """The sweeps that rows call for: snapshots' ends, drops and renames."""
    ends = reduce.sweeps((row.batch, row.payload) for row in rows if row.kind == bronze.Kind.HEARTBEAT.value)
    changes = reduce.schema_sweeps(
        (row.batch, row.db, row.collection, row.sequence, row.payload)
        for row in rows
        if row.kind == bronze.Kind.SCHEMA_CHANGE.value and row.collection is not None
    )
    return tuple(sorted((*ends, *changes), key=lambda sweep: sweep.batch))


def obeyed(found: Iterable[reduce.Sweep], options: CollectionSettings) -> list[reduce.Sweep]:
    """The sweeps without those after which the settings keep the rows."""
    handling = {reduce.Cause.DROP: options.on_drop, reduce.Cause.RENAME: options.on_rename}
    return [sweep for sweep in found if handling.get(sweep.cause) is not OnGone.KEEP]


@dataclass(frozen=True)
class Work:
    """What is to be done for one collection, up to the batch `to`."""

    namespace: registry.Namespace
    position: registry.SilverPosition
    to: int
    counts: Counts
    sweeps: tuple[reduce.Sweep, ...] = ()

    @property
    def span(self) -> reduce.Range:
        """The batches to apply."""
        return reduce.Range(self.position.to, self.to)


@dataclass(frozen=True)
class _Deletes:
    """What deletes, as columns `__key` and `__sequence`, and how many events say so."""

    rows: DataFrame
    events: int


@dataclass(frozen=True)
class _Batch:
    """Reduced rows, and what is known about them without looking at them again."""

    rows: DataFrame
    plan: typed.Plan
    number: int
    events: int = 0
    keys: tuple[str, str] | None = None
    deletes: _Deletes | None = None
    has_incomplete: bool = False
    is_late: bool = False
    touched: DataFrame | None = None
    """The keys of the rows, where they are cheaper to find than the rows are."""
    sought: upsert.PendingDelete | None = None
    """Where the table holds these keys, where that is looked for already."""
    unless: Callable[[], bool] | None = None
    """Says, once the rows are written, that they must not be committed."""


@dataclass
class Collection:
    """One collection's table, claimed by `writer`, with its schema as `ops/schemas` keeps it."""

    spark: SparkSession
    namespace: registry.Namespace
    options: CollectionSettings
    keeps_document: bool
    layout: tables.Layout
    bronze: tables.TableRef
    writer: Writer
    schema: schemas.Kept
    is_new: bool
    columns: tuple[str, ...] = field(init=False)
    reserved: frozenset[str] = frozenset()
    """Columns of the table that `add.fields` made, now or once: no field of a document gets their names."""
    adaptive: dict[str, str] = field(default_factory=dict)
    """What the session says of plans, for the MERGE inside a range that is planned once."""

    def __post_init__(self) -> None:
        self.columns = reduce.needed(self.options.unwrap)

    @property
    def mode(self) -> unwrap_options.DeleteMode:
        """What a delete does."""
        return self.options.unwrap.delete_tombstone_handling_mode

    def applied(self, work: Work, *, stop: threading.Event) -> registry.SilverPosition:
        """Apply the work range by range, then its sweeps; the position reached. Between ranges `stop` is obeyed."""
        reached = self._under_these_settings(work.position)
        ranges = self._ranges(work)
        needless, sweeps = self._sweeps(work)
        for sweep in needless:
            reached = self._after(sweep, reached)
        for range_ in ranges:
            if stop.is_set():
                return reached
            counts = work.counts if len(ranges) == 1 else self._counted(range_)
            reached = self._with_sweeps(range_, counts, reached, reduce.within(sweeps, range_))
        return reached

    def _with_sweeps(
        self, range_: reduce.Range, counts: Counts, reached: registry.SilverPosition, sweeps: Sequence[reduce.Sweep]
    ) -> registry.SilverPosition:
        """One range and the sweeps that it calls for. While any is to come, the position stays: a crash in between repeats the range."""
        reached = self._range(range_, counts, reached, to=reached.to if sweeps else range_.to)
        for sweep in sweeps:
            to = range_.to if sweep is sweeps[-1] else reached.to
            reached = self._sweep(sweep, replace(self._after(sweep, reached), to=to), number=range_.to)
        return reached

    def _under_these_settings(self, position: registry.SilverPosition) -> registry.SilverPosition:
        """The position with what the settings say of rows; a warning where rows from before cannot do what they ask for now."""
        if self.keeps_document and position.documents is not True and self._lacks_documents():
            log.warning(
                "%s: rows of silver were written without their whole documents; one that gets a partial update stands as it was, "
                "incomplete, until its document is read again: medallion signal execute-snapshot --data-collections %s",
                self.namespace,
                self.namespace,
            )
        self.reserved = frozenset(position.added) | {each.name for each in self._added(self.schema.schema)}
        return replace(position, documents=self.keeps_document, added=tuple(sorted(self.reserved)))

    def _lacks_documents(self) -> bool:
        if self._is_empty():
            return False
        rows = self.spark.table(str(self.writer.table))
        return "__document" not in rows.columns or not rows.where(_HAS_NO_TEXT).isEmpty()

    def _after(self, sweep: reduce.Sweep, reached: registry.SilverPosition) -> registry.SilverPosition:
        """The position when the sweep is done."""
        is_end = sweep.cause is not reduce.Cause.SNAPSHOT and not self.mode.keeps_row
        floor = max(reached.floor, sweep.first) if is_end else reached.floor
        return replace(reached, swept=max(reached.swept, sweep.first), floor=floor)

    # --- ranges

    def _ranges(self, work: Work) -> tuple[reduce.Range, ...]:
        limit = self.options.max_batch_events
        if work.counts.events <= limit:
            return (work.span,)
        return bounded(self._events(work.span), span=work.span, limit=limit)

    def _counted(self, range_: reduce.Range) -> Counts:
        return counted(self._events(range_)).get(self.namespace, Counts())

    def _events(self, range_: reduce.Range) -> DataFrame:
        return events(self.spark, self.bronze, self.namespace, range_)

    def _range(
        self, range_: reduce.Range, counts: Counts, reached: registry.SilverPosition, *, to: int
    ) -> registry.SilverPosition:
        after = replace(reached, to=to, high=max(reached.high or "", counts.high))
        if not counts.events:
            self._move(after)
            return after
        # After a repair the position is 0, and the rows are there: what is applied again then comes late.
        is_late = not self._is_empty() and (reached.high is None or counts.low <= max(reached.high, reached.swept))
        found = self._wanted(self._events(range_), counts)
        if counts.low < reached.floor:
            found = found.where(f"sequence IS NULL OR sequence >= {literal(reached.floor)}")
        with self._planned_once(), self._sought(found, counts, is_late=is_late) as sought:
            self._events_applied(found, range_, counts, after, is_late=is_late, sought=sought)
        return after

    @contextmanager
    def _planned_once(self) -> Iterator[None]:
        """The block's queries are planned once where that is better; a MERGE as the session says, it may broadcast more then."""
        self.adaptive = {ADAPTIVE: self.spark.conf.get(ADAPTIVE) or "true"}
        with query_execution.session_confs(self.spark, STATIC if sparks.is_local(self.spark) else {}):
            yield

    @contextmanager
    def _sought(self, found: DataFrame, counts: Counts, *, is_late: bool) -> Iterator[upsert.PendingDelete | None]:
        """Where the table holds the events' keys, looked for while their documents are: the driver waits much in both."""
        is_large = SMALL < counts.events <= MANY and not self._is_empty()
        if is_large and self.keeps_document:
            with self.writer.listing():  # the places come with the stored documents
                yield None
            return
        if is_late or not is_large or self._shows_deleted(counts):
            yield None
            return
        with self.writer.seeking(_keys(found, counts)) as sought:
            yield sought

    @contextmanager
    def _placed(self, rows: DataFrame, batch: _Batch) -> Iterator[upsert.PendingDelete | None]:
        """Where the table holds the rows, which was seen when their documents were read."""
        if batch.is_late:  # a MERGE finds them itself
            yield None
            return
        with self.writer.seeking(
            rows.select(*upsert.ROW_LOCATION).where(F.col(upsert.ROW_LOCATION[0]).isNotNull())
        ) as sought:
            yield sought

    def _events_applied(
        self,
        found: DataFrame,
        range_: reduce.Range,
        counts: Counts,
        after: registry.SilverPosition,
        *,
        is_late: bool,
        sought: upsert.PendingDelete | None,
    ) -> None:
        if not is_late and self._applied_at_once(found, range_, counts, after, sought):
            return
        evolution, events = self._readable(found, range_, counts)
        if is_late:
            events = self._not_resurrected(events)
        whole = self._with_awaited(events, range_) if is_late and self.keeps_document else events
        has_partial = evolution.also["partial"] > 0 or whole is not events
        batch = _Batch(
            rows=events,
            plan=evolution.plan,
            number=range_.to,
            events=counts.events,
            keys=(counts.first_key, counts.last_key) if counts.first_key else None,
            deletes=_deleted(events, counts) if counts.deletes and not self.mode.keeps_row else None,
            has_incomplete=has_partial,
            is_late=is_late,
            touched=_keys(events, counts),
            sought=sought if events is found else None,
        )
        if has_partial and self.keeps_document:
            with self._folded(whole, batch) as rows, self._placed(rows, batch) as sought:
                texts = rows.select("after", F.col("__sequence").alias("sequence"), "__incomplete")
                if evolution.also["partial"] < counts.events:  # documents that lost count, too
                    lost = self._looked_at(events, counts).select("after", "sequence", F.lit(False).alias("__incomplete"))
                    texts = lost.unionByName(texts)
                evolution = self._evolved(texts, range_.to, also={"incomplete": "`__incomplete`"})
                has_incomplete = evolution.also["incomplete"] > 0  # a MERGE without any reads and writes much less
                touched = F.broadcast(rows.select("__key"))  # they lie in memory
                changes = {"plan": evolution.plan, "has_incomplete": has_incomplete, "touched": touched, "sought": sought}
                self._apply(replace(batch, rows=rows, **changes), after)
        else:
            if SMALL < counts.events <= MANY and not (has_partial or self._keeps_last(batch)):
                latest = reduce.latest_of_many(events, columns=self.columns)
            else:
                latest = reduce.latest(
                    events, has_partial=has_partial, columns=self.columns, keeps_last=self._keeps_last(batch)
                )
            self._apply(replace(batch, rows=reduce.decided(latest, mode=self.mode, columns=self.columns)), after)

    def _applied_at_once(
        self,
        found: DataFrame,
        range_: reduce.Range,
        counts: Counts,
        after: registry.SilverPosition,
        sought: upsert.PendingDelete | None,
    ) -> bool:
        """Apply many events without a look at them before: they are typed by the schema as it is, and looked at on the way.

        False where one of them would change the schema, cannot be read or is no whole document; then nothing was committed.
        """
        if (
            not SMALL < counts.events <= MANY
            or self.keeps_document
            or self._shows_deleted(counts)
            or not self.writer.is_direct
            or not self._has_schema(found, range_)
        ):
            return False
        held = self.layout.quarantine(self.namespace.db, self.namespace.collection)
        if quarantine.parted(self.spark, held, events=found, span=range_, has_suspects=False) is not None:
            return False
        plan, doubts = typed.Plan(self.schema.schema, pins(self.options)), Observation()
        is_doubtful = " OR ".join(["is_doubtful", *(f"({condition})" for condition in _LOOKED_FOR.values())])
        documents = typed.documents(found, plan=plan).observe(doubts, F.count_if(F.expr(is_doubtful)).alias("events"))
        columns = (*self.columns, "document", "rescued")
        latest = reduce.latest_of_many(documents, columns=columns, bare=found)
        batch = _Batch(
            rows=reduce.decided(latest, mode=self.mode, columns=columns),
            plan=plan,
            number=range_.to,
            events=counts.events,
            keys=(counts.first_key, counts.last_key) if counts.first_key else None,
            deletes=_deleted(found, counts) if counts.deletes and not self.mode.keeps_row else None,
            touched=_keys(found, counts),
            sought=sought,
            unless=lambda: doubts.get["events"] > 0,
        )
        try:
            self._apply(batch, after)
        except upsert.NotCommitted:
            return False
        return True

    def _has_schema(self, found: DataFrame, range_: reduce.Range) -> bool:
        """Whether there is a schema; where there is none, the first documents give it where they can."""
        if not self.schema.schema.fields:
            begun = schemas.begun(
                found, options=self.options.unwrap, pins=pins(self.options), mark="sequence", reserved=self.reserved
            )
            if begun is not None:
                self._keep(begun, range_.to)
        return bool(self.schema.schema.fields)

    def _keeps_last(self, batch: _Batch) -> bool:
        """Whether a delete may have to show the document that it deleted."""
        return batch.deletes is not None and self.mode.marks_deleted

    def _wanted(self, events: DataFrame, counts: Counts) -> DataFrame:
        """The events without deletes, where they do nothing."""
        if self.mode.keeps_row and counts.deletes:
            return events.where(f"NOT (op <=> '{bronze.Op.DELETE.value}')")  # one without any op goes to quarantine
        return events

    def _readable(self, events: DataFrame, range_: reduce.Range, counts: Counts) -> tuple[schemas.Evolution, DataFrame]:
        """The schema after the events' documents, and the events that can be read; the others are in quarantine."""
        looked_for = _LOOKED_FOR | ({"updates": _LOOKED_FOR_IN_UPDATES} if self.keeps_document else {})
        evolution = self._evolved(self._looked_at(events, counts), range_.to, also=looked_for, keep=False)
        suspects = evolution.refused + evolution.also["suspect"] + evolution.also.get("updates", 0)
        parted = quarantine.parted(
            self.spark,
            self.layout.quarantine(self.namespace.db, self.namespace.collection),
            events=events,
            span=range_,
            has_suspects=suspects > 0 and not events.where(unreadable.is_suspect()).isEmpty(),
        )
        if parted is None:
            self._keep(evolution, range_.to)
            return evolution, events
        return self._evolved(self._looked_at(parted, counts), range_.to, also=looked_for), parted

    def _looked_at(self, events: DataFrame, counts: Counts) -> DataFrame:
        """The events with, in `after`, every document that the schema must hold: of those that lost, too."""
        return _with_deleted(events) if self._shows_deleted(counts) else events

    def _shows_deleted(self, counts: Counts) -> bool:
        """Whether deleted documents stay in the table, and some are deleted."""
        return counts.deletes > 0 and self.mode.marks_deleted

    # --- schema

    def _evolved(
        self, texts: DataFrame, number: int, *, also: Mapping[str, str] = {}, keep: bool = True
    ) -> schemas.Evolution:
        evolution = schemas.evolve(
            texts,
            current=self.schema.schema,
            options=self.options.unwrap,
            pins=pins(self.options),
            mark="sequence",
            also=also,
            reserved=self.reserved,
        )
        if keep:
            self._keep(evolution, number)
        return evolution

    def _keep(self, evolution: schemas.Evolution, number: int) -> None:
        """Append what changed to the schemas, before the table holds it."""
        ops, name = self.layout.ops("schemas"), str(self.namespace)
        self.schema = schemas.keep(self.spark, ops, self.schema, evolution, collection=name, batch=number)

    # --- what was deleted

    def _deletes(self) -> tables.TableRef:
        return self.layout.deletes(self.namespace.db, self.namespace.collection)

    def _remember(self, deletes: _Deletes, number: int) -> None:
        """Append the deletes, before the MERGE, so that a crash in between forgets none."""
        create_deletes(self.spark, self._deletes())
        facts = deletes.rows.select("__key", "__sequence", F.lit(number).cast("bigint").alias("__batch"))
        if deletes.events > SMALL:
            facts.writeTo(str(self._deletes())).append()
        else:
            ops_tables.append_rows(self.spark, self._deletes(), facts.toArrow())

    def _not_resurrected(self, events: DataFrame) -> DataFrame:
        """The events that are later than their key's remembered delete. Deletes stay: they may be remembered and not yet applied."""
        if not delta.exists(self.spark, self._deletes()):
            return events
        remembered = self.spark.table(str(self._deletes())).groupBy("__key").agg(F.max("__sequence").alias("__deleted_at"))
        joined = events.join(remembered, F.col("key") == F.col("__key"), "left")
        is_delete = F.col("op") == bronze.Op.DELETE.value
        is_alive = F.col("__deleted_at").isNull() | (F.col("sequence") > F.col("__deleted_at"))
        return joined.where(is_delete | is_alive).drop("__key", "__deleted_at")

    # --- partial updates

    @contextmanager
    def _folded(self, events: DataFrame, batch: _Batch) -> Iterator[DataFrame]:
        """Reduced rows whose partial updates are folded onto the stored documents; held in memory for the time of a block.

        They are computed and not cached: Spark plans anew whatever is cached of a table that changes.
        """
        histories = reduce.histories(events, columns=self.columns, keeps_last=self._keeps_last(batch))
        placed = _with_stored(histories, self._stored(events, batch))
        rows = query_execution.computed(_folded(placed, mode=self.mode, columns=self.columns))
        try:
            yield rows
        finally:
            query_execution.release(rows)

    def _stored(self, events: DataFrame, batch: _Batch) -> DataFrame:
        """What the table holds of the events' keys: the documents, how far each is known, and where it lies."""
        table = self.spark.table(str(self.writer.table)).select("*", *self.writer.places())
        if batch.keys is not None:
            table = table.where(F.col("__key").between(*batch.keys))
        if batch.events <= MANY:
            keys = events.select(F.col("key").alias("__key"))
            table = table.join(F.broadcast(keys), "__key", "left_semi")  # only these documents are shuffled
        if "__document" not in table.columns:
            table = table.withColumn("__document", F.lit(None).cast("string"))
        deleted = F.coalesce("__deleted", F.lit(False)) if "__deleted" in table.columns else F.lit(False)
        return table.select(
            F.col("__key").alias("key"),
            F.col("__sequence").alias("stored_sequence"),
            F.coalesce("__known", "__sequence").alias("stored_known"),
            F.when(~deleted, F.col("__document")).alias("stored_document"),
            deleted.alias("stored_is_deleted"),
            F.coalesce("__incomplete", F.lit(False)).alias("stored_incomplete"),
            *upsert.ROW_LOCATION,
        )

    def _with_awaited(self, events: DataFrame, range_: reduce.Range) -> DataFrame:
        """The events and, for late documents of incomplete rows, the updates that such rows have seen since.

        The very events where no row waits for any of them.
        """
        table = self.spark.table(str(self.writer.table)).where("`__incomplete`")
        waiting = table.select(F.col("__key").alias("key"), "__sequence", "__known")
        late = (
            events.where("after IS NOT NULL")
            .join(waiting, "key")
            .where("sequence < `__sequence` AND sequence > coalesce(`__known`, '')")
            .groupBy("key")
            .agg(F.min("sequence").alias("__since"))
        )
        first = late.agg(F.min("__since")).first()[0]
        if first is None:
            return events
        earlier = self._events(reduce.Range(0, range_.after)).where(reduce.is_partial())
        updates = earlier.where(F.col("sequence") > first).join(F.broadcast(late), "key").where("sequence > `__since`")
        return events.unionByName(updates.select(*events.columns))

    # --- sweeps

    def _sweeps(self, work: Work) -> tuple[list[reduce.Sweep], list[reduce.Sweep]]:
        """The sweeps that can find nothing, because no row is or becomes as old, and the others."""
        due = obeyed(work.sweeps, self.options)
        oldest = work.counts.low if self._is_empty() else ""
        needless = [sweep for sweep in due if oldest >= sweep.first]
        return needless, [sweep for sweep in due if oldest < sweep.first]

    def _sweep(self, sweep: reduce.Sweep, after: registry.SilverPosition, *, number: int) -> registry.SilverPosition:
        """Delete, at the sequence of the snapshot's first chunk, the rows that are older than it."""
        if after.floor >= sweep.first:  # what is in quarantine from before can never be applied any more
            held = self.layout.quarantine(self.namespace.db, self.namespace.collection)
            quarantine.supersede(self.spark, held, before=sweep.first, to=number)
        gone = self._without_waiting(
            self.spark.table(str(self.writer.table)).where(f"`__sequence` < {literal(sweep.first)}"), since=sweep.first
        )
        if self.mode.marks_deleted:
            gone = gone.where("NOT coalesce(`__deleted`, false)")
        edge = gone.agg(F.min("__key").alias("low"), F.max("__key").alias("high"), F.count("*").alias("rows")).first()
        if self.mode.keeps_row or edge.low is None:
            self._move(after)
            return after
        latest = reduce.swept(sweep.first, keys=gone, columns=self.columns)
        batch = _Batch(
            rows=reduce.decided(latest, mode=self.mode, columns=self.columns),
            plan=typed.Plan(self.schema.schema),
            number=number,
            keys=(edge.low, edge.high),
            deletes=_Deletes(gone.select("__key", F.lit(sweep.first).alias("__sequence")), edge.rows),
        )
        self._apply(batch, after)
        return after

    def _without_waiting(self, rows: DataFrame, *, since: str) -> DataFrame:
        """The rows without those whose documents were there since: events of theirs are in quarantine, and will come again."""
        table = self.layout.quarantine(self.namespace.db, self.namespace.collection)
        waiting = quarantine.waiting_keys(self.spark, table, since=since)
        return rows if waiting is None else rows.join(waiting, "__key", "left_anti")

    # --- the table

    def _move(self, after: registry.SilverPosition) -> None:
        """Only the position moves: an empty commit."""
        self.writer.mark(to=after.to, extra=after.extra)

    def _apply(self, batch: _Batch, after: registry.SilverPosition) -> None:
        if batch.deletes is not None and self.mode.removes_row:
            self._remember(batch.deletes, batch.number)
        held = self.spark.table(str(self.writer.table)).schema
        source = self._typed(batch, held)
        columns = self._made_room(source, held)
        if self._is_empty():
            first = source.where(f"`__action` <> '{reduce.Action.REMOVE.value}'").drop("__guard", "__action")
            self._appended(first, batch, after)
            return
        if self._is_upsert(batch, source) and self._upserted(batch, source, after):
            return
        if batch.unless is not None:
            raise upsert.NotCommitted  # Spark commits a MERGE whatever it finds on the way
        view = f"silver_{threading.get_ident()}"
        rows = query_execution.computed(source)
        rows.createOrReplaceTempView(view)
        try:
            if batch.has_incomplete and not self.keeps_document and rows.where("`__incomplete`").isEmpty():
                batch = replace(batch, has_incomplete=False)  # which reads and writes much less of the table
            sql = self._statement(view, batch, columns).render()
            self.writer.merge(sql, to=after.to, extra=after.extra, confs=MERGE_CONFS | self.adaptive)
        finally:
            self.spark.catalog.dropTempView(view)
            query_execution.release(rows)

    def _appended(self, rows: DataFrame, batch: _Batch, after: registry.SilverPosition) -> None:
        """Append the table's first rows."""
        if batch.unless is None:
            self.writer.append(rows, to=after.to, extra=after.extra)
        elif self.writer.upsert(rows, touched=None, to=after.to, extra=after.extra, unless=batch.unless) is None:
            raise upsert.NotCommitted  # an append by Spark commits whatever it has written

    def _is_upsert(self, batch: _Batch, source: DataFrame) -> bool:
        """Whether every row is newer than what the table holds of its key, and replaces it whole or removes it."""
        if batch.is_late or batch.has_incomplete or batch.touched is None or self._keeps_last(batch):
            return False
        held = self.spark.table(str(self.writer.table)).schema
        return merge.is_same(held, source.drop("__guard", "__action").schema)

    def _upserted(self, batch: _Batch, source: DataFrame, after: registry.SilverPosition) -> bool:
        documents = source
        if batch.deletes is not None:
            documents = source.where(F.col("__action") == reduce.Action.DOCUMENT.value)
        rows = documents.drop("__guard", "__action")
        assert batch.touched is not None
        done = self.writer.upsert(
            rows,
            touched=batch.touched,
            sought=batch.sought,
            to=after.to,
            extra=after.extra,
            confs=MERGE_CONFS,
            unless=batch.unless,
            few=batch.events <= SMALL,
        )
        return done is not None

    def _is_empty(self) -> bool:
        """Whether the table never held a row: then its first rows are appended, there is nothing to merge with."""
        return self.is_new and self.writer.metadata.get("to") is None

    def _typed(self, batch: _Batch, held: StructType) -> DataFrame:
        """Rows of the table's columns, with `__guard` and `__action`.

        A column that the settings no longer ask for says nothing of what is written now: it is null, and no document deleted.
        """
        documents = batch.rows
        if "document" not in documents.columns:
            documents = typed.documents(documents, plan=batch.plan)
        added = self._added(batch.plan.schema)
        given = {*(name for name, _ in batch.plan.schema.table()), *(each.name for each in added), *ALWAYS}
        given |= {"__deleted"} if self.mode.adds_deleted else set()
        given |= {"__document"} if self.keeps_document else set()
        return documents.select(
            "document.*",
            *(each.value.alias(each.name) for each in added),
            *(["__deleted"] if self.mode.adds_deleted else []),
            "__incomplete",
            "__known",
            F.col("rescued").alias("__rescued"),
            *([F.col("after").alias("__document")] if self.keeps_document else []),
            "__key",
            "__sequence",
            _uncompiled(batch.number).alias("__batch"),
            *(_left(each) for each in held if each.name not in given),
            "__guard",
            "__action",
        )

    def _added(self, schema: document_schema.DocumentSchema) -> tuple[reduce.Added, ...]:
        return reduce.added(self.options.unwrap, documents=(name for name, _ in schema.table()))

    def _made_room(self, source: DataFrame, held: StructType) -> list[str]:
        """The table's columns for the source, added or widened where they are missing; their names."""
        wanted = source.drop("__guard", "__action").schema
        changes = merge.alterations(held, wanted)
        if changes.impossible:
            raise errors.DecisionNeeded(
                f"{self.writer.table.label}: columns cannot change in place ({'; '.join(changes.impossible)}); "
                "run medallion rebuild for this table, or take the pin back"
            )
        for statement in changes.statements:
            self.writer.alter(statement)
        return wanted.names

    def _statement(self, view: str, batch: _Batch, columns: Sequence[str]) -> merge.Statement:
        return merge.Statement(
            target=str(self.writer.table),
            source=view,
            columns=columns,
            added=[each.name for each in self._added(batch.plan.schema)],
            removes=batch.deletes is not None and self.mode.removes_row,
            marks_deleted=batch.deletes is not None and self.mode.marks_deleted,
            has_incomplete=batch.has_incomplete,
            is_late=batch.is_late,
            keys=() if batch.keys is None else (batch.keys,),
        )


def _left(column: StructField) -> Column:
    """The value of a column that no setting asks for any more."""
    value = F.lit(False) if column.name == "__deleted" else F.lit(None)
    return value.cast(column.dataType).alias(column.name)


def _uncompiled(number: int) -> Column:
    """A number that changes with each batch, kept out of the code that Spark compiles: as an element of an array, by an index
    that is 0 for every row. With the number in it, the JVM would optimize the whole stage anew for each batch."""
    is_never = F.col("__key") == ""
    return F.get(F.array(F.lit(number).cast("bigint")), is_never.cast("int"))


def _deleted(events: DataFrame, counts: Counts) -> _Deletes:
    """The last delete of each key, from bronze's narrow columns. That something came after it does not matter."""
    deletes = events.where(f"op = '{bronze.Op.DELETE.value}'").groupBy(F.col("key").alias("__key"))
    return _Deletes(deletes.agg(F.max("sequence").alias("__sequence")), counts.deletes)


def _keys(events: DataFrame, counts: Counts) -> DataFrame:
    """The keys of the events; sent to every executor where they are not too many."""
    keys = events.select(F.col("key").alias("__key"))
    return F.broadcast(keys) if counts.events <= MANY // 2 else keys


def _with_deleted(events: DataFrame) -> DataFrame:
    """The events with what is known of deleted documents in `after`."""
    is_delete = F.col("op") == bronze.Op.DELETE.value
    return events.withColumn("after", F.when(is_delete, reduce.deleted_document()).otherwise(F.col("after")))


def _with_stored(histories: DataFrame, stored: DataFrame) -> DataFrame:
    """Histories with what each one's updates build on, and only the updates that are not in it yet.

    `base` is the later of the stored document and the range's own, `base_known` its sequence, `is_doubtful` whether
    the stored one was incomplete. A row whose document was not kept (the setting is younger than the row) is not
    `is_foldable`: it can only be marked.
    """
    known = F.coalesce("sequence", F.lit(""))
    is_whole = F.col("sequence").isNotNull() & ~F.coalesce("is_delete", F.lit(False))
    on_stored = F.coalesce(F.col("stored_known") > known, F.lit(False)) | (
        F.col("stored_sequence").isNotNull() & F.col("sequence").isNull()
    )
    since = F.when(on_stored, F.col("stored_sequence")).otherwise(known)
    placed = histories.join(stored, "key", "left").withColumns(
        {
            "since": since,
            "base": F.when(on_stored, F.col("stored_document")).when(is_whole, F.col("after")),
            "base_known": F.when(on_stored & ~F.col("stored_is_deleted"), F.col("stored_known"))
            .when(~on_stored & is_whole, known)
            .otherwise(F.lit("")),
            "is_doubtful": on_stored & F.col("stored_incomplete"),
            "is_foldable": ~on_stored
            | F.col("stored_is_deleted")
            | F.col("stored_document").isNotNull()
            | (F.col("stored_known") == ""),
        }
    )
    later = F.filter("updates", lambda update: update["sequence"] > F.col("since"))
    return placed.withColumn("updates", later)


def _folded(placed: DataFrame, *, mode: unwrap_options.DeleteMode, columns: Sequence[str]) -> DataFrame:
    """Rows of `_with_stored` as reduced rows, with the updates folded onto their base where that is known."""
    has_updates = F.coalesce(F.size("updates"), F.lit(0)) > 0
    is_folded = has_updates & F.col("is_foldable")
    prepared = placed.where(has_updates | F.col("sequence").isNotNull()).withColumns(
        {
            "base": F.when(is_folded, F.col("base")),
            "updates": F.when(is_folded, F.col("updates")),
            "sequence": F.when(~has_updates, F.col("sequence")),
            "after": F.when(~has_updates, F.col("after")),
            "partial_sequence": F.when(has_updates, F.col("partial_sequence")),
        }
    )
    beside = ("partial_sequence", "base_known", "is_doubtful")
    reduced = reduce.decided(prepared, mode=mode, columns=(*columns, *beside, *upsert.ROW_LOCATION, "base", "updates"))
    kept = reduced.drop("base", "updates").schema
    ddl = ", ".join(f"{identifier(each.name)} {merge.ddl(each.dataType)}" for each in kept)
    folded = reduced.mapInArrow(reduce.fold_rows, f"{ddl}, {reduce.FOLDED_DDL}")
    has_document = F.col("document").isNotNull()
    is_incomplete = F.col("incomplete") | F.col("is_doubtful") | ~has_document
    values = {
        "__action": F.when(has_document, reduce.Action.DOCUMENT.value).otherwise(reduce.Action.MARK.value),
        "__sequence": F.col("partial_sequence"),
        "__guard": F.when(has_document, F.col("partial_sequence")).otherwise(""),
        "__known": F.when(is_incomplete, F.col("base_known")),
        "__incomplete": is_incomplete,
        "__deleted": F.lit(False),
        "after": F.col("document"),
    }
    was_folded = F.col("incomplete").isNotNull()
    chosen = {name: F.when(was_folded, value).otherwise(F.col(name)) for name, value in values.items()}
    return folded.withColumns(chosen).drop(*beside, "document", "incomplete")


def pins(options: CollectionSettings) -> document_schema.Pins:
    """The columns that the settings pin."""
    return document_schema.parse_pins({**options.schema, **dict.fromkeys(options.map_fields, "map")})
