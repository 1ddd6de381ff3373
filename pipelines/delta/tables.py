"""Delta tables: where they lie, whether they are ours, how they are made and removed, and what they hold.

Statements are SQL or name-based DataFrame calls, which work over Spark Connect too; `direct_log` is the one way past them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    abandoned,
    data_file,
    deleted_rows,
    direct_log,
    live_files,
    local_log,
    store_exclusion,
    stored_files,
    table_errors,
    table_files,
)
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def layout(lakehouse: Any) -> tables.Layout:
    """The layout of the settings' lakehouse; a relative root is relative to the working directory, which no other needs."""
    found = tables.Layout(lakehouse.root, lakehouse.catalog, lakehouse.schema_prefix)
    if not tables.is_relative(lakehouse.root or "/"):
        return found
    try:
        return found.under(os.getcwd())
    except FileNotFoundError:
        raise errors.DecisionNeeded(
            f"lakehouse.root: {lakehouse.root} is relative to the working directory, which was deleted; start from "
            "another one"
        ) from None


def exists(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether a Delta table lies there."""
    folder = local_log.readable(spark, table)
    if folder is not None:
        return local_log.exists(folder)
    # A view has properties, too.
    return any(name.startswith(("delta.", "medallion.")) for name in _shown(spark, table) or ())


def _shown(spark: SparkSession, table: tables.TableRef) -> dict[str, str] | None:
    """The properties of a table or a view that Spark knows, by the one statement about it that takes no job; None where there is none."""
    try:
        return _properties_by_spark(spark, table)
    except table_errors.SPARK_ERRORS as error:
        if table_errors.is_missing(error):
            return None
        raise table_errors.translated(error, table) from error


def _properties_by_spark(spark: SparkSession, table: tables.TableRef) -> dict[str, str]:
    return {row.key: row.value for row in spark.sql(f"SHOW TBLPROPERTIES {table}").collect()}


def create(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    columns: str,
    properties: Mapping[str, str] | None = None,
    cluster_by: Sequence[str] = (),
) -> bool:
    """Make the table where there is none; whether that was done. Safe to repeat.

    Raises `TableNotOurs` where a table lies that this project did not make, `DecisionNeeded` where something else keeps its
    folder.
    """
    sql = f"CREATE TABLE IF NOT EXISTS {definition.ddl(table, f' ({columns})', properties or {}, cluster_by)}"
    if table.path is not None:
        store_exclusion.check(spark, table.path)
    location = table.path
    with _creating:
        for attempt in table_errors.commit_attempts(table):
            if found(spark, table) is not None:
                return False
            # In a catalog a schema has to be there before its tables; a path needs nothing.
            if table.path is None:
                _make_schema(spark, str(table).rpartition(".")[0])
            try:
                spark.sql(sql)
                # To IF NOT EXISTS a log's folder without a commit is a table: what a process leaves that is killed there.
                if exists(spark, table):
                    return True
            except table_errors.SPARK_ERRORS as error:
                # Another process has made the folder, and not its first commit yet: it is on its way, or was killed there.
                is_being_made = spark_failures.condition(error).startswith("DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")
                # Another process may have taken this one, which was slow, for killed (`abandoned.clear`).
                is_cleared = spark_failures.is_path_gone(error) and attempt < ABANDONED_AFTER_ATTEMPTS
                if not (table_errors.is_conflict(error) or is_being_made or is_cleared):
                    raise table_errors.translated(error, table) from error
                location = location or spark_failures.parameter(error, "tableLocation")
            time.sleep(0.2 * (attempt + 1))
            if attempt < ABANDONED_AFTER_ATTEMPTS or exists(spark, table):
                continue
            may_be_made, is_last = abandoned.clear(spark, table, location), attempt + 1 == table_errors.COMMIT_ATTEMPTS
            if is_last and not may_be_made:
                raise abandoned.left(table, location)
            if is_last and local_log.folder(table) is not None and _shown(spark, table) is not None:
                raise errors.DecisionNeeded(
                    f"{table.label}: Spark resolves this path on another file system than this machine's; write lakehouse.root "
                    "with its scheme (hdfs://…, dbfs:/…, or file:/… for a shared disk)"
                )
    raise table_errors.conflict(table)


def _make_schema(spark: SparkSession, name: str) -> None:
    try:
        spark.sql(f"DESCRIBE SCHEMA {name}").collect()
    except table_errors.SPARK_ERRORS:
        # Unity Catalog demands the right to make schemas of this also where the schema is there.
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {name}")


_creating = threading.Lock()
"""Threads of one process make tables one after the other; other processes are waited for."""


ABANDONED_AFTER_ATTEMPTS = 3
"""So many attempts another process is given to make the table that it began, before it counts as killed."""


def remove(spark: SparkSession, shadow: tables.Layout) -> None:
    """Remove a shadow's tables, whatever is there of them; nothing of the lakehouse that it is a shadow of.

    Over Spark Connect the files of a shadow on an object store stay, in no table's way.
    """
    if shadow.root is None:
        for layer in ("silver", "quarantine", "ops"):
            spark.sql(f"DROP SCHEMA IF EXISTS {shadow.schema(layer)} CASCADE")
        return
    if shadow.root.startswith(("/", "file:")):
        folder = Path("/" + shadow.root.removeprefix("file:").lstrip("/"))
        shutil.rmtree(folder, ignore_errors=True)
        # `rmdir` takes only empty folders: the shadow of another rebuild may lie beside this one.
        for parent in folder.parents[: len(tables.SHADOW_FOLDERS)]:
            with contextlib.suppress(OSError):
                parent.rmdir()
        return
    with contextlib.suppress(AttributeError):
        path = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(shadow.root)
        path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, True)


@stored_files.one_look()
def found(spark: SparkSession, table: tables.TableRef) -> Mapping[str, str] | None:
    """The properties of the table of ours that lies there, None where none does; raises `TableNotOurs`."""
    folder = local_log.readable(spark, table)
    if folder is not None:
        return check_ours(spark, table) if local_log.exists(folder) else None
    shown = _shown(spark, table)
    return None if shown is None else _of_ours(table, shown)


def check_ours(spark: SparkSession, table: tables.TableRef) -> Mapping[str, str]:
    """The table's properties; raises `TableNotOurs` unless it was made by this project in a format that it knows."""
    return _of_ours(table, properties(spark, table))


def _of_ours(table: tables.TableRef, found: Mapping[str, str]) -> Mapping[str, str]:
    if definition.FORMAT_PROPERTY not in found:
        raise errors.TableNotOurs(
            f"{table.label}: there is a table or view that mongo-medallion did not create; choose another lakehouse "
            "root or name, or move that table away"
        )
    if found[definition.FORMAT_PROPERTY] != definition.FORMAT:
        raise errors.TableNotOurs(
            f"{table.label}: its format is {found[definition.FORMAT_PROPERTY]}, but this version supports "
            f"{definition.FORMAT}; use the version of mongo-medallion that created it"
        )
    return found


def catalog_location(spark: SparkSession, table: tables.TableRef) -> str:
    """Where a catalog keeps the table's commits: a URL, or nothing where the catalog takes part in each commit."""
    if sparks.is_databricks():
        return ""
    with table_errors.translating(table):
        detail = spark.sql(f"DESCRIBE DETAIL {table}").select("location", "tableFeatures").first()
    features = set(detail.tableFeatures or ()) if detail is not None else set()
    return "" if features & definition.CATALOG_MANAGED else str(detail.location)


def properties(spark: SparkSession, table: tables.TableRef) -> dict[str, str]:
    """The table's properties; from the log where this process reads it, and its last commits say them."""
    folder = local_log.readable(spark, table)
    found = None if folder is None else local_log.properties(folder)
    if found is not None:
        return found
    with table_errors.translating(table):
        return _properties_by_spark(spark, table)


def features(spark: SparkSession, table: tables.TableRef) -> frozenset[str]:
    """The table features that its readers and writers must know; from the log where this process reads it."""
    folder = local_log.readable(spark, table)
    found = None if folder is None else local_log.features(folder)
    if found is not None:
        return found
    with table_errors.translating(table):
        return frozenset(spark.sql(f"DESCRIBE DETAIL {table}").collect()[0].tableFeatures or ())


def table_id(spark: SparkSession, table: tables.TableRef) -> str:
    """What Delta calls the table; from the log where this process reads it."""
    folder = local_log.readable(spark, table)
    found = None if folder is None else local_log.table_id(folder)
    if found is not None:
        return found
    with table_errors.translating(table):
        return str(spark.sql(f"DESCRIBE DETAIL {table}").collect()[0].id)


def has_mapped_columns(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether somebody let the table's columns be dropped and renamed, which those of our tables are not."""
    return properties(spark, table).get("delta.columnMapping.mode", "none") != "none"


def columns(spark: SparkSession, table: tables.TableRef) -> frozenset[str]:
    """The names of the table's columns; from the log where this process reads it."""
    folder = local_log.readable(spark, table)
    known = None if folder is None else local_log.columns(folder)
    return frozenset(spark.table(str(table)).columns if known is None else known)


def tables_below(root: Path) -> list[Path]:
    """The folders of all Delta tables below a root, in the order of their names; also of a layer that is a link to another disk."""
    found, seen = [], set()
    for place, folders, _ in os.walk(root, followlinks=True):
        if tables.LOG in folders:
            found.append(Path(place))
            folders.clear()
        elif os.path.realpath(place) in seen:  # a link leads back
            folders.clear()
        seen.add(os.path.realpath(place))
    return sorted(found)


def data_files(spark: SparkSession, table: tables.TableRef) -> list[data_file.DataFile] | None:
    """The files of the table's newest version, looked for one by one; None where its folder is not to be seen from here."""
    direct, folder = direct_log.of(spark, table), local_log.folder(table)
    if direct is None or folder is None:
        return None
    live = live_files.LiveFiles(folder)
    with table_errors.translating(table):
        # As this process reads the log, where it can: of many tables a query each takes minutes.
        files = live.files() if live.at_newest() else direct.live()
    found = []
    for file in files:
        vector = file.get("deletionVector")
        if vector is not None:  # a checkpoint has each of its fields, and a commit those that hold something
            vector = {name: value for name, value in vector.items() if value is not None}
        is_there = table_files.is_whole(local_log.data_path(folder, file["path"]), file["size"])
        # Without its vector nobody knows which rows of a file count, and none is read.
        is_there = is_there and (vector is None or deleted_rows.is_there(vector, folder))
        found.append(data_file.DataFile(file["path"], json.loads(file.get("stats") or "{}"), vector, is_there))
    return found


@dataclass(frozen=True)
class TableSize:
    """The data files of a table's newest version, and all that lies in its folder where this process sees and counts it."""

    files: int
    bytes: int
    stored: int | None = None


def size(spark: SparkSession, table: tables.TableRef, *, stored: bool = False) -> TableSize:
    """How large a table is now; with `stored` all that lies in its folder is counted, which of a long log takes a while."""
    folder = local_log.folder(table)
    found = None if folder is None else local_log.size(folder)  # of thousands of tables a statement each takes minutes
    if found is None:
        with table_errors.translating(table):
            detail = spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]
        found = local_log.VersionSize(int(detail.numFiles), int(detail.sizeInBytes))
    held = _stored_bytes(folder) if stored and folder is not None else None
    return TableSize(found.files, found.size_bytes, held)


def _stored_bytes(folder: Path) -> int:
    """The bytes of all files below a folder; one that goes meanwhile has none."""
    count = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                count += os.lstat(os.path.join(place, name)).st_size
    return count
