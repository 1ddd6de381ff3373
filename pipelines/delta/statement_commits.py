"""Commits by statements of Spark: what a writer can do to any table, over any catalog, store and session.

A statement does not say which version it made, and Delta skips one whose fence it has seen: `fenced_commits` looks each
of them up.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core.sql import merge as sql_merge
from cdc_core.tables import definition
from pipelines.delta import (
    fenced_commits,
    owners,
    query_execution,
    table_errors,
    upsert,
)
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


MANY_KEYS = 5_000
"""Rows of so many keys are replaced by their keys, those of more by the range that holds these."""


class StatementCommits(fenced_commits.FencedCommits):
    """The verbs of a claim that need nothing but SQL and writes of frames.

    A commit without rows goes through the direct log where there is one: it is the same commit, without a job of Spark.
    """

    def mark(self, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """One fenced commit without rows, for what its metadata says; the new version."""
        return self._marked(lambda: (to, extra))

    def append(self, df: DataFrame, *, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Append the rows of `df` as one fenced commit; the new version."""
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

        return self.through_spark(act, lambda: (to, extra))

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
        if not query_execution.takes_settings(self.spark):  # the properties stay those that the table was made with
            return self.overwrite(df, to=to, extra=extra, overwrite_schema=True)
        ddl = definition.ddl(self.table, "", properties, cluster_by)
        return self._executed(
            lambda view: f"CREATE OR REPLACE TABLE {ddl} AS SELECT * FROM {view}", df, lambda: (to, extra), {}
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

        Retried on Delta's conflicts, each time with ownership checked and the fence set anew: the statement must be a
        function of its source and of the table as it is. Raises `CommitConflict` when the retries are used up. A
        session that takes no settings runs no fenced MERGE: there the rows of its keys are replaced by what the MERGE
        would leave of them.
        """
        if query_execution.takes_settings(self.spark):
            return self._executed(
                lambda view: statement.render(str(self.table), view), source, lambda: (to, extra), confs or {}
            )
        return self._replaced(source, statement, lambda: (to, extra))

    def remove(self, where: str, *, among: str | None = None, to: object, extra: Mapping[str, object] | None = None) -> int:
        """Remove the rows that the SQL condition holds for, as one fenced commit; the new version.

        Delta replaces rows by conditions of columns and literals alone: one with a function needs such a condition `among` which rows
        its rows are, and the others of these are written again.
        """
        rows = self._rows()
        left = rows.limit(0) if among is None else rows.where(among).where(f"NOT coalesce({where}, false)")
        return self._written(lambda: (left, F.expr(among or where)), lambda: (to, extra))

    def alter(self, change: str) -> None:
        """Run `ALTER TABLE … change` on the table after ownership was checked; the next commit is fenced on top of it.

        Its commit says nothing, as that of a compaction: fenced by nothing, it may come late, behind what a successor has committed.
        """
        self.check_ownership()
        with table_errors.translating(self.table):
            self.spark.sql(f"ALTER TABLE {self.table} {change}").collect()
        self.check_ownership()  # a claim may have come just before it

    def renew(self) -> None:
        """Renew the lease by an empty commit that says what the last one said."""
        self._marked(self.last_metadata)

    def release(self, extra: Mapping[str, object] | None = None) -> None:
        """Say that the owner left cleanly, so that a successor on another host need not wait for the lease.

        Whatever comes of it, no successor in this process is refused because of this writer. A commit that got no
        answer, and is in the log, counts as the last one.
        """
        owners.HELD.pop(self.identity.writer, None)
        self.settle()
        self._marked(
            lambda: (self.metadata.get("to"), {**fenced_commits.carried(self.metadata), **(extra or {}), "released": True})
        )

    def _replaced(self, source: DataFrame, statement: sql_merge.Merge, said: fenced_commits.Said) -> int:
        """The rows of the source's keys, replaced by what the statement leaves of them."""
        keys = [row[0] for row in source.select(upsert.KEY).distinct().limit(MANY_KEYS + 1).collect()]
        if not keys:
            return self._marked(said)
        key = F.col(upsert.KEY)
        if len(keys) > MANY_KEYS:
            bounds = source.agg(F.min(upsert.KEY), F.max(upsert.KEY)).collect()[0]
            among = key.between(*bounds)
        else:
            among = key.isin(keys)
        return self._written(lambda: (statement.outcome(self._rows().where(among), source), among), said)

    def _written(self, made: Callable[[], tuple[DataFrame, Column]], said: fenced_commits.Said) -> int:
        """Rows in place of those that a condition holds for: the options of a write carry the fence, without a setting."""

        def act(options: dict[str, str]) -> None:
            rows, among = made()
            rows.writeTo(str(self.table)).options(**options).overwrite(among)

        return self.through_spark(act, said)

    def _executed(
        self, sql: Callable[[str], str], source: DataFrame, said: fenced_commits.Said, confs: Mapping[str, str]
    ) -> int:
        """A statement over a view of the source, with the fence in the session's settings: SQL has no other place for it."""
        view = f"source_{uuid.uuid4().hex[:12]}"

        def act(fence: dict[str, str]) -> None:
            settings = {
                "spark.databricks.delta.write.txnAppId": fence["txnAppId"],
                "spark.databricks.delta.write.txnVersion": fence["txnVersion"],
                # Taken back by Delta after one commit: a later statement of this session must not carry the fence of this
                # one.
                "spark.databricks.delta.write.txnVersion.autoReset.enabled": "true",
                "spark.databricks.delta.commitInfo.userMetadata": fence["userMetadata"],
                **confs,
            }
            with query_execution.required_confs(self.spark, settings):
                self.spark.sql(sql(view)).collect()

        source.createOrReplaceTempView(view)
        try:
            return self.through_spark(act, said)
        finally:
            self.spark.catalog.dropTempView(view)

    def _marked(self, said: fenced_commits.Said) -> int:
        if self.direct is not None:
            return self.through_log(functools.partial(self.direct.commit, None), said)
        nothing = self.spark.createDataFrame([], self._rows().schema)
        # Over Spark Connect setting it would take longer than what it spares.
        confs = query_execution.INTERPRETED if sparks.is_classic(self.spark) else {}
        with query_execution.session_confs(self.spark, confs):
            return self._appended(nothing, said)

    def _rows(self) -> DataFrame:
        return self.spark.table(str(self.table))

    def _appended(self, df: DataFrame, said: fenced_commits.Said) -> int:
        return self.through_spark(lambda options: df.writeTo(str(self.table)).options(**options).append(), said)
