"""One chunk of a snapshot: how an executor or a helper process reads it, and the format in which it is sent.

Where Spark is local, a helper process reads a chunk into a file, as one Arrow stream, without a Spark job and without the JVM.
Executors send a chunk in pieces, each as Arrow in a binary column, so that Spark transfers bytes and not rows, and one piece while
the next is encoded. A chunk is committed together with the snapshot's progress (`pipelines.snapshot.snapshot`): after a kill before
that commit it is read again.

There is no window in which chunk and stream are compared, as in Debezium's incremental snapshots: both are in bronze, and the row
with the greatest `sequence` of a document counts (`cdc_core.stream.resume_token.snapshot_sequence`, `cdc_core.silver.reduce.latest`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import document_column, raw_event
from cdc_core.extended_json import batch_encoder, query
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.snapshot import key_filter
from cdc_core.stream import fields as field_filters
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures

ROWS = pa.schema([("key", pa.string()), ("after", pa.string()), ("payload", pa.string())])

REPLY = "meta STRING, rows BINARY"
PIECE_BYTES = 1024 * 1024
"""Bytes of documents that an executor sends at once, so that the JVM does not hold a whole chunk in one array."""

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
"""Compressed, because the JVM holds three or four copies of a chunk during its transfer."""

CHUNK_SECONDS = 120.0
"""Seconds after which a chunk is cut, well inside the server's 300 seconds for a snapshot read."""


@dataclass(frozen=True)
class ChunkSpec:
    """What an executor or a helper needs to read one chunk. `after` is a cluster time (seconds, increment)."""

    connection: connections.Connection
    collection: catalog.SourceCollection
    bounds: snapshot_read.IdRange
    after: tuple[int, int]
    fetch_size: int
    max_bytes: int
    condition: str | None = None
    fields: field_filters.FieldRules | None = None


@dataclass(frozen=True)
class ChunkRows:
    """A chunk, with the cluster time of its read; `cut` is the `_id` at which it was cut, as BSON ``{"hi": _id}``."""

    rows: pa.Table
    at: tuple[int, int]
    cut: bytes | None = None


def read_on_executor(spec: ChunkSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read and encode one chunk on an executor; returns it as rows of `REPLY`, of which the last has the outcome in `meta`."""
    # The input has one empty row; `spec` says what to read.
    for _ in batches:
        pass
    for meta, rows in _read_chunk(spec):
        *pieces, last = [None] if rows is None else _packed(rows)
        yield from (_reply(None, piece) for piece in pieces)
        yield _reply(meta, last)


def read_into_file(spec: ChunkSpec, path: str) -> dict[str, Any]:
    """Read one chunk in a helper into an existing file; returns its outcome, which is "unwritten" where the file cannot be written."""
    meta: dict[str, Any] = {}
    try:
        # Not created here: the driver may have given up the chunk, and nobody would remove the file.
        with open(path, "r+b") as file, pa.ipc.new_stream(file, ROWS) as stream:
            for outcome, rows in _read_chunk(spec):
                if rows is not None:
                    stream.write_table(rows)
                meta = outcome or meta
    except OSError as error:
        return {"outcome": "unwritten", "message": str(error)}
    return meta


def _reply(meta: Mapping[str, Any] | None, rows: bytes | None) -> pa.RecordBatch:
    text = None if meta is None else json.dumps(meta)
    return pa.RecordBatch.from_pydict(
        {"meta": [text], "rows": [rows]}, pa.schema([("meta", pa.string()), ("rows", pa.binary())])
    )


_Piece = tuple[dict[str, Any] | None, pa.Table | None]


def _read_chunk(spec: ChunkSpec) -> Iterator[_Piece]:
    try:
        yield from encoded_chunk(spec)
    # Outcomes are data: an exception on an executor would arrive as Spark's, without its class.
    except mongodb_failures.SnapshotExpired:
        yield {"outcome": "expired"}, None
    except mongodb_failures.CollectionChanged:
        yield {"outcome": "changed"}, None
    except mongodb_failures.ReadRefused as refusal:
        yield {"outcome": "refused", "message": str(refusal)}, None
    except errors.MedallionError as error:
        yield {"outcome": "error", "class": type(error).__name__, "message": str(error)}, None
    except Exception as error:  # Named by its class: its text may hold a document.
        yield {"outcome": "refused", "message": f"it cannot be read ({type(error).__name__})"}, None


@dataclass
class _EncodedRows:
    """The rows of a chunk that are not sent yet: `waiting` bytes of BSON; `sent` bytes of text were sent before."""

    fields: field_filters.FieldRules | None
    keys: list[str] = field(default_factory=list)
    documents: list[bytes] = field(default_factory=list)
    gone: int = 0
    waiting: int = 0
    sent: int = 0
    _encoder: batch_encoder.BatchEncoder = field(default_factory=batch_encoder.BatchEncoder)

    def add(self, key: str, raw: bytes) -> None:
        """Add a document."""
        self.keys.append(key)
        self.documents.append(raw)
        self.waiting += len(raw)

    def add_gone(self, keys: Collection[str]) -> None:
        """Add the keys of a repair that the source does not hold, after all documents: a row without a document is a delete."""
        self.keys += keys
        self.gone += len(keys)

    def take(self) -> pa.Table:
        """Remove and return the waiting rows, with documents in the format of the stream's events."""
        texts, lossy = self._encoder.encode(self.documents)
        originals: list[bytes | None] = [None] * len(self.keys)
        # Text cannot represent such a document exactly: its bytes are added, without the excluded fields.
        for place in lossy:
            originals[place] = raw_event.original(self.documents[place], fields=self.fields)
        if self.fields is not None:
            texts = document_column.filtered(texts, fields=self.fields, name_conflicts=set())
        after = pa.chunked_array([*texts.chunks, pa.nulls(self.gone, pa.string())], pa.string())
        rows = pa.table([pa.array(self.keys, pa.string()), after, pa.array(originals, pa.string())], schema=ROWS)
        self.keys, self.documents, self.gone, self.waiting = [], [], 0, 0
        # Text may be four times as large as BSON, and is what uses the memory of a chunk.
        self.sent += texts.nbytes
        return rows


def encoded_chunk(spec: ChunkSpec) -> Iterator[_Piece]:
    """The chunk in pieces; the last one has the outcome."""
    client = connections.worker_client(spec.connection)
    rows = _EncodedRows(spec.fields)
    missing_keys = dict.fromkeys(filter(key_filter.can_ask, key_filter.keys_of(spec.condition) or ()))
    read_time: Timestamp | None = None
    cut: bytes | None = None
    key = ""
    # The server closes a snapshot read after its window; a chunk that is cut is committed, and continued at another cluster time.
    deadline = time.monotonic() + CHUNK_SECONDS
    for chunk in snapshot_read.read_chunk(
        client,
        spec.collection,
        spec.bounds,
        after=Timestamp(*spec.after),
        fetch_size=spec.fetch_size,
        condition=_condition(spec),
    ):
        read_time = chunk.at
        # Never before the first document, or a chunk could be empty and make no progress. Nor between two of one `_id`, which may be on
        # two shards: the next chunk would begin with the first of them again.
        size = rows.sent + rows.waiting
        is_large = size and chunk.documents and (size > spec.max_bytes or time.monotonic() > deadline)
        if is_large and canonical_keys.canonical_raw(chunk.documents[0]) != key:
            cut = snapshot_read.id_as_hi(chunk.documents[0])
            break
        for raw in chunk.documents:
            key = canonical_keys.canonical_raw(raw)
            missing_keys.pop(key, None)
            rows.add(key, raw)
            if rows.waiting > batch_encoder.GROUP_BYTES:
                yield None, rows.take()
    assert read_time is not None
    # After a cut, keys that are missing here may be in the next chunk.
    if cut is not None:
        missing_keys = {}
    elif missing_keys and spec.bounds.lo is not None:
        # At this chunk's time or later: a server behind it may lack a document that was inserted after the first chunk, and the
        # delete of this chunk would be newer than that insert.
        documents = snapshot_read.existing_ids(client, spec.collection, key_filter.condition(missing_keys), after=read_time)
        existing_keys = {canonical_keys.canonical_raw(raw) for raw in documents}
        missing_keys = {key: None for key in missing_keys if key not in existing_keys}
    rows.add_gone(missing_keys)
    yield {"outcome": "read", "at": [read_time.time, read_time.inc], "cut": None if cut is None else cut.hex()}, rows.take()


def _condition(spec: ChunkSpec) -> Mapping[str, Any] | None:
    """The filter of the chunk's documents, beside their range."""
    keys = key_filter.keys_of(spec.condition)
    if keys is not None:
        return key_filter.condition(keys)
    return None if spec.condition is None else query.loads(spec.condition)


def _packed(rows: pa.Table) -> Iterator[bytes]:
    """The rows in pieces of about `PIECE_BYTES`, each as an Arrow stream; one empty piece where there are no rows."""
    piece_rows = max(1, rows.num_rows * PIECE_BYTES // max(1, rows.nbytes))
    for offset in range(0, max(1, rows.num_rows), piece_rows):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, ROWS, options=_COMPRESSED) as writer:
            writer.write_table(rows.slice(offset, piece_rows))
        yield sink.getvalue().to_pybytes()


def unpacked(pieces: pa.ChunkedArray) -> pa.Table:
    """The rows of the pieces that an executor sent."""
    return pa.concat_tables(pa.ipc.open_stream(piece.as_buffer()).read_all() for piece in pieces)


def stored(path: Path) -> pa.Table:
    """The rows of a helper's file, memory-mapped: they stay valid after the file is removed."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def chunk_rows(meta: Mapping[str, Any], rows: pa.Table) -> ChunkRows:
    cut = meta["cut"]
    return ChunkRows(rows, (meta["at"][0], meta["at"][1]), None if cut is None else bytes.fromhex(cut))


def error_of(meta: Mapping[str, Any]) -> errors.MedallionError:
    kind = getattr(errors, meta.get("class", ""), errors.MedallionError)
    return kind(meta.get("message", "an executor could not read a chunk"))
