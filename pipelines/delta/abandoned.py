"""What a process left in a table's folder when it was killed: while it made the table, which nobody can make until that is gone, or
while it wrote an entry of the log, or a checkpoint, which VACUUM does not see."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import LOG
from pipelines import clock
from pipelines.delta import local_log, table_errors
from pipelines.spark import jvm
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST = f"{0:020}.json"

DRAFT_MS = 24 * 3_600_000
"""Older than this no draft gets its name any more."""

NAMED_WITHIN_MS = 60_000
"""So long after its first commit a table may still be on its way into the catalog."""


def clear(spark: SparkSession, table: tables.TableRef, location: str | None) -> bool:
    """Remove what was begun at `location`, a path or URL; False where that is for a person to do.

    Without a commit: hidden files and empty folders, in which a store keeps a place for a folder. Of a catalog's table,
    which is committed before the catalog has it: its folder, where it holds an old first commit of ours, and no row.
    """
    folder = local_log.folder(table)
    if folder is not None:
        _clear_local(folder)
        return True
    if location is None:
        return True
    if not sparks.is_classic(spark) or sparks.is_databricks():
        return False
    with table_errors.translating(table):
        return _Folder(spark, location).clear(is_in_catalog=table.path is None)


def clear_drafts(folder: Path) -> None:
    """Remove what lies in a table's log and never got its name: entries, checkpoints and checksums, of this process' and of Delta's."""
    for draft in (folder / LOG).glob(".*.tmp*"):
        with contextlib.suppress(OSError):
            if clock.now_ms() - draft.stat().st_mtime * 1000 > DRAFT_MS:
                draft.unlink()


def left(table: tables.TableRef, location: str | None) -> errors.DecisionNeeded:
    """That the folder is there, and what to do about it."""
    return errors.DecisionNeeded(
        f"{table.label}: the table cannot be created, because {location or table.label} was started by a process "
        "that was killed, or belongs to someone else. If nothing in that folder is needed, remove it and start "
        "again"
    )


def _clear_local(folder: Path) -> None:
    log = folder / LOG
    for hidden in log.glob(".*"):
        hidden.unlink(missing_ok=True)
    for empty in (*log.glob("*"), log, folder):
        with contextlib.suppress(OSError):
            empty.rmdir()


class _Folder:
    """A table's folder, which the JVM of a classic session reaches."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark = spark
        self._folder = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(location)
        self._log = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(self._folder, LOG)
        self._files = self._folder.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def clear(self, *, is_in_catalog: bool) -> bool:
        if not self._files.exists(self._log):
            return not self._list(self._folder)
        begun = self._list(self._log)
        files = {each.getPath().getName(): each for each in begun if each.isFile() and not _is_hidden(each)}
        if not files:
            self._remove_empty(begun)
            return True
        if not is_in_catalog:
            return True  # made meanwhile
        commits = {name for name in files if not name.endswith(".crc")}
        if commits != {FIRST} or not self._is_empty_table():
            return False
        if clock.now_ms() - files[FIRST].getModificationTime() > NAMED_WITHIN_MS:
            self._files.delete(self._folder, True)
        return True

    def _list(self, path: Any) -> list[Any]:
        return list(self._files.listStatus(path)) if self._files.exists(path) else []

    def _remove_empty(self, begun: list[Any]) -> None:
        """Hidden files, and folders as far as they are empty: what another process commits meanwhile stays."""
        for each in begun:
            if each.isFile():
                self._files.delete(each.getPath(), False)
        for path in (*(each.getPath() for each in begun if each.isDirectory()), self._log, self._folder):
            with contextlib.suppress(*table_errors.SPARK_ERRORS):
                self._files.delete(path, False)

    def _is_empty_table(self) -> bool:
        """Whether the first commit is one of ours without a file, and nothing lies beside the log."""
        if [each.getPath().getName() for each in self._list(self._folder)] != [LOG]:
            return False
        lines = self._spark.read.text(f"{self._log.toString()}/{FIRST}").collect()
        actions = [json.loads(line.value) for line in lines]
        configurations = [each["metaData"].get("configuration", {}) for each in actions if "metaData" in each]
        is_ours = any(definition.FORMAT_PROPERTY in each for each in configurations)
        return is_ours and not any("add" in each for each in actions)


def _is_hidden(status: Any) -> bool:
    return str(status.getPath().getName()).startswith(".")
