"""The holder of a claim on a table: claims it, and commits through Delta's log.

`append_arrow` and `upsert` commit through the direct log where there is one, because a Spark statement takes longer: they write the files
first and commit them afterwards. Elsewhere they are an ordinary append, and a MERGE (`statement_commits`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    catalog_places,
    data_file,
    direct_log,
    fenced_commits,
    file_statistics,
    live_files,
    local_log,
    owners,
    query_execution,
    store_exclusion,
    stored_files,
    table_errors,
    table_history,
    table_schema,
    upsert,
)
from pipelines.delta import tables as delta
from pipelines.delta.fenced_commits import CommitPosition
from pipelines.delta.key_search import Places
from pipelines.delta.log_actions import Fence
from pipelines.delta.statement_commits import StatementCommits

log = logging.getLogger(__name__)

FILE_BYTES = 16 * 2**20
"""Bytes of Arrow rows per file that a statement writes."""


class Writer(StatementCommits):
    """A claim on one table, which is needed to commit to it.

    Created by `Writer.claim`; each commit renews the lease. A commit that was fenced off, or that finds a claim of another writer, raises
    `OwnershipLost`, and is not in the table.
    """

    @staticmethod
    def claim(
        spark: SparkSession,
        table: tables.TableRef,
        *,
        take_over: bool = False,
        since_ms: int | None = None,
        newest_names: Sequence[str] = (),
        errand: str = "",
    ) -> Writer:
        """Claim the table by an empty commit that names this process, with a lease.

        Carries over position and metadata of the table's last commit of this project. After a RESTORE they are those of the restored
        version, except for the names in `newest_names`, which come from the newest commit. Tries again where the owner commits meanwhile.
        A commit of a writer that had not seen the RESTORE is undone first, by another one; `DecisionNeeded` is raised where another program
        has written rows after it, which that would take away.

        Raises `TableOwned` where a live process of this host holds the table; `LeaseHeld` where the lease of another host has not expired,
        or where the holder is on an `errand` and releases it within a minute; `TableNotOurs`; `CommitConflict` where there is no table, or
        after the last attempt. With `take_over` neither of the first two is raised, unless the holder claimed the table after `since_ms`.
        A refused writer has committed nothing.
        """
        for attempt in table_errors.commit_attempts(table):
            # A commit after this read makes the claim's commit fail.
            with stored_files.one_look():
                properties = delta.found(spark, table)
                standing = table_history.standing(spark, table)
            if properties is None:
                raise errors.CommitConflict(f"{table.label}: the table was removed meanwhile; start again to make it anew")
            if not attempt:
                store_exclusion.check(spark, catalog_places.location(table) or delta.catalog_location(spark, table))
            if not take_over or (since_ms is not None and owners.came_since(spark, table, since_ms)):
                owners.refuse_second(table, standing.last)
            if standing.void is not None:
                _undo(spark, table, properties, standing.void)
                continue
            writer = Writer(spark, table, identity=owners.identity(errand), base=standing.position)
            # The fence is on top of the newest version, even if the position is that of an older commit.
            writer.version, writer.properties, writer.is_newest = standing.version, properties, True
            try:
                newest_metadata = (standing.last.metadata if standing.last else None) or {}
                extra = {name: newest_metadata[name] for name in newest_names if name in newest_metadata}
                extra |= {} if standing.last == standing.position else {table_history.RESTORED: standing.version}
                writer.mark(to=writer.metadata.get("to"), extra={**fenced_commits.carried(writer.metadata), **extra})
                return writer  # not `break`, which is outside of this try: an interrupt there would keep the claim
            except errors.OwnershipLost:
                continue
            except BaseException:
                owners.HELD.pop(
                    writer.identity.writer, None
                )  # the commit may exist, and the error's traceback keeps this writer alive
                raise
        raise table_errors.conflict(table)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the claim where the block raises. Otherwise an error that is kept would keep the claim, by its traceback."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the caller gets the error of the block
                self.release()
            raise

    @contextmanager
    def released(self) -> Iterator[Writer]:
        """Release the claim at the end of the block. A failed release is ignored: the claim was taken over, or its lease expires."""
        try:
            yield self
        finally:
            with contextlib.suppress(Exception):  # the block is done, or the caller gets its error
                self.release()

    @functools.cached_property
    def live(self) -> live_files.LiveFiles | None:
        """The table's files, where this process can read them; else None."""
        return live_files.of(self.spark, self.table)

    def replaceable(self) -> live_files.LiveFiles | None:
        """The table's files at `version` where `replace_arrow` may add and remove rows (`LiveFiles.takes_rows`); else None."""
        live = self.live
        return live if live is not None and self.direct is not None and live.takes_rows(self.version) else None

    @property
    def is_direct(self) -> bool:
        """Whether `upsert` writes files first and commits them afterwards, so that a commit can still be cancelled."""
        return self.direct is not None

    @contextmanager
    def finding_rows(self, touched: upsert.RowFinder) -> Iterator[upsert.PendingDelete | None]:
        """Search the rows that `upsert` will remove, in a thread beside the block; None without a direct log.

        `touched` is as in `upsert`, from the table at this writer's last commit. The end of the block waits for the search. VACUUM removes
        files of deletion vectors that no commit uses.
        """
        direct = self.direct
        if direct is None:
            yield None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-seek") as pool:
            yield upsert.PendingDelete(self.version, pool.submit(direct.delete_actions, touched, base=self.version))

    def can_upsert(self) -> bool:
        """Whether `upsert` works without a MERGE here, and rows have `row_locations`."""
        return self.direct is not None and self.direct.can_upsert()

    def row_locations(self) -> tuple[Column, Column]:
        """The columns `ROW_LOCATION` for reading the table before an `upsert`; nulls where `can_upsert` is false."""
        file, row = upsert.ROW_LOCATION
        if self.can_upsert():
            return F.col("_metadata.file_path").alias(file), F.col("_metadata.row_index").alias(row)
        return F.lit(None).cast("string").alias(file), F.lit(None).cast("bigint").alias(row)

    @contextmanager
    def listing_files(self) -> Iterator[None]:
        """List the files of the newest version in a thread beside the block: the first query over the table needs them."""
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-list") as pool:
            if self.direct is not None:
                pool.submit(self.direct.files)
            yield

    def upsert(
        self,
        rows: DataFrame,
        *,
        touched: upsert.RowFinder | None,
        pending_deletes: upsert.PendingDelete | None = None,
        to: object,
        extra: Mapping[str, object] | None = None,
        confs: Mapping[str, str] | None = None,
        unless: Callable[[], bool] | None = None,
        few: bool = False,
    ) -> int | None:
        """Replace the rows of some keys by `rows`, as one fenced commit; the new version.

        The result is that of ``MERGE … WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *``, but the keys are read once instead
        of three times. Returns None where only a MERGE can do it: without a direct log, with another Delta, or for a table without
        deletion vectors, or with a change feed.

        `rows` have the table's columns. `touched` gives the `ROW_LOCATION` of the rows to remove (`upsert.located`); without it none is
        removed. `pending_deletes` (`finding_rows`) is used where it was made for the current version. `unless` is called between the write
        and the commit: where it returns true, nothing is committed, and `NotCommitted` is raised. With `few` touched rows the deletion
        vectors are written here, without a Spark job.
        """
        direct = self.direct
        if direct is None:
            return None
        with contextlib.suppress(upsert.NeedsMerge), query_execution.session_confs(self.spark, confs or {}):
            return self.commit(
                lambda fence: direct.upsert(rows, touched, pending_deletes, unless, few, fence), CommitPosition(to, extra)
            )
        return None

    def replace_arrow(
        self,
        parts: Iterable[pa.Table],
        *,
        schema: pa.Schema,
        keys: Sequence[str] = (),
        places: Places | None = None,
        to: object,
        extra: Mapping[str, object] | None = None,
    ) -> int | None:
        """Replace the rows of the keys, or of the places, by Arrow rows, as one fenced commit; the new version.

        As `upsert`, but without a Spark job: this process searches the keys. Without deletion vectors the other rows of their files are
        written again. The rows come in parts with the table's columns and types (`table_schema.conformed`). Returns None where only Spark
        can do it, also where a part raises `NotReadable`; then nothing was committed.
        """
        direct, live = self.direct, self.live
        if direct is None or live is None or not live.takes_rows(self.version) or live.schema != schema:
            return None
        read_version, has_vectors = live.version, definition.replaces_rows(live.configuration)
        rewritten: Places = []
        if not has_vectors:
            try:
                rewritten = live.places(upsert.KEY, keys) if places is None else places
            except (OSError, pa.ArrowException, table_schema.NotReadable):
                return None
            if live_files.rewrites_many(live, [file for file, _ in rewritten]):
                return None
        try:
            # The rest first: a file is encoded as suits its first rows.
            rows = _with_rows(itertools.chain(live_files.rest(live, rewritten), parts))
            file = None if rows is None else self._new_file(direct, rows, schema, live_files.measured_columns(live))
        except table_schema.NotReadable:
            return None

        def replace(fence: Fence) -> int:
            # A commit since may have written rows of the keys, which are searched again only where `places` are not given.
            if fence.base != read_version and (places is not None or not has_vectors):
                raise upsert.NeedsMerge
            if has_vectors:
                return direct.replace(file, keys, live, schema, places, fence)
            return direct.replace_files(file, [touched for touched, _ in rewritten], live, fence, is_change=True)

        with contextlib.suppress(upsert.NeedsMerge):
            return self._commit_file(file, replace, CommitPosition(to, extra))
        return None

    def overwrite_arrow(
        self,
        parts: Iterable[pa.Table],
        *,
        columns: StructType,
        to: object,
        extra: Mapping[str, object] | None = None,
    ) -> int | None:
        """Replace all rows by Arrow rows, and the table's columns by `columns`, as one fenced commit; the new version.

        The rows come in parts, made from the version that `live` is at. Returns None as `replace_arrow` does, and where another writer has
        committed since.
        """
        direct, live, schema_json = self.direct, self.live, columns.json()
        if direct is None or live is None:
            return None
        read_version = live.version
        try:
            schema = table_schema.arrow_schema(columns.jsonValue())
            rows = _with_rows(table_schema.conformed(part, schema) for part in parts)
            file = None if rows is None else self._new_file(direct, rows, schema, live_files.measured_columns(live))
        except table_schema.NotReadable:
            return None

        def overwrite(fence: Fence) -> int:
            # The rows of any commit since would be lost.
            if fence.base != read_version or not live.takes_rows(fence.base):
                raise upsert.NeedsMerge
            return direct.define(schema_json, live.schema_json, fence, file, live.files())

        with contextlib.suppress(upsert.NeedsMerge):
            return self._commit_file(file, overwrite, CommitPosition(to, extra))
        return None

    def compact_files(self, parts: Sequence[Mapping[str, Any]]) -> int | None:
        """Write the rows of a few small live files as one file; the new version.

        A fenced commit with the metadata of the last one, without a Spark job. None where only Spark can do it.
        """
        direct, live = self.direct, self.live
        if direct is None or live is None or definition.is_on(live.configuration, definition.ROW_TRACKING):
            return None
        try:
            rows = live.rows(parts)
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return None
        # Compared with the log's statistics: rows that were not read would be lost.
        if rows.num_rows != sum(file_statistics.row_count(each) - file_statistics.deleted_count(each) for each in parts):
            return None
        file = None
        if rows.num_rows:
            file = self._new_file(direct, [rows], rows.schema, live_files.measured_columns(live))
        with contextlib.suppress(upsert.NeedsMerge):
            return self._commit_file(
                file, lambda fence: direct.replace_files(file, parts, live, fence, is_change=False), fenced_commits.LAST
            )
        return None

    def _new_file(
        self, direct: direct_log.DirectLog, parts: Iterable[pa.Table], schema: pa.Schema, statistics: Sequence[str]
    ) -> data_file.ParquetFile:
        """Write a file for the next commit. Raises `CommitUnknown` after a commit without an answer."""
        self.refuse_unanswered()
        return data_file.ParquetFile.write(direct.store, parts, schema=schema, statistics=statistics, table=self.table)

    def _commit_file(self, file: data_file.ParquetFile | None, act: Callable[[Fence], int], position: CommitPosition) -> int:
        """As `commit`; removes the file of a commit that was refused, and is not in the log."""
        try:
            return self.commit(act, position)
        except (upsert.NeedsMerge, *fenced_commits.REFUSED) as error:
            # In a store, a request that timed out may still take effect. After an error of Spark the file stays there, for VACUUM.
            is_final = local_log.folder(self.table) is not None or not isinstance(error, table_errors.SPARK_ERRORS)
            if file is not None and is_final:
                file.discard()
            raise

    def define(self, schema: StructType) -> bool:
        """Set the table's columns to `schema`, which has all of them and new ones; whether that was done.

        As `alter` with ADD COLUMNS, but one fenced commit with the metadata of the last one, and no statement. False without a direct log,
        or where another writer has changed the columns meanwhile.
        """
        direct, live = self.direct, self.live
        if direct is None or live is None:
            return False
        with contextlib.suppress(upsert.NeedsMerge):
            self.commit(lambda fence: direct.define(schema.json(), live.schema_json, fence), fenced_commits.LAST)
            return True
        return False

    def append_arrow(
        self, *parts: pa.Table, to: object, statistics: Sequence[str] = (), extra: Mapping[str, object] | None = None
    ) -> int:
        """Append Arrow rows as one fenced commit; the new version. Each part becomes one or more row groups.

        `statistics` names the columns whose minimum and maximum are kept for skipping. Where there is a direct log, this process writes
        the Parquet file and commits it through Delta's transaction. Elsewhere Spark appends the rows.
        """
        direct = self.direct
        if direct is None:
            # Without `coalesce` Spark writes a file per core, and every reader would have to open all of them.
            rows = pa.concat_tables(parts)
            return self.append(self.spark.createDataFrame(rows).coalesce(1 + rows.nbytes // FILE_BYTES), to=to, extra=extra)
        file = self._new_file(direct, parts, parts[0].schema, statistics)
        return self._commit_file(file, lambda fence: direct.commit(file, fence), CommitPosition(to, extra))

    def remove_files(
        self, files: Sequence[data_file.DataFile], *, to: object, extra: Mapping[str, object] | None = None
    ) -> int:
        """Remove files from the table without reading them, as one fenced commit with the position `to`; the new version.

        Raises `DecisionNeeded` without a direct log.
        """
        direct = self.direct
        if direct is None:
            raise errors.DecisionNeeded(
                f"{self.table.label}: its log cannot be repaired from here; on Databricks use FSCK REPAIR TABLE"
            )
        return self.commit(lambda fence: direct.remove_files(files, fence), CommitPosition(to, extra))


def _undo(
    spark: SparkSession, table: tables.TableRef, properties: Mapping[str, str], void: table_history.VoidCommit
) -> None:
    """Restore the version before a void commit: its rows and its position.

    Raises `DecisionNeeded` where another program has written rows after it.
    """
    to = void.before
    if void.foreign is not None:
        raise errors.DecisionNeeded(
            f"{table.label}: version {to + 1} was committed onto a RESTORE that its writer had not seen, and must be undone; but "
            f"another program has written rows since, in version {void.foreign}. Run RESTORE TABLE {table} TO VERSION AS OF {to}, then "
            "write these rows again"
        )
    log.warning("%s: version %d was committed onto a RESTORE that its writer had not seen; undoing it", table.label, to + 1)
    with table_errors.translating(table):
        if definition.is_on(properties, "delta.appendOnly"):  # until the restored version, which has its own properties
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')").collect()
        spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {to}").collect()


def _with_rows(parts: Iterable[pa.Table]) -> Iterator[pa.Table] | None:
    """The parts that have rows; None if none has."""
    filled = (part for part in parts if part.num_rows)
    first = next(filled, None)
    return None if first is None else itertools.chain([first], filled)
