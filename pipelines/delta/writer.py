"""Writing to a table: a claim, and the commits of its holder.

Every commit of ours carries the table's position and its writer's claim as `userMetadata`, and is fenced: one constant
`txnAppId` a table, `txnVersion` = the version that was read + 1. Delta skips a transaction version that it has already
seen without a word, so each commit is looked up afterwards; one that is not there was fenced off, and the writer stops.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.tables import claims, definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    data_file,
    direct_log,
    exclusion,
    local_log,
    maintenance,
    owners,
    query_execution,
    table_errors,
    table_history,
    upsert,
)
from pipelines.delta import tables as delta
from pipelines.delta.local_log import Commit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_Said = Callable[[], tuple[object, Mapping[str, object] | None]]
"""Position and extras of a commit, asked for at each attempt."""


class Writer:
    """A held claim on one table: the only way to commit to it.

    Made by `Writer.claim`; every commit renews the lease. A commit that was fenced off, or that finds another writer's
    claim, raises `OwnershipLost`, and nothing of it is in the table.
    """

    def __init__(
        self, spark: SparkSession, table: tables.TableRef, *, identity: claims.WriterIdentity, base: Commit | None
    ) -> None:
        self.spark = spark
        self.table = table
        self.identity = identity
        self.version = base.version if base else 0
        self.metadata: dict[str, Any] = dict(base.metadata or {}) if base else {}
        self._log: Any = None
        self._unanswered: dict[str, Any] | None = None
        owners.HELD[identity.writer] = self
        self._spare = 0

    @staticmethod
    def claim(spark: SparkSession, table: tables.TableRef, *, take_over: bool = False, kept: Sequence[str] = ()) -> Writer:
        """Claim the table by an empty commit that names this process, with a lease.

        Where the owner commits in between, the claim looks again: what it takes over is what the table holds then.
        After a RESTORE that is what the restored version said, but for the names in `kept`, which nothing takes back.
        Raises `TableOwned` where a live process of this host holds it, `LeaseHeld` where another host's lease is not
        over, `TableNotOurs`; with `take_over` neither of the first two. A refused writer has committed nothing.
        """
        delta.check_ours(spark, table)
        exclusion.check(spark, table.path or delta.catalog_location(spark, table))
        for _ in range(table_errors.COMMIT_ATTEMPTS):
            base = table_history.version(
                spark, table
            )  # read first: whatever is committed after it makes the claim's commit fail
            last = table_history.last_commit(spark, table)
            if not take_over:
                owners.refuse_second(table, last)
            writer = Writer(spark, table, identity=owners.identity(), base=table_history.position(spark, table))
            writer.version = base
            with contextlib.suppress(errors.OwnershipLost):
                newest = (last.metadata if last else None) or {}
                extra = {name: newest[name] for name in kept if name in newest}
                writer.mark(to=writer.metadata.get("to"), extra={**_carried(writer.metadata), **extra})
                return writer
        raise table_errors.conflict(table)

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
                f"CREATE OR REPLACE TABLE {definition.ddl(self.table, '', properties, cluster_by)} AS SELECT * FROM {view}",
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
            with query_execution.session_confs(self.spark, settings):
                self.spark.sql(sql).collect()

        return self._write(act, lambda: (to, extra))

    @property
    def is_direct(self) -> bool:
        """Whether `upsert` writes files first and commits them after, so that it can still be told not to."""
        return self._has_direct_log()

    @contextmanager
    def seeking(self, touched: DataFrame) -> Iterator[upsert.PendingDelete | None]:
        """What `upsert` would take out of the table as it is now, looked for beside what the block does; None where it cannot.

        `touched` as in `upsert`, or the `ROW_LOCATION` of each row, as it was read since this writer's last commit. The block's end
        waits for the search; what it wrote and nobody took is vacuumed with the rest.
        """
        if not self._has_direct_log():
            yield None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="medallion-seek") as pool:
            yield upsert.PendingDelete(self.version, pool.submit(self._log.deleting, self.table, touched, base=self.version))

    def can_upsert(self) -> bool:
        """Whether `upsert` does without a MERGE here, and rows have `places`."""
        return self._has_direct_log() and self._log.can_upsert()

    def places(self) -> tuple[Column, Column]:
        """`ROW_LOCATION` of each row of the table, where it is read for an `upsert`; nulls where none can be made."""
        if self.can_upsert():
            return upsert.row_location()
        return F.lit(None).cast("string").alias(upsert.ROW_LOCATION[0]), F.lit(None).cast("bigint").alias(
            upsert.ROW_LOCATION[1]
        )

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
        sought: upsert.PendingDelete | None = None,
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
        is true, nothing is, and `NotCommitted` is raised. Of `few` rows the deletion vectors are made here, without a job.
        """
        if not self._has_direct_log():
            return None
        self._refuse_unanswered()
        commit = functools.partial(self._log.upsert, rows, self.table, touched, sought, unless, few)
        try:
            with query_execution.session_confs(self.spark, confs or {}):
                return self._directly(commit, lambda: (to, extra))
        except upsert.NeedsMerge:  # nothing was committed
            return None

    def alter(self, change: str) -> None:
        """Run `ALTER TABLE … change` on the table after ownership was checked; the next commit is fenced on top of it."""
        self.check_ownership()
        with (
            query_execution.session_confs(
                self.spark,
                {
                    "spark.databricks.delta.commitInfo.userMetadata": self._metadata(
                        self.metadata.get("to"), _carried(self.metadata)
                    )
                },
            ),
            table_errors.translating(self.table),
        ):
            self.spark.sql(f"ALTER TABLE {self.table} {change}").collect()
        self.version = table_history.version(self.spark, self.table)

    def optimize(self, *, purges: bool = False) -> None:
        """Compact the table; the commits say what the last one said. Raises `CommitConflict` where others came first."""
        self.check_ownership()
        metadata = self._metadata(self.metadata.get("to"), _carried(self.metadata))
        maintenance.optimize(self.spark, self.table, metadata=metadata, purges=purges)
        self._accept_foreign_commits()

    def delete(self, where: str) -> int:
        """Remove the rows as one fenced commit that says what the last one said; how many."""
        with table_errors.translating(self.table):
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
        if wanted and detail.properties.get(definition.DELETION_VECTORS) != "true":
            self.alter(f"SET TBLPROPERTIES ('{definition.DELETION_VECTORS}' = 'true')")
        elif has_feature and not wanted:
            self.alter("DROP FEATURE deletionVectors")

    def compact(self) -> None:
        """Put small files together and rewrite those of which much is deleted, where there came to be many.

        Bounded by what was written since the last time, not by the table; only on a local file system, elsewhere it is
        maintenance that does it. The rows stay as they are, and the position.
        """
        spare = self._spare_files()
        if spare < self._spare + maintenance.MANY_FILES:
            return
        self.check_ownership()
        # Without metadata: it says nothing of who owns the table, or where it stands.
        with query_execution.session_confs(self.spark, maintenance.COMPACTION), contextlib.suppress(errors.CommitConflict):
            maintenance.optimize(self.spark, self.table, metadata=None)
        self.check_ownership()  # which goes on to the version that this made
        self._spare = self._spare_files()

    def _spare_files(self) -> int:
        """How many files the table has beyond those that its size explains; 0 where its log does not say it."""
        folder = local_log.folder(self.table)
        size = None if folder is None else local_log.size(folder)
        return 0 if size is None else max(0, size.files - size.size_bytes // maintenance.LARGE_FILE)

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
        file = data_file.ParquetFile.write(self._folder(), rows, statistics=statistics, table=self.table)
        try:
            return self._directly(functools.partial(self._log.commit, file), lambda: (to, extra))
        except _REFUSED:  # raised after the answer, and after the log was looked through: no commit names the file
            file.discard()
            raise

    def take_out(self, files: Sequence[data_file.DataFile], *, to: object, extra: Mapping[str, object] | None = None) -> int:
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
        owners.HELD.pop(self.identity.writer, None)
        self._marked(lambda: (self.metadata.get("to"), {**_carried(self.metadata), **(extra or {}), "released": True}))

    def _marked(self, said: _Said) -> int:
        if self._has_direct_log():
            return self._directly(functools.partial(self._log.commit, None), said)
        return self._appended(self.spark.createDataFrame([], self.spark.table(str(self.table)).schema), said)

    def _appended(self, df: DataFrame, said: _Said) -> int:
        return self._write(lambda options: df.writeTo(str(self.table)).options(**options).append(), said)

    def _write(self, act: Callable[[dict[str, str]], None], said: _Said) -> int:
        """A statement of Spark as a fenced commit, and again where others committed in between."""
        for attempt in range(table_errors.COMMIT_ATTEMPTS):
            self._settle()
            self.check_ownership()  # Delta puts the statement onto whatever version it finds
            metadata = self._metadata(*said())
            options = {"userMetadata": metadata, "txnAppId": definition.APP_ID, "txnVersion": str(self.version + 1)}
            try:
                return self._asked(metadata, functools.partial(act, options))
            except table_errors.SPARK_ERRORS as error:
                if not table_errors.is_conflict(error):
                    raise table_errors.translated(error, self.table) from error
                self._after_conflict(attempt, error)
        raise table_errors.conflict(self.table)

    def _asked(self, metadata: str, act: Callable[[], int | None]) -> int:
        """The version in which `act` committed, by its answer or by the log; raises what it raises where it committed nothing.

        An answer may be an error although the commit is in the log, and a success although it was fenced off. Where there is
        no answer (the JVM is gone, an interrupt), the commit may be there, or come yet: `_unanswered` remembers it.
        """
        self._unanswered = asked = claims.parsed(metadata) or {}
        try:
            new = act()
        except (upsert.NeedsMerge, upsert.NotCommitted):  # raised before the log was asked
            self._unanswered = None
            raise
        except (*table_errors.SPARK_ERRORS, direct_log.VersionTaken):
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
        found = table_history.since(self.spark, self.table, self.version)
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
        if attempt + 1 == table_errors.COMMIT_ATTEMPTS:
            raise table_errors.conflict(self.table) from error
        time.sleep(min(0.1 * 2**attempt, 5.0))
        self._accept_foreign_commits()

    def _accept_foreign_commits(self) -> None:
        """Move on to the newest version, unless another writer claimed the table in between, or it was restored: what this
        writer would add does not follow on what the table holds then."""
        for commit in (found := table_history.since(self.spark, self.table, self.version)):
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
        folder = local_log.folder(self.table)
        assert folder is not None
        return folder

    def _has_direct_log(self) -> bool:
        if self._log is None:
            self._log = direct_log.of(self.spark, self.table) or False
        return bool(self._log)

    def _directly(self, commit: Callable[..., int], said: _Said) -> int:
        """A commit through the direct log onto the last version, and onto the newest where others committed in between."""
        for attempt in range(table_errors.COMMIT_ATTEMPTS):
            self._settle()
            metadata = self._metadata(*said())
            try:
                return self._asked(metadata, functools.partial(commit, base=self.version, metadata=metadata))
            except direct_log.VersionTaken as error:
                self._after_conflict(attempt, error)
            except table_errors.SPARK_ERRORS as error:
                raise table_errors.translated(error, self.table) from error
        raise table_errors.conflict(self.table)


_REFUSED = (errors.OwnershipLost, errors.CommitConflict, errors.StorageExhausted, *table_errors.SPARK_ERRORS)
"""What a commit raises that is known to be in no log."""


def _carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer added to the metadata, which a claim or a release hands on."""
    own = {"to", "writer", "host", "process", "started", "lease", "commit", "released"}
    return {name: value for name, value in metadata.items() if name not in own}
