"""Upkeep of tables: compaction, removal of unreferenced files, and checkpoints of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from cdc_core.tables import layout as tables
from pipelines.delta import direct_log, query_execution, table_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTION = {
    "spark.databricks.delta.optimize.minFileSize": str(16 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxDeletedRowsRatio": "0.3",
}
"""What a writer's own compaction takes: small files, and those of which a third is deleted: what it rewrites follows what was written."""


LARGE_FILE = 64 * 1024 * 1024


MANY_FILES = 24
"""So many files beyond those that the table's size explains, a writer compacts."""


def optimize(spark: SparkSession, table: tables.TableRef, *, metadata: str | None, purges: bool = False) -> None:
    """Compact a table, by its clustering where it has one; its commit carries `metadata`, so that it hides no position.

    Without `metadata` it says nothing, and what the commit before it said still counts. With `purges` files whose rows are
    marked as deleted are written anew without them.
    """
    confs = {} if metadata is None else {"spark.databricks.delta.commitInfo.userMetadata": metadata}
    with query_execution.session_confs(spark, confs), table_errors.translating(table):
        if purges:
            spark.sql(f"REORG TABLE {table} APPLY (PURGE)").collect()
        spark.sql(f"OPTIMIZE {table}").collect()


def vacuum(spark: SparkSession, table: tables.TableRef) -> None:
    """Remove the files that no version within the table's retention names, orphans of killed commits among them."""
    # Its own entries in the history would stand where the last position is looked for.
    with (
        query_execution.session_confs(spark, {"spark.databricks.delta.vacuum.logging.enabled": "false"}),
        table_errors.translating(table),
    ):
        spark.sql(f"VACUUM {table}").collect()


def checkpoint(spark: SparkSession, table: tables.TableRef) -> bool:
    """Write down the table's state, and remove entries of its log that are past their retention; whether that could be done."""
    log = direct_log.of(spark, table)
    try:
        return log is not None and log.checkpoint()
    except (Py4JError, TypeError):  # another Delta has other methods, and does it every so many commits by itself
        return False
