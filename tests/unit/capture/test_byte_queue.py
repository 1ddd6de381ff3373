"""The queue between the reader and the encoder."""

from __future__ import annotations

import threading

from pipelines.capture import byte_queue
from pipelines.mongodb import change_stream


def batch(size: int) -> change_stream.EventBatch:
    return change_stream.EventBatch([], "82", size, is_drained=True)


def test_it_holds_no_more_bytes_than_it_may() -> None:
    """A full queue blocks `put` until somebody takes a batch; one batch always fits."""
    queue = byte_queue.ByteQueue(100)
    queue.put(batch(500))
    putting = threading.Thread(target=queue.put, args=(batch(1),))
    putting.start()
    putting.join(0.1)
    assert putting.is_alive()
    assert queue.get(timeout=1) == batch(500)
    putting.join(5)
    assert not putting.is_alive()
    assert queue.get(timeout=1) == batch(1)
    assert queue.get(timeout=0.01) is None and queue.is_empty()


def test_uncommitted_bytes_count() -> None:
    """Batches that left the queue for a commit also count; an empty queue accepts one batch."""
    uncommitted = 90
    queue = byte_queue.ByteQueue(100, lambda: uncommitted)
    queue.put(batch(8))
    putting = [threading.Thread(target=queue.put, args=(batch(size),)) for size in (2, 20)]
    putting[0].start()
    putting[0].join(5)
    assert not putting[0].is_alive(), "100 of 100"
    putting[1].start()
    putting[1].join(0.1)
    assert putting[1].is_alive(), "120 of 100"
    uncommitted = 0  # committed; nobody takes anything, as during a blocking snapshot
    putting[1].join(5)
    assert not putting[1].is_alive() and queue.bytes == 30


def test_closing_wakes_blocked_puts() -> None:
    """Closing wakes blocked puts, and nothing is put afterwards."""
    queue = byte_queue.ByteQueue(1)
    queue.put(batch(1))
    putting = threading.Thread(target=queue.put, args=(batch(2),))
    putting.start()
    queue.close()
    putting.join(5)
    assert not putting.is_alive()
    assert queue.get(timeout=0) == batch(1)
    assert queue.get(timeout=0) is None
