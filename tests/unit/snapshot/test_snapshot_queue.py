"""Which of the planned snapshots is read: one after the other, and none that is paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from pipelines.snapshot import queue
from pipelines.snapshot.controls import SnapshotControls


@dataclass
class Taken:
    """A snapshot whose documents are read when `gate` is open. A pause ends it before the next collection."""

    state: SnapshotState
    controls: SnapshotControls
    read: list[str]
    gate: threading.Event
    has_paused: bool = False

    def run(self) -> None:
        for name in self.state.without(self.controls.stopped).missing:
            while not self.gate.wait(0.01) and not self.controls.is_paused:
                pass
            self.state = self.state.without(self.controls.stopped)
            if self.controls.is_paused and name in self.state.missing:
                self.has_paused = True
                return
            self.read.append(f"{self.state.id}:{name}")
            self.state = self.state.advanced(name, CollectionState(1, 1, completed=True))


class Notifier:
    """Records the notifications."""

    def __init__(self) -> None:
        self.told: list[tuple[str | None, str]] = []

    def notify(self, aggregate: str, type_: Any, *, id_: str | None, data: Any = None) -> None:
        self.told.append((id_, type_.value))


class Running:
    """A queue and its thread."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.gate, self.halt, self.notifier = threading.Event(), threading.Event(), Notifier()
        self.gate.set()
        self.metrics = queue.SnapshotMetrics()
        taking: Any = lambda state, controls: Taken(state, controls, self.read, self.gate)  # noqa: E731
        self.queue = queue.SnapshotQueue(taking, self.notifier, self.halt, self.metrics)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.queue.run, daemon=True)
        self.thread.start()

    def plan(self, *states: SnapshotState) -> None:
        for state in states:
            self.queue.plan(state)()

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < end, self.read
            time.sleep(0.01)


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.halt.set()
    made.gate.set()
    made.queue.wake()
    made.thread.join(10)


ORDERS = SnapshotState("orders", ("db.orders", "db.more"), kind=SnapshotKind.INCREMENTAL)
STOCK = SnapshotState("stock", ("db.stock",), kind=SnapshotKind.INCREMENTAL)
REPLACED = SnapshotState("replaced", ("db.report",), {"db.report": CollectionState(first="x")}, SnapshotKind.REPLACED)
BLOCKING = SnapshotState("blocking", ("db.all",), kind=SnapshotKind.BLOCKING)


def test_a_paused_snapshot_holds_back_no_collection_that_was_replaced(running: Running) -> None:
    """A replaced collection is wrong in every table until it is read again, so it is read at once.

    Incremental snapshots wait for the resume.
    """
    running.gate.clear()
    running.plan(ORDERS, STOCK)
    running.queue.pause(True)
    running.gate.set()
    running.until(lambda: running.queue.is_idle)
    running.gate.clear()
    running.plan(SnapshotState("late", ("db.late",), kind=SnapshotKind.INCREMENTAL), REPLACED)
    assert not running.queue.is_idle
    running.gate.set()
    running.until(lambda: running.queue.is_idle)
    assert running.read == ["replaced:db.report"]
    running.queue.pause(False)
    running.until(lambda: len(running.read) == 5)
    assert running.read[1:] == ["orders:db.orders", "orders:db.more", "stock:db.stock", "late:db.late"]
    running.until(lambda: running.queue.is_idle)
    assert [told for told in running.notifier.told if told[0] == "orders"].count(("orders", "STARTED")) == 1


def test_of_a_collection_that_is_replaced_again_what_runs_goes_on_and_what_waits_is_given_up(running: Running) -> None:
    """Otherwise a collection that is replaced faster than it can be read (`$out` each minute) would never finish a snapshot."""
    again = replace(REPLACED, id="again")
    running.gate.clear()
    running.plan(REPLACED)
    running.until(lambda: running.metrics.newest is not None)
    running.plan(again)
    stopped = running.queue.stop(lambda names: [*names], kind=SnapshotKind.REPLACED)
    assert [each.id for each in stopped] == ["again"]
    running.gate.set()
    running.until(lambda: running.queue.is_idle)
    assert running.read == ["replaced:db.report"]


def test_a_run_that_was_paused_half_way_goes_on_where_it_was(running: Running) -> None:
    """Its state is kept for the next run, and until then it counts as paused."""
    running.gate.clear()
    running.plan(ORDERS)
    running.until(lambda: running.metrics.newest is not None)
    assert not running.queue.is_idle
    running.queue.pause(True)
    running.until(lambda: running.queue.is_idle)
    assert running.metrics.ended_at is None and not running.metrics.is_aborted
    running.gate.set()
    running.queue.pause(False)
    running.until(lambda: len(running.read) == 2 and running.queue.is_idle)
    assert running.metrics.ended_at is not None


def test_a_paused_snapshot_that_is_stopped_ends(running: Running) -> None:
    """It does not block the snapshots after it."""
    running.gate.clear()
    running.plan(ORDERS, STOCK)
    running.queue.pause(True)
    running.until(lambda: running.queue.is_idle)
    running.queue.stop(lambda names: [name for name in names if name != "db.stock"])
    running.gate.set()
    running.queue.pause(False)
    running.until(lambda: running.read == ["stock:db.stock"])


def test_a_snapshot_that_is_stopped_before_its_turn_is_not_begun(running: Running) -> None:
    """Its last notification is that of the stop, and a collection that could not be read before still counts as such."""
    running.gate.clear()
    running.plan(ORDERS, STOCK)
    running.until(lambda: running.metrics.newest is not None)
    running.queue.failed["db.stock"] = "a filter"
    running.queue.stop(lambda names: [name for name in names if name == "db.stock"])
    assert [state.id for state in running.queue.pause(True)] == ["orders"]
    running.queue.pause(False)
    running.gate.set()
    running.until(lambda: running.queue.is_idle)
    assert [told for told in running.notifier.told if told[0] == "stock"] == [("stock", "ABORTED")]
    assert running.queue.failed == {"db.stock": "a filter"} and not running.metrics.is_aborted


def test_a_paused_snapshot_that_is_stopped_is_over(running: Running) -> None:
    """In the metrics it is neither paused nor running any more."""
    running.gate.clear()
    running.plan(ORDERS)
    running.until(lambda: running.metrics.newest is not None)
    running.queue.pause(True)
    running.until(lambda: running.queue.is_idle)
    running.queue.stop(lambda names: [*names])
    running.queue.wake()
    running.until(lambda: running.metrics.ended_at is not None)
    assert running.metrics.is_aborted and not running.read


def test_what_was_read_to_its_end_is_not_stopped(running: Running) -> None:
    """A stop of a running snapshot only removes its unread collections, in status and notifications too."""
    running.gate.clear()
    running.plan(ORDERS)
    running.until(lambda: running.metrics.newest is not None)
    taken: Any = running.metrics.newest
    taken.state = taken.state.advanced("db.orders", CollectionState(1, 1, completed=True))
    (state,) = running.queue.stop(lambda names: [*names])
    assert (state.stopped, state.is_done) == ({"db.more"}, True)


def test_the_stream_waits_while_a_blocking_snapshot_is_read(running: Running) -> None:
    """Also if the blocking snapshot overtook a paused one, and that one is resumed meanwhile."""
    running.gate.clear()
    running.plan(ORDERS)
    running.queue.pause(True)
    running.until(lambda: running.queue.is_idle)
    assert not running.queue.is_blocking
    running.plan(BLOCKING)
    assert running.queue.is_blocking
    running.until(lambda: running.metrics.newest is not None and running.metrics.newest.state.id == "blocking")
    running.queue.pause(False)
    assert running.queue.is_blocking
    running.gate.set()
    running.until(lambda: len(running.read) == 3)
    assert running.read[0] == "blocking:db.all"
    running.until(lambda: not running.queue.is_blocking)


def test_what_is_not_in_bronze_yet_is_not_begun(running: Running) -> None:
    """And the queue is not idle while a snapshot waits for that."""
    begin = running.queue.plan(replace(STOCK))
    assert not running.queue.is_idle and not running.read
    begin()
    running.until(lambda: running.queue.is_idle)
    assert running.read == ["stock:db.stock"]
