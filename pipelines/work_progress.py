"""How far work over many tables is: those who do it count, and `pipelines.terminal.live_lines` shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from pipelines.spark.parallel import Item, Outcome


@dataclass(frozen=True)
class WorkProgress:
    """How much is done `seconds` after the work began: tables, and events where their number is known beforehand (else both are 0)."""

    work: str
    tables: int
    all_tables: int
    events: int
    all_events: int
    seconds: float


class WorkCounter:
    """Counts what is done, in any thread, and calls `hear` after each step.

    Work that is still going on when a count begins is a part of it, with the time since that work began. Its events are not: some were
    counted before.
    """

    def __init__(self, work: str, hear: Callable[[WorkProgress], None] | None = None) -> None:
        self._work = work
        self._hear = hear
        self._lock = threading.Lock()
        self._going_on: dict[object, float] = {}
        """When each table was begun at which one is at work."""
        self._tables = self._all_tables = 0
        self.begin(0)

    def begin(self, tables: int, events: int = 0) -> None:
        """Count anew, to these numbers, beside what is going on.

        `begin(0)` also ends a count that a stop has interrupted: otherwise the log would repeat it for ever.
        """
        with self._lock:
            is_left = self._tables < self._all_tables
            self._began = min(self._going_on.values(), default=time.monotonic())
            self._tables, self._all_tables = 0, tables + len(self._going_on)
            self._events, self._all_events = 0, 0 if self._going_on else events
        if self._all_tables or is_left:
            self.add()

    def add(self, events: int = 0, *, tables: int = 0) -> None:
        """Count what was done since the last call."""
        with self._lock:
            self._count(events, tables)

    def _count(self, events: int, tables: int) -> None:
        self._tables += tables
        self._events += events if self._all_events else 0
        seconds = time.monotonic() - self._began
        now = WorkProgress(self._work, self._tables, self._all_tables, self._events, self._all_events, seconds)
        if self._hear is not None:
            self._hear(now)

    def each(self, items: Sequence[Item]) -> Iterator[Item]:
        """The items, one table each, counted when the next one is asked for."""
        self.begin(len(items))
        for item in items:
            yield item
            self.add(tables=1)

    def counting(self, act: Callable[[SparkSession, Item], Outcome]) -> Callable[[SparkSession, Item], Outcome]:
        """A function that calls `act` and counts one more table, also after an error."""

        def counted(spark: SparkSession, item: Item) -> Outcome:
            work = object()
            with self._lock:
                self._going_on[work] = time.monotonic()
            try:
                return act(spark, item)
            finally:
                with self._lock:  # at once: a count that began in between would not expect the table
                    del self._going_on[work]
                    self._count(0, 1)

        return counted
