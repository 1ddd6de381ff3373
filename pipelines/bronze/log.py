"""The bronze table: an append-only log of every event, which carries its own position.

`BronzeLog` is the one writer of one pipeline's bronze table. Rows are numbered and committed under one lock, so that `batch`
is dense and in commit order, whoever brings them: the stream or a snapshot. Recovery reads the table and nothing else.
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
from cdc_core.bronze import collection_ends
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
"""The property of a bronze from which maintenance took old events: up to which time, in milliseconds since 1970."""

TRIMMED_TO = "medallion.trimmed.to"
"""The last batch from which maintenance took events. It leaves each collection the last batch that all layers had applied."""

DOCUMENT_EVENTS = f"kind IN ({', '.join(literal(kind) for kind in bronze.DOCUMENT_KINDS)})"
"""The rows of bronze that are about one document, as SQL."""

COMPACT_EVERY = 400
"""Commits between two clustered compactions: the log's state stays small, and so does the price of a commit."""

FEW_ROWS = 500_000
"""The collections of so many rows are read by this process; of more, executors read two columns sooner."""

OF_THE_STREAM = ("stream", "fields", "snapshots", "filters", "replica_set")
"""What commits say of where the rows came from, and by which settings, which the next start compares with its own: the fingerprint of the
stream, the lists of fields and of snapshots, a digest of the filters of snapshots, and the replica set's name."""

RowFactory = Callable[[int, int], pa.Table]
"""``(batch, first offset) -> rows``: called under the commit lock, once a commit."""


@dataclass(frozen=True)
class BronzePosition:
    """Up to where bronze is complete: the token of its last row, and the numbers of that row."""

    token: str
    batch: int
    offset: int


@dataclass(frozen=True)
class UnclaimedPosition:
    """The position as it was read before the claim; valid only where the claim commits `version` + 1."""

    version: int
    position: BronzePosition | None


@dataclass
class BronzeLog:
    """The bronze table of one pipeline, claimed; `position` is None while it is empty.

    `log` names the table's history: silver goes by the numbers of batches, which mean nothing in another one. `numbered` is
    the last number of a batch that was ever given: where a RESTORE takes batches back, their numbers do not come again.
    """

    spark: SparkSession
    table: tables.TableRef
    writer: Writer
    position: BronzePosition | None
    extra: Mapping[str, object] = field(default_factory=dict)
    log: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    commits: int = 0
    complete: str | None = None
    """The token up to which the stream was read when everything before it was in the table, where that is known."""
    numbered: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compaction: threading.Thread | None = None
    _compacted: int = 0
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.numbered = max(self.writer.metadata.get("batch") or 0, self.position.batch if self.position else 0)
        self._compacted = -(self.numbered % COMPACT_EVERY)  # the commits of the runs before count, too

    @staticmethod
    def open(
        spark: SparkSession,
        table: tables.TableRef,
        *,
        take_over: bool = False,
        extra: Mapping[str, object] | None = None,
        found: UnclaimedPosition | None = None,
    ) -> BronzeLog:
        """Make the table if there is none, claim it, and read its position from its rows, unless it is as it was `found`.

        Raises `TableOwned`, `LeaseHeld` or `TableNotOurs`; a refused capture has changed nothing.
        """
        is_new = found is None and delta.create(
            spark, table, columns=bronze.COLUMNS_DDL, properties=PROPERTIES, cluster_by=("batch",)
        )
        _check_columns(spark, table)
        writer = Writer.claim(spark, table, take_over=take_over, kept=("batch", "log"))
        with writer.released_on_error():
            if found is not None and writer.version == found.version + 1:
                position = found.position
            else:  # of a table that was made just now the claim is the first commit
                position = None if is_new and writer.version == 1 else read_position(spark, table)
            # A trim that was killed leaves it so, and whoever restored the table.
            if writer.properties.get("delta.appendOnly") != "true":
                writer.alter("SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
            # Delta's name of the table, where no commit says another one: it is the same where those that did are past their retention.
            log = writer.metadata.get("log") or delta.table_id(spark, table)
            return BronzeLog(spark, table, writer, position, extra or {}, log)

    def append(self, numbered: RowFactory, *, token: str | None = None) -> BronzePosition:
        """Number the rows and commit them; the new position.

        The rows end with one that carries the stream's token, which is `token` where the caller knows better than the
        last row's own. Exactly once: the commit holds rows and position, or neither.
        """
        with self._lock:
            if self._is_closed:
                raise errors.OwnershipLost("bronze: this capture has ended; nothing more is committed")
            # Not the position's batch + 1: after a RESTORE silver may have applied numbers that the table no longer shows.
            batch = self.numbered + 1
            # Numbered under the lock, and not when the rows were made: the stream and a snapshot take turns.
            first = self.position.offset + 1 if self.position else 0
            rows = numbered(batch, first)
            last = token or rows.column("resume_token")[-1].as_py()
            extra = {**self.extra, **self._numbers(batch)}
            self.writer.append_arrow(*bronze.row_groups(rows), to=last, statistics=bronze.STATISTICS, extra=extra)
            self.numbered = batch
            # After the commit: a commit that failed leaves position and number as they were, for whatever is committed next.
            self.position = BronzePosition(last, batch, rows.column("offset")[-1].as_py())
            self.commits += 1
        return self.position

    def heartbeat(self, *payloads: Mapping[str, Any], token: str, ts_ms: int) -> BronzePosition:
        """Commit heartbeat rows, one a payload, at once. They carry `token`, or the position where that is further by now."""

        def numbered(batch: int, first: int) -> pa.Table:
            # The commit lock may have been held by one that moved the position further.
            newest = resume_token.later(token, self._token or "")
            return pa.concat_tables(
                heartbeat_row(payload, token=newest, batch=batch, offset=first + number, ts_ms=ts_ms)
                for number, payload in enumerate(payloads)
            )

        return self.append(numbered)

    def renew(self, *, complete: str | None = None) -> None:
        """Renew the lease by an empty commit, where nothing else is committed for long; `complete` as the field of this name."""
        said = {} if complete is None else {"complete": complete}
        with self._lock:
            stream = {name: self.writer.metadata[name] for name in OF_THE_STREAM if name in self.writer.metadata}
            self.writer.mark(to=self._token, extra={**stream, **self._numbers(self.numbered), **said})

    @property
    def _token(self) -> str | None:
        return self.position.token if self.position else None

    def _numbers(self, batch: int) -> dict[str, object]:
        """What every commit says of the batches."""
        return {"batch": batch, "log": self.log}

    @contextlib.contextmanager
    def between_commits(self) -> Iterator[Writer]:
        """The claim, while nothing else is committed by it: for what is done to the table beside this capture."""
        with self._lock:
            if self._is_closed:
                raise errors.Temporary(f"{self.table.label}: its capture has ended; try again")
            yield self.writer

    def compact(self, sessions: Callable[[], SparkSession]) -> None:
        """Cluster the new files by `batch` where they are many, in the background and in a session of its own; commits go on meanwhile."""
        is_running = self._compaction is not None and self._compaction.is_alive()
        with self._lock:
            if self.commits - self._compacted < COMPACT_EVERY or is_running:
                return
            self._compacted = self.commits
        arguments = (sessions(), self.table)
        self._compaction = threading.Thread(target=_optimize, args=arguments, name="bronze-compaction", daemon=True)
        self._compaction.start()

    def close(self, *, waits: bool = True) -> None:
        """Give the claim back, and wait for a compaction that runs, unless the end is in a hurry; nothing the second time."""
        if self._is_closed:
            return
        # Before the lock: a thread that was left behind must find the log closed, and not commit behind the release.
        self._is_closed = True
        with self._lock:
            self.writer.release({} if self.complete is None else {"complete": self.complete})
        if waits and self._compaction is not None:
            self._compaction.join(timeout=60)


def read_position(spark: SparkSession, table: tables.TableRef) -> BronzePosition | None:
    """The position that the rows carry: the token of the last row of the last batch; None for an empty table."""
    held = _last_rows(spark, table)
    if held is not None:
        return _position(held)
    batch = spark.sql(f"SELECT max(batch) AS batch FROM {table}").collect()[0].batch
    if batch is None:
        return None
    last = spark.sql(f"SELECT resume_token, batch, `offset` FROM {table} WHERE batch = {batch}").toArrow()
    return _position(last)


def _position(last: pa.Table) -> BronzePosition | None:
    """The position that the rows of the last batch carry."""
    if not last.num_rows:
        return None
    row = last.sort_by([("batch", "descending"), ("offset", "descending")]).slice(0, 1).to_pylist()[0]
    return BronzePosition(row["resume_token"], row["batch"], row["offset"])


def _last_rows(spark: SparkSession, table: tables.TableRef) -> pa.Table | None:
    """Token and numbers of the rows that the newest files hold; None where only Delta can tell them."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    if folder is None or files is None:
        return None
    spans = [(file.between("batch"), file) for file in files if file.stats.get("numRecords") != 0]
    # A file without statistics may hold the newest batch.
    if any(span is None for span, _ in spans):
        return None
    newest = max((span[1] for span, _ in spans if span), default=None)
    last = [file for span, file in spans if span and span[1] == newest]
    where = [("batch", "==", newest)] if last else None
    return batch_rows.brought(folder, last, ["resume_token", "batch", "offset"], where=where)


def _payload_rows(
    spark: SparkSession, table: tables.TableRef, kind: bronze.RowKind, *begins: str, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Place and payload of the rows of a kind whose payloads begin so, and these columns, in order; without a Spark job where this process
    sees the files. They are a few of the log's rows: the tokens of all, say, take minutes to read."""
    names, folder = ["offset", "payload", *columns], local_log.readable(spark, table)
    rows = None if folder is None else batch_rows.of_kinds(folder, names, kind, begins=begins)
    if rows is None:
        chosen = " OR ".join(f"startswith(payload, {literal(each)})" for each in begins) or "true"
        rows = spark.table(str(table)).where(f"kind = '{kind.value}' AND ({chosen})").select(*names).toArrow()
    return list(rows.sort_by("offset").to_pylist())


@dataclass(frozen=True)
class BronzeHead:
    """The number of bronze's newest batch, 0 for none, and the name of its history, None where nobody has given it one.

    `commit` is the newest one of ours, by which a table says what it was made from (`is_held`).
    """

    batch: int
    log: str | None
    commit: BronzeCommit | None = field(default=None, compare=False)


def newest(spark: SparkSession, table: tables.TableRef) -> BronzeHead:
    """Where bronze stands. Its history says it without a job where the capture wrote last."""
    last = table_history.commits(spark, table, limit=1)
    said = (last[0].metadata or {}) if last and last[0].restored is None else {}
    if isinstance(said.get("batch"), int):
        return BronzeHead(said["batch"], said.get("log"), _named(last[0]))
    own = table_history.last_commit(spark, table)
    rows = _last_rows(spark, table)
    if rows is None:
        batch = spark.sql(f"SELECT max(batch) AS batch FROM {table}").collect()[0].batch or 0
    else:
        held = _position(rows)
        batch = 0 if held is None else held.batch
    return BronzeHead(batch, ((own.metadata if own else None) or {}).get("log"), _named(own))


def _named(commit: local_log.Commit | None) -> BronzeCommit | None:
    name = (commit.metadata or {}).get("commit") if commit is not None else None
    return None if commit is None or name is None else (commit.version, name)


def is_held(spark: SparkSession, table: tables.TableRef, commit: BronzeCommit | None) -> bool | None:
    """Whether bronze's log has a commit that was its newest once. None where that is not known: it is older than the log, or this
    process does not read it.

    False: an older copy of bronze's files was restored. The capture reads the events that it lacks again, and their batches get
    numbers that other batches had. Delta's RESTORE never causes this, for it only adds a commit. Raises `StoreUnreachable`.
    """
    folder = local_log.place(spark, table)
    if folder is None or commit is None:
        return None
    try:
        found = local_log.commit(folder, commit[0])
    except OSError as error:
        raise errors.StoreUnreachable(f"{table.label}: its log cannot be read at the moment; start again") from error
    if found is not None:
        return _named(found) == commit
    newest = None if local_log.readable(spark, table) is None else local_log.newest_version(folder)
    return None if newest is None or commit[0] <= newest else False


def snapshot_heartbeats(spark: SparkSession, table: tables.TableRef) -> list[dict[str, Any]]:
    """The payloads of all heartbeats that hold a snapshot's progress, in order."""
    return [payload for payload in gap_and_snapshot_heartbeats(spark, table) if "snapshot" in payload]


def gap_and_snapshot_heartbeats(
    spark: SparkSession, table: tables.TableRef, *, to: int | None = None
) -> list[dict[str, Any]]:
    """The payloads of all heartbeats that tell of a snapshot or of a gap, in order; those in batches up to `to`.

    Beside gaps there are the drops and renames that end them, as ``{"ended": "database.collection"}``.
    """
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"', '{"gap"', columns=["batch"])
    if any(row["payload"].startswith('{"gap"') or '"failed":' in row["payload"] for row in rows):
        kind, of_ends = bronze.RowKind.SCHEMA_CHANGE, ["batch", "db", "collection"]
        rows += _payload_rows(spark, table, kind, *collection_ends.PAYLOAD_STARTS, columns=of_ends)
    within = (row for row in sorted(rows, key=lambda row: int(row["offset"])) if to is None or row["batch"] <= to)
    return [{"ended": f"{row['db']}.{row['collection']}"} if row.get("db") else json.loads(row["payload"]) for row in within]


def superseded_heartbeats(spark: SparkSession, table: tables.TableRef) -> str:
    """The heartbeats of chunks that later ones make superfluous, as SQL over the batches that there are now."""
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"')
    kept = snapshot_state.newest_unfinished((row["offset"], json.loads(row["payload"])) for row in rows)
    # Plans, ends and failures stay: the first heartbeat that tells of a collection's end is its sweep's.
    is_passing = """payload LIKE '{"snapshot":%' AND payload LIKE '%"completed":false%'"""
    is_other = """payload NOT LIKE '%"planned":%' AND payload NOT LIKE '%"failed":%'"""
    is_newest = f"`offset` IN ({', '.join(map(str, kept))})" if kept else "false"
    return f"(kind = 'heartbeat' AND {is_passing} AND {is_other} AND NOT ({is_newest}))"


@dataclass(frozen=True)
class FilterChange:
    """That the settings let other events in from `token` on: the stream's fingerprint, which collections were captured then, and which
    with rows were left out."""

    token: str
    stream: str
    captured: frozenset[str]
    left_out: frozenset[str]


def is_whole(spark: SparkSession, table: tables.TableRef, namespace: str) -> bool:
    """Whether bronze holds all that a collection was made of: nothing was ever taken from its beginning, or a snapshot of the whole
    collection was planned since, and read to its end."""
    first = _first_batch(spark, table)
    trimmed = delta.properties(spark, table).get(TRIMMED)
    # Numbers begin at 1: a table that begins later lost its beginning, or took the place of another one.
    if first == 1 and trimmed is None:
        return True
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"snapshot"', columns=["ts_ms"])
    payloads = [json.loads(row["payload"]) for row in rows]
    # The first row of each snapshot is its plan.
    planned_ms = {said["snapshot"].get("id"): row["ts_ms"] for row, said in zip(rows[::-1], payloads[::-1], strict=True)}
    return any(
        namespace in state.planned
        and state.of(namespace).completed
        and state.of(namespace).sweep
        and namespace not in state.conditions
        and planned_ms[state.id] >= int(trimmed or 0)
        for state in snapshot_state.states(payloads)
    )


def _first_batch(spark: SparkSession, table: tables.TableRef) -> int | None:
    """The number of the oldest batch; without a query where this process sees what the log says of each file."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    spans = [file.between("batch") for file in files or ()]
    lows = [span[0] for span in spans if span is not None]
    if lows and len(lows) == len(spans):
        return int(min(lows))
    found: int | None = spark.sql(f"SELECT min(batch) AS first FROM {table}").collect()[0].first
    return found


def trimmed_to(spark: SparkSession, table: tables.TableRef) -> int:
    """The last batch of which maintenance may have taken events; 0 where it never took any."""
    said = delta.properties(spark, table)
    return int(said.get(TRIMMED_TO) or sys.maxsize) if TRIMMED in said else 0


def first_batches(spark: SparkSession, table: tables.TableRef, *, where: str = "true") -> dict[tuple[str, str], int]:
    """The first batch of each collection's events that are there. A table that has not applied it is older than what maintenance took."""
    chosen = f"SELECT db, collection, min(batch) AS first FROM {table} WHERE {DOCUMENT_EVENTS} AND {where}"
    return {(row.db, row.collection): row.first for row in spark.sql(f"{chosen} GROUP BY db, collection").collect()}


def notes(spark: SparkSession, table: tables.TableRef) -> list[FilterChange]:
    """What was noted each time when the settings let in other events, in order."""
    rows = _payload_rows(spark, table, bronze.RowKind.HEARTBEAT, '{"stream"', columns=["resume_token"])
    read = ((row["resume_token"], json.loads(row["payload"])) for row in rows)
    return [
        FilterChange(token, said["stream"], frozenset(said["captured"]), frozenset(said.get("left_out", ())))
        for token, said in read
        if "captured" in said
    ]


def first_token(spark: SparkSession, table: tables.TableRef) -> str:
    """The token with which the table begins."""
    return str(_payload_rows(spark, table, bronze.RowKind.HEARTBEAT, columns=["resume_token"])[0]["resume_token"])


def captured_collections(spark: SparkSession, table: tables.TableRef) -> list[tuple[str, str]]:
    """The namespaces of all documents in the table; without a query where they are few, on a disk that this process sees."""
    folder, names = local_log.folder(table), ["db", "collection"]
    kinds = bronze.RowKind.CHANGE, bronze.RowKind.SNAPSHOT
    found = None if folder is None else batch_rows.of_kinds(folder, names, *kinds, limit=FEW_ROWS)
    if found is None:
        found = spark.sql(f"SELECT DISTINCT db, collection FROM {table} WHERE {DOCUMENT_EVENTS}").toArrow()
    return sorted((row["db"], row["collection"]) for row in found.group_by(names).aggregate([]).to_pylist())


def handled_signals(spark: SparkSession, table: tables.TableRef) -> set[str]:
    """The marks of the signals in bronze that came from `ops/signals` or from Kafka."""
    payloads = (json.loads(row["payload"]) for row in _payload_rows(spark, table, bronze.RowKind.SIGNAL, '{"'))
    return {str(payload["row"]) for payload in payloads if payload.get("row") is not None}


def handled_signal_ids(spark: SparkSession, table: tables.TableRef) -> set[str]:
    """The identifiers of all signals in bronze, also of those that were refused."""
    return {json.loads(row["payload"]).get("id") or "" for row in _payload_rows(spark, table, bronze.RowKind.SIGNAL, '{"')}


def open_transaction(spark: SparkSession, table: tables.TableRef) -> transactions.OpenTransaction | None:
    """The transaction whose BEGIN is in bronze and whose END is not, with its events counted."""
    kind, folder = bronze.RowKind.TRANSACTION, local_log.folder(table)
    newest = None if folder is None else batch_rows.last_of_kind(folder, kind)
    if newest is None:
        asked = f"SELECT payload, `offset` FROM {table} WHERE kind = '{kind.value}' ORDER BY `offset` DESC LIMIT 1"
        newest = spark.sql(asked).toArrow().to_pylist()
    payload = json.loads(newest[0]["payload"]) if newest else {}
    if payload.get("status", transactions.END) == transactions.END:
        return None
    # Not by `transaction`, which those lack that were captured while `provide.transaction.metadata` was off.
    own = f"`offset` > {newest[0]['offset']} AND concat(source.lsid, ':', source.txnNumber) = {literal(payload['id'])}"
    counted = spark.sql(
        f"SELECT db, collection, count(*) AS events FROM {table} WHERE {own} GROUP BY db, collection"
    ).collect()
    return transactions.OpenTransaction(payload["id"], {f"{row.db}.{row.collection}": row.events for row in counted})


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
    found = delta.columns(spark, table)
    missing = [name for name in bronze.SCHEMA.names if name not in found]
    if missing:
        raise errors.TableNotOurs(
            f"{table.label}: not a bronze table, {', '.join(missing)} missing; choose another lakehouse root or name"
        )


def _optimize(session: SparkSession, table: tables.TableRef) -> None:
    """A compaction that fails is tried again by the next one: nothing depends on it but the price of a commit.

    Its commit says nothing: commits that came while it ran would be hidden behind what was known when it began.
    """
    with contextlib.suppress(Exception):
        maintenance.optimize(session, table)
