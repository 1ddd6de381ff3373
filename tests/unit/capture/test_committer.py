"""The committer: the end of a run that still has commits, bytes in memory, and compactions."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.capture import byte_queue, threads
from pipelines.capture.committer import Committer
from pipelines.capture.progress import StreamCounts
from pipelines.delta import maintenance


class Nothing:
    """Accepts any call or attribute."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Rows:
    bytes = 7

    def __len__(self) -> int:
        return 1


def test_an_end_does_not_wait_for_a_mark_that_was_not_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread fails during a commit, while the last rows wait for it."""
    running = threads.Threads(byte_queue.ByteQueue(10))
    nothing: Any = Nothing()
    committer = Committer(nothing, running, nothing, nothing, nothing, None)
    begun, let = threading.Event(), threading.Event()

    def commit(rows: object) -> None:
        begun.set()
        let.wait(20)

    monkeypatch.setattr(committer, "_commit", commit)
    running.start(threads.COMMITTER, committer.run)
    first: Any = Rows()
    committer.submit(first)
    assert begun.wait(5)

    def fail() -> None:
        raise RuntimeError("a snapshot's read")

    running.start(threads.SNAPSHOT, fail)
    running.join(threads.SNAPSHOT)
    ending = threading.Thread(target=committer.finish, args=(first,), daemon=True)
    ending.start()
    ending.join(5)
    assert not ending.is_alive()
    let.set()
    committer.abandon()
    running.join(threads.COMMITTER)
    assert not running.is_alive(threads.COMMITTER)


def test_rows_that_wait_for_their_turn_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in memory in addition to the rows in the commit and the next ones, so the reader must wait for them, too."""
    running = threads.Threads(byte_queue.ByteQueue(10))
    nothing: Any = Nothing()
    committer = Committer(nothing, running, nothing, nothing, nothing, None)
    let, looked = threading.Event(), threading.Event()
    monkeypatch.setattr(committer, "_commit", lambda _: let.wait(20))
    # Shown while rows wait: by then only the caller of `submit` has reported them.
    monkeypatch.setattr(committer, "reporter", SimpleNamespace(show=looked.set))
    running.start(threads.COMMITTER, committer.run)
    rows: Any = Rows()
    handing = threading.Thread(target=lambda: [committer.submit(rows) for _ in range(3)], daemon=True)
    handing.start()
    assert looked.wait(10)
    assert committer.uncommitted_bytes == 21
    let.set()
    handing.join(10)
    committer.finish(rows)
    assert committer.uncommitted_bytes == 0


def test_commits_of_any_thread_make_a_compaction_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of a quiet stream and chunks of a snapshot are files, too, and the last of them need not be a commit of the stream."""
    compacted: list[object] = []
    monkeypatch.setattr(bronze_log, "COMPACT_EVERY", 4)
    monkeypatch.setattr(maintenance, "optimize", lambda session, table, **_: compacted.append(session))
    writer: Any = SimpleNamespace(metadata={}, append_arrow=lambda *_, **__: None)
    nothing: Any = Nothing()
    log = bronze_log.BronzeLog(nothing, tables.TableRef.at("/lake/bronze/shop"), writer, None)
    committer = Committer(log, nothing, nothing, nothing, nothing, lambda: nothing)
    earlier = SimpleNamespace(metadata={"batch": 7})
    assert bronze_log.BronzeLog(nothing, tables.TableRef.at("/lake/bronze/b"), earlier, None)._compacted == -3, (
        "of short runs"
    )  # type: ignore[arg-type]
    for commits, due in ((3, 0), (2, 1), (3, 1), (1, 2)):
        for _ in range(commits):
            log.heartbeat({}, token="82", ts_ms=0)
        committer.compact()
        if log._compaction is not None:
            log._compaction.join(10)
        assert len(compacted) == due


def test_a_stop_does_not_wait_for_a_compaction() -> None:
    """Compacting hundreds of commits of 64 MB takes minutes: a run that is asked to end must not hold its claim that long, or be killed
    with it."""
    let, released = threading.Event(), threading.Event()
    writer: Any = SimpleNamespace(metadata={}, release=lambda _: released.set())
    log = bronze_log.BronzeLog(Nothing(), tables.TableRef.at("/lake/bronze/shop"), writer, None)  # type: ignore[arg-type]
    log._compaction = threading.Thread(target=let.wait, args=(20,), daemon=True)
    log._compaction.start()
    closing = threading.Thread(target=log.close, kwargs={"waits": False}, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive() and released.is_set()
    let.set()


def test_no_lag_is_negative() -> None:
    """A clock may be behind the server's: by 30 hours, say."""
    nothing: Any = Nothing()
    committer = Committer(SimpleNamespace(commits=1), nothing, nothing, nothing, nothing, None)  # type: ignore[arg-type]
    rows: Any = SimpleNamespace(changes=1, lossy=0, skipped=0)
    lags = []
    for ahead in (30 * 3600, -30 * 3600):
        committer.counts = SimpleNamespace(stream=StreamCounts())  # type: ignore[assignment]
        committer._count(rows, (int(time.time()) + ahead, 1))
        lags.append(committer.counts.stream.lag_seconds or 0.0)
    assert lags[0] == 0.0 and 30 * 3600 <= lags[1] < 31 * 3600


def test_rows_that_were_dropped_are_never_taken_for_committed() -> None:
    """A heartbeat, or a cut, would commit a position after them as complete."""
    running = threads.Threads(byte_queue.ByteQueue(10))
    nothing: Any = Nothing()
    committer = Committer(nothing, running, nothing, nothing, nothing, None)
    assert committer.has_committed_all
    # Set before the threads' end: in between, the main loop goes on.
    running.failure = RuntimeError("a snapshot's read")
    rows: Any = Rows()
    assert not committer.submit(rows)
    assert not committer.has_committed_all
    assert not committer.uncommitted_bytes
