"""Silver: the events of bronze, applied to one table of documents a collection.

For each collection, over its events in bronze batches (a, b]:

    known            which collections there are, and where each table stands
    surveyed         what bronze holds of each after its position
    evolved          the document schema that holds the range's documents, appended to the schemas before it is used;
                     events that cannot be read are in quarantine
    not_resurrected  events that come late and are older than their key's delete are left out
    reduced          one row a key: the last event wins, deletes by their mode, partial updates noted or folded
    remembered       deletes that take rows away, so that nothing that comes late brings them back
    table_rows       the rows with the table's columns, which are added or widened where they are missing
    committed        one commit, guarded by `sequence`, which carries b, the table's new position
    swept            rows that a finished snapshot of the whole collection did not hold, or that a drop took away
    compacted        now and then: small files, and those of which much is marked as deleted
    retyped          where the settings say so: the table rebuilt for what it rescued

The steps from `evolved` to `committed` are `pipelines.silver.ranges.STEPS`: each takes a batch and gives out the next one.

Plain events take none of them, a few at a time or, on few cores, many range by range.
`pipelines.silver.in_process.applied` does the same in this process, without a query; where it finds anything to decide, it
commits nothing, and the batch goes through the steps:

    _events          the range's events, read from bronze's files
    _reduced         partial updates become the documents that they leave; where those are not kept, marks of rows. The last event
                     of each key
    _begun           the schema that its first documents lead to, by which all are typed
    _columns         the documents, typed, become rows; what they do to the schema is recorded
    _committed       the keys' rows marked as deleted and the new ones written, in one commit with the position

Exactly once: a range is a function of (a, b] and of nothing else, and the position moves in the commit that holds the
range's rows. What comes before it may be repeated after a crash: a schema that is there already is not appended
again, a new column is only added where it is missing, a delete remembered twice is remembered, and the guard refuses an
event that the row holds already.
"""

from __future__ import annotations

import logging
import math
import shlex
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.schema import document_schema, evolution
from cdc_core.schema import names as column_names
from cdc_core.settings.parse import OnConflict
from pipelines import clock
from pipelines.bronze import collection_events, registry
from pipelines.bronze import log as bronze_log
from pipelines.delta import maintenance, stored_files, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.new_commits import NewCommits
from pipelines.schema import log as schemas
from pipelines.silver import due, in_process, ranges, read_ahead
from pipelines.silver import rebuild as silver_rebuild
from pipelines.silver import tables as silver_tables
from pipelines.silver.collection import CollectionWork, SilverCollection
from pipelines.silver.positions import Positions
from pipelines.spark import parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.properties import unwrap as unwrap_options
    from cdc_core.settings.parse import Settings
    from cdc_core.tables import layout as tables

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SilverCollectionResult:
    """What one run did to one collection: `events` of bronze batches (`after`, `to`] are in silver's `version`."""

    namespace: str
    after: int
    to: int
    events: int
    version: int
    seconds: float


@dataclass(frozen=True)
class SilverResult:
    """What one run did; `batch` is how far bronze went, and silver now goes."""

    batch: int
    events: int
    seconds: float
    collections: tuple[SilverCollectionResult, ...] = ()


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = True,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
    pause_seconds: float = 1.0,
    to: int | None = None,
    bronze_news: NewCommits | None = None,
    news: NewCommits | None = None,
) -> SilverResult:
    """Apply every event that bronze held at the start, of batches up to `to` where it is given; without `once`, go on until
    `stop` is set.

    Where bronze has nothing new it waits, at most `pause_seconds`, for what `bronze_news` says; `news` wakes whoever waits for what silver did.
    `sessions` makes a session with settings of its own for each thread; without it collections go one by one. A killed
    run leaves every table at a position of its own, and the next one goes on from there. A collection that fails is named
    and the others go on; at the end, or when all have failed, its error is raised (`errors.together` where there are several):
    `TableOwned`, `LeaseHeld`, `OwnershipLost`, `CommitConflict` among them; a refused run has committed nothing.
    """
    ended = stop or threading.Event()
    silver = _SilverRun(spark, settings, take_over, parallel.Pool(spark, sessions), ended, to, once)
    started = time.monotonic()
    total = SilverResult(0, 0, 0.0)
    try:
        while True:
            applied = silver.run_round()
            total = together(total, applied)
            if news is not None and applied.collections:
                news.tell(each.namespace for each in applied.collections)
            if once or ended.is_set():
                break
            if not applied.events:
                (bronze_news or NewCommits()).wait(pause_seconds, stop=ended)
        silver.failures.raised()
    finally:
        silver.close()
    return replace(total, seconds=time.monotonic() - started)


def together(total: SilverResult, last: SilverResult) -> SilverResult:
    """Two results, one after the other, as one."""
    by_name = {each.namespace: each for each in total.collections}
    for each in last.collections:
        before = by_name.get(each.namespace, replace(each, events=0, seconds=0.0))
        by_name[each.namespace] = replace(
            each, after=before.after, events=before.events + each.events, seconds=before.seconds + each.seconds
        )
    return SilverResult(last.batch, total.events + last.events, total.seconds + last.seconds, tuple(by_name.values()))


@dataclass
class _SilverRun:
    """One run over the tables of a pipeline's silver, with the claims that are held while it goes on."""

    spark: SparkSession
    settings: Settings
    take_over: bool
    pool: parallel.Pool
    stop: threading.Event
    bound: int | None = None
    once: bool = False
    """Whether it ends when all is applied, and does not go on as a service."""
    collections: dict[registry.Namespace, SilverCollection] = field(default_factory=dict)
    retyped: set[registry.Namespace] = field(default_factory=set)
    failures: parallel.Failures = field(default_factory=parallel.Failures)
    told_layout: set[registry.Namespace] = field(default_factory=set)
    began_ms: int = field(default_factory=clock.now_ms)
    """A table may be claimed for the first time weeks later: `take_over` is of the owners of then."""
    idle: set[str] = field(default_factory=set)
    """Collections whose tables the last round moved on, and that had no events."""
    is_alone: bool = False
    """Whether the round at hand has one collection with anything to do."""
    survey_seconds: float = 0.0
    """What it took to find out what there is to do, in the last round."""

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)
        self.positions = Positions(self.spark, self.settings, self.failures, self.take_over, self.began_ms)

    def close(self) -> None:
        """Give the claims back. One that another run took over meanwhile is not given back: it is no longer this run's."""
        # Every release says it: the next start reads it from whichever table has the newest.
        settled = self.positions.settled_metadata()
        for collection in self.collections.values():
            # Where Spark is gone no commit says it, and this process holds the others no longer either.
            with suppress(Exception):
                collection.writer.release(settled)
        self.collections.clear()

    def run_round(self) -> SilverResult:
        """Apply what bronze holds now."""
        started = time.monotonic()
        with stored_files.one_look():
            if not delta.exists(self.spark, self.bronze):
                return SilverResult(0, 0, 0.0)
            positions, newest = self.positions, bronze_log.newest(self.spark, self.bronze)
        to = newest.batch if self.bound is None else min(newest.batch, self.bound)
        positions.look(newest)
        if positions.discovered is None:
            positions.read()
        self._let_idle_go()
        self.failures.begin_round()
        reread = self._retry_failed()
        positions.check_log()
        surveying = time.monotonic()
        works = due.works(self.spark, self.bronze, positions, to)
        self.survey_seconds = time.monotonic() - surveying
        if not self.once:  # a run that ends moves all positions: a start reads on from the oldest
            works = due.with_few_idle(works)
        for namespace in reread - {work.namespace for work in works}:
            self.failures.passed(str(namespace))
        self.is_alone = len(works) == 1
        apply = self.failures.guarding(self._applied, name=lambda work: str(work.namespace))
        results = [result for result in self.pool.each(works, apply, stop=self.stop) if result is not None]
        self.failures.end_where_all_failed(map(str, positions.known))
        # After the results: a collection that failed is not at `to`, and holds all of them back.
        positions.settle(to)
        events = sum(result.events for result in results)
        self.idle = {result.namespace for result in results if not result.events}
        return SilverResult(to, events, time.monotonic() - started, tuple(results))

    def _retry_failed(self) -> set[registry.Namespace]:
        """Forget what was held of collections whose error was temporary: they are read and claimed anew.

        Those that could be read; their errors are noted still, so that one that comes again is not told again.
        """
        reread = set()
        # Also those that could not be read when they were to become known: an outage of a store passes.
        failed = (*self.positions.known, *self.positions.unread)
        for namespace in [each for each in failed if str(each) in self.failures.found]:
            if self.failures.is_set_aside(str(namespace)):
                continue
            self._let_go(namespace)
            # Another run may have moved or rebuilt the table while this one did not hold it.
            if self.positions.reread(namespace):
                reread.add(namespace)
        return reread

    def _let_go(self, namespace: registry.Namespace) -> None:
        """Release a collection's table, where it is claimed; its next events claim it anew."""
        collection = self.collections.pop(namespace, None)
        if collection is not None:
            with suppress(Exception):  # whatever it is: the claim ends by itself
                collection.writer.release()

    def _let_idle_go(self) -> None:
        """Let go of collections to which nothing came: of those that come and go a service would hold all that there ever were."""
        for namespace in [each for each in self.collections if str(each) in self.idle]:
            self.positions.schemas[str(namespace)] = self.collections[namespace].schema
            self._let_go(namespace)

    def _applied(self, spark: SparkSession, work: CollectionWork) -> SilverCollectionResult:
        started = time.monotonic()
        known, namespace = self.positions.known, work.namespace
        collection = self._collection(spark, work)
        if not self.once:
            if collection.mode.removes_row:
                # Before the turn, whose deletes gold then finds in files of their own.
                collection.delete_files = maintenance.compact_facts(spark, collection.deletes, collection.delete_files)
            # Each range with an event that cannot be read looks at all of them, and adds some.
            collection.held_files = maintenance.compact_facts(spark, collection.quarantine, collection.held_files)
        seconds = self._turn_seconds(collection)
        progress = ranges.apply(collection, work, stop=self.stop, seconds=seconds, is_alone=self.is_alone)
        known[namespace] = reached = progress.position
        # After the commit, and outside it: what is compacted, or not, changes no row.
        maintenance.compact(collection.writer)
        if collection.options.on_conflict is OnConflict.RETYPE:
            # The first time all rows are looked at: what they rescued may be older than the setting.
            after = work.position.to if namespace in self.retyped else 0
            reached = silver_rebuild.rebuilt_for_rescued(collection, self.settings, reached, after=after, stop=self.stop)
            known[namespace] = reached
            self.retyped.add(namespace)
        return SilverCollectionResult(
            str(namespace),
            work.position.to,
            reached.to,
            progress.events,
            collection.writer.version,
            time.monotonic() - started,
        )

    def _turn_seconds(self, collection: SilverCollection) -> float:
        """For how long a service begins ranges of one collection, while the others wait for its round to end.

        Not where each turn may rebuild the table for what it rescued.
        """
        is_alone = self.once or len(self.positions.known) == 1
        seconds = max(parallel.TURN_SECONDS, parallel.TURN_SHARE * self.survey_seconds)
        return math.inf if is_alone or collection.options.on_conflict is OnConflict.RETYPE else seconds

    def _collection(self, spark: SparkSession, work: CollectionWork) -> SilverCollection:
        """The collection's table, made where there is none, and claimed; from now on in the session `spark`."""
        collection = self.collections.get(work.namespace)
        if collection is None:
            ahead = self._reading(spark, work) if self.once and self.is_alone else read_ahead.ReadAhead()
            writer = self._claimed(spark, work.namespace)
            with writer.released_on_error():
                collection = self.collections[work.namespace] = self._collection_of(spark, work, writer, ahead)
        # The pool gives each round any of its sessions, and a commit is fenced by the settings of the one that it is made in.
        collection.spark = collection.writer.spark = spark
        return collection

    def _reading(self, spark: SparkSession, work: CollectionWork) -> read_ahead.ReadAhead:
        name = str(work.namespace)
        options, keeps_document = self.settings.silver.for_collection(name), self.settings.keeps_document(name)
        return in_process.reading(spark, self.bronze, work, options, keeps_document=keeps_document)

    def _collection_of(
        self, spark: SparkSession, work: CollectionWork, writer: Writer, ahead: read_ahead.ReadAhead
    ) -> SilverCollection:
        # Position and schema were read before the claim: another run may have moved the table since, or rebuilt it where it is.
        self._check_claimed(work.namespace, writer)
        options = self.settings.silver.for_collection(str(work.namespace))
        is_new = self.positions.known[work.namespace].to == 0
        return SilverCollection(
            spark=spark,
            namespace=work.namespace,
            options=options,
            keeps_document=self.settings.keeps_document(str(work.namespace)),
            layout=self.layout,
            bronze=self.bronze,
            writer=writer,
            schema=self._schema(spark, work.namespace, writer.table, options.unwrap),
            is_new=is_new,
            max_local_events=collection_events.ONE_RUN_EVENTS if self.once else in_process.SERVICE_EVENTS,
            # Applied once more the batches have the same numbers, and under other settings perhaps other rows.
            origin=uuid.uuid4().hex[:12] if is_new or table_history.RESTORED in writer.metadata else "",
            remembered=writer.metadata.get("deletes"),
            ahead=ahead,
        )

    def _schema(
        self,
        spark: SparkSession,
        namespace: registry.Namespace,
        table: tables.TableRef,
        options: unwrap_options.UnwrapOptions,
    ) -> schemas.SchemaVersion:
        """The schema of a table's columns, which stay laid out as they were; before there is any the settings may change."""
        kept = self.positions.schemas.get(str(namespace), schemas.SchemaVersion())
        is_laid_out = not kept.schema.fields or kept.schema.naming.lays_out_as(column_names.ColumnNaming.of(options))
        if not is_laid_out and delta.columns(spark, table).isdisjoint(name for name, _ in kept.schema.table()):
            return replace(kept, schema=document_schema.EMPTY)
        if namespace not in self.told_layout:
            self.told_layout.add(namespace)
            self._tell_what_waits(namespace, kept.schema, is_laid_out=is_laid_out)
        return kept

    def _tell_what_waits(
        self, namespace: registry.Namespace, schema: document_schema.DocumentSchema, *, is_laid_out: bool
    ) -> None:
        """Say which settings make no difference to the columns that are there, before a rebuild."""
        waiting = []
        if not is_laid_out:
            waiting.append(f"one of {', '.join(column_names.LAYOUT_OPTIONS)} was changed")
        pinned = ", ".join(evolution.waiting_pins(schema, self.settings.silver.for_collection(str(namespace)).pins))
        if pinned:
            waiting.append(f"schema or map.fields pins other types of {pinned}")
        for what in waiting:
            log.warning(
                "%s: %s; the table keeps its columns. To apply the current settings, run medallion rebuild --collection %s",
                namespace,
                what,
                shlex.quote(str(namespace)),
            )

    def _claimed(self, spark: SparkSession, namespace: registry.Namespace) -> Writer:
        table = self.positions.table(namespace)
        if not delta.exists(spark, table):
            if self.positions.known[namespace].to:
                raise errors.CommitConflict(f"{table.label}: the table was removed meanwhile; it is rebuilt from bronze")
            silver_tables.create(spark, table)
        return Writer.claim(spark, table, take_over=self.take_over, since_ms=self.began_ms)

    def _check_claimed(self, namespace: registry.Namespace, writer: Writer) -> None:
        """Raise where a table that was claimed just now is not what this run knows of it."""
        known, said, label = self.positions.known[namespace], writer.metadata, writer.table.label
        if said.get("to") is not None and (said["to"], said.get("generation") or "") != (known.to, known.generation):
            raise errors.CommitConflict(f"{label}: another run moved or rebuilt this table; start again")
        options = self.settings.silver.for_collection(str(namespace)).unwrap
        added = {*known.added, *(each.name for each in (*options.add_fields, *options.add_headers))}
        is_known = str(namespace) in self.positions.schemas
        is_unsaid = not is_known and silver_tables.has_documents(writer.spark, writer.table, added=added)
        if is_unsaid and not self.positions.find_schema(namespace):
            raise errors.DecisionNeeded(
                f"{label}: ops/schemas no longer describes its columns. To rebuild both, run medallion rebuild "
                f"--collection {shlex.quote(str(namespace))}"
            )
