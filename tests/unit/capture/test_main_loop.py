"""What the main thread hands over, and what ends it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.bronze import event_rows as events
from pipelines.capture import byte_queue, heartbeats, main_loop, metrics, threads
from pipelines.capture.committer import Committer
from pipelines.capture.progress import RunCounts
from pipelines.mongodb import change_stream


def test_a_signal_that_cannot_be_done_ends_the_run_behind_what_was_read() -> None:
    """The stream's rows wait for their commit as at any end, without the signal, which is read again."""
    rows, away = events.EventRows("shop"), errors.SourceUnreachable("away")
    running = threads.Threads(byte_queue.ByteQueue(10))
    running.queue.put(change_stream.EventBatch([b"event"], "8201", 1, is_drained=True))

    def mark(kind: bronze.RowKind) -> None:
        rows.mark(events.OtherRow("8201", kind, {}))

    class Control:
        is_blocking = False

        def handle_received(self, *_: Any, **__: Any) -> None:
            mark(bronze.RowKind.SIGNAL)
            raise away

    loop = main_loop.MainLoop(
        threads=running,
        intake=SimpleNamespace(events=lambda batch: batch.events),  # type: ignore[arg-type]
        encoder=SimpleNamespace(rows=rows, is_full=False, add=lambda _: mark(bronze.RowKind.CHANGE)),  # type: ignore[arg-type]
        control=Control(),  # type: ignore[arg-type]
        committer=None,  # type: ignore[arg-type]
        heartbeats=None,  # type: ignore[arg-type]
        reporter=None,  # type: ignore[arg-type]
        end=None,  # type: ignore[arg-type]
        commit_seconds=60,
    )
    assert loop.run("8200") == main_loop.StreamPosition("8201", is_drained=True)
    assert running.stream_failure is away
    assert rows.table(batch=1, first_offset=0, ts_ms=1).column("kind").to_pylist() == ["change"]


@pytest.mark.parametrize("rows_of_each", [1, 0])
def test_signals_of_one_batch_are_committed_in_between(rows_of_each: int) -> None:
    """Thousands of them come in one reply of the server; the lease is renewed by commits. A control event of a collection that is not
    captured has no row, and there is no commit without one."""
    rows, handed_over = events.EventRows("shop"), []
    running, ends = threads.Threads(byte_queue.ByteQueue(10)), iter([True])
    running.queue.put(change_stream.EventBatch([b"event"] * 3, "8201", 1, is_drained=True))

    def add(_: bytes) -> dict[str, Any]:
        for _ in range(rows_of_each):
            rows.mark(events.OtherRow("8201", bronze.RowKind.SIGNAL, {}))
        return {}

    def take() -> int:
        count = len(rows)
        rows.cut((0, 0))
        return count

    nothing: Any = SimpleNamespace(
        handle=lambda *_: None, handle_received=lambda *_, **__: None, is_blocking=False, rows_come=lambda: None
    )
    loop = main_loop.MainLoop(
        threads=running,
        intake=SimpleNamespace(events=lambda batch: batch.events),  # type: ignore[arg-type]
        encoder=SimpleNamespace(rows=rows, is_full=False, add=add, take=take),  # type: ignore[arg-type]
        control=nothing,
        committer=SimpleNamespace(has_room=True, submit=handed_over.append, count_left_out=lambda _: None),  # type: ignore[arg-type]
        heartbeats=nothing,
        reporter=nothing,
        end=SimpleNamespace(is_reached=lambda _: next(ends)),  # type: ignore[arg-type]
        commit_seconds=0,
    )
    loop.run("8200")
    assert handed_over == [1, 1, 1] * rows_of_each


def test_once_ends_at_the_time_of_its_start_although_more_was_read() -> None:
    """A source that is written to faster than it is captured keeps the queue full: the run would never end."""
    running = threads.Threads(byte_queue.ByteQueue(10))
    running.queue.put(change_stream.EventBatch([b"later event"], "8200000009", 1, is_drained=False))
    control, shutdown = SimpleNamespace(is_idle=True), SimpleNamespace(is_due=lambda: False)
    end = main_loop.RunEnd(Timestamp(5, 1), True, control, running, shutdown)  # type: ignore[arg-type]
    before, at, after = (f"820000000{seconds}000000012B022C0100296E04" for seconds in (4, 5, 6))
    reached = [end.is_reached(main_loop.StreamPosition(token, is_drained=False)) for token in (before, at, after)]
    assert reached == [False, False, True]


def test_events_that_are_not_captured_are_counted_without_a_commit() -> None:
    """A source of which nothing is captured has no commits, but must show that events are left out. In a commit they count with its
    rows."""
    seen, running, rows = metrics.Metrics("shop"), threads.Threads(byte_queue.ByteQueue(10)), events.EventRows("shop")
    nothing: Any = SimpleNamespace(show=lambda: None, handle_received=lambda *_, **__: None, is_blocking=False)

    def left_out(_: bytes) -> None:
        rows.filtered += 1

    loop = main_loop.MainLoop(
        threads=running,
        intake=SimpleNamespace(events=lambda batch: batch.events),  # type: ignore[arg-type]
        encoder=SimpleNamespace(rows=rows, is_full=False, add=left_out),  # type: ignore[arg-type]
        control=nothing,
        committer=Committer(nothing, running, RunCounts(), seen, nothing, None),
        heartbeats=nothing,
        reporter=nothing,
        end=SimpleNamespace(is_reached=lambda _: True),  # type: ignore[arg-type]
        commit_seconds=60,
    )
    for is_row in (False, True):
        if is_row:
            rows.mark(events.OtherRow("8201", bronze.RowKind.CHANGE, {}))
        running.queue.put(change_stream.EventBatch([b"event"] * 3, "8201", 1, is_drained=True))
        loop.run("8200")
        assert (seen.streaming.filtered, rows.filtered) == (3, 3 * is_row)


def test_a_quiet_stream_lets_bronze_be_compacted() -> None:
    """Its heartbeats are files, and no commit of events comes that would start a compaction."""
    compacted: list[object] = []
    running, ends = threads.Threads(byte_queue.ByteQueue(10)), iter([False, True])
    running.queue.close()
    log: Any = SimpleNamespace(compact=compacted.append)
    nothing: Any = SimpleNamespace(show=lambda: None, handle_received=lambda *_, **__: None, is_blocking=False)
    loop = main_loop.MainLoop(
        threads=running,
        intake=nothing,
        encoder=SimpleNamespace(rows=events.EventRows("shop")),  # type: ignore[arg-type]
        control=nothing,
        committer=Committer(log, running, nothing, nothing, nothing, sessions=list),  # type: ignore[arg-type]
        heartbeats=SimpleNamespace(commit_requested=threading.Event(), idle_seconds=0.0, idle=lambda *_, **__: None),  # type: ignore[arg-type]
        reporter=nothing,
        end=SimpleNamespace(is_reached=lambda _: next(ends)),  # type: ignore[arg-type]
        commit_seconds=60,
    )
    loop.run("8200")
    assert compacted == [list]


def test_rows_that_wait_for_their_commit_do_not_let_the_lease_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a `commit.interval.ms` of minutes another host would take the table from a capture that is alive. The position stays: the rows
    are before it."""
    running, rows = threads.Threads(byte_queue.ByteQueue(10)), events.EventRows("shop")
    running.queue.put(change_stream.EventBatch([b"event"], "8201", 1, is_drained=True))
    running.queue.close()
    ends, told = iter([False] * 5 + [True]), []
    clock = iter(range(0, 10_000, 10))  # ten seconds pass between two looks at it
    monkeypatch.setattr(main_loop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    log: Any = SimpleNamespace(position=None, renew=lambda *, complete: told.append(complete))
    nothing: Any = SimpleNamespace(show=lambda: None, handle_received=lambda *_, **__: None, is_blocking=False)
    loop = main_loop.MainLoop(
        threads=running,
        intake=SimpleNamespace(events=lambda batch: batch.events),  # type: ignore[arg-type]
        encoder=SimpleNamespace(  # type: ignore[arg-type]
            rows=rows, is_full=False, add=lambda _: rows.mark(events.OtherRow("8201", bronze.RowKind.CHANGE, {}))
        ),
        control=nothing,
        committer=Committer(log, running, nothing, nothing, nothing, sessions=None),
        heartbeats=heartbeats.Heartbeats(log, 1000, 0.0),
        reporter=nothing,
        end=SimpleNamespace(is_reached=lambda _: next(ends)),  # type: ignore[arg-type]
        commit_seconds=3600,
    )
    loop.run("8200")
    assert told and set(told) == {None}
    assert len(rows) == 1
