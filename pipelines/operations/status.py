"""Reads the status of each layer from the tables and the source. Claims and changes nothing.

Lag counts events that wait: a collection without new events has no lag, however many batches other collections have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import resume_token
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.bronze import quarantine_table, registry, stream_position
from pipelines.capture import metrics
from pipelines.delta import direct_log, local_log, query_execution, table_history
from pipelines.delta import tables as delta
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import backlog, model_status, row_counts
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks

THREADS = 4
"""Tables that are read in parallel: planning a query takes Spark longer than reading."""
RATE_SECONDS = 600
"""Rates are of this time before the layer's last commit."""
PATIENCE_MS = 3000
"""How long to wait for the source: status must also work without it."""
COMMITS = 1000
"""Commits or batches that are read for a rate, at most."""
FEWER_COMMITS = (30, 120, 480)
"""How many are read first: enough of most tables to cover `RATE_SECONDS`, and there may be thousands of tables."""


@dataclass(frozen=True)
class ServerStatus:
    """The server's version, operation time and oldest oplog entry in seconds since 1970; `problem` if it does not answer."""

    server: str | None = None
    now: int | None = None
    oplog_first: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class WriterStatus:
    """The last writer of a table; `lease_seconds` is 0 if it released the table or its lease expired."""

    host: str
    process: int
    has_left: bool
    lease_seconds: int


@dataclass(frozen=True)
class SnapshotStatus:
    """A collection's snapshot; `failed` is the reason if it failed, `is_paused` whether it waits for `resume-snapshot`."""

    documents: int
    is_done: bool
    failed: str | None = None
    is_paused: bool = False


@dataclass(frozen=True)
class BronzeStatus:
    """Bronze: `position` is the cluster time in seconds up to which it is complete, also where the source was quiet and no row says so.

    `headroom_seconds` is that of the last row's token, from which a capture resumes. `slow_commits` is the reason if commits go through
    Spark instead of straight into Delta's log.
    """

    table: str
    batch: int
    events: int
    position: int
    lag_seconds: int | None
    headroom_seconds: int | None
    rate: float | None
    writer: WriterStatus | None
    slow_commits: str | None = None


@dataclass(frozen=True)
class TableStatus:
    """One collection's table in silver or gold, or its history.

    `version` is -1 for a history that does not exist yet. `batch` is the bronze batch up to which events are applied; `lag_batches` and
    `lag_events` wait, the oldest for `lag_seconds`; `rate` is in events per second.
    """

    table: str
    version: int
    batch: int
    rows: int
    deleted: int
    incomplete: int
    rescued: int
    lag_batches: int
    lag_events: int
    lag_seconds: int
    rate: float | None
    writer: WriterStatus | None


@dataclass(frozen=True)
class CollectionStatus:
    """One captured collection in all layers; None for layers that have no table of it yet.

    `history` is set if the settings ask for one and silver has a table, so that its lag shows even before it exists.
    `incomplete_since` is set from a loss of changes (for example the oplog lost the position) until the end of a snapshot that repairs
    it; `incomplete_because` says what was lost, and why no snapshot has repaired it. If its tables cannot be read, or their names belong
    to another collection, `problem` is the reason, `exit_code` that of its error, and the tables are None.
    """

    collection: str
    snapshot: SnapshotStatus | None
    silver: TableStatus | None
    gold: TableStatus | None
    waiting_events: int
    quarantined: int
    incomplete_since: str | None = None
    incomplete_because: str | None = None
    history: TableStatus | None = None
    problem: str | None = None
    exit_code: int = 0

    @property
    def is_unpublished(self) -> bool:
        """Whether silver has documents, and gold has no table for them yet."""
        silver = self.silver
        return self.gold is None and silver is not None and silver.rows > silver.deleted + silver.incomplete


@dataclass(frozen=True)
class PipelineStatus:
    """A pipeline at `at_ms`, milliseconds since 1970; `metrics` are those of its running capture, if it exposes them."""

    name: str
    at_ms: int
    source: ServerStatus
    bronze: BronzeStatus | None
    collections: tuple[CollectionStatus, ...]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    models: tuple[model_status.ModelStatus, ...] = ()


def read(spark: SparkSession, settings: Settings) -> PipelineStatus:
    """The status of a pipeline, also if it has never run or the source does not answer.

    Raises `DecisionNeeded` if bronze is gone and silver's tables are not: it must not look like a pipeline that has never run.
    """
    now_ms = clock.now_ms()
    server = _source(settings)
    log = delta.layout(settings.lakehouse).bronze(settings.name)
    capture_metrics = metrics.scrape(
        settings.name, port=settings.source.metrics_port, address=settings.source.metrics_address
    )
    if not delta.exists(spark, log):
        if registry.read(spark, settings).namespaces:
            raise errors.DecisionNeeded(
                f"{log.label}: bronze is gone, and silver was made from it: it was removed or moved, or its disk is not mounted. Put it "
                "back. Without it, a capture makes a new one with a new snapshot, and silver has to be rebuilt from that"
            )
        return PipelineStatus(settings.name, now_ms, server, None, (), capture_metrics)
    delta.check_ours(spark, log)
    reader = _StatusReader(spark, settings, log, now_ms)
    models = model_status.read(spark, settings, now_ms=now_ms)
    return PipelineStatus(
        settings.name, now_ms, server, reader.bronze(server), reader.collections(), capture_metrics, models
    )


def refuse(status: PipelineStatus) -> None:
    """Raise `CollectionsFailed` if a collection has a table that cannot be read; call it after showing the status."""
    exit_codes = {each.collection: each.exit_code for each in status.collections if each.problem is not None}
    if exit_codes:
        worst = errors.worst_code(exit_codes.values())
        raise errors.CollectionsFailed(f"{', '.join(exit_codes)}: a table cannot be read; the status says why", worst)


def to_json(status: PipelineStatus) -> str:
    """The status as one JSON object, with the names of the dataclasses' fields."""
    return json.dumps(dataclasses.asdict(status), indent=2)


def _source(settings: Settings) -> ServerStatus:
    # A server that cannot be reached is part of the status: the tables can be read without it.
    try:
        client = connections.connection(settings.source).client(serverSelectionTimeoutMS=PATIENCE_MS)
    except errors.MedallionError as error:
        return ServerStatus(problem=str(error))
    with contextlib.closing(client):
        try:
            info = mongodb_server.server_info(client)
            window = mongodb_server.oplog_window(client)
            now = mongodb_server.operation_time(client).time
        except errors.MedallionError as error:
            return ServerStatus(problem=str(error))
    return ServerStatus(f"MongoDB {info.text}", now, window.first if window else None)


@dataclass(frozen=True)
class _TableProgress:
    """A table of silver or gold: its position (`batch`), and its position `seconds` before its last commit (`before`)."""

    table: tables.TableRef
    version: int
    batch: int
    before: int
    seconds: float
    writer: WriterStatus | None
    log: str | None = None

    def of_bronze(self, log: str | None) -> _TableProgress:
        """The same, but at batch 0 if its batch numbers are of another bronze log than `log`: it has applied nothing of this one."""
        return dataclasses.replace(self, batch=0, before=0) if registry.is_other_log(self.log, log) else self


@dataclass(frozen=True)
class _CollectionTables:
    """One collection's tables."""

    namespace: registry.Namespace
    silver: _TableProgress | None
    gold: _TableProgress | None
    history: _TableProgress | None
    error: Exception | None = None


_Waiting = Mapping[registry.Namespace, Sequence[backlog.Backlog]]
"""The backlogs of silver, gold and the history of each collection."""


@dataclass(frozen=True)
class _StatusReader:
    """Reads the tables of a pipeline once."""

    spark: SparkSession
    settings: Settings
    log: tables.TableRef
    now_ms: int

    @property
    def layout(self) -> tables.Layout:
        return delta.layout(self.settings.lakehouse)

    def bronze(self, server: ServerStatus) -> BronzeStatus | None:
        position = stream_position.read(self.spark, self.log)
        if position is None:
            return None
        seconds = resume_token.position(position.token).seconds
        standing = table_history.standing(self.spark, self.log)
        complete_seconds = max(seconds, _complete_seconds(standing))
        return BronzeStatus(
            table=self.log.label,
            batch=position.batch,
            events=position.offset + 1,
            position=complete_seconds,
            lag_seconds=None if server.now is None else max(0, server.now - complete_seconds),
            headroom_seconds=None if server.oplog_first is None else seconds - server.oplog_first,
            rate=backlog.captured_rate(
                self.spark, self.log, position.batch, within_seconds=RATE_SECONDS, within_batches=COMMITS
            ),
            writer=self._writer(standing.last),
            slow_commits=self._why_slow(),
        )

    def _why_slow(self) -> str | None:
        # A session that commands start can commit straight to a folder's log; starting one to verify that takes seconds.
        if not (sparks.is_started(self.spark) or sparks.is_given() or local_log.folder(self.log) is None):
            return None
        why = direct_log.why_not(self.spark, self.log)
        takes_settings = why is None or query_execution.takes_settings(self.spark)
        return why if takes_settings else f"{why}; {query_execution.WITHOUT_SETTINGS}"

    def collections(self) -> tuple[CollectionStatus, ...]:
        payloads = bronze_log.gap_and_snapshot_heartbeats(self.spark, self.log)
        snapshots, gaps = _snapshots(payloads), snapshot_state.unrepaired(payloads)
        # Show also collections whose snapshot has begun, which may have no event and no table yet.
        newest = bronze_log.newest(self.spark, self.log)
        collections = registry.read(self.spark, self.settings, log=newest.log)
        in_snapshots = {registry.Namespace.parse(name) for name in {**snapshots, **gaps}} - {*collections.refused}
        # What lies at the place of their tables is another collection's.
        refused_tables = [_CollectionTables(each, None, None, None, error) for each, error in collections.refused.items()]
        with ThreadPoolExecutor(THREADS) as pool:

            def tables_of(namespaces: Iterable[registry.Namespace]) -> list[_CollectionTables]:
                return list(pool.map(lambda each: self._tables_or_error(each, newest.log), namespaces))

            collection_tables = tables_of({*collections.namespaces, *in_snapshots})
            # Silver searches batches for new collections, and notes these, before it applies the batches to a table.
            searched = max(collections.discovered, *(each.silver.batch for each in collection_tables if each.silver), 0)
            unfound = {*self._with_events(searched, newest.batch)} - {*collections.namespaces, *collections.refused}
            collection_tables = sorted(
                [*collection_tables, *tables_of(unfound - in_snapshots), *refused_tables],
                key=lambda each: str(each.namespace),
            )
            # Bronze has no events of a collection that silver does not know, up to the batch that silver has searched.
            unknown = (in_snapshots | unfound) - {*collections.namespaces}
            start_batches = dict.fromkeys(unknown, collections.discovered)
            # Without its position, all of bronze would be read for a collection whose backlog is not shown.
            bounds = {
                each.namespace: _bounds(each, start_batches.get(each.namespace, 0))
                for each in collection_tables
                if each.error is None
            }
            backlogs = backlog.of_layers(self.spark, self.log, bounds)
            statuses = pool.map(lambda each: self._collection_or_problem(each, snapshots, backlogs), collection_tables)
            return tuple(_with_gap(each, gaps.get(each.collection)) for each in statuses)

    def _with_events(self, after: int, to: int) -> Iterator[registry.Namespace]:
        """The collections with events in the batches (after, to], without MongoDB's temporary ones."""
        if after < to:
            yield from (each for each in backlog.collections(self.spark, self.log, after) if not each.is_temporary)

    def _tables_or_error(self, namespace: registry.Namespace, log: str | None) -> _CollectionTables:
        """The tables of one collection, or the error of a damaged one."""
        try:
            return self._tables(namespace, log)
        except Exception as error:
            return _CollectionTables(namespace, None, None, None, spark_failures.of_one(error))

    def _tables(self, namespace: registry.Namespace, log: str | None) -> _CollectionTables:
        silver, gold = (self._progress(ref(*namespace)) for ref in (self.layout.silver, self.layout.gold))
        if silver is not None and gold is not None:
            # Gold follows silver, and does not name the bronze log.
            gold = dataclasses.replace(gold, log=silver.log).of_bronze(log)
        history = None
        if silver is not None and self.settings.silver.for_collection(str(namespace)).history:
            table = self.layout.history(*namespace)
            history = (self._progress(table) or _TableProgress(table, -1, 0, 0, 0.0, None)).of_bronze(log)
        return _CollectionTables(namespace, silver and silver.of_bronze(log), gold, history)

    def _progress(self, table: tables.TableRef) -> _TableProgress | None:
        """A table's position, and that of `RATE_SECONDS` before its last commit; None without a table."""
        if not delta.exists(self.spark, table):
            return None
        commits = self._recent_commits(table)
        if not commits:
            delta.check_ours(self.spark, table)
            return None
        # Newest first.
        last, batch = commits[0]
        first, before = next(
            each for each in reversed(commits) if last.timestamp_ms - each[0].timestamp_ms <= RATE_SECONDS * 1000
        )
        seconds = (last.timestamp_ms - first.timestamp_ms) / 1000
        return _TableProgress(
            table, last.version, batch, before, seconds, self._writer(last), (last.metadata or {}).get("log")
        )

    def _recent_commits(self, table: tables.TableRef) -> list[tuple[local_log.Commit, int]]:
        """The commits with a position, newest first, at least as far back as a rate needs."""
        positions: list[tuple[local_log.Commit, int]] = []
        for limit in (*FEWER_COMMITS, COMMITS):
            commits = table_history.commits(self.spark, table, limit=limit)
            positions = list(_with_position(commits))
            is_far_back = positions and positions[0][0].timestamp_ms - commits[-1].timestamp_ms > RATE_SECONDS * 1000
            if is_far_back or len(commits) < limit:
                break
        return positions

    def _collection_or_problem(
        self, each: _CollectionTables, snapshots: Mapping[str, SnapshotStatus], waiting: _Waiting
    ) -> CollectionStatus:
        name, failure = str(each.namespace), each.error
        try:
            if failure is None:
                return self._collection(each, snapshots, waiting)
        except Exception as error:
            failure = spark_failures.of_one(error)
        problem, exit_code = errors.message_of(failure), errors.code(failure)
        return CollectionStatus(name, snapshots.get(name), None, None, 0, 0, problem=problem, exit_code=exit_code)

    def _collection(
        self, each: _CollectionTables, snapshots: Mapping[str, SnapshotStatus], waiting: _Waiting
    ) -> CollectionStatus:
        name = str(each.namespace)
        silver, gold, history = waiting.get(each.namespace, (backlog.Backlog(),) * 3)
        quarantine = self.layout.quarantine(*each.namespace)
        return CollectionStatus(
            collection=name,
            snapshot=snapshots.get(name),
            silver=self._layer(each.silver, silver),
            gold=self._layer(each.gold, gold),
            waiting_events=silver.events,
            quarantined=quarantine_table.count(self.spark, quarantine),
            history=self._layer(each.history, history),
        )

    def _layer(self, progress: _TableProgress | None, waiting: backlog.Backlog) -> TableStatus | None:
        if progress is None:
            return None
        return TableStatus(
            table=progress.table.label,
            version=progress.version,
            batch=progress.batch,
            lag_batches=waiting.batches,
            lag_events=waiting.events,
            lag_seconds=0 if waiting.since is None else max(0, self.now_ms - waiting.since) // 1000,
            rate=waiting.done / progress.seconds if progress.seconds > 0 else None,
            writer=progress.writer,
            **self._counts(progress),
        )

    def _counts(self, progress: _TableProgress) -> Mapping[str, int]:
        return row_counts.NOTHING if progress.version < 0 else row_counts.of(self.spark, progress.table)

    def _writer(self, commit: local_log.Commit | None) -> WriterStatus | None:
        if commit is None or commit.metadata is None:
            return None
        claim = commit.metadata
        has_left = bool(claim.get("released"))
        end = claims.lease_end(claim, committed_ms=commit.timestamp_ms)
        return WriterStatus(
            str(claim.get("host", "")),
            int(claim.get("process") or 0),
            has_left,
            0 if has_left else max(0, end - self.now_ms) // 1000,
        )


def _complete_seconds(standing: table_history.Standing) -> int:
    """The cluster time up to which a capture without new rows has read, as it says when it renews its lease; 0 where it does not."""
    complete = None if standing.is_restored else standing.metadata.get("complete")
    return resume_token.seconds(complete) if isinstance(complete, str) else 0


def _snapshots(payloads: Sequence[Mapping[str, Any]]) -> Mapping[str, SnapshotStatus]:
    """The last snapshot of each collection, from the payloads of heartbeats."""
    snapshots: dict[str, SnapshotStatus] = {}
    for state in snapshot_state.states(payload for payload in payloads if "snapshot" in payload):
        for name in state.planned:
            # A collection that was removed from a snapshot keeps the status of the snapshot before.
            if name not in state.stopped:
                status = state.of(name)
                is_paused = state.is_paused and name in state.missing
                snapshots[name] = SnapshotStatus(status.documents, status.completed, status.failed, is_paused)
    return snapshots


def _with_gap(each: CollectionStatus, gap: snapshot_state.Gap | None) -> CollectionStatus:
    return each if gap is None else dataclasses.replace(each, incomplete_since=gap.since, incomplete_because=gap.why)


def _with_position(commits: Sequence[local_log.Commit]) -> Iterator[tuple[local_log.Commit, int]]:
    """The commits with a position, newest first, without those that a RESTORE has undone.

    If the newest commit of a writer has no position but earlier ones have, the table is at batch 0: its next run rewrites it.
    """
    version_limit: int | None = None
    positionless: local_log.Commit | None = None
    is_known = False
    for commit in commits:
        if version_limit is not None and commit.version > version_limit:
            continue
        version_limit = version_limit if commit.restored is None else commit.restored
        metadata: Mapping[str, Any] = commit.metadata or {}
        to = metadata.get("to")
        if isinstance(to, int):
            if positionless is not None and not is_known:
                yield positionless, 0
            is_known = True
            yield commit, to
        elif "to" in metadata:
            positionless = positionless or commit


def _bounds(each: _CollectionTables, begins: int) -> backlog.Bounds:
    """Each layer's positions for `backlog.of_layers`; a collection without tables may have events after batch `begins`."""
    # Without a gold table or a history use silver's bounds, so that no more of bronze is read; the result is not shown.
    layers = (each.silver, each.gold or each.silver, each.history or each.silver)
    return [(layer.before, layer.batch) if layer else (begins, begins) for layer in layers]
