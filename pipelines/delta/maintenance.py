"""Upkeep of tables: compaction, removal of unreferenced files, and checkpoints of the log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    abandoned,
    direct_log,
    file_statistics,
    live_files,
    local_log,
    query_execution,
    table_errors,
    table_history,
)
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MUCH_DELETED = 0.3
"""A file of which so much is deleted is written anew."""

COMPACTION = {
    "spark.databricks.delta.optimize.minFileSize": str(16 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxDeletedRowsRatio": str(MUCH_DELETED),
}
"""What a writer's own compaction takes: small files, and those of which a third is deleted: what it rewrites follows
what was written."""


CUBE_BYTES = 1024 * 1024 * 1024
"""So much that a clustered compaction has put in order the next ones leave as it is. Delta's own measure is 100 GB: each
compaction would write all of a smaller table anew."""


LARGE_FILE = 64 * 1024 * 1024


MANY_FILES = 24
"""So many files beyond those that the table's size explains, a writer compacts."""

MANY_FACTS = 200
"""So many small files of facts, of which each commit adds one, are put together while a service runs."""

FEW_ROWS = 10_000
FEW_BYTES = 16 * 1024 * 1024
"""So much of its smallest files a writer puts together itself. It is little, so that whoever reads what is new in the
table has not to read much that is not."""


def optimize(spark: SparkSession, table: tables.TableRef, *, purges: bool = False) -> bool:
    """Compact a table, by its clustering where it has one; its commit says nothing, and what the commit before it said still counts.

    With `purges` files whose rows are marked as deleted are written anew without them; False where those of a clustered table could
    not be.
    """
    is_purged = True
    confs = {"spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold": str(CUBE_BYTES)}
    with query_execution.session_confs(spark, confs), table_errors.translating(table):
        if purges:
            is_purged = _purged(spark, table)
        with query_execution.session_confs(spark, {} if is_purged else ALL_DELETED):
            spark.sql(f"OPTIMIZE {table}").collect()
        return is_purged or not spark.sql(f"DESCRIBE DETAIL {table}").collect()[0].clusteringColumns


ALL_DELETED = {"spark.databricks.delta.optimize.maxDeletedRowsRatio": "0"}
"""A compaction then takes every file with deleted rows; that by a clustering takes none for it."""


def _purged(spark: SparkSession, table: tables.TableRef) -> bool:
    """Purge a table's deletion vectors; False where Delta cannot: its REORG asks executors for a session
    (delta-io/delta#5780)."""
    try:
        spark.sql(f"REORG TABLE {table} APPLY (PURGE)").collect()
    except table_errors.SPARK_ERRORS as error:
        if "ReorgTableHelper" not in str(error):
            raise
        return False
    return True


VACUUM = {
    # A quicker one takes what the log says was removed, and leaves the orphans.
    "spark.databricks.delta.vacuum.lite.enabled": "false",
    # Its own entries in the history would stand where the last position is looked for.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    # The tasks that list the folder: 10,000 by default, a minute on few cores, and our tables have one folder each.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "32",
}


def vacuum(spark: SparkSession, table: tables.TableRef) -> None:
    """Remove the files that no version within the table's retention names, orphans of killed commits among them."""
    with query_execution.session_confs(spark, VACUUM), table_errors.translating(table):
        spark.sql(f"VACUUM {table}").collect()
    if (folder := local_log.folder(table)) is not None:
        abandoned.clear_drafts(folder)


def is_clean(table: tables.TableRef) -> bool:
    """Whether a compaction and VACUUM have nothing to do, as this process sees it: one file at most, none of its rows deleted, and
    beside it no other lies in the folder."""
    folder = local_log.folder(table)
    live = None if folder is None else live_files.LiveFiles(folder)
    try:
        if folder is None or live is None or not live.at_newest():
            return False
        files = live.files()
        if len(files) > 1 or any(each.get("deletionVector") for each in files):
            return False
        return _lying(folder) == {local_log.data_path(folder, each["path"]) for each in files}
    except OSError:
        return False


def _lying(folder: Path) -> set[Path]:
    """The files in a table's folder without its log; Spark hides names with a dot, the checksums of a local disk among them."""
    found: set[Path] = set()
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != tables.LOG]
        found |= {Path(place, name) for name in names if not name.startswith(".")}
    return found


def checkpoint(spark: SparkSession, table: tables.TableRef) -> bool:
    """Write a checkpoint of the log, and remove its entries that are past their retention; whether that was done.

    Not done where the newest entry states no position and an older one does: the older one would be removed with the
    rest as soon as it is past its retention.
    """
    log = direct_log.of(spark, table)
    at = table_history.NOT_THERE if log is None else table_history.standing(spark, table)
    if at.position is not None and at.position.version < at.version:
        return False
    try:
        return log is not None and log.checkpoint()
    except (Py4JError, TypeError):  # another Delta has other methods, and does it every so many commits by itself
        return False


def delete_claimed(writer: Writer, where: str, among: str | None = None) -> int:
    """Remove the rows as one fenced commit that says what the last one said (`StatementCommits.remove`); how many."""
    with table_errors.translating(writer.table):
        count = int(writer.spark.sql(f"SELECT count(*) AS n FROM {writer.table} WHERE {where}").collect()[0].n)
    if count:
        to, extra = writer.last_metadata()
        writer.remove(where, among=among, to=to, extra=extra)
    return count


def are_vectors_switched(spark: SparkSession, table: tables.TableRef, wanted: bool) -> bool:
    """Whether a table makes deletion vectors, or where they are not wanted has not even the feature, which an interrupted switch leaves."""
    if wanted:
        return definition.is_on(delta.properties(spark, table), definition.DELETION_VECTORS)
    return "deletionVectors" not in delta.features(spark, table)


def set_deletion_vectors(writer: Writer, wanted: bool) -> None:
    """Enable deletion vectors, or remove them so that readers need not support them; nothing where the table is so
    already.

    Removing them rewrites the files that have some. Interrupted, it goes on at the next call.
    """
    if not are_vectors_switched(writer.spark, writer.table, wanted):
        writer.alter(
            f"SET TBLPROPERTIES ('{definition.DELETION_VECTORS}' = 'true')" if wanted else "DROP FEATURE deletionVectors"
        )


def compact(writer: Writer) -> None:
    """Put small files together and rewrite files with many deleted rows, where there are many of either.

    The work is bounded by what was written since the last time, not by the table. In a store only this process' part of it is done;
    the rest, and all of it in a catalog, is for maintenance. The rows stay as they are, and so does the position.
    """
    surplus = _surplus_files(writer)
    if surplus < writer.surplus_files + MANY_FILES:
        return
    if not _compact_files(writer) and local_log.folder(writer.table) is not None:
        _optimize(writer)
    # What is left now cannot be put together any further: the next compaction is for what comes on top of it.
    writer.surplus_files = _surplus_files(writer)


def _compact_files(writer: Writer) -> bool:
    """Put the smallest files together in this process; False where a compaction by Spark is due."""
    live = writer.live
    if live is None or not live.at(writer.version):
        return False
    parts, others = live.by_size(rows=FEW_ROWS, size_bytes=FEW_BYTES)
    # Of what a service puts together itself files of a middling size are left.
    are_many = len([each for each in others if each["size"] < LARGE_FILE // 4]) >= MANY_FILES
    if are_many or any(file_statistics.share_deleted(each) > MUCH_DELETED for each in others):
        return False
    return len(parts) > 1 and writer.compact_files(parts) is not None


def _optimize(writer: Writer) -> None:
    writer.check_ownership()
    _compact_silently(writer.spark, writer.table)
    writer.check_ownership()  # which goes on to the version that this made


def _compact_silently(spark: SparkSession, table: tables.TableRef) -> None:
    # Without metadata: it says nothing of who owns the table, or where it stands.
    with query_execution.session_confs(spark, COMPACTION), contextlib.suppress(errors.CommitConflict):
        optimize(spark, table)


def compact_facts(spark: SparkSession, table: tables.TableRef, left: int) -> int:
    """Put the small files of facts together that nobody claims, where there are many: whoever reads what is new looks at all of them.

    What `left` is of the last time, and gives for the next one, cannot be put together any further. In a store and in a catalog that is
    for maintenance.
    """
    folder = local_log.folder(table)
    if folder is None or _surplus(local_log.size(folder)) < left + MANY_FACTS:
        return left
    # Nothing that comes next needs it: a lost file of old facts would stop a collection.
    with contextlib.suppress(Exception):
        _compact_silently(spark, table)
    return _surplus(local_log.size(folder))


def _surplus_files(writer: Writer) -> int:
    """How many files the table has beyond those that its size explains; 0 where its log does not tell."""
    folder = local_log.folder(writer.table)
    size = None if folder is None else local_log.size(folder)
    live = writer.live
    if folder is None and live is not None and live.at(writer.version):
        sizes = [each["size"] for each in live.files()]
        size = local_log.VersionSize(len(sizes), sum(sizes))
    return _surplus(size)


def _surplus(size: local_log.VersionSize | None) -> int:
    return 0 if size is None else max(0, size.files - size.size_bytes // LARGE_FILE)
