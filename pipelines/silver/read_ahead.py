"""The events of the next range, read while this process applies one: typing and folding leave a core idle now and then. And those of
the first one, while the table is claimed: that waits for the JVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdc_core.bronze.batch_range import BatchRange

if TYPE_CHECKING:
    import pyarrow as pa

    from pipelines.bronze import survey

Read: TypeAlias = "Callable[..., pa.Table | None]"
"""Reads a range's events, with these columns and of at most `size_bytes`; None where it cannot."""


class _NextRange(NamedTuple):
    """A range that is being read, with these columns."""

    range_: BatchRange
    columns: Sequence[str]
    events: Future[pa.Table | None]


class ReadAhead:
    """Reads one collection's ranges, each before it is asked for where it is expected."""

    def __init__(self, counts: survey.EventsByBatch | None = None) -> None:
        self._next: BatchRange | None = None
        self._pending: _NextRange | None = None
        self.counts = counts
        """How the events lie in the batches of the work at hand, where that is known before the table is claimed."""

    def expect(self, range_: BatchRange | None) -> None:
        """The range that comes after the one that is read next; None where none does."""
        self._next = range_

    def forget(self) -> None:
        """Nothing comes, and nothing is held for it."""
        self._next = self._pending = self.counts = None

    def begin(self, range_: BatchRange, columns: Sequence[str], read: Read, *, size_bytes: int) -> None:
        """Read this range from now on, before it is asked for."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="medallion-ahead")
        self._pending = _NextRange(range_, columns, pool.submit(read, range_, columns, size_bytes=size_bytes))
        pool.shutdown(wait=False)

    def events(
        self, range_: BatchRange, columns: Sequence[str], read: Read, *, size_bytes: int, ahead_bytes: int
    ) -> pa.Table | None:
        """The range's events, by `read`; those of the expected range are read from now on, where they take at most `ahead_bytes`."""
        pending, self._pending = self._pending, None
        events = None
        if pending is not None and (pending.range_, pending.columns) == (range_, columns):
            events = pending.events.result()
        if events is None:
            events = read(range_, columns, size_bytes=size_bytes)
        if events is not None and self._next is not None:
            self.begin(self._next, columns, read, size_bytes=min(size_bytes, ahead_bytes))
        return events
