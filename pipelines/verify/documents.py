"""The source's side of a comparison: documents read at known cluster times, as keys and digests of the rows that they should become.

Executors read ranges of `_id` and return the key, a 64-bit digest and the time of the read for each document. The documents that are looked
at closely are read by their keys, on the driver.
"""

from __future__ import annotations

import functools
import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import raw_event
from cdc_core.extended_json import bson_to_json, query
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.snapshot import key_filter
from cdc_core.stream import fields as field_filters
from cdc_core.verify import equality
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.snapshot import chunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READ = pa.schema(
    [
        ("key", pa.string()),
        ("digest", pa.int64()),
        ("seconds", pa.int64()),
        ("increment", pa.int64()),
        ("error", pa.string()),
    ]
)
READ_DDL = "key STRING, digest BIGINT, seconds BIGINT, increment BIGINT, error STRING"

RANGE_BYTES = 32 * 1024 * 1024
RANGE_DOCUMENTS = 25_000
RANGE_SECONDS = 60
"""The longest time for which a range is planned, well below the server's 300 seconds for a snapshot read."""
FETCH = 1000
ATTEMPTS = 4
PAUSE = 1.0
"""Seconds before the second attempt, doubled for each further one: an election takes seconds."""
BY_KEY = 500
"""How many documents are read by their keys at once."""
LOOK_BYTES = 64 * 1024 * 1024
"""The most bytes of documents in one close look, but for a single larger one: the driver holds them as BSON, as text and as rows."""

Time = tuple[int, int]
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class ReadSpec:
    """How the driver and executors read a collection: the earliest (or, if `is_exact`, the only) time, filters, pace, and the schema.

    Without a `schema`, documents are compared as they are, as in bronze.
    """

    connection: connections.Connection
    collection: catalog.SourceCollection
    after: Time
    schema: str | None
    is_exact: bool = False
    fields: field_filters.FieldRules | None = None
    condition: str | None = None
    documents_per_second: float | None = None

    @property
    def kept_schema(self) -> DocumentSchema | None:
        """The schema, decoded."""
        return None if self.schema is None else DocumentSchema.from_json(self.schema)

    def chunk(
        self, client: mongodb.Client, bounds: snapshot_read.IdRange, condition: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """The batches of one read."""
        yield from snapshot_read.read_chunk(
            client,
            self.collection,
            bounds,
            after=Timestamp(*self.after),
            fetch_size=FETCH,
            condition=condition,
            is_exact=self.is_exact,
        )

    def text(self, raw: bytes) -> str:
        """A document as the capture would encode it."""
        text = bson_to_json.encode(raw).text
        if self.fields is not None:
            text = raw_event.filtered(text, fields=self.fields, name_conflicts=set())
        return text.decode()


class _RateLimit:
    """Limits the documents read per second, by waiting."""

    def __init__(self, documents_per_second: float | None, wait: Callable[[float], object] = time.sleep) -> None:
        self._rate, self._wait = documents_per_second, wait
        self._began = time.monotonic()
        self._documents = 0

    def after(self, documents: int) -> None:
        self._documents += documents
        if self._rate:
            self._wait(max(0.0, self._documents / self._rate - (time.monotonic() - self._began)))


def ranges(client: mongodb.Client, reading: ReadSpec, *, threads: int) -> list[snapshot_read.IdRange]:
    """The collection cut into ranges of `_id`, from the index alone."""
    size = catalog.size(client, reading.collection)
    # At least four ranges per thread, so that no thread has a long last one; a read of less than 500 documents is mostly latency.
    documents = min(RANGE_DOCUMENTS, RANGE_BYTES // size.average, max(500, size.documents // (4 * threads)))
    if reading.documents_per_second:
        # Each thread reads at its share of the pace.
        documents = min(documents, int(reading.documents_per_second / threads * RANGE_SECONDS))
    at_least_one = max(1, documents)
    return [
        *snapshot_read.ranges(lambda lo: snapshot_read.boundary(client, reading.collection, lo=lo, documents=at_least_one))
    ]


def digests(spark: SparkSession, reading: ReadSpec, ranges: Sequence[snapshot_read.IdRange]) -> DataFrame:
    """Every document of the ranges as a row of `READ`; one task per range, which reads at its own time.

    A range that cannot be read gives a row with only `error`, see `error_of`.
    """
    read = functools.partial(_read_ranges, reading, tuple(ranges), uuid.uuid4().hex)
    return spark.range(len(ranges), numPartitions=len(ranges)).mapInArrow(read, READ_DDL)


def error_of(text: str) -> errors.MedallionError:
    """The error of an executor, decoded from the column `error`."""
    return chunks.error_of(json.loads(text))


_failed: dict[str, str] = {}
"""On an executor: the error of the last failed read, by its id, so that its other ranges fail at once."""


def _read_ranges(
    reading: ReadSpec, ranges: Sequence[snapshot_read.IdRange], read: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    schema = reading.kept_schema
    pace = _RateLimit(reading.documents_per_second)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            if read not in _failed:
                try:
                    client = connections.worker_client(reading.connection)
                    yield _read_range(client, reading, ranges[number], schema, pace)
                    continue
                # Returned as data: Spark would replace an executor's exception, with its text but without its class.
                except Exception as error:
                    range_error = failure(reading.collection.namespace, error)
                    _failed.clear()
                    _failed[read] = json.dumps({"class": type(range_error).__name__, "message": str(range_error)})
            yield pa.RecordBatch.from_pylist([{"error": _failed[read]}], schema=READ)


def _read_range(
    client: mongodb.Client, reading: ReadSpec, bounds: snapshot_read.IdRange, schema: DocumentSchema | None, pace: _RateLimit
) -> pa.RecordBatch:
    condition = None if reading.condition is None else query.loads(reading.condition)

    def read() -> pa.RecordBatch:
        # Empty for each attempt, which reads the whole range again at a later time.
        columns: dict[str, list[Any]] = {name: [] for name in READ.names}
        for chunk in reading.chunk(client, bounds, condition):
            for raw in chunk.documents:
                columns["key"].append(canonical_keys.canonical_raw(raw))
                columns["digest"].append(_digest(reading.text(raw), schema))
                columns["seconds"].append(chunk.at.time)
                columns["increment"].append(chunk.at.inc)
                columns["error"].append(None)
            pace.after(len(chunk.documents))
        return pa.RecordBatch.from_pydict(columns, schema=READ)

    return _tried(reading, read)


def _tried(reading: ReadSpec, read: Callable[[], Outcome]) -> Outcome:
    """The result of `read`, which is repeated after a pause if it was interrupted."""
    for attempt in range(ATTEMPTS):
        try:
            return read()
        except (mongodb_failures.SnapshotExpired, errors.SourceUnreachable) as error:
            is_expired = isinstance(error, mongodb_failures.SnapshotExpired)
            # A time that the user gave cannot be replaced by a later one.
            if attempt == ATTEMPTS - 1 or (is_expired and reading.is_exact):
                raise (_expired(reading) if is_expired else error) from None
        time.sleep(PAUSE * 2.0**attempt)
    raise AssertionError("attempts end with a return or an error")


def failure(name: str, error: Exception) -> errors.MedallionError:
    """An error of a collection's comparison as a `MedallionError`; of a foreign one only the class, as its text may quote a document."""
    match error:
        case errors.MedallionError():
            return error
        case mongodb_failures.CollectionChanged():
            return errors.Temporary(f"verifying {name}: it was dropped, renamed or created again during the read; try again")
        case mongodb_failures.SnapshotExpired():
            return errors.Temporary(f"verifying {name}: the server aborted a read; try again")
        case mongodb_failures.ReadRefused():
            return errors.DecisionNeeded(f"verifying {name}: {error}")
    return errors.MedallionError(f"verifying {name}: this is a bug: {type(error).__name__}")


def _expired(reading: ReadSpec) -> errors.MedallionError:
    """The error for a time at which the server cannot read any more."""
    name = reading.collection.namespace
    if reading.is_exact:
        return errors.DecisionNeeded(
            f"verifying {name}: the server no longer has the state at the time of --as-of (it keeps 300 seconds by "
            "default, minSnapshotHistoryWindowInSeconds), or not yet; leave out --as-of"
        )
    return errors.SourceUnreachable(f"verifying {name}: the server aborted a range {ATTEMPTS} times; try again")


def _digest(text: str, schema: DocumentSchema | None) -> int:
    """The digest of the row that a document should become; 0 for an unreadable one, which no row has except by chance."""
    if schema is None:
        return equality.exact_digest(text)
    try:
        return equality.digest(equality.ExactDocument.read(text).expected(schema))
    except (ValueError, RecursionError):
        # Not left out: the key must be compared, and is then looked at closely.
        return 0


@dataclass(frozen=True)
class SourceDocument:
    """The document that the source had for a key at a time: its text, or None for none."""

    text: str | None
    at: Time


def by_keys(
    client: mongodb.Client, reading: ReadSpec, keys: Sequence[str], *, wait: Callable[[float], object] = time.sleep
) -> dict[str, SourceDocument]:
    """The source's document for each key, read in portions; `wait` limits the pace.

    Only for the first keys, at least for one, where the documents of all have more than `LOOK_BYTES`.
    """
    documents: dict[str, SourceDocument] = {}
    pace = _RateLimit(reading.documents_per_second, wait)
    most, size = BY_KEY, 0
    while len(documents) < len(keys):
        portion = next(key_filter.portions(keys[len(documents) :], most=most))
        is_alone = not documents and len(portion) == 1
        try:
            portion_documents, portion_size = _some_by_keys(
                client, reading, portion, room=math.inf if is_alone else LOOK_BYTES - size
            )
        except _Large as large:
            if documents:
                break
            most = max(1, min(large.fitting, len(portion) // 2))
            continue
        documents |= portion_documents
        size += portion_size
        pace.after(len(portion))
    return documents


class _Large(Exception):
    """The documents of some keys have too many bytes: only so many of them, `fitting`, do not."""

    def __init__(self, fitting: int) -> None:
        super().__init__()
        self.fitting = fitting


def _some_by_keys(
    client: mongodb.Client, reading: ReadSpec, keys: Sequence[str], *, room: float
) -> tuple[dict[str, SourceDocument], int]:
    """The documents of these keys, and their bytes. Raises `_Large` where they have more than `room`."""
    valid_keys = [key for key in keys if key_filter.is_key(key)]

    def read() -> tuple[dict[str, SourceDocument], int]:
        documents: dict[str, SourceDocument] = {}
        at: Time | None = None
        size = 0
        for chunk in reading.chunk(client, snapshot_read.IdRange(), key_filter.condition(valid_keys)):
            at = (chunk.at.time, chunk.at.inc)
            for raw in chunk.documents:
                size += len(raw)
                if size > room:
                    raise _Large(len(documents))
                documents[canonical_keys.canonical_raw(raw)] = SourceDocument(reading.text(raw), at)
        assert at is not None
        return {key: documents.get(key, SourceDocument(None, at)) for key in keys}, size

    return _tried(reading, read)


def nothing(at: Time, keys: Iterable[str]) -> dict[str, SourceDocument]:
    """The documents for these keys in a collection that does not exist: None for each."""
    return dict.fromkeys(keys, SourceDocument(None, at))
