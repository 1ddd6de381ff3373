"""The bronze table: an append-only log of every event, which carries its own position.

`BronzeLog` is the only writer of a pipeline's bronze table. It numbers and commits the rows of the stream and of snapshots under one
lock, so that `batch` is dense and in commit order. Recovery reads the table and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cdc_core import errors
from cdc_core.bronze import collection_ends, last_event
from cdc_core.bronze import columns as bronze
from cdc_core.snapshot import state as snapshot_state
from cdc_core.sql.names import literal
from cdc_core.stream import resume_token, transactions
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows
from pipelines.delta import local_log, maintenance, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipelines.bronze.registry import BronzeCommit

PROPERTIES = {
    "delta.appendOnly": "true",
    "delta.checkpointInterval": "100",
    "delta.dataSkippingStatsColumns": ",".join(f"`{name}`" for name in bronze.STATISTICS),
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
    "delta.enableDeletionVectors": "false",
}

TRIMMED = "medallion.trimmed"
"""The table property that maintenance sets when it removes old events: up to which time, in milliseconds since 1970."""

TRIMMED_TO = "medallion.trimmed.to"
"""The table property with the last batch from which maintenance removed events. It keeps each collection's last batch that all
layers had applied."""

DOCUMENT_EVENTS = f"kind IN ({', '.join(literal(kind) for kind in bronze.DOCUMENT_KINDS)})"
"""The rows about single documents, as a SQL condition."""

COMPACT_EVERY = 400
"""Commits between two clustered compactions, which keep the table's state small and commits fast."""

FEW_ROWS = 500_000
"""Up to so many rows this process lists the collections itself; with more, Spark is faster."""

OF_THE_STREAM = ("stream", "fields", "snapshots", "filters", "replica_set", last_event.NAME, last_event.FORGOTTEN)
"""The names in a commit's metadata that describe the source and the settings, for the next start to compare."""

RowFactory = Callable[[int, int], pa.Table]
"""``(batch, first offset) -> rows``: called under the commit lock, once per commit."""


@dataclass(frozen=True)
class BronzePosition:
    """Up to where bronze is complete: the token of its last row, and the numbers of that row."""

    token: str
    batch: int
    offset: int


@dataclass(frozen=True)
class UnclaimedPosition:
    """The position that was read before the claim; valid only if the claim commits `version` + 1."""

    version: int
    position: BronzePosition | None


@dataclass
class BronzeLog:
    """The claimed bronze table of one pipeline; `position` is None while it is empty.

    `log` is the name of the table's history: batch numbers have a meaning within one history only. `numbered` is the last batch
    number that was ever used: after a RESTORE, the numbers of the removed batches are not used again. `commits` counts this run's.
    """

    spark: SparkSession
    table: tables.TableRef
    writer: Writer
    position: BronzePosition | None
    extra: Mapping[str, object] = field(default_factory=dict)
    log: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    commits: int = 0
    complete: str | None = None
    """The token up to which the stream was read and everything is in the table, where that is known."""
    event: last_event.LastEvent = field(init=False)
    numbered: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compaction: threading.Thread | None = None
    _compacted: int = 0
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.numbered = max(self.writer.metadata.get("batch") or 0, self.position.batch if self.position else 0)
        self.event = last_event.LastEvent.of(self.writer.metadata, self._token)
        self._compacted = -(self.numbered % COMPACT_EVERY)  # The commits of earlier runs count as well.

    @staticmethod
    def open(
        spark: SparkSession,
        table: tables.TableRef,
        *,
        take_over: bool = False,
        extra: Mapping[str, object] | None = None,
        unclaimed: UnclaimedPosition | None = None,
    ) -> BronzeLog:
        """Create the table if there is none, claim it, and read its position from its rows, or use `unclaimed` where that is still valid.

        `extra` is the metadata of every commit. Raises `TableOwned`, `LeaseHeld` or `TableNotOurs`; a refused capture has changed
        nothing.
        """
        is_new = unclaimed is None and delta.create(
            spark, table, columns=bronze.COLUMNS_DDL, properties=PROPERTIES, cluster_by=("batch",)
        )
        _check_columns(spark, table)
        writer = Writer.claim(spark, table, take_over=take_over, newest_names=("batch", "log"))
        with writer.released_on_error():
            if unclaimed is not None and writer.version == unclaimed.version + 1:
                position = unclaimed.position
            else:  # The first commit of a new table is the claim.
                position = None if is_new and writer.version == 1 else read_position(spark, table)
            # Missing after a killed trim, or after a RESTORE.
            if writer.properties.get("delta.appendOnly") != "true":
                writer.alter("SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
            # By default the table's id of Delta, which stays the same when the commits with the name have expired.
            log = writer.metadata.get("log") or delta.table_id(spark, table)
            return BronzeLog(spark, table, writer, position, extra or {}, log)

    def append(self, numbered: RowFactory, *, token: str | None = None) -> BronzePosition:
        """Number the rows and commit them; returns the new position.

        The position is `token`, or else the token of the last row. The commit holds rows and position, or neither.
        """
        with self._lock:
            if self._is_closed:
                raise errors.OwnershipLost("bronze: this capture has ended; nothing more is committed")
            # Not the position's batch + 1: after a RESTORE silver may have applied later batches than the table holds.
            batch = self.numbered + 1
            first_offset = self.position.offset + 1 if self.position else 0
            rows = numbered(batch, first_offset)
            last_token = token or rows.column("resume_token")[-1].as_py()
            event = self.event.at(last_token)
            extra = {**self.extra, **self._numbers(batch), **event.metadata(last_token)}
            self.writer.append_arrow(*bronze.row_groups(rows), to=last_token, statistics=bronze.STATISTICS, extra=extra)
            self.numbered = batch
            # After the commit: a failed one must not change position and number.
            self.position, self.event = BronzePosition(last_token, batch, rows.column("offset")[-1].as_py()), event
            self.commits += 1
        return self.position

    def heartbeat(self, *payloads: Mapping[str, Any], token: str, ts_ms: int) -> BronzePosition:
        """Commit one heartbeat row per payload, with `token`, or the current position where that is later."""

        def numbered(batch: int, first: int) -> pa.Table:
            # Under the commit lock: another commit may have moved the position.
            newest_token = resume_token.later(token, self._token or "")
            return pa.concat_tables(
                heartbeat_row(payload, token=newest_token, batch=batch, offset=first + number, ts_ms=ts_ms)
                for number, payload in enumerate(payloads)
            )

        return self.append(numbered)

    def renew(self, *, complete: str | None = None) -> None:
        """Renew the lease by an empty commit; `complete` as the field of this name."""
        completeness = {} if complete is None else {"complete": complete}
        with self._lock:
            stream_metadata = {name: self.writer.metadata[name] for name in OF_THE_STREAM if name in self.writer.metadata}
            self.writer.mark(to=self._token, extra={**stream_metadata, **self._numbers(self.numbered), **completeness})

    @property
    def _token(self) -> str | None:
        return self.position.token if self.position else None

    def _numbers(self, batch: int) -> dict[str, object]:
        return {"batch": batch, "log": self.log}

    @contextlib.contextmanager
    def between_commits(self) -> Iterator[Writer]:
        """The claim, under the commit lock: for maintenance of the table while the capture runs. Raises `Temporary` once it is closed."""
        with self._lock:
            if self._is_closed:
                raise errors.Temporary(f"{self.table.label}: its capture has ended; try again")
            yield self.writer

    def compact(self, sessions: Callable[[], SparkSession]) -> None:
        """Cluster the files by `batch` every `COMPACT_EVERY` commits, in a thread with its own session; commits continue."""
        is_running = self._compaction is not None and self._compaction.is_alive()
        with self._lock:
            if self.commits - self._compacted < COMPACT_EVERY or is_running:
                return
            self._compacted = self.commits
        arguments = (sessions(), self.table)
        self._compaction = threading.Thread(target=_optimize, args=arguments, name="bronze-compaction", daemon=True)
        self._compaction.start()

    def close(self, *, waits: bool = True) -> None:
        """Release the claim, and with `waits` wait for a running compaction; a second call does nothing."""
        if self._is_closed:
            return
        # Before the lock: an abandoned thread must find the log closed, and not commit after the release.
        self._is_closed = True
        with self._lock:
            self.writer.release({} if self.complete is None else {"complete": self.complete})
        if waits and self._compaction is not None:
            self._compaction.join(timeout=60)


def read_position(spark: SparkSession, table: tables.TableRef) -> BronzePosition | None:
    """The position in the rows: the token of the last row of the last batch; None for an empty table."""
    last_rows = _last_rows(spark, table)
    if last_rows is not None:
        return _position(last_rows)
    delta.check_ours(spark, table)
    batch = spark.sql(f"SELECT max(batch) AS batch FROM {table}").collect()[0].batch
    if batch is None:
        return None
    queried_rows = spark.sql(f"SELECT resume_token, batch, `offset` FROM {table} WHERE batch = {batch}").toArrow()
    return _position(queried_rows)


def _position(last: pa.Table) -> BronzePosition | None:
    """The position in the rows of the last batch."""
    if not last.num_rows:
        return None
    row = last.sort_by([("batch", "descending"), ("offset", "descending")]).slice(0, 1).to_pylist()[0]
    return BronzePosition(row["resume_token"], row["batch"], row["offset"])


def _last_rows(spark: SparkSession, table: tables.TableRef) -> pa.Table | None:
    """Token, batch and offset of the last batch's rows, read by this process; None where it cannot read them."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    if folder is None or files is None:
        return None
    spans = [(file.between("batch"), file) for file in files if file.stats.get("numRecords") != 0]
    # A file without statistics could hold the newest batch.
    if any(span is None for span, _ in spans):
        return None
    newest_batch = max((span[1] for span, _ in spans if span), default=None)
    last_files = [file for span, file in spans if span and span[1] == newest_batch]
    where = [("batch", "==", newest_batch)] if last_files else None
    return batch_rows.brought(folder, last_files, ["resume_token", "batch", "offset"], where=where)


def _payload_rows(
    spark: SparkSession, table: tables.TableRef, kind: bronze.RowKind, *begins: str, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Offset, payload and other `columns` of the rows of a kind whose payload begins with one of `begins`, in order.

    Without a Spark job where this process can read the files.
    """
    names, folder = ["offset", "payload", *columns], local_log.readable(spark, table)
    rows = None if folder is None else batch_rows.of_kinds(folder, names, kind, begins=begins)
    if rows is None:
        condition = " OR ".join(f"startswith(payload, {literal(prefix)})" for prefix in begins) or "true"
        rows = spark.table(str(table)).where(f"kind = '{kind.value}' AND ({condition})").select(*names).toArrow()
    return list(rows.sort_by("offset").to_pylist())


@dataclass(frozen=True)
class BronzeHead:
    """The newest batch of bronze (0: none), and the name of its history (None: unnamed).

    `commit` is the newest commit of the capture, by which a table records what it was made from (`is_held`).
    """

    batch: int
    log: str | None
    commit: BronzeCommit | None = field(default=None, compare=False)


def newest(spark: SparkSession, table: tables.TableRef) -> BronzeHead:
    """The newest batch of bronze; without a Spark job where the last commit is the capture's."""
    last_commits = table_history.commits(spark, table, limit=1)
    metadata = (last_commits[0].metadata or {}) if last_commits and last_commits[0].restored is None else {}
    if isinstance(metadata.get("batch"), int):
        return BronzeHead(metadata["batch"], metadata.get("log"), _commit_name(last_commits[0]))
    commit, position = table_history.last_commit(spark, table), read_position(spark, table)
    log = ((commit.metadata if commit else None) or {}).get("log")
    return BronzeHead(0 if position is None else position.batch, log, _commit_name(commit))


def _commit_name(commit: local_log.Commit | None) -> BronzeCommit | None:
    name = (commit.metadata or {}).get("commit") if commit is not None else None
    return None if commit is None or name is None else (commit.version, name)


def is_held(spark: SparkSession, table: tables.TableRef, commit: BronzeCommit | None) -> bool | None:
    """Whether bronze's log holds a commit that was its newest one. None where that is unknown: the commit is older than the log, or
    this process cannot read it.

    False means that an older copy of bronze's files was restored: the capture reads the missing events again, and their batches get
    numbers that other batches had. Delta's RESTORE does not cause this, because it adds a commit. Raises `StoreUnreachable`.
    """
    folder = local_log.place(spark, table)
    if folder is None or commit is None:
        return None
    try:
        stored_commit = local_log.commit(folder, commit[0])
    except OSError as error:
        raise errors.StoreUnreachable(f"{table.label}: its log cannot be read at the moment; start again") from error
    if stored_commit is not None:
        return _commit_name(stored_commit) == commit
    newest_version = None if local_log.readable(spark, table) is None else local_log.newest_version(folder)
    return None if newest_version is None or commit[0] <= newest_version else False


def snapshot_heartbeats(spark: SparkSession, table: tables.TableRef) -> list[dict[str, Any]]:
    """The payloads of all heartbeats with a snapshot's progress, in order."""
    return [payload for payload in gap_and_snapshot_heartbeats(spark, table) if "snapshot" in payload]


def gap_and_snapshot_heartbeats(
    spark: SparkSession, table: tables.TableRef, *, to: int | None = None
) -> list[dict[str, Any]]:
    """The payloads of all heartbeats about a snapshot or a gap, in batches up to `to`, in order.

    Where there are gaps or failures, also the drops and renames that end them, as ``{"ended": "database.collection"}``.
    """
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"', '{"gap"', columns=["batch"])
    if any(row["payload"].startswith('{"gap"') or '"failed":' in row["payload"] for row in rows):
        kind, end_columns = bronze.RowKind.SCHEMA_CHANGE, ["batch", "db", "collection"]
        rows += _payload_rows(spark, table, kind, *collection_ends.PAYLOAD_STARTS, columns=end_columns)
    within = (row for row in sorted(rows, key=lambda row: int(row["offset"])) if to is None or row["batch"] <= to)
    return [{"ended": f"{row['db']}.{row['collection']}"} if row.get("db") else json.loads(row["payload"]) for row in within]


def superseded_heartbeats(spark: SparkSession, table: tables.TableRef) -> str:
    """The heartbeats of chunks that later ones supersede, as a SQL condition for the current batches."""
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"')
    newest_offsets = snapshot_state.newest_unfinished((row["offset"], json.loads(row["payload"])) for row in rows)
    # Plans, ends and failures stay: the first heartbeat of a collection's end is that of its sweep.
    is_passing = """payload LIKE '{"snapshot":%' AND payload LIKE '%"completed":false%'"""
    is_other = """payload NOT LIKE '%"planned":%' AND payload NOT LIKE '%"failed":%'"""
    is_newest = f"`offset` IN ({', '.join(map(str, newest_offsets))})" if newest_offsets else "false"
    return f"(kind = 'heartbeat' AND {is_passing} AND {is_other} AND NOT ({is_newest}))"


@dataclass(frozen=True)
class FilterChange:
    """A change of the stream's filter at `token`: the new fingerprint, the captured collections, and those with rows that are left out."""

    token: str
    stream: str
    captured: frozenset[str]
    left_out: frozenset[str]


def is_whole(spark: SparkSession, table: tables.TableRef, namespace: str) -> bool:
    """Whether a collection can be rebuilt from bronze: no old events were removed, or a snapshot of the whole collection was planned
    after that and completed."""
    names = _whole_collections(spark, table)
    return names is None or namespace in names


@table_history.cached
def _whole_collections(spark: SparkSession, table: tables.TableRef) -> frozenset[str] | None:
    """The collections for which `is_whole`; None for all of them."""
    trimmed_ms = delta.properties(spark, table).get(TRIMMED)
    # Numbers begin at 1: a table that begins later lost its beginning, or replaced another one.
    if trimmed_ms is None and _first_batch(spark, table) == 1:
        return None
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"', columns=["ts_ms"])
    return snapshot_state.whole(((row["ts_ms"], json.loads(row["payload"])) for row in rows), since_ms=int(trimmed_ms or 0))


def _first_batch(spark: SparkSession, table: tables.TableRef) -> int | None:
    """The number of the oldest batch; without a query where all files have statistics that this process can read."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    spans = [file.between("batch") for file in files or ()]
    lows = [span[0] for span in spans if span is not None]
    if lows and len(lows) == len(spans):
        return int(min(lows))
    first_batch: int | None = spark.sql(f"SELECT min(batch) AS first FROM {table}").collect()[0].first
    return first_batch


def trimmed_to(spark: SparkSession, table: tables.TableRef) -> int:
    """The last batch from which maintenance may have removed events; 0 where it never removed any."""
    properties = delta.properties(spark, table)
    return int(properties.get(TRIMMED_TO) or sys.maxsize) if TRIMMED in properties else 0


def first_batches(spark: SparkSession, table: tables.TableRef, *, where: str = "true") -> dict[tuple[str, str], int]:
    """The first existing batch with events, by collection. A silver table before it lacks events that maintenance removed."""
    query = f"SELECT db, collection, min(batch) AS first FROM {table} WHERE {DOCUMENT_EVENTS} AND {where}"
    return {(row.db, row.collection): row.first for row in spark.sql(f"{query} GROUP BY db, collection").collect()}


def notes(spark: SparkSession, table: tables.TableRef) -> list[FilterChange]:
    """All changes of the stream's filter, in order."""
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"stream"', columns=["resume_token"])
    heartbeats = ((row["resume_token"], json.loads(row["payload"])) for row in rows)
    return [
        FilterChange(token, metadata["stream"], frozenset(metadata["captured"]), frozenset(metadata.get("left_out", ())))
        for token, metadata in heartbeats
        if "captured" in metadata
    ]


def first_token(spark: SparkSession, table: tables.TableRef) -> str:
    """The token of the table's first heartbeat, where the stream began."""
    return str(_payload_rows(spark, table, bronze.RowKind.HEARTBEAT, columns=["resume_token"])[0]["resume_token"])


def captured_collections(spark: SparkSession, table: tables.TableRef) -> list[tuple[str, str]]:
    """The namespaces of all documents in the table; without a query where it has few rows on a local file system."""
    folder, names = local_log.folder(table), ["db", "collection"]
    kinds = bronze.RowKind.CHANGE, bronze.RowKind.SNAPSHOT
    rows = None if folder is None else batch_rows.of_kinds(folder, names, *kinds, limit=FEW_ROWS)
    if rows is None:
        rows = spark.sql(f"SELECT DISTINCT db, collection FROM {table} WHERE {DOCUMENT_EVENTS}").toArrow()
    return sorted((row["db"], row["collection"]) for row in rows.group_by(names).aggregate([]).to_pylist())


def handled_signals(spark: SparkSession, table: tables.TableRef) -> set[str]:
    """The marks of the handled signals from `ops/signals` and from Kafka."""
    payloads = (json.loads(row["payload"]) for row in _payload_rows(spark, table, bronze.RowKind.SIGNAL, '{"'))
    return {str(payload["row"]) for payload in payloads if payload.get("row") is not None}


def handled_signal_ids(spark: SparkSession, table: tables.TableRef) -> set[str]:
    """The identifiers of all signals in bronze, also of refused ones."""
    return {json.loads(row["payload"]).get("id") or "" for row in _payload_rows(spark, table, bronze.RowKind.SIGNAL, '{"')}


def open_transaction(spark: SparkSession, table: tables.TableRef) -> transactions.OpenTransaction | None:
    """The transaction whose BEGIN is in bronze and whose END is not, with the counts of its events; None where there is none."""
    kind, folder = bronze.RowKind.TRANSACTION, local_log.folder(table)
    rows = None if folder is None else batch_rows.last_of_kind(folder, kind)
    if rows is None:
        query = f"SELECT payload, `offset` FROM {table} WHERE kind = '{kind.value}' ORDER BY `offset` DESC LIMIT 1"
        rows = spark.sql(query).toArrow().to_pylist()
    payload = json.loads(rows[0]["payload"]) if rows else {}
    if payload.get("status", transactions.END) == transactions.END:
        return None
    # Not by `transaction`, which is null for events that were captured while `provide.transaction.metadata` was off.
    where = f"`offset` > {rows[0]['offset']} AND concat(source.lsid, ':', source.txnNumber) = {literal(payload['id'])}"
    counts = spark.sql(
        f"SELECT db, collection, count(*) AS events FROM {table} WHERE {where} GROUP BY db, collection"
    ).collect()
    return transactions.OpenTransaction(payload["id"], {f"{row.db}.{row.collection}": row.events for row in counts})


def heartbeat_row(payload: Mapping[str, Any], *, token: str, batch: int, offset: int, ts_ms: int) -> pa.Table:
    """One heartbeat row as a table of `bronze.SCHEMA`."""
    return bronze.table(
        1,
        resume_token=token,
        offset=offset,
        batch=batch,
        kind=bronze.RowKind.HEARTBEAT.value,
        payload=json.dumps(payload, separators=(",", ":")),
        ts_ms=ts_ms,
    )


def _check_columns(spark: SparkSession, table: tables.TableRef) -> None:
    columns = delta.columns(spark, table)
    missing = [name for name in bronze.SCHEMA.names if name not in columns]
    if missing:
        raise errors.TableNotOurs(
            f"{table.label}: not a bronze table, {', '.join(missing)} missing; choose another lakehouse root or name"
        )


def _optimize(session: SparkSession, table: tables.TableRef) -> None:
    """Compact the table; failures are ignored, because the next compaction tries again.

    The commit has no metadata of ours: that from its beginning would hide the commits made while it ran.
    """
    with contextlib.suppress(Exception):
        maintenance.optimize(session, table, keeps_small=True)
