"""Reads a collection for a snapshot: its size, the bounds of its chunks, and the chunks, with retries."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.extended_json import keys as canonical_keys
from pipelines import helper_processes
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.snapshot import chunks
from pipelines.spark import scratch
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

ATTEMPTS = 5
"""With 1, 2, 4 and 8 seconds between them: longer than an election takes."""


_HELPERS = helper_processes.HelperProcesses(2 * helper_processes.cores())
"""Threads beyond this number read their chunks by Spark's workers."""

HELPER_SECONDS = 5 * chunks.CHUNK_SECONDS
"""Seconds after which a helper is given up: it was stopped, or waits for a server that does not answer."""


@dataclass(frozen=True)
class ChunkReader:
    """Reads the source for a snapshot: each chunk at a cluster time at or after `after`, on an executor, or in a helper process where
    Spark is local. `chunk_bytes` is half of the size at which a chunk is cut."""

    spark: SparkSession
    connection: connections.Connection
    after: Timestamp
    chunk_bytes: int
    fetch_size: int = 0
    fields: events.FieldsOf | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    on_driver: threading.Event = field(default_factory=threading.Event)
    """Set where executors do not reach the source."""
    without_helpers: threading.Event = field(default_factory=threading.Event)
    """Set where helper processes cannot read chunks: one was killed, or could not write its file."""

    def size(self, client: mongodb.Client, collection: catalog.SourceCollection) -> catalog.CollectionSize:
        """The approximate size of the collection; retries after temporary errors."""
        return self._with_retries(lambda: _size_of(client, collection))

    def maximum_key(self, client: mongodb.Client, collection: catalog.SourceCollection) -> str | None:
        """The key of the last document as of now; None where there is none. Retries after temporary errors."""
        return self._with_retries(lambda: _maximum_key_of(client, collection))

    def ranges(
        self, client: mongodb.Client, collection: catalog.SourceCollection, *, behind: bytes | None, documents: int
    ) -> Iterator[snapshot_read.IdRange]:
        """Ranges of `documents` each, from the `_id` `behind` on; each is planned when it is needed. Retries after temporary errors."""

        def boundary(lo: bytes | None) -> bytes | None:
            return self._with_retries(lambda: snapshot_read.boundary(client, collection, lo=lo, documents=documents))

        return snapshot_read.ranges(boundary, None if behind is None else snapshot_read.hi_as_lo(behind))

    def _with_retries(self, ask: Callable[[], Outcome]) -> Outcome:
        """The result of a request, which is retried after temporary errors."""
        for attempt in range(ATTEMPTS):
            try:
                return ask()
            except mongodb_failures.SnapshotExpired:
                self.wait_behind(_too_slow(), attempt)
            except errors.SourceUnreachable as error:
                if mongodb_failures.has_lost_connection(error):
                    raise  # The capture restarts, limited by errors.max.retries.
                self.wait_behind(error, attempt)
        raise _too_slow()

    def read(
        self, collection: catalog.SourceCollection, bounds: snapshot_read.IdRange, *, condition: str | None
    ) -> chunks.ChunkRows:
        """Read one chunk; retries after temporary errors.

        Raises `CollectionChanged`, `ReadRefused`, or one of `errors`.
        """
        spec = chunks.ChunkSpec(
            self.connection,
            collection,
            bounds,
            (self.after.time, self.after.inc),
            self.fetch_size,
            # A range may hold larger documents than the average by which it was planned: it is cut above this size.
            self.chunk_bytes * 2,
            condition,
            None if self.fields is None else self.fields(collection.db, collection.name),
        )
        for attempt in range(ATTEMPTS):
            rows, meta = self._reply(spec)
            match meta["outcome"]:
                case "read":
                    return chunks.chunk_rows(meta, rows)
                case "changed":
                    raise mongodb_failures.CollectionChanged
                case "refused":
                    raise mongodb_failures.ReadRefused(meta["message"])
                case "expired":
                    # The snapshot read outlived its cluster time: a smaller chunk takes less time.
                    spec = replace(spec, max_bytes=max(1, spec.max_bytes // 2))
                    self.wait_behind(_too_slow(), attempt)
                case _:
                    error = chunks.error_of(meta)
                    if not isinstance(error, errors.SourceUnreachable):
                        raise error
                    self.wait_behind(error, attempt)
        raise _too_slow()

    def _reply(self, spec: chunks.ChunkSpec) -> tuple[pa.Table, dict[str, Any]]:
        """The rows and the outcome of one attempt: by a helper, by an executor, or here where only executors do not reach the source."""
        is_here = self.on_driver.is_set() or sparks.is_local(self.spark)
        if is_here and (reply := self._by_helper(spec)) is not None:
            return reply
        read_chunk = functools.partial(chunks.read_on_executor, spec)
        if not self.on_driver.is_set():
            # One row, one task: the executor's Python reads the chunk, and its documents pass through the JVM as bytes only.
            rows, meta = _sent(self.spark.range(1, numPartitions=1).mapInArrow(read_chunk, chunks.REPLY).toArrow())
            is_unreachable = meta["outcome"] == "error" and isinstance(chunks.error_of(meta), errors.SourceUnreachable)
            if sparks.is_classic(self.spark) or not is_unreachable:
                return rows, meta
        rows, meta = _sent(pa.Table.from_batches(read_chunk(iter(()))))
        if meta["outcome"] == "read" and not self.on_driver.is_set():
            log.warning("the executors cannot reach MongoDB: reading snapshots in helper processes of the capture instead")
            self.on_driver.set()
        return rows, meta

    def _by_helper(self, spec: chunks.ChunkSpec) -> tuple[pa.Table, dict[str, Any]] | None:
        """The rows and the outcome of a chunk that a helper reads into a temporary file; None where no helper can read it."""
        if self.without_helpers.is_set():
            return None
        try:
            with _chunk_file() as path, _HELPERS.borrowed(1) as helpers:
                for helper in helpers:
                    arguments = spec, str(path)
                    meta, _ = helper.call(_read_into_file, arguments, stopped=self.stopped, seconds=HELPER_SECONDS)
                    if meta["outcome"] != "unwritten":
                        return (chunks.stored(path) if meta["outcome"] == "read" else chunks.ROWS.empty_table()), meta
                    raise OSError(meta["message"])
        except (OSError, helper_processes.HelperGone) as error:
            # Do not fall back to a read that may never end: the threads that read chunks delay the end of the process.
            if self.stopped.is_set():
                raise errors.SourceUnreachable("the capture ends; a chunk was not read") from error
            log.warning(
                "a helper process that reads a chunk into a file below %s failed: %s. This and the following chunks are "
                "read without helpers",
                tempfile.gettempdir(),
                error,
            )
            self.without_helpers.set()
        return None

    def wait_behind(self, error: errors.SourceUnreachable | mongodb_failures.ReadRefused, attempt: int) -> None:
        """Wait before the next attempt, longer each time: elections, locks and full pools take seconds.

        Raises the error after the last attempt, and `SourceUnreachable` where the capture ends during the wait.
        """
        if attempt == ATTEMPTS - 1:
            raise error
        if self.stopped.wait(2.0**attempt):
            raise errors.SourceUnreachable(str(error)) from error


@contextlib.contextmanager
def _chunk_file() -> Iterator[Path]:
    """A temporary file for one chunk, removed after the block."""
    path = scratch.folder() / f"chunk-{uuid.uuid4().hex}-{os.getpid()}.arrow"
    try:
        path.touch(mode=0o600)
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_into_file(arguments: tuple[chunks.ChunkSpec, str], _: pa.RecordBatch | None) -> tuple[dict[str, Any], None]:
    """Runs in a helper."""
    return chunks.read_into_file(*arguments), None


def _sent(reply: pa.Table) -> tuple[pa.Table, dict[str, Any]]:
    """The rows and the outcome of an executor's reply."""
    meta: dict[str, Any] = json.loads(reply["meta"][-1].as_py())
    return (chunks.unpacked(reply["rows"]) if meta["outcome"] == "read" else chunks.ROWS.empty_table()), meta


def _size_of(client: mongodb.Client, collection: catalog.SourceCollection) -> catalog.CollectionSize:
    """The approximate size of a collection; one that was dropped or cannot be measured counts as empty: its read raises the error."""
    try:
        return catalog.size(client, collection)
    except (mongodb_failures.CollectionChanged, mongodb_failures.ReadRefused, mongodb_failures.SnapshotExpired):
        return catalog.CollectionSize(0, 1024)


def _maximum_key_of(client: mongodb.Client, collection: catalog.SourceCollection) -> str | None:
    try:
        document = snapshot_read.greatest(client, collection)
    except (mongodb_failures.CollectionChanged, mongodb_failures.ReadRefused, mongodb_failures.SnapshotExpired):
        return None  # the read of its documents raises the error
    return None if document is None else canonical_keys.canonical_raw(document)


def _too_slow() -> mongodb_failures.ReadRefused:
    """The error for a chunk that the server cannot read in time. Not temporary: the capture would restart for ever."""
    return mongodb_failures.ReadRefused(
        f"the server gave up a chunk of it {ATTEMPTS} times, each smaller; a read of one time lasts 300 seconds "
        "(minSnapshotHistoryWindowInSeconds), and needs a server that is not behind it (error 72)"
    )
