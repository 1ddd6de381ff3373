"""The queue between the thread that reads the change stream and the one that encodes its events."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.mongodb import change_stream


@dataclass
class ByteQueue:
    """Batches between two threads, at most so many bytes of them; one batch always fits."""

    max_bytes: int
    _batches: list[change_stream.EventBatch] = field(default_factory=list)
    _bytes: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, batch: change_stream.EventBatch) -> None:
        """Add a batch, when there is room for it; nothing once the queue is closed."""
        with self._changed:
            # A batch that alone is larger than the limit goes through an empty queue: else it would wait for ever.
            self._changed.wait_for(lambda: self._closed or not self._batches or self._bytes < self.max_bytes)
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

    @property
    def bytes(self) -> int:
        """How many bytes wait."""
        return self._bytes

    def is_empty(self) -> bool:
        with self._changed:
            return not self._batches

    def close(self) -> None:
        """Let every waiting thread go."""
        with self._changed:
            # `put` and `get` wait on this very condition: without a word from here they would outlive the run.
            self._closed = True
            self._changed.notify_all()
