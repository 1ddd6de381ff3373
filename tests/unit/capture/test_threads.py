"""The threads of a run: their start, and their end."""

from __future__ import annotations

import threading

import pytest

from pipelines.capture import byte_queue, threads


def test_a_thread_that_cannot_be_started_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the number of threads is limited. The end of the run would fail to join it, and a command would report a bug."""
    running = threads.Threads(byte_queue.ByteQueue(10))
    running.start(threads.READER, lambda: None)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            running.start(threads.COMMITTER, lambda: None)
    running.end()
    running.join(threads.COMMITTER)
    running.join_all(leave_at=None)
    assert not running.is_alive(threads.READER) and not running.is_alive(threads.COMMITTER)
