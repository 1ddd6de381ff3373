"""Silver: applies the events of bronze to one table of documents per collection.

For each collection, over its events in bronze batches (a, b]:

    known            the collections, and the position of each table
    surveyed         the events that bronze holds of each after its position
    evolved          the document schema grows to hold the range's documents, and is appended to the schemas before it is used;
                     events that cannot be read go to quarantine
    not_resurrected  late events that are older than their key's delete are dropped
    reduced          one row per key: the last event wins, deletes follow their mode, partial updates are folded or marked
    remembered       deletes that remove rows are stored, so that no late event brings the row back
    table_rows       the rows get the table's columns; missing columns are added, narrow ones widened
    committed        one commit, guarded by `sequence`, which carries b, the table's new position
    swept            rows that a finished snapshot of the whole collection did not contain, or that a drop removed, are deleted
    compacted        now and then: small files, and files in which many rows are deleted
    retyped          if the settings ask for it: the table is rebuilt with wider types for its rescued values

The steps from `evolved` to `committed` are `pipelines.silver.ranges.STEPS`: each takes a batch and returns the next one.

Small batches of plain events, and on few cores large ones too, skip these steps. `pipelines.silver.in_process.applied` applies them
in this process, without a Spark query, by `STEPS` of its own, each of which takes a batch and returns the next one, too. If one of them
finds an event that needs more, nothing is committed, and the batch goes through the steps above:

    _read            the range's events, from bronze's files; `_split` where some cannot be read, or wait in quarantine
    _reduced         partial updates are folded into documents, or mark their rows where documents are not kept; the last event of each
                     key is found
    _typed           the documents are typed by a schema that holds all of them; deletes that remove rows are stored meanwhile
    _table_rows      the last events become rows with the table's columns
    _committed       changes of the schema are recorded, missing columns are added, and the new rows replace the keys' old ones (deletion
                     vectors), in one commit with the position

Exactly once: a range is a function of (a, b] alone, and the position moves in the commit that holds the range's rows. Everything before
that commit may be repeated after a crash: a recorded schema is not appended again, a column is only added where it is missing, a delete
may be remembered twice, and the guard refuses an event that the row already contains.
"""

from __future__ import annotations

import logging
import math
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema, evolution
from cdc_core.schema import names as column_names
from cdc_core.settings.parse import OnConflict, Settings
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import local_log, maintenance, stored_files, table_history
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
from pipelines.work_progress import WorkCounter, WorkProgress

log = logging.getLogger(__name__)

NOTED_SECONDS = 60.0
"""How often a service checks that `ops/collections` has its collections, and that nobody moved its tables back."""

LOOK_SECONDS = 0.2
"""How long a round of a service looks at tables for that. There may be thousands: the next round goes on."""


@dataclass(frozen=True)
class SilverCollectionResult:
    """The result of one run for one collection: `events` of bronze batches (`after`, `to`] are in silver's `version`."""

    namespace: str
    after: int
    to: int
    events: int
    version: int
    seconds: float


@dataclass(frozen=True)
class SilverResult:
    """The result of one run; `batch` is the bronze batch that silver has reached."""

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
    progress: Callable[[WorkProgress], None] | None = None,
) -> SilverResult:
    """Apply every event that bronze holds at the start, up to the batch `to` if it is given; without `once`, continue until `stop` is set.

    If bronze has no new events, it waits for `bronze_news`, at most `pause_seconds`; `news` wakes those that wait for silver's commits.
    `sessions` makes a session with its own settings for each thread; without it collections are applied one by one. `progress` hears how
    far a round is. A killed run leaves each table at its own position, and the next run continues from there. A collection that fails is
    logged and the others continue. Its error is raised at the end, or when all have failed (`errors.together` for several): `TableOwned`,
    `LeaseHeld`, `OwnershipLost` and `CommitConflict` among them. A refused run has committed nothing.
    """
    stop_event, more = stop or threading.Event(), bronze_news or NewCommits()
    # A collection that a round did not wait for may have new events by now.
    pool = parallel.Pool(spark, sessions, ended=lambda _: more.tell())
    counter = WorkCounter("silver", progress)
    silver = _SilverRun(spark, settings, take_over, pool, stop_event, to, once, counter=counter, news=news or NewCommits())
    start = time.monotonic()
    total = SilverResult(0, 0, 0.0)
    try:
        while True:
            result = silver.run_round()
            total = together(total, result)
            if once or stop_event.is_set():
                break
            if not result.events:
                more.wait(pause_seconds, stop=stop_event)
        total = together(total, _of(pool.rest(), total.batch))
        silver.failures.raised()
    finally:
        silver.close()
        counter.begin(0)
    return replace(total, seconds=time.monotonic() - start)


def together(total: SilverResult, last: SilverResult) -> SilverResult:
    """The sum of two consecutive results."""
    by_name = {result.namespace: result for result in total.collections}
    for result in last.collections:
        previous = by_name.get(result.namespace, replace(result, events=0, seconds=0.0))
        by_name[result.namespace] = replace(
            result, after=previous.after, events=previous.events + result.events, seconds=previous.seconds + result.seconds
        )
    return SilverResult(last.batch, total.events + last.events, total.seconds + last.seconds, tuple(by_name.values()))


def _of(results: Sequence[SilverCollectionResult | None], batch: int, seconds: float = 0.0) -> SilverResult:
    """The result of a round that took so long, from those of its collections; None stands for one that failed."""
    collections = tuple(result for result in results if result is not None)
    return SilverResult(batch, sum(result.events for result in collections), seconds, collections)


@dataclass
class _SilverRun:
    """One run over the silver tables of a pipeline, with its claims on them."""

    spark: SparkSession
    settings: Settings
    take_over: bool
    pool: parallel.Pool
    stop: threading.Event
    bound: int | None = None
    once: bool = False
    """Whether it ends when everything is applied, instead of running as a service."""
    collections: dict[registry.Namespace, SilverCollection] = field(default_factory=dict)
    retyped: set[registry.Namespace] = field(default_factory=set)
    """Collections whose table has no rescued values that a rebuild would bring into columns, but maybe in new rows."""
    rescuing: set[registry.Namespace] = field(default_factory=set)
    """Collections whose table could not be rebuilt for its rescued values, which is not tried again."""
    failures: parallel.Failures = field(default_factory=parallel.Failures)
    warned: set[registry.Namespace] = field(default_factory=set)
    began_ms: int = field(default_factory=clock.now_ms)
    """`take_over` covers owners at this time only: a service may claim a table for the first time weeks later."""
    idle: set[str] = field(default_factory=set)
    """Collections that had no events in the last round, whose positions it moved."""
    is_alone: bool = False
    """Whether only one collection has work in the current round."""
    survey_seconds: float = 0.0
    """How long the survey of the last round took."""
    noted_at: float = field(default_factory=time.monotonic)
    """When it last checked that `ops/collections` has its collections."""
    next_look: float = field(default_factory=lambda: time.monotonic() + NOTED_SECONDS)
    """When it looks again whether tables were moved back."""
    not_looked_at: list[registry.Namespace] = field(default_factory=list)
    """The collections whose tables a look has not reached yet."""
    counter: WorkCounter = field(default_factory=lambda: WorkCounter("silver"))
    news: NewCommits = field(default_factory=NewCommits)
    """Told of each commit."""

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)
        self.positions = Positions(self.spark, self.settings, self.failures, self.take_over, self.began_ms)

    def close(self) -> None:
        """Release the claims, except those that another run has taken over, when no collection is at work any more."""
        self.pool.close()
        # In every release: the next start reads it from whichever table has the newest.
        metadata = self.positions.settled_metadata()
        for collection in self.collections.values():
            # Without Spark nothing can be committed, and the other claims end with this process.
            with suppress(Exception):
                collection.writer.release(metadata)
        self.collections.clear()

    def run_round(self) -> SilverResult:
        """Apply what bronze holds now to all collections, except those at which an earlier round of a service is still at work."""
        # Bronze only grows: all that the round reads of it is in its log as it was at the first look.
        with stored_files.one_look_at(local_log.place(self.spark, self.bronze)):
            return self._round()

    def _round(self) -> SilverResult:
        start = time.monotonic()
        if not delta.exists(self.spark, self.bronze):
            return SilverResult(0, 0, 0.0)
        positions, newest = self.positions, bronze_log.newest(self.spark, self.bronze)
        to = newest.batch if self.bound is None else min(newest.batch, self.bound)
        positions.look(newest)
        if positions.discovered is None:
            positions.read()
        at_work = {work.namespace for work in self.pool.at_work}
        self._release_idle(at_work)
        self.failures.begin_round()
        reread_namespaces = self._retry_failed(at_work)
        if not self.once:
            self._reread_moved(at_work)
        positions.check_log()
        survey_start = time.monotonic()
        works = due.works(self.spark, self.bronze, positions, to, at_work=at_work)
        self.survey_seconds = time.monotonic() - survey_start
        if not self.once:  # a run that ends moves all positions: the next start reads from the oldest
            works = due.with_few_idle(works)
            self._note_lost()
        for namespace in reread_namespaces - {work.namespace for work in works}:
            self.failures.forget(str(namespace))
        self.is_alone = len(works) == 1 and not at_work
        self.counter.begin(len(works), sum(work.counts.events for work in works))
        apply = self.counter.counting(self.failures.guarding(self._applied, name=lambda work: str(work.namespace)))
        has_others = not self.once and len(positions.known) > 1
        patience = parallel.PATIENCE_SECONDS if has_others else math.inf
        results = self.pool.each(works, apply, stop=self.stop, patience_seconds=patience)
        if not self.pool.at_work:  # their retry may succeed
            self.failures.end_where_all_failed(map(str, positions.known))
        # After the results: a collection that failed, or is at work, is not at `to`, so that nothing is settled.
        positions.settle(to)
        result = _of(results, to, time.monotonic() - start)
        self.idle = {each.namespace for each in result.collections if not each.events}
        return result

    def _note_lost(self) -> None:
        """Note again what `ops/collections` lost, for example because it was removed: gold and `status` know no other collections."""
        if time.monotonic() - self.noted_at < NOTED_SECONDS:
            return
        self.noted_at = time.monotonic()
        # Gold tells of a table that cannot be read.
        with suppress(Exception):
            noted = registry.read(self.spark, self.settings)
            lost = sorted({*self.positions.known}.difference(noted.namespaces, noted.refused))
            if lost:
                log.warning("ops/collections lost %s; noting them again", ", ".join(map(str, lost)))
                registry.note(
                    self.spark, self.settings, new=lost, discovered=self.positions.discovered or 0, log=self.positions.log
                )

    def _reread_moved(self, at_work: Collection[registry.Namespace]) -> None:
        """Read again the tables that were moved back, by a RESTORE for example: of a collection without new events nothing else would notice
        it, and gold publishes the older rows. Not in a store, where each table is a request."""
        now = time.monotonic()
        if now >= self.next_look and local_log.folder(self.bronze) is not None:
            self.not_looked_at, self.next_look = [*self.positions.known], now + NOTED_SECONDS
        while self.not_looked_at and time.monotonic() <= now + LOOK_SECONDS:
            namespace = self.not_looked_at.pop()
            # One that failed is read again by itself (`_retry_failed`), and the commits of one at work find it out.
            is_looked_at = str(namespace) not in self.failures.by_name and namespace not in at_work
            if is_looked_at and self._is_behind(namespace, self.positions.known[namespace].to):
                log.warning(
                    "%s: its table was restored, repaired or removed; applying the events again that it lacks", namespace
                )
                self._reread(namespace)

    def _is_behind(self, namespace: registry.Namespace, to: int) -> bool:
        """Whether a collection's table is at a batch before `to`; false where that is not known: a claim then tells why."""
        with suppress(Exception):
            table = self.positions.table(namespace)
            standing = table_history.standing(self.spark, table)
            table_to = standing.metadata.get("to") if standing.version >= 0 else 0
            if table_to is None:  # restored to its creation, for example
                table_to = registry.silver_position(self.spark, table).to
            return int(table_to) < to
        return False

    def _retry_failed(self, at_work: Collection[registry.Namespace]) -> set[registry.Namespace]:
        """Release and read again the collections that failed and may be retried now; returns those that could be read.

        Their errors stay noted, so that the same error is not logged twice.
        """
        readable_namespaces = set()
        # Also those whose position could not be read at first, as in an outage of a store.
        all_namespaces = (*self.positions.known, *self.positions.unread)
        for namespace in [each for each in all_namespaces if str(each) in self.failures.by_name]:
            if self.failures.is_set_aside(str(namespace)) or namespace in at_work:
                continue
            # Another run may have moved or rebuilt the table while it was not claimed here.
            if self._reread(namespace):
                readable_namespaces.add(namespace)
        return readable_namespaces

    def _reread(self, namespace: registry.Namespace) -> bool:
        """Release a collection's table, and read it again; whether it could be read."""
        # It may have rescued values that were not looked at: of before its rebuild, if it was restored, or of commits before the failure.
        self.retyped.discard(namespace)
        self._release(namespace)
        return self.positions.reread(namespace)

    def _release(self, namespace: registry.Namespace) -> None:
        """Release a collection's table, if it is claimed; its next events claim it again."""
        collection = self.collections.pop(namespace, None)
        if collection is not None:
            collection.writer.spark = self.spark  # by now, another collection may be at work in the session of its last turn
            with suppress(Exception):  # of any kind: the claim expires by itself
                collection.writer.release()

    def _release_idle(self, at_work: Collection[registry.Namespace]) -> None:
        """Release the collections without events: a service would otherwise hold every collection that ever existed."""
        # One that is at work has events by now: the round in which it began was told of its earlier turn.
        for namespace in [each for each in [*self.collections] if str(each) in self.idle and each not in at_work]:
            self.positions.schemas[str(namespace)] = self.collections[namespace].schema
            self._release(namespace)

    def _applied(self, spark: SparkSession, work: CollectionWork) -> SilverCollectionResult:
        start = time.monotonic()
        positions, namespace = self.positions.known, work.namespace
        collection = self._collection(spark, work)
        if not self.once:
            if collection.mode.removes_row:
                # Before the events are applied: gold then finds their deletes in files of their own.
                collection.delete_files = maintenance.compact_facts(spark, collection.deletes, collection.delete_files)
            # Each range with an unreadable event reads all of these files, and adds some.
            collection.held_files = maintenance.compact_facts(spark, collection.quarantine, collection.held_files)
        retypes = collection.options.on_conflict is OnConflict.RETYPE and namespace not in self.rescuing
        seconds = math.inf if retypes else self._turn_seconds()  # each turn may rebuild the table for its rescued values
        progress = ranges.apply(
            collection, work, stop=self.stop, seconds=seconds, is_alone=self.is_alone, hear=self.counter.add
        )
        if progress.position.to > work.position.to:  # not where it was stopped before the first commit
            positions[namespace] = progress.position
        position = positions[namespace]
        # After the commit, in commits of its own: compaction changes no row.
        maintenance.compact(collection.writer)
        if retypes:
            # All rows the first time: their rescued values may be older than the setting.
            after = work.position.to if namespace in self.retyped else 0
            rebuilt = silver_rebuild.rebuilt_for_rescued(collection, self.settings, position, after=after, stop=self.stop)
            collection.lacks_quarantine = False
            if rebuilt is None:
                self.rescuing.add(namespace)
            else:
                positions[namespace] = position = rebuilt
            self.retyped.add(namespace)
        self.news.tell([str(namespace)])
        return SilverCollectionResult(
            str(namespace),
            work.position.to,
            position.to,
            progress.events,
            collection.writer.version,
            time.monotonic() - start,
        )

    def _turn_seconds(self) -> float:
        """How long a service begins ranges of one collection, while others wait for the round to end."""
        is_alone = self.once or len(self.positions.known) == 1
        return math.inf if is_alone else max(parallel.TURN_SECONDS, parallel.TURN_SHARE * self.survey_seconds)

    def _collection(self, spark: SparkSession, work: CollectionWork) -> SilverCollection:
        """The collection, with its table claimed, and created if it does not exist; it uses the session `spark` from now on."""
        collection = self.collections.get(work.namespace)
        if collection is None:
            ahead = self._reading(spark, work) if self.once and self.is_alone else read_ahead.ReadAhead()
            writer = self._claimed(spark, work.namespace)
            with writer.released_on_error():
                collection = self.collections[work.namespace] = self._collection_of(spark, work, writer, ahead)
        # The session may be another one in each round, and a commit is fenced by the settings of its session.
        collection.spark = collection.writer.spark = spark
        return collection

    def _reading(self, spark: SparkSession, work: CollectionWork) -> read_ahead.ReadAhead:
        name = str(work.namespace)
        options, keeps_document = self.settings.silver.for_collection(name), self.settings.keeps_document(name)
        return in_process.reading(spark, self.bronze, work, options, keeps_document=keeps_document)

    def _collection_of(
        self, spark: SparkSession, work: CollectionWork, writer: Writer, ahead: read_ahead.ReadAhead
    ) -> SilverCollection:
        # Position and schema were read before the claim: another run may have moved or rebuilt the table in between.
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
            # Batches that are applied again have the same numbers, but maybe other rows under other settings.
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
        """The schema of the table's columns. Their layout is fixed by the first of them; until then settings may change it."""
        version = self.positions.schemas.get(str(namespace), schemas.SchemaVersion())
        is_laid_out = not version.schema.fields or version.schema.naming.lays_out_as(column_names.ColumnNaming.of(options))
        if not is_laid_out and delta.columns(spark, table).isdisjoint(name for name, _ in version.schema.table()):
            return replace(version, schema=document_schema.EMPTY)
        if namespace not in self.warned:
            self.warned.add(namespace)
            self._warn_of_settings(namespace, version.schema, is_laid_out=is_laid_out)
        return version

    def _warn_of_settings(
        self, namespace: registry.Namespace, schema: document_schema.DocumentSchema, *, is_laid_out: bool
    ) -> None:
        """Log which settings do not apply to the existing columns before a rebuild."""
        reasons = []
        if not is_laid_out:
            reasons.append(f"one of {', '.join(column_names.LAYOUT_OPTIONS)} was changed")
        pinned_fields = ", ".join(evolution.waiting_pins(schema, self.settings.silver.for_collection(str(namespace)).pins))
        if pinned_fields:
            reasons.append(f"schema or map.fields pins other types of {pinned_fields}")
        for reason in reasons:
            log.warning(
                "%s: %s; the table keeps its columns. To apply the current settings, run medallion rebuild --collection %s",
                namespace,
                reason,
                shlex.quote(str(namespace)),
            )

    def _claimed(self, spark: SparkSession, namespace: registry.Namespace) -> Writer:
        table, position = self.positions.table(namespace), self.positions.known[namespace]
        # Not asked again for a table whose position was read: the claim finds out if it was removed since.
        if position.version < 0 and not delta.exists(spark, table):
            if position.to:
                raise errors.CommitConflict(f"{table.label}: the table was removed meanwhile; it is rebuilt from bronze")
            silver_tables.create(spark, table)
        return Writer.claim(spark, table, take_over=self.take_over, since_ms=self.began_ms)

    def _check_claimed(self, namespace: registry.Namespace, writer: Writer) -> None:
        """Raise if a table that was just claimed is not as this run has read it."""
        position, metadata, label = self.positions.known[namespace], writer.metadata, writer.table.label
        claimed: tuple[object, str] = metadata.get("to"), metadata.get("generation") or ""
        if metadata.get("to") is None and position.to:
            # The table was restored or overwritten, and its history has no position of these rows.
            by_rows = registry.silver_position(writer.spark, writer.table)
            claimed = by_rows.to, by_rows.generation
        if claimed != (position.to, position.generation) and (position.to or metadata.get("to") is not None):
            raise errors.CommitConflict(f"{label}: another run moved or rebuilt this table; start again")
        options = self.settings.silver.for_collection(str(namespace)).unwrap
        added_columns = {*position.added, *(each.name for each in (*options.add_fields, *options.add_headers))}
        is_known = str(namespace) in self.positions.schemas
        is_undescribed = not is_known and silver_tables.has_documents(writer.spark, writer.table, added=added_columns)
        if is_undescribed and not self.positions.find_schema(namespace):
            raise errors.DecisionNeeded(
                f"{label}: ops/schemas no longer describes its columns. To rebuild both, run medallion rebuild "
                f"--collection {shlex.quote(str(namespace))}"
            )
