"""Brings one model's table up to date with the versions of its input tables.

work        compares the positions in the table's last commit with those of the tables that the model refers to
whole       replaces all rows by those of the query
changed     replaces the rows of the keys that may have changed: in deletion vectors and new files, or else by a MERGE
"""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.sql import merge as sql_merge
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.bronze import survey
from pipelines.delta import maintenance, query_execution, table_history, upsert
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import current, model_in_process, model_keys, queries
from pipelines.gold.candidate import Audit, Candidate, selected
from pipelines.gold.model_inputs import ModelInputs
from pipelines.gold.table_claims import TableClaims
from pipelines.spark import failures as spark_failures

log = logging.getLogger(__name__)

PROPERTIES = {
    "delta.enableTypeWidening": "false",
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}

_NTZ = T.TimestampNTZType().simpleString()


@dataclass(frozen=True)
class ModelWork:
    """How a model's table gets to the positions `to`: by `nothing`, `whole`, or `changed` for the tables in `moved`.

    `live` is the metadata of the table's last good version, `why` the reason for a whole one.
    """

    kind: str
    to: dict[str, Any]
    live: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    moved: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelTable:
    """The table of one model in one run."""

    spark: SparkSession
    model: sql_model.Model
    inputs: ModelInputs
    audit: Audit
    take_over: bool = False
    is_anew: bool = False
    deletion_vectors: bool | None = None
    """The setting for deletion vectors."""

    @property
    def table(self) -> tables.TableRef:
        """The model's table."""
        return self.inputs.layout.model(self.model.name)

    @property
    def _made_by(self) -> dict[str, object]:
        return {"model": self.model.digest, "pipeline": self.inputs.pipeline}

    def work(self) -> ModelWork:
        """What a run has to do, from the positions in the table's last commit."""
        model, table = self.model, self.table
        to: dict[str, Any] = self.inputs.positions(model)
        standing = table_history.standing(self.spark, table)
        if standing.version < 0:
            return ModelWork("whole", to, {}, "it is not there yet")
        live = dict(standing.metadata)
        # A table of documents or of their versions names no model: another pipeline's, or a history that is switched off.
        if live.get("to") is not None and "model" not in live:
            message = f"its table would be {table.label}, which contains a collection's documents or their versions"
            raise errors.SettingsError(errors.Problem(model.where, message, "rename the file"))
        if (owner := live.get("pipeline", self.inputs.pipeline)) != self.inputs.pipeline:
            message = (
                f"its table would be {table.label}, which belongs to a model of the pipeline {owner}: each would overwrite "
                "the other's rows"
            )
            raise errors.SettingsError(errors.Problem(model.where, message, "rename the file, or remove this table"))
        if self.is_anew:
            return ModelWork("whole", to, live, "--full-refresh asks for it")
        # Rows of another query cannot be changed into rows of this one key by key.
        if live.get("model") != model.digest:
            return ModelWork("whole", to, live, "the model is another one")
        positions = live_positions if isinstance(live_positions := live.get("to"), dict) else {}
        moved_names = [name for name in to if not is_same(positions.get(name), to[name])]
        if not moved_names and positions.keys() == to.keys():
            return ModelWork("nothing", to, live)
        if not self._is_incremental:
            return ModelWork("whole", to, live)
        if positions.keys() != to.keys():
            return ModelWork("whole", to, live, "it refers to other tables")
        keyed_names = {ref.name for ref in model.refs if ref.key}
        unkeyed_names = {ref.name for ref in model.refs if not ref.key} | {name for name in to if name.startswith("view ")}
        for name in moved_names:
            # Without a key any row of the model may depend on any row of that table.
            if name in unkeyed_names or name not in keyed_names:
                return ModelWork("whole", to, live, f"{name} changed, which it reads without a key")
            if not self.inputs.follows(name, positions[name]):
                return ModelWork("whole", to, live, f"{name} was made anew, pinned before, or is an older copy")
        return ModelWork("changed", to, live, moved=tuple(moved_names))

    def written(self, whole: DataFrame) -> tuple[str, int, int | None]:
        """Publish the rows of the query `whole`, or those of changed keys; returns what was done, the number of rows or keys, and the
        version."""
        table = self.table
        columns = [F.col(identifier(name)).alias(name, metadata=_metadata(self.model, name)) for name in whole.columns]
        with ExitStack() as stack:
            claims = stack.enter_context(contextlib.closing(TableClaims(self.take_over, self._vectors)))
            writer = claims.writer(self.spark, table) if delta.exists(self.spark, table) else None
            stack.callback(self.inputs.forget, self.model.name)
            work = self.work()  # after the claim: another run may have committed before it
            if work.kind == "nothing":
                return "nothing", 0, None
            with queries.errors_of_rows(self.model):
                keys = None
                if (
                    work.kind == "changed"
                    and writer is not None
                    and query_execution.takes_settings(self.spark)
                    and _fits(self.spark, table, whole)
                ):
                    keys = model_keys.affected(self.spark, self.model, self.inputs, work.live["to"], work.moved)
                if keys is None or writer is None:
                    return "whole", *self._replaced(work, claims, writer, whole.select(*columns))
                result = self._merged(work, writer, keys)
            _compact(writer)
            return "changed", *result

    @property
    def _vectors(self) -> bool | None:
        """The setting for deletion vectors, as far as it concerns this model: a table that is only made whole is not given any."""
        return self.deletion_vectors if self._is_incremental or not self.deletion_vectors else None

    @property
    def _is_incremental(self) -> bool:
        return self.model.materialized is sql_model.Materialization.INCREMENTAL

    def switch_vectors(self) -> None:
        """Apply the setting for deletion vectors to a table without changes; the others get it when they are claimed."""
        if self._vectors is None or maintenance.are_vectors_switched(self.spark, self.table, self._vectors):
            return
        with contextlib.closing(TableClaims(self.take_over, self._vectors)) as claims:
            claims.writer(self.spark, self.table)
        self.inputs.forget(self.model.name)

    def _replaced(
        self, work: ModelWork, claims: TableClaims, writer: Writer | None, frame: DataFrame
    ) -> tuple[int, int | None]:
        """Replace all rows by those of the query, after the audit; returns their number, and the version."""
        table = self.table
        with ExitStack() as stack:
            rows = stack.enter_context(query_execution.held(frame))
            self._check_unique(rows)
            self._check_keys(rows)
            verdict = self.audit(
                self.spark,
                Candidate(self.model.name, table, functools.partial(selected, rows), keys=self._named(rows), live=work.live),
            )
            owner = writer
            if owner is None:  # not before the audit: a refused first version must leave no empty table
                if table.path is None and self.spark.catalog.tableExists(str(table)):
                    check_view(self.spark, table, self.inputs.pipeline)
                    self.spark.sql(f"DROP VIEW IF EXISTS {table}")  # the model was one before
                ddl = ", ".join(f"{identifier(each.name)} {table_columns.ddl(each.dataType)}" for each in frame.schema)
                vectors = claims.table_properties() if self._is_incremental else {definition.DELETION_VECTORS: "false"}
                delta.create(self.spark, table, columns=ddl, properties=PROPERTIES | vectors)
                owner = claims.writer(self.spark, table)
            if self.model.description != self._description(table):
                owner.alter(f"SET TBLPROPERTIES ('comment' = {literal(self.model.description)})")
            # Delta enables the feature only for the first columns of a table.
            if _NTZ in frame.schema.simpleString() and _NTZ not in self.spark.table(str(table)).schema.simpleString():
                owner.alter("SET TBLPROPERTIES ('delta.feature.timestampNtz' = 'supported')")
            count = rows.count()
            columns = [F.col(identifier(name)).alias(name, metadata=_metadata(self.model, name)) for name in rows.columns]
            # The positions stay where they were, but models over this one must be made again, and a kill may come before that.
            made_anew = {current.REBUILT: owner.identity.writer} if self.is_anew else {}
            extra = {**verdict, **self._made_by, **made_anew}
            version = owner.overwrite(self._by_key(rows).select(*columns), to=work.to, extra=extra)
            return count, version

    def _by_key(self, rows: DataFrame) -> DataFrame:
        """The rows in the order of `unique_key`, so that later changes read only files that may have their keys.

        As they are where the platform keeps no rows: the query would be computed again for the order.
        """
        keys = [F.col(identifier(name)) for name in self.model.unique_key]
        return rows.sort(*keys) if keys and query_execution.holds_rows(self.spark) else rows

    def _description(self, table: tables.TableRef) -> str:
        return self.spark.sql(f"DESCRIBE DETAIL {table}").select("description").collect()[0].description or ""

    def _merged(self, work: ModelWork, writer: Writer, affected: model_keys.ModelKeys) -> tuple[int, int | None]:
        """Replace the rows of the keys that may have changed; returns the number of keys, and the version."""
        keys = affected.rows
        with ExitStack() as stack:
            stack.callback(affected.close)
            spans = model_keys.spans(keys)
            query = stack.enter_context(self._of_keys(keys, spans))
            # A suite compares the table's other rows, too.
            if affected.few is not None and not self.audit.judges(self.model.name):
                version = self._replaced_here(work, writer, query, affected.few)
                if version is not None:
                    return affected.few.num_rows, version
            rows = stack.enter_context(query_execution.held(query))
            self._check_unique(rows)
            self._check_led(rows, [keys])
            self._check_apart(rows, [keys])
            live = self.spark.table(str(writer.table))
            is_same_key = model_keys.is_same(self.model, rows, keys)
            # All rows that the table would have, for expectations about the whole table.
            other_rows = live.alias("l").join(keys.alias("k"), is_same_key, "left_anti")
            all_rows = other_rows.unionByName(rows)
            verdict = self.audit(
                self.spark,
                Candidate(
                    self.model.name,
                    writer.table,
                    functools.partial(selected, all_rows),
                    rows,
                    keys=self._named(rows),
                    live=work.live,
                ),
            )
            extra = {**verdict, **self._made_by}
            count = keys.count()
            pruned = {
                f"t.{identifier(name)}": span
                for name, span in spans.items()
                if table_columns.is_same(rows.schema[name].dataType, keys.schema[name].dataType)
            }

            def touched() -> DataFrame:
                held = self.spark.table(str(writer.table)).alias("t").where(model_keys.within(pruned))
                own = held.select(*map(identifier, self.model.unique_key), *writer.row_locations()).alias("l")
                return own.join(keys.alias("k"), is_same_key, "left_semi").select(*upsert.ROW_LOCATION)

            if writer.can_upsert():
                columns = [F.col(identifier(name)) for name in live.columns]
                few = count <= survey.MAX_DRIVER_ROWS
                version = writer.upsert(rows.select(*columns), touched=touched, to=work.to, extra=extra, few=few)
                if version is not None:
                    return count, version
            # Keys for which the query has no row: the MERGE needs a source row to delete theirs.
            gone_keys = keys.alias("k").join(rows.alias("l"), is_same_key, "left_anti").withColumn("__gone", F.lit(True))
            gone_keys = model_keys.as_keys_of(rows.schema, gone_keys, self.model.unique_key)
            source = rows.withColumn("__gone", F.lit(False)).unionByName(gone_keys, allowMissingColumns=True)
            statement = _statement(rows.columns, self.model.unique_key, model_keys.within(pruned))
            confs = current.MERGE_CONFS if query_execution.holds_rows(self.spark) else {}
            return count, writer.merge(source, statement, to=work.to, extra=extra, confs=confs)

    def _replaced_here(self, work: ModelWork, writer: Writer, query: DataFrame, keys: pa.Table) -> int | None:
        """Replace the rows of few keys by those of the query in this process; the version, None where Spark has to do it."""
        few = model_in_process.computed(query, keys, writer)
        if few is None:
            return None
        if few.rowless.num_rows:
            self._check_rowless(self.spark.createDataFrame(few.rowless))
        return model_in_process.replaced(few, writer, to=work.to, extra=self._made_by)

    @contextmanager
    def _of_keys(self, keys: DataFrame, spans: model_keys.Spans) -> Iterator[DataFrame]:
        """The query over those rows of tables with a `key` that have one of these keys; `spans` are those of `model_keys`."""
        view = f"keys_{uuid.uuid4().hex[:12]}"

        def restricted(ref: sql_model.Ref) -> str:
            if not ref.key:
                return self.inputs.relation(ref)
            columns = {key: f"r.{identifier(column)}" for column, key in zip(ref.key, self.model.unique_key)}
            on = " AND ".join(f"{column} <=> k.{identifier(key)}" for key, column in columns.items())
            within = model_keys.within({columns[key]: spans[key] for key in spans})
            return f"(SELECT r.* FROM {self.inputs.relation(ref)} AS r LEFT SEMI JOIN {view} AS k ON {on} WHERE {within})"

        keys.createOrReplaceTempView(view)
        try:
            yield queries.frame(self.spark, self.model, restricted)
        finally:
            self.spark.catalog.dropTempView(view)

    def _keys_of(self, ref: sql_model.Ref) -> DataFrame:
        """All keys in the table of a reference."""
        names = ", ".join(map(identifier, ref.key))
        return self.spark.sql(f"SELECT DISTINCT {names} FROM {self.inputs.relation(ref)}").toDF(*self.model.unique_key)

    def _named(self, rows: DataFrame) -> tuple[str, ...]:
        """The columns by which messages identify a row: the model's `unique_key`, or the document's key if the row has it."""
        return self.model.unique_key or tuple(name for name in ("__key", "_id") if name in rows.columns)[:1]

    def _check_keys(self, rows: DataFrame) -> None:
        """Run both checks below for all keys of the tables, which are read once for both."""
        if not self.model.unique_key:
            return
        with ExitStack() as stack:
            contexts = (query_execution.held(self._keys_of(ref)) for ref in self.model.refs if ref.key)
            keys = [stack.enter_context(context) for context in contexts]
            self._check_led(rows, keys)
            self._check_apart(rows, keys)

    def _check_led(self, rows: DataFrame, keys: Sequence[DataFrame]) -> None:
        """Raise `SettingsError` if rows have keys that are not in a table with a key: they would not be updated when their inputs
        change."""
        strays = rows
        for table_keys in keys:
            strays = strays.alias("l").join(
                table_keys.alias("k"), model_keys.is_same(self.model, rows, table_keys), "left_anti"
            )
        if not strays.isEmpty():
            references = " and ".join(f"ref('{ref.name}', key='{', '.join(ref.key)}')" for ref in self.model.refs if ref.key)
            message = f"unique_key {', '.join(self.model.unique_key)} has values that are not in {references}"
            hint = (
                "key must name the columns that contain these values; if the query computes them, use materialized='table'"
            )
            raise errors.SettingsError(errors.Problem(self.model.where, message, hint))

    def _check_apart(self, rows: DataFrame, keys: Sequence[DataFrame]) -> None:
        """Raise `SettingsError` if keys without a row get one when the query runs for them alone: then it combines keys or selects among
        them, and the rows of one key cannot be computed without the others."""
        all_keys = functools.reduce(lambda one, other: one.unionByName(other), keys).distinct().alias("k")
        with query_execution.held(
            all_keys.join(rows.alias("l"), model_keys.is_same(self.model, rows, all_keys), "left_anti")
        ) as rowless:
            if not rowless.isEmpty():
                self._check_rowless(rowless)

    def _check_rowless(self, keys: DataFrame) -> None:
        """Raise `SettingsError` if the query has rows when it runs for these keys alone (`_check_apart`)."""
        with self._of_keys(keys, model_keys.spans(keys)) as alone:
            is_apart = alone.isEmpty()
        if not is_apart:
            message = (
                f"the rows of one {', '.join(self.model.unique_key)} depend on documents of several, so they cannot be "
                "computed separately"
            )
            hint = "if the query combines keys or selects among them, use materialized='table'"
            raise errors.SettingsError(errors.Problem(self.model.where, message, hint))

    def _check_unique(self, rows: DataFrame) -> None:
        if not self.model.unique_key:
            return
        # As one struct: a column of the key may be called `count`.
        key = F.struct(*map(identifier, self.model.unique_key)).alias("key")
        repeats = rows.select(key).groupBy("key").count().where("`count` > 1").count()
        if repeats:
            raise errors.DecisionNeeded(
                f"{self.model.where}: unique_key {', '.join(self.model.unique_key)} is not unique: {repeats} keys occur "
                "more than once. Nothing was published; use GROUP BY, or add columns to unique_key"
            )


def _compact(writer: Writer) -> None:
    """Compact the files that changes have added. The version is published: a failure is only logged, and the next change tries again."""
    try:
        maintenance.compact(writer)
    except Exception as error:
        spark_failures.of_one(error)  # raises where Spark is lost
        log.warning("%s: the files could not be compacted (%s)", writer.table.label, type(error).__name__)


def view_owner(pipeline: str) -> str:
    """The property of a view that a model of this pipeline made; in its name, because Spark hides values with words such as `url`."""
    return f"{_VIEW_OWNER}{pipeline}"


_VIEW_OWNER = "mongo-medallion.pipeline."


def check_view(spark: SparkSession, table: tables.TableRef, pipeline: str, *, has_its_query: bool = False) -> None:
    """Raise `TableNotOurs` if the catalog has, in a model's place, a view that no model of the pipeline made.

    One with the model's query may be of an earlier version, which did not name the pipeline.
    """
    properties = delta.shown(spark, table)
    if properties is None or (has_its_query and not any(name.startswith(_VIEW_OWNER) for name in properties)):
        return
    if view_owner(pipeline) not in properties:
        raise errors.TableNotOurs(
            f"{table.label}: there is a table or view that no model of the pipeline {pipeline} made; rename the model's file, "
            "or remove what is there"
        )


def is_same(before: object, now: object) -> bool:
    """Whether two positions, of a table or of the tables that a view reads, have the same rows: `version` is ignored, as commits without
    rows raise it."""
    if not isinstance(before, dict) or not isinstance(now, dict) or before.keys() != now.keys():
        return before == now
    # A table's position, and not positions by names: a model may be called `at`.
    names = ("id", "at") if isinstance(now.get("at"), str) else now.keys()
    return all(is_same(before[name], now[name]) for name in names)


def _metadata(model: sql_model.Model, name: str) -> dict[str, str]:
    comment = dict(model.columns).get(name, "")
    return {"comment": comment} if comment else {}


def _fits(spark: SparkSession, table: tables.TableRef, frame: DataFrame) -> bool:
    """Whether the table has the query's columns."""
    table_types = {each.name: each.dataType for each in spark.table(str(table)).schema}
    query_types = {each.name: each.dataType for each in frame.schema}
    return table_types.keys() == query_types.keys() and all(
        table_columns.is_same(table_types[name], query_types[name]) for name in query_types
    )


def _statement(columns: Sequence[str], keys: Sequence[str], pruning: str) -> sql_merge.Merge:
    """The MERGE of the keys that may have changed, compared by `<=>`, as a group may have the key NULL."""
    on = " AND ".join(f"t.{identifier(name)} <=> s.{identifier(name)}" for name in keys)
    return sql_merge.Merge(on, sql_merge.replacing(columns), pruning)
