"""How Spark runs queries over tables: session settings, compiled or interpreted expressions, and materialized rows."""

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
    """Set optional settings of the session for a block, and restore them afterwards.

    The block's results must not depend on them: a session that takes no settings, as on serverless compute, runs the block without them.
    """
    with required_confs(spark, settings if takes_settings(spark) else {}):
        yield


@contextmanager
def required_confs(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """As `session_confs`, for settings that the block needs: raises where the session refuses one.

    Threads that share a session of Spark Connect wait for each other: otherwise each would reset the settings of the other.
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
                before[name] = previous  # restored even if the next setting is refused
            yield
        finally:
            for name, previous in before.items():
                if previous is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, previous)


WITHOUT_SETTINGS = "this session takes no settings of Delta, so that a MERGE is a write of the keys that it touches"

_locks: WeakKeyDictionary[SparkSession, threading.RLock] = WeakKeyDictionary()
"""By session: held while a block has changed its settings."""

_takes_settings: WeakKeyDictionary[SparkSession, bool] = WeakKeyDictionary()
_holds_rows: WeakKeyDictionary[SparkSession, bool] = WeakKeyDictionary()
"""What a session can do is tried once (`takes_settings`, `holds_rows`)."""

PROBE = {"spark.databricks.delta.write.txnVersion.autoReset.enabled": "true"}
"""A setting of a fenced statement that has no effect by itself."""


def takes_settings(spark: SparkSession) -> bool:
    """Whether the session accepts Delta's settings; tried once per session."""
    if spark not in _takes_settings:
        try:
            with required_confs(spark, PROBE):
                _takes_settings[spark] = True
        except PySparkException as error:
            _takes_settings[spark] = False
            log.info("%s (%s)", WITHOUT_SETTINGS, spark_failures.condition(error))
    return _takes_settings[spark]


def share(spark: SparkSession) -> None:
    """Call this before threads write in parallel: a session that they share then counts as one that takes no settings.

    The settings of a fenced MERGE would apply to the commits of other threads, which Delta could silently skip.
    """
    if sparks.is_shared(spark):
        _takes_settings[spark] = False


INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""Settings for queries over few rows: one partition and no compiled code. The plan of a wide table takes seconds to compile, and
milliseconds to run."""


FEW_BYTES = 32 * 1024 * 1024
FEW_ROWS = 50_000
"""A limit beside `FEW_BYTES`: similar documents compress a hundredfold, so that millions of rows would fit into it."""


def are_small(*touched: tables.TableRef) -> bool:
    """Whether all of these tables have at most `FEW_BYTES` and `FEW_ROWS`; false where they are not on a local file system."""
    folders = [local_log.folder(table) for table in touched]
    return all(folder is not None and _is_small(folder) for folder in folders)


def _is_small(folder: Path) -> bool:
    # The checksum first: it is one small file, and a large table's log is then not read.
    if not local_log.is_smaller(folder, FEW_BYTES):
        return False
    newest = local_log.newest_version(folder)
    live = LiveFiles(folder)
    return newest is None or (live.move_to(newest) and live.row_count() <= FEW_ROWS)


def with_values(df: DataFrame, column: str, values: Iterable[str | None]) -> DataFrame:
    """The rows that have one of the values in a STRING column.

    By a join with a table: in a condition each value costs a call of the JVM, and makes the plan larger.
    """
    value_table = df.sparkSession.createDataFrame(pa.table({column: pa.array(list(values), pa.string())}))
    return df.join(F.broadcast(value_table), column, "left_semi")


@contextmanager
def held(df: DataFrame) -> Iterator[DataFrame]:
    """The rows, `materialized` for the time of a block."""
    rows = materialized(df)
    try:
        yield rows
    finally:
        unpersist(rows)


def materialized(df: DataFrame) -> DataFrame:
    """The rows, computed once and kept until they are garbage collected, so that a MERGE does not plan them again.

    Unchanged where the platform keeps no rows for a session (`holds_rows`): they are computed at each read.
    """
    return df.localCheckpoint() if holds_rows(df.sparkSession) else df


def holds_rows(spark: SparkSession) -> bool:
    """Whether the platform keeps rows for a session, which serverless compute does not; tried once per session."""
    if spark not in _holds_rows:
        try:
            is_kept = sparks.is_classic(spark) or spark.range(1).localCheckpoint() is not None
            _holds_rows[spark] = takes_settings(spark) and is_kept
        except PySparkException:
            _holds_rows[spark] = False
    return _holds_rows[spark]


def unpersist(df: DataFrame) -> None:
    """Release `materialized` rows now instead of at a garbage collection."""
    with contextlib.suppress(Exception):  # over Spark Connect the server releases them
        rdd = df._jdf.queryExecution().analyzed().rdd()
        # As `DataFrame.unpersist`, but without its line in Spark's log: in months these lines fill a disk.
        df.sparkSession.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)
