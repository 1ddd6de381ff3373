"""The last steps of a batch: rows of the table's columns, and the one commit that holds them with the position.

The commit is the cheapest that is right: an append to a table without rows, an upsert by deletion vectors where every row is
newer than what the table holds, and otherwise a MERGE guarded by `__sequence`.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.silver import merge, reduce
from cdc_core.sql import table_columns
from cdc_core.typed import plan as typed
from pipelines.bronze import survey
from pipelines.delta import query_execution, upsert
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
"""A MERGE reads its source up to three times, twice for the keys alone: it is computed before, here and not by Delta."""

_ENGINE = ("__guard", "__action")
"""What a row says to the commit, and the table does not hold."""


def table_rows(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: the rows with the table's columns, which are added or widened where they are missing, `__guard` and
    `__action`."""
    held = collection.rows().schema
    source = _typed(collection, batch, held)
    _make_room(collection, source, held, before=batch.range_.after)
    return replace(batch, rows=source)


def committed(collection: SilverCollection, batch: RowBatch) -> RowBatch:
    """Step: the rows are in the table, in one commit with `next_position`.

    Raises `upsert.NotCommitted` where `unless` is true, or could only be known after the commit; then nothing was committed.
    """
    if collection.is_empty():
        # Of documents that are deleted again within the first range the table gets no row; `remembered` has noted their
        # deletes.
        first = batch.rows.where(f"`__action` <> '{reduce.Action.REMOVE.value}'").drop(*_ENGINE)
        _append(collection, first, batch)
        return batch
    if _is_upsert(collection, batch) and _upserted(collection, batch):
        return batch
    _merge(collection, batch)
    return batch


STEPS: tuple[Step, ...] = (deletes.remembered, table_rows, committed)
"""From reduced rows to the commit."""


def _merge(collection: SilverCollection, batch: RowBatch) -> None:
    # Computed before the statement: a MERGE that is tried again, or reads its source twice, must find the same rows.
    with query_execution.held(batch.rows) as rows:
        # What was observed is known where the rows are computed by now.
        if batch.unless is not None and (not query_execution.holds_rows(collection.spark) or batch.unless()):
            raise upsert.NotCommitted
        if batch.has_incomplete and not collection.keeps_document and rows.where("`__incomplete`").isEmpty():
            batch = replace(batch, has_incomplete=False)  # which reads and writes much less of the table
        statement = _statement(collection, batch).merge()
        confs = MERGE_CONFS | dict(batch.merge_confs)
        collection.writer.merge(
            rows, statement, to=batch.next_position.to, extra=collection.said(batch.next_position), confs=confs
        )


def _append(collection: SilverCollection, rows: DataFrame, batch: RowBatch) -> None:
    """Append the table's first rows."""
    writer, to, said = collection.writer, batch.next_position.to, collection.said(batch.next_position)
    if batch.unless is None:
        writer.append(rows, to=to, extra=said)
    elif writer.upsert(rows, touched=None, to=to, extra=said, unless=batch.unless) is None:
        raise upsert.NotCommitted  # an append by Spark commits whatever it has written


def _is_upsert(collection: SilverCollection, batch: RowBatch) -> bool:
    """Whether every row is newer than what the table holds of its key, and replaces it whole or removes it."""
    # In each of these cases what the table holds decides what a row becomes, and only a MERGE looks at it.
    has_to_look = batch.is_late or batch.has_incomplete or batch.touched is None or batches.keeps_last(collection, batch)
    if has_to_look or not collection.writer.is_direct:
        return False
    # Read again: `table_rows` may have altered the table.
    held = collection.rows().schema
    return table_columns.is_same(held, batch.rows.drop(*_ENGINE).schema)


def _upserted(collection: SilverCollection, batch: RowBatch) -> bool:
    documents = batch.rows
    if batch.deletes is not None:
        # A removed key is in `touched` and not in `rows`: it is taken out, and nothing is put in.
        documents = documents.where(F.col("__action") == reduce.Action.DOCUMENT.value)
    rows = documents.drop(*_ENGINE)
    assert batch.touched is not None
    done = collection.writer.upsert(
        rows,
        touched=batch.touched,
        pending_deletes=batch.pending_deletes,
        to=batch.next_position.to,
        extra=collection.said(batch.next_position),
        confs=MERGE_CONFS,
        unless=batch.unless,
        few=batch.counts.events <= survey.MAX_DRIVER_ROWS,
    )
    return done is not None


def _typed(collection: SilverCollection, batch: RowBatch, held: StructType) -> DataFrame:
    """Rows of the table's columns, with `__guard` and `__action`.

    A column that the settings no longer ask for is null in new rows (`__deleted` is false).
    """
    documents = batch.rows
    if "document" not in documents.columns:
        documents = typed.documents(documents, plan=batch.plan)
    added = collection.added(batch.plan.schema)
    adds_deleted, keeps_document = collection.mode.adds_deleted, collection.keeps_document
    given = {*(name for name, _ in batch.plan.schema.table()), *(each.name for each in added), *silver_tables.ALWAYS}
    given |= {"__deleted"} if adds_deleted else set()
    given |= {"__document"} if keeps_document else set()
    return documents.select(
        "document.*",
        *(each.value.alias(each.name) for each in added),
        *(["__deleted"] if adds_deleted else []),
        "__incomplete",
        "__known",
        F.col("rescued").alias("__rescued"),
        *([F.col("after").alias("__document")] if keeps_document else []),
        "__key",
        "__sequence",
        _uncompiled(batch.number).alias("__batch"),
        *(_left(each) for each in held if each.name not in given),
        *_ENGINE,
    )


def _make_room(collection: SilverCollection, source: DataFrame, held: StructType, *, before: int) -> None:
    """Add or widen the table's columns where the source needs it.

    Killed after any of them, the batch comes again and finds them there.
    """
    table = collection.writer.table
    changes = table_columns.alterations(held, source.drop(*_ENGINE).schema)
    if changes.impossible:
        raise errors.DecisionNeeded(
            f"{table.label}: columns cannot be changed in place ({'; '.join(changes.impossible)}); run medallion "
            "rebuild for this table, or undo the change of the settings"
        )
    if changes.added:
        remedy = f"their values are in bronze: medallion rebuild --collection {shlex.quote(str(collection.namespace))}"
        dropped.check(collection, held, before=before, remedy=remedy)
    for statement in changes.statements:
        collection.writer.alter(statement)


def _statement(collection: SilverCollection, batch: RowBatch) -> merge.SilverMerge:
    return merge.SilverMerge(
        columns=[name for name in batch.rows.columns if name not in _ENGINE],
        added=[each.name for each in collection.added(batch.plan.schema)],
        removes=batch.deletes is not None and collection.mode.removes_row,
        marks_deleted=batch.deletes is not None and collection.mode.marks_deleted,
        has_incomplete=batch.has_incomplete,
        is_late=batch.is_late,
        keys=() if batch.keys is None else (batch.keys,),
    )


def _left(column: StructField) -> Column:
    """The value of a column that no setting asks for any more."""
    value = F.lit(False) if column.name == "__deleted" else F.lit(None)
    return value.cast(column.dataType).alias(column.name)


def _uncompiled(number: int) -> Column:
    """A number that changes with each batch, kept out of the code that Spark compiles: as an element of an array, by an
    index that is 0 for every row. With the number in it, the JVM would optimize the whole stage anew for each batch."""
    is_never = F.col("__key") == ""
    return F.get(F.array(F.lit(number).cast("bigint")), is_never.cast("int"))
