"""The source's side of a comparison: documents read at a cluster time that is known, as keys and digests of the rows they should be.

Executors read ranges of `_id` and send back a key, 64 bits and the time of the read for each document; documents stay where
they were read. Those few that are looked at closely are read by their keys, on the driver.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import raw_event
from cdc_core.extended_json import bson_to_json, keys
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.snapshot import repair
from cdc_core.stream import fields as field_filters
from cdc_core.stream import resume_token
from cdc_core.verify import equality
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source
from pipelines.mongodb import failures as mongodb_failures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READ = pa.schema([("key", pa.string()), ("digest", pa.int64()), ("seconds", pa.int64()), ("increment", pa.int64())])
READ_DDL = "key STRING, digest BIGINT, seconds BIGINT, increment BIGINT"

RANGE_BYTES = 32 * 1024 * 1024
RANGE_DOCUMENTS = 25_000
RANGE_SECONDS = 60
"""A range is read in about that time at most, well inside the server's 300 seconds for a snapshot read."""
FETCH = 1000
ATTEMPTS = 4
BY_KEY = 500
"""So many documents are read by their keys at once."""

Time = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """How a collection is read, by whoever reads it: what, from when on, how fast, and what its documents should become."""

    connection: source.Connection
    collection: catalog.SourceCollection
    after: Time
    schema: str
    is_exact: bool = False
    fields: field_filters.Fields | None = None
    condition: str | None = None
    documents_per_second: float | None = None

    @property
    def kept_schema(self) -> DocumentSchema:
        """The collection's schema."""
        return DocumentSchema.from_json(self.schema)

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
        """A document as the capture would write it down."""
        text = bson_to_json.encode(raw).text
        if self.fields is not None:
            text = raw_event.filtered(text, fields=self.fields, taken=set())
        return text.decode()


class _Pace:
    """Waits so that no more than so many documents a second are read."""

    def __init__(self, documents_per_second: float | None) -> None:
        self._rate = documents_per_second
        self._began = time.monotonic()
        self._documents = 0

    def after(self, documents: int) -> None:
        self._documents += documents
        if self._rate:
            time.sleep(max(0.0, self._documents / self._rate - (time.monotonic() - self._began)))


def ranges(client: mongodb.Client, reading: Reading, *, threads: int) -> list[snapshot_read.IdRange]:
    """The collection cut into ranges of `_id`, found in its index alone."""
    size = catalog.size(client, reading.collection)
    # At least four ranges a thread, so that no thread is left with a long last one; under 500 documents a read is mostly waiting.
    documents = min(RANGE_DOCUMENTS, RANGE_BYTES // size.average, max(500, size.documents // (4 * threads)))
    if reading.documents_per_second:
        documents = min(documents, int(reading.documents_per_second * RANGE_SECONDS))
    found: list[snapshot_read.IdRange] = []
    lo: bytes | None = None
    while True:
        hi = snapshot_read.boundary(client, reading.collection, lo=lo, documents=max(1, documents))
        found.append(snapshot_read.IdRange(lo, hi))
        if hi is None:
            return found
        # The end of a range is exclusive, and the beginning of the next one inclusive: no `_id` is in two, or in none.
        lo = snapshot_read.hi_as_lo(hi)


def digests(spark: SparkSession, reading: Reading, found: Sequence[snapshot_read.IdRange]) -> DataFrame:
    """Every document of the ranges as a row of `READ`, each range read by one task at a time of its own."""
    read = functools.partial(_read_ranges, reading, tuple(found))
    return spark.range(len(found), numPartitions=len(found)).mapInArrow(read, READ_DDL)


def _read_ranges(
    reading: Reading, found: Sequence[snapshot_read.IdRange], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    schema = reading.kept_schema
    client = source.worker_client(reading.connection)
    pace = _Pace(reading.documents_per_second)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield _read_range(client, reading, found[number], schema, pace)


def _read_range(
    client: mongodb.Client, reading: Reading, bounds: snapshot_read.IdRange, schema: DocumentSchema, pace: _Pace
) -> pa.RecordBatch:
    from bson import json_util

    condition = None if reading.condition is None else json_util.loads(reading.condition)
    for attempt in range(ATTEMPTS):
        # Empty for each attempt: it reads the whole range again, at a later time.
        found: dict[str, list[Any]] = {name: [] for name in READ.names}
        try:
            for chunk in reading.chunk(client, bounds, condition):
                for raw in chunk.documents:
                    found["key"].append(keys.canonical_raw(raw))
                    found["digest"].append(_digest(reading.text(raw), schema))
                    found["seconds"].append(chunk.at.time)
                    found["increment"].append(chunk.at.inc)
                pace.after(len(chunk.documents))
            return pa.RecordBatch.from_pydict(found, schema=READ)
        except mongodb_failures.SnapshotExpired:
            # A time that the user gave cannot be replaced by a later one.
            if reading.is_exact or attempt == ATTEMPTS - 1:
                raise expired(reading) from None
    raise AssertionError("attempts end with a return or an error")


def expired(reading: Reading) -> errors.MedallionError:
    """What is said where the server no longer has a time to read at."""
    name = reading.collection.namespace
    if reading.is_exact:
        return errors.DecisionNeeded(
            f"verifying {name}: the server does not hold the time of --as-of any more (300 seconds by default, "
            "minSnapshotHistoryWindowInSeconds), or not yet; leave --as-of out"
        )
    return errors.SourceUnreachable(f"verifying {name}: the server gave up a range {ATTEMPTS} times; try again")


def _digest(text: str, schema: DocumentSchema) -> int:
    """The digest of the row that a document should be; of one that nobody can read, a number that no row has by intent."""
    try:
        return equality.digest(equality.Document.read(text).expected(schema))
    except (ValueError, RecursionError):
        # Not left out: the key has to be compared, and is then looked at closely.
        return 0


@dataclass(frozen=True)
class SourceDocument:
    """What the source held under a key at a time: a document's text, or None."""

    text: str | None
    at: Time


def by_keys(client: mongodb.Client, reading: Reading, wanted: Sequence[str]) -> dict[str, SourceDocument]:
    """What the source holds under each key, some hundred keys at a time."""
    found: dict[str, SourceDocument] = {}
    pace = _Pace(reading.documents_per_second)
    for start in range(0, len(wanted), BY_KEY):
        some = wanted[start : start + BY_KEY]
        found |= _some_by_keys(client, reading, some)
        pace.after(len(some))
    return found


def _some_by_keys(client: mongodb.Client, reading: Reading, wanted: Sequence[str]) -> dict[str, SourceDocument]:
    for _ in range(ATTEMPTS):
        found: dict[str, SourceDocument] = {}
        at: Time | None = None
        try:
            for chunk in reading.chunk(client, snapshot_read.IdRange(), repair.condition(wanted)):
                at = (chunk.at.time, chunk.at.inc)
                found |= {keys.canonical_raw(raw): SourceDocument(reading.text(raw), at) for raw in chunk.documents}
        except mongodb_failures.SnapshotExpired:
            continue
        assert at is not None
        return {key: found.get(key, SourceDocument(None, at)) for key in wanted}
    raise expired(reading)


def sequence(at: Time) -> str:
    """The sequence of what was read at a time: after every change up to it."""
    return resume_token.snapshot_sequence(*at)


def key_of(document_key: bytes) -> str:
    """The key of a raw document key."""
    return keys.canonical_raw(document_key)


def nothing(at: Time, wanted: Iterable[str]) -> dict[str, SourceDocument]:
    """What a collection that does not exist holds."""
    return dict.fromkeys(wanted, SourceDocument(None, at))
