"""Pauses and stops of a running snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class SnapshotControls:
    """Pauses and stops that other threads set, and the snapshot reads between two chunks.

    While it `is_paused`, no chunk is read. The `stopped` collections are read no further.
    """

    def __init__(self, *, is_paused: bool = False, stopped: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self.is_paused = is_paused
        self.stopped = frozenset(stopped)
        self._paused_at, self._paused_seconds = time.monotonic(), 0.0

    @property
    def paused_seconds(self) -> float:
        """The seconds of all its pauses so far."""
        return self._paused_seconds + (time.monotonic() - self._paused_at if self.is_paused else 0.0)

    def pause(self, is_paused: bool) -> None:
        """Pause or resume the snapshot."""
        with self._lock:
            self._paused_seconds, self._paused_at = self.paused_seconds, time.monotonic()
            self.is_paused = is_paused

    def stop(self, namespaces: Iterable[str]) -> None:
        """Stop these collections, as ``database.collection``."""
        with self._lock:
            self.stopped |= frozenset(namespaces)
