"""A long span of events without a query is cut into ranges, each with a commit and a position, so that little is in memory at a time.

If the first range needs Spark, so does the whole span: `tests/spark/silver/test_in_process.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_core.bronze.batch_range import BatchRange
from pipelines.bronze import collection_events, survey
from pipelines.bronze.registry import Namespace
from pipelines.delta import local_log
from pipelines.silver import in_process
from tests.harness import bronze_rows, oracle, without_spark
from tests.harness.without_spark import Hop, Log


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        yield Hop(tmp_path)


def test_the_size_of_an_event_is_also_that_of_its_changes(hop: Hop) -> None:
    """Updates without their documents counted as nothing, so that ranges of large ones were cut by their number alone."""
    bronze = Log(hop)
    bronze.append({"t": [{"op": "u", "key": 1, "at": 10, "update": {"text": "x" * 10_000}}]})
    counts = survey.by_batch(without_spark.SPARK, hop.bronze, Namespace(bronze_rows.DB, "t"), BatchRange(0, 9))
    assert counts is not None and counts.row_bytes > 1000


@pytest.mark.parametrize(
    ("bound", "positions"),
    [(("PORTION_EVENTS", 2), [3, 5, 7]), (("PORTION_BYTES", 1), [2, 3, 4, 5, 6, 7])],
    ids=["events", "bytes"],
)
def test_a_long_span_is_applied_range_by_range(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, bound: tuple[str, int], positions: list[int]
) -> None:
    bronze = Log(hop)
    bronze.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "n": 0}} for key in range(4)]})
    hop.run()
    monkeypatch.setattr(collection_events, *bound)
    monkeypatch.setattr(in_process, "SERVICE_EVENTS", 2)
    for at, (key, n) in enumerate(((0, 1), (1, 1), (2, 2), (3, 3), (0, 0), (1, 1))):
        bronze.append({"t": [{"op": "u", "key": key, "at": 20 + at, "after": {"_id": key, "n": n}}]})
    read, in_order = [], collection_events.in_order
    with monkeypatch.context() as patch:
        patch.setattr(
            collection_events,
            "in_order",
            lambda *given, **named: read.append(threading.current_thread().name) or in_order(*given, **named),
        )
        hop.silver()
    if bound[0] == "PORTION_EVENTS":  # each document is larger than the other bound
        assert [name.split("_")[0] for name in read] == ["medallion-ahead"] * len(positions)
    commits = local_log.commits(Path(hop.silver_table.path or ""))
    assert {commit.metadata.get("to") for commit in commits if commit.metadata} - {None} == {1, *positions}
    hop.run()
    assert oracle.rows(oracle.read(hop.gold_table.path or ""), by="__key") == [
        {"_id": key, "n": key, "__key": str(key)} for key in range(4)
    ]
