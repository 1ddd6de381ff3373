"""Rows that are computed once, held, and released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.delta import query_execution
from pipelines.spark import jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_rows_that_are_let_go_leave_no_line_in_the_log_of_spark(spark: SparkSession) -> None:
    """A batch holds rows several times, and a service has a batch each second: within months such lines would fill the disk."""
    held, log = spark.sparkContext._jsc.getPersistentRDDs, jvm.log_file()
    before, said = set(held()), log.stat().st_size
    with query_execution.held(spark.range(3)) as rows:
        assert rows.count() == 3 and len(set(held()) - before) == 1
    assert set(held()) <= before
    with log.open("rb") as lines:
        lines.seek(said)
        assert b"locally checkpointed" not in lines.read()
