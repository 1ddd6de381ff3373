"""Delta tables: their layout, whether they belong to this project, their creation and removal, their properties and size.

Statements are SQL or name-based DataFrame calls, which work over Spark Connect too. Only `direct_log` bypasses them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructType

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    abandoned,
    catalog_places,
    data_file,
    deleted_rows,
    direct_log,
    file_statistics,
    live_files,
    local_log,
    store_exclusion,
    stored_files,
    table_definition,
    table_errors,
    table_files,
)
from pipelines.delta.local_log import TableSize
from pipelines.delta.table_errors import Answer
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm
from pipelines.spark import session as sparks


def layout(lakehouse: Any) -> tables.Layout:
    """The layout of the settings' `lakehouse` section. A relative root is relative to the working directory."""
    lakehouse_layout = tables.Layout(lakehouse.root, lakehouse.catalog, lakehouse.schema_prefix)
    if not tables.is_relative(lakehouse.root or "/"):
        return lakehouse_layout
    try:
        return lakehouse_layout.under(os.getcwd())
    except FileNotFoundError:
        raise errors.DecisionNeeded(
            f"lakehouse.root: {lakehouse.root} is relative to the working directory, which was deleted; start from "
            "another one"
        ) from None


def exists(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether the Delta table exists."""
    is_there = _is_there(spark, table)
    if is_there is not None:
        return is_there
    # A view has properties, too, but none of these.
    return any(name.startswith(("delta.", "medallion.")) for name in shown(spark, table) or ())


def _is_there(spark: SparkSession, table: tables.TableRef) -> bool | None:
    """Whether the Delta table exists, by its catalog or its log; None where only a statement can tell, as for a view."""
    if table.path is None and catalog_places.is_open(spark, table):
        is_there = catalog_places.has(spark, table)
        return is_there if catalog_places.location(table) is not None else None
    folder = local_log.readable(spark, table)
    return None if folder is None else local_log.exists(folder)


def shown(spark: SparkSession, table: tables.TableRef) -> dict[str, str] | None:
    """The properties of a table or a view, by the only such statement that takes no Spark job; None where there is neither."""
    return table_errors.unless_missing(table, lambda: _properties_by_spark(spark, table))


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
    """Create the table where there is none; whether it was created. Safe to repeat.

    Raises `TableNotOurs` where there is a table of another project, `DecisionNeeded` where its folder cannot be used, and
    `CommitConflict`.
    """
    sets_all = catalog_places.is_open(spark, table)
    ddl = definition.ddl(table, f" ({columns})", properties or {}, cluster_by, sets_all=sets_all)
    sql = f"CREATE TABLE IF NOT EXISTS {ddl}"
    if table.path is not None:
        store_exclusion.check(spark, table.path)
    location = table.path
    with _creating:
        for attempt in table_errors.commit_attempts(table):
            if found(spark, table) is not None:
                return False
            # A catalog needs the schema before its tables.
            if table.path is None:
                _make_schema(spark, str(table).rpartition(".")[0])
            try:
                spark.sql(sql)
                # IF NOT EXISTS takes a log folder without a commit, which a killed process leaves, for a table.
                if exists(spark, table):
                    return True
            except table_errors.SPARK_ERRORS as error:
                # Another process has created the folder but not committed yet. It is still at work, or was killed.
                is_being_made = spark_failures.condition(error).startswith("DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")
                # This process was slow, and another one may have removed its folder as abandoned (`abandoned.clear`).
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
            if (
                is_last
                and table.path is not None
                and local_log.folder(table) is not None
                and shown(spark, table) is not None
            ):
                raise errors.DecisionNeeded(
                    f"{table.label}: Spark resolves this path on another file system than this machine's; write lakehouse.root "
                    "with its scheme (hdfs://…, dbfs:/…, or file:/… for a shared disk)"
                )
    raise table_errors.conflict(table)


def _make_schema(spark: SparkSession, name: str) -> None:
    try:
        spark.sql(f"DESCRIBE SCHEMA {name}").collect()
    except table_errors.SPARK_ERRORS:
        # Only where it is missing: for CREATE SCHEMA, Unity Catalog requires CREATE SCHEMA rights even if the schema exists.
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {name}")


_creating = threading.Lock()
"""Threads of one process create tables one after the other."""


ABANDONED_AFTER_ATTEMPTS = 3
"""After this many attempts, a table that another process has begun to create counts as abandoned."""


def remove(spark: SparkSession, shadow: tables.Layout) -> None:
    """Remove the tables of a shadow, and nothing of the lakehouse itself. Safe to repeat.

    Over Spark Connect the files of a shadow in an object store stay; they do no harm.
    """
    if shadow.root is None:
        for layer in ("silver", "quarantine", "ops"):
            spark.sql(f"DROP SCHEMA IF EXISTS {shadow.schema(layer)} CASCADE")
        return
    if shadow.root.startswith(("/", "file:")):
        folder = Path("/" + shadow.root.removeprefix("file:").lstrip("/"))
        shutil.rmtree(folder, ignore_errors=True)
        # `rmdir` removes only empty folders: there may be the shadow of another rebuild.
        for parent in folder.parents[: len(tables.SHADOW_FOLDERS)]:
            with contextlib.suppress(OSError):
                parent.rmdir()
        return
    with contextlib.suppress(AttributeError):
        path = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(shadow.root)
        path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, True)


@stored_files.one_look()
def found(spark: SparkSession, table: tables.TableRef) -> Mapping[str, str] | None:
    """The properties of the table; None where there is none. Raises `TableNotOurs`."""
    is_there = _is_there(spark, table)
    if is_there is not None:
        return check_ours(spark, table) if is_there else None
    # The name may be that of a view, or of a table of another format.
    table_properties = shown(spark, table)
    return None if table_properties is None else _of_ours(table, table_properties)


def check_ours(spark: SparkSession, table: tables.TableRef) -> Mapping[str, str]:
    """The table's properties; raises `TableNotOurs` unless this project created it in a format that this version supports."""
    return _of_ours(table, properties(spark, table))


def _of_ours(table: tables.TableRef, table_properties: Mapping[str, str]) -> Mapping[str, str]:
    if definition.FORMAT_PROPERTY not in table_properties:
        raise errors.TableNotOurs(
            f"{table.label}: there is a table or view that mongo-medallion did not create; choose another lakehouse "
            "root or name, or move that table away"
        )
    if table_properties[definition.FORMAT_PROPERTY] != definition.FORMAT:
        raise errors.TableNotOurs(
            f"{table.label}: its format is {table_properties[definition.FORMAT_PROPERTY]}, but this version supports "
            f"{definition.FORMAT}; use the version of mongo-medallion that created it"
        )
    return table_properties


def catalog_location(spark: SparkSession, table: tables.TableRef) -> str:
    """The URL of a catalog's table; empty where the catalog takes part in each commit, as on Databricks."""
    if sparks.is_databricks():
        return ""
    detail = _detail(spark, table)
    return "" if set(detail.tableFeatures or ()) & definition.CATALOG_MANAGED else str(detail.location)


def _detail(spark: SparkSession, table: tables.TableRef) -> Row:
    with table_errors.translating(table):
        return spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]


def _from_log(
    spark: SparkSession, table: tables.TableRef, read: Callable[[Path], Answer | None], by_spark: Callable[[], Answer]
) -> Answer:
    """What `read` finds in the log where this process reads it, else the answer of Spark."""
    folder = local_log.readable(spark, table)
    answer = None if folder is None else read(folder)
    if answer is not None:
        return answer
    with table_errors.translating(table):
        return by_spark()


def properties(spark: SparkSession, table: tables.TableRef) -> dict[str, str]:
    """The table's properties."""
    return _from_log(spark, table, table_definition.properties, lambda: _properties_by_spark(spark, table))


def features(spark: SparkSession, table: tables.TableRef) -> frozenset[str]:
    """The table features that readers and writers must support."""
    return _from_log(spark, table, table_definition.features, lambda: frozenset(_detail(spark, table).tableFeatures or ()))


def table_id(spark: SparkSession, table: tables.TableRef) -> str:
    """Delta's identifier of the table."""
    return _from_log(spark, table, table_definition.table_id, lambda: str(_detail(spark, table).id))


def has_mapped_columns(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether a user enabled column mapping, which allows dropping and renaming columns; this project never does."""
    return properties(spark, table).get("delta.columnMapping.mode", "none") != "none"


def columns(spark: SparkSession, table: tables.TableRef) -> frozenset[str]:
    """The names of the table's columns."""
    return frozenset(_from_log(spark, table, table_definition.columns, lambda: spark.table(str(table)).columns))


def column_types(spark: SparkSession, table: tables.TableRef) -> StructType:
    """The table's columns with their types."""
    return _from_log(spark, table, table_definition.column_types, lambda: spark.table(str(table)).schema)


def tables_below(root: Path, *, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """The folders of all Delta tables below a root, sorted; follows links, because a layer may be on another disk.

    Calls `on_error` for a folder that cannot be listed, and for a link whose target is not there.
    """
    table_folders, visited = [], set()
    for place, folders, files in os.walk(root, onerror=on_error, followlinks=True):
        if tables.LOG in folders:
            table_folders.append(Path(place))
            folders.clear()
            continue
        if os.path.realpath(place) in visited:  # a cycle of links
            folders.clear()
        visited.add(os.path.realpath(place))
        for path in (os.path.join(place, name) for name in files):
            if on_error is not None and not os.path.exists(path):
                on_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path))
    return sorted(table_folders)


def data_files(spark: SparkSession, table: tables.TableRef) -> list[data_file.DataFile] | None:
    """The files of the table's newest version, each tested for damage; None where the folder is not on a local file system."""
    direct, folder = direct_log.of(spark, table), local_log.folder(table)
    if direct is None or folder is None:
        return None
    live = live_files.LiveFiles(folder)
    with table_errors.translating(table):
        # From the log where it can be read here: for many tables, a query each takes minutes.
        files = live.files() if live.move_to_newest() else direct.live()
    tested_files = []
    for file in files:
        vector = file.get("deletionVector")
        if vector is not None:  # a checkpoint has all of its fields, a commit only those with a value
            vector = {name: value for name, value in vector.items() if value is not None}
        is_there = table_files.is_readable(local_log.data_path(folder, file["path"]), file["size"])
        # Without its vector a file cannot be read: it is unknown which rows are deleted.
        is_there = is_there and (vector is None or deleted_rows.is_there(vector, folder))
        tested_files.append(data_file.DataFile(file["path"], file_statistics.parsed(file), vector, is_there))
    return tested_files


def size(spark: SparkSession, table: tables.TableRef, *, stored: bool = False) -> TableSize:
    """The size of a table's newest version; with `stored`, counts all files of a local folder too, which is slow for a long log."""
    folder = local_log.folder(table)
    # For thousands of tables, a statement each takes minutes.
    table_size = None if folder is None else local_log.size(folder)
    if table_size is None:
        detail = _detail(spark, table)
        table_size = TableSize(int(detail.numFiles), int(detail.sizeInBytes))
    return replace(table_size, stored=_stored_bytes(folder)) if stored and folder is not None else table_size


def _stored_bytes(folder: Path) -> int:
    """The bytes of all files below a folder. A file that is removed meanwhile does not count."""
    count = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                count += os.lstat(os.path.join(place, name)).st_size
    return count
