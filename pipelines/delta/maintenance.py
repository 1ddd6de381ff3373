"""Maintenance of tables: compaction, removal of unreferenced files, and checkpoints of the log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

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

MUCH_DELETED = 0.3
"""The share of deleted rows, from 0 to 1, above which a file is rewritten."""

COMPACTION = {
    "spark.databricks.delta.optimize.minFileSize": str(16 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxDeletedRowsRatio": str(MUCH_DELETED),
}
"""Settings of a writer's own OPTIMIZE, which rewrites small files and files with many deleted rows: its work depends on what was written,
not on the table's size."""


CUBE_BYTES = 1024 * 1024 * 1024
"""A clustered compaction leaves a group of clustered files of this size as it is. With Delta's default of 100 GB, each compaction would
rewrite all of a smaller table."""

LARGE_FILE = 64 * 1024 * 1024

SMALL_FILE_BYTES, SMALL_FILE_ROWS = LARGE_FILE // 4, 50_000
"""A file with less of both is small. A first load writes files with more rows, in any number: to write them all again would double its
time, and `medallion maintain` does so anyway."""

SMALL_CUBE_BYTES = LARGE_FILE
"""The same for a table whose rows come in the order of its clustering, where small groups skip as many files as large ones, and for a
writer's own compactions, which are many: each would write all of a table below the other size anew, and bronze keeps that for a week."""


MANY_FILES = 24
"""A writer compacts when there are this many new surplus files: small ones, beyond one file per `LARGE_FILE` bytes of the table."""

MANY_FACTS = 200
"""A running service compacts a table of facts, to which each commit adds a file, when there are this many new surplus files."""

FEW_ROWS = 10_000
FEW_BYTES = 16 * 1024 * 1024
"""The most rows and bytes of small files that a writer merges itself. They are few, so that readers of new rows read few old ones."""


def optimize(spark: SparkSession, table: tables.TableRef, *, purges: bool = False, keeps_small: bool = False) -> bool:
    """Compact a table, by its clustering where it has one. The commit has no metadata: that of the commit before it still counts.

    With `purges`, also rewrites files with deleted rows; returns false where that failed for a clustered table. With `keeps_small`,
    groups of `SMALL_CUBE_BYTES` stay as they are, too.
    """
    with query_execution.session_confs(spark, _groups(CUBE_BYTES)), table_errors.translating(table):
        is_purged = not purges or _purged(spark, table)
        # After a purge that failed, deleted rows go at least from the groups that are written anew: from the larger ones.
        stable = _groups(SMALL_CUBE_BYTES) if keeps_small else {}
        with query_execution.session_confs(spark, stable if is_purged else ALL_DELETED):
            spark.sql(f"OPTIMIZE {table}").collect()
        return is_purged or not spark.sql(f"DESCRIBE DETAIL {table}").collect()[0].clusteringColumns


ALL_DELETED = {"spark.databricks.delta.optimize.maxDeletedRowsRatio": "0"}
"""Settings of an OPTIMIZE that rewrites every file with deleted rows; without effect on a clustered table."""


def _groups(stable_bytes: int) -> dict[str, str]:
    return {"spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold": str(stable_bytes)}


def _purged(spark: SparkSession, table: tables.TableRef) -> bool:
    """Purge a table's deletion vectors; false where Delta cannot, because its REORG needs a session on executors (delta-io/delta#5780)."""
    try:
        spark.sql(f"REORG TABLE {table} APPLY (PURGE)").collect()
    except table_errors.SPARK_ERRORS as error:
        if "ReorgTableHelper" not in str(error):
            raise
        return False
    return True


VACUUM = {
    # The lite mode removes only files that the log names, and leaves orphans.
    "spark.databricks.delta.vacuum.lite.enabled": "false",
    # VACUUM's own history entries have no metadata, and would come before the last position.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    # The tasks that list the folder. The default of 10,000 takes a minute on few cores, and a table of this project has one folder.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "32",
}


def vacuum(spark: SparkSession, table: tables.TableRef) -> None:
    """Remove the files that no version within the table's retention names, including orphans of killed commits."""
    with query_execution.session_confs(spark, VACUUM), table_errors.translating(table):
        spark.sql(f"VACUUM {table}").collect()
    if (folder := local_log.folder(table)) is not None:
        abandoned.clear_drafts(folder)


def is_clean(table: tables.TableRef) -> bool:
    """Whether a compaction and VACUUM have nothing to do: the table has at most one file, without deleted rows, and its folder no other.

    False where this process cannot read the table.
    """
    folder = local_log.folder(table)
    live = None if folder is None else live_files.LiveFiles(folder)
    try:
        if folder is None or live is None or not live.move_to_newest():
            return False
        files = live.files()
        if len(files) > 1 or any(each.get("deletionVector") for each in files):
            return False
        return _lying(folder) == {local_log.data_path(folder, each["path"]) for each in files}
    except OSError:
        return False


def _lying(folder: Path) -> set[Path]:
    """The files in a table's folder without the log, and without names that begin with a dot, such as checksums: Spark hides these."""
    paths: set[Path] = set()
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != tables.LOG]
        paths |= {Path(place, name) for name in names if not name.startswith(".")}
    return paths


def checkpoint(spark: SparkSession, table: tables.TableRef) -> bool:
    """Write a checkpoint of the log and remove its expired entries; whether that was done.

    Not done where the newest entry has no position and an older one does: the older one would be removed when it expires.
    """
    log = direct_log.of(spark, table)
    standing = table_history.NOT_THERE if log is None else table_history.standing(spark, table)
    if standing.position is not None and standing.position.version < standing.version:
        return False
    try:
        return log is not None and log.checkpoint()
    except (Py4JError, TypeError):  # another Delta has other methods, and writes checkpoints by itself
        return False


def delete_claimed(writer: Writer, where: str, among: str | None = None) -> int:
    """Remove rows as one fenced commit with the metadata of the last one (`StatementCommits.remove`); the number of rows."""
    with table_errors.translating(writer.table):
        count = int(writer.spark.sql(f"SELECT count(*) AS n FROM {writer.table} WHERE {where}").collect()[0].n)
    if count:
        to, extra = writer.last_metadata()
        writer.remove(where, among=among, to=to, extra=extra)
    return count


def are_vectors_switched(spark: SparkSession, table: tables.TableRef, wanted: bool) -> bool:
    """Whether deletion vectors are enabled as `wanted`. To be off, the table must not have the feature, which an interrupted switch
    leaves."""
    if wanted:
        return definition.is_on(delta.properties(spark, table), definition.DELETION_VECTORS)
    return "deletionVectors" not in delta.features(spark, table)


def set_deletion_vectors(writer: Writer, wanted: bool) -> None:
    """Enable deletion vectors, or remove the table feature so that readers need not support it. Safe to repeat.

    Removing them rewrites the files that have some. After an interruption the next call continues.
    """
    if not are_vectors_switched(writer.spark, writer.table, wanted):
        writer.alter(
            f"SET TBLPROPERTIES ('{definition.DELETION_VECTORS}' = 'true')" if wanted else "DROP FEATURE deletionVectors"
        )


def compact(writer: Writer) -> None:
    """Merge small files and rewrite files with many deleted rows, where there are `MANY_FILES` new surplus files.

    The work depends on what was written after the last compaction, not on the table's size. Rows and position stay the same. In a store
    only the part without Spark is done, and in a catalog nothing; `medallion maintain` does the rest.
    """
    surplus = _surplus_files(writer)
    if surplus < writer.surplus_files + MANY_FILES:
        return
    if not _compact_files(writer) and local_log.folder(writer.table) is not None:
        _optimize(writer)
    # The files that are left cannot be merged further: the next compaction is due for files on top of them.
    writer.surplus_files = _surplus_files(writer)


def _compact_files(writer: Writer) -> bool:
    """Merge the smallest files in this process; false where a compaction by Spark is due."""
    live = writer.live
    if live is None or not live.move_to(writer.version):
        return False
    parts, others = live.by_size(rows=FEW_ROWS, size_bytes=FEW_BYTES)
    # Merges of this process leave files of medium size, which Spark compacts when there are many.
    are_many = len([*filter(_is_small, others)]) >= MANY_FILES
    if are_many or any(file_statistics.share_deleted(each) > MUCH_DELETED for each in others):
        return False
    return len(parts) > 1 and writer.compact_files(parts) is not None


def _optimize(writer: Writer) -> None:
    live = writer.live
    # These are written anew with their group.
    has_deleted = live is None or any(file_statistics.share_deleted(each) > MUCH_DELETED for each in live.files())
    writer.check_ownership()
    _compact_silently(writer.spark, writer.table, keeps_small=not has_deleted)
    writer.check_ownership()  # moves on to the version of the compaction


def _compact_silently(spark: SparkSession, table: tables.TableRef, *, keeps_small: bool = False) -> None:
    # Without metadata: the commit changes neither the owner nor the position.
    with query_execution.session_confs(spark, COMPACTION), contextlib.suppress(errors.CommitConflict):
        optimize(spark, table, keeps_small=keeps_small)


def compact_facts(spark: SparkSession, table: tables.TableRef, left: int) -> int:
    """Compact a table of facts, which has no claim, where there are `MANY_FACTS` new surplus files: each read opens all files.

    `left` is the result of the last call: the surplus files that could not be merged. Returns the number for the next call. Does nothing
    in a store or a catalog; `medallion maintain` compacts there.
    """
    folder = local_log.folder(table)
    if folder is None or _surplus(local_log.size(folder)) < left + MANY_FACTS:
        return left
    # Errors are ignored: a collection must not stop because a file of old facts is lost.
    with contextlib.suppress(Exception):
        _compact_silently(spark, table)
    return _surplus(local_log.size(folder))


def _surplus_files(writer: Writer) -> int:
    """The number of small files, less those that are as many as there should be for the table's bytes; 0 where it is not known."""
    folder = local_log.folder(writer.table)
    size = None if folder is None else local_log.size(folder)
    if size is not None and _surplus(size) < MANY_FILES:
        return _surplus(size)
    live = writer.live
    if live is None or not live.move_to(writer.version):
        return _surplus(size)
    files = live.files()
    size = local_log.TableSize(len(files), sum(each["size"] for each in files))
    return min(_surplus(size), len([*filter(_is_small, files)]))


def _is_small(file: Mapping[str, Any]) -> bool:
    rows = file_statistics.row_count(file)
    return file["size"] < SMALL_FILE_BYTES and (rows < SMALL_FILE_ROWS or rows == file_statistics.UNKNOWN_ROWS)


def _surplus(size: local_log.TableSize | None) -> int:
    return 0 if size is None else max(0, size.files - size.bytes // LARGE_FILE)
