"""How Spark runs the queries over tables: with which settings, compiled or not, and computed how often."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from cdc_core.tables import layout as tables
from pipelines.delta import local_log
from pipelines.delta.live_files import LiveFiles
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger(__name__)


@contextmanager
def session_confs(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """The session's settings for the time of a block, which none of its results depends on; what was there before comes
    back.

    A session that takes no settings, as on serverless compute, runs the block as it is.
    """
    with required_confs(spark, settings if takes_settings(spark) else {}):
        yield


@contextmanager
def required_confs(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """As `session_confs`, where the block would do something else without them: raises where the session refuses one.

    Threads that share a session of Spark Connect wait for each other here: each would take back what the other has set.
    """
    lock = (
        contextlib.nullcontext() if not settings or sparks.is_classic(spark) else _locks.setdefault(spark, threading.RLock())
    )
    with lock:
        before: dict[str, str | None] = {}
        try:
            for name, value in settings.items():
                previous = spark.conf.get(name, None)
                spark.conf.set(name, value)
                before[name] = previous  # where the next one is refused, this one is taken back, too
            yield
        finally:
            for name, previous in before.items():
                if previous is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, previous)


WITHOUT_SETTINGS = "this session takes no settings of Delta, so that a MERGE is a write of the keys that it touches"

_locks: WeakKeyDictionary[SparkSession, threading.RLock] = WeakKeyDictionary()
_takes_settings: WeakKeyDictionary[SparkSession, bool] = WeakKeyDictionary()
_holds_rows: WeakKeyDictionary[SparkSession, bool] = WeakKeyDictionary()

PROBE = {"spark.databricks.delta.write.txnVersion.autoReset.enabled": "true"}
"""A setting of a fenced statement, which changes nothing by itself."""


def takes_settings(spark: SparkSession) -> bool:
    """Whether the session takes Delta's settings; tried once for each session."""
    if spark not in _takes_settings:
        try:
            with required_confs(spark, PROBE):
                _takes_settings[spark] = True
        except PySparkException as error:
            _takes_settings[spark] = False
            log.info("%s (%s)", WITHOUT_SETTINGS, spark_failures.condition(error))
    return _takes_settings[spark]


def share(spark: SparkSession) -> None:
    """Before threads write side by side: where they have one session, it takes no settings. Those of a fenced MERGE would fence, or leave
    out without a word, whatever another thread commits meanwhile."""
    if sparks.is_shared(spark):
        _takes_settings[spark] = False


INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""In one piece, without compiled code. A plan of a wide table takes seconds to compile, and milliseconds to run over a
few rows."""


FEW_BYTES = 32 * 1024 * 1024
FEW_ROWS = 50_000
"""Documents that resemble each other compress a hundredfold: without compiled code, millions of rows would fit into
`FEW_BYTES`."""


def are_small(*touched: tables.TableRef) -> bool:
    """Whether all of these tables are known to be small; only on a local file system, where the log tells it without a
    job."""
    folders = [local_log.folder(table) for table in touched]
    return all(folder is not None and _is_small(folder) for folder in folders)


def _is_small(folder: Path) -> bool:
    # The checksum first: it is one small file, and of a table that is large the log need not be read.
    if not local_log.is_smaller(folder, FEW_BYTES):
        return False
    newest = local_log.newest_version(folder)
    live = LiveFiles(folder)
    return newest is None or (live.at(newest) and live.row_count() <= FEW_ROWS)


def with_values(df: DataFrame, column: str, values: Iterable[str | None]) -> DataFrame:
    """The rows that have one of these texts in a column. As a table and not as a condition: a value costs a call of the JVM there, and the
    plan grows with them."""
    named = df.sparkSession.createDataFrame(pa.table({column: pa.array(list(values), pa.string())}))
    return df.join(F.broadcast(named), column, "left_semi")


@contextmanager
def held(df: DataFrame) -> Iterator[DataFrame]:
    """The rows, `materialized` and held for the time of a block."""
    rows = materialized(df)
    try:
        yield rows
    finally:
        unpersist(rows)


def materialized(df: DataFrame) -> DataFrame:
    """The rows, computed once and held until nothing refers to them, so that a MERGE does not plan them again.

    Where the platform keeps no rows for a session, as on serverless compute, they are computed each time that they are read.
    """
    return df.localCheckpoint() if holds_rows(df.sparkSession) else df


def holds_rows(spark: SparkSession) -> bool:
    """Whether the platform keeps rows for a session; tried once for each."""
    if spark not in _holds_rows:
        try:
            is_kept = sparks.is_classic(spark) or spark.range(1).localCheckpoint() is not None
            _holds_rows[spark] = takes_settings(spark) and is_kept
        except PySparkException:
            _holds_rows[spark] = False
    return _holds_rows[spark]


def unpersist(df: DataFrame) -> None:
    """Let go of `materialized` rows now, and not when somebody collects garbage."""
    with contextlib.suppress(Exception):  # over Spark Connect the server does it
        rdd = df._jdf.queryExecution().analyzed().rdd()
        # As the rows' own `unpersist`, but for the line that this writes into Spark's log: in months they fill a disk.
        df.sparkSession.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)
