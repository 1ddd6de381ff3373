"""The queue between the thread that reads the change stream and the thread that encodes its events."""

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
    """A queue of batches, bounded by `max_bytes` of events that are not committed yet (`max.queue.size.in.bytes`).

    `uncommitted` returns the bytes that have left the queue and wait for their commit. An empty queue accepts any batch.
    """

    max_bytes: int
    uncommitted: Callable[[], int] = lambda: 0
    _batches: list[change_stream.EventBatch] = field(default_factory=list)
    _bytes: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, batch: change_stream.EventBatch) -> None:
        """Wait for room and add a batch; a closed queue drops it."""
        with self._changed:
            # Polls, because a commit makes room without notifying this condition. An empty queue accepts a batch that is
            # larger than the limit, or it would wait for ever.
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
        """The bytes in the queue."""
        return self._bytes

    @property
    def held_bytes(self) -> int:
        """The bytes that wait for their commit, in the queue and after it."""
        return self._bytes + self.uncommitted()

    def is_empty(self) -> bool:
        with self._changed:
            return not self._batches

    def close(self) -> None:
        """Release every thread that waits in `put` or `get`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
