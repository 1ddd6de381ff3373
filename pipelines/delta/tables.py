"""Delta tables: the only module that knows how they are made, claimed, written and read back.

Every commit of ours carries the table's position and its writer's claim as `userMetadata`, and is fenced: one constant
`txnAppId` a table, `txnVersion` = the version that was read + 1. Delta skips a transaction version that it has already
seen without a word, so each commit is looked up afterwards; one that is not there was fenced off, and the writer stops.

Statements are SQL or name-based DataFrame calls, which work over Spark Connect too. There are two exceptions, on a local or
shared file system, that commit through Delta's own transaction, a compare-and-set on the version: `Writer.append_arrow`, which
writes the Parquet file itself, and `Writer.upsert`, which is quicker than a MERGE. Where that is not to be had (object stores,
catalogs, Connect) they are an ordinary append, and a MERGE.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.sql import arrow
from cdc_core.tables import claims, deletion_vector
from cdc_core.tables import layout as tables
from pipelines.delta import exclusion
from pipelines.delta import local_log as local_table
from pipelines.delta.local_log import Commit
from pipelines.spark import failures, jvm
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger(__name__)

FACTS = {"delta.appendOnly": "true", "delta.enableDeletionVectors": "false"}
"""Properties of a table that only ever grows by a few rows."""

DELETION_VECTORS = "delta.enableDeletionVectors"

APP_ID = "mongo-medallion"
"""The one `txnAppId` of every table's commits: a fence, never a position."""

FORMAT_PROPERTY = "medallion.format"
FORMAT = "1"

COMMIT_ATTEMPTS = 8

CATALOGS_OWN = {"delta.enableDeletionVectors", "delta.checkpointPolicy", "delta.columnMapping.mode"}
"""Properties that Unity Catalog sets for its managed tables itself."""

CATALOG_MANAGED = {"catalogManaged", "catalogOwned-preview"}
"""Features of tables whose commits a catalog decides on."""

COMPACTION = {
    "spark.databricks.delta.optimize.minFileSize": str(16 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxDeletedRowsRatio": "0.3",
}
"""What a writer's own compaction takes: small files, and those of which a third is deleted: what it rewrites follows what was written."""

LARGE_FILE = 64 * 1024 * 1024
MANY_FILES = 24
"""So many files beyond those that the table's size explains, a writer compacts."""

MANY_TOUCHED = 500
"""Rows of more files are marked as deleted by a job."""

PLACE = ("__file", "__row")
"""Columns that say where a version of a table holds a row."""

SPARK_ERRORS = (PySparkException, Py4JJavaError)
"""What a statement may raise. Delta's conflicts are among the first only where its Python package is imported."""

_MISSING = (
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_ONLY_OPERATION",
    "DELTA_MISSING_TABLE",
    "TABLE_OR_VIEW_NOT_FOUND",
    "SCHEMA_NOT_FOUND",
    "PATH_NOT_FOUND",
)
_CONFLICTS = (
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "DELTA_MAX_COMMIT_RETRIES_EXCEEDED",
)
_CONFLICT_CLASSES = (
    "ConcurrentAppendException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentTransactionException",
    "ConcurrentWriteException",
    "MetadataChangedException",
    "ProtocolChangedException",
)


def layout(lakehouse: Any) -> tables.Layout:
    """The layout of the settings' lakehouse; a relative root is relative to the working directory."""
    return tables.Layout(lakehouse.root, lakehouse.catalog, lakehouse.schema_prefix).under(os.getcwd())


def exists(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether a Delta table lies there."""
    folder = local_table.folder(table)
    if folder is not None:
        return local_table.exists(folder)
    try:
        spark.sql(f"DESCRIBE HISTORY {table} LIMIT 1").collect()
    except SPARK_ERRORS as error:
        if failures.condition(error).startswith(_MISSING):
            return False
        raise translated(error, table) from error
    return True


def create(
    spark: SparkSession,
    table: tables.TableRef,
    *,
    columns: str,
    properties: Mapping[str, str] | None = None,
    cluster_by: Sequence[str] = (),
) -> None:
    """Make the table where there is none. Safe to repeat.

    Raises `TableNotOurs` where a table lies that this project did not make.
    """
    sql = f"CREATE TABLE IF NOT EXISTS {_defined(table, f' ({columns})', properties or {}, cluster_by)}"
    if table.path is not None:
        exclusion.check(spark, table.path)
    with _creating:
        for attempt in range(COMMIT_ATTEMPTS):
            if exists(spark, table):
                return check_ours(spark, table)
            if table.path is None:
                spark.sql(f"CREATE SCHEMA IF NOT EXISTS {str(table).rpartition('.')[0]}")
            try:
                spark.sql(sql)
                return None
            except SPARK_ERRORS as error:
                is_being_made = failures.condition(error).startswith("DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION")
                if not (is_conflict(error) or is_being_made):
                    raise translated(error, table) from error
            time.sleep(0.2 * (attempt + 1))
            if attempt >= UNBORN_AFTER and not exists(spark, table):
                _remove_unborn(table)
    raise _conflict(table)


def _defined(table: tables.TableRef, columns: str, properties: Mapping[str, str], cluster_by: Sequence[str]) -> str:
    asked = properties if table.path is not None else _of_ours(properties)
    all_properties = {FORMAT_PROPERTY: FORMAT, **asked}
    rendered = ", ".join(f"'{name}' = '{value}'" for name, value in all_properties.items())
    clustering = f" CLUSTER BY ({', '.join(cluster_by)})" if cluster_by else ""
    return f"{table}{columns} USING DELTA{clustering} TBLPROPERTIES ({rendered})"


def _of_ours(properties: Mapping[str, str]) -> dict[str, str]:
    """Properties without those that a catalog decides for its managed tables: asking for others there is an error."""
    return {name: value for name, value in properties.items() if name not in CATALOGS_OWN}


_creating = threading.Lock()
"""Threads of one process make tables one after the other; other processes are waited for."""

UNBORN_AFTER = 3


def _remove_unborn(table: tables.TableRef) -> None:
    """What a process that was killed while it made the table left in its log: hidden files, and no commit."""
    folder = local_table.folder(table)
    if folder is None:
        return
    log = folder / "_delta_log"
    for left in log.glob(".*"):
        left.unlink(missing_ok=True)
    for empty in (*log.glob("*"), log, folder):
        with contextlib.suppress(OSError):
            empty.rmdir()


def remove(spark: SparkSession, shadow: tables.Layout) -> None:
    """Remove a shadow's tables, whatever is there of them; nothing of the lakehouse that it is a shadow of.

    Over Spark Connect the files of a shadow on an object store stay, in no table's way.
    """
    if shadow.root is None:
        for schema in {
            str(table).rpartition(".")[0] for table in (shadow.silver("", ""), shadow.quarantine("", ""), shadow.ops(""))
        }:
            spark.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        return
    if shadow.root.startswith(("/", "file:")):
        folder = Path("/" + shadow.root.removeprefix("file:").lstrip("/"))
        shutil.rmtree(folder, ignore_errors=True)
        for parent in folder.parents[: len(tables.SHADOW_FOLDERS)]:
            with contextlib.suppress(OSError):
                parent.rmdir()
        return
    with contextlib.suppress(AttributeError):
        path = spark._jvm.org.apache.hadoop.fs.Path(shadow.root)
        path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, True)


def check_ours(spark: SparkSession, table: tables.TableRef) -> None:
    """Raise `TableNotOurs` unless the table was made by this project in a format that it knows."""
    found = properties(spark, table)
    if FORMAT_PROPERTY not in found:
        raise errors.TableNotOurs(
            f"{table.label}: a Delta table lies there that this pipeline did not make; "
            "choose another lakehouse root or name, or move that table away"
        )
    if found[FORMAT_PROPERTY] != FORMAT:
        raise errors.TableNotOurs(
            f"{table.label}: its format is {found[FORMAT_PROPERTY]}, this version writes {FORMAT}; "
            "use the version of mongo-medallion that made it"
        )


def _catalog_location(spark: SparkSession, table: tables.TableRef) -> str:
    """Where a catalog keeps the table's commits: a URL, or nothing where the catalog takes part in each commit."""
    if sparks.is_databricks():
        return ""
    with _translating(table):
        detail = spark.sql(f"DESCRIBE DETAIL {table}").select("location", "tableFeatures").first()
    features = set(detail.tableFeatures or ()) if detail is not None else set()
    return "" if features & CATALOG_MANAGED else str(detail.location)


def properties(spark: SparkSession, table: tables.TableRef) -> dict[str, str]:
    """The table's properties; on a local file system from the log, where its last commits say them."""
    folder = local_table.folder(table)
    found = None if folder is None else local_table.properties(folder)
    if found is not None:
        return found
    with _translating(table):
        return {row.key: row.value for row in spark.sql(f"SHOW TBLPROPERTIES {table}").collect()}


def history(spark: SparkSession, table: tables.TableRef, *, limit: int | None = None) -> list[Commit]:
    """The newest commits, newest first; on a local file system from the log itself, which takes no Spark job."""
    folder = local_table.folder(table)
    if folder is not None and (folder / "_delta_log").is_dir():
        return list(itertools.islice(local_table.commits(folder), limit))
    suffix = "" if limit is None else f" LIMIT {limit}"
    with _translating(table):
        rows = (
            spark.sql(f"DESCRIBE HISTORY {table}{suffix}")
            .selectExpr("version", "timestamp", "userMetadata", "operation", "operationParameters.version AS restored")
            .collect()
        )
    return [
        Commit(
            row.version,
            int(row.timestamp.timestamp() * 1000),
            claims.parsed(row.userMetadata),
            _restored(row.restored) if row.operation == "RESTORE" else None,
        )
        for row in rows
    ]


def _restored(said: str | None) -> int:
    """The version that a RESTORE brought back. One to a time does not say it, in which zone neither: then one before all, so
    that no commit's position is taken for that of the rows."""
    return -1 if said is None else int(said)


def version(spark: SparkSession, table: tables.TableRef) -> int:
    """The table's newest version."""
    return history(spark, table, limit=1)[0].version


def since(spark: SparkSession, table: tables.TableRef, version: int) -> list[Commit]:
    """The commits after `version`, newest first; no older one is read, however long the history is."""
    newest = history(spark, table, limit=1)[0].version
    found: list[Commit] = []
    while newest > version and (not found or found[-1].version > version + 1):
        found = history(spark, table, limit=newest - version)
        if found[0].version == newest:
            break
        newest = found[0].version  # others committed between the two looks
    return [commit for commit in found if commit.version > version]


def _newest_first(spark: SparkSession, table: tables.TableRef) -> Iterator[Commit]:
    """The whole history, of which no more is read than somebody asks for."""
    folder = local_table.folder(table)
    if folder is not None and (folder / "_delta_log").is_dir():
        yield from local_table.commits(folder)
        return
    told: int | None = None
    for limit in (1, 30, None):
        for commit in history(spark, table, limit=limit):
            if told is None or commit.version < told:
                told = commit.version
                yield commit


def last_commit(spark: SparkSession, table: tables.TableRef) -> Commit | None:
    """The newest commit of ours: the table's position and its writer; None where history has none."""
    return next((commit for commit in _newest_first(spark, table) if commit.metadata is not None), None)


def position(spark: SparkSession, table: tables.TableRef) -> Commit | None:
    """The commit of ours that the table's rows are at: the newest one, or, after a RESTORE, that of the restored version.

    None where history has none, or no longer reaches back to the restored version.
    """
    reached: int | None = None
    for commit in _newest_first(spark, table):
        if reached is not None and commit.version > reached:
            continue
        if commit.restored is not None:
            reached = commit.restored
        elif commit.metadata is not None:
            return commit
    return None


def last_metadata(spark: SparkSession, table: tables.TableRef) -> tuple[int, dict[str, Any]] | None:
    """The same as a pair of version and metadata."""
    commit = last_commit(spark, table)
    return None if commit is None or commit.metadata is None else (commit.version, commit.metadata)


def append_rows(spark: SparkSession, table: tables.TableRef, rows: pa.Table) -> None:
    """Append a few rows, whoever else appends; a table of facts, in which order and repetition mean nothing.

    On a local file system without a Spark job; elsewhere as Spark appends.
    """
    direct = _direct_log(spark, table)
    if direct is None:
        exclusion.check(spark, table.path or _catalog_location(spark, table))
        spark.createDataFrame(rows).coalesce(1).writeTo(str(table)).append()
        return
    folder = local_table.folder(table)
    assert folder is not None
    # Where this fails the file stays: a commit that got no answer may name it. VACUUM takes what none names.
    _appended(direct, _ParquetFile.write(folder, rows, statistics=(), table=table), table)


def _appended(direct: _DirectLog, file: _ParquetFile, table: tables.TableRef) -> None:
    """Commit the file, again where others came first.

    Delta would do that by itself, but not while another thread's fenced commit has told the shared session not to.
    """
    for attempt in range(COMMIT_ATTEMPTS):
        try:
            return direct.append(file)
        except SPARK_ERRORS as error:
            if not is_conflict(error):
                raise translated(error, table) from error
        time.sleep(0.05 * 2**attempt)
    raise _conflict(table)


def note(
    spark: SparkSession,
    table: tables.TableRef,
    rows: Sequence[Mapping[str, object]],
    schema: pa.Schema,
    *,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Append a few facts to a table of them, which is made where there is none."""
    create(spark, table, columns=arrow.columns_ddl(schema), properties=properties)
    append_rows(spark, table, pa.Table.from_pylist([dict(row) for row in rows], schema=schema))


def rows(spark: SparkSession, table: tables.TableRef, schema: pa.Schema) -> pa.Table:
    """All rows of a table of facts, in no order, as `schema` has its columns."""
    folder = local_table.folder(table)
    found = None if folder is None else local_table.rows(folder, schema)
    if found is not None:
        return found
    with _translating(table):
        return local_table.aligned(spark.table(str(table)).toArrow(), schema)


_Said = Callable[[], tuple[object, Mapping[str, object] | None]]
"""Position and extras of a commit, asked for at each attempt."""


class Writer:
    """A held claim on one table: the only way to commit to it.

    Made by `Writer.claim`; every commit renews the lease. A commit that was fenced off, or that finds another writer's
    claim, raises `OwnershipLost`, and nothing of it is in the table.
    """

    def __init__(self, spark: SparkSession, table: tables.TableRef, *, identity: claims.Writer, base: Commit | None) -> None:
        self.spark = spark
        self.table = table
        self.identity = identity
        self.version = base.version if base else 0
        self.metadata: dict[str, Any] = dict(base.metadata or {}) if base else {}
        self._log: Any = None
        self._unanswered: dict[str, Any] | None = None
        _HELD[identity.writer] = self
        self._spare = 0

    @staticmethod
    def claim(spark: SparkSession, table: tables.TableRef, *, take_over: bool = False, kept: Sequence[str] = ()) -> Writer:
        """Claim the table by an empty commit that names this process, with a lease.

        Where the owner commits in between, the claim looks again: what it takes over is what the table holds then.
        After a RESTORE that is what the restored version said, but for the names in `kept`, which nothing takes back.
        Raises `TableOwned` where a live process of this host holds it, `LeaseHeld` where another host's lease is not
        over, `TableNotOurs`; with `take_over` neither of the first two. A refused writer has committed nothing.
        """
        check_ours(spark, table)
        exclusion.check(spark, table.path or _catalog_location(spark, table))
        for _ in range(COMMIT_ATTEMPTS):
            base = version(spark, table)  # read first: whatever is committed after it makes the claim's commit fail
            last = last_commit(spark, table)
            if not take_over:
                _refuse_second(table, last)
            writer = Writer(spark, table, identity=_identity(), base=position(spark, table))
            writer.version = base
            with contextlib.suppress(errors.OwnershipLost):
                newest = (last.metadata if last else None) or {}
                extra = {name: newest[name] for name in kept if name in newest}
                writer.mark(to=writer.metadata.get("to"), extra={**_carried(writer.metadata), **extra})
                return writer
        raise _conflict(table)

    def mark(self, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """One fenced commit without rows, for what its metadata says; the new version."""
        self._refuse_unanswered()
        return self._marked(lambda: (to, extra))

    def append(self, df: DataFrame, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Append the rows of `df` as one fenced commit; the new version."""
        self._refuse_unanswered()
        return self._appended(df, lambda: (to, extra))

    def overwrite(
        self,
        df: DataFrame,
        *,
        to: object,
        extra: Mapping[str, object] | None = None,
        overwrite_schema: bool = False,
    ) -> int:
        """Replace the table's rows by those of `df` in one fenced commit; the new version."""
        writer = df.write.format("delta").mode("overwrite").option("overwriteSchema", str(overwrite_schema).lower())
        path = self.table.path

        def act(options: dict[str, str]) -> None:
            chosen = writer.options(**options)
            # By its name, a path table that another session has just made is sometimes taken for missing, and made again.
            chosen.saveAsTable(str(self.table)) if path is None else chosen.save(path)

        self._refuse_unanswered()
        return self._write(act, lambda: (to, extra))

    def replace(
        self,
        df: DataFrame,
        *,
        to: object,
        extra: Mapping[str, object] | None = None,
        properties: Mapping[str, str],
        cluster_by: Sequence[str] = (),
    ) -> int:
        """Replace the table's rows, columns, properties and clustering in one fenced commit; the new version."""
        view = f"replacing_{uuid.uuid4().hex[:12]}"
        df.createOrReplaceTempView(view)
        try:
            return self.merge(
                f"CREATE OR REPLACE TABLE {_defined(self.table, '', properties, cluster_by)} AS SELECT * FROM {view}",
                to=to,
                extra=extra,
            )
        finally:
            self.spark.catalog.dropTempView(view)

    def merge(
        self,
        sql: str,
        *,
        to: object,
        extra: Mapping[str, object] | None = None,
        confs: Mapping[str, str] | None = None,
    ) -> int:
        """Run one MERGE statement as a fenced commit; the new version.

        Retried on Delta's conflicts, each time with ownership checked and the fence set anew: the statement must be a
        function of its source and of the table as it is. Raises `CommitConflict` when the retries are used up.
        """
        self._refuse_unanswered()

        def act(fence: dict[str, str]) -> None:
            settings = {
                "spark.databricks.delta.write.txnAppId": fence["txnAppId"],
                "spark.databricks.delta.write.txnVersion": fence["txnVersion"],
                "spark.databricks.delta.write.txnVersion.autoReset.enabled": "true",
                "spark.databricks.delta.commitInfo.userMetadata": fence["userMetadata"],
                **(confs or {}),
            }
            with session_confs(self.spark, settings):
                self.spark.sql(sql).collect()

        return self._write(act, lambda: (to, extra))

    @property
    def is_direct(self) -> bool:
        """Whether `upsert` writes files first and commits them after, so that it can still be told not to."""
        return self._has_direct_log()

    @contextmanager
    def seeking(self, touched: DataFrame) -> Iterator[Sought | None]:
        """What `upsert` would take out of the table as it is now, looked for beside what the block does; None where it cannot.

        `touched` as in `upsert`, or the `PLACE` of each row, as it was read since this writer's last commit. The block's end
        waits for the search; what it wrote and nobody took is vacuumed with the rest.
        """
        if not self._has_direct_log():
            yield None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-seek") as pool:
            yield Sought(self.version, pool.submit(self._log.deleting, self.table, touched, base=self.version))

    def can_upsert(self) -> bool:
        """Whether `upsert` does without a MERGE here, and rows have `places`."""
        return self._has_direct_log() and self._log.can_upsert()

    def places(self) -> tuple[Column, Column]:
        """`PLACE` of each row of the table, where it is read for an `upsert`; nulls where none can be made."""
        if self.can_upsert():
            return places()
        return F.lit(None).cast("string").alias(PLACE[0]), F.lit(None).cast("bigint").alias(PLACE[1])

    @contextmanager
    def listing(self) -> Iterator[None]:
        """The files of the newest version are listed beside what the block does: the first query over the table asks for them."""
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-list") as pool:
            if self._has_direct_log():
                pool.submit(self._log.files)
            yield

    def upsert(
        self,
        rows: DataFrame,
        *,
        touched: DataFrame | None,
        sought: Sought | None = None,
        to: object,
        extra: Mapping[str, object] | None = None,
        confs: Mapping[str, str] | None = None,
        unless: Callable[[], bool] | None = None,
        few: bool = False,
    ) -> int | None:
        """Take the rows of the keys out of the table and put `rows` in, as one fenced commit; the new version.

        What ``MERGE … WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *`` does, with the table's keys looked through
        once and not three times. `touched` has one column, the key, by its name in the table; `rows` have the table's columns. None
        where only a MERGE can do it: off a local file system, with another Delta, or for a table without deletion vectors or with a change feed.
        `sought` is what was found before; it counts for the version that it was found in, and is looked for again in any other.
        Without `touched` the rows are only put in. `unless` is asked when they are written and before they are committed; where it
        is true, nothing is, and `Unwanted` is raised. Of `few` rows the deletion vectors are made here, without a job.
        """
        if not self._has_direct_log():
            return None
        self._refuse_unanswered()
        commit = functools.partial(self._log.upsert, rows, self.table, touched, sought, unless, few)
        try:
            with session_confs(self.spark, confs or {}):
                return self._directly(commit, lambda: (to, extra))
        except _NeedsMerge:  # nothing was committed
            return None

    def alter(self, change: str) -> None:
        """Run `ALTER TABLE … change` on the table after ownership was checked; the next commit is fenced on top of it."""
        self.check_ownership()
        with (
            session_confs(
                self.spark,
                {
                    "spark.databricks.delta.commitInfo.userMetadata": self._metadata(
                        self.metadata.get("to"), _carried(self.metadata)
                    )
                },
            ),
            _translating(self.table),
        ):
            self.spark.sql(f"ALTER TABLE {self.table} {change}").collect()
        self._accept_foreign_commits()  # a claim may have come just before it, and an ALTER is fenced by nothing

    def optimize(self, *, purges: bool = False) -> None:
        """Compact the table; the commits say what the last one said. Raises `CommitConflict` where others came first."""
        self.check_ownership()
        metadata = self._metadata(self.metadata.get("to"), _carried(self.metadata))
        optimize(self.spark, self.table, metadata=metadata, purges=purges)
        self._accept_foreign_commits()

    def delete(self, where: str) -> int:
        """Remove the rows as one fenced commit that says what the last one said; how many."""
        with _translating(self.table):
            count = int(self.spark.sql(f"SELECT count(*) AS n FROM {self.table} WHERE {where}").collect()[0].n)
        if count:
            sql = f"DELETE FROM {self.table} WHERE {where}"
            self.merge(sql, to=self.metadata.get("to"), extra=_carried(self.metadata))
        return count

    def set_deletion_vectors(self, wanted: bool) -> None:
        """Give the table deletion vectors, or take them away so that readers need not know of them; nothing where it is so.

        Taking them away rewrites the files that have some. Killed on its way, it is gone on with the next time.
        """
        detail = self.spark.sql(f"DESCRIBE DETAIL {self.table}").collect()[0]
        has_feature = "deletionVectors" in (detail.tableFeatures or ())
        if wanted and detail.properties.get(DELETION_VECTORS) != "true":
            self.alter(f"SET TBLPROPERTIES ('{DELETION_VECTORS}' = 'true')")
        elif has_feature and not wanted:
            self.alter("DROP FEATURE deletionVectors")

    def compact(self) -> None:
        """Put small files together and rewrite those of which much is deleted, where there came to be many.

        Bounded by what was written since the last time, not by the table; only on a local file system, elsewhere it is
        maintenance that does it. The rows stay as they are, and the position.
        """
        spare = self._spare_files()
        if spare < self._spare + MANY_FILES:
            return
        self.check_ownership()
        # Without metadata: it says nothing of who owns the table, or where it stands.
        with session_confs(self.spark, COMPACTION), contextlib.suppress(errors.CommitConflict):
            optimize(self.spark, self.table, metadata=None)
        self.check_ownership()  # which goes on to the version that this made
        self._spare = self._spare_files()

    def _spare_files(self) -> int:
        """How many files the table has beyond those that its size explains; 0 where its log does not say it."""
        folder = local_table.folder(self.table)
        size = None if folder is None else local_table.size(folder)
        return 0 if size is None else max(0, size.files - size.size_bytes // LARGE_FILE)

    def append_arrow(
        self,
        rows: pa.Table,
        *,
        to: object,
        statistics: Sequence[str] = (),
        extra: Mapping[str, object] | None = None,
    ) -> int:
        """Append Arrow rows as one fenced commit; the new version.

        `statistics` names the columns whose minimum and maximum are kept for skipping. On a local file system the
        Parquet file is written here and committed through Delta's transaction; elsewhere Spark appends the rows.
        """
        if not self._has_direct_log():
            return self.append(self.spark.createDataFrame(rows), to=to, extra=extra)
        self._refuse_unanswered()
        file = _ParquetFile.write(self._folder(), rows, statistics=statistics, table=self.table)
        try:
            return self._directly(functools.partial(self._log.commit, file), lambda: (to, extra))
        except _REFUSED:  # raised after the answer, and after the log was looked through: no commit names the file
            file.discard()
            raise

    def take_out(self, files: Sequence[DataFile], *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Take files out of the table without reading them, as one fenced commit, whose position is `to`; the new version.

        Only where the direct log is to be had (`DecisionNeeded`).
        """
        if not self._has_direct_log():
            raise errors.DecisionNeeded(
                f"{self.table.label}: its log cannot be mended from here; on Databricks FSCK REPAIR TABLE does it"
            )
        self._refuse_unanswered()
        return self._directly(functools.partial(self._log.take_out, files), lambda: (to, extra))

    def check_ownership(self) -> None:
        """Raise `OwnershipLost` if a claim of another writer is newer than this writer's last commit, `CommitConflict` if a
        RESTORE is."""
        self._accept_foreign_commits()

    def renew(self) -> None:
        """Renew the lease by an empty commit that says what the last one said."""
        self._refuse_unanswered()
        self._marked(lambda: (self.metadata.get("to"), _carried(self.metadata)))

    def release(self, extra: Mapping[str, object] | None = None) -> None:
        """Say that the owner left cleanly, so that a successor on another host need not wait for the lease.

        Whatever comes of it, no successor in this process is refused because of this writer. A commit that got no answer, and
        is in the log, counts as the last one.
        """
        _HELD.pop(self.identity.writer, None)
        self._marked(lambda: (self.metadata.get("to"), {**_carried(self.metadata), **(extra or {}), "released": True}))

    def _marked(self, said: _Said) -> int:
        if self._has_direct_log():
            return self._directly(functools.partial(self._log.commit, None), said)
        return self._appended(self.spark.createDataFrame([], self.spark.table(str(self.table)).schema), said)

    def _appended(self, df: DataFrame, said: _Said) -> int:
        return self._write(lambda options: df.writeTo(str(self.table)).options(**options).append(), said)

    def _write(self, act: Callable[[dict[str, str]], None], said: _Said) -> int:
        """A statement of Spark as a fenced commit, and again where others committed in between."""
        for attempt in range(COMMIT_ATTEMPTS):
            self._settle()
            self.check_ownership()  # Delta puts the statement onto whatever version it finds
            metadata = self._metadata(*said())
            options = {"userMetadata": metadata, "txnAppId": APP_ID, "txnVersion": str(self.version + 1)}
            try:
                return self._asked(metadata, functools.partial(act, options))
            except SPARK_ERRORS as error:
                if not is_conflict(error):
                    raise translated(error, self.table) from error
                self._after_conflict(attempt, error)
        raise _conflict(self.table)

    def _asked(self, metadata: str, act: Callable[[], int | None]) -> int:
        """The version in which `act` committed, by its answer or by the log; raises what it raises where it committed nothing.

        An answer may be an error although the commit is in the log, and a success although it was fenced off. Where there is
        no answer (the JVM is gone, an interrupt), the commit may be there, or come yet: `_unanswered` remembers it.
        """
        self._unanswered = asked = claims.parsed(metadata) or {}
        try:
            new = act()
        except (_NeedsMerge, Unwanted):  # raised before the log was asked
            self._unanswered = None
            raise
        except (*SPARK_ERRORS, _VersionTaken):
            self._unanswered = None
            landed = self._landed(asked)
            if landed is None:
                raise
            return self._committed(landed, asked)
        if new is None:
            new = self._landed(asked)
        if new is None:
            raise self._lost()
        return self._committed(new, asked)

    def _settle(self) -> None:
        """Take a commit that got no answer for the last one, where it is in the log."""
        if self._unanswered is not None:
            landed = self._landed(self._unanswered)
            if landed is not None:
                self._committed(landed, self._unanswered)

    def _refuse_unanswered(self) -> None:
        """Raise `CommitUnknown` after a commit that got no answer: what would follow on it is not known."""
        if self._unanswered is not None:
            raise errors.CommitUnknown(
                f"{self.table.label}: whether the last commit is in the table is not known; start again, the table tells it"
            )

    def _landed(self, asked: Mapping[str, Any]) -> int | None:
        """The version whose commit says this, among those after this writer's last one."""
        found = since(self.spark, self.table, self.version)
        return next((commit.version for commit in found if commit.metadata == asked), None)

    def _metadata(self, to: object, extra: Mapping[str, object] | None) -> str:
        now_ms = int(time.time() * 1000)
        return self.identity.metadata(now_ms=now_ms, to=to, extra={**(extra or {}), "commit": uuid.uuid4().hex[:12]})

    def _committed(self, new_version: int, metadata: Mapping[str, Any]) -> int:
        self.version = new_version
        self.metadata = dict(metadata)
        self._unanswered = None
        return new_version

    def _after_conflict(self, attempt: int, error: BaseException) -> None:
        if attempt + 1 == COMMIT_ATTEMPTS:
            raise _conflict(self.table) from error
        time.sleep(min(0.1 * 2**attempt, 5.0))
        self._accept_foreign_commits()

    def _accept_foreign_commits(self) -> None:
        """Move on to the newest version, unless another writer claimed the table in between, or it was restored: what this
        writer would add does not follow on what the table holds then."""
        for commit in (found := since(self.spark, self.table, self.version)):
            if commit.restored is not None:
                raise errors.CommitConflict(
                    f"{self.table.label}: it was restored to an earlier version while it was written; nothing was "
                    "committed after that. Start again, and it goes on from there"
                )
            if commit.metadata is not None and commit.metadata.get("writer") != self.identity.writer:
                raise self._lost()
        if found:
            self.version = found[0].version

    def _lost(self) -> errors.OwnershipLost:
        return errors.OwnershipLost(
            f"{self.table.label}: another writer took this table over; this one stopped and committed nothing more. "
            "If it should run instead, stop the other and start again with --take-over"
        )

    def _folder(self) -> Path:
        folder = local_table.folder(self.table)
        assert folder is not None
        return folder

    def _has_direct_log(self) -> bool:
        if self._log is None:
            self._log = _direct_log(self.spark, self.table) or False
        return bool(self._log)

    def _directly(self, commit: Callable[..., int], said: _Said) -> int:
        """A commit through the direct log onto the last version, and onto the newest where others committed in between."""
        for attempt in range(COMMIT_ATTEMPTS):
            self._settle()
            metadata = self._metadata(*said())
            try:
                return self._asked(metadata, functools.partial(commit, base=self.version, metadata=metadata))
            except _VersionTaken as error:
                self._after_conflict(attempt, error)
            except SPARK_ERRORS as error:
                raise translated(error, self.table) from error
        raise _conflict(self.table)


_HELD: WeakValueDictionary[str, Writer] = WeakValueDictionary()
"""The writers of this process that were not released, by their identity: the others hold nothing any more."""


_REFUSED = (errors.OwnershipLost, errors.CommitConflict, errors.StorageExhausted, *SPARK_ERRORS)
"""What a commit raises that is known to be in no log."""


class _VersionTaken(Exception):
    """Somebody committed the version that this writer wanted."""


class Unwanted(Exception):
    """Rows were written that shall not be committed, and were not."""


class _NeedsMerge(Exception):
    """The table has no deletion vectors, or a change feed whose readers want updates."""


@dataclass(frozen=True)
class DataFile:
    """A file of a table's newest version: its name in the log, Delta's statistics, its deletion vector, and whether it is there."""

    name: str
    stats: Mapping[str, Any]
    vector: Mapping[str, Any] | None
    is_there: bool

    def between(self, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest value of a column, where they are known."""
        low, high = (self.stats.get(each, {}).get(column) for each in ("minValues", "maxValues"))
        return None if low is None or high is None else (low, high)


def data_files(spark: SparkSession, table: tables.TableRef) -> list[DataFile] | None:
    """The files of the table's newest version, looked for one by one; None where its folder is not to be seen from here."""
    direct, folder = _direct_log(spark, table), local_table.folder(table)
    if direct is None or folder is None:
        return None
    with _translating(table):
        rows = direct.live().collect()
    return [
        DataFile(
            row.path,
            json.loads(row.stats or "{}"),
            None if row.vector is None else json.loads(row.vector),
            local_table.data_path(folder, row.path).exists(),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Sought:
    """The actions that take rows out of a version of a table, as soon as they are found."""

    version: int
    actions: Future[Any]


@dataclass(frozen=True)
class _ParquetFile:
    """A Parquet file inside the table's folder that no commit names yet."""

    path: Path
    rows: int
    stats: str

    @staticmethod
    def write(folder: Path, rows: pa.Table, *, statistics: Sequence[str], table: tables.TableRef) -> _ParquetFile:
        path = folder / f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        repeated = [name for name in rows.column_names if name in _REPEATED]
        try:
            pq.write_table(rows, path, compression="snappy", use_dictionary=repeated)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise disk_error(error, table) from error
        return _ParquetFile(path, rows.num_rows, json.dumps(_statistics(rows, statistics)))

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


_REPEATED = ("batch", "kind", "op", "db", "collection", "source", "ts_ms")
"""Columns that repeat within a commit: dictionary-encoded. The others would only fill a dictionary in vain."""


def _statistics(rows: pa.Table, columns: Sequence[str]) -> dict[str, Any]:
    import pyarrow.compute as pc

    low, high, nulls = {}, {}, {}
    for name in columns:
        column = rows.column(name)
        bounds = pc.min_max(column).as_py()
        nulls[name] = column.null_count
        if bounds["min"] is not None and not _is_long(bounds):
            low[name], high[name] = bounds["min"], bounds["max"]
    return {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _is_long(bounds: Mapping[str, Any]) -> bool:
    """Delta cuts string statistics at 32 characters; longer ones are left out, which only skips less."""
    return any(isinstance(bound, str) and len(bound) > 32 for bound in bounds.values())


class _DirectLog:
    """Delta's own transaction log of one path table, by way of the JVM of a classic Spark session."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._jvm = spark._jvm
        package = self._jvm.org.apache.spark.sql.delta
        self._log = package.DeltaLog.forTable(spark._jsparkSession, str(folder))
        self._write = getattr(package, "DeltaOperations$Write")
        self._action = package.actions.Action
        self._none = self._jvm.scala.Option.empty
        self._session = self._jvm.org.apache.spark.sql.classic.SparkSession
        self._fencing = _fencing_session(spark)._jsparkSession
        self._operation("{}")

    def commit(self, file: _ParquetFile | None, *, base: int, metadata: str) -> int:
        """Commit the file, or nothing but the fence, as version `base` + 1, or raise `_VersionTaken` and change nothing."""
        return self._committed(self._at(base), self._actions(file, base + 1), base=base, metadata=metadata)

    def upsert(
        self,
        rows: DataFrame,
        table: tables.TableRef,
        touched: DataFrame | None,
        sought: Sought | None,
        unless: Callable[[], bool] | None,
        few: bool,
        *,
        base: int,
        metadata: str,
    ) -> int:
        """Delete the touched rows by deletion vectors and append `rows`, as version `base` + 1, or raise `_VersionTaken`,
        `_NeedsMerge` or `Unwanted`.

        The rows are looked for in a thread beside the one that writes: neither fills two cores all the time.
        """
        transaction = self._able(base)
        actions = self._jvm.java.util.ArrayList()
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="medallion-upsert") as pool:
                deleting = None if sought is None or sought.version != base else sought.actions
                if deleting is None and touched is not None:
                    mark = self._deleting_few if few else self._deleting
                    deleting = pool.submit(mark, transaction, table, touched)
                written = transaction.writeFiles(rows._jdf)
                deleted = () if deleting is None else (deleting.result(),)
                for found in (self._actions(None, base + 1), *deleted, written):
                    actions.addAll(self._jvm.scala.jdk.javaapi.CollectionConverters.asJava(found))
        except SPARK_ERRORS as error:
            raise self._translated(error, base) from error
        except (Py4JError, TypeError) as error:  # another Delta has other methods
            raise _NeedsMerge from error
        if unless is not None and unless():
            raise Unwanted  # VACUUM takes the files
        return self._committed(transaction, self._seq(actions), base=base, metadata=metadata)

    def take_out(self, files: Sequence[DataFile], *, base: int, metadata: str) -> int:
        """Take files out of the version `base`, as version `base` + 1, or raise `_VersionTaken` and change nothing."""
        now_ms = int(time.time() * 1000)
        actions = self._jvm.java.util.ArrayList()
        actions.addAll(self._jvm.scala.jdk.javaapi.CollectionConverters.asJava(self._actions(None, base + 1)))
        for file in files:
            # An append-only table lets no rows go, but a file that is not there has none.
            removed = {"path": file.name, "deletionTimestamp": now_ms, "dataChange": False, "deletionVector": file.vector}
            actions.add(self._action.fromJson(json.dumps({"remove": removed})))
        return self._committed(self._at(base), self._seq(actions), base=base, metadata=metadata)

    def live(self) -> DataFrame:
        """The files of the newest version, one a row, as the log has them."""
        from pyspark.sql.classic.dataframe import DataFrame as Frame

        found: DataFrame = Frame(self._newest().allFiles().toDF(), self._spark)
        return found.selectExpr("path", "stats", "to_json(deletionVector) AS vector")

    def checkpoint(self) -> bool:
        """Checkpoint the newest version, and clean up behind it."""
        self._session.setActiveSession(self._spark._jsparkSession)
        self._log.checkpointAndCleanUpDeltaLog(self._newest(), self._none())
        return True

    def can_upsert(self) -> bool:
        """Whether the table, as this process knows it, has deletion vectors and no change feed."""
        return self._has_vectors(self._log.unsafeVolatileSnapshot())

    def _has_vectors(self, known: Any) -> bool:
        asked = self._jvm.scala.jdk.javaapi.CollectionConverters.asJava(known.metadata().configuration())
        return asked.get(DELETION_VECTORS) == "true" and asked.get("delta.enableChangeDataFeed") != "true"

    def files(self) -> Any:
        """The files of the newest version, which Delta then keeps in memory."""
        return self._begun(self._newest()).filterFiles()

    def deleting(self, table: tables.TableRef, touched: DataFrame, *, base: int) -> Any:
        """The actions that take the touched rows out of the version `base`; raises as `upsert` does."""
        return self._deleting(self._able(base), table, touched)

    def _able(self, base: int) -> Any:
        """A transaction on the version `base` of a table that can be upserted."""
        transaction = self._at(base)
        if not self._has_vectors(transaction):
            raise _NeedsMerge
        return transaction

    def _deleting(self, transaction: Any, table: tables.TableRef, touched: DataFrame) -> Any:
        """Actions that take the touched rows out, as Delta's own DELETE finds and writes them."""
        self._session.setActiveSession(self._spark._jsparkSession)
        found = self._placed(table, touched)
        package = self._jvm.org.apache.spark.sql.delta
        some, (file, row) = self._jvm.scala.Option.apply, (F.col(name)._jc for name in PLACE)
        session, files = self._spark._jsparkSession, transaction.filterFiles()
        helper = package.commands.DMLWithDeletionVectorsHelper
        always = self._jvm.org.apache.spark.sql.catalyst.expressions.Literal.TrueLiteral()
        vectors = getattr(getattr(package.commands, "DeletionVectorBitmapGenerator$"), "MODULE$")
        stored = vectors.buildRowIndexSetsForFilesMatchingCondition(
            session, transaction, True, found._jdf, files, always, some(file), some(row)
        )
        by_name = helper.generateCandidateFileMap(self._log.dataPath(), files)
        marked = helper.findFilesWithMatchingRows(transaction, by_name, stored)
        prefix = package.stats.StatsCollectionUtils.getDataSkippingStringPrefixLength(session, transaction.metadata())
        return helper.processUnmodifiedData(session, marked, transaction.snapshot(), prefix)._1()

    def _placed(self, table: tables.TableRef, touched: DataFrame) -> DataFrame:
        """The `PLACE` of each touched row."""
        if touched.columns == [*PLACE]:
            return touched
        (key,) = touched.columns
        rows = self._spark.table(str(table)).select(key, *places())
        return rows.join(touched, key, "left_semi").select(*PLACE)

    def _deleting_few(self, transaction: Any, table: tables.TableRef, touched: DataFrame) -> Any:
        """The same actions, with the vectors made here: Delta makes them with a dozen jobs, however few rows there are."""
        self._session.setActiveSession(self._spark._jsparkSession)
        by_file: dict[str, list[int]] = {}
        found = self._placed(table, touched).toArrow()
        for path, row in zip(*(found[name].to_pylist() for name in PLACE), strict=True):
            by_file.setdefault(path.rpartition("/")[2], []).append(row)
        files = self._named(transaction, list(by_file))
        if len(files) < len(by_file) or any("stats" not in file for file in files):  # somebody else wrote them
            return self._deleting(transaction, table, touched)
        actions = self._jvm.java.util.ArrayList()
        for file in files:
            for action in self._without(file, by_file[file["path"]]):
                actions.add(self._action.fromJson(json.dumps(action)))
        return self._seq(actions)

    def _named(self, transaction: Any, names: Sequence[str]) -> list[dict[str, Any]]:
        """The `add` actions of the files of these names, as the log has them."""
        if not 0 < len(names) <= MANY_TOUCHED:
            return []
        from pyspark.sql.classic.dataframe import DataFrame as Frame

        files: DataFrame = Frame(transaction.snapshot().allFiles().toDF(), self._spark)
        rows = files.where(F.col("path").isin(names)).selectExpr("to_json(struct(*)) AS action").toArrow()
        return [json.loads(text) for text in rows["action"].to_pylist()]

    def _without(self, file: Mapping[str, Any], rows: Sequence[int]) -> list[dict[str, Any]]:
        """The actions that take rows out of a file."""
        same = {name: file[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in file}
        now_ms = int(time.time() * 1000)
        removed = {"remove": {**same, "deletionTimestamp": now_ms, "dataChange": True, "extendedFileMetadata": True}}
        bitmap = self._jvm.org.apache.spark.sql.delta.deletionvectors.RoaringBitmapArray.readFrom(
            deletion_vector.serialized(rows)
        )
        if "deletionVector" in file:
            bitmap.merge(self._held_vector(file))
        count, stats = bitmap.cardinality(), json.loads(file["stats"])
        if stats["numRecords"] == count:
            return [removed]
        stats["tightBounds"] = False  # the least or the greatest value may be gone
        added = {**file, "stats": json.dumps(stats), "deletionVector": self._vector(bitmap, count), "dataChange": True}
        return [{"add": added}, removed]

    def _held_vector(self, file: Mapping[str, Any]) -> Any:
        """The rows that are deleted from a file already."""
        package = self._jvm.org.apache.spark.sql.delta
        held = self._action.fromJson(json.dumps({"add": file})).deletionVector()
        store = getattr(getattr(package.storage.dv, "DeletionVectorStore$"), "MODULE$")
        stored = package.deletionvectors.StoredBitmap.create(held, self._log.dataPath())
        return stored.load(store.createInstance(self._log.newDeltaHadoopConf()))

    def _vector(self, bitmap: Any, count: int) -> dict[str, Any]:
        """A bitmap as a deletion vector in a file of its own, which VACUUM takes where no commit comes to name it."""
        package = self._jvm.org.apache.spark.sql.delta
        formats = getattr(getattr(package.deletionvectors, "RoaringBitmapArrayFormat$"), "MODULE$")
        data = bytes(bitmap.serializeAsByteArray(formats.Portable()))
        name = uuid.uuid4()
        (self._folder / f"deletion_vector_{name}.bin").write_bytes(deletion_vector.file(data))
        encoded = getattr(getattr(package.actions, "DeletionVectorDescriptor$"), "MODULE$").encodeUUID(
            self._jvm.java.util.UUID.fromString(str(name)), ""
        )
        return {
            "storageType": "u",
            "pathOrInlineDv": encoded,
            "offset": deletion_vector.OFFSET,
            "sizeInBytes": len(data),
            "cardinality": count,
        }

    def _at(self, base: int) -> Any:
        """A transaction on the version `base`, or `_VersionTaken`."""
        held = self._log.unsafeVolatileSnapshot()
        is_newest = held.version() == base and self._has_commit(base) and not self._has_commit(base + 1)
        transaction = self._begun(held if is_newest else self._newest())
        if transaction.readVersion() != base:
            raise _VersionTaken
        return transaction

    def _committed(self, transaction: Any, actions: Any, *, base: int, metadata: str) -> int:
        self._session.setActiveSession(self._fencing)
        try:
            return int(transaction.commit(actions, self._operation(metadata)))
        except SPARK_ERRORS as error:
            raise self._translated(error, base) from error
        finally:
            with contextlib.suppress(Exception):  # where the JVM is gone, that is what the caller is told
                self._session.setActiveSession(self._spark._jsparkSession)

    def append(self, file: _ParquetFile) -> None:
        """Commit the file after whatever others committed."""
        self._begun(self._newest()).commit(self._actions(file, None), self._operation(None))

    def _begun(self, snapshot: Any) -> Any:
        """A transaction on a version."""
        # Delta asks the thread for its session: a thread that ran no statement yet has none.
        self._session.setActiveSession(self._spark._jsparkSession)
        return self._log.startTransaction(self._none(), self._jvm.scala.Option.apply(snapshot))

    def _has_commit(self, version: int) -> bool:
        """Whether the commit's file is there; after the retention time it goes, with all that are older."""
        return (self._folder / "_delta_log" / f"{version:020}.json").exists()

    def _newest(self) -> Any:
        """The newest version; the log's folder is listed for it, which is what a long log makes dear."""
        return self._log.update(False, self._none(), self._none())

    def _operation(self, metadata: str | None) -> Any:
        mode = self._jvm.org.apache.spark.sql.SaveMode.Append
        none = self._none
        said = none() if metadata is None else self._jvm.scala.Option.apply(metadata)
        return self._write(mode, none(), none(), said, none(), none(), none(), none(), none())

    def _actions(self, file: _ParquetFile | None, txn_version: int | None) -> Any:
        now_ms = int(time.time() * 1000)
        found: list[dict[str, Any]] = []
        if txn_version is not None:
            found.append({"txn": {"appId": APP_ID, "version": txn_version, "lastUpdated": now_ms}})
        if file is not None:
            added = {
                "path": file.path.name,
                "partitionValues": {},
                "size": file.path.stat().st_size,
                "modificationTime": now_ms,
                "dataChange": True,
                "stats": file.stats,
            }
            found.append({"add": added})
        actions = self._jvm.java.util.ArrayList()
        for action in found:
            actions.add(self._action.fromJson(json.dumps(action)))
        return self._seq(actions)

    def _seq(self, actions: Any) -> Any:
        return self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(actions).toSeq()

    def _translated(self, error: Exception, base: int) -> Exception:
        self._log.update(False, self._none(), self._none())
        if self._log.unsafeVolatileSnapshot().version() > base:
            return _VersionTaken()
        return error


def _direct_log(spark: SparkSession, table: tables.TableRef) -> _DirectLog | None:
    """The table's log where it can be reached, else None; which way commits take is told in the log, once a process."""
    try:
        direct = _reached(spark, table)
    except _NoDirectLog as reason:
        _tell_once(f"commits go through Spark: {reason}")
        return None
    _tell_once("commits go straight into Delta's log")
    return direct


def why_not_direct(spark: SparkSession, table: tables.TableRef) -> str | None:
    """Why commits to the table go through Spark, which takes longer; None where they go straight into Delta's log."""
    try:
        _reached(spark, table)
    except _NoDirectLog as reason:
        return str(reason)
    return None


class _NoDirectLog(Exception):
    """Why there is no direct way into a table's log."""


def _reached(spark: SparkSession, table: tables.TableRef) -> _DirectLog:
    folder = local_table.folder(table)
    if folder is None:
        raise _NoDirectLog("the tables lie where this process sees no files of theirs")
    if not sparks.is_classic(spark):
        raise _NoDirectLog("Spark runs in another process (Spark Connect)")
    try:
        return _DirectLog(spark, folder)
    except (AttributeError, TypeError, Py4JError) as error:  # what a class or a method raises that is not there
        if not isinstance(error, Py4JJavaError) and jvm.is_gone():
            raise
        raise _NoDirectLog(f"this Delta's classes are other ones ({type(error).__name__})") from error


_told: set[str] = set()


def _tell_once(line: str) -> None:
    if line not in _told:
        _told.add(line)
        log.info(line)


_FENCING: WeakKeyDictionary[Any, SparkSession] = WeakKeyDictionary()


def _fencing_session(spark: SparkSession) -> SparkSession:
    """The application's session for fenced commits, in which Delta tries none of them again on a newer version.

    A setting is a whole session's: set and taken back around each commit, it would be gone where another thread's ends.
    """
    context = spark.sparkContext
    if context not in _FENCING:
        session = sparks.sessions(spark)()
        session.conf.set("spark.databricks.delta.maxCommitAttempts", "0")
        _FENCING[context] = session
    return _FENCING[context]


@contextmanager
def session_confs(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """The session's settings for the time of a block; what was there before comes back."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, previous)


INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""In one piece, without compiled code. A plan of a wide table takes seconds to compile, and milliseconds to run over a few rows."""

FEW_BYTES = 32 * 1024 * 1024


def are_small(*touched: tables.TableRef) -> bool:
    """Whether all of these tables are known to be small; only on a local file system, where the log tells it without a job."""
    folders = [local_table.folder(table) for table in touched]
    return all(folder is not None and local_table.is_smaller(folder, FEW_BYTES) for folder in folders)


def places() -> tuple[Column, Column]:
    """`PLACE` of each row of a table that is read."""
    return F.col("_metadata.file_path").alias(PLACE[0]), F.col("_metadata.row_index").alias(PLACE[1])


def computed(df: DataFrame) -> DataFrame:
    """The rows, computed once and held until nobody refers to them, so that a MERGE does not plan them again."""
    return df.localCheckpoint()


def release(df: DataFrame) -> None:
    """Let go of `computed` rows now, and not when somebody collects garbage."""
    with contextlib.suppress(Exception):  # over Spark Connect the server does it
        df._jdf.queryExecution().analyzed().rdd().unpersist(False)


def optimize(spark: SparkSession, table: tables.TableRef, *, metadata: str | None, purges: bool = False) -> None:
    """Compact a table, by its clustering where it has one; its commit carries `metadata`, so that it hides no position.

    Without `metadata` it says nothing, and what the commit before it said still counts. With `purges` files whose rows are
    marked as deleted are written anew without them.
    """
    confs = {} if metadata is None else {"spark.databricks.delta.commitInfo.userMetadata": metadata}
    with session_confs(spark, confs), _translating(table):
        if purges:
            spark.sql(f"REORG TABLE {table} APPLY (PURGE)").collect()
        spark.sql(f"OPTIMIZE {table}").collect()


def vacuum(spark: SparkSession, table: tables.TableRef) -> None:
    """Remove the files that no version within the table's retention names, orphans of killed commits among them."""
    # Its own entries in the history would stand where the last position is looked for.
    with session_confs(spark, {"spark.databricks.delta.vacuum.logging.enabled": "false"}), _translating(table):
        spark.sql(f"VACUUM {table}").collect()


def checkpoint(spark: SparkSession, table: tables.TableRef) -> bool:
    """Write down the table's state, and remove entries of its log that are past their retention; whether that could be done."""
    log = _direct_log(spark, table)
    try:
        return log is not None and log.checkpoint()
    except (Py4JError, TypeError):  # another Delta has other methods, and does it every so many commits by itself
        return False


def delete(spark: SparkSession, table: tables.TableRef, where: str) -> int:
    """Remove rows from a table of facts, beside whoever appends to it; how many."""
    with _translating(table):
        count = int(spark.sql(f"SELECT count(*) AS n FROM {table} WHERE {where}").collect()[0].n)
        if not count:
            return 0
        append_only = properties(spark, table).get("delta.appendOnly")
        if append_only == "true":
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')").collect()
        spark.sql(f"DELETE FROM {table} WHERE {where}").collect()
        if append_only is not None:  # "false" is what a run left that was killed here
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'true')").collect()
    return count


@dataclass(frozen=True)
class Size:
    """The data files of a table's newest version, and all that lies in its folder where this process sees it."""

    files: int
    bytes: int
    stored: int | None = None


def size(spark: SparkSession, table: tables.TableRef) -> Size:
    """How large a table is now."""
    with _translating(table):
        detail = spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]
    folder = local_table.folder(table)
    stored = None
    if folder is not None:
        stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Size(int(detail.numFiles), int(detail.sizeInBytes), stored)


def is_conflict(error: BaseException) -> bool:
    """Whether Delta refused a commit because another one came first."""
    java = getattr(error, "java_exception", None)
    name = type(error).__name__ if java is None else str(java.getClass().getSimpleName())
    return name in _CONFLICT_CLASSES or failures.condition(error).startswith(_CONFLICTS)


def translated(error: BaseException, table: tables.TableRef) -> BaseException:
    """A Spark or Delta error as one of ours where it has a meaning for the user; itself otherwise."""
    if is_conflict(error):
        return _conflict(table)
    condition = failures.condition(error)
    if condition.startswith(("DELTA_TABLE_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")):
        return errors.TableNotOurs(f"{table.label}: there is no such table; was the layer before it run?")
    if (missing := failures.missing_file(error)) is not None:
        return errors.FilesMissing(
            f"{table.label}: its log names the file {missing.rpartition('/')[2]}, and it is not there: removed by hand, by a "
            "VACUUM, or with a disk. Start again; where it says so again, medallion repair --config … mends the table"
        )
    if failures.is_full(error):
        return _storage_exhausted(table)
    return error


def disk_error(error: OSError, table: tables.TableRef) -> BaseException:
    """A full disk as `StorageExhausted`; any other operating system error as it is."""
    return _storage_exhausted(table) if failures.is_full(error) else error


def _storage_exhausted(table: tables.TableRef) -> errors.StorageExhausted:
    return errors.StorageExhausted(
        f"{table.label}: no space left; nothing of this commit is in the table. Free some space and start again"
    )


def _conflict(table: tables.TableRef) -> errors.CommitConflict:
    return errors.CommitConflict(
        f"{table.label}: other commits came first {COMMIT_ATTEMPTS} times; try again when maintenance is over"
    )


@contextmanager
def _translating(table: tables.TableRef) -> Iterator[None]:
    try:
        yield
    except SPARK_ERRORS as error:
        ours = translated(error, table)
        if ours is error:
            raise
        raise ours from error


def _carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer added to the metadata, which a claim or a release hands on."""
    own = {"to", "writer", "host", "process", "started", "lease", "commit", "released"}
    return {name: value for name, value in metadata.items() if name not in own}


def is_held(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether a writer holds the table: a live process of this host, or one of another host whose lease is not over."""
    if not exists(spark, table):
        return False
    return _verdict(last_commit(spark, table)) is not claims.Verdict.FREE


def _verdict(last: Commit | None) -> claims.Verdict:
    if last is None or last.metadata is None:
        return claims.Verdict.FREE
    claim = last.metadata
    return claims.verdict(
        claim,
        host=platform.node(),
        now_ms=int(time.time() * 1000),
        is_alive=_is_held(claim),
        committed_ms=last.timestamp_ms,
    )


def _refuse_second(table: tables.TableRef, last: Commit | None) -> None:
    if last is None or last.metadata is None:
        return
    claim = last.metadata
    match _verdict(last):
        case claims.Verdict.FREE:
            return
        case claims.Verdict.OWNER_ALIVE:
            raise errors.TableOwned(
                f"{table.label}: process {claim.get('process')} on this host writes it; "
                "stop that one first, or start with --take-over if you know that it is gone"
            )
        case claims.Verdict.LEASE_RUNNING:
            end = claims.lease_end(claim, committed_ms=last.timestamp_ms)
            seconds = max(1, (end - int(time.time() * 1000)) // 1000)
            raise errors.LeaseHeld(
                f"{table.label}: a writer on host {claim.get('host')} holds it for {seconds} s more; "
                "try again then, or start with --take-over if you know that it is gone"
            )


def _is_held(claim: Mapping[str, Any]) -> bool:
    """Whether the process of a claim lives; where it is this one, whether it has a writer that holds the claim."""
    if claim.get("process") == os.getpid() and claim.get("started") == _started(os.getpid()):
        return claim.get("writer") in _HELD
    return _is_alive(claim.get("process"), claim.get("started"))


def _identity() -> claims.Writer:
    return claims.Writer(uuid.uuid4().hex, platform.node(), os.getpid(), _started(os.getpid()) or "")


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in the operating system's own count; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if not _signalable(pid) else ""
    is_gone = fields[0] in ("Z", "X")
    return None if is_gone else f"{_boot()}:{fields[19]}"


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_alive(pid: object, started: object) -> bool:
    if not isinstance(pid, int) or pid == os.getpid() and started == _started(pid):
        return isinstance(pid, int)
    now = _started(pid)
    return now is not None and (not started or now == started)
