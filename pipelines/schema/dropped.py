"""Detects columns that a user dropped or renamed, which column mapping allows. Added again, they would be null in all existing rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class DocumentTable(Protocol):
    """A collection's claimed table, with its schema in `ops/schemas`."""

    @property
    def spark(self) -> SparkSession: ...

    @property
    def layout(self) -> tables.Layout: ...

    @property
    def namespace(self) -> object: ...

    @property
    def writer(self) -> Writer: ...

    @property
    def schema(self) -> schemas.SchemaVersion: ...


def check(target: DocumentTable, table_type: T.StructType, *, before: int, remedy: str) -> None:
    """Raise `DecisionNeeded` where a table, with the columns `table_type`, lacks columns or nested fields of its schema at the batch `before`.

    The table may not have the changes of later batches yet. `remedy` is the end of the message.
    """
    spark, table, name = target.spark, target.writer.table, str(target.namespace)
    if not (_missing(target.schema.schema, table_type) and delta.has_mapped_columns(spark, table)):
        return
    generations = {name: target.schema.generation}
    versions = schemas.latest(spark, target.layout.ops("schemas"), generations=generations, until=before)
    if columns := _missing(versions.get(name, schemas.SchemaVersion()).schema, table_type):
        raise errors.DecisionNeeded(
            f"{table.label}: columns are missing that it had ({', '.join(sorted(columns))}), dropped or renamed by hand; "
            f"{remedy}"
        )


def _missing(schema: DocumentSchema, table_type: T.StructType) -> list[str]:
    return [*table_columns.lacking(table_type, from_arrow_schema(pa.schema(list(exact.row_type(schema)))))]
