"""Collections that run concurrently in a service: a failure of one affects the others as little as possible, and is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import maintenance, table_history
from pipelines.delta.writer import Writer
from pipelines.gold import history, history_position
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import parallel
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


@pytest.fixture
def hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hop]:
    """A lakehouse whose bronze has one document in each of two collections. Versions, which need Spark, are never due."""
    monkeypatch.setattr(history_position, "is_due", lambda *_: False)
    with without_spark.running():
        made = Hop(tmp_path, history=True)
        made.append((1, bson.encode({"_id": 1})))
        made.append((1, bson.encode({"_id": 1})), collection="u")
        yield made


def failing_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    """The first call of this function raises for a full disk."""
    act: Callable[..., Any] = getattr(place, name)
    full = iter([errors.StorageExhausted("no space left")])

    def acted(*given: Any, **named: Any) -> Any:
        error = next(full, None)
        if error is not None:
            raise error
        return act(*given, **named)

    monkeypatch.setattr(place, name, acted)


@contextlib.contextmanager
def service(hop: Hop) -> Iterator[gold._GoldRun]:
    made = hop.gold_run()
    yield made
    made.close()


def test_gold_forgets_what_failed_behind_its_commit(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction failed on a full disk: the documents are published, nothing is left to do, and the history continues."""
    hop.silver()
    failing_once(monkeypatch, maintenance, "compact")
    histories: list[list[str]] = []
    with service(hop) as made:
        monkeypatch.setattr(made, "_histories", lambda known, *_: histories.append([*map(str, known)]) or [])
        assert len(made.published()) == 1 and len(made.failures.by_name) == 1
        assert made.published() == [] and not made.failures.by_name
    assert [len(known) for known in histories] == [1, 2]


@pytest.mark.parametrize("place", [registry, history_position])
def test_gold_forgets_a_look_that_failed(hop: Hop, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    """The check of a collection, or of its history, failed; they have nothing to do at the next one."""
    hop.run()
    failing_once(monkeypatch, place, "silver_position" if place is registry else "position")
    with service(hop) as made:
        made.published()
        assert len(made.failures.by_name) == 1
        made.published()
        assert not made.failures.by_name


def test_gold_forgets_that_a_store_did_not_answer_for_a_history(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its silver table still remembers its deletes is asked in each look; other collections continue."""
    hop.run()
    with service(hop) as made:
        monkeypatch.setattr(made, "_due_work", lambda _: None)
        failing_once(monkeypatch, registry, "lacks_deletes")
        made.published()
        assert [*made.failures.by_name] == ["cases.t (history)"]
        made.published()
        assert not made.failures.by_name


def test_a_history_is_never_written_where_a_collection_has_its_table(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while that collection fails."""
    hop.append((1, bson.encode({"_id": 1})), collection="t_history")
    hop.silver()
    act = gold._GoldRun._published

    def published(run: gold._GoldRun, spark: Any, work: Any, few: bool) -> Any:
        if work.namespace.collection == "t_history":
            raise errors.StoreUnreachable("the store does not answer")
        return act(run, spark, work, few)

    monkeypatch.setattr(gold._GoldRun, "_published", published)
    with service(hop) as made:
        made.published()
        assert sorted(made.failures.by_name) == ["cases.t (history)", "cases.t_history"]
        assert isinstance(made.failures.by_name["cases.t (history)"], errors.DecisionNeeded)


def test_a_collection_takes_no_historys_place(hop: Hop) -> None:
    """Even that of a history which is no longer kept: the collection is refused, and the versions stay."""
    table = hop.layout.history("cases", "t")
    without_spark.create(SPARK, table, columns=history.ENGINE_DDL)
    claimed = Writer.claim(SPARK, table)
    claimed.mark(to=1, extra=history_position.HistoryPosition(1).extra)
    claimed.release()
    version = table_history.version(SPARK, table)
    hop.append((1, bson.encode({"_id": 1})), collection="t_history")
    hop.silver()
    with service(hop) as made:
        made.published()
        assert {name: type(error) for name, error in made.failures.by_name.items()} == {
            "cases.t_history": errors.DecisionNeeded
        }
    assert table_history.version(SPARK, table) == version


def test_what_gold_refuses_is_told_beside_what_failed(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of the refusal, because trying again does not help."""

    def published(run: gold._GoldRun, spark: Any, work: Any, few: bool) -> None:
        if work.namespace.collection == "t":
            raise errors.StoreUnreachable("the store does not answer")
        raise errors.GateFailed("the new version is not published")

    hop.silver()
    monkeypatch.setattr(gold._GoldRun, "_published", published)
    with pytest.raises(errors.CollectionsFailed) as raised:
        hop.gold()
    told = ["cases.t: the store does not answer", "cases.u: the new version is not published"]
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == told
    assert raised.value.exit_code == errors.GateFailed.exit_code


def test_silver_forgets_what_failed_behind_its_commit(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collection is read and claimed once more, and not at each check."""
    failing_once(monkeypatch, maintenance, "compact")
    made = hop.silver_run()
    read: list[registry.Namespace] = []
    try:
        made.run_round()
        assert len(made.failures.by_name) == 1
        reread = made.positions.reread
        monkeypatch.setattr(made.positions, "reread", lambda each: read.append(each) or reread(each))
        made.run_round()
        assert not made.failures.by_name
        made.run_round()
        assert len(read) == 1
    finally:
        made.close()


def test_a_service_does_not_end_over_one_that_only_waits(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting collection may have recovered, and is tried before the service ends because all have failed.

    If all of them fail, it ends.
    """
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: 0.0))
    begin, full = silver._SilverRun._collection, {"t"}

    def begun(run: silver._SilverRun, spark: Any, work: Any) -> Any:
        if work.namespace.collection in full:
            raise errors.StorageExhausted("no space left")
        return begin(run, spark, work)

    monkeypatch.setattr(silver._SilverRun, "_collection", begun)
    made = hop.silver_run()
    try:
        made.run_round()
        made.run_round()
        full = {"u"}
        hop.append((2, bson.encode({"_id": 2})), collection="u")
        assert made.run_round().events == 0 and sorted(made.failures.by_name) == ["cases.t", "cases.u"]
        assert [each.namespace for each in made.run_round().collections] == ["cases.t"]
        full = {"t", "u"}
        hop.append((2, bson.encode({"_id": 2})))
        with pytest.raises(errors.CollectionsFailed):
            for _ in range(2):
                made.run_round()
    finally:
        made.close()


def test_all_that_failed_are_tried_together_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried in separate rounds, one of them would always be waiting, and the service would go on for ever, without a pause."""
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: 0.0))
    failures = parallel.Failures()

    def round_of(*tried: str) -> None:
        failures.begin_round()
        for name in tried:
            assert not failures.is_set_aside(name)
            failures.note(name, errors.StorageExhausted("no space left"))
        failures.end_where_all_failed(["a", "b"])

    round_of("a")
    round_of("a")
    failures.note("b", errors.StorageExhausted("no space left"))
    round_of("b")
    with pytest.raises(errors.CollectionsFailed):
        round_of("a", "b")


def test_a_service_ends_over_attempts_that_no_round_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail between two rounds, so that all are waiting in the next one: it would have them retried for ever, without a pause."""
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: 0.0))
    failures, names = parallel.Failures(), ("a", "b")

    def rounds(count: int, *full: str) -> None:
        for _ in range(count):
            failures.begin_round()
            tried = [name for name in names if not failures.is_set_aside(name)]
            for name in set(tried).difference(full):
                failures.forget(name)
            at_work = [name for name in tried if name in full]
            if not at_work:
                failures.end_where_all_failed(names)
            for name in at_work:
                failures.note(name, errors.StorageExhausted("no space left"))

    rounds(3, "a", "b")  # in the last one they wait: they are tried once more
    rounds(3, "b")
    assert [*failures.by_name] == ["b"]
    rounds(2, "a", "b")
    assert [*failures.by_name] == ["b", "a"]
    with pytest.raises(errors.CollectionsFailed):
        rounds(4, "a", "b")


def test_an_error_that_needs_a_person_is_not_forgotten() -> None:
    noted = parallel.Failures()
    noted.note("shop.a", errors.StoreUnreachable("no answer"))
    noted.note("shop.b", errors.DecisionNeeded("columns cannot change in place"))
    noted.forget("shop.a")
    noted.forget("shop.b")
    noted.forget("shop.c")
    assert list(noted.by_name) == ["shop.b"]


def test_a_collection_that_still_fails_is_logged_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each hour: the first message of a service that goes on may be gone with an old log. A success ends that."""
    now = 0.0
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: now))
    failures = parallel.Failures()

    def hour(number: float) -> list[str]:
        nonlocal now
        now = number * 3600.0
        caplog.clear()
        failures.begin_round()
        return [record.getMessage().split(";")[0] for record in caplog.records]

    failures.note("shop.a", errors.DecisionNeeded("somebody else's table"))
    assert [hour(0.9), hour(1), hour(1.9), hour(2)] == [[], ["shop.a: somebody else's table"]] * 2
    failures.guarding(lambda spark, item: None, name=str)(None, "shop.a")  # type: ignore[arg-type]
    assert hour(4) == []
    failures.note("shop.a", errors.DecisionNeeded("somebody else's table"))
    assert hour(4.5) == []


def test_an_error_that_nobody_knows_does_not_stand_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if Spark lost a task: the collection is tried again after a while, and not each second."""
    now = 0.0
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: now))
    failures = parallel.Failures()
    failures.note("cases.t", RuntimeError("a task was lost"))
    failures.note("cases.u", errors.DecisionNeeded("somebody else's table"))
    failures.note("cases.v", errors.Unjudged("Spark failed while it judged a version"))
    failures.note("cases.w", errors.FilesMissing("a VACUUM was faster than this reader"))
    now = parallel.RETRY_SECONDS - 1
    failures.begin_round()
    now = parallel.RETRY_SECONDS
    assert all(map(failures.is_set_aside, failures.by_name)), "what a round began without it does not come to"
    failures.begin_round()
    assert [name for name in failures.by_name if failures.is_set_aside(name)] == ["cases.u"]


def test_a_temporary_error_that_stays_is_met_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt claims and releases the table: two commits per second for as long as a disk is full."""
    now = 0.0
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: now))
    failures, met = parallel.Failures(), []
    for second in range(200):
        now = float(second)
        failures.begin_round()
        if not failures.is_set_aside("cases.t"):
            failures.note("cases.t", errors.StorageExhausted("no space left"))
            met.append(second)
    assert met == [0, 1, 2, 4, 8, 16, 32, 64, 124, 184]
    now = 300.0
    failures.begin_round()
    failures.forget("cases.t")
    failures.note("cases.t", errors.StorageExhausted("no space left"))
    failures.begin_round()
    assert not failures.is_set_aside("cases.t"), "what was over begins anew"


def test_an_unknown_error_that_stays_is_met_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other collections wait while a collection whose files are gone is tried, with Spark: a service stood still for half of its time."""
    now = 0.0
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: now))
    failures, met = parallel.Failures(), []
    for second in range(0, 1200, 10):
        now = float(second)
        failures.begin_round()
        if not failures.is_set_aside("cases.t"):
            failures.note("cases.t", errors.FilesMissing("its log names a file that does not exist"))
            met.append(second)
    assert met == [0, 60, 180, 420, 720, 1020]
    failures.by_name.pop("cases.t")  # it succeeded
    failures.note("cases.t", RuntimeError("a task was lost"))
    now += parallel.RETRY_SECONDS
    failures.begin_round()
    assert not failures.is_set_aside("cases.t"), "what was over begins anew"


def test_what_was_cancelled_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who shows what was done before it raises the errors, as maintenance does, raises them when nothing is cancelled any more."""
    monkeypatch.setattr(parallel.sparks, "is_cancelling", lambda: True)
    failures = parallel.Failures()
    failures.note("a", ValueError("Job 5 cancelled as part of cancellation of all jobs"))
    with pytest.raises(errors.Temporary, match="a: stopped before it was done"):
        failures.raised()
