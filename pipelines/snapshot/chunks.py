"""One chunk of a snapshot: what an executor is given to read it, and what it sends back.

Executors send a chunk back in pieces, each Arrow in a binary column, so that Spark carries bytes and not rows, and carries
one piece while the next is encoded. A chunk is committed together with the snapshot's progress, in `pipelines.snapshot.snapshot`: after
a kill before that commit it is read once more.
"""

from __future__ import annotations

import builtins
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import raw_event
from cdc_core.extended_json import bson_to_json, query
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.snapshot import key_filter
from cdc_core.stream import fields as field_filters
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures

ROWS = pa.schema([("key", pa.string()), ("after", pa.string()), ("payload", pa.string())])

REPLY = "meta STRING, rows BINARY"
PIECE_BYTES = 1024 * 1024
"""Bytes of documents that an executor sends at once: no JVM has to find room for a whole chunk in one array."""

CHUNK_SECONDS = 120.0
"""A chunk ends after that long, well inside the server's 300 seconds for a snapshot read."""


@dataclass(frozen=True)
class ChunkSpec:
    """What an executor needs to read one chunk."""

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
    """A chunk as the driver gets it; `cut` is the `_id` at which it was ended early, as BSON ``{"hi": _id}``."""

    rows: pa.Table
    at: tuple[int, int]
    bytes: int
    lossy: int
    cut: builtins.bytes | None = None


def read_on_executor(spec: ChunkSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on an executor: read one chunk, encode it, and send it back as rows of ``meta, rows``; the last has the meta."""
    # The one row of the task says nothing: what is to be read is in `spec`.
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
        yield from encoded_chunk(spec)
    # Outcomes are data: an exception of an executor would come as Spark's, with its text and without its class.
    except mongodb_failures.SnapshotExpired:
        yield {"outcome": "expired"}, None
    except mongodb_failures.CollectionChanged:
        yield {"outcome": "changed"}, None
    except mongodb_failures.ReadRefused as refused:
        yield {"outcome": "refused", "message": str(refused)}, None
    except errors.MedallionError as error:
        yield {"outcome": "error", "class": type(error).__name__, "message": str(error)}, None
    except Exception as error:  # its text may hold a document
        yield {"outcome": "refused", "message": f"it cannot be read ({type(error).__name__})"}, None


@dataclass
class _EncodedRows:
    """The rows of a chunk that are still to be sent; `size` and `lossy` are of all that were added."""

    fields: field_filters.FieldRules | None
    keys: list[str] = field(default_factory=list)
    texts: list[bytes | None] = field(default_factory=list)
    originals: list[bytes | None] = field(default_factory=list)
    size: int = 0
    sent: int = 0
    lossy: int = 0

    def add(self, key: str, raw: bytes) -> None:
        """Add a document, as the stream's events are written."""
        encoded = bson_to_json.encode(raw)
        text = encoded.text if self.fields is None else raw_event.filtered(encoded.text, fields=self.fields, taken=set())
        self.keys.append(key)
        self.texts.append(text)
        # Text cannot hold such a document exactly; its bytes come along, without the fields that are left out.
        self.originals.append(raw_event.original(raw, fields=self.fields) if encoded.lossy else None)
        self.lossy += encoded.lossy
        self.size += len(text)

    def add_gone(self, keys: Collection[str]) -> None:
        """Add keys of a repair that the source does not hold: a row without a document is their delete."""
        self.keys += keys
        self.texts += [None] * len(keys)
        self.originals += [None] * len(keys)

    def take(self) -> bytes:
        """The rows, packed; those that are added next are another piece."""
        piece = _packed(self.keys, self.texts, self.originals)
        self.keys, self.texts, self.originals, self.sent = [], [], [], self.size
        return piece


def encoded_chunk(spec: ChunkSpec) -> Iterator[_Piece]:
    """The chunk in pieces, the last with what is to be known of all of it."""
    client = connections.worker_client(spec.connection)
    rows = _EncodedRows(spec.fields)
    missing = dict.fromkeys(filter(key_filter.can_ask, key_filter.keys_of(spec.condition) or ()))
    at: Timestamp | None = None
    cut: bytes | None = None
    # A cursor of a snapshot read dies with its time; a chunk that ends early is committed, and read on at another time.
    until = time.monotonic() + CHUNK_SECONDS
    for chunk in snapshot_read.read_chunk(
        client,
        spec.collection,
        spec.bounds,
        after=Timestamp(*spec.after),
        fetch_size=spec.fetch_size,
        condition=_condition(spec),
    ):
        at = chunk.at
        # Never before the first document, or a chunk could end where it began.
        if rows.size and chunk.documents and (rows.size > spec.max_bytes or time.monotonic() > until):
            cut = snapshot_read.id_as_hi(chunk.documents[0])
            break
        for raw in chunk.documents:
            key = canonical_keys.canonical_raw(raw)
            # What is left in `missing` at the end has no document.
            missing.pop(key, None)
            rows.add(key, raw)
            if rows.size - rows.sent > PIECE_BYTES:
                yield None, rows.take()
    assert at is not None
    # Others of the repair's documents are in another chunk: what is missing from this one may be there.
    if cut is not None:
        missing = {}
    elif missing and spec.bounds.lo is not None:
        # As of this chunk's time at least: a server that is behind it may not have a document that is younger than the other chunk,
        # and whose delete, as of now, would be newer than its insert.
        held = snapshot_read.existing_ids(client, spec.collection, key_filter.condition(missing), after=at)
        existing = {canonical_keys.canonical_raw(raw) for raw in held}
        missing = {key: None for key in missing if key not in existing}
    rows.add_gone(missing)
    meta = {
        "outcome": "read",
        "at": [at.time, at.inc],
        "bytes": rows.size,
        "lossy": rows.lossy,
        "cut": None if cut is None else cut.hex(),
    }
    yield meta, rows.take()


def _condition(spec: ChunkSpec) -> Mapping[str, Any] | None:
    """What the chunk's documents match, beside their range."""
    repaired = key_filter.keys_of(spec.condition)
    if repaired is not None:
        return key_filter.condition(repaired)
    return None if spec.condition is None else query.loads(spec.condition)


def _packed(found_keys: list[str], texts: Sequence[bytes | None], originals: list[bytes | None]) -> bytes:
    rows = pa.record_batch([pa.array(each, pa.string()) for each in (found_keys, texts, originals)], schema=ROWS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()


def chunk_rows(meta: Mapping[str, Any], pieces: pa.ChunkedArray) -> ChunkRows:
    table = pa.concat_tables(pa.ipc.open_stream(piece.as_buffer()).read_all() for piece in pieces)
    cut = meta["cut"]
    return ChunkRows(
        table, (meta["at"][0], meta["at"][1]), meta["bytes"], meta["lossy"], None if cut is None else bytes.fromhex(cut)
    )


def error_of(meta: Mapping[str, Any]) -> errors.MedallionError:
    kind = getattr(errors, meta.get("class", ""), errors.MedallionError)
    return kind(meta.get("message", "an executor could not read a chunk"))
