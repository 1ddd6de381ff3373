"""The snapshot: documents as they are, read in chunks on Spark's executors while the stream is already open.

Each chunk is read at one cluster time that is known, so its rows know which changes they hold, and `sequence` says who
wins: nothing is locked, nothing is written to the source, and no watermark is needed. A chunk's rows and the snapshot's
progress are one bronze commit. A snapshot that was killed goes on behind the last chunk that was committed.

Executors send a chunk back in pieces, each Arrow in a binary column, so that Spark carries bytes and not rows, and carries
one piece while the next is encoded.
"""

from __future__ import annotations

import builtins
import functools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from bson import json_util
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.bronze import event_rows as events
from cdc_core.bronze import raw_event, source_block
from cdc_core.extended_json import codec as extended_json
from cdc_core.extended_json import keys
from cdc_core.signals import notification as notifications
from cdc_core.snapshot import repair
from cdc_core.snapshot.state import CollectionState, Kind, State
from cdc_core.stream import fields as field_filters
from cdc_core.stream import resume_token
from pipelines.bronze import log as bronze_table
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ROWS = pa.schema([("key", pa.string()), ("after", pa.string()), ("payload", pa.string())])
REPLY = "meta STRING, rows BINARY"

PIECE_BYTES = 1024 * 1024
"""Bytes of documents that an executor sends at once: no JVM has to find room for a whole chunk in one array."""

SMALL_CHUNK = 8 * 1024 * 1024
"""Bytes of documents below which a chunk is not worth a commit of its own."""

CHUNK_SECONDS = 120.0
"""A chunk ends after that long, well inside the server's 300 seconds for a snapshot read."""

ATTEMPTS = 5


@dataclass(frozen=True)
class Progress:
    """How far a snapshot is: documents done of about how many, in this collection and in all."""

    collection: str
    documents: int
    about: int
    total_documents: int
    total_about: int
    rate: float
    seconds_left: float | None


@dataclass(frozen=True)
class ChunkSpec:
    """What an executor needs to read one chunk."""

    connection: source.Connection
    collection: mongodb.Collection
    bounds: mongodb.Range
    after: tuple[int, int]
    fetch_size: int
    max_bytes: int
    condition: str | None = None
    fields: field_filters.Fields | None = None


@dataclass(frozen=True)
class ChunkRows:
    """A chunk as the driver gets it; `cut` is the `_id` at which it was ended early, as BSON ``{"hi": _id}``."""

    rows: pa.Table
    at: tuple[int, int]
    bytes: int
    lossy: int
    cut: builtins.bytes | None = None


Told = Callable[[notifications.Type, Mapping[str, str]], None]
"""``(what happened, additional data)``: called by the snapshot's thread, between its commits."""


class Controls:
    """What other threads ask of a snapshot in its run; it looks between two chunks."""

    def __init__(self, *, is_paused: bool = False, stopped: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._is_paused = is_paused
        self._stopped = frozenset(stopped)
        self._paused_at, self._paused_seconds = time.monotonic(), 0.0

    @property
    def paused_seconds(self) -> float:
        """How long it has been paused, all in all."""
        return self._paused_seconds + (time.monotonic() - self._paused_at if self._is_paused else 0.0)

    @property
    def is_paused(self) -> bool:
        """Whether no chunk is read until it is resumed."""
        return self._is_paused

    @property
    def stopped(self) -> frozenset[str]:
        """The collections that are read no further."""
        return self._stopped

    def pause(self, is_paused: bool) -> None:
        """Pause the snapshot, or let it go on."""
        with self._lock:
            self._paused_seconds, self._paused_at = self.paused_seconds, time.monotonic()
            self._is_paused = is_paused

    def stop(self, namespaces: Iterable[str]) -> None:
        """Read these collections no further."""
        with self._lock:
            self._stopped |= frozenset(namespaces)


@dataclass
class Snapshot:
    """A snapshot in its run: the plan, the pool of chunk reads, and the commits in the order of the plan.

    `documents_max` bounds a chunk beside `chunk_bytes`; `told` hears how it goes. What the settings leave out by now
    (`left_out`) stays unread: it is gone on with when they let it in again.
    """

    spark: SparkSession
    log: bronze_table.Log
    name: str
    connection: source.Connection
    collections: Sequence[mongodb.Collection]
    state: State
    after: Timestamp
    chunk_bytes: int
    threads: int
    fetch_size: int = 0
    filters: Mapping[str, str] = field(default_factory=dict)
    fields: events.FieldsOf | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    report: Callable[[Progress], None] | None = None
    controls: Controls = field(default_factory=Controls)
    documents_max: int | None = None
    left_out: Collection[str] = ()
    told: Told = lambda what, data: None
    has_paused: bool = False
    """Whether it ended because it was paused: another one goes on from its state when it is resumed."""

    def run(self) -> State:
        """Read and commit what is missing; the state at its end, which is not done if it was stopped or paused."""
        client = self.connection.client()
        try:
            missing = self._missing()
            sizes = {each.namespace: self._size(client, each) for each in missing}
            self._about = {name: size.documents for name, size in sizes.items()}
            self._began, self._at_start = time.monotonic(), self.state.documents
            self._gone({each.namespace for each in missing})
            # Those without documents come first: the last row of the last chunk is marked as the snapshot's last.
            missing.sort(key=lambda each: sizes[each.namespace].documents > 0)
            with ThreadPoolExecutor(self.threads, thread_name_prefix="snapshot") as pool:
                for collection in missing:
                    if self._may_read(collection.namespace):
                        self._collection(pool, client, collection, sizes[collection.namespace])
        finally:
            client.close()
        return self.state

    def _missing(self) -> list[mongodb.Collection]:
        missing = set(self.state.missing)
        return [each for each in self.collections if each.namespace in missing]

    def _may_read(self, namespace: str) -> bool:
        """Whether the collection is to be read on; no more is read in this run once it was paused."""
        self.state = self.state.without(self.controls.stopped)
        is_missing = not self.stopped.is_set() and namespace in self.state.missing
        self.has_paused = self.has_paused or (is_missing and self.controls.is_paused)
        return is_missing and not self.has_paused

    def _gone(self, read: Collection[str]) -> None:
        """Collections that were dropped since the plan was made have nothing left to read."""
        for namespace in self.state.missing:
            if namespace not in read and namespace not in self.left_out and self._may_read(namespace):
                self._mark_completed(namespace)

    def _mark_completed(self, namespace: str) -> None:
        """There is no such collection any more.

        Of one that was read in part nothing is swept: its rows go with the drop or the rename that the stream tells of.
        """
        found = self.state.of(namespace)
        ended = replace(found, completed=True, sweep=found.sweep and not found.chunks, is_gone=True)
        self.state = self.state.advanced(namespace, ended)
        self.log.heartbeat(self.state.progress(namespace), token=self._token(), ts_ms=bronze_table.now_ms())
        self._tell_completed(namespace)

    def _mark_failed(self, namespace: str, reason: str) -> None:
        """The collection is read no further; the stream and the snapshot's other collections go on."""
        self.state = self.state.advanced(namespace, replace(self.state.of(namespace), failed=reason))
        self.log.heartbeat(self.state.progress(namespace), token=self._token(), ts_ms=bronze_table.now_ms())
        log.error("the snapshot of %s is given up: %s. The stream goes on. %s", namespace, reason, self._mend(namespace))
        total = str(self.state.of(namespace).documents)
        data = {"scanned_collection": namespace, "status": "SQL_EXCEPTION", "total_rows_scanned": total, "reason": reason}
        self.told(notifications.Type.TABLE_SCAN_COMPLETED, data)

    def _mend(self, namespace: str) -> str:
        """What a person can do about a collection that could not be read."""
        if self.state.kind in (Kind.INCREMENTAL, Kind.BLOCKING):
            what = "the signal's filter" if namespace in self.state.conditions else "the collection"
            return f"Look at {what}, and send the signal again"
        where = "source.snapshot.collection.filter.overrides" if self._filter(namespace) else "the collection"
        return f"Look at {where}: the next start tries it again"

    def _tell_completed(self, namespace: str) -> None:
        found = self.state.of(namespace)
        status = {"status": "SUCCEEDED" if found.documents else "EMPTY", "total_rows_scanned": str(found.documents)}
        self.told(notifications.Type.TABLE_SCAN_COMPLETED, {"scanned_collection": namespace, **status})

    def _token(self) -> str:
        position = self.log.position
        assert position is not None, "a snapshot begins with a heartbeat"
        return position.token

    def _collection(
        self,
        pool: ThreadPoolExecutor,
        client: mongodb.Client,
        collection: mongodb.Collection,
        size: mongodb.Size,
    ) -> None:
        # So many chunks that all threads have work to the end; each costs a commit, so no more than that.
        share = max(SMALL_CHUNK, size.documents * size.average // (4 * self.threads))
        documents = max(1, min(self.chunk_bytes, share) // size.average)
        documents = min(documents, self.documents_max or documents)
        self._restart_where_filter_changed(collection.namespace)
        reads: deque[tuple[mongodb.Range, Future[ChunkRows]]] = deque()
        try:
            self._read_to_end(pool, client, collection, documents, reads)
        except mongodb.ReadRefused as refused:
            self._mark_failed(collection.namespace, str(refused))
        finally:
            _cancel(reads)

    def _restart_where_filter_changed(self, namespace: str) -> None:
        """A collection that another run read in part with another filter is read from its beginning."""
        found = self.state.of(namespace)
        if found.chunks and found.filter != self._filter(namespace):
            self.state = self.state.advanced(namespace, replace(found, hi=None, documents=0, sweep=True))

    def _read_to_end(
        self,
        pool: ThreadPoolExecutor,
        client: mongodb.Client,
        collection: mongodb.Collection,
        documents: int,
        reads: deque[tuple[mongodb.Range, Future[ChunkRows]]],
    ) -> None:
        ranges = self._ranges(client, collection, documents)
        while self._may_read(collection.namespace):
            while len(reads) <= self.threads and (bounds := next(ranges, None)) is not None:
                reads.append((bounds, pool.submit(self._read, collection, bounds)))
            if not reads:
                return
            bounds, read = reads.popleft()
            try:
                self._land(collection, bounds, read.result())
            except mongodb.CollectionChanged:
                _cancel(reads)
                if (anew := self._made_anew(client, collection)) is None:
                    self._mark_completed(collection.namespace)
                    return
                collection = anew
                ranges = self._ranges(client, collection, documents)

    def _made_anew(self, client: mongodb.Client, collection: mongodb.Collection) -> mongodb.Collection | None:
        """What has the collection's name now, if anything: made anew, or resharded, which the stream says nothing of."""
        found = mongodb.collections(client, [collection.db])
        return next((each for each in found if each.name == collection.name and each.kind == collection.kind), None)

    def _ranges(self, client: mongodb.Client, collection: mongodb.Collection, documents: int) -> Iterator[mongodb.Range]:
        if repair.keys_of(self._filter(collection.namespace)) is not None:
            yield mongodb.Range()  # all of its keys in one read: what is not there is gone
            return
        lo = _as_lo(self.state.of(collection.namespace).hi)
        while True:
            hi = self._boundary(client, collection, lo=lo, documents=documents)
            yield mongodb.Range(lo, hi)
            if hi is None:
                return
            lo = _as_lo(hi)

    def _boundary(
        self, client: mongodb.Client, collection: mongodb.Collection, *, lo: bytes | None, documents: int
    ) -> bytes | None:
        for attempt in range(ATTEMPTS):
            try:
                return mongodb.boundary(client, collection, lo=lo, documents=documents)
            except mongodb.SnapshotExpired:
                self._wait_behind(_given_up(), attempt)
            except errors.SourceUnreachable as error:
                if mongodb.has_lost_connection(error):
                    raise  # the capture starts over, as often as errors.max.retries says
                self._wait_behind(error, attempt)
        raise _given_up()

    def _size(self, client: mongodb.Client, collection: mongodb.Collection) -> mongodb.Size:
        for attempt in range(ATTEMPTS):
            try:
                return _size(client, collection)
            except errors.SourceUnreachable as error:
                if mongodb.has_lost_connection(error):
                    raise
                self._wait_behind(error, attempt)
        raise _given_up()

    def _wait_behind(self, error: errors.SourceUnreachable | mongodb.ReadRefused, attempt: int) -> None:
        """Wait before the server is asked again, longer each time: an election takes seconds, and so does what passes by itself.

        Raises the error behind the last attempt, and `SourceUnreachable` where the capture ends meanwhile.
        """
        if attempt == ATTEMPTS - 1:
            raise error
        if self.stopped.wait(2.0**attempt):
            raise errors.SourceUnreachable(str(error)) from error

    def _land(self, collection: mongodb.Collection, bounds: mongodb.Range, chunk: ChunkRows) -> None:
        """Commit a chunk, and what follows its cut where the executor had to end it early."""
        while True:
            end = chunk.cut if chunk.cut is not None else bounds.hi
            self._commit(collection, chunk, end)
            if chunk.cut is None or not self._may_read(collection.namespace):
                return
            bounds = mongodb.Range(_as_lo(chunk.cut), bounds.hi)
            chunk = self._read(collection, bounds)

    def _commit(self, collection: mongodb.Collection, chunk: ChunkRows, end: bytes | None) -> None:
        namespace = collection.namespace
        before = self.state.of(namespace)
        sequence = resume_token.snapshot_sequence(*chunk.at)
        after = CollectionState(
            chunks=before.chunks + 1,
            documents=before.documents + chunk.rows.num_rows,
            hi=end,
            first=min(filter(None, (before.first, sequence))),
            completed=end is None,
            sweep=self._is_swept(namespace),
            filter=self._filter(namespace),
        )
        state = self.state.advanced(namespace, after)
        label = f"snapshot:{state.id}:{namespace}:{after.chunks}"
        ts_ms = bronze_table.now_ms()

        def numbered(batch: int, first: int) -> pa.Table:
            rows = snapshot_rows(
                chunk.rows,
                name=self.name,
                collection=collection,
                at=chunk.at,
                label=label,
                batch=batch,
                first_offset=first,
                ts_ms=ts_ms,
                is_last=state.is_done,
                snapshot="incremental" if state.kind is Kind.INCREMENTAL else "true",
            )
            now_token = self._token()
            heartbeat = bronze_table.heartbeat_row(
                state.progress(namespace),
                token=now_token,
                batch=batch,
                offset=first + rows.num_rows,
                ts_ms=ts_ms,
            )
            return pa.concat_tables([rows, heartbeat])

        self.log.append(numbered)
        self.state = state
        self._report(namespace)
        last = None if chunk.rows.num_rows == 0 else chunk.rows.column("key")[-1].as_py()
        if last is not None:
            data = {"current_collection_in_progress": namespace, "last_processed_key": last}
            self.told(notifications.Type.IN_PROGRESS, data)
        if after.completed:
            self._tell_completed(namespace)

    def _is_swept(self, namespace: str) -> bool:
        """Whether documents that a snapshot does not hold are gone: not where it is read in part.

        What took another's place is swept up to that moment, whatever is read of it.
        """
        return self.state.kind is Kind.REPLACED or self._filter(namespace) is None

    def _filter(self, namespace: str) -> str | None:
        """What is read of a collection: what the signal says, else what the settings say."""
        return self.state.conditions.get(namespace) or self.filters.get(namespace)

    def _read(self, collection: mongodb.Collection, bounds: mongodb.Range) -> ChunkRows:
        """Read one chunk on an executor, again where its time was no longer to be had."""
        spec = ChunkSpec(
            self.connection,
            collection,
            bounds,
            (self.after.time, self.after.inc),
            self.fetch_size,
            self.chunk_bytes * 2,
            self._filter(collection.namespace),
            None if self.fields is None else self.fields(collection.db, collection.name),
        )
        for attempt in range(ATTEMPTS):
            reply = self.spark.range(1, numPartitions=1).mapInArrow(functools.partial(read_on_executor, spec), REPLY)
            pieces = reply.toArrow()
            meta = json.loads(pieces["meta"][-1].as_py())
            match meta["outcome"]:
                case "read":
                    return _chunk_rows(meta, pieces["rows"])
                case "changed":
                    raise mongodb.CollectionChanged
                case "refused":
                    raise mongodb.ReadRefused(meta["message"])
                case "expired":
                    spec = replace(spec, max_bytes=max(1, spec.max_bytes // 2))
                    self._wait_behind(_given_up(), attempt)
                case _:
                    error = _error_from(meta)
                    if not isinstance(error, errors.SourceUnreachable):
                        raise error
                    self._wait_behind(error, attempt)
        raise _given_up()

    def _report(self, namespace: str) -> None:
        if self.report is None:
            return
        done, about = self.state.documents, 0
        for name in self.state.planned:
            state = self.state.of(name)
            about += state.documents if state.completed else max(self._about.get(name, 0), state.documents)
        rate = (done - self._at_start) / max(time.monotonic() - self._began, 1e-3)
        left = (about - done) / rate if rate > 0 else None
        state = self.state.of(namespace)
        self.report(
            Progress(
                namespace, state.documents, max(self._about.get(namespace, 0), state.documents), done, about, rate, left
            )
        )


def _size(client: mongodb.Client, collection: mongodb.Collection) -> mongodb.Size:
    """About how large a collection is; one that was dropped meanwhile, or that cannot be measured, is told of where it is read."""
    try:
        return mongodb.size(client, collection)
    except (mongodb.CollectionChanged, mongodb.ReadRefused, mongodb.SnapshotExpired):
        return mongodb.Size(0, 1024)


def _cancel(reads: deque[tuple[mongodb.Range, Future[ChunkRows]]]) -> None:
    """Forget chunks that are asked for; one that is read already is read in vain."""
    while reads:
        reads.popleft()[1].cancel()


def snapshot_rows(
    chunk: pa.Table,
    *,
    name: str,
    collection: mongodb.Collection,
    at: tuple[int, int],
    label: str,
    batch: int,
    first_offset: int,
    ts_ms: int,
    is_last: bool = False,
    snapshot: str = "true",
) -> pa.Table:
    """A chunk's keys and documents as rows of `bronze.SCHEMA`, read at cluster time `at`.

    A key without a document, which only a repair has, is a delete at that time.
    """
    rows = chunk.num_rows

    def constant(value: object, type_: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, type_), rows)

    dbs, names = constant(collection.db, pa.string()), constant(collection.name, pa.string())
    marks = source_block.source_column(
        name=name,
        dbs=dbs,
        collections=names,
        seconds=constant(at[0], pa.int64()),
        ords=constant(_signed32(at[1]), pa.int32()),
        snapshot=snapshot,
        last_snapshot="last" if is_last and snapshot == "true" else None,
    )
    is_gone = chunk.column("after").is_null()
    ops = pc.if_else(is_gone, bronze.Op.DELETE.value, bronze.Op.READ.value)
    columns = {
        "resume_token": constant(label, pa.string()),
        "offset": pa.array(range(first_offset, first_offset + rows), pa.int64()),
        "batch": constant(batch, pa.int64()),
        "kind": constant(bronze.Kind.SNAPSHOT.value, pa.string()),
        "op": ops,
        "db": dbs,
        "collection": names,
        "key": chunk.column("key"),
        "documentKey": pa.nulls(rows, pa.string()),
        "sequence": constant(resume_token.snapshot_sequence(*at), pa.string()),
        "before": pa.nulls(rows, pa.string()),
        "after": chunk.column("after"),
        "updateDescription": pa.nulls(rows, bronze.UPDATE_DESCRIPTION),
        "source": marks,
        "transaction": pa.nulls(rows, bronze.TRANSACTION),
        "payload": chunk.column("payload"),
        "ts_ms": constant(ts_ms, pa.int64()),
    }
    return pa.table(columns, schema=bronze.SCHEMA)


def read_on_executor(spec: ChunkSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on an executor: read one chunk, encode it, and send it back as rows of ``meta, rows``; the last has the meta."""
    for _ in batches:
        pass
    for meta, rows in _read_chunk(spec):
        said = None if meta is None else json.dumps(meta)
        yield pa.RecordBatch.from_pydict(
            {"meta": [said], "rows": [rows]}, pa.schema([("meta", pa.string()), ("rows", pa.binary())])
        )


_Piece = tuple[dict[str, Any] | None, bytes | None]


def _read_chunk(spec: ChunkSpec) -> Iterator[_Piece]:
    try:
        yield from _encoded_chunk(spec)
    except mongodb.SnapshotExpired:
        yield {"outcome": "expired"}, None
    except mongodb.CollectionChanged:
        yield {"outcome": "changed"}, None
    except mongodb.ReadRefused as refused:
        yield {"outcome": "refused", "message": str(refused)}, None
    except errors.MedallionError as error:
        yield {"outcome": "error", "class": type(error).__name__, "message": str(error)}, None
    except Exception as error:  # its text may hold a document
        yield {"outcome": "refused", "message": f"it cannot be read ({type(error).__name__})"}, None


def _encoded_chunk(spec: ChunkSpec) -> Iterator[_Piece]:
    client = source.worker_client(spec.connection)
    found_keys: list[str] = []
    texts: list[bytes | None] = []
    originals: list[bytes | None] = []
    size = sent = lossy = 0
    repaired = repair.keys_of(spec.condition)
    missing = dict.fromkeys(repaired or ())
    at: Timestamp | None = None
    cut: bytes | None = None
    until = time.monotonic() + CHUNK_SECONDS
    for chunk in mongodb.read_chunk(
        client,
        spec.collection,
        spec.bounds,
        after=Timestamp(*spec.after),
        fetch_size=spec.fetch_size,
        condition=_condition(spec),
    ):
        at = chunk.at
        if repaired is None and size and chunk.documents and (size > spec.max_bytes or time.monotonic() > until):
            cut = mongodb.id_as_hi(chunk.documents[0])
            break
        for raw in chunk.documents:
            encoded = extended_json.encode(raw)
            key = keys.canonical_raw(raw)
            found_keys.append(key)
            missing.pop(key, None)
            text = encoded.text if spec.fields is None else raw_event.filtered(encoded.text, fields=spec.fields, taken=set())
            texts.append(text)
            originals.append(raw_event.original(raw, fields=spec.fields) if encoded.lossy else None)
            lossy += encoded.lossy
            size += len(text)
            if size - sent > PIECE_BYTES:
                yield None, _packed(found_keys, texts, originals)
                found_keys, texts, originals, sent = [], [], [], size
    assert at is not None
    found_keys += missing
    texts += [None] * len(missing)
    originals += [None] * len(missing)
    meta = {
        "outcome": "read",
        "at": [at.time, at.inc],
        "bytes": size,
        "lossy": lossy,
        "cut": None if cut is None else cut.hex(),
    }
    yield meta, _packed(found_keys, texts, originals)


def _condition(spec: ChunkSpec) -> Mapping[str, Any] | None:
    """What the chunk's documents match, beside their range."""
    repaired = repair.keys_of(spec.condition)
    if repaired is not None:
        return repair.condition(repaired)
    return None if spec.condition is None else json_util.loads(spec.condition)


def _packed(found_keys: list[str], texts: Sequence[bytes | None], originals: list[bytes | None]) -> bytes:
    rows = pa.record_batch([pa.array(each, pa.string()) for each in (found_keys, texts, originals)], schema=ROWS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()


def _chunk_rows(meta: Mapping[str, Any], pieces: pa.ChunkedArray) -> ChunkRows:
    table = pa.concat_tables(pa.ipc.open_stream(piece.as_buffer()).read_all() for piece in pieces)
    cut = meta["cut"]
    return ChunkRows(
        table, (meta["at"][0], meta["at"][1]), meta["bytes"], meta["lossy"], None if cut is None else bytes.fromhex(cut)
    )


def _given_up() -> mongodb.ReadRefused:
    """One collection that the server cannot read in time is no reason to start the capture over: it would be so for ever."""
    return mongodb.ReadRefused(
        f"the server gave up a chunk of it {ATTEMPTS} times, each smaller; a read of one time lasts 300 seconds "
        "(minSnapshotHistoryWindowInSeconds)"
    )


def _error_from(meta: Mapping[str, Any]) -> errors.MedallionError:
    kind = getattr(errors, meta.get("class", ""), errors.MedallionError)
    return kind(meta.get("message", "an executor could not read a chunk"))


def _as_lo(hi: bytes | None) -> bytes | None:
    """The end of one range as the beginning of the next."""
    return None if hi is None else mongodb.hi_as_lo(hi)


def _signed32(value: int) -> int:
    return value if value < 2**31 else value - 2**32
