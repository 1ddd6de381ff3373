"""Detects columns that a user dropped or renamed, which column mapping allows. Added again, they would be null in all existing rows."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema

from cdc_core import errors
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.sql import table_columns
from cdc_core.tables import layout as tables
from cdc_core.typed import exact
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.schema import log as schemas


def check(
    writer: Writer,
    table: tables.TableRef,
    current: schemas.SchemaVersion,
    table_type: T.StructType,
    *,
    collection: str,
    before: int,
    remedy: str,
) -> None:
    """Raise `DecisionNeeded` where the writer's table, with the columns `table_type`, lacks columns or nested fields of its schema at the
    batch `before`; `table` and `current` are as in `schemas.record`.

    The table may not have the changes of later batches yet. `remedy` is the end of the message.
    """
    if not (_missing(current.schema, table_type) and delta.has_mapped_columns(writer.spark, writer.table)):
        return
    versions = schemas.latest(writer.spark, table, generations={collection: current.generation}, until=before)
    if columns := _missing(versions.get(collection, schemas.SchemaVersion()).schema, table_type):
        raise errors.DecisionNeeded(
            f"{writer.table.label}: columns are missing that it had ({', '.join(sorted(columns))}), dropped or renamed by hand; "
            f"{remedy}"
        )


def _missing(schema: DocumentSchema, table_type: T.StructType) -> list[str]:
    return [*table_columns.lacking(table_type, from_arrow_schema(pa.schema(list(exact.row_type(schema)))))]
