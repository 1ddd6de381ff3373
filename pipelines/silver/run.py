"""Silver: the events of bronze, applied to one table of documents a collection.

For each collection, over its events in bronze batches (a, b]:

    known       which collections there are, and where each table stands
    evolved     the document schema that holds the range's documents; appended to the schemas before it is used
    reduced     one row a key: the last event wins, deletes by their mode, partial updates noted or folded
    remembered  deletes that take rows away, so that nothing that comes late brings them back
    merged      one MERGE, guarded by `sequence`; its commit carries b, the table's new position
    swept       rows that a finished snapshot of the whole collection did not hold
    compacted   now and then: small files, and those of which much is marked as deleted
    retyped     where the settings say so: the table rebuilt for what it rescued

Exactly once: a range is a function of (a, b] and of nothing else, and the position moves in the commit that holds the
range's rows. What comes before it may be repeated after a crash: a schema that is there already is not appended
again, a new column is only added where it is missing, a delete remembered twice is remembered, and the guard refuses an
event that the row holds already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.settings.parse import OnConflict
from cdc_core.silver import reduce
from cdc_core.tables import layout as tables
from pipelines.bronze import collections as registry
from pipelines.bronze import log as bronze
from pipelines.delta import maintenance, query_execution
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.news import News
from pipelines.operations import rebuild
from pipelines.schema import log as schemas
from pipelines.silver import collection as silver_collection
from pipelines.spark import parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

IDLE_BATCHES = 10_000
"""A collection without events moves its position when it is this many batches behind."""


@dataclass(frozen=True)
class CollectionResult:
    """What one run did to one collection: `events` of bronze batches (`after`, `to`] are in silver's `version`."""

    namespace: str
    after: int
    to: int
    events: int
    version: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """What one run did; `batch` is how far bronze went, and silver now goes."""

    batch: int
    events: int
    seconds: float
    collections: tuple[CollectionResult, ...] = ()


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
    bronze_news: News | None = None,
    news: News | None = None,
) -> Result:
    """Apply every event that bronze held at the start, of batches up to `to` where it is given; without `once`, go on until
    `stop` is set.

    Where bronze has nothing new it waits, at most `pause_seconds`, for what `bronze_news` says; `news` are told of what it did.
    `sessions` makes a session with settings of its own for each thread; without it collections go one by one. A killed
    run leaves every table at a position of its own, and the next one goes on from there. A collection that fails is named
    and the others go on; at the end, or when all have failed, its error is raised (`errors.together` where there are several):
    `TableOwned`, `LeaseHeld`, `OwnershipLost`, `CommitConflict` among them; a refused run has committed nothing.
    """
    ended = stop or threading.Event()
    silver = _Silver(spark, settings, take_over, parallel.Pool(spark, sessions), ended, to)
    started = time.monotonic()
    total = Result(0, 0, 0.0)
    try:
        while True:
            found = silver.caught_up()
            total = _together(total, found)
            if news is not None and found.collections:
                news.tell()
            if once or ended.is_set():
                break
            if not found.events:
                (bronze_news or News()).wait(pause_seconds, stop=ended)
        silver.failures.raised()
    finally:
        silver.close()
    return replace(total, seconds=time.monotonic() - started)


def _together(total: Result, found: Result) -> Result:
    by_name = {each.namespace: each for each in total.collections}
    for each in found.collections:
        before = by_name.get(each.namespace, replace(each, events=0, seconds=0.0))
        by_name[each.namespace] = replace(
            each, after=before.after, events=before.events + each.events, seconds=before.seconds + each.seconds
        )
    return Result(found.batch, total.events + found.events, 0.0, tuple(by_name.values()))


@dataclass
class _Silver:
    """The tables of one pipeline's silver, with the claims that are held while it runs."""

    spark: SparkSession
    settings: Settings
    take_over: bool
    pool: parallel.Pool
    stop: threading.Event
    bound: int | None = None
    known: dict[registry.Namespace, registry.SilverPosition] = field(default_factory=dict)
    scanned: dict[registry.Namespace, int] = field(default_factory=dict)
    collections: dict[registry.Namespace, silver_collection.Collection] = field(default_factory=dict)
    schemas: dict[str, schemas.Kept] = field(default_factory=dict)
    retyped: set[registry.Namespace] = field(default_factory=set)
    failures: parallel.Failures = field(default_factory=parallel.Failures)
    discovered: int | None = None
    noted: int = 0
    settled: int = 0
    log: str | None = None

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)

    def close(self) -> None:
        """Release what is held; a claim that was lost already is nobody's to release."""
        settled = asdict(registry.Settled.at(self.settled, self.known))
        for collection in self.collections.values():
            with suppress(errors.MedallionError):
                collection.writer.release({"settled": settled})
        self.collections.clear()

    def caught_up(self) -> Result:
        """Apply what bronze holds now."""
        started = time.monotonic()
        if not delta.exists(self.spark, self.bronze):
            return Result(0, 0, 0.0)
        newest = bronze.newest(self.spark, self.bronze)
        to, self.log = newest.batch if self.bound is None else min(newest.batch, self.bound), newest.log
        if self.discovered is None:
            self._read_known()
        self._again()
        self._check_log()
        found = [work for work in self._works(to) if self._is_due(work)]
        apply = self.failures.guarding(self._applied, name=lambda work: str(work.namespace))
        results = [result for result in self.pool.each(found, apply, stop=self.stop) if result is not None]
        if self.failures.found and all(str(namespace) in self.failures.found for namespace in self.known):
            self.failures.raised()
        if all(self._start(namespace) >= to for namespace in self.known):
            self.settled = to
        events = sum(result.events for result in results)
        return Result(to, events, time.monotonic() - started, tuple(results))

    def _again(self) -> None:
        """Forget what was held of collections whose error was temporary: they are read and claimed anew."""
        for namespace in [each for each in self.known if str(each) in self.failures.found]:
            if self.failures.waits(str(namespace)):
                continue
            collection = self.collections.pop(namespace, None)
            if collection is not None:
                with suppress(errors.MedallionError):
                    collection.writer.release()
            try:
                self.scanned.pop(namespace, None)  # of a table that was restored these batches are to be applied again
                self.known[namespace] = self._position(namespace)
                generations = {str(namespace): self.known[namespace].generation}
                newest = schemas.newest(self.spark, self.layout.ops("schemas"))
                self.schemas |= schemas.of_generations(newest, generations)
            except errors.Temporary as error:
                self.failures.note(str(namespace), error)

    def _check_log(self) -> None:
        """Refuse collections whose tables were made from the batches of another bronze: their numbers say nothing of this one's."""
        for namespace, position in self.known.items():
            if position.is_of_other(self.log):
                self.failures.note(
                    str(namespace),
                    errors.DecisionNeeded(
                        f"{namespace}: silver was made from another bronze table than {self.bronze.label}, which was "
                        "removed and made anew, or another pipeline captures the same collection. Bring the old one back, or "
                        "make silver from what this one holds: medallion rebuild --collection …"
                    ),
                )

    # --- what there is to do

    def _is_due(self, work: silver_collection.Work) -> bool:
        if self.failures.waits(str(work.namespace)):
            return False
        is_far = work.to - self.known[work.namespace].to >= IDLE_BATCHES
        return bool(work.counts.events or work.sweeps or is_far)

    def _works(self, to: int) -> list[silver_collection.Work]:
        """One `Work` a collection; one query over bronze, however many collections there are."""
        discovered = self.discovered or 0
        going = (namespace for namespace in self.known if not self.failures.waits(str(namespace)))
        start = min([discovered, *map(self._start, going)])
        if start >= to:
            return []
        span = reduce.Range(start, to)
        counts, sweeps = self._surveyed(span)
        new = [namespace for namespace in counts if namespace not in self.known and not self._is_left_out(namespace)]
        if new and start > 0:
            # A drop may have come before the rows of the snapshot that it overtook.
            sweeps = (*silver_collection.sweeps(self.spark, self.bronze, reduce.Range(0, start), among=new), *sweeps)
        self._note(new, to)
        works = [
            silver_collection.Work(
                namespace,
                replace(position, to=self._start(namespace), log=self.log),
                to,
                counts.get(namespace, silver_collection.Counts()),
                _due_sweeps(sweeps, namespace, position),
            )
            for namespace, position in self.known.items()
        ]
        # Bronze only grows: a collection without events in the span need not be looked at there again. One that failed may have
        # events before the span, which waits for the others only.
        looked_at = (work for work in works if self._start(work.namespace) >= start)
        self.scanned |= {work.namespace: to for work in looked_at if not work.counts.events and not work.sweeps}
        return works

    def _start(self, namespace: registry.Namespace) -> int:
        """From where on a collection may have events that its table has not."""
        return max(self.known[namespace].to, self.scanned.get(namespace, 0))

    def _read_known(self) -> None:
        """What a start has to know, read side by side: Spark plans each of these for longer than it reads."""
        with ThreadPoolExecutor(parallel.THREADS) as pool:
            kept = pool.submit(schemas.newest, self.spark, self.layout.ops("schemas"))
            found = registry.read(self.spark, self.settings, log=self.log)
            self._refuse(found)
            positions = zip(found.namespaces, pool.map(self._readable_position, found.namespaces))
            self.known = {namespace: position for namespace, position in positions if position is not None}
        is_other = any(position.is_of_other(self.log) for position in self.known.values())
        self.settled = 0 if is_other else registry.Settled.among(self.known)
        self.scanned = dict.fromkeys(self.known, self.settled)
        self.noted = found.discovered
        self.discovered = max(found.discovered, self.settled)
        generations = {str(namespace): position.generation for namespace, position in self.known.items()}
        self.schemas = schemas.of_generations(kept.result(), generations)

    def _note(self, new: Sequence[registry.Namespace], to: int) -> None:
        """Note new collections before any of them is touched: a crash after the first one's commit loses none of the others."""
        if new or to - self.noted >= IDLE_BATCHES:
            registry.note(self.spark, self.settings, new=new, discovered=to, log=self.log)
            self.noted = to
        found = registry.parted(self.settings, (*self.known, *new))
        self._refuse(found)
        positions = {namespace: self._readable_position(namespace) for namespace in new if namespace in found.namespaces}
        self.known |= {namespace: position for namespace, position in positions.items() if position is not None}
        self._check_log()
        self.discovered = to

    def _refuse(self, found: registry.Known) -> None:
        for namespace, error in found.refused.items():
            self.failures.note(str(namespace), error)

    def _is_left_out(self, namespace: registry.Namespace) -> bool:
        return namespace.is_temporary or str(namespace) in self.failures.found

    def _position(self, namespace: registry.Namespace) -> registry.SilverPosition:
        return registry.silver_position(self.spark, self._table(namespace))

    def _readable_position(self, namespace: registry.Namespace) -> registry.SilverPosition | None:
        """Where a collection's table stands; None, and noted, where it cannot be read: the others go on."""
        try:
            return self._position(namespace)
        except Exception as error:
            self.failures.note(str(namespace), error)
            return None

    def _surveyed(
        self, span: reduce.Range
    ) -> tuple[dict[registry.Namespace, silver_collection.Counts], tuple[reduce.Sweep, ...]]:
        """What each collection has in the span, each from its own position on, and the sweeps of all."""
        starts = {namespace: self._start(namespace) for namespace in self.known}
        ahead = {namespace: start for namespace, start in starts.items() if start > span.after}
        return silver_collection.surveyed(self.spark, self.bronze, span, behind=ahead)

    def _table(self, namespace: registry.Namespace) -> tables.TableRef:
        return self.layout.silver(namespace.db, namespace.collection)

    # --- doing it

    def _applied(self, spark: SparkSession, work: silver_collection.Work) -> CollectionResult:
        started = time.monotonic()
        few = work.counts.events <= silver_collection.SMALL and query_execution.are_small(self._table(work.namespace))
        with query_execution.session_confs(spark, query_execution.INTERPRETED if few else {}):
            collection = self._collection(spark, work)
            self.known[work.namespace] = reached = collection.applied(work, stop=self.stop)
            maintenance.compact(collection.writer)
        if collection.options.on_conflict is OnConflict.RETYPE:
            after = work.position.to if work.namespace in self.retyped else 0
            reached = rebuild.retyped(collection, self.settings, reached, after=after, stop=self.stop)
            self.known[work.namespace] = reached
            self.retyped.add(work.namespace)
        return CollectionResult(
            str(work.namespace),
            work.position.to,
            reached.to,
            work.counts.events,
            collection.writer.version,
            time.monotonic() - started,
        )

    def _collection(self, spark: SparkSession, work: silver_collection.Work) -> silver_collection.Collection:
        """The collection's table, made where there is none, and claimed; from now on in the session `spark`."""
        collection = self.collections.get(work.namespace)
        if collection is None:
            collection = self.collections[work.namespace] = silver_collection.Collection(
                spark=spark,
                namespace=work.namespace,
                options=self.settings.silver.for_collection(str(work.namespace)),
                keeps_document=silver_collection.keeps_document(self.settings, work.namespace),
                layout=self.layout,
                bronze=self.bronze,
                writer=self._claimed(spark, work.namespace),
                schema=self.schemas.get(str(work.namespace), schemas.Kept()),
                is_new=work.position.to == 0,
            )
        collection.spark = collection.writer.spark = spark
        return collection

    def _claimed(self, spark: SparkSession, namespace: registry.Namespace) -> Writer:
        table = self._table(namespace)
        silver_collection.create(spark, table)
        writer = Writer.claim(spark, table, take_over=self.take_over)
        if writer.metadata.get("to") not in (None, self.known[namespace].to):
            writer.release()
            raise errors.CommitConflict(f"{table.label}: another run moved this table meanwhile; start again")
        return writer


def _due_sweeps(
    sweeps: Iterable[reduce.Sweep], namespace: registry.Namespace, position: registry.SilverPosition
) -> tuple[reduce.Sweep, ...]:
    return tuple(
        sweep
        for sweep in sweeps
        if sweep.db_collection == str(namespace) and sweep.batch > position.to and sweep.first > position.swept
    )
