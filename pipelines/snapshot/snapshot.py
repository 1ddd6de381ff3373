"""The snapshot: reads existing documents in chunks while the stream is open.

Each chunk is read at one known cluster time. Its `sequence` orders its rows among the changes, so that nothing is locked, nothing is
written to the source, and no watermark is needed. A chunk's rows and the snapshot's progress are one bronze commit. A snapshot
that was killed resumes after the last committed chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cdc_core.bronze import event_rows as events
from cdc_core.signals import notification as notifications
from cdc_core.snapshot import key_filter
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from cdc_core.stream import resume_token
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.snapshot import bronze_rows, chunk_reader, chunks
from pipelines.snapshot.controls import SnapshotControls

log = logging.getLogger(__name__)

SMALL_CHUNK = 8 * 1024 * 1024
"""The least bytes of documents for which a collection is divided into chunks."""


@dataclass(frozen=True)
class SnapshotProgress:
    """The progress of a snapshot: documents read and their approximate number, of one collection and of all; `rate` is per second."""

    collection: str
    documents: int
    about: int
    total_documents: int
    total_about: int
    rate: float
    seconds_left: float | None


@dataclass
class DocumentCounts:
    """Counts the documents read, by collection and in all; `about` are the approximate sizes, `at_start` the documents of earlier runs.

    The sums are updated and not computed for each chunk, which would be slow with thousands of collections.
    """

    about: Mapping[str, int]
    at_start: int = 0
    _began: float = field(default_factory=time.monotonic)
    _counted: dict[str, tuple[int, int]] = field(default_factory=dict)
    _read: int = 0
    _all: int = 0

    def count(self, namespace: str, state: CollectionState) -> None:
        """Update the counts of a collection."""
        read_before, all_before = self._counted.get(namespace, (0, 0))
        documents_read, documents_total = state.documents, state.documents if state.completed else self._of(namespace, state)
        self._counted[namespace] = documents_read, documents_total
        self._read += documents_read - read_before
        self._all += documents_total - all_before

    def progress(self, namespace: str, state: CollectionState) -> SnapshotProgress:
        """The progress of the snapshot, and of a collection in this state."""
        rate = (self._read - self.at_start) / max(time.monotonic() - self._began, 1e-3)
        seconds_left = (self._all - self._read) / rate if rate > 0 else None
        estimate = self._of(namespace, state)
        return SnapshotProgress(namespace, state.documents, estimate, self._read, self._all, rate, seconds_left)

    def _of(self, namespace: str, state: CollectionState) -> int:
        return max(self.about.get(namespace, 0), state.documents)


Notify = Callable[[notifications.NotificationType, Mapping[str, str]], None]
"""``(type, additional data)`` of a notification: called by the snapshot's thread, between its commits."""


@dataclass
class Snapshot:
    """A running snapshot: reads chunks in `threads` threads, and commits them in the order of the plan.

    `documents_max` limits a chunk in addition to the reader's `chunk_bytes`. Collections that the settings now exclude (`left_out`)
    are not read and stay in the plan: they are continued when the settings include them again.
    """

    log: bronze_log.BronzeLog
    name: str
    reader: chunk_reader.ChunkReader
    collections: Sequence[catalog.SourceCollection]
    state: SnapshotState
    threads: int
    filters: Mapping[str, str] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    report: Callable[[SnapshotProgress], None] | None = None
    controls: SnapshotControls = field(default_factory=SnapshotControls)
    documents_max: int | None = None
    left_out: Collection[str] = ()
    notify: Notify = lambda what, data: None
    has_paused: bool = False
    """Whether it ended because it was paused; after a resume another `Snapshot` continues from its state."""
    _documents: DocumentCounts = field(init=False, default_factory=lambda: DocumentCounts({}))
    _maximum_key: str | None = field(init=False, default=None)
    """The key of the current collection's last document when its read began, for notifications."""

    def run(self) -> SnapshotState:
        """Read and commit what is missing; returns the state, which is not done where the snapshot was stopped or paused."""
        client = self.reader.connection.client()
        try:
            missing_collections = self._missing()
            # All sizes before the first chunk: progress covers the whole snapshot.
            sizes = {each.namespace: self.reader.size(client, each) for each in missing_collections}
            self._documents = DocumentCounts({name: size.documents for name, size in sizes.items()}, self.state.documents)
            for name in self.state.planned:
                self._documents.count(name, self.state.of(name))
            self._complete_dropped({each.namespace for each in missing_collections})
            # Empty collections first: the last row of the last chunk is marked as the snapshot's last.
            missing_collections.sort(key=lambda each: sizes[each.namespace].documents > 0)
            with ThreadPoolExecutor(self.threads, thread_name_prefix="snapshot") as pool:
                for collection in missing_collections:
                    if self._may_read(collection.namespace):
                        self._collection(pool, client, collection, sizes[collection.namespace])
        finally:
            mongodb.close(client)
        return self.state

    def _missing(self) -> list[catalog.SourceCollection]:
        namespaces = set(self.state.missing)
        return [collection for collection in self.collections if collection.namespace in namespaces]

    def _may_read(self, namespace: str) -> bool:
        """Whether the collection may be read further; False for all once the snapshot was paused in this run."""
        self.state = self.state.without(self.controls.stopped)
        is_missing = not self.stopped.is_set() and self.state.misses(namespace)
        self.has_paused = self.has_paused or (is_missing and self.controls.is_paused)
        return is_missing and not self.has_paused

    def _complete_dropped(self, read: Collection[str]) -> None:
        """Complete the planned collections that do not exist any more."""
        for namespace in self.state.missing:
            if namespace not in read and namespace not in self.left_out and self._may_read(namespace):
                self._mark_completed(namespace)

    def _mark_completed(self, namespace: str) -> None:
        """Mark a collection that does not exist any more as completed. Where a part of it was read, nothing is swept: the event
        of its drop or rename removes its rows."""
        state = self.state.of(namespace)
        final_state = replace(state, completed=True, sweep=state.sweep and not state.chunks, is_gone=True)
        self.state = self.state.advanced(namespace, final_state)
        self._documents.count(namespace, final_state)
        self.log.heartbeat(self.state.progress(namespace), token=self._token(), ts_ms=clock.now_ms())
        self._notify_completed(namespace)

    def _mark_failed(self, namespace: str, reason: str) -> None:
        """Mark a collection as failed; the stream and the other collections continue."""
        # In bronze: `status` names it, and the next start knows that it is unfinished.
        self.state = self.state.advanced(namespace, replace(self.state.of(namespace), failed=reason))
        self.log.heartbeat(self.state.progress(namespace), token=self._token(), ts_ms=clock.now_ms())
        log.error("the snapshot of %s failed: %s. The stream continues. %s", namespace, reason, self._advice(namespace))
        documents = str(self.state.of(namespace).documents)
        data = {
            "scanned_collection": namespace,
            "status": "SQL_EXCEPTION",
            "total_rows_scanned": documents,
            "reason": reason,
        }
        self.notify(notifications.NotificationType.TABLE_SCAN_COMPLETED, data)

    def _advice(self, namespace: str) -> str:
        """The advice for a collection that could not be read."""
        if self.state.kind in (SnapshotKind.INCREMENTAL, SnapshotKind.BLOCKING):
            what = "the signal's filter" if namespace in self.state.conditions else "the collection"
            return f"Look at {what}, and send the signal again"
        where = "source.snapshot.collection.filter.overrides" if self._filter(namespace) else "the collection"
        return f"Look at {where}: the next start tries it again"

    def _notify_completed(self, namespace: str) -> None:
        state = self.state.of(namespace)
        status = {"status": "SUCCEEDED" if state.documents else "EMPTY", "total_rows_scanned": str(state.documents)}
        self.notify(notifications.NotificationType.TABLE_SCAN_COMPLETED, {"scanned_collection": namespace, **status})

    def _token(self) -> str:
        position = self.log.position
        assert position is not None, "a snapshot begins with a heartbeat"
        return position.token

    def _collection(
        self,
        pool: ThreadPoolExecutor,
        client: mongodb.Client,
        collection: catalog.SourceCollection,
        size: catalog.CollectionSize,
    ) -> None:
        # Four chunks per thread, so that all threads have work to the end; not more, because each takes a commit.
        share_bytes = max(SMALL_CHUNK, size.documents * size.average // (4 * self.threads))
        # A row takes memory beside its document: small documents count as in a commit of the stream.
        max_documents = self.reader.chunk_bytes // max(size.average, events.ROW_BYTES)
        # At least one: a single document may be larger than `chunk_bytes`.
        documents = max(1, min(max_documents, share_bytes // size.average))
        self._restart_where_filter_changed(collection.namespace)
        is_incremental = self.state.kind is SnapshotKind.INCREMENTAL
        self._maximum_key = self.reader.maximum_key(client, collection) if is_incremental else None
        reads: deque[tuple[snapshot_read.IdRange, Future[chunks.ChunkRows]]] = deque()
        try:
            self._read_to_end(pool, client, collection, documents, size.documents, reads)
        except mongodb_failures.ReadRefused as refused:
            self._mark_failed(collection.namespace, str(refused))
        finally:
            _cancel(reads)

    def _restart_where_filter_changed(self, namespace: str) -> None:
        """Restart a collection that an earlier run has read in part with another filter."""
        state = self.state.of(namespace)
        if state.chunks and state.filter != self._filter(namespace):
            # Documents that the other filter let through are read again, which changes nothing.
            new_state = replace(state, hi=None, documents=0, sweep=True)
            self.state = self.state.advanced(namespace, new_state)
            self._documents.count(namespace, new_state)

    def _read_to_end(
        self,
        pool: ThreadPoolExecutor,
        client: mongodb.Client,
        collection: catalog.SourceCollection,
        documents: int,
        size: int,
        reads: deque[tuple[snapshot_read.IdRange, Future[chunks.ChunkRows]]],
    ) -> None:
        ranges = self._ranges(client, collection, documents, size)
        changes = 0
        while self._may_read(collection.namespace):
            try:
                # One more than the threads, so that none is idle while the oldest chunk is committed.
                while len(reads) <= self.threads and (bounds := next(ranges, None)) is not None:
                    reads.append((bounds, pool.submit(self._read, collection, bounds)))
                if not reads:
                    return
                # In order, whichever read ends first: everything before `hi` must be in bronze.
                bounds, future = reads.popleft()
                self._land(collection, bounds, future.result())
                changes = 0
            except (mongodb_failures.CollectionChanged, mongodb_failures.ReadRefused) as error:
                _cancel(reads)
                new_collection = self._current_collection(client, collection)
                # A view or a capped collection in its place: the server then refuses the read as such (errors 168 and 246).
                is_other = new_collection is None or new_collection.uuid != collection.uuid
                if isinstance(error, mongodb_failures.ReadRefused) and not is_other:
                    raise
                if new_collection is None:
                    self._mark_completed(collection.namespace)
                    return
                # Limited in a row: a collection that cannot be read by its name would be tried for ever.
                self.reader.wait_behind(_changed_too_often(), changes)
                changes += 1
                collection = new_collection
                ranges = self._ranges(client, collection, documents, size)

    def _current_collection(
        self, client: mongodb.Client, collection: catalog.SourceCollection
    ) -> catalog.SourceCollection | None:
        """The collection that has the name now, if any: created again, or resharded, for which the stream has no event."""
        collections = catalog.collections(client, [collection.db])
        return next((each for each in collections if each.name == collection.name and each.kind == collection.kind), None)

    def _ranges(
        self, client: mongodb.Client, collection: catalog.SourceCollection, documents: int, size: int
    ) -> Iterator[snapshot_read.IdRange]:
        if key_filter.keys_of(self._filter(collection.namespace)) is not None:
            yield snapshot_read.IdRange()  # All keys of a repair in one read: a missing document is deleted.
            return
        behind, small = self.state.of(collection.namespace).hi, min(documents, self.documents_max or documents)
        for number, bounds in enumerate(self.reader.ranges(client, collection, behind=behind, documents=small), 1):
            yield bounds
            # Documents may be inserted faster than small chunks are read: behind those of the start, chunks have their full size.
            if small < documents and size < number * small and bounds.hi is not None:
                yield from self.reader.ranges(client, collection, behind=bounds.hi, documents=documents)
                return

    def _read(self, collection: catalog.SourceCollection, bounds: snapshot_read.IdRange) -> chunks.ChunkRows:
        return self.reader.read(collection, bounds, condition=self._filter(collection.namespace))

    def _land(self, collection: catalog.SourceCollection, bounds: snapshot_read.IdRange, chunk: chunks.ChunkRows) -> None:
        """Commit a chunk, and where it was cut, read and commit the rest of its range."""
        while True:
            end = chunk.cut if chunk.cut is not None else bounds.hi
            self._commit(collection, chunk, end)
            if chunk.cut is None or not self._may_read(collection.namespace):
                return
            bounds = snapshot_read.IdRange(snapshot_read.hi_as_lo(chunk.cut), bounds.hi)
            chunk = self._read(collection, bounds)

    def _commit(self, collection: catalog.SourceCollection, chunk: chunks.ChunkRows, end: bytes | None) -> None:
        namespace = collection.namespace
        before, filter_ = self.state.of(namespace), self._filter(namespace)
        after = _with_chunk(before, chunk, end=end, is_swept=self._is_swept(namespace), filter_=filter_)
        state = self.state.advanced(namespace, after)
        label = f"snapshot:{state.id}:{namespace}:{after.chunks}"
        ts_ms = clock.now_ms()

        def numbered(batch: int, first: int) -> pa.Table:
            rows = bronze_rows.snapshot_rows(
                chunk.rows,
                name=self.name,
                collection=collection,
                at=chunk.at,
                label=label,
                batch=batch,
                first_offset=first,
                ts_ms=ts_ms,
                is_last=state.is_done,
                snapshot="incremental" if state.kind is SnapshotKind.INCREMENTAL else "true",
            )
            # The current token: the stream commits as well, and the position never goes back.
            now_token = self._token()
            heartbeat = bronze_log.heartbeat_row(
                state.progress(namespace),
                token=now_token,
                batch=batch,
                offset=first + rows.num_rows,
                ts_ms=ts_ms,
            )
            return pa.concat_tables([rows, heartbeat])

        # One commit of rows and progress: after a kill between two, the chunk would be read twice, or not at all.
        self.log.append(numbered)
        # After the commit: if it fails, the state stays as in bronze, and the chunk is read again.
        self.state = state
        self._report(namespace)
        last_key = None if chunk.rows.num_rows == 0 else chunk.rows.column("key")[-1].as_py()
        if last_key is not None:
            data = {"current_collection_in_progress": namespace, "last_processed_key": last_key}
            data |= {"maximum_key": self._maximum_key} if self._maximum_key is not None else {}
            self.notify(notifications.NotificationType.IN_PROGRESS, data)
        if after.completed:
            self._notify_completed(namespace)

    def _is_swept(self, namespace: str) -> bool:
        """Whether silver sweeps the documents that the snapshot does not hold: not where it has a filter.

        A replaced collection is always swept, up to the moment of its replacement.
        """
        return self.state.kind is SnapshotKind.REPLACED or self._filter(namespace) is None

    def _filter(self, namespace: str) -> str | None:
        """The filter of a collection: the signal's, else the settings'."""
        return self.state.conditions.get(namespace) or self.filters.get(namespace)

    def _report(self, namespace: str) -> None:
        state = self.state.of(namespace)
        self._documents.count(namespace, state)
        if self.report is not None:
            self.report(self._documents.progress(namespace, state))


def _with_chunk(
    before: CollectionState, chunk: chunks.ChunkRows, *, end: bytes | None, is_swept: bool, filter_: str | None
) -> CollectionState:
    """The state of a collection after the commit of a chunk that ends at `end` (None: the collection's end)."""
    sequence = resume_token.snapshot_sequence(*chunk.at)
    return CollectionState(
        chunks=before.chunks + 1,
        documents=before.documents + chunk.rows.num_rows,
        hi=end,
        # The earliest chunk's: a later sequence would sweep that chunk's rows.
        first=min(filter(None, (before.first, sequence))),
        completed=end is None,
        sweep=is_swept,
        filter=filter_,
    )


def _changed_too_often() -> mongodb_failures.ReadRefused:
    return mongodb_failures.ReadRefused(
        f"{chunk_reader.ATTEMPTS} times the server had another collection under its name than it had listed (error 361)"
    )


def _cancel(reads: deque[tuple[snapshot_read.IdRange, Future[chunks.ChunkRows]]]) -> None:
    """Cancel the pending reads; nothing of them is committed."""
    while reads:
        reads.popleft()[1].cancel()
