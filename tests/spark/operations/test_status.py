"""Where the layers stand, as `status` reads it of tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.operations import status
from pipelines.silver import run as silver
from tests.harness.history_tables import HistoryHop, change

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_history_is_seen_to_wait(spark: SparkSession, lakehouse: Path) -> None:
    """Also before it has begun; where the settings keep none there is none, and what it would hold counts for nobody."""
    hop = HistoryHop(spark, lakehouse, {"things": {}, "others": {"history": False}})
    hop.bronze.append({"things": [change("c", 1, 10, "a"), change("u", 1, 20, "b")], "others": [change("c", 1, 10, "a")]})
    silver.run(spark, hop.settings)

    def read() -> tuple[status.CollectionStatus, ...]:
        return status._StatusReader(spark, hop.settings, hop.bronze.table, 0).collections()

    others, things = read()
    assert others.history is None and things.history is not None and things.gold is None
    assert (things.history.version, things.history.rows, things.history.lag_events) == (-1, 0, 2)
    hop.run()
    others, things = read()
    assert others.history is None and things.history is not None and things.gold is not None
    assert (things.history.rows, things.history.lag_events, things.gold.rows, things.gold.lag_events) == (2, 0, 1, 0)
