"""The state of the layers, as `status` reads it from tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.bronze import batch_rows
from pipelines.operations import backlog, row_counts, status
from pipelines.silver import run as silver
from tests.harness.history_tables import HistoryHop, change
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_history_is_seen_to_wait(spark: SparkSession, lakehouse: Path) -> None:
    """This holds before the first run, too. A collection without a history has no history status, and none of its events wait for one."""
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


def test_what_is_counted_without_a_query_is_what_spark_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows hidden by deletion vectors, rows of deleted documents, incomplete rows, rows with rescued values, the lag of each layer in
    several collections, and the rate of all events.
    """
    hop = Hop(spark, pipeline(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"}))
    hop.bronze.append({"orders": [document(key, 10, "c", v=1) for key in range(5)]})
    hop.run()
    odd = {"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "v": {"a": 1}}}
    hop.bronze.append(
        {"orders": [odd, {"op": "d", "key": 2, "at": 20}, {"op": "u", "key": 9, "at": 20, "update": {"v": 1}}]}
    )
    hop.run()
    hop.bronze.append({"orders": [document(7, 30, "c")], "others": [document(1, 30, "c"), document(2, 31, "c")]})
    hop.silver()
    spark.sql(f"OPTIMIZE {hop.bronze.table}")  # files with batches that some layers have applied and others have not
    hop.bronze.append({"orders": [document(8, 40, "c")], "others": [{"drop": 50}], "found": [document(3, 41, "c")]})
    spark.sql(f"UPDATE {hop.bronze.table} SET ts_ms = ts_ms + 1000 * batch")

    def read() -> tuple[float | None, tuple[status.CollectionStatus, ...]]:
        reader = status._StatusReader(spark, hop.settings, hop.bronze.table, 0)
        rate = backlog.captured_rate(spark, hop.bronze.table, 4, within_seconds=2, within_batches=1000)
        return rate, reader.collections()

    counted = read()
    monkeypatch.setattr(row_counts, "_counts_here", lambda _: None)
    monkeypatch.setattr(batch_rows, "behind", lambda *_, **__: None)
    assert counted == read()
    rate, (found, here, others) = counted
    assert (found.collection, found.silver, found.waiting_events) == (f"{here.collection.partition('.')[0]}.found", None, 1)
    assert rate is not None and here.silver is not None and here.gold is not None and others.silver is not None
    assert (here.silver.lag_events, here.gold.lag_events, others.silver.lag_events, others.gold) == (1, 2, 1, None)
    assert (here.silver.rows, here.silver.deleted, here.silver.incomplete, here.silver.rescued) == (7, 1, 1, 1)
    assert (here.gold.rows, here.gold.rescued) == (4, 1)
