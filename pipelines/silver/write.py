"""The last steps of a batch: rows with the table's columns, and the one commit that contains them and the position.

The commit is the cheapest that is correct: an append to an empty table, an upsert by deletion vectors if every row is newer than the
table's, otherwise a MERGE guarded by `__sequence`.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.silver import merge, reduce
from cdc_core.sql import table_columns
from cdc_core.tables import definition
from cdc_core.typed import plan as typed
from pipelines.bronze import survey
from pipelines.delta import query_execution, upsert
from pipelines.delta import tables as delta
from pipelines.schema import dropped
from pipelines.silver import batch as batches
from pipelines.silver import deletes
from pipelines.silver import tables as silver_tables
from pipelines.silver.batch import RowBatch, Step
from pipelines.silver.collection import SilverCollection

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

MERGE_CONFS = {
    "spark.databricks.delta.merge.materializeSource": "none",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "64m",
}
"""A MERGE reads its source up to three times. The source is computed before it, so that Delta need not materialize it."""

_CONTROL = ("__guard", "__action")
"""Columns that control the commit and are not in the table."""


def table_rows(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: the rows with the table's columns, `__guard` and `__action`; the table gets columns that it lacks, and wider types."""
    schema = collection.rows().schema
    source = _typed(collection, batch, schema)
    _make_room(collection, source, schema, before=batch.range_.after)
    return replace(batch, rows=source)


def committed(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: commits the rows, together with `next_position`.

    Raises `upsert.NotCommitted`, with nothing committed, if `unless` is true or would only be known after the commit.
    """
    if collection.is_empty():
        # Documents deleted within the first range get no row; `remembered` has stored their deletes.
        first_rows = batch.rows.where(f"`__action` <> '{reduce.Action.REMOVE.value}'").drop(*_CONTROL)
        _append(collection, first_rows, batch)
        return batch
    if _is_upsert(collection, batch) and _upserted(collection, batch):
        return batch
    _merge(collection, batch)
    return batch


STEPS: tuple[Step, ...] = (deletes.remembered, table_rows, committed)
"""The steps from reduced rows to the commit."""


def _merge(collection: SilverCollection, batch: RowBatch) -> None:
    # Computed before the statement: a MERGE that is retried, or reads its source twice, must see the same rows.
    with query_execution.held(batch.rows) as rows:
        # `unless` has its observation only if the rows are computed by now.
        if batch.unless is not None and (not query_execution.holds_rows(collection.spark) or batch.unless()):
            raise upsert.NotCommitted
        if batch.has_incomplete and not collection.keeps_document and rows.where("`__incomplete`").isEmpty():
            batch = replace(batch, has_incomplete=False)  # such a MERGE reads and writes much less
        statement = _statement(collection, batch).merge()
        confs = MERGE_CONFS | dict(batch.merge_confs)
        collection.writer.merge(
            rows, statement, to=batch.next_position.to, extra=collection.metadata(batch.next_position), confs=confs
        )


def _append(collection: SilverCollection, rows: DataFrame, batch: RowBatch) -> None:
    """Append the table's first rows."""
    writer, to, metadata = collection.writer, batch.next_position.to, collection.metadata(batch.next_position)
    if batch.unless is None:
        writer.append(rows, to=to, extra=metadata)
    elif writer.upsert(rows, touched=None, to=to, extra=metadata, unless=batch.unless) is None:
        raise upsert.NotCommitted  # Spark's own append would commit regardless of `unless`


def _is_upsert(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether each row is newer than the table's row of its key, and replaces or removes it whole."""
    # In these cases the result depends on the table's row, which only a MERGE reads.
    has_to_look = batch.is_late or batch.has_incomplete or batch.touched is None or batches.keeps_last(collection, batch)
    if has_to_look or not collection.writer.is_direct:
        return False
    # Read again: `table_rows` may have altered the table.
    schema = collection.rows().schema
    return table_columns.is_same(schema, batch.rows.drop(*_CONTROL).schema)


def _upserted(collection: SilverCollection, batch: RowBatch) -> bool:
    documents = batch.rows
    if batch.deletes is not None:
        # A removed key is in `touched` and not in `rows`: its row is deleted and none is written.
        documents = documents.where(F.col("__action") == reduce.Action.DOCUMENT.value)
    rows = documents.drop(*_CONTROL)
    assert batch.touched is not None
    version = collection.writer.upsert(
        rows,
        touched=batch.touched,
        pending_deletes=batch.pending_deletes,
        to=batch.next_position.to,
        extra=collection.metadata(batch.next_position),
        confs=MERGE_CONFS,
        unless=batch.unless,
        few=batch.counts.events <= survey.MAX_DRIVER_ROWS,
    )
    return version is not None


def _typed(collection: SilverCollection, batch: RowBatch, table_type: StructType) -> DataFrame:
    """Rows of the table's columns, with `__guard` and `__action`.

    Columns of removed settings are null in new rows (`__deleted` is false).
    """
    documents = batch.rows
    if "document" not in documents.columns:
        documents = typed.documents(documents, plan=batch.plan)
    added_columns = collection.added(batch.plan.schema)
    adds_deleted, keeps_document = collection.mode.adds_deleted, collection.keeps_document
    names = {*(name for name, _ in batch.plan.schema.table()), *(each.name for each in added_columns), *silver_tables.ALWAYS}
    names |= {"__deleted"} if adds_deleted else set()
    names |= {"__document"} if keeps_document else set()
    return documents.select(
        "document.*",
        *(each.value.alias(each.name) for each in added_columns),
        *(["__deleted"] if adds_deleted else []),
        "__incomplete",
        "__known",
        F.col("rescued").alias("__rescued"),
        *([F.col("after").alias("__document")] if keeps_document else []),
        "__key",
        "__sequence",
        _uncompiled(batch.number).alias("__batch"),
        *(_left(each) for each in table_type if each.name not in names),
        *_CONTROL,
    )


def _make_room(collection: SilverCollection, source: DataFrame, table_type: StructType, *, before: int) -> None:
    """Add columns that the table lacks, and widen types, for the source. A batch that is repeated after a crash finds them."""
    table = collection.writer.table
    changes = table_columns.alterations(table_type, source.drop(*_CONTROL).schema)
    if changes.impossible:
        raise errors.DecisionNeeded(
            f"{table.label}: columns cannot be changed in place ({'; '.join(changes.impossible)}). Settings of its columns were "
            "changed, a column was added by hand, or ops/schemas is an older copy than this table: undo that, or run medallion "
            f"rebuild --collection {shlex.quote(str(collection.namespace))}"
        )
    if changes.added:
        remedy = f"their values are in bronze: medallion rebuild --collection {shlex.quote(str(collection.namespace))}"
        ops, name = collection.layout.ops("schemas"), str(collection.namespace)
        dropped.check(collection.writer, ops, collection.schema, table_type, collection=name, before=before, remedy=remedy)
    for statement in changes.added:
        collection.writer.alter(statement)
    if changes.widened:
        widen(collection, changes)


def widen(collection: SilverCollection, changes: table_columns.Alteration) -> None:
    """Widen types of the table, without writing its rows again."""
    # A table that was filled from a copy may have properties of its own.
    if not definition.is_on(delta.properties(collection.spark, collection.writer.table), definition.TYPE_WIDENING):
        collection.writer.alter(f"SET TBLPROPERTIES ('{definition.TYPE_WIDENING}' = 'true')")
    for statement in changes.widened:
        collection.writer.alter(statement)


def _statement(collection: SilverCollection, batch: RowBatch) -> merge.SilverMerge:
    return merge.SilverMerge(
        columns=[name for name in batch.rows.columns if name not in _CONTROL],
        added=[each.name for each in collection.added(batch.plan.schema)],
        removes=batch.deletes is not None and collection.mode.removes_row,
        marks_deleted=batch.deletes is not None and collection.mode.marks_deleted,
        has_incomplete=batch.has_incomplete,
        is_late=batch.is_late,
        keys=() if batch.keys is None else (batch.keys,),
    )


def _left(column: StructField) -> Column:
    """The value of a column whose setting was removed."""
    value = F.lit(False) if column.name == "__deleted" else F.lit(None)
    return value.cast(column.dataType).alias(column.name)


def _uncompiled(number: int) -> Column:
    """A number as a column that is not a constant in Spark's generated code: an array's element, at an index that is 0 for every row.

    With a constant that changes for each batch, the JVM would compile the whole stage again for each.
    """
    is_never = F.col("__key") == ""
    return F.get(F.array(F.lit(number).cast("bigint")), is_never.cast("int"))
