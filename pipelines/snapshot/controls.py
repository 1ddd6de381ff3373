"""Pauses and stops of a running snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class SnapshotControls:
    """Pauses and stops that other threads set, and the snapshot reads between two chunks."""

    def __init__(self, *, is_paused: bool = False, stopped: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._is_paused = is_paused
        self._stopped = frozenset(stopped)
        self._paused_at, self._paused_seconds = time.monotonic(), 0.0

    @property
    def paused_seconds(self) -> float:
        """The seconds of all its pauses so far."""
        return self._paused_seconds + (time.monotonic() - self._paused_at if self._is_paused else 0.0)

    @property
    def is_paused(self) -> bool:
        """Whether it is paused: no chunk is read until it is resumed."""
        return self._is_paused

    @property
    def stopped(self) -> frozenset[str]:
        """The stopped collections, which are read no further."""
        return self._stopped

    def pause(self, is_paused: bool) -> None:
        """Pause or resume the snapshot."""
        with self._lock:
            self._paused_seconds, self._paused_at = self.paused_seconds, time.monotonic()
            self._is_paused = is_paused

    def stop(self, namespaces: Iterable[str]) -> None:
        """Stop these collections, as ``database.collection``."""
        with self._lock:
            self._stopped |= frozenset(namespaces)
