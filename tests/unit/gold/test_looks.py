"""Which tables gold looks at in a service, where silver names the ones that it moved."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bson
import pytest

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import local_log
from pipelines.gold import run as gold
from pipelines.new_commits import NewCommits
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        yield Hop(tmp_path)


@contextlib.contextmanager
def service(hop: Hop, news: NewCommits) -> Iterator[None]:
    stop = threading.Event()
    given = {"once": False, "stop": stop, "silver_news": news, "pause_seconds": 0.05}
    thread = threading.Thread(target=gold.run, args=(SPARK, hop.settings), kwargs=given)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def change(hop: Hop, value: int) -> None:
    """A change of two collections, which silver applies."""
    for collection in ("t", "u"):
        hop.append((1, bson.encode({"_id": 1, "v": value})), collection=collection)
    hop.silver()


def up_to_date(hop: Hop) -> set[str]:
    """The collections whose gold table is where silver is."""
    made = hop.gold_run()
    return {name for name in ("t", "u") if made._work(registry.Namespace("cases", name)) is None}


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60  # gold looks again after twenty times the duration of a look
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return held


def test_gold_looks_at_the_tables_that_silver_names(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at each of thousands of tables takes a second of processor time."""
    monkeypatch.setattr(gold, "LOOK_SHARE", 1e9)
    news = NewCommits()
    change(hop, 1)
    with service(hop, news):
        assert wait_for(lambda: up_to_date(hop) == {"t", "u"})
        change(hop, 2)
        news.tell(["cases.t"])
        assert wait_for(lambda: "t" in up_to_date(hop))
        time.sleep(0.3)
        assert up_to_date(hop) == {"t"}
        news.tell(["cases.u"])
        assert wait_for(lambda: up_to_date(hop) == {"t", "u"})


def test_the_collections_are_read_again_only_for_a_new_one(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that is two requests, and in a catalog two statements."""
    reads: list[str] = []
    read, made = registry.read, hop.gold_run()

    def published(*only: str) -> tuple[list[str], int]:
        with monkeypatch.context() as counted:
            counted.setattr(registry, "read", lambda *given: reads.append("read") or read(*given))
            return [each.namespace for each in made.published(set(only) or None)], len(reads)

    change(hop, 1)
    assert published() == (["cases.t", "cases.u"], 1)
    change(hop, 2)
    assert published("cases.t") == (["cases.t"], 1)
    hop.append((1, bson.encode({"_id": 1})), collection="v")
    hop.silver()
    assert published("cases.u", "cases.v") == (["cases.u", "cases.v"], 2)
    made.close()


def test_gold_finds_what_nobody_names(hop: Hop) -> None:
    """Another process may move a table: all of them are looked at from time to time."""
    change(hop, 1)
    with service(hop, NewCommits()):
        assert wait_for(lambda: up_to_date(hop) == {"t", "u"})
        change(hop, 2)
        assert wait_for(lambda: up_to_date(hop) == {"t", "u"})


def test_a_service_ends_where_all_failed_one_after_the_other(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed when silver named it, so that no look at all tables had one left to try: it ran on for ever and published nothing."""

    def refused(*given: object) -> None:
        raise errors.OwnershipLost("taken over")

    made = hop.gold_run()
    change(hop, 1)
    made.published()
    change(hop, 2)
    monkeypatch.setattr(made, "_applied", refused)
    for name in ("cases.t", "cases.u"):
        assert not made.published({name})
    with pytest.raises(errors.CollectionsFailed, match="taken over"):
        made.published()


def test_tables_that_lie_elsewhere_are_looked_at_side_by_side(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is a statement or two, which mostly wait."""
    made, meeting = hop.gold_run(), threading.Barrier(2, timeout=5)
    looked: list[str] = []
    known = registry.KnownCollections(0, tuple(registry.Namespace("cases", name) for name in ("t", "u")))
    monkeypatch.setattr(registry, "read", lambda *_: known)
    monkeypatch.setattr(local_log, "folder", lambda _: None)

    def look(namespace: registry.Namespace) -> None:
        meeting.wait()
        looked.append(namespace.collection)

    monkeypatch.setattr(made, "_due_work", look)
    made.published()
    assert sorted(looked) == ["t", "u"]
