"""Settings of Spark: those that correct tables require, and those that make a single machine fast."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cdc_core import errors
from cdc_core.tables.layout import SPARK_CATALOG

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
IMPLEMENTATION = f"spark.sql.catalog.{SPARK_CATALOG}"
"""The name of the setting for the class of Spark's own catalog, `CATALOG` here."""

# Settings without which tables would be wrong. Every session gets them, also a given one.
REQUIRED: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",  # what TIMESTAMP means in a statement
    # Times before 1582 are then the same for Spark and for other readers of Parquet, such as this process.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.parser.escapedStringLiterals": "false",  # with it `\u0024` in a literal is not `$`, and keys with `$` are not found
    "spark.sql.ansi.enforceReservedKeywords": "false",  # with it Delta does not read statistics of a column `offset`
    "spark.sql.files.ignoreMissingFiles": "false",  # with it a position could be after events that were not read
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.databricks.delta.stalenessLimit": "0",  # otherwise a query may miss commits of other processes that the history has
    "spark.sql.runSQLOnFiles": "true",  # without it a path is not a table's name
    "spark.sql.retainGroupColumns": "true",  # without it the result of a GROUP BY lacks its keys
    "spark.databricks.delta.replaceWhere.dataColumns.enabled": "true",  # rows are removed and replaced by conditions of data columns
    "spark.sql.variable.substitute": "false",  # with it `${…}` in a document, name or path would be replaced
}

BY_PATH: Mapping[str, str] = {"spark.sql.defaultCatalog": SPARK_CATALOG}
"""A setting for a lakehouse below a root: only this catalog takes a path for a table's name."""

OF_OTHERS = (
    "spark.databricks.delta.write.",  # with a fence Delta skips all commits of the session to a table but the first
    "spark.databricks.delta.commitInfo.",  # a table's position and owner are in the `userMetadata` of its commits
    # With these, Delta would create tables for readers that do not support deletion vectors.
    "spark.databricks.delta.properties.defaults.enableIcebergCompat",
    "spark.databricks.delta.properties.defaults.universalFormat.",
    "spark.databricks.delta.properties.defaults.compatibility.",
)
"""Prefixes of settings for other writes in a given session; they are removed."""

# Spark compiles Java code all the time. With HotSpot's thresholds the optimizing compiler takes a third of the time of two cores, mostly
# for methods that run a few thousand times. With these it compiles only methods that run more often.
_COMPILER = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=4000 "
    "-XX:Tier4CompileThreshold=60000"
)

# Delta formats the numbers of commits with the digits of the JVM's language. Where those are not 0 to 9, it does not find its commits.
LANGUAGE = "-Duser.language=en"

# A batch's rows live for seconds. With half of the heap for the young generation, they are collected before they reach the old one, whose
# collection takes a third of a second.
_COLLECTOR = "-XX:+UseParallelGC -XX:NewRatio=1"
_COLLECTORS = re.compile(r"-XX:\+Use\w+GC\b")

MUST_BE_ACCEPTED = {"spark.sql.session.timeZone"}
"""Those of `REQUIRED` that a session must accept. A platform that refuses one of the others has the same value."""

SINGLE_DRIVER = "spark.medallion.lakehouse.singleDriver"
"""The name of the setting `lakehouse.single_driver` in a session."""

# Settings that make a session of one machine fast.
LOCAL: Mapping[str, str] = {
    "spark.sql.extensions": EXTENSION,
    IMPLEMENTATION: CATALOG,
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Otherwise each column function calls the JVM ten times, 4 ms, to note the line of Python that called it.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    # A batch of silver runs some 140 different plans: with the default of 100, the next batch would find none of them.
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.shuffle.partitions": str(max(2, min(8, os.cpu_count() or 2))),
    # A few documents of a large file are read by row groups (`live_files.rows_at`): with the default of 128 MB, five of them would be half
    # a gigabyte. The rows are limited to `live_files.PART_ROWS`, too: a million similar documents fit into 32 MB.
    "spark.hadoop.parquet.block.size": str(32 * 2**20),
    "spark.hadoop.parquet.block.row.count.limit": str(1 << 16),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": f"-Xss4m -XX:-UsePerfData {_COLLECTOR} {_COMPILER}",
}

LOOPBACK: Mapping[str, str] = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""The driver's address for executors of the same machine. For those of a cluster it must be reachable."""

_CONFIDENTIAL = re.compile(r"(?i)secret|password|token|access[.]?key")  # Spark's own `spark.redaction.regex`

# For a run of a minute or two, without the optimizing compiler: half the CPU time at the start (13 s instead of 26 to the second commit), a
# quarter more for each document after that. Silver and gold over 500,000 nested documents take 52 s of CPU time instead of 67; at about 1.7
# million documents both are equal. The default code cache of this mode, 48 MB, would be filled by a few wide tables: the JVM then becomes
# very slow, and may end.
SHORT_RUN: Mapping[str, str] = {
    "spark.driver.extraJavaOptions": (
        f"{LOCAL['spark.driver.extraJavaOptions']} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    )
}

# A capture commits, and reads two chunks of a snapshot at a time, each of up to twice `commit.max.bytes`. Its JVM needs less memory than
# silver's, starts fast, and returns the memory of a snapshot to the system.
CAPTURE: Mapping[str, str] = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": (
        f"-Xss4m -XX:-UsePerfData -XX:+UseSerialGC -XX:MaxHeapFreeRatio=40 {_COMPILER} "
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=128m"
    ),
}


def is_confidential(name: str) -> bool:
    """Whether a setting may be a secret, which must not be on a command line: those that Spark redacts, and all of file systems."""
    return name.startswith("spark.hadoop.") or _CONFIDENTIAL.search(name) is not None


def check_catalog(catalog: str | None, settings: Mapping[str, str]) -> None:
    """Raise `SettingsError` where a Spark with these settings does not have the catalog, or keeps it only in memory."""
    if catalog is None:
        return
    if catalog != SPARK_CATALOG and f"spark.sql.catalog.{catalog}" not in settings:
        raise errors.SettingsError(
            f"lakehouse.catalog: this Spark has no catalog {catalog}; define it with --conf "
            f"spark.sql.catalog.{catalog}=… (the catalog's class), or in SPARK_CONF_DIR/spark-defaults.conf"
        )
    if (
        catalog == SPARK_CATALOG
        and settings.get("spark.sql.catalogImplementation") == "in-memory"
        and settings.get(IMPLEMENTATION) == CATALOG
    ):
        raise errors.SettingsError(
            f"lakehouse.catalog: {SPARK_CATALOG} has no metastore here and would forget its tables. Set --conf "
            "spark.sql.catalogImplementation=hive and spark.sql.warehouse.dir, or use lakehouse.root"
        )


def defaults() -> dict[str, str]:
    """The settings of `SPARK_CONF_DIR/spark-defaults.conf`, in the format of Java's properties; none where the variable is not set."""
    folder = os.environ.get("SPARK_CONF_DIR")
    if not folder or not Path(folder, "spark-defaults.conf").is_file():
        return {}
    import javaproperties  # takes 50 ms, and few have the file

    path = Path(folder, "spark-defaults.conf")
    try:
        entries = javaproperties.loads(path.read_text(encoding="utf-8"))
    except javaproperties.InvalidUEscapeError as error:
        hint = r"write a backslash as \\: Spark does not start with this file"
        raise errors.SettingsError(errors.Problem(str(path), str(error), hint)) from None
    return {name: value.strip() for name, value in entries.items() if value.strip()}


def startable(options: str) -> str:
    """JVM options without a garbage collector where the environment names one: a JVM with two does not start."""
    return _COLLECTORS.sub("", options) if _COLLECTORS.search(of_environment()) else options


def of_environment() -> str:
    """The JVM options in the environment of this process."""
    names = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    return " ".join(os.environ.get(name, "") for name in names)
