"""Settings of Spark: those that our tables need to be right, and those that make a single machine quick."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cdc_core import errors

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

# Settings without which tables would be wrong: every session gets them, wherever it came from.
REQUIRED: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",  # what TIMESTAMP means in a statement
    # A time before 1582 is the same to Spark and to whoever reads Parquet without it, as this process does.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.parser.escapedStringLiterals": "false",  # with it `\u0024` in a literal is no `$`, and no key that has one is found
    "spark.sql.ansi.enforceReservedKeywords": "false",  # with it Delta does not read statistics of a column `offset`
    "spark.sql.files.ignoreMissingFiles": "false",  # a position would be behind events that nobody has read
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.databricks.delta.stalenessLimit": "0",  # a query would not see what another process has just committed, and the history does
    "spark.sql.runSQLOnFiles": "true",  # without it a table has a name in a catalog, or none
    "spark.sql.retainGroupColumns": "true",  # without it what is grouped has lost its keys
    "spark.databricks.delta.replaceWhere.dataColumns.enabled": "true",  # rows are removed and replaced by what their columns hold
    "spark.sql.variable.substitute": "false",  # no document, name or path has its `${…}` replaced by what the process knows
}

BY_PATH: Mapping[str, str] = {"spark.sql.defaultCatalog": "spark_catalog"}
"""What a lakehouse below a root needs, too: the one catalog that takes a path for a table's name."""

OF_OTHERS = (
    "spark.databricks.delta.write.",  # with a fence Delta skips all commits of the session to a table but the first
    "spark.databricks.delta.commitInfo.",  # a table is at the position that its commits say, and whose they say it is
    # Delta makes no table of ours for Iceberg's readers, or with a list of its files: they know no rows that are marked as deleted.
    "spark.databricks.delta.properties.defaults.enableIcebergCompat",
    "spark.databricks.delta.properties.defaults.universalFormat.",
    "spark.databricks.delta.properties.defaults.compatibility.",
)
"""How the settings begin that are for what somebody else writes in a session: ours have none of them."""

# Spark compiles Java all the time, its own parser's included. With HotSpot's thresholds the optimizing compiler takes a third of
# two cores' time, mostly for methods that run a few thousand times: it gets those that run more.
_COMPILER = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=4000 "
    "-XX:Tier4CompileThreshold=60000"
)

# Delta numbers its commits with the digits of the machine's language: where those are not 0 to 9, it finds none of them again.
LANGUAGE = "-Duser.language=en"

# A batch's rows live for seconds. With half of the memory for what is young they are gone before they count as old, of which a
# collection takes a third of a second.
_COLLECTOR = "-XX:+UseParallelGC -XX:NewRatio=1"
_COLLECTORS = re.compile(r"-XX:\+Use\w+GC\b")

MUST_BE_ACCEPTED = {"spark.sql.session.timeZone"}
"""Those of `REQUIRED` without which values would be wrong; a platform that refuses one of the others decides it as we
would."""

SINGLE_DRIVER = "spark.medallion.lakehouse.singleDriver"
"""The setting `lakehouse.single_driver`, as a session carries it."""

# What makes a session of one machine quick.
LOCAL: Mapping[str, str] = {
    "spark.sql.extensions": EXTENSION,
    "spark.sql.catalog.spark_catalog": CATALOG,
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Otherwise each function of a column asks the JVM ten times, to note the line of Python that called it: 4 ms.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    # A batch of silver runs some 140 different plans: of the default's 100 classes none would be there for the next batch.
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.shuffle.partitions": str(max(2, min(8, os.cpu_count() or 2))),
    # A few documents of a large file are read by their row groups (`live_files.rows_at`): of the default's 128 MB five are half a gigabyte.
    # And by so many rows, as `live_files.PART_ROWS`: where documents resemble each other a million of them take 32 MB.
    "spark.hadoop.parquet.block.size": str(32 * 2**20),
    "spark.hadoop.parquet.block.row.count.limit": str(1 << 16),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": f"-Xss4m -XX:-UsePerfData {_COLLECTOR} {_COMPILER}",
}

LOOPBACK: Mapping[str, str] = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""Where the driver listens for executors of its own machine; those of a cluster have to reach it."""

_CONFIDENTIAL = re.compile(r"(?i)secret|password|token|access[.]?key")  # Spark's own `spark.redaction.regex`

# For a run of a minute or two: half the CPU time at the start (13 s, not 26, to the second commit), a quarter more for each
# document after that. Silver and gold over 500,000 nested documents: 52 s of processor time, not 67; even at about 1.7 million.
# The one compiler alone would get a cache of 48 MB, which a few wide tables fill: the JVM then crawls, and may end.
SHORT_RUN: Mapping[str, str] = {
    "spark.driver.extraJavaOptions": (
        f"{LOCAL['spark.driver.extraJavaOptions']} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    )
}

# A capture commits and reads snapshots' chunks, two of twice `commit.max.bytes` at a time: its JVM needs less memory than silver's,
# begins as quickly as it can, and gives back what a snapshot took.
CAPTURE: Mapping[str, str] = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": (
        f"-Xss4m -XX:-UsePerfData -XX:+UseSerialGC -XX:MaxHeapFreeRatio=40 {_COMPILER} "
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=128m"
    ),
}


def is_confidential(name: str) -> bool:
    """Whether a setting may be a secret, which must not stand on a command line: what Spark hides, and all of file
    systems."""
    return name.startswith("spark.hadoop.") or _CONFIDENTIAL.search(name) is not None


def check_catalog(catalog: str | None, settings: Mapping[str, str]) -> None:
    """Raise `SettingsError` where a Spark with these settings does not have the catalog, or forgets it when it ends."""
    if catalog is None:
        return
    if catalog != "spark_catalog" and f"spark.sql.catalog.{catalog}" not in settings:
        raise errors.SettingsError(
            f"lakehouse.catalog: this Spark has no catalog {catalog}; define it with --conf "
            f"spark.sql.catalog.{catalog}=… (the catalog's class), or in SPARK_CONF_DIR/spark-defaults.conf"
        )
    if (
        catalog == "spark_catalog"
        and settings.get("spark.sql.catalogImplementation") == "in-memory"
        and settings.get("spark.sql.catalog.spark_catalog") == CATALOG
    ):
        raise errors.SettingsError(
            "lakehouse.catalog: spark_catalog has no metastore here and would forget its tables. Set --conf "
            "spark.sql.catalogImplementation=hive and spark.sql.warehouse.dir, or use lakehouse.root"
        )


def defaults() -> dict[str, str]:
    """The settings of `SPARK_CONF_DIR/spark-defaults.conf`; none where the variable is not set."""
    folder = os.environ.get("SPARK_CONF_DIR")
    if not folder or not Path(folder, "spark-defaults.conf").is_file():
        return {}
    lines = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    pairs = (
        re.split(r"[\s=]+", line.strip(), maxsplit=1) for line in lines if line.strip() and not line.strip().startswith("#")
    )
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def startable(options: str) -> str:
    """A JVM's options without a collector where the environment names one, as it does in many containers: a JVM that is
    given two does not start."""
    return _COLLECTORS.sub("", options) if _COLLECTORS.search(of_environment()) else options


def of_environment() -> str:
    """The options that a JVM takes from the environment of this process."""
    names = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    return " ".join(os.environ.get(name, "") for name in names)
