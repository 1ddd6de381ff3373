"""How far long work is: what silver and gold tell, and how it is shown."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import bson
import pytest

from jobs.commands import application
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.terminal import live_lines
from pipelines.work_progress import WorkCounter, WorkProgress
from tests.harness import processes, without_spark
from tests.harness.without_spark import SPARK


def test_silver_and_gold_tell_how_far_they_are(tmp_path: Path) -> None:
    """Silver counts the events of each range, both count the tables."""
    heard: list[WorkProgress] = []
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        for collection in ("a", "b"):
            hop.append((1, bson.encode({"_id": 1})), (2, bson.encode({"_id": 2})), collection=collection)
        silver.run(SPARK, hop.settings, progress=heard.append)
        first, last = heard[0], heard[-1]
        assert (first.work, first.tables, first.all_tables, first.events, first.all_events) == ("silver", 0, 2, 0, 4)
        assert (last.tables, last.events) == (2, 4)
        heard.clear()
        gold.run(SPARK, hop.settings, progress=heard.append)
    assert [(each.work, each.tables, each.all_tables) for each in heard] == [("gold", count, 2) for count in range(3)]


def test_what_a_stop_has_left_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a service pauses for a cut, its log would say every 30 seconds that silver is at work on the rest."""
    heard: list[WorkProgress] = []
    stop, publish, apply = threading.Event(), gold._GoldRun._applied, silver._SilverRun._applied
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        for collection in ("a", "b"):
            hop.append((1, bson.encode({"_id": 1})), collection=collection)
        monkeypatch.setattr(silver._SilverRun, "_applied", lambda run, *given: (stop.set(), apply(run, *given))[1])
        silver.run(SPARK, hop.settings, stop=stop, progress=heard.append)
        assert (1, 2) in [(each.tables, each.all_tables) for each in heard] and heard[-1].tables == heard[-1].all_tables
        silver.run(SPARK, hop.settings)
        stop.clear()
        monkeypatch.setattr(gold._GoldRun, "_applied", lambda run, *given: (stop.set(), publish(run, *given))[1])
        heard.clear()
        gold.run(SPARK, hop.settings, stop=stop, progress=heard.append)
        assert (1, 2) in [(each.tables, each.all_tables) for each in heard] and heard[-1].tables == heard[-1].all_tables


def test_a_table_that_fails_counts_too() -> None:
    """Otherwise the last line of a run would say that it waits for a table."""
    heard: list[WorkProgress] = []
    counter = WorkCounter("silver", heard.append)
    counter.begin(1)

    def fails(spark: object, item: str) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match="t"):
        counter.counting(fails)(SPARK, "t")
    assert heard[-1].tables == 1


class _Held:
    """Work on a table in a thread of its own, which goes on until it is let go."""

    def __init__(self, counter: WorkCounter) -> None:
        self._begun, self._let_go = threading.Event(), threading.Event()

        def act(spark: Any, item: str) -> None:
            self._begun.set()
            assert self._let_go.wait(60)

        self._thread = threading.Thread(target=counter.counting(act), args=(SPARK, "t"))
        self._thread.start()
        assert self._begun.wait(60)

    def end(self) -> None:
        self._let_go.set()
        self._thread.join()


def test_work_that_goes_on_counts_in_the_next_round() -> None:
    """With the time since it began, or its round, which begins anew each second, would never be logged. Its events were counted before."""
    heard: list[WorkProgress] = []
    counter = WorkCounter("silver", heard.append)
    counter.begin(2, 100)
    counter.counting(lambda spark, item: counter.add(30))(SPARK, "u")
    held = _Held(counter)
    time.sleep(0.05)
    counter.begin(1, 7)
    assert (heard[-1].tables, heard[-1].all_tables, heard[-1].all_events) == (0, 2, 0) and heard[-1].seconds >= 0.05
    counter.counting(lambda spark, item: counter.add(7))(SPARK, "u")
    held.end()
    assert (heard[-1].tables, heard[-1].all_tables, heard[-1].events, heard[-1].all_events) == (2, 2, 0, 0)
    counter.begin(1, 7)
    assert (heard[-1].all_tables, heard[-1].all_events) == (1, 7) and heard[-1].seconds < 0.05


def test_work_that_ends_before_the_next_count_is_no_part_of_it() -> None:
    """Otherwise the count would never be complete, and be logged for ever."""
    heard: list[WorkProgress] = []
    counter = WorkCounter("silver", heard.append)
    counter.begin(1)
    held = _Held(counter)
    held.end()
    counter.begin(1)
    counter.counting(lambda spark, item: None)(SPARK, "u")
    assert (heard[-1].tables, heard[-1].all_tables) == (1, 1)


def test_items_count_however_their_turn_ends() -> None:
    """Also one that is passed over; not one at which the work was stopped."""
    heard: list[WorkProgress] = []
    for item in WorkCounter("models", heard.append).each(["made", "skipped", "stopped"]):
        if item == "skipped":
            continue
        if item == "stopped":
            break
    assert [(each.tables, each.all_tables) for each in heard] == [(0, 3), (1, 3), (2, 3)]


def test_the_live_line_goes_on_while_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lines.time, "monotonic", lambda: now)
    now = 5.0
    line = live_lines._RunningWork(WorkProgress("maintain", 0, 1, 0, 0, 1.0))
    now = 64.0
    assert line.__rich__().plain == "maintain: 0 of 1 tables, running for 1 min"


def test_the_line_has_a_rate_where_events_are_counted() -> None:
    """Gold does not know beforehand how many rows it will write."""
    assert live_lines.work_line(WorkProgress("gold", 3, 3000, 0, 0, 9.0)) == "gold: 3 of 3,000 tables"
    # One table may take hours: the line shows that the command is still at work.
    assert live_lines.work_line(WorkProgress("verify", 0, 1, 0, 0, 190.0)) == "verify: 0 of 1 tables, running for 3 min 10 s"
    line = live_lines.work_line(WorkProgress("silver", 3, 3000, 1000, 61_000, 10.0))
    assert line == "silver: 3 of 3,000 tables, 1,000 of 61,000 events, 100/s, 10 min left"
    # Most events are in the last table, whose first range is not applied yet.
    line = live_lines.work_line(WorkProgress("silver", 10, 11, 112, 120_221, 26.0))
    assert line == "silver: 10 of 11 tables, 112 of 120,221 events"
    # One collection failed.
    assert live_lines.work_line(WorkProgress("silver", 3, 3, 100, 300, 9.0)) == "silver: 3 of 3 tables, 100 of 300 events"
    # Files are compacted after the last event: no rate would be true.
    assert live_lines.work_line(WorkProgress("silver", 0, 1, 300, 300, 9.0)) == "silver: 0 of 1 tables, 300 of 300 events"


def test_without_a_terminal_long_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Not the rounds of a service, which take moments, and not each step of long ones."""
    caplog.set_level(logging.INFO)
    hear = live_lines.work_progress(is_service=True)
    hear(WorkProgress("silver", 1, 3, 0, 0, 0.5))
    assert not caplog.records
    for tables in (1, 2):
        hear(WorkProgress("silver", tables, 3, 0, 0, 60.0))
        hear(WorkProgress("gold", tables, 3, 0, 0, 60.0))
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        (f"pipelines.{work}", f"progress: {work}: 1 of 3 tables, running for 1 min") for work in ("silver", "gold")
    ]
    for work in ("silver", "gold"):  # otherwise a line would come during another test
        hear(WorkProgress(work, 3, 3, 0, 0, 60.0))


def test_short_rounds_are_never_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service always works on a few events: a look every 30 seconds finds it in the middle of a round."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(live_lines, "LOG_EVERY_SECONDS", 0.05)
    hear = live_lines.work_progress(is_service=True)
    hear(WorkProgress("silver", 1, 3, 0, 0, 0.5))
    time.sleep(0.2)
    hear(WorkProgress("silver", 3, 3, 0, 0, 0.7))
    assert not caplog.records


def test_a_step_that_takes_minutes_is_logged_too(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a MERGE of a large table nothing is heard before its end: without a line, it looks as if the command hung."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(live_lines, "LOG_EVERY_SECONDS", 0.05)
    hear = live_lines.work_progress(is_service=True)
    hear(WorkProgress("gold", 1, 2, 0, 0, 60.0))
    processes.until(lambda: len(caplog.records) > 2, seconds=5, what="a line although nothing was heard")
    hear(WorkProgress("gold", 2, 2, 0, 0, 61.0))
    time.sleep(0.1)
    count = len(caplog.records)
    time.sleep(0.2)
    assert len(caplog.records) == count, "a service that waits for events logs nothing"
    # The end is a line of its own where the one before is old enough.
    lines = {each.getMessage() for each in caplog.records} - {"progress: gold: 2 of 2 tables"}
    assert lines == {"progress: gold: 1 of 2 tables, running for 1 min"}


def test_work_without_progress_of_its_own_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild from a large bronze takes many minutes, and says nothing before its end."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(live_lines, "LOG_EVERY_SECONDS", 0.05)
    with live_lines.waiting("rebuild", is_logged=True):
        processes.until(lambda: len(caplog.records) > 1, seconds=5, what="lines during the work")
    assert {(each.name, each.getMessage()) for each in caplog.records} == {
        ("pipelines.rebuild", "progress: rebuild: running for 0 s")
    }


def test_a_command_that_prints_a_result_logs_its_progress_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`medallion verify` of a large collection takes minutes, and in a scheduler's log it looked as if it hung."""
    application.quiet_log()
    hear = live_lines.work_progress()
    hear(WorkProgress("verify", 1, 3, 0, 0, 60.0))
    hear(WorkProgress("verify", 3, 3, 0, 0, 61.0))
    logging.getLogger("pipelines.verify").info("a detail")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and " info pipelines.verify progress: verify: 1 of 3 tables, " in lines[0]
