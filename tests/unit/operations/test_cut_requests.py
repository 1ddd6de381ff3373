"""Requests for cuts from a running pipeline: they are answered even if the store fails in between."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JNetworkError

from cdc_core import errors
from cdc_core.gold import cut as times
from cdc_core.settings.parse import Settings
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.operations import cut, cut_requests
from tests.harness import captures, layers, without_spark
from tests.harness.without_spark import SPARK, Hop

MADE = cut.Cut("c1", 5, "7:1", "7:1", 3, cut.EXACT, (), ())


@pytest.mark.parametrize(
    ("unsaid", "refused"),
    [
        (cut_requests.TAKEN, None),
        (cut_requests.MADE, None),
        (cut_requests.FAILED, errors.DecisionNeeded("silver is past 1:1")),
    ],
)
def test_an_answer_that_could_not_be_written_is_written_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsaid: str, refused: errors.DecisionNeeded | None
) -> None:
    """The answer is written once, and the cut is not made again. A request that could not be accepted is answered too."""
    say, asked, stop = cut_requests._record, [], threading.Event()
    lost = [unsaid]

    def say_or_fail(spark: Any, settings: Any, state: str, id_: str = "", **fields: object) -> None:
        if state in lost:
            lost.clear()
            if state == cut_requests.TAKEN:  # a commit whose answer was lost
                say(spark, settings, state, id_, **fields)
            raise errors.StoreUnreachable("the store does not answer")
        say(spark, settings, state, id_, **fields)
        if state in (cut_requests.MADE, cut_requests.FAILED):
            stop.set()

    def make(as_of: str) -> cut.Cut:
        asked.append(as_of)
        if refused is not None:
            raise refused
        return MADE

    with without_spark.running():
        chosen = Hop(tmp_path).settings
        chosen = dataclasses.replace(chosen, source=dataclasses.replace(chosen.source, signal_poll_interval_ms=10))
        cut_requests._record(SPARK, chosen, cut_requests.ASKED, "1", as_of="now")
        monkeypatch.setattr(cut_requests, "_record", say_or_fail)
        serving = threading.Thread(target=cut_requests.serve, args=(SPARK, chosen, make), kwargs={"stop": stop}, daemon=True)
        serving.start()
        was_answered = stop.wait(15)
        stop.set()
        serving.join()
        rows = {row["state"]: row for row in cut_requests._rows(SPARK, chosen) if row["id"] == "1"}
    assert was_answered
    if unsaid == cut_requests.TAKEN:
        assert not asked and rows[cut_requests.FAILED]["code"] == errors.StoreUnreachable.exit_code
    elif refused is not None:
        assert asked == ["now"] and rows[cut_requests.FAILED]["message"] == "silver is past 1:1"
    else:
        assert asked == ["now"] and rows[cut_requests.MADE]["cut"] == "c1"


def test_a_lost_spark_ends_the_service_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that apply few events do not use Spark, and would continue while requests remain unanswered."""
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        monkeypatch.setattr(
            cut_requests.table_history, "version", Mock(side_effect=Py4JNetworkError("Answer from Java side is empty"))
        )
        with pytest.raises(errors.SparkLost):
            cut_requests.serve(SPARK, chosen, Mock(), stop=threading.Event())


@pytest.mark.parametrize("is_made", (False, True))
def test_a_client_whose_cut_ended_spark_gets_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """The pipeline goes on with another Spark in the same process, for whose end the client would wait."""
    say, lost = cut_requests._record, Py4JNetworkError("Answer from Java side is empty")
    make = Mock(return_value=Mock(made_ms=1)) if is_made else Mock(side_effect=lost)

    def say_until_spark_ends(spark: Any, settings: Any, state: str, id_: str = "", **fields: object) -> None:
        if state in (cut_requests.MADE, cut_requests.FAILED):
            raise lost
        say(spark, settings, state, id_, **fields)

    with without_spark.running():
        chosen = Hop(tmp_path).settings
        cut_requests._record(SPARK, chosen, cut_requests.ASKED, "1", as_of="now")
        monkeypatch.setattr(cut_requests, "_record", say_until_spark_ends)
        with pytest.raises(errors.SparkLost):
            cut_requests.serve(SPARK, chosen, make, stop=threading.Event())
        monkeypatch.setattr(cut_requests, "_record", say)
        assert cut_requests.serve(SPARK, chosen, Mock(), stop=Mock(is_set=Mock(side_effect=[False, True]))) == 0
        rows = [row for row in cut_requests._rows(SPARK, chosen) if row["id"] == "1"]
    assert [row["state"] for row in rows] == [cut_requests.ASKED, cut_requests.TAKEN, cut_requests.FAILED]
    assert "nothing was noted" not in rows[-1]["message"]  # it may have been, and only the answer is lost


def test_what_hinders_the_looks_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipeline checks every few seconds, and a store may be unreachable for days."""
    stop, looks = threading.Event(), iter([*["away"] * 5, None, "away", "full"])

    def look(*_: object) -> int:
        if (why := next(looks, "ended")) == "ended":
            stop.set()
        if why is not None:
            raise errors.StoreUnreachable(f"the store is {why}")
        return 1

    chosen = layers.pipeline(tmp_path)
    chosen = dataclasses.replace(chosen, source=dataclasses.replace(chosen.source, signal_poll_interval_ms=1))
    for name, said in {"_record": lambda *_, **__: None, "_open": lambda *_: []}.items():
        monkeypatch.setattr(cut_requests, name, said)
    monkeypatch.setattr(cut_requests.table_history, "version", look)
    assert cut_requests.serve(SPARK, chosen, lambda _: MADE, stop=stop) == 0
    assert [each.rpartition(" ")[2] for each in caplog.messages] == ["away", "away", "full"]


def test_who_removes_the_requests_keeps_no_client_from_asking(tmp_path: Path) -> None:
    """The pipeline said only twice a day that it serves requests; until then clients tried to make a cut beside it, and were refused."""
    stop = threading.Event()
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        folder = Path(delta.layout(chosen.lakehouse).ops("cut_requests").path or "")
        waits = iter([lambda: shutil.rmtree(folder), stop.set])
        cut_requests.serve(SPARK, chosen, Mock(), stop=Mock(is_set=stop.is_set, wait=lambda _: next(waits)()))
        assert [row["state"] for row in cut_requests._rows(SPARK, chosen)] == [cut_requests.SERVING]


def test_a_cut_is_of_one_pipeline(tmp_path: Path) -> None:
    """Two pipelines that share a lakehouse may make cuts of the same name; each only shows its own."""
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        made = made_cut(chosen)
        cut._note(SPARK, chosen, made)
        assert cut.read(SPARK, chosen) == [made]
        assert cut.read(SPARK, dataclasses.replace(chosen, name="other")) == []


def test_a_cut_names_a_collection_that_is_no_longer_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table shows an earlier time than the others, and nothing said so."""
    monkeypatch.setattr(cut.bronze_log, "gap_and_snapshot_heartbeats", lambda *_, **__: [])
    names = registry.Namespace("shop", "a"), registry.Namespace("shop", "b")
    monkeypatch.setattr(cut.registry, "read", lambda *_: registry.KnownCollections(1, names))
    chosen = layers.pipeline(Path("/nowhere"))
    source = dataclasses.replace(chosen.source, collection_include_list=("shop.a",), database_include_list=())
    only_a = dataclasses.replace(chosen, source=source)
    assert cut._missing(SPARK, only_a, times.CutBoundary(1, "a", "b")) == ("shop.b",)
    assert cut._missing(SPARK, only_a, times.CutBoundary(1, "a", "b"), at="0000000100000001") == ()


def test_a_cut_names_the_tables_of_the_lakehouse_that_it_is_read_from(tmp_path: Path) -> None:
    """The lakehouse was copied to another root: the query over a cut of before would read what is left at the old one."""
    with without_spark.running():
        hop = Hop(tmp_path / "old")
        cut._note(SPARK, hop.settings, made_cut(hop.settings))
        shutil.copytree(tmp_path / "old", tmp_path / "new")
        moved = layers.pipeline(tmp_path / "new")
        assert cut.read(SPARK, moved) == [made_cut(moved)]


def test_no_cut_is_made_of_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be among the recorded ones: a client of a running pipeline was told to make one first, as a mistake of its arguments."""
    monkeypatch.setattr(cut, "_awaited", lambda *_, **__: times.CutBoundary(1, "a", "b"))
    with without_spark.running():
        hop = Hop(tmp_path)
        with pytest.raises(errors.Temporary, match="no tables yet"):
            cut.run(SPARK, hop.settings, as_of="now")
        assert cut.read(SPARK, hop.settings) == []


def made_cut(of: Settings) -> cut.Cut:
    """A cut of a collection's tables and a model."""
    layout = delta.layout(of.lakehouse)
    places = {
        "shop.a.b": layout.gold("shop", "a.b"),
        "shop.a.b_history": layout.history("shop", "a.b"),
        "totals": layout.model("totals"),
    }
    return dataclasses.replace(MADE, tables=tuple(cut.CutTable(name, str(place), 5) for name, place in places.items()))


def test_a_request_counts_whatever_the_clock_says_of_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of another machine may be far behind."""
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(cut_requests.clock, "now_ms", lambda: 1)
            cut_requests._record(SPARK, chosen, cut_requests.ASKED, "1", as_of="now")
        assert [each["id"] for each in cut_requests._open(SPARK, chosen)] == ["1"]


@pytest.mark.parametrize("is_killed", (False, True))
def test_a_pipeline_that_ends_right_behind_the_cut_has_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """It has recorded the cut before it ended, so the request succeeds; killed before its answer, it is not said to have noted nothing."""

    def ends(spark: Any, settings: Any, by: Any = None) -> bool:
        rows = cut_requests._rows(spark, settings)
        (asked,) = (row["id"] for row in rows if row["state"] == cut_requests.ASKED)
        if len(rows) == 1:
            cut_requests._record(spark, settings, cut_requests.TAKEN, asked)
            return True
        if not is_killed:
            cut_requests._record(spark, settings, cut_requests.MADE, asked, cut="c1", made_ms=5)
        return False

    monkeypatch.setattr(cut_requests, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cut_requests, "_is_served", ends)
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        cut._note(SPARK, chosen, made_cut(chosen))
        if is_killed:
            with pytest.raises(errors.Temporary, match="medallion cut list"):
                cut_requests._asked(SPARK, chosen, as_of="now", stop=threading.Event())
        else:
            assert cut_requests._asked(SPARK, chosen, as_of="now", stop=threading.Event()) == made_cut(chosen)


def test_a_client_waits_for_a_pipeline_that_looks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `signal.poll.interval.ms` of a minute or more, it withdrew its request before the next look, every time."""
    monkeypatch.setattr(cut_requests, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cut_requests, "TAKE_SECONDS", 0.1)
    monkeypatch.setattr(cut_requests, "_is_served", lambda *_: True)
    stop = threading.Event()
    with without_spark.running():
        chosen = Hop(tmp_path).settings
        chosen = dataclasses.replace(chosen, source=dataclasses.replace(chosen.source, signal_poll_interval_ms=2000))
        cut._note(SPARK, chosen, made_cut(chosen))
        given = (SPARK, chosen, lambda as_of: made_cut(chosen))
        serving = threading.Thread(target=cut_requests.serve, args=given, kwargs={"stop": stop}, daemon=True)
        serving.start()
        captures.until(lambda: bool(cut_requests._rows(SPARK, chosen)))
        try:
            assert cut_requests._asked(SPARK, chosen, as_of="now", stop=threading.Event()) == made_cut(chosen)
        finally:
            stop.set()
            serving.join()
