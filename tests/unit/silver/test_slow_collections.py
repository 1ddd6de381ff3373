"""A service in which one collection takes long: the others go on, in silver and in gold."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bson
import pytest

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.new_commits import NewCommits
from pipelines.silver import ranges
from pipelines.silver import run as silver
from pipelines.spark import parallel
from pipelines.spark import session as sparks
from tests.harness import oracle, without_spark
from tests.harness.without_spark import SPARK, Hop

LONG = 60.0


@pytest.fixture
def hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hop]:
    """A lakehouse with a document in each of two collections; a round of a service waits for none of them."""
    monkeypatch.setattr(parallel, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(sparks, "is_open", lambda _: True)
    with without_spark.running():
        made = Hop(tmp_path)
        change(made, 1, "t", "u")
        made.run()
        yield made


def change(hop: Hop, value: int, *collections: str) -> None:
    for collection in collections:
        hop.append((1, bson.encode({"_id": 1, "v": value})), collection=collection)


class Slow:
    """The work of collection `t` at a function, from its call with `t` until it is let go; after that it fails if it shall."""

    def __init__(self) -> None:
        self.is_held, self.begun, self.released = False, threading.Event(), threading.Event()
        self.error: Exception | None = None

    def at(self, act: Callable[..., Any], *, is_of_t: Callable[..., bool]) -> Callable[..., Any]:
        def acted(*given: Any, **named: Any) -> Any:
            if self.is_held and is_of_t(*given):
                self.begun.set()
                assert self.released.wait(LONG)
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
            return act(*given, **named)

        return acted


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.released.set()


@contextlib.contextmanager
def service(run: Callable[..., Any], hop: Hop, **named: Any) -> Iterator[list[Any]]:
    """A layer as in a service, with sessions for its threads; its result is in the list at its end, or its error."""
    stop, results = threading.Event(), []

    def body() -> None:
        try:
            results.append(run(SPARK, hop.settings, once=False, stop=stop, pause_seconds=0.02, **named))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join()


def sessions() -> Any:
    return copy.copy(SPARK)


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return held


def position(hop: Hop, collection: str) -> int:
    return registry.silver_position(SPARK, hop.layout.silver("cases", collection)).to


def has(hop: Hop, collection: str, value: int) -> bool:
    """Whether gold has this value of the document."""
    table = hop.layout.gold("cases", collection)
    return delta.exists(SPARK, table) and oracle.read(table.path or "").column("v").to_pylist() == [value]


@pytest.mark.parametrize("fails", [False, True])
def test_silver_goes_on_beside_a_collection_that_takes_long(
    hop: Hop, slow: Slow, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Later rounds leave it alone: it is neither read again, nor released, nor begun twice; then it is applied up to the newest batch."""
    monkeypatch.setattr(ranges, "apply", slow.at(ranges.apply, is_of_t=lambda given, *_: given.namespace.collection == "t"))
    told = NewCommits()
    with service(silver.run, hop, sessions=sessions, news=told) as results:
        slow.is_held = True
        slow.error = errors.StorageExhausted("no space left") if fails else None
        change(hop, 2, "t", "u")
        assert slow.begun.wait(LONG)
        for value in (3, 4):
            change(hop, value, "t", "u", "late")
            assert wait_for(lambda: position(hop, "u") >= hop.batch - 1), "the other continues"
            assert wait_for(lambda: position(hop, "late") >= hop.batch), "new ones, too"
        assert position(hop, "t") < 3
        slow.is_held = False
        slow.released.set()
        assert wait_for(lambda: position(hop, "t") >= hop.batch - 2)
    (result,) = results
    assert isinstance(result, silver.SilverResult)
    assert {each.namespace: each.events for each in result.collections} == {"cases.t": 3, "cases.u": 3, "cases.late": 2}
    assert told.wait(1, stop=threading.Event()) == {"cases.t", "cases.u", "cases.late"}


@pytest.mark.parametrize("fails", [False, True])
def test_gold_goes_on_beside_a_table_that_takes_long(
    hop: Hop, slow: Slow, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """For example one that is written anew; then it is published up to silver's newest version."""
    published = slow.at(gold._GoldRun._published, is_of_t=lambda _run, _spark, work, *_: work.namespace.collection == "t")
    monkeypatch.setattr(gold._GoldRun, "_published", published)
    monkeypatch.setattr(gold, "LOOK_SHARE", 1e9)
    told = NewCommits()
    with service(gold.run, hop, sessions=sessions, silver_news=told) as results:
        slow.is_held = True
        slow.error = errors.StorageExhausted("no space left") if fails else None
        for value in (2, 3, 4):
            change(hop, value, "t", "u")
            hop.silver()
            told.tell(["cases.t", "cases.u"])
            assert wait_for(partial(has, hop, "u", value)) and slow.begun.wait(LONG)
        assert has(hop, "t", 1)
        slow.is_held = False
        slow.released.set()
        assert wait_for(partial(has, hop, "t", 4))
    (result,) = results
    assert isinstance(result, gold.GoldResult) and result.changed >= 3 + 1


def test_a_collection_at_work_keeps_its_claim(hop: Hop, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the round in which it begins is told of its turn before, which had no events: only idle tables are released."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 2)
    monkeypatch.setattr(ranges, "apply", slow.at(ranges.apply, is_of_t=lambda given, *_: given.namespace.collection == "t"))
    pool, t = parallel.Pool(SPARK, sessions), registry.Namespace("cases", "t")
    run = silver._SilverRun(SPARK, hop.settings, False, pool, threading.Event())
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(slow.released.set)
        slow.is_held = True
        for value in (2, 3):
            change(hop, value, "u")
        run.run_round()
        assert slow.begun.wait(LONG) and [each.counts.events for each in pool.at_work if each.namespace == t] == [0]
        slow.released.set()
        assert wait_for(lambda: not pool.at_work)
        slow.begun.clear()
        slow.released.clear()
        change(hop, 4, "t")
        run.run_round()
        assert slow.begun.wait(LONG) and run.idle == {"cases.t"}
        run.run_round()
        assert t in run.collections


def test_a_claim_is_released_in_the_session_of_whoever_releases_it(
    hop: Hop, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another collection may be at work in the one of its last turn, and a commit is fenced by the settings of its session."""
    released: list[tuple[str, Any]] = []
    monkeypatch.setattr(Writer, "release", lambda writer, extra=None: released.append((writer.table.label, writer.spark)))
    monkeypatch.setattr(ranges, "apply", slow.at(ranges.apply, is_of_t=lambda given, *_: given.namespace.collection == "t"))
    run = silver._SilverRun(SPARK, hop.settings, False, parallel.Pool(SPARK, sessions), threading.Event())
    with contextlib.closing(run):
        slow.is_held, slow.error = True, errors.StorageExhausted("no space left")
        slow.released.set()
        change(hop, 2, "t", "u")
        run.run_round()
        slow.is_held = False
        run.run_round()
        assert [spark is SPARK for label, spark in released if label == hop.silver_table.label] == [True]


def test_a_table_of_gold_is_released_in_the_session_in_which_it_failed(
    hop: Hop, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in that of its last turn."""
    released: list[Any] = []
    monkeypatch.setattr(Writer, "release", lambda writer, extra=None: released.append(writer.spark))
    failed: list[Any] = []

    def published(run: Any, spark: Any, *given: Any) -> Any:
        if not slow.is_held:
            return done(run, spark, *given)
        failed.append(spark)
        raise errors.StorageExhausted("no space left")

    done = gold._GoldRun._published
    monkeypatch.setattr(gold._GoldRun, "_published", published)
    run = gold._GoldRun(SPARK, hop.settings, False, parallel.Pool(SPARK, sessions), threading.Event())
    with contextlib.closing(run):
        change(hop, 2, "t", "u")
        hop.silver()
        run.published()
        slow.is_held = True
        change(hop, 3, "t")
        hop.silver()
        released.clear()
        run.pool = parallel.Pool(SPARK, sessions)  # with sessions of its own
        run.published()
        assert released == failed and len(failed) == 1
