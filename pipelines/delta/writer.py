"""Whoever holds a claim on a table, and what only its holder may do: claim it, and commit through Delta's log itself.

`append_arrow` and `upsert` commit through the direct log where there is one, because a statement of Spark takes longer: there
they write the files first and commit them after. Elsewhere they are an ordinary append, and a MERGE (`statement_commits`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
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
from pipelines.delta.statement_commits import StatementCommits

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from pipelines.delta.key_search import Places

FILE_BYTES = 16 * 2**20
"""Of so many bytes of rows, as Arrow has them, a statement makes a file."""


class Writer(StatementCommits):
    """A held claim on one table: the only way to commit to it.

    Made by `Writer.claim`; every commit renews the lease. A commit that was fenced off, or that finds another writer's
    claim, raises `OwnershipLost`, and nothing of it is in the table.
    """

    @staticmethod
    def claim(
        spark: SparkSession,
        table: tables.TableRef,
        *,
        take_over: bool = False,
        since_ms: int | None = None,
        kept: Sequence[str] = (),
        errand: str = "",
    ) -> Writer:
        """Claim the table by an empty commit that names this process, with a lease.

        Where the owner commits in between, the claim looks again: what it takes over is what the table holds then.
        After a RESTORE that is the metadata of the restored version, but for the names in `kept`: those are the newest commit's.
        Raises `TableOwned` where a live process of this host holds it, `LeaseHeld` where another host's lease is not
        over, or where the holder is on an `errand` and gone in a minute, `TableNotOurs`. `take_over` raises neither of the first
        two, unless the holder claimed the table after `since_ms`. A refused writer has committed nothing.
        """
        for attempt in table_errors.commit_attempts(table):
            # Whatever is committed after this look makes the claim's commit fail.
            with stored_files.one_look():
                properties = delta.check_ours(spark, table)
                at = table_history.standing(spark, table)
            if not attempt:
                store_exclusion.check(spark, table.path or delta.catalog_location(spark, table))
            if not take_over or (since_ms is not None and owners.came_since(spark, table, since_ms)):
                owners.refuse_second(table, at.last)
            writer = Writer(spark, table, identity=owners.identity(errand), base=at.position)
            # The fence stands on the newest version, however old the commit is whose position counts.
            writer.version, writer.properties, writer.is_newest = at.version, properties, True
            try:
                newest = (at.last.metadata if at.last else None) or {}
                extra = {name: newest[name] for name in kept if name in newest}
                extra |= {} if at.last == at.position else {table_history.RESTORED: at.version}
                writer.mark(to=writer.metadata.get("to"), extra={**fenced_commits.carried(writer.metadata), **extra})
                break
            except errors.OwnershipLost:
                continue
            except BaseException:
                owners.HELD.pop(writer.identity.writer, None)  # its commit may be there, and the error keeps this writer
                raise
        return writer

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """A block that, where it raises, gives the claim back: an error that is kept would hold it, by its frames, for as long."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the block's error is the one to be told
                self.release()
            raise

    @contextmanager
    def released(self) -> Iterator[Writer]:
        """A block at whose end the claim is given back. One that another writer took over is no longer this one's, and any ends by itself."""
        try:
            yield self
        finally:
            with contextlib.suppress(Exception):  # the block is done, or its error is the one to be told
                self.release()

    @functools.cached_property
    def live(self) -> live_files.LiveFiles | None:
        """The table's files as this process sees them; None where it sees none."""
        return live_files.of(self.spark, self.table)

    def replaceable(self) -> live_files.LiveFiles | None:
        """The table's files as they are now, where `replace_arrow` may put rows in and take rows out: this process sees them, and
        Delta asks nothing more of a row than its type."""
        live = self.live
        return live if live is not None and self.direct is not None and live.takes_rows(self.version) else None

    @property
    def is_direct(self) -> bool:
        """Whether `upsert` writes files first and commits them after, so that a commit can still be called off."""
        return self.direct is not None

    @contextmanager
    def finding_rows(self, touched: upsert.Locating) -> Iterator[upsert.PendingDelete | None]:
        """What `upsert` would take out of the table as it is now, looked for beside what the block does; None where it cannot.

        `touched` as in `upsert`, of rows read since this writer's last commit. The block's end waits for the search; files that it
        wrote for nothing are left to VACUUM.
        """
        direct = self.direct
        if direct is None:
            yield None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-seek") as pool:
            yield upsert.PendingDelete(self.version, pool.submit(direct.delete_actions, touched, base=self.version))

    def can_upsert(self) -> bool:
        """Whether `upsert` does without a MERGE here, and rows have `row_locations`."""
        return self.direct is not None and self.direct.can_upsert()

    def row_locations(self) -> tuple[Column, Column]:
        """`ROW_LOCATION` of each row of the table, where it is read for an `upsert`; nulls where none can be made."""
        if self.can_upsert():
            return upsert.row_location()
        file, row = upsert.ROW_LOCATION
        return F.lit(None).cast("string").alias(file), F.lit(None).cast("bigint").alias(row)

    @contextmanager
    def listing_files(self) -> Iterator[None]:
        """The files of the newest version are listed beside what the block does: the first query over the table asks for them."""
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-list") as pool:
            if self.direct is not None:
                pool.submit(self.direct.files)
            yield

    def upsert(
        self,
        rows: DataFrame,
        *,
        touched: upsert.Locating | None,
        pending_deletes: upsert.PendingDelete | None = None,
        to: object,
        extra: Mapping[str, object] | None = None,
        confs: Mapping[str, str] | None = None,
        unless: Callable[[], bool] | None = None,
        few: bool = False,
    ) -> int | None:
        """Take the rows of the keys out of the table and put `rows` in, as one fenced commit; the new version.

        What ``MERGE … WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *`` does, with the table's keys looked through
        once and not three times. `touched` gives the `ROW_LOCATION` of each such row (`upsert.located`); `rows` have the table's columns.
        None where only a MERGE can do it: off a local file system, with another Delta, or for a table without deletion vectors or with a
        change feed.
        `pending_deletes` is what was found before; it counts for the version that it was found in, and is looked for again in any other.
        Without `touched` the rows are only put in. `unless` is called between the write and the commit; where it
        returns true, nothing is committed, and `NotCommitted` is raised. Of `few` rows the deletion vectors are made here, without a job.
        """
        if self.direct is None:
            return None
        commit = functools.partial(self.direct.upsert, rows, touched, pending_deletes, unless, few)
        try:
            with query_execution.session_confs(self.spark, confs or {}):
                return self.through_log(commit, lambda: (to, extra))
        except upsert.NeedsMerge:  # nothing was committed
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
        statistics: Sequence[str] = (),
    ) -> int | None:
        """Take the rows of the keys, or those of the places, out of the table and put these Arrow rows in, as one fenced commit;
        the new version.

        As `upsert`, without a Spark job, a plan or a listing: the keys are looked for by this process, and the rows come in
        parts, with the table's columns and types (`table_schema.conformed`). None where only Spark can do it, also where a part
        raises `NotReadable`; then nothing was committed.
        """
        if self.direct is None or self.live is None:
            return None
        coming = (part for part in parts if part.num_rows)
        try:
            first = next(coming, None)
            file = None
            if first is not None:
                file = self._new_file(self.direct, itertools.chain([first], coming), schema, statistics)
        except table_schema.NotReadable:
            return None
        return self._through_log_or_none(
            functools.partial(self.direct.replace, file, keys, self.live, schema, places), lambda: (to, extra), file
        )

    def compact_files(self, parts: Sequence[Mapping[str, Any]]) -> int | None:
        """Write the rows of these live files, which are few, as one file; the new version.

        A fenced commit that says what the last one said, without a Spark job. None where only Spark can do it.
        """
        live = self.live
        if self.direct is None or live is None or definition.is_on(live.configuration, definition.ROW_TRACKING):
            return None
        try:
            held = live.rows(parts)
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return None
        # What the log says of the parts, before they go: rows that were not read would be lost.
        if held.num_rows != sum(map(file_statistics.present_count, parts)):
            return None
        file = None
        if held.num_rows:
            file = self._new_file(self.direct, [held], held.schema, live_files.measured_columns(live))
        commit = functools.partial(self.direct.compact_files, file, parts, live)
        return self._through_log_or_none(commit, self.last_metadata, file)

    def _new_file(
        self, direct: direct_log.DirectLog, parts: Iterable[pa.Table], schema: pa.Schema, statistics: Sequence[str]
    ) -> data_file.ParquetFile:
        """A file of rows for the next commit; none is written after a commit that got no answer, on which nothing follows."""
        self.refuse_unanswered()
        return data_file.ParquetFile.write(direct.store, parts, schema=schema, statistics=statistics, table=self.table)

    def _through_log_or_none(
        self, commit: Callable[..., int], said: fenced_commits.Said, file: data_file.ParquetFile | None
    ) -> int | None:
        """The version of a commit that names the file; None where it `NeedsMerge`."""
        try:
            return self.through_log(commit, said)
        except (upsert.NeedsMerge, *fenced_commits.REFUSED) as error:
            if file is not None:
                self._discard(file, error)
            if isinstance(error, upsert.NeedsMerge):
                return None
            raise

    def _discard(self, file: data_file.ParquetFile, error: Exception) -> None:
        """Remove the file of a commit that was refused, and is not in the log.

        A store may carry out later what it gave no answer to in time: where no other commit came first, its file is for VACUUM.
        """
        if local_log.folder(self.table) is not None or not isinstance(error, table_errors.SPARK_ERRORS):
            file.discard()

    def define(self, schema: StructType) -> bool:
        """Add the columns that the table lacks of these, in one fenced commit that says what the last one said; whether that was
        done.

        What `alter` does with ADD COLUMNS, without a statement, and not where others have changed the columns meanwhile.
        """
        if self.direct is None or self.live is None:
            return False
        commit = functools.partial(self.direct.define, schema.json(), self.live.schema_json)
        return self._through_log_or_none(commit, self.last_metadata, None) is not None

    def append_arrow(
        self,
        *parts: pa.Table,
        to: object,
        statistics: Sequence[str] = (),
        extra: Mapping[str, object] | None = None,
    ) -> int:
        """Append Arrow rows as one fenced commit, each part a row group of its own, or several; the new version.

        `statistics` names the columns whose minimum and maximum are kept for skipping. Where there is a direct log, the
        Parquet file is written here and committed through Delta's transaction; elsewhere Spark appends the rows.
        """
        if self.direct is None:
            # By itself Spark writes a file for each core: every reader would have to open so many of each commit.
            rows = pa.concat_tables(parts)
            return self.append(self.spark.createDataFrame(rows).coalesce(1 + rows.nbytes // FILE_BYTES), to=to, extra=extra)
        file = self._new_file(self.direct, parts, parts[0].schema, statistics)
        try:
            return self.through_log(functools.partial(self.direct.commit, file), lambda: (to, extra))
        except fenced_commits.REFUSED as error:
            self._discard(file, error)
            raise

    def remove_files(
        self, files: Sequence[data_file.DataFile], *, to: object, extra: Mapping[str, object] | None = None
    ) -> int:
        """Take files out of the table without reading them, as one fenced commit, whose position is `to`; the new version.

        Only where there is a direct log (else `DecisionNeeded`).
        """
        if self.direct is None:
            raise errors.DecisionNeeded(
                f"{self.table.label}: its log cannot be repaired from here; on Databricks use FSCK REPAIR TABLE"
            )
        return self.through_log(functools.partial(self.direct.remove_files, files), lambda: (to, extra))
