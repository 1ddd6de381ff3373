"""Reads the events of the next range while this process applies one, which leaves a core idle now and then; and those of the first range
while the table is being claimed, which waits for the JVM."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from cdc_core.bronze.batch_range import BatchRange
from pipelines.bronze import collection_events, survey

AHEAD_BYTES = 2 * collection_events.PORTION_BYTES
"""The most bytes of documents that are held for the next range, beside those of the one that is applied."""

Read: TypeAlias = "Callable[..., pa.Table | None]"
"""Called with a range, columns and perhaps `size_bytes`: the range's events, or None if they cannot be read or are larger."""


class _NextRange(NamedTuple):
    """A range whose events are being read, with these columns."""

    range_: BatchRange
    columns: Sequence[str]
    events: Future[pa.Table | None]


class ReadAhead:
    """Reads one collection's ranges; a range that is expected is read in advance."""

    def __init__(self, counts: survey.EventsByBatch | None = None) -> None:
        self._next: BatchRange | None = None
        self._pending: _NextRange | None = None
        self.counts = counts
        """The number of events per batch of the current work, if known before the table is claimed."""

    def expect(self, range_: BatchRange | None) -> None:
        """Set the range that follows the next one to be read; None for none."""
        self._next = range_

    def forget(self) -> None:
        """Expect nothing, and release what was read in advance."""
        self._next = self._pending = self.counts = None

    def begin(self, range_: BatchRange, columns: Sequence[str], read: Read) -> None:
        """Start to read this range in a thread."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="medallion-ahead")
        # With the caller's context, as in `parallel.Pool`.
        events = pool.submit(contextvars.copy_context().run, read, range_, columns)
        self._pending = _NextRange(range_, columns, events)
        pool.shutdown(wait=False)

    def events(self, range_: BatchRange, columns: Sequence[str], read: Read) -> pa.Table | None:
        """The range's events, by `read`; then starts to read those of the expected range, if they take at most `AHEAD_BYTES`."""
        pending, self._pending = self._pending, None
        events = None
        if pending is not None and (pending.range_, pending.columns) == (range_, columns):
            events = pending.events.result()
        if events is None:
            events = read(range_, columns)
        if events is not None and self._next is not None:
            self.begin(self._next, columns, functools.partial(read, size_bytes=AHEAD_BYTES))
        return events
