"""Wakes a layer when the layer before it, in the same process, has committed.

Positions are in the tables, and every layer also polls them: a lost signal only costs the wait for the next poll. `silver.run`,
`gold.run` and, after an error, `spark.parallel.Failures` decide which collections a round processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

LOOK_SECONDS = 0.2
"""Interval at which a waiting layer checks whether it must stop."""


class NewCommits:
    """Whether the previous layer has committed since the last wait, and to which collections' tables."""

    def __init__(self) -> None:
        self._has_news = threading.Event()
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, names: Iterable[str] = ()) -> None:
        """Report a commit to the tables of these collections."""
        with self._lock:
            self._names.update(names)
            self._has_news.set()

    def wait(self, seconds: float, *, stop: threading.Event) -> frozenset[str]:
        """Wait for a commit, for `stop`, or for so many seconds; returns the collections that were reported."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (remaining := end - time.monotonic()) > 0:
            if self._has_news.wait(min(remaining, LOOK_SECONDS)):
                with self._lock:
                    self._has_news.clear()
                    names, self._names = self._names, set()
                return frozenset(names)
        return frozenset()
