"""Cases of silver and gold: events and the resulting rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipelines.bronze import log as bronze
from pipelines.delta import table_history
from pipelines.spark import session as sparks
from tests.harness.layers import (
    CASES,
    STEPS,
    Hop,
    expected,
    pipeline,
    with_cases,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("compiled")

STEPWISE = ("delete_rewrite", "sweep", "unreadable_late")
"""Cases in which the boundaries of batches matter. For other events the model has batches of any kind (`tests.harness.model`)."""


@pytest.fixture(scope="module")
def step_by_step(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """These cases with a run of silver after each batch, and of gold after the last two batches."""
    hop = Hop(spark, pipeline(tmp_path_factory.mktemp("steps"), {n: CASES[n].get("options", {}) for n in STEPWISE}))
    for step in range(STEPS):
        with_cases(hop, step, STEPWISE)
        hop.silver()
        if step >= STEPS - 2:
            hop.gold()
    return hop


@pytest.fixture(scope="module")
def at_once(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """All cases in one run after the last batch."""
    hop = Hop(spark, pipeline(tmp_path_factory.mktemp("once"), {n: c.get("options", {}) for n, c in CASES.items()}))
    for step in range(STEPS):
        with_cases(hop, step, CASES)
    hop.run()
    return hop


@pytest.mark.parametrize("name", STEPWISE)
def test_cases_step_by_step(step_by_step: Hop, name: str) -> None:
    """Events that are applied batch by batch give the case's rows in silver and gold."""
    case = CASES[name]
    assert expected(case, step_by_step.rows(name)) == case["silver"], case["about"]
    assert step_by_step.documents(name) == case["gold"], case["about"]


@pytest.mark.parametrize("name", CASES)
def test_cases_at_once(at_once: Hop, name: str) -> None:
    """The same events in one range give the same rows."""
    case = CASES[name]
    assert expected(case, at_once.rows(name)) == case["silver"], case["about"]
    assert at_once.documents(name) == case["gold"], case["about"]


@pytest.mark.journey
def test_repeated_events_change_nothing(at_once: Hop) -> None:
    """If all events are repeated, as by a stream that starts over, no table changes."""
    before = {name: (at_once.rows(name), at_once.documents(name)) for name in CASES}
    at_once.bronze.repeat()
    at_once.run()
    after = {name: (at_once.rows(name), at_once.documents(name)) for name in CASES}
    assert after == before


def test_nothing_new_no_commit(step_by_step: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without new events commits nothing in silver and gold, and does not start Spark."""

    def start() -> SparkSession:
        raise AssertionError("Spark was started")

    refs = [table(name) for name in STEPWISE for table in (step_by_step.silver_table, step_by_step.gold_table)]
    before = [table_history.version(step_by_step.spark, ref) for ref in refs]
    newest = bronze.newest(step_by_step.spark, step_by_step.bronze.table)
    monkeypatch.setattr(bronze, "newest", lambda *_: newest)  # which the commits of a capture say
    idle = Hop(sparks.lazily(start), step_by_step.settings)
    assert (idle.silver().events, idle.gold().changed) == (0, 0)
    assert [table_history.version(step_by_step.spark, ref) for ref in refs] == before
