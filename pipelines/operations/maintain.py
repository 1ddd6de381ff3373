"""Maintains tables: compacts them, and removes old data, without losing a position.

The steps for each table, bronze first:

    checkpoint  written; then the log before it is cleaned up
    trim        rows past their retention are removed, but none that silver, gold or a history still has to read
    compaction  OPTIMIZE with the table's clustering; rewrites files without the rows that deletion vectors hide
    vacuum      removes files that no version within the table's retention names

A table with a live writer only gets what commits nothing: the checkpoint and VACUUM. With `beside_writers` it is compacted too, in a
commit without metadata, so that the writer's position remains the last one. Removing events from bronze needs its claim; if the
capture runs in this process, they are removed between its commits.

Exactly once: no step moves a position, and only data that every layer has applied is removed. If a run is killed, run it again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.sql import names
from cdc_core.stream import resume_token
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import TableRef
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.bronze import quarantine_table, registry, survey
from pipelines.delta import maintenance, ops_tables, owners, table_errors, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import history_position, models
from pipelines.silver import rebuild as silver_rebuild
from pipelines.spark import parallel
from pipelines.work_progress import WorkCounter, WorkProgress

DAY_MS = 86_400_000
"""The unit of retentions, and the age from which a position may expire: no shorter retention of a log makes sense."""

_ClaimedWriter = Callable[[], contextlib.AbstractContextManager[Writer]]
"""Gives the table's writer for one operation, exclusively."""

OPS = {
    "notifications": "timestamp",
    "verifications": "at_ms",
    "expectations": "at_ms",
    "signals": "ts_ms",
    "cuts": "made_ms",
    "cut_requests": "at_ms",
}
"""The tables of ops whose rows expire, each with the column of their age in milliseconds since 1970."""

KEPT_OPS = ("collections", "schemas")
"""The tables of ops whose rows never expire: every run depends on them."""

IDLE_ROWS = "(kind IN ('transaction', 'notification') OR (kind = 'heartbeat' AND payload = '{}'))"
"""Rows of bronze that are not needed once they are old. Heartbeats that record snapshots, gaps or filters stay, except for those of a
snapshot's chunk that a later chunk's heartbeat replaces (`superseded_heartbeats`)."""

HELD = "not compacted: its writer is running (--beside-writers compacts it anyway)"


class TableKind(StrEnum):
    """What a table contains."""

    BRONZE = "bronze"
    SILVER = "silver"
    GOLD = "gold"
    HISTORY = "history"
    DELETES = "deletes"
    MODEL = "model"
    QUARANTINE = "quarantine"
    OPS = "ops"

    @property
    def is_claimed(self) -> bool:
        """Whether it has one writer at a time."""
        return self in (TableKind.BRONZE, TableKind.SILVER, TableKind.GOLD, TableKind.HISTORY, TableKind.MODEL)


@dataclass(frozen=True)
class TableResult:
    """What was done to one table, and what was not done (`left`) and why."""

    table: str
    kind: TableKind
    before: delta.TableSize
    after: delta.TableSize
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaintenanceResult:
    """The result of one run; `left` are the tables that were not started when the run was stopped."""

    name: str
    tables: tuple[TableResult, ...]
    seconds: float
    left: tuple[str, ...] = ()


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    collection: str | None = None,
    beside_writers: bool = False,
    take_over: bool = False,
    capture: bronze_log.BronzeLog | None = None,
    stop: threading.Event | None = None,
    failures: parallel.Failures,
    progress: Callable[[WorkProgress], None] | None = None,
) -> MaintenanceResult:
    """Maintain the tables of a pipeline, or of one collection; `capture` is the bronze writer if the capture runs in this process.

    Errors of single tables (damaged, or not ours) go to `failures`; the other tables are maintained. Raises `SettingsError` for a
    collection that silver does not know.
    """
    began = time.monotonic()
    stop_event = stop or threading.Event()
    run_ = _MaintenanceRun(spark, settings, beside_writers, clock.now_ms(), capture, take_over)

    def one(_: SparkSession, table: _Table) -> TableResult:
        return run_.maintained(table)

    counter = WorkCounter("maintain", progress)
    maintain_table = counter.counting(failures.guarding(one, name=lambda table: table.ref.label))
    results: list[TableResult | None] = []
    remaining = run_.tables(collection)
    if collection is None:
        try:
            remaining += run_.models()
        except errors.SettingsError as error:  # the names of models come from their folder
            failures.note("models", error)
    counter.begin(len(remaining))
    while remaining and not stop_event.is_set():
        results.append(maintain_table(spark, remaining.pop(0)))
    done, labels = tuple(each for each in results if each is not None), tuple(each.ref.label for each in remaining)
    return MaintenanceResult(settings.name, done, time.monotonic() - began, labels)


def refuse(result: MaintenanceResult) -> None:
    """Raise `Temporary` if tables were not started."""
    if result.left:
        raise errors.Temporary(f"stopped with {len(result.left)} tables left; start it again")


@dataclass(frozen=True)
class _Table:
    """One table, its collection, and the column of its rows' age."""

    ref: tables.TableRef
    kind: TableKind
    namespace: registry.Namespace | None = None
    age: str | None = None


@dataclass
class _ResultLines:
    """The lines of one table's result; see `TableResult`."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class _MaintenanceRun:
    spark: SparkSession
    settings: Settings
    beside_writers: bool
    now_ms: int
    capture: bronze_log.BronzeLog | None = None
    take_over: bool = False

    def __post_init__(self) -> None:
        claim = functools.partial(Writer.claim, self.spark, take_over=self.take_over, since_ms=self.now_ms)
        self._claim = functools.partial(claim, errand="medallion maintain")
        self._is_held = functools.partial(owners.is_held, self.spark, take_over=self.take_over, since_ms=self.now_ms)
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)

    @functools.cached_property
    def _log(self) -> str | None:
        """The identity of the bronze log, which its batch numbers belong to; None if bronze does not exist or has no identity."""
        return bronze_log.newest(self.spark, self.bronze).log if delta.exists(self.spark, self.bronze) else None

    # --- which tables

    def tables(self, collection: str | None) -> list[_Table]:
        """The existing tables of a collection, or of the pipeline without its models."""
        namespaces = registry.chosen(self.spark, self.settings, collection)
        candidates = [each for namespace in namespaces for each in self._of_collection(namespace)]
        if collection is None:
            ops = [_Table(self.layout.ops(name), TableKind.OPS, age=age) for name, age in OPS.items()]
            ops += [_Table(self.layout.ops(name), TableKind.OPS) for name in KEPT_OPS]
            candidates = [_Table(self.bronze, TableKind.BRONZE), *candidates, *ops]
        return [each for each in candidates if delta.exists(self.spark, each.ref)]

    def models(self) -> list[_Table]:
        """The existing tables of the models; views are not tables."""
        candidates = [_Table(self.layout.model(name), TableKind.MODEL) for name in models.files(self.settings).names]
        return [each for each in candidates if delta.exists(self.spark, each.ref)]

    def _of_collection(self, namespace: registry.Namespace) -> Iterator[_Table]:
        yield _Table(self.layout.silver(*namespace), TableKind.SILVER, namespace)
        yield _Table(self.layout.gold(*namespace), TableKind.GOLD, namespace)
        if self.settings.silver.for_collection(str(namespace)).history:
            yield _Table(self.layout.history(*namespace), TableKind.HISTORY, namespace)
        yield _Table(self.layout.deletes(*namespace), TableKind.DELETES, namespace)
        yield _Table(self.layout.quarantine(*namespace), TableKind.QUARANTINE, namespace)

    # --- one table

    def maintained(self, table: _Table) -> TableResult:
        """Maintain one table."""
        delta.check_ours(self.spark, table.ref)
        # Only our tables: VACUUM could remove files that readers of another program's table still need.
        before, words = delta.size(self.spark, table.ref, stored=True), _ResultLines()
        # First, while the last commit names a position: a compaction's commit does not, and the log must not be cleaned up before that.
        if maintenance.checkpoint(self.spark, table.ref):
            words.done.append("checkpoint written")
        self._remove_and_compact(table, words)
        after = before
        # Of thousands of tables most are unchanged, and each statement takes a second.
        if not maintenance.is_clean(table.ref):
            maintenance.vacuum(self.spark, table.ref)
            after = delta.size(self.spark, table.ref, stored=True)
        words.done[:0] = [*_size_changes(before, after)]
        return TableResult(table.ref.label, table.kind, before, after, tuple(words.done), tuple(words.left))

    def _remove_and_compact(self, table: _Table, words: _ResultLines) -> None:
        """Remove the rows that are past their retention, and compact the table, which then does not rewrite them."""
        try:
            if table.kind is TableKind.BRONZE:
                self._trim(table.ref, words)
            elif table.kind is TableKind.SILVER and table.namespace is not None:
                if silver_rebuild.remove_left(self.spark, self.layout, table.namespace, claim=self._claim):
                    words.done.append("what a killed rebuild left removed")
            elif table.kind is TableKind.DELETES:
                self._expire_deletes(table, words)
            elif table.kind is TableKind.QUARANTINE:
                self._expire_quarantine(table, words)
            elif table.age is not None:
                self._expire(table, words)
        except errors.CommitConflict:
            words.left.append("nothing removed: another process committed first")
        # A compaction needs no claim, because its commit names no position; a claim would stop a writer that starts just then.
        if table.kind.is_claimed and not self.beside_writers and self._is_held(table.ref):
            words.left.append(HELD)
        else:
            self._compacted(table, words)

    def _compacted(self, table: _Table, words: _ResultLines) -> None:
        """Compact a table with several files or with deletion vectors."""
        purges = definition.is_on(delta.properties(self.spark, table.ref), definition.DELETION_VECTORS)
        if maintenance.is_clean(table.ref) or not (purges or delta.size(self.spark, table.ref).files > 1):
            return
        try:
            if table.kind.is_claimed:
                self._keep_position(table.ref)
            if not maintenance.optimize(self.spark, table.ref, purges=purges, keeps_small=table.kind is TableKind.BRONZE):
                words.left.append("deleted rows stay in its files: REORG of this Delta version fails on a cluster")
        except errors.CommitConflict:
            words.left.append("not compacted: its writer committed first")

    def _keep_position(self, table: TableRef) -> None:
        """Repeat an old position in new commits: Delta may remove expired commits when it writes a checkpoint with the compaction's commit."""
        standing = table_history.standing(self.spark, table)
        # By the clock, and not by the run's start: Delta removes whole days, and a run over thousands of tables may last past midnight.
        if standing.is_restored or standing.position is None or clock.now_ms() - standing.position.timestamp_ms < DAY_MS:
            return
        with contextlib.suppress(errors.TableOwned, errors.LeaseHeld, errors.OwnershipLost):  # its writer commits itself
            self._claim(table).release()

    # --- what is too old

    def _before(self, days: int) -> int:
        return self.now_ms - days * DAY_MS

    def _expire(self, table: _Table, words: _ResultLines) -> None:
        """Remove the pipeline's old rows of a table of ops; signals only once the capture has handled them."""
        days, columns = self.settings.maintenance.ops_retention_days, self.spark.table(str(table.ref)).columns
        if table.age not in columns:
            return
        where = f"`{table.age}` < {self._before(days)}"
        if "name" in columns:  # another pipeline in the lakehouse has a retention of its own
            own_name = names.literal(self.settings.name)
            where += f" AND coalesce(name, {own_name}) = {own_name}"
        if table.ref == self.layout.ops("signals"):
            # A signal that no capture has read yet is still to be handled, however old.
            handled = bronze_log.handled_signals(self.spark, self.bronze) if delta.exists(self.spark, self.bronze) else set()
            where += f" AND row IN ({', '.join(map(names.literal, sorted(handled))) or 'NULL'})"
        _note_removed(words, ops_tables.delete(self.spark, table.ref, where), f"rows older than {days} days")

    def _expire_quarantine(self, table: _Table, words: _ResultLines) -> None:
        """Remove old events that left quarantine (applied or superseded) in batches that every layer has applied."""
        assert table.namespace is not None
        days = self.settings.maintenance.ops_retention_days
        count = quarantine_table.dismiss(
            self.spark, table.ref, before_ms=self._before(days), applied=self._applied(table.namespace)
        )
        _note_removed(words, count, f"events that left quarantine, older than {days} days,")

    def _expire_deletes(self, table: _Table, words: _ResultLines) -> None:
        """Remove old remembered deletes that every layer has applied, if no late event can precede them."""
        assert table.namespace is not None
        days = self.settings.maintenance.deletes_retention_days
        event_count = quarantine_table.count(self.spark, self.layout.quarantine(*table.namespace))
        if event_count:
            words.left.append(f"remembered deletes kept: {event_count} quarantined events may be older than them")
            return
        applied_batch = self._applied(table.namespace)
        # By sequence, the time of the delete in the source: an old delete may have been captured just now.
        oldest = resume_token.snapshot_sequence(self._before(days) // 1000, 0)
        where = f"`__sequence` < {names.literal(oldest)} AND `__batch` <= {applied_batch}"
        last = _scalar(self.spark, table.ref, "max(`__batch`)", where)
        if last is not None:  # recorded before they are removed: a gold table that has not applied them must be rewritten
            earlier_batch = int(delta.properties(self.spark, table.ref).get(registry.FORGOTTEN_TO) or 0)
            entry = f"'{registry.FORGOTTEN_TO}' = '{max(last, earlier_batch)}'"
            with table_errors.translating(table.ref):  # two runs at once
                self.spark.sql(f"ALTER TABLE {table.ref} SET TBLPROPERTIES ({entry})").collect()
        _note_removed(words, ops_tables.delete(self.spark, table.ref, where), f"deletes older than {days} days")

    def _applied(self, namespace: registry.Namespace) -> int:
        """The batch up to which silver, gold and the history have applied events."""
        layer_tables = [self.layout.silver(*namespace), self.layout.gold(*namespace)]
        if self.settings.silver.for_collection(str(namespace)).history:
            layer_tables.append(self.layout.history(*namespace))
        # A table that does not exist counts as batch 0: it is still to be built from this data.
        return min(self._position(each) for each in layer_tables)

    def _position(self, table: TableRef) -> int:
        metadata = table_history.standing(self.spark, table).metadata
        to = metadata.get("to")
        return to if isinstance(to, int) and not registry.is_other_log(metadata.get("log"), self._log) else 0

    def _trim(self, table: TableRef, words: _ResultLines) -> None:
        """Remove old events of bronze that every layer has applied; a rebuild then needs a snapshot, and says so."""
        days = self.settings.maintenance.bronze_retention_days
        if days is None:
            return
        before, reason = self._before(days), f"events older than {days} days kept: the capture is running"
        # Without the claim nothing can be removed: do not query each collection.
        if self.capture is None and self._is_held(table):
            words.left += [reason] * _has_rows(self.spark, table, f"ts_ms < {before}")
            return
        newest_batch = _scalar(self.spark, table, "max(batch)", "true") or 0
        # The first batch stays as proof that bronze has its beginning, the last one for its position.
        unneeded_rows = f"({IDLE_ROWS} OR {bronze_log.superseded_heartbeats(self.spark, table)})"
        idle = f"{unneeded_rows} AND ts_ms < {before} AND batch > 1 AND batch < {newest_batch}"
        last_batches = self._trimmed(registry.read(self.spark, self.settings).namespaces, before, words)
        # Check first: the claim refuses a capture that starts meanwhile, and each property is a commit.
        has_idle = _has_rows(self.spark, table, idle)
        if not (has_idle or _has_rows(self.spark, table, survey.old_events(last_batches, before))):
            return
        try:
            with _claimed(functools.partial(self._claim, table), self.capture) as claimed:
                self._remove_events(table, last_batches, idle if has_idle else "false", before, claimed, words)
        except (errors.TableOwned, errors.LeaseHeld):
            words.left.append(reason)
        except errors.CommitConflict as error:
            words.left.append(f"events older than {days} days kept: {error}")

    def _remove_events(
        self,
        table: TableRef,
        own: Mapping[registry.Namespace, int],
        idle: str,
        before: int,
        claimed: _ClaimedWriter,
        words: _ResultLines,
    ) -> None:
        """Remove old events of each collection, and idle rows, as bronze's writer."""
        # Only under the claim: if a capture in another process is alive nothing is removed, and no history gets a gap.
        removable = {
            namespace: last
            for namespace, last in own.items()
            if self._is_gap_noted(namespace, survey.old_events({namespace: last}, before), words)
        }
        events = survey.old_events(removable, before)
        last = _scalar(self.spark, table, "max(batch)", events)
        # Recorded before anything is removed: a rebuild must never take the remaining events for all of them. Never moved back when
        # the retention is made longer: earlier runs have removed events all the same.
        properties = delta.properties(self.spark, table)
        marks = {} if last is None else {bronze_log.TRIMMED: before, bronze_log.TRIMMED_TO: last}
        entries = (f"{names.literal(name)} = '{max(to, int(properties.get(name) or 0))}', " for name, to in marks.items())
        event_count = idle_count = 0
        try:
            with claimed() as writer:
                writer.alter(f"SET TBLPROPERTIES ({''.join(entries)}'delta.appendOnly' = 'false')")
            for batches in _days(self.spark, table, events):
                with claimed() as writer:
                    event_count += maintenance.delete_claimed(writer, f"{events} AND {batches}", among=batches)
            with claimed() as writer:
                idle_count = maintenance.delete_claimed(writer, idle)
        finally:  # after any error; if this process is killed, the next start of the capture does it
            with claimed() as writer:
                writer.alter("SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
        days = self.settings.maintenance.bronze_retention_days
        _note_removed(words, event_count, f"events older than {days} days")
        _note_removed(words, idle_count, f"rows without a document (heartbeats, transactions) older than {days} days")
        if event_count:
            words.left.append("a rebuild of silver now needs a snapshot of the collection first")

    def _trimmed(self, of: Iterable[registry.Namespace], before: int, words: _ResultLines) -> dict[registry.Namespace, int]:
        """For each collection the batch before which its old events may be removed.

        That is the last batch that all layers have applied, which itself stays to show what a table has not applied, or the first one
        with an event that is not old: after that nothing may be missing, though replayed events have old times and clocks can be set back.
        """
        if not (batches := {each: self._applied(each) for each in of}):
            return {}
        bounds = ", ".join(f"({names.literal(db)}, {names.literal(name)}, {to})" for (db, name), to in batches.items())
        young = f"min(CASE WHEN ts_ms >= {before} THEN batch END)"
        query = f"""SELECT db, collection, least(max(batch), {young}) AS last FROM {self.bronze}
            JOIN (SELECT * FROM VALUES {bounds} AS bounds(db, collection, applied)) USING (db, collection)
            WHERE {bronze_log.DOCUMENT_EVENTS} AND batch <= applied GROUP BY db, collection HAVING min(batch) < last"""
        # For thousands of collections one query, and one more only for those with events to remove; after their positions, as these say.
        last_batches = {registry.Namespace(row.db, row.collection): row.last for row in self.spark.sql(query).collect()}
        return {each: last for each, last in last_batches.items() if not self._waits(each, words)}

    def _waits(self, namespace: registry.Namespace, words: _ResultLines) -> bool:
        """Whether events must stay: for quarantined events, or for incomplete rows if updates are folded, or were under another `capture.mode`."""
        count = quarantine_table.count(self.spark, self.layout.quarantine(*namespace))
        position = registry.silver_position(self.spark, silver := self.layout.silver(*namespace))
        if position.version >= 0 and (position.documents or self.settings.keeps_document(str(namespace))):
            count += self.spark.sql(f"SELECT count_if(`__incomplete`) AS n FROM {silver}").collect()[0].n
        words.left += [f"{namespace}: events kept for {count} incomplete rows or quarantined events"] if count else []
        return bool(count)

    def _is_gap_noted(self, namespace: registry.Namespace, what: str, words: _ResultLines) -> bool:
        """Whether the history permits the removal: an existing one that is switched off has to record that it has a gap."""
        table = self.layout.history(*namespace)
        if self.settings.silver.for_collection(str(namespace)).history or not delta.exists(self.spark, table):
            return True
        position = history_position.position(self.spark, table)
        lost_events = f"{what} AND batch > {position.to}"
        if not position.to or position.has_gap or not _has_rows(self.spark, self.bronze, lost_events):
            return True
        try:
            with self._claim(table).released() as writer:
                to, extra = writer.last_metadata()
                writer.mark(to=to, extra={**extra, history_position.GAP: True})
        except (errors.TableOwned, errors.LeaseHeld):
            words.left.append(f"{namespace}: events kept, because the writer of its history is running")
            return False
        return True


@contextlib.contextmanager
def _claimed(claim: Callable[..., Writer], capture: bronze_log.BronzeLog | None) -> Iterator[_ClaimedWriter]:
    """Yields bronze's writer for single operations: a writer of its own, or the capture's, which continues in between."""
    if capture is not None:
        yield capture.between_commits
        return
    with claim(newest_names=("batch", "log")).released() as writer:
        yield lambda: contextlib.nullcontext(writer)


def _days(spark: SparkSession, table: TableRef, events: str) -> list[str]:
    """SQL conditions for the batches of the events, one day at a time, because a capture waits during each removal."""
    # One query for all days: bronze has no statistics of times, and each query reads those of all its events.
    days = spark.sql(
        f"SELECT min(batch) AS low, max(batch) AS high FROM {table} WHERE {events} GROUP BY floor(ts_ms / {DAY_MS}) ORDER BY low"
    ).collect()
    return [f"batch >= {day.low} AND batch <= {day.high}" for day in days]


def _scalar(spark: SparkSession, table: TableRef, what: str, where: str) -> Any:
    return spark.sql(f"SELECT {what} AS found FROM {table} WHERE {where}").collect()[0].found


def _has_rows(spark: SparkSession, table: TableRef, where: str) -> bool:
    return bool(spark.sql(f"SELECT 1 FROM {table} WHERE {where} LIMIT 1").collect())


def _note_removed(words: _ResultLines, count: int, what: str) -> None:
    if count:
        words.done.append(f"{count:,} {what} removed")


def _size_changes(before: delta.TableSize, after: delta.TableSize) -> Sequence[str]:
    lines = []
    if after.files < before.files:  # more of them are its running writer's
        lines.append(f"{before.files:,} files became {after.files:,}")
    if before.stored is not None and after.stored is not None and after.stored < before.stored:
        lines.append(f"{(before.stored - after.stored) / 1e6:,.1f} MB freed")
    return lines
