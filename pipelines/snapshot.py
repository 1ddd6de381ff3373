"""The snapshot: documents as they are, read in chunks on Spark's executors while the stream is already open.

Each chunk is read at one cluster time that is known, so its rows know which changes they hold, and `sequence` says who
wins: nothing is locked, nothing is written to the source, and no watermark is needed. A chunk's rows and the snapshot's
progress are one bronze commit. A snapshot that was killed goes on behind the last chunk that was committed.

Executors send a chunk back as one value, Arrow in a binary column, so that Spark carries bytes and not rows.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from bson import json_util
from bson.timestamp import Timestamp

from cdc_core import bronze, errors, events, extended_json, field_filters, keys, resume_token
from pipelines import bronze as bronze_table
from pipelines import mongodb, source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = pa.schema([("key", pa.string()), ("after", pa.string())])
REPLY = "meta STRING, rows BINARY"

SMALL_CHUNK = 8 * 1024 * 1024
"""Bytes of documents below which a chunk is not worth a commit of its own."""

CHUNK_SECONDS = 120.0
"""A chunk ends after that long, well inside the server's 300 seconds for a snapshot read."""

ATTEMPTS = 5


@dataclass(frozen=True)
class CollectionState:
    """How far one collection's snapshot is; `hi` is the `_id` before which everything is in bronze."""

    chunks: int = 0
    documents: int = 0
    hi: bytes | None = None
    first: str | None = None
    completed: bool = False
    sweep: bool = True

    def as_json(self) -> dict[str, Any]:
        """The state as a heartbeat's payload holds it."""
        return {
            "chunks": self.chunks,
            "documents": self.documents,
            "hi": None if self.hi is None else extended_json.dumps(self.hi).decode(),
            "first": self.first,
            "completed": self.completed,
            "sweep": self.sweep,
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> CollectionState:
        hi = fields.get("hi")
        return CollectionState(
            chunks=fields["chunks"],
            documents=fields["documents"],
            hi=None if hi is None else extended_json.loads(hi),
            first=fields.get("first"),
            completed=fields["completed"],
            sweep=fields.get("sweep", True),
        )


@dataclass(frozen=True)
class State:
    """One snapshot: which collections it was begun for, and how far each of them is."""

    id: str
    planned: tuple[str, ...] = ()
    collections: Mapping[str, CollectionState] = field(default_factory=dict)
    is_done: bool = False

    def of(self, namespace: str) -> CollectionState:
        return self.collections.get(namespace, CollectionState())

    def begun(self) -> dict[str, Any]:
        """The payload of the heartbeat that begins the snapshot."""
        return {"snapshot": {"id": self.id, "planned": list(self.planned), "collections": {}}}

    def advanced(self, namespace: str, state: CollectionState) -> State:
        collections = {**self.collections, namespace: state}
        is_done = all(collections.get(name, CollectionState()).completed for name in self.planned)
        return replace(self, collections=collections, is_done=is_done)

    def progress(self, namespace: str) -> dict[str, Any]:
        """The payload of the heartbeat that follows a chunk of one collection."""
        state = self.of(namespace).as_json()
        return {"snapshot": {"id": self.id, "collections": {namespace: state}, "done": self.is_done}}

    @staticmethod
    def from_heartbeats(payloads: Sequence[Mapping[str, Any]]) -> State | None:
        """The newest snapshot's state, from all heartbeats that hold a snapshot's progress, in order."""
        state: State | None = None
        for payload in payloads:
            found = payload["snapshot"]
            if state is None or found["id"] != state.id:
                state = State(found["id"], tuple(found.get("planned", ())))
            for namespace, fields in found["collections"].items():
                state = state.advanced(namespace, CollectionState.from_json(fields))
            state = replace(state, is_done=bool(found.get("done")))
        return state


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
    cut: bytes | None = None


@dataclass
class Snapshot:
    """A snapshot in its run: the plan, the pool of chunk reads, and the commits in the order of the plan."""

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

    def run(self) -> State:
        """Read and commit what is missing; the state at its end, which is not done if it was stopped."""
        client = self.connection.client()
        try:
            sizes = {each.namespace: mongodb.size(client, each) for each in self._missing()}
            self._about = {name: size.documents for name, size in sizes.items()}
            self._began, self._at_start = time.monotonic(), self._total()
            if not self._missing() and not self.state.is_done:
                self._finish_empty()
            with ThreadPoolExecutor(self.threads, thread_name_prefix="snapshot") as pool:
                for collection in self._missing():
                    self._collection(pool, client, collection, sizes[collection.namespace])
                    if self.stopped.is_set():
                        break
            self._gone()
        finally:
            client.close()
        return self.state

    def _missing(self) -> list[mongodb.Collection]:
        planned = set(self.state.planned)
        return [
            each
            for each in self.collections
            if each.namespace in planned and not self.state.of(each.namespace).completed
        ]

    def _gone(self) -> None:
        """Collections that were dropped since the plan was made have nothing left to read."""
        if self.stopped.is_set():
            return
        for namespace in self.state.planned:
            if not self.state.of(namespace).completed:
                self._mark_completed(namespace)

    def _finish_empty(self) -> None:
        self.state = replace(self.state, is_done=not self.state.planned)
        if self.state.is_done:
            payload = {"snapshot": {"id": self.state.id, "collections": {}, "done": True}}
            self.log.heartbeat(payload, token=self._token(), ts_ms=bronze_table.now_ms())

    def _mark_completed(self, namespace: str) -> None:
        self.state = self.state.advanced(namespace, replace(self.state.of(namespace), completed=True))
        self.log.heartbeat(self.state.progress(namespace), token=self._token(), ts_ms=bronze_table.now_ms())

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
        ranges = self._ranges(client, collection, documents)
        reads: deque[tuple[mongodb.Range, Future[ChunkRows]]] = deque()
        while not self.stopped.is_set():
            while len(reads) <= self.threads and (bounds := next(ranges, None)) is not None:
                reads.append((bounds, pool.submit(self._read, collection, bounds)))
            if not reads:
                return
            bounds, read = reads.popleft()
            try:
                self._land(collection, bounds, read.result())
            except mongodb.CollectionChanged:
                self._mark_completed(collection.namespace)
                return
            finally:
                if self.stopped.is_set():
                    for _, other in reads:
                        other.cancel()

    def _ranges(
        self, client: mongodb.Client, collection: mongodb.Collection, documents: int
    ) -> Iterator[mongodb.Range]:
        lo = _as_lo(self.state.of(collection.namespace).hi)
        while True:
            hi = mongodb.boundary(client, collection, lo=lo, documents=documents)
            yield mongodb.Range(lo, hi)
            if hi is None:
                return
            lo = _as_lo(hi)

    def _land(self, collection: mongodb.Collection, bounds: mongodb.Range, chunk: ChunkRows) -> None:
        """Commit a chunk, and what follows its cut where the executor had to end it early."""
        while True:
            end = chunk.cut if chunk.cut is not None else bounds.hi
            self._commit(collection, chunk, end)
            if chunk.cut is None or self.stopped.is_set():
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
            sweep=namespace not in self.filters,
        )
        state = self.state.advanced(namespace, after)
        label = f"snapshot:{state.id}:{namespace}:{after.chunks}"
        token, ts_ms = self._token(), bronze_table.now_ms()

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

    def _read(self, collection: mongodb.Collection, bounds: mongodb.Range) -> ChunkRows:
        """Read one chunk on an executor, again where its time was no longer to be had."""
        spec = ChunkSpec(
            self.connection,
            collection,
            bounds,
            (self.after.time, self.after.inc),
            self.fetch_size,
            self.chunk_bytes * 2,
            self.filters.get(collection.namespace),
            None if self.fields is None else self.fields(collection.db, collection.name),
        )
        for _ in range(ATTEMPTS):
            reply = self.spark.range(1, numPartitions=1).mapInArrow(functools.partial(read_on_executor, spec), REPLY)
            answer = reply.toArrow().to_pylist()[0]
            meta = json.loads(answer["meta"])
            match meta["outcome"]:
                case "read":
                    return _chunk_rows(meta, answer["rows"])
                case "changed":
                    raise mongodb.CollectionChanged
                case "expired":
                    spec = replace(spec, max_bytes=max(1, spec.max_bytes // 2))
                case _:
                    raise _error_from(meta)
        raise errors.SourceUnreachable(
            f"the snapshot of {collection.namespace}: the server gave up a chunk {ATTEMPTS} times; "
            "start again, it goes on where it was"
        )

    def _total(self) -> int:
        return sum(state.documents for state in self.state.collections.values())

    def _report(self, namespace: str) -> None:
        if self.report is None:
            return
        done, about = self._total(), 0
        for name in self.state.planned:
            state = self.state.of(name)
            about += state.documents if state.completed else max(self._about.get(name, 0), state.documents)
        rate = (done - self._at_start) / max(time.monotonic() - self._began, 1e-3)
        left = (about - done) / rate if rate > 0 else None
        state = self.state.of(namespace)
        self.report(
            Progress(namespace, state.documents, max(self._about.get(namespace, 0), state.documents), done, about, rate, left)
        )


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
    """A chunk's keys and documents as rows of `bronze.SCHEMA`, read at cluster time `at`."""
    rows = chunk.num_rows

    def constant(value: object, type_: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, type_), rows)

    dbs, names = constant(collection.db, pa.string()), constant(collection.name, pa.string())
    marks = events.source_column(
        name=name,
        dbs=dbs,
        collections=names,
        seconds=constant(at[0], pa.int64()),
        ords=constant(_signed32(at[1]), pa.int32()),
        snapshot=snapshot,
        last_snapshot="last" if is_last else None,
    )
    columns = {
        "resume_token": constant(label, pa.string()),
        "offset": pa.array(range(first_offset, first_offset + rows), pa.int64()),
        "batch": constant(batch, pa.int64()),
        "kind": constant(bronze.Kind.SNAPSHOT.value, pa.string()),
        "op": constant(bronze.Op.READ.value, pa.string()),
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
        "payload": pa.nulls(rows, pa.string()),
        "ts_ms": constant(ts_ms, pa.int64()),
    }
    return pa.table(columns, schema=bronze.SCHEMA)


def read_on_executor(spec: ChunkSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on an executor: read one chunk, encode it, and send it back as one row of ``meta, rows``."""
    for _ in batches:
        pass
    meta, rows = _read_chunk(spec)
    yield pa.RecordBatch.from_pydict({"meta": [json.dumps(meta)], "rows": [rows]}, pa.schema([("meta", pa.string()), ("rows", pa.binary())]))


def _read_chunk(spec: ChunkSpec) -> tuple[dict[str, Any], bytes | None]:
    try:
        return _encoded_chunk(spec)
    except mongodb.SnapshotExpired:
        return {"outcome": "expired"}, None
    except mongodb.CollectionChanged:
        return {"outcome": "changed"}, None
    except errors.MedallionError as error:
        return {"outcome": "error", "class": type(error).__name__, "message": str(error)}, None
    except Exception as error:  # a traceback of an executor helps nobody; its first line does
        first = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"outcome": "error", "class": "", "message": f"a chunk of {spec.collection.namespace}: {first}"}, None


def _encoded_chunk(spec: ChunkSpec) -> tuple[dict[str, Any], bytes]:
    client = source.worker_client(spec.connection)
    found_keys: list[str] = []
    texts: list[bytes] = []
    size = lossy = 0
    at: Timestamp | None = None
    cut: bytes | None = None
    until = time.monotonic() + CHUNK_SECONDS
    for chunk in mongodb.read_chunk(
        client,
        spec.collection,
        spec.bounds,
        after=Timestamp(*spec.after),
        fetch_size=spec.fetch_size,
        condition=None if spec.condition is None else json_util.loads(spec.condition),
    ):
        at = chunk.at
        if texts and chunk.documents and (size > spec.max_bytes or time.monotonic() > until):
            cut = mongodb.id_as_hi(chunk.documents[0])
            break
        for raw in chunk.documents:
            encoded = extended_json.encode(raw)
            found_keys.append(keys.canonical_raw(raw))
            text = encoded.text if spec.fields is None else events.filtered(encoded.text, fields=spec.fields)
            texts.append(text)
            lossy += encoded.lossy
            size += len(text)
    assert at is not None
    table = pa.table({"key": pa.array(found_keys, pa.string()), "after": pa.array(texts, pa.string())}, schema=ROWS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS) as writer:
        writer.write_table(table)
    meta = {
        "outcome": "read",
        "at": [at.time, at.inc],
        "bytes": size,
        "lossy": lossy,
        "cut": None if cut is None else cut.hex(),
    }
    return meta, sink.getvalue().to_pybytes()


def _chunk_rows(meta: Mapping[str, Any], rows: bytes) -> ChunkRows:
    with pa.ipc.open_stream(rows) as reader:
        table = reader.read_all()
    cut = meta["cut"]
    return ChunkRows(
        table, (meta["at"][0], meta["at"][1]), meta["bytes"], meta["lossy"], None if cut is None else bytes.fromhex(cut)
    )


def _error_from(meta: Mapping[str, Any]) -> errors.MedallionError:
    kind = getattr(errors, meta.get("class", ""), errors.MedallionError)
    return kind(meta.get("message", "an executor could not read a chunk"))


def _as_lo(hi: bytes | None) -> bytes | None:
    """The end of one range as the beginning of the next."""
    return None if hi is None else mongodb.hi_as_lo(hi)


def _signed32(value: int) -> int:
    return value if value < 2**31 else value - 2**32
