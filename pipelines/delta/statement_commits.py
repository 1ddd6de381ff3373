"""Commits by Spark statements, which work for any table, catalog, store and session.

A statement does not return its version, and Delta silently skips one whose fence it has seen: `fenced_commits` looks each of them up.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core.sql import merge as sql_merge
from cdc_core.tables import definition
from pipelines.delta import catalog_places, fenced_commits, owners, query_execution, table_errors, upsert
from pipelines.delta.fenced_commits import CommitPosition
from pipelines.delta.log_actions import Fence
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


MANY_KEYS = 5_000
"""Up to this many keys, rows are replaced by a list of keys; for more, by the range of the keys."""


class StatementCommits(fenced_commits.FencedCommits):
    """The operations of a writer that need only SQL and DataFrame writes.

    A commit without rows goes through the direct log where there is one: it is the same commit without a Spark job.
    """

    def mark(self, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """One fenced commit without rows, for its metadata alone; the new version."""
        return self._marked(CommitPosition(to, extra))

    def append(self, df: DataFrame, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Append the rows of `df` as one fenced commit; the new version."""
        return self._appended(df, CommitPosition(to, extra))

    def overwrite(self, df: DataFrame, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Replace the table's rows and columns by those of `df` in one fenced commit; the new version."""
        writer = df.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
        path = self.table.path

        def act(fence: Fence) -> None:
            fenced_writer = writer.options(**fence.options)
            # `saveAsTable` sometimes misses a path table that another session has just created, and creates it again.
            fenced_writer.saveAsTable(str(self.table)) if path is None else fenced_writer.save(path)

        return self.commit(act, CommitPosition(to, extra), is_statement=True)

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
        if not query_execution.takes_settings(self.spark):  # properties and clustering stay the same
            return self.overwrite(df, to=to, extra=extra)
        sets_all = catalog_places.is_open(self.spark, self.table)
        ddl = definition.ddl(self.table, "", properties, cluster_by, sets_all=sets_all)
        return self._executed(
            lambda view: f"CREATE OR REPLACE TABLE {ddl} AS SELECT * FROM {view}", df, CommitPosition(to, extra), {}
        )

    def merge(
        self,
        source: DataFrame,
        statement: sql_merge.Merge,
        *,
        to: object,
        extra: Mapping[str, object] | None = None,
        confs: Mapping[str, str] | None = None,
    ) -> int:
        """Merge the rows of `source` as one fenced commit; the new version.

        Retried on Delta's conflicts, each time with ownership checked and a new fence: the statement may depend only on its source and on
        the table's current rows. Raises `CommitConflict` after the last attempt. A session that takes no settings cannot run a fenced
        MERGE: there the rows of the source's keys are replaced by the outcome of the MERGE.
        """
        if query_execution.takes_settings(self.spark):
            return self._executed(
                lambda view: statement.render(str(self.table), view), source, CommitPosition(to, extra), confs or {}
            )
        return self._replaced(source, statement, CommitPosition(to, extra))

    def remove(self, where: str, *, among: str | None = None, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Remove the rows that match the SQL condition `where`, as one fenced commit; the new version.

        Delta replaces rows only by conditions of columns and literals. If `where` has a function, `among` must be such a condition, which
        matches all of its rows; the other rows of `among` are written again.
        """
        rows = self._rows()
        remaining = rows.limit(0) if among is None else rows.where(among).where(f"NOT coalesce({where}, false)")
        return self._written(lambda: (remaining, F.expr(among or where)), CommitPosition(to, extra))

    def alter(self, change: str) -> None:
        """Run `ALTER TABLE … change` on the table, with ownership checked before and after it.

        Its commit has no metadata, as that of a compaction: it is not fenced, and may come after a commit of a successor.
        """
        self.check_ownership()
        with table_errors.translating(self.table):
            self.spark.sql(f"ALTER TABLE {self.table} {change}").collect()
        self.check_ownership()  # another writer may have claimed the table just before the statement

    def renew(self) -> None:
        """Renew the lease by an empty commit with the metadata of the last one."""
        self._marked(fenced_commits.LAST)

    def release(self, extra: Mapping[str, object] | None = None) -> None:
        """Release the claim by an empty commit, so that a successor on another host does not wait for the lease.

        Even if the commit fails, this writer no longer refuses a successor in this process. A commit without an answer counts as the last
        one if it is in the log (`settle`).
        """
        owners.HELD.pop(self.identity.writer, None)
        self.settle()
        self._marked(CommitPosition(extra={**(extra or {}), "released": True}, is_last=True))

    def _replaced(self, source: DataFrame, statement: sql_merge.Merge, position: CommitPosition) -> int:
        """Replace the rows of the source's keys by the outcome of the statement."""
        keys = [row[0] for row in source.select(upsert.KEY).distinct().limit(MANY_KEYS + 1).collect()]
        if not keys:
            return self._marked(position)
        key = F.col(upsert.KEY)
        if len(keys) > MANY_KEYS:
            bounds = source.agg(F.min(upsert.KEY), F.max(upsert.KEY)).collect()[0]
            among = key.between(*bounds)
        else:
            among = key.isin(keys)
        return self._written(lambda: (statement.outcome(self._rows().where(among), source), among), position)

    def _written(self, made: Callable[[], tuple[DataFrame, Column]], position: CommitPosition) -> int:
        """Replace the rows that match a condition: `made` returns the new rows and the condition. Write options carry the fence."""

        def act(fence: Fence) -> None:
            rows, among = made()
            rows.writeTo(str(self.table)).options(**fence.options).overwrite(among)

        return self.commit(act, position, is_statement=True)

    def _executed(
        self, sql: Callable[[str], str], source: DataFrame, position: CommitPosition, confs: Mapping[str, str]
    ) -> int:
        """Run a SQL statement over a view of the source. The session's settings carry the fence, because SQL has no options for it."""
        view = f"source_{uuid.uuid4().hex[:12]}"

        def act(fence: Fence) -> None:
            settings = {
                "spark.databricks.delta.write.txnAppId": fence.options["txnAppId"],
                "spark.databricks.delta.write.txnVersion": fence.options["txnVersion"],
                # Delta resets the fence after one commit: a later statement of this session must not have it.
                "spark.databricks.delta.write.txnVersion.autoReset.enabled": "true",
                "spark.databricks.delta.commitInfo.userMetadata": fence.metadata,
                **confs,
            }
            with query_execution.required_confs(self.spark, settings):
                self.spark.sql(sql(view)).collect()

        source.createOrReplaceTempView(view)
        try:
            return self.commit(act, position, is_statement=True)
        finally:
            self.spark.catalog.dropTempView(view)

    def _marked(self, position: CommitPosition) -> int:
        direct = self.direct
        if direct is not None:
            return self.commit(lambda fence: direct.commit(None, fence), position)
        no_rows = self.spark.createDataFrame([], self._rows().schema)
        # Over Spark Connect, changing the settings would take longer than it saves.
        confs = query_execution.INTERPRETED if sparks.is_classic(self.spark) else {}
        with query_execution.session_confs(self.spark, confs):
            return self._appended(no_rows, position)

    def _rows(self) -> DataFrame:
        return self.spark.table(str(self.table))

    def _appended(self, df: DataFrame, position: CommitPosition) -> int:
        return self.commit(
            lambda fence: df.writeTo(str(self.table)).options(**fence.options).append(), position, is_statement=True
        )
