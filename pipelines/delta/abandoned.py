"""Removes the files that a killed process leaves in a table's folder.

Remains of a CREATE TABLE prevent the creation of the table. VACUUM does not remove drafts of log entries and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from cdc_core.tables.layout import LOG
from pipelines import clock
from pipelines.delta import local_log, table_errors
from pipelines.spark import jvm
from pipelines.spark import session as sparks

FIRST = f"{0:020}.json"

DRAFT_MS = 24 * 3_600_000
"""The age after which a draft is abandoned."""

NAMED_WITHIN_MS = 60_000
"""The time after its first commit within which a table may still be added to the catalog."""


def clear(spark: SparkSession, table: tables.TableRef, location: str | None) -> bool:
    """Remove the remains of a CREATE TABLE at `location`, a path or URL; false where a person has to decide.

    Without a commit, removes hidden files and empty folders, including a store's markers of folders; other files stay, and are for a
    person. A catalog's table is committed before it is in the catalog: its folder is removed where it has only an old first commit of
    this project, and no rows.
    """
    folder = local_log.folder(table)
    if folder is not None and table.path is not None:
        return _clear_local(folder)
    if location is None:
        return True
    if not sparks.is_classic(spark) or sparks.is_databricks():
        return False
    with table_errors.translating(table):
        return _Folder(spark, location).clear(is_in_catalog=table.path is None)


def clear_drafts(folder: Path) -> None:
    """Remove abandoned drafts of log entries, checkpoints and checksums, written by Delta or by this project, from a table's log."""
    for draft in (folder / LOG).glob(".*.tmp*"):
        with contextlib.suppress(OSError):
            if clock.now_ms() - draft.stat().st_mtime * 1000 > DRAFT_MS:
                draft.unlink()


def left(table: tables.TableRef, location: str | None) -> errors.DecisionNeeded:
    """The error for a table that cannot be created because of what is in its folder."""
    return errors.DecisionNeeded(
        f"{table.label}: the table cannot be created, because {location or table.label} was started by a process "
        "that was killed, or belongs to someone else. If nothing in that folder is needed, remove it and start "
        "again"
    )


def _clear_local(folder: Path) -> bool:
    log = folder / LOG
    for file in log.glob(".*"):
        file.unlink(missing_ok=True)
    for path in (*log.glob("*"), log, folder):
        with contextlib.suppress(OSError):
            path.rmdir()
    if local_log.exists(folder):
        return True  # created meanwhile
    try:
        # A CREATE TABLE makes nothing but the log: the rest is of another program.
        return all(each.name == LOG for each in folder.iterdir())
    except OSError:
        return True


class _Folder:
    """A table's folder, by the JVM of a classic session."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark = spark
        self._folder = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(location)
        self._log = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(self._folder, LOG)
        self._files = self._folder.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def clear(self, *, is_in_catalog: bool) -> bool:
        if not self._files.exists(self._log):
            return not self._list(self._folder)
        statuses = self._list(self._log)
        names = {str(status.getPath().getName()): status for status in statuses if status.isFile()}
        files = {name: status for name, status in names.items() if not name.startswith(".")}
        if not files:
            self._remove_empty(statuses)
            return True
        if not is_in_catalog:
            return True  # created meanwhile
        commits = {name for name in files if not name.endswith(".crc")}
        if commits != {FIRST} or not self._is_empty_table():
            return False
        if clock.now_ms() - files[FIRST].getModificationTime() > NAMED_WITHIN_MS:
            self._files.delete(self._folder, True)
        return True

    def _list(self, path: Any) -> list[Any]:
        return list(self._files.listStatus(path)) if self._files.exists(path) else []

    def _remove_empty(self, begun: list[Any]) -> None:
        """Remove hidden files, and folders if they are empty: a commit that another process makes meanwhile stays."""
        for status in begun:
            if status.isFile():
                self._files.delete(status.getPath(), False)
        for path in (*(status.getPath() for status in begun if status.isDirectory()), self._log, self._folder):
            with contextlib.suppress(*table_errors.SPARK_ERRORS):
                self._files.delete(path, False)

    def _is_empty_table(self) -> bool:
        """Whether the first commit is of this project and adds no file, and the folder has nothing but the log."""
        if [each.getPath().getName() for each in self._list(self._folder)] != [LOG]:
            return False
        lines = self._spark.read.text(f"{self._log.toString()}/{FIRST}").collect()
        actions = [json.loads(line.value) for line in lines]
        configurations = [each["metaData"].get("configuration", {}) for each in actions if "metaData" in each]
        is_ours = any(definition.FORMAT_PROPERTY in each for each in configurations)
        return is_ours and not any("add" in each for each in actions)
