"""The threads in which the tables of a round are written: a round waits for a table that takes long only as long as its patience."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipelines.spark import parallel
from pipelines.spark import session as sparks

SOON = 0.05
LONG = 60.0


class Session:
    """Stands for a session: each thread has its own."""


class Work:
    """Items that end at once, beside `long` ones that end when they are let go; `acted` has those that began."""

    def __init__(self) -> None:
        self.released, self.begun, self.acted, self.sessions = threading.Event(), threading.Semaphore(0), [], []

    def act(self, spark: Any, item: str) -> str:
        self.acted.append(item)
        self.sessions.append(spark)
        self.begun.release()
        if item.startswith("long"):
            assert self.released.wait(LONG)
        if item.endswith("bad"):
            raise ValueError(item)
        return item.upper()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.released.set()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, work: Work) -> Iterator[parallel.Pool]:
    monkeypatch.setattr(sparks, "is_open", lambda _: True)
    spark: Any = Session()
    sessions: Any = Session
    made = parallel.Pool(spark, sessions)
    yield made
    work.released.set()
    made.close()


NEVER = threading.Event()


def rounds(pool: parallel.Pool, work: Work, items: list[str], *, until: str) -> list[str]:
    """The outcomes of a round that is patient for a moment, and of the empty ones after it, until they have this one."""
    outcomes = pool.each(items, work.act, stop=NEVER, patience_seconds=SOON)
    while until not in outcomes:
        outcomes += pool.each([], work.act, stop=NEVER, patience_seconds=SOON)
    return outcomes


def test_a_round_goes_on_without_the_item_that_takes_long(pool: parallel.Pool, work: Work) -> None:
    """Its outcome comes with a later round's, and whoever waits for it is told of its end."""
    told = threading.Event()
    pool.ended = lambda item: item == "long" and told.set()
    assert rounds(pool, work, ["long", "a"], until="A") == ["A"]
    assert pool.at_work == ["long"] and not told.is_set()
    assert rounds(pool, work, ["b"], until="B") == ["B"]
    assert pool.each([], work.act, stop=NEVER, patience_seconds=SOON) == []
    work.released.set()
    assert told.wait(LONG)
    assert rounds(pool, work, ["c"], until="C") == ["LONG", "C"]
    assert pool.at_work == [] and pool.rest() == []


def test_without_patience_a_round_waits_for_all(pool: parallel.Pool, work: Work) -> None:
    threading.Timer(SOON, work.released.set).start()
    assert pool.each(["long", "a", "b"], work.act, stop=NEVER, patience_seconds=math.inf) == ["LONG", "A", "B"]


def test_a_round_waits_for_a_free_thread(pool: parallel.Pool, work: Work) -> None:
    """With all threads at work, another round could begin nothing: its batches would only be smaller."""
    items = [f"long {number}" for number in range(parallel.THREADS)]
    outcomes: list[list[str]] = []
    rounds = threading.Thread(
        target=lambda: outcomes.append(pool.each([*items, "a"], work.act, stop=NEVER, patience_seconds=SOON))
    )
    rounds.start()
    for _ in items:
        assert work.begun.acquire(timeout=LONG)
    rounds.join(10 * SOON)
    assert rounds.is_alive() and work.acted.count("a") == 0
    work.released.set()
    rounds.join()
    assert len({*map(id, work.sessions)}) <= parallel.THREADS and "A" in (*outcomes[0], *pool.rest())


def test_nothing_begins_after_a_stop_and_what_has_begun_ends(pool: parallel.Pool, work: Work) -> None:
    stop = threading.Event()
    assert rounds(pool, work, ["long", "a"], until="A") == ["A"]
    stop.set()
    assert pool.each(["b"], work.act, stop=stop, patience_seconds=SOON) == []
    work.released.set()
    assert pool.rest() == ["LONG"] and "b" not in work.acted


@pytest.mark.parametrize("ask", ["rest", "each"])
def test_an_error_of_an_item_at_work_is_raised(pool: parallel.Pool, work: Work, ask: str) -> None:
    """By the next call, when all that has begun has ended."""
    assert rounds(pool, work, ["long bad", "a"], until="A") == ["A"]
    work.released.set()
    raising: Callable[[], object] = (
        pool.rest if ask == "rest" else lambda: pool.each(["long"], work.act, stop=NEVER, patience_seconds=LONG)
    )
    with pytest.raises(ValueError, match="long bad"):
        while True:
            raising()


def test_a_closed_pool_begins_nothing_and_waits(pool: parallel.Pool, work: Work) -> None:
    items = [f"long {number}" for number in range(parallel.THREADS - 1)]
    assert rounds(pool, work, [*items, "a"], until="A") == ["A"]
    threading.Timer(SOON, work.released.set).start()
    pool.close()
    assert sorted(work.acted) == sorted([*items, "a"])
    pool.close()
