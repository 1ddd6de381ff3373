"""What a layer tells the next one in the same process: that it committed.

Tables carry the positions, and every layer looks at them by itself: a word that is lost costs a look a second, and
nothing else. Which collections a round then goes through is decided in `silver.run` and `gold.run`, and after an error
in `spark.parallel.Failures`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

LOOK_SECONDS = 0.2
"""So often a layer that waits looks whether it is to end."""


class NewCommits:
    """Whether the layer before has committed since the last look, and to which collections' tables."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, names: Iterable[str] = ()) -> None:
        """Say that there is something new, of these collections."""
        with self._lock:
            self._names.update(names)
            self._told.set()

    def wait(self, seconds: float, *, stop: threading.Event) -> frozenset[str]:
        """Return when something is new, `stop` is set, or the seconds are over; the collections that were named."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (left := end - time.monotonic()) > 0:
            if self._told.wait(min(left, LOOK_SECONDS)):
                with self._lock:
                    self._told.clear()
                    names, self._names = self._names, set()
                return frozenset(names)
        return frozenset()
