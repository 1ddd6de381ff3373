"""Gold: publishes the current documents of each collection, for analysts and any Delta reader.

For each collection, from the bronze batch of its gold table to that of silver, at silver's version v:

    changed     rows of silver@v that a later batch wrote, and keys with deletes that a later batch remembered
    shaped      the documents' columns, `__rescued` once any value was rescued, and `__key`, last
    published   the keys' rows are marked as deleted and the new ones written, or, where that is not possible, one MERGE; the commit carries
                the batch and v, the table's new position
    rewritten   instead, if silver was rebuilt or its position went back (`current.GoldWork.is_rewrite`): the whole table
    compacted   now and then: small files, and files in which many rows are deleted

`pipelines.gold.current` publishes one table. `pipelines.gold.history` writes the tables of versions, which are made from bronze's events: a
rebuild of silver does not concern them. This module decides which tables are due, claims them, and isolates the failures of single tables.

Exactly once: the rows are a function of silver@v and of the table's own position, which moves in the same commit.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from pipelines.bronze import collection_events, registry
from pipelines.bronze import log as bronze_log
from pipelines.delta import local_log, maintenance, table_history
from pipelines.delta import tables as delta
from pipelines.gold import current, history, history_position, in_process, in_process_history
from pipelines.gold.candidate import Audit, no_audit
from pipelines.gold.table_claims import TableClaims
from pipelines.new_commits import NewCommits
from pipelines.spark import parallel
from pipelines.work_progress import WorkCounter, WorkProgress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GoldTableResult:
    """The result of one run for one gold table: bronze batches (`after`, `to`] are in its `version`."""

    namespace: str
    after: int
    to: int
    changed: int
    rewritten: bool
    version: int
    seconds: float


@dataclass(frozen=True)
class GoldResult:
    """The result of one run; `changed` counts keys, over all collections."""

    changed: int
    seconds: float
    collections: tuple[GoldTableResult, ...] = ()


@dataclass(frozen=True)
class _HistoryWork:
    """A history that is behind its silver table, or may be."""

    namespace: registry.Namespace
    silver: registry.SilverPosition
    at: history_position.HistoryPosition


Due = TypeVar("Due", current.GoldWork, _HistoryWork)


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = True,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
    pause_seconds: float = 1.0,
    audit: Audit = no_audit,
    silver_news: NewCommits | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> GoldResult:
    """Bring every gold table to the position of its silver table; without `once`, continue until `stop` is set.

    `audit` checks each version before it is published. A refused table stays at its last good version, and the others continue: with `once`
    the refusal is raised at the end, together with failures; otherwise it is logged, and the next version is checked again.

    If silver has nothing new, it waits for `silver_news`, which names the tables to check, at most `pause_seconds`. Checks of all tables
    are spaced so that they take little of the time. An up-to-date table gets no commit. A killed run leaves each table at its own position,
    and the next run continues from there. A collection that fails is logged and the others continue. Its error is raised at the end, or
    when all have failed (`errors.together` for several): `TableOwned`, `LeaseHeld`, `OwnershipLost` and `CommitConflict` among them. A
    refused run has committed nothing. `progress` hears how far a round is, first with the documents, then with the histories.
    """
    stop_event = stop or threading.Event()
    turn = math.inf if once else parallel.TURN_SECONDS

    def look_again(work: current.GoldWork | _HistoryWork) -> None:
        """A table that a round did not wait for may be behind silver again."""
        if silver_news is not None:
            silver_news.tell([str(work.namespace)])

    pool, counter = parallel.Pool(spark, sessions, ended=look_again), WorkCounter("gold", progress)
    gold = _GoldRun(spark, settings, take_over, pool, stop_event, audit, turn, counter=counter)
    started = time.monotonic()
    results: list[GoldTableResult] = []
    only, next_look, changed_keys = None, 0.0, 0
    try:
        while True:
            new_results = gold.published(only)
            changed_keys += sum(each.changed for each in new_results)
            if once:  # a service would collect results for ever
                results += new_results
            if once or stop_event.is_set():
                break
            if silver_news is None:
                if not new_results:
                    NewCommits().wait(pause_seconds, stop=stop_event)
                continue
            if only is None:
                next_look = time.monotonic() + max(pause_seconds, LOOK_SHARE * gold.look_seconds)
            only = silver_news.wait(next_look - time.monotonic(), stop=stop_event) or None
        changed_keys += sum(each.changed for each in pool.rest() if each is not None)
        _raise(gold.failures, gold.refused if once else {})
    finally:
        gold.close()
        counter.begin(0)
    return GoldResult(changed_keys, time.monotonic() - started, tuple(results))


LOOK_SHARE = 20
"""How many times as long as checking all tables takes, of which there may be thousands, passes before they are all checked again, if silver
names those that it has changed."""


@dataclass(frozen=True)
class _Refusal:
    """The error for which a table made from silver at this position was refused."""

    silver: registry.SilverPosition
    error: errors.GateFailed | errors.SettingsError


def _raise(failures: parallel.Failures, refused: Mapping[registry.Namespace, _Refusal]) -> None:
    """Raise failures and refusals as one error: a temporary one must not hide one that needs a decision."""
    if refused and not failures.by_name:
        raise _refusals_error(refused.values())
    refusals = {str(namespace): each.error for namespace, each in refused.items()}
    parallel.Failures({**failures.by_name, **refusals}).raised()


def _refusals_error(refused: Iterable[_Refusal]) -> errors.MedallionError:
    """One error for all refusals."""
    refusal_errors = [each.error for each in refused]
    gates = [each for each in refusal_errors if isinstance(each, errors.GateFailed)]
    return errors.GateFailed("\n".join(map(str, refusal_errors))) if gates else refusal_errors[0]


_MAX_LOST = 1000
"""How many commits of bronze are cached in `_GoldRun.lost`."""


@dataclass
class _GoldRun:
    """One run over the gold tables of a pipeline, with its claims on them."""

    spark: SparkSession
    settings: Settings
    take_over: bool
    pool: parallel.Pool
    stop: threading.Event
    audit: Audit = no_audit
    turn_seconds: float = math.inf  # how long ranges of one history are begun
    known: registry.KnownCollections = field(default_factory=registry.KnownCollections)
    """The collections as they were read last."""
    refused: dict[registry.Namespace, _Refusal] = field(default_factory=dict)
    empty: dict[registry.Namespace, registry.SilverPosition] = field(default_factory=dict)
    """Collections without a document and without a gold table, and silver's position at which that was found."""
    waiting: set[registry.Namespace] = field(default_factory=set)  # for a restored silver, as the log says
    switched: set[registry.Namespace] = field(default_factory=set)
    failures: parallel.Failures = field(default_factory=parallel.Failures)
    sources: dict[registry.Namespace, in_process.SourceFiles | None] = field(default_factory=dict)
    histories: dict[registry.Namespace, history.History] = field(default_factory=dict)
    lost: dict[registry.BronzeCommit | None, bool] = field(default_factory=dict)
    """For commits of bronze that tables name: whether its log lacks them, because an older copy was restored."""
    published_tables: set[tables.TableRef] = field(default_factory=set)
    """The tables that this run has published: they are made from the present bronze."""
    forgotten: dict[tables.TableRef, int] = field(default_factory=dict)
    """`current.forgotten_to` of the tables of deletes, read once: copies are restored while nothing runs."""
    look_seconds: float = 0.0
    """How long the last check of the tables took, without publishing."""
    counter: WorkCounter = field(default_factory=lambda: WorkCounter("gold"))

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)
        self.claims = TableClaims(self.take_over, self.settings.gold.deletion_vectors)

    def close(self) -> None:
        """Release the claimed tables, when none is at work any more."""
        self.pool.close()
        self.claims.close()

    def published(self, only: Collection[str] | None = None) -> list[GoldTableResult]:
        """Bring the tables of all collections, or of those in `only`, to the present position of silver.

        Except tables at which an earlier round of a service is still at work.
        """
        began = time.monotonic()
        at_work = {_name(work) for work in self.pool.at_work}
        self.failures.begin_round()
        collections = self._collections(only)
        namespaces = (each for each in collections.namespaces if only is None or str(each) in only)
        active = [each for each in namespaces if not (str(each) in at_work or self.failures.is_set_aside(str(each)))]
        is_near = local_log.folder(self.bronze) is not None
        due = [work for work in parallel.looks(self._due_work, active, is_near=is_near) if work is not None]
        self.look_seconds = time.monotonic() - began
        results = self._each(due, self._applied)
        healthy = [each for each in active if str(each) not in self.failures.by_name]
        results += self._each(self._histories(healthy, collections.namespaces, at_work), self._versioned)
        names = [*map(str, collections.namespaces)]
        if self.pool.at_work:
            return results
        # With none to try now: all may have failed for good one after the other, each when silver named it.
        if names and only is None and (active or all(map(self.failures.needs_person, names))):
            self.failures.end_where_all_failed(names)
        self._apply_deletion_vectors(healthy)
        return results

    def _each(self, due: Sequence[Due], act: Callable[[SparkSession, Due], GoldTableResult | None]) -> list[GoldTableResult]:
        """The results of `act` for the tables that are due, and for those that were at work; of a service without those that take longer.

        A collection that fails releases its table, and the others continue.
        """

        def done(spark: SparkSession, work: Due) -> GoldTableResult | None:
            try:
                return act(spark, work)
            except Exception:
                self._release_table(spark, work)
                raise

        has_others = self.turn_seconds < math.inf and len(self.known.namespaces) > 1
        self.counter.begin(len(due))
        results = self.pool.each(
            due,
            self.counter.counting(self.failures.guarding(done, name=_name)),
            stop=self.stop,
            patience_seconds=parallel.PATIENCE_SECONDS if has_others else math.inf,
        )
        return [result for result in results if result is not None]

    def _collections(self, only: Collection[str] | None) -> registry.KnownCollections:
        """The pipeline's collections; as read last, if all of `only` are among them."""
        is_known = only is not None and set(only) <= set(map(str, self.known.namespaces))
        if not is_known:
            self.known = registry.read(self.spark, self.settings)
            for namespace, error in self.known.refused.items():
                self.failures.note(str(namespace), error)
        return self.known

    def _apply_deletion_vectors(self, known: Sequence[registry.Namespace]) -> None:
        """Apply the setting for deletion vectors to tables without changes; the others got it when they were claimed."""
        setting = self.settings.gold.deletion_vectors
        for namespace in known:
            if setting is None or namespace in self.switched or self.stop.is_set():
                continue
            try:
                for table in (self.layout.gold(*namespace), self.layout.history(*namespace)):
                    if table in self.claims or not delta.exists(self.spark, table):
                        continue
                    if not maintenance.are_vectors_switched(self.spark, table, setting):
                        self.claims.writer(self.spark, table)  # which applies it
            except Exception as error:
                self.failures.note(str(namespace), error)
            self.switched.add(namespace)

    def _due_work(self, namespace: registry.Namespace) -> current.GoldWork | None:
        try:
            work = self._work(namespace)
        except Exception as error:
            self.failures.note(str(namespace), error)
            return None
        if work is None:
            self.failures.forget(str(namespace))
        return work

    def _release_table(self, spark: SparkSession, work: current.GoldWork | _HistoryWork) -> None:
        is_history = isinstance(work, _HistoryWork)
        table_of, cache = (self.layout.history, self.histories) if is_history else (self.layout.gold, self.sources)
        self.claims.release(spark, table_of(*work.namespace))
        cache.pop(work.namespace, None)

    def _release_idle(self, spark: SparkSession, work: current.GoldWork | _HistoryWork, after: int, changed: int) -> None:
        """Release the table of a collection without changes: a service would otherwise hold every collection that ever existed."""
        if not changed and work.silver.to - after >= registry.IDLE_BATCHES:
            self._release_table(spark, work)

    def _histories(
        self, going: Sequence[registry.Namespace], known: Sequence[registry.Namespace], at_work: Collection[str]
    ) -> list[_HistoryWork]:
        """The histories that are due and not `at_work`, of the collections `going`, whose documents did not fail."""
        due = []
        owners: dict[str, registry.Namespace] = {}
        for namespace in going:
            name = _history_of(namespace)
            if not self.settings.silver.for_collection(str(namespace)).history:
                continue
            if name in at_work or self.failures.is_set_aside(name):
                continue
            # Only if a history is kept: there may be thousands of collections.
            owners = owners or {self.layout.gold(*each).key: each for each in known}
            try:
                work = self._history(namespace, owners)
                if self._waits_for_silver(self.layout.history(*namespace), namespace, work.silver):
                    continue
            except Exception as error:
                self.failures.note(name, error)
                continue
            if history_position.is_due(work.at, work.silver):
                due.append(work)
            else:
                self.failures.forget(name)
        return due

    def _history(self, namespace: registry.Namespace, owners: Mapping[str, registry.Namespace]) -> _HistoryWork:
        table = self.layout.history(*namespace)
        position = history_position.position(self.spark, table)
        # A history that has begun continues: then the collection is refused.
        if not position.to and table.key in owners:
            raise errors.DecisionNeeded(
                f"{table.label}: the history of {namespace} would be in the same place as the table of the collection "
                f"{owners[table.key]}; remove one of them from the pipeline, or switch history off"
            )
        silver = registry.silver_position(self.spark, self.layout.silver(*namespace))
        if self._is_outdated(table, position.bronze, silver):
            position = replace(position, to=0)  # versions that exist are written over themselves
        return _HistoryWork(namespace, silver, position)

    def _versioned(self, spark: SparkSession, work: _HistoryWork) -> GoldTableResult:
        started = time.monotonic()
        table = self.layout.history(*work.namespace)
        if table not in self.claims:
            history.check(spark, self.settings, work.namespace, work.at)
        history.create(spark, table, properties=current.PROPERTIES | self.claims.table_properties())
        writer = self.claims.writer(spark, table)
        document_history = self.histories.get(work.namespace)
        if document_history is None or document_history.writer is not writer:
            local = in_process_history.InProcess(collection_events.LOCAL_EVENTS)
            document_history = history.History(spark, self.settings, self.layout, work.namespace, writer, local)
            self.histories[work.namespace] = document_history
        document_history.spark = spark  # the session of its writer
        events = document_history.brought_up(work.at, work.silver, stop=self.stop, seconds=self.turn_seconds)
        self.published_tables.add(table)
        maintenance.compact(writer)
        to = writer.metadata.get("to") or work.at.to  # less than silver's if it was interrupted between two ranges
        if to == work.silver.to:
            self._release_idle(spark, work, work.at.to, events)
        name = _history_of(work.namespace)
        return GoldTableResult(name, work.at.to, to, events, False, writer.version, time.monotonic() - started)

    def _work(self, namespace: registry.Namespace) -> current.GoldWork | None:
        silver = registry.silver_position(self.spark, self.layout.silver(*namespace))
        # If silver was removed or repaired, readers keep the old rows until it has applied events again.
        if silver.version < 0 or not silver.to or self._waits_for_silver(self.layout.gold(*namespace), namespace, silver):
            return None
        refusal = self.refused.get(namespace)
        # The same rows would be refused again.
        if refusal is not None and refusal.silver == silver:
            return None
        work = current.GoldWork(namespace, silver, self._position(namespace, silver))
        if why := current.why_it_waits(silver, work.gold.to):
            if namespace not in self.waiting:
                log.warning("%s: %s", namespace, why)
            self.waiting.add(namespace)
            return None
        self.waiting.discard(namespace)
        if work.gold.to is None and self.empty.get(namespace) == silver:
            return None
        return work if work.is_rewrite or work.gold.to != silver.to else None

    def _position(self, namespace: registry.Namespace, silver: registry.SilverPosition) -> current.GoldPosition:
        table = self.layout.gold(*namespace)
        standing = table_history.standing(self.spark, table)
        history_position.check_free(table, standing.metadata, namespace)
        # A restored table, or one before forgotten deletes, is rewritten: silver may not know all that has changed since.
        deletes = self.layout.deletes(*namespace)
        if deletes not in self.forgotten:
            self.forgotten[deletes] = current.forgotten_to(self.spark, deletes)
        is_older = standing.is_restored or (standing.metadata.get("to") or 0) < self.forgotten[deletes] <= silver.to
        metadata = {} if is_older else standing.metadata
        if self._is_outdated(table, registry.bronze_commit(metadata), silver):
            metadata = {}
        # If rows of deleted documents stay or stayed: before the setting was changed, silver may have remembered a delete and been killed.
        keeps_row = self.settings.silver.for_collection(str(namespace)).unwrap.delete_tombstone_handling_mode.keeps_row
        high = None if keeps_row or silver.kept > (metadata.get("to") or 0) else metadata.get("high")
        return current.GoldPosition(metadata.get("to"), metadata.get("generation") or "", high, metadata.get("origin") or "")

    def _is_outdated(
        self, table: tables.TableRef, bronze: registry.BronzeCommit | None, silver: registry.SilverPosition
    ) -> bool:
        """Whether a table was made from batches of a bronze that was replaced by an older copy, whose numbers are in use again."""
        return table not in self.published_tables and bronze != silver.bronze and self._is_lost(bronze)

    def _is_lost(self, commit: registry.BronzeCommit | None) -> bool:
        """Whether bronze's log lacks a commit that was its newest once; cached, because each look-up in a store is a request."""
        if (is_lost := self.lost.get(commit)) is None:
            if len(self.lost) >= _MAX_LOST:
                self.lost.clear()
            is_lost = self.lost[commit] = bronze_log.is_held(self.spark, self.bronze, commit) is False
        return is_lost

    def _waits_for_silver(
        self, table: tables.TableRef, namespace: registry.Namespace, silver: registry.SilverPosition
    ) -> bool:
        """Whether silver must move back first, or waits for a decision: it has applied batches that bronze lacks, or deletes that are no
        longer remembered.

        Not checked again once a table was published: copies are restored while nothing runs.
        """
        is_new = table not in self.published_tables
        return is_new and (
            self._is_lost(silver.bronze) or registry.lacks_deletes(self.spark, self.layout.deletes(*namespace), silver)
        )

    def _applied(self, spark: SparkSession, work: current.GoldWork) -> GoldTableResult | None:
        try:
            with ExitStack() as stack:
                result = self._published(spark, work, stack)
        except (errors.GateFailed, errors.SettingsError) as error:
            log.warning("%s", str(error).partition("\n")[0])
            self.refused[work.namespace] = _Refusal(work.silver, error)
            return None
        self._release_idle(spark, work, work.gold.to or 0, 0 if result is None else result.changed)
        return result

    def _published(self, spark: SparkSession, work: current.GoldWork, stack: ExitStack) -> GoldTableResult | None:
        started = time.monotonic()
        gold, silver, deletes = (ref(*work.namespace) for ref in (self.layout.gold, self.layout.silver, self.layout.deletes))
        table = current.GoldTable(spark, work, silver, deletes, audit=self.audit)
        sources = self._sources(table)
        if sources is None:
            table = current.interpreted(table, gold, stack)
        first_load = None
        # Not asked again for a table whose position was read: the claim finds out if it was removed since.
        if gold not in self.claims and work.gold.to is None and not delta.exists(spark, gold):
            first_load = None if sources is None else in_process.first_load(table, sources)
            if table.is_empty if first_load is None else first_load.count == 0:
                self.empty[work.namespace] = work.silver
                return None
            table.judge(gold)
            schema = table.wanted(False) if first_load is None else first_load.columns
            columns = ", ".join(f"{identifier(each.name)} {table_columns.ddl(each.dataType)}" for each in schema)
            properties = current.PROPERTIES | self.claims.table_properties()
            properties |= {current.STATISTICS: current.statistics_columns(schema)}
            delta.create(spark, gold, columns=columns, properties=properties)
        writer = self.claims.writer(spark, gold)
        changed_keys = None
        if first_load is not None and sources is not None:
            changed_keys = in_process.loaded(first_load, table, sources, writer)
        elif sources is not None and not work.is_rewrite:
            changed_keys = in_process.merged(table, sources, writer)
        if changed_keys is None:
            table = current.interpreted(table, gold, stack)
            changed_keys = table.rewritten(writer) if work.is_rewrite else table.merged(writer)
        self.published_tables.add(gold)
        maintenance.compact(writer)
        seconds = time.monotonic() - started
        return GoldTableResult(
            str(work.namespace), work.gold.to or 0, work.silver.to, changed_keys, work.is_rewrite, writer.version, seconds
        )

    def _sources(self, table: current.GoldTable) -> in_process.SourceFiles | None:
        """The tables from which this process can publish changes itself; None if it cannot read them."""
        namespace = table.work.namespace
        if namespace not in self.sources:
            self.sources[namespace] = in_process.SourceFiles.of(self.spark, table.silver, table.deletes)
        return self.sources[namespace]


def _name(work: current.GoldWork | _HistoryWork) -> str:
    """The name under which failures are noted: a history that fails does not stop its collection's documents."""
    return str(work.namespace) if isinstance(work, current.GoldWork) else _history_of(work.namespace)


def _history_of(namespace: registry.Namespace) -> str:
    return f"{namespace} (history)"
