"""Commits through Delta's own transaction in the JVM. Only this module and `log_actions` call Delta's private classes.

For path tables, and those of Spark's own catalog (`catalog_places`), with a classic Spark session. A commit is a compare-and-set on the
version, and takes no Spark job where the rows are few. Everywhere else (other catalogs, Databricks, Spark Connect, another Delta) `of`
returns None, and public statements do the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import (
    catalog_places,
    checkpoint_writer,
    data_file,
    deleted_rows,
    live_files,
    local_log,
    log_actions,
    stored_files,
    table_errors,
    table_files,
    table_schema,
    upsert,
)
from pipelines.delta.key_search import Places
from pipelines.delta.log_actions import CONVERTERS, DELTA, Fence
from pipelines.delta.table_files import TableFiles
from pipelines.spark import jvm
from pipelines.spark import session as sparks

log = logging.getLogger(__name__)


MANY_TOUCHED = 500
"""The most files whose rows are marked as deleted without a Spark job."""


LISTING_SECONDS, LISTING_SHARE = 0.1, 200
"""A listing of the log that took longer than `LISTING_SECONDS` is repeated after `LISTING_SHARE` times its duration at the earliest: that of
a month's log takes seconds."""

_LISTED_UNTIL: dict[Path, float] = {}
"""When each log may be listed again, by the monotonic clock."""


class VersionTaken(Exception):
    """Another writer committed the version that this one tried to commit."""


class DirectLog:
    """Delta's transaction log of one path table, in the JVM of a classic Spark session."""

    def __init__(self, spark: SparkSession, location: str, files: TableFiles) -> None:
        self._spark = spark
        self.store = files
        self._log = jvm.java_class(spark, f"{DELTA}.DeltaLog").forTable(spark._jsparkSession, location)
        self._write = jvm.java_class(spark, f"{DELTA}.DeltaOperations$Write")
        self._action = jvm.java_class(spark, f"{DELTA}.actions.Action")
        self._save_mode = jvm.java_class(spark, "org.apache.spark.sql.SaveMode").Append
        self._option = jvm.java_class(spark, "scala.Option")
        self._none = self._option.empty
        self._session = jvm.java_class(spark, "org.apache.spark.sql.classic.SparkSession")
        self._names_files: bool | None = None
        """Whether the checksums of this log's commits name the table's files; None before the first."""
        self._interval: int | None = None
        """The table's `delta.checkpointInterval`; None before the first commit."""
        self._vectors = DeletionVectors(spark, files, self._log)
        # Delta's constructors differ between its versions: this call fails before the first commit where one is missing.
        self._operation("{}")

    def commit(self, file: data_file.ParquetFile | None, fence: Fence) -> int:
        """Commit the file, or only the fence, as the next version; raises `VersionTaken`, and then changes nothing."""
        return self._committed(self._at(fence.base), log_actions.fenced(self._spark, file, fence.base), fence)

    def delete_actions(self, touched: upsert.RowFinder, *, base: int) -> Any:
        """The actions that remove the touched rows from the version `base`. Raises as `upsert`."""
        return self._vectors.actions(self._upsertable(base), touched)

    def upsert(
        self,
        rows: DataFrame,
        touched: upsert.RowFinder | None,
        pending_deletes: upsert.PendingDelete | None,
        unless: Callable[[], bool] | None,
        few: bool,
        fence: Fence,
    ) -> int:
        """Delete the touched rows by deletion vectors and append `rows`, as the next version.

        Raises `VersionTaken`, `NeedsMerge` or `NotCommitted`. The touched rows are searched in a second thread, because neither the search
        nor the write keeps two cores busy.
        """
        transaction, actions = self._upsertable(fence.base), log_actions.fenced(self._spark, None, fence.base)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="medallion-upsert") as pool:
                deletes = (
                    None if pending_deletes is None or pending_deletes.version != fence.base else pending_deletes.actions
                )
                if deletes is None and touched is not None:
                    mark = self._vectors.actions_of_few if few else self._vectors.actions
                    deletes = pool.submit(mark, transaction, touched)
                # Delta's own writer: files with its statistics, invisible to readers before the commit.
                adds = transaction.writeFiles(rows._jdf)
                if deletes is not None:
                    actions.extend(deletes.result())
                actions.extend(adds)
        except table_errors.SPARK_ERRORS as error:
            raise self._translated(error, fence.base) from error
        except (Py4JError, TypeError) as error:  # another Delta has other methods
            raise upsert.NeedsMerge from error
        if unless is not None and unless():
            raise upsert.NotCommitted  # VACUUM removes the files
        self._names_files = True  # again from here on: this upsert took Spark jobs anyway
        return self._committed(transaction, actions, fence)

    def replace(
        self,
        file: data_file.ParquetFile | None,
        keys: Sequence[str],
        live: live_files.LiveFiles,
        schema: pa.Schema,
        places: Places | None,
        fence: Fence,
    ) -> int:
        """Delete the rows of the keys, or of the places, by deletion vectors and add the file, as the next version, without a Spark job.

        Raises `VersionTaken`, or `NeedsMerge` where the rows cannot be found without a job, where the table checks its rows, or where its
        columns are not those of `schema`. Then nothing is changed.
        """
        transaction = self._upsertable(fence.base)
        if not live.takes_rows(fence.base) or live.schema != schema:
            raise upsert.NeedsMerge
        try:
            locations = live.places(upsert.KEY, keys) if places is None else places
        except (OSError, pa.ArrowException, table_schema.NotReadable) as error:
            raise upsert.NeedsMerge from error
        if any("stats" not in add for add, _ in locations) or not live.holds([add for add, _ in locations]):
            raise upsert.NeedsMerge
        actions = log_actions.fenced(self._spark, file, fence.base)
        try:
            actions.add(*deleted_rows.without(locations, self.store))
        except table_errors.SPARK_ERRORS as error:
            raise self._translated(error, fence.base) from error
        # A full disk, which the MERGE reports; the data file is removed. Or a vector that only Delta can read.
        except (OSError, table_schema.NotReadable) as error:
            raise upsert.NeedsMerge from error
        return self._committed(transaction, actions, fence)

    def replace_files(
        self,
        file: data_file.ParquetFile | None,
        parts: Sequence[Mapping[str, Any]],
        live: live_files.LiveFiles,
        fence: Fence,
        *,
        is_change: bool,
    ) -> int:
        """Replace the `parts` by the file, as the next version; without `is_change` it has the same rows.

        Raises `VersionTaken`, or `NeedsMerge` where another writer has changed one of the parts. Then nothing is changed.
        """
        transaction = self._at(fence.base)
        if not live.move_to(fence.base) or not live.holds(parts):
            raise upsert.NeedsMerge
        actions = log_actions.fenced(self._spark, file, fence.base, is_change=is_change)
        for part in parts:
            actions.add(log_actions.removed(part, is_change=is_change))
        return self._committed(transaction, actions, fence)

    def define(
        self,
        schema_json: str,
        before: str,
        fence: Fence,
        file: data_file.ParquetFile | None = None,
        parts: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Set the table's columns from `schema_json`, and replace the live files `parts` by the file, as the next version.

        Raises `VersionTaken`, or `NeedsMerge` where the columns are not those of `before`: changes of others would be undone. Then nothing
        is changed.
        """
        # The checksum of a version that changes columns does not name the files: at the next commit Delta would find them by a Spark job.
        self._names_files = False
        transaction, actions = self._at(fence.base), log_actions.fenced(self._spark, file, fence.base)
        try:
            action = json.loads(transaction.metadata().json())
            if action["metaData"]["schemaString"] != before:
                raise upsert.NeedsMerge
            action["metaData"]["schemaString"] = schema_json
            transaction.updateMetadata(self._action.fromJson(json.dumps(action)), False)
        except table_errors.SPARK_ERRORS as error:
            raise self._translated(error, fence.base) from error
        for part in parts:
            actions.add(log_actions.removed(part))
        return self._committed(transaction, actions, fence)

    def remove_files(self, files: Sequence[data_file.DataFile], fence: Fence) -> int:
        """Remove files from the table, as the next version; raises `VersionTaken`, and then changes nothing."""
        now_ms, actions = clock.now_ms(), log_actions.fenced(self._spark, None, fence.base)
        for file in files:
            # `dataChange` is false, or an append-only table would refuse it. A missing file has no rows to lose.
            fields = {"path": file.name, "deletionTimestamp": now_ms, "dataChange": False, "deletionVector": file.vector}
            actions.add({"remove": fields})
        return self._committed(self._at(fence.base), actions, fence)

    def live(self) -> list[dict[str, Any]]:
        """The `add` actions of the newest version's files: path, size, stats and deletionVector."""
        from pyspark.sql.classic.dataframe import DataFrame as Frame

        files: DataFrame = Frame(self._newest().allFiles().toDF(), self._spark)
        rows = files.selectExpr("path", "size", "stats", "to_json(deletionVector) AS deletionVector").collect()
        return [{**row.asDict(), "deletionVector": json.loads(row.deletionVector or "null")} for row in rows]

    def checkpoint(self) -> bool:
        """Write a checkpoint of the newest version and remove expired log entries; always true."""
        self._session.setActiveSession(self._spark._jsparkSession)
        self._log.checkpointAndCleanUpDeltaLog(self._newest(), self._none())
        self._newest()  # as in `_checkpointed`
        return True

    def can_upsert(self) -> bool:
        """Whether the table's rows may be replaced by deletion vectors, by the version that Delta read last."""
        return self._vectors.are_enabled(self._log.unsafeVolatileSnapshot())

    def files(self) -> Any:
        """List the files of the newest version, which Delta keeps in memory from then on."""
        return self._begun(self._newest()).filterFiles()

    def _upsertable(self, base: int) -> Any:
        """A transaction on the version `base`; raises `NeedsMerge` where the table takes no deletion vectors, and `VersionTaken`."""
        transaction = self._at(base)
        if not self._vectors.are_enabled(transaction):
            raise upsert.NeedsMerge
        return transaction

    def _at(self, base: int) -> Any:
        """A transaction on the version `base`; raises `VersionTaken` where it is not the newest."""
        snapshot = self._log.unsafeVolatileSnapshot()
        is_newest = snapshot.version() == base and _is_newest(self.store, base)
        transaction = self._begun(snapshot if is_newest else self._newest())
        if transaction.readVersion() != base:
            raise VersionTaken
        return transaction

    def _committed(self, transaction: Any, actions: log_actions.ActionList, fence: Fence) -> int:
        if self._names_files is None:  # as in the version before, so that it costs no job
            self._names_files = _names_files(transaction.snapshot())
        # Delta reads `maxCommitAttempts` from the thread's active session. With 0, a version that is taken raises an error. Otherwise
        # Delta would try one version higher, on top of commits that were not checked.
        self._session.setActiveSession(_fencing_session(self._spark, names_files=self._names_files)._jsparkSession)
        try:
            version = int(transaction.commit(actions.seq(), self._operation(fence.metadata)))
        except table_errors.SPARK_ERRORS as error:
            raise self._translated(error, fence.base) from error
        finally:
            with contextlib.suppress(Exception):  # where the JVM is gone, the caller gets the error of the commit
                self._session.setActiveSession(self._spark._jsparkSession)
        _noted(self, version)
        _checkpointed(self, version)
        return version

    def append(self, file: data_file.ParquetFile) -> int:
        """Commit the file on top of the newest version; the new version."""
        actions = log_actions.ActionList(self._spark)
        actions.add(log_actions.added(file))
        snapshot = self._log.unsafeVolatileSnapshot()
        # Tests two file names instead of listing the log: each batch appends its deletes, and a month's log has millions of entries.
        is_newest = not self.store.is_remote and _is_newest(self.store, snapshot.version())
        transaction = self._begun(snapshot if is_newest else self._newest())
        version = int(transaction.commit(actions.seq(), self._operation(None)))
        _noted(self, version)
        _checkpointed(self, version)
        return version

    def _begun(self, snapshot: Any) -> Any:
        """A transaction on a version."""
        # Delta uses the thread's active session; a thread that ran no statement yet has none.
        self._session.setActiveSession(self._spark._jsparkSession)
        return self._log.startTransaction(self._none(), self._option.apply(snapshot))

    def _newest(self) -> Any:
        """The newest version, by listing the log's folder, which is slow for a long log."""
        return self._log.update(False, self._none(), self._none())

    def _operation(self, metadata: str | None) -> Any:
        none = self._none
        user_metadata = none() if metadata is None else self._option.apply(metadata)
        return self._write(self._save_mode, none(), none(), user_metadata, none(), none(), none(), none(), none())

    def _translated(self, error: Exception, base: int) -> Exception:
        # Read the log instead of the error's text: it shows whether another commit came first.
        self._log.update(False, self._none(), self._none())
        if self._log.unsafeVolatileSnapshot().version() > base:
            return VersionTaken()
        return error


def _noted(direct: DirectLog, version: int) -> None:
    """Note a commit of this thread for the copy of the log of a table in a store, which then asks the store nothing for it."""
    if not direct.store.is_remote:
        return
    # The commit is made: an error is none of it, and the copied log finds the commit at its next look.
    with contextlib.suppress(Py4JError, TypeError, OSError):
        snapshot = direct._log.unsafeVolatileSnapshot()
        if snapshot.version() == version:  # else another thread has read a newer one meanwhile
            status = snapshot.logSegment().deltas().last()
            stored_files.note_commit(direct.store.folder, version, status.getModificationTime(), status.getLen())


def _checkpointed(direct: DirectLog, version: int) -> None:
    """Write the checkpoint of a committed version in this process, where one is due."""
    if direct.store.is_remote:
        return
    if direct._interval is None:
        direct._interval = int(direct._log.checkpointInterval(direct._log.unsafeVolatileSnapshot().metadata()))
    every = checkpoint_writer.every(direct._interval)
    if every is None or version % every:
        return
    is_written, start, folder = checkpoint_writer.write(direct.store.folder, version), time.monotonic(), direct.store.folder
    if not is_written or start >= _LISTED_UNTIL.get(folder, 0.0):
        direct._newest()  # otherwise Delta continues from an older checkpoint, and from commits that it may have cleaned up
        seconds = time.monotonic() - start
        _LISTED_UNTIL[folder] = start + (LISTING_SHARE * seconds if seconds > LISTING_SECONDS else 0.0)


def _is_newest(files: TableFiles, version: int) -> bool:
    """Whether the version that Delta read last is the newest, by testing two file names instead of listing the log.

    Another process may have committed meanwhile, or removed the table. In a store only the version itself is tested, to save a request:
    the commit fails where the next version is taken.
    """
    try:
        return files.has_commit(version) and (files.is_remote or not files.has_commit(version + 1))
    except OSError:  # an outage, which Delta reports
        return False


def _names_files(version: Any) -> bool:
    """Whether a version's checksum names the table's files; true where there is no checksum."""
    checksum = version.checksumOpt()
    return bool(checksum.isEmpty() or checksum.get().allFiles().isDefined())


class DeletionVectors:
    """Deletion vectors of one table: the actions that remove rows from its files without rewriting the files."""

    def __init__(self, spark: SparkSession, files: TableFiles, log: Any) -> None:
        self._spark = spark
        self._files = files
        self._log = log
        self._session = jvm.java_class(spark, "org.apache.spark.sql.classic.SparkSession")

    def _delta(self, name: str) -> Any:
        return jvm.java_class(self._spark, f"{DELTA}.{name}")

    def are_enabled(self, version: Any) -> bool:
        """Whether rows may be replaced by deletion vectors in a version, given as Delta's snapshot or transaction."""
        return definition.replaces_rows(jvm.java_class(self._spark, CONVERTERS).asJava(version.metadata().configuration()))

    def actions(self, transaction: Any, touched: upsert.RowFinder) -> Any:
        """The actions that remove the touched rows, as Delta's own DELETE finds and writes them."""
        self._session.setActiveSession(self._spark._jsparkSession)
        locations = touched()
        option, (file, row) = (
            jvm.java_class(self._spark, "scala.Option").apply,
            (F.col(name)._jc for name in upsert.ROW_LOCATION),
        )
        session, files = self._spark._jsparkSession, transaction.filterFiles()
        helper = self._delta("commands.DMLWithDeletionVectorsHelper")
        always = jvm.java_class(self._spark, "org.apache.spark.sql.catalyst.expressions.Literal").TrueLiteral()
        generator = getattr(self._delta("commands.DeletionVectorBitmapGenerator$"), "MODULE$")  # a Scala object
        row_index_sets = generator.buildRowIndexSetsForFilesMatchingCondition(
            session, transaction, True, locations._jdf, files, always, option(file), option(row)
        )
        by_name = helper.generateCandidateFileMap(self._log.dataPath(), files)
        matches = helper.findFilesWithMatchingRows(transaction, by_name, row_index_sets)
        prefix = self._delta("stats.StatsCollectionUtils").getDataSkippingStringPrefixLength(session, transaction.metadata())
        return helper.processUnmodifiedData(session, matches, transaction.snapshot(), prefix)._1()

    def actions_of_few(self, transaction: Any, touched: upsert.RowFinder) -> Any:
        """The actions of `actions`, with vectors that this process writes: Delta takes a dozen Spark jobs even for a few rows."""
        self._session.setActiveSession(self._spark._jsparkSession)
        by_file: dict[str, list[int]] = {}
        locations = touched().toArrow()
        for path, row in zip(*(locations[name].to_pylist() for name in upsert.ROW_LOCATION), strict=True):
            by_file.setdefault(path.rpartition("/")[2], []).append(row)
        files = self._named(transaction, list(by_file))
        if len(files) < len(by_file) or any("stats" not in file for file in files):  # too many files, or of another writer
            return self.actions(transaction, touched)
        actions = log_actions.ActionList(self._spark)
        try:
            actions.add(*deleted_rows.without(((file, by_file[file["path"]]) for file in files), self._files))
        except (OSError, table_schema.NotReadable):  # a vector that only Delta can read
            return self.actions(transaction, touched)
        return actions.seq()

    def _named(self, transaction: Any, names: Sequence[str]) -> list[dict[str, Any]]:
        """The `add` actions of the files of these names; empty for more than `MANY_TOUCHED`."""
        if not 0 < len(names) <= MANY_TOUCHED:
            return []
        from pyspark.sql.classic.dataframe import DataFrame as Frame

        # From the transaction's snapshot, not the newest version: this commit must replace the file's current vector.
        files: DataFrame = Frame(transaction.snapshot().allFiles().toDF(), self._spark)
        rows = files.where(F.col("path").isin(names)).selectExpr("to_json(struct(*)) AS action").toArrow()
        return [json.loads(text) for text in rows["action"].to_pylist()]


def of(spark: SparkSession, table: tables.TableRef) -> DirectLog | None:
    """The table's direct log; None where commits go through Spark. Logs which of the two once per process."""
    direct = _reached(spark, table)
    if isinstance(direct, str):
        _log_once(f"commits go through Spark: {direct}")
        return None
    _log_once("commits go straight into Delta's log")
    return direct


def why_not(spark: SparkSession, table: tables.TableRef) -> str | None:
    """Why commits to the table go through Spark, which takes longer; None where there is a direct log."""
    direct = _reached(spark, table)
    return direct if isinstance(direct, str) else None


def _reached(spark: SparkSession, table: tables.TableRef) -> DirectLog | str:
    """The table's direct log, or why it has none."""
    location, folder = catalog_places.locate(spark, table), local_log.folder(table)
    if location is None:
        return "a catalog holds the tables"
    if not sparks.is_classic(spark):
        return "Spark runs in another process (Spark Connect)"
    if folder is None and sparks.is_databricks():
        return "Databricks commits to its stores itself"
    files = stored_files.StoredFiles(spark, location) if folder is None else table_files.LocalFiles(folder)
    try:
        return DirectLog(spark, location if folder is None else str(folder), files)
    except (AttributeError, TypeError, Py4JError) as error:  # raised for a missing class or method
        if not isinstance(error, Py4JJavaError) and jvm.is_gone():
            raise
        return f"this Delta's classes are other ones ({type(error).__name__})"


@functools.cache
def _log_once(line: str) -> None:
    log.info(line)


_FENCING: WeakKeyDictionary[Any, dict[bool, SparkSession]] = WeakKeyDictionary()
"""The sessions of each Spark context for fenced commits, by whether the checksum of a version names the table's files."""


def _fencing_session(spark: SparkSession, *, names_files: bool) -> SparkSession:
    """The application's session for fenced commits, in which Delta does not retry a commit on a newer version.

    Without `names_files` the checksum of a version does not name the table's files. These are sessions of their own because settings are
    shared by all threads of a session: one thread would reset them while another commits.
    """
    context = spark.sparkContext
    sessions = _FENCING.setdefault(context, {})
    if names_files not in sessions:
        session = sparks.sessions(spark)()
        session.conf.set("spark.databricks.delta.maxCommitAttempts", "0")
        session.conf.set("spark.databricks.delta.allFilesInCrc.enabled", str(names_files).lower())
        sessions[names_files] = session
    return sessions[names_files]
