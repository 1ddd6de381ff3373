"""The queue between the thread that reads the change stream and the one that encodes its events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.mongodb import change_stream


LOOK_SECONDS = 0.2


@dataclass
class ByteQueue:
    """Batches between two threads, at most so many bytes of them with what left the queue and is not committed yet; one
    batch always fits into an empty queue.

    `uncommitted` tells the bytes of the latter (`max.queue.size.in.bytes`: read ahead of their commit).
    """

    max_bytes: int
    uncommitted: Callable[[], int] = lambda: 0
    _batches: list[change_stream.EventBatch] = field(default_factory=list)
    _bytes: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, batch: change_stream.EventBatch) -> None:
        """Add a batch, when there is room for it; nothing once the queue is closed."""
        with self._changed:
            # A batch that alone is larger than the limit goes through an empty queue: else it would wait for ever. Whoever
            # commits tells nobody here of it, and nobody may `get` for long after it: so it is looked for again and again.
            while not self._changed.wait_for(lambda: self._takes(batch), LOOK_SECONDS):
                pass
            if not self._closed:
                self._batches.append(batch)
                self._bytes += batch.bytes
                self._changed.notify_all()

    def get(self, *, timeout: float) -> change_stream.EventBatch | None:
        """The next batch, or None after `timeout` seconds without one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._batches, timeout) or not self._batches:
                return None
            batch = self._batches.pop(0)
            self._bytes -= batch.bytes
            self._changed.notify_all()
            return batch

    def _takes(self, batch: change_stream.EventBatch) -> bool:
        has_room = self.held_bytes + batch.bytes <= self.max_bytes
        return self._closed or not self._batches or has_room

    @property
    def bytes(self) -> int:
        """How many bytes wait in it."""
        return self._bytes

    @property
    def held_bytes(self) -> int:
        """How many bytes wait for their commit, in the queue and behind it."""
        return self._bytes + self.uncommitted()

    def is_empty(self) -> bool:
        with self._changed:
            return not self._batches

    def close(self) -> None:
        """Let every waiting thread go."""
        with self._changed:
            # `put` and `get` wait on this very condition: without a word from here they would outlive the run.
            self._closed = True
            self._changed.notify_all()
