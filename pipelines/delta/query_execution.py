"""How Spark runs the queries over tables: with which settings, compiled or not, and computed how often."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cdc_core.tables import layout as tables
from pipelines.delta import local_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def session_confs(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """The session's settings for the time of a block; what was there before comes back."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, previous)


INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""In one piece, without compiled code. A plan of a wide table takes seconds to compile, and milliseconds to run over a few rows."""


FEW_BYTES = 32 * 1024 * 1024


def are_small(*touched: tables.TableRef) -> bool:
    """Whether all of these tables are known to be small; only on a local file system, where the log tells it without a job."""
    folders = [local_log.folder(table) for table in touched]
    return all(folder is not None and local_log.is_smaller(folder, FEW_BYTES) for folder in folders)


@contextmanager
def held(df: DataFrame) -> Iterator[DataFrame]:
    """The rows, `computed` and held for the time of a block."""
    rows = computed(df)
    try:
        yield rows
    finally:
        release(rows)


def computed(df: DataFrame) -> DataFrame:
    """The rows, computed once and held until they are released, so that a MERGE does not plan them again."""
    return df.localCheckpoint()


def release(df: DataFrame) -> None:
    """Let go of `computed` rows now, and not when somebody collects garbage."""
    with contextlib.suppress(Exception):  # over Spark Connect the server does it
        df._jdf.queryExecution().analyzed().rdd().unpersist(False)
