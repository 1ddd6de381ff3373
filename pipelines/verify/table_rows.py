"""The table's side of a comparison: a version of silver or gold as keys and digests, computed on executors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.silver import merge, reduce
from cdc_core.sql import names, table_columns
from cdc_core.tables import layout as tables
from cdc_core.typed import exact
from cdc_core.verify import equality
from pipelines.bronze import registry
from pipelines.delta import query_execution, table_history
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from cdc_core.settings.parse import CollectionSettings

HELD = pa.schema([("key", pa.string()), ("digest", pa.int64())])
HELD_DDL = "key STRING, digest BIGINT"


@dataclass(frozen=True)
class TableVersion:
    """One version of a table; `version` is None if there is no table yet. `added` are silver's columns that `add.fields` and `add.headers`
    ever made."""

    spark: SparkSession
    table: tables.TableRef
    version: int | None
    options: CollectionSettings
    added: tuple[str, ...] = ()

    def current(self) -> DataFrame | None:
        """The rows that are documents, without those marked as deleted or whose document was never known; None without a table."""
        if self.version is None:
            return None
        rows = self.spark.sql(f"SELECT * FROM {self.table} VERSION AS OF {self.version}")
        # A row without a key must be reported; null would not join with anything.
        rows = rows.withColumn("__key", F.coalesce("__key", F.lit("")))
        # Only silver has the column: gold has no rows without a known document.
        if "__incomplete" in rows.columns:
            rows = rows.where(f"NOT {merge.HAS_NO_BASE}")
        return rows.where("NOT coalesce(`__deleted`, false)") if "__deleted" in rows.columns else rows

    def digests(self, schema: DocumentSchema) -> DataFrame:
        """Every row's key and digest, as `HELD`."""
        rows = self.current()
        if rows is None:
            return self.spark.createDataFrame([], HELD_DDL)
        selected_rows = self._chosen(rows, schema)
        # Renamed: mapInArrow would take a dot in a column's name for a field of a struct.
        renamed_rows = selected_rows.toDF(*(f"c{number}" for number in range(len(selected_rows.columns))))
        return renamed_rows.mapInArrow(
            functools.partial(_digests, self._part(schema), tuple(selected_rows.columns)), HELD_DDL
        )

    def some(self, keys: Sequence[str], schema: DocumentSchema) -> dict[str, list[equality.TableRow]]:
        """The rows of these keys, by key."""
        rows = self.current()
        if rows is None or not keys:
            return {}
        key_rows = query_execution.with_values(rows, "__key", keys)
        by_key: dict[str, list[equality.TableRow]] = {}
        part = self._part(schema)
        for batch in self._chosen(key_rows, schema).toArrow().to_batches():
            for key, row in part.rows(batch):
                by_key.setdefault(key, []).append(row)
        return by_key

    def bare(self, keys: Sequence[str]) -> dict[str, list[equality.TableRow]]:
        """The rows of these keys, by key, without their values."""
        rows = self.current()
        if rows is None or not keys:
            return {}
        key_rows = query_execution.with_values(rows.select("__key"), "__key", keys).groupBy("__key").count().collect()
        return {row["__key"]: [equality.TableRow({}, {}, {})] * row["count"] for row in key_rows}

    def compared(self, text: str, row: equality.TableRow, schema: DocumentSchema) -> tuple[equality.Difference, ...]:
        """The differences of a source document and a row."""
        return equality.differences(equality.ExactDocument.read(text), row, schema)

    def sampled(self, documents: int) -> list[str]:
        """The keys of this many random rows."""
        rows = self.current()
        if rows is None:
            return []
        return [row["__key"] for row in rows.select("__key").orderBy(F.rand()).limit(documents).collect()]

    def _chosen(self, rows: DataFrame, schema: DocumentSchema) -> DataFrame:
        """`__key`, `__rescued` and the columns to compare: all but hidden ones, also those that the schema lacks."""
        hidden = self._hidden(schema) - {"__key", "__rescued"}
        return rows.select(*(F.col(names.identifier(name)) for name in rows.columns if name not in hidden))

    def _hidden(self, schema: DocumentSchema) -> set[str]:
        """The columns that are not a document's: the engine's, and those of `add.fields` and `add.headers`, also of earlier settings."""
        documents = {name for name, _ in schema.table()}
        added = {each.name for each in reduce.added(self.options.unwrap, documents=documents)}
        return {*column_names.ENGINE, *((added | set(self.added)) - documents)}

    def _part(self, schema: DocumentSchema) -> _Parts:
        return _Parts(frozenset(name for name, _ in schema.table()))


@dataclass(frozen=True)
class _Parts:
    """Converts rows of the table for the comparison; `documents` are the columns of the schema."""

    documents: frozenset[str]

    def rows(self, batch: pa.RecordBatch) -> Iterator[tuple[str, equality.TableRow]]:
        """The key of each row, and the row."""
        cells = {
            name: _values(batch.column(number), batch.schema.field(number).type)
            for number, name in enumerate(batch.schema.names)
        }
        keys = cells.pop("__key")
        rescued = cells.pop("__rescued", [None] * len(keys))
        columns = {name: cells[name] for name in cells if name in self.documents}
        others = {name: cells[name] for name in cells if name not in self.documents}
        for number, key in enumerate(keys):
            yield (
                key,
                equality.TableRow(
                    {name: values[number] for name, values in columns.items()},
                    rescued[number] or {},
                    {name: values[number] for name, values in others.items()},
                ),
            )


def _digests(part: _Parts, columns: tuple[str, ...], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        digests = [
            (key, equality.digest(row))
            for key, row in part.rows(pa.RecordBatch.from_arrays(batch.columns, names=list(columns)))
        ]
        arrays = [
            pa.array([key for key, _ in digests], pa.string()),
            pa.array([digest for _, digest in digests], pa.int64()),
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=HELD)


def _values(column: pa.Array, type_: pa.DataType) -> list[Any]:
    """The cells as Python values, with maps as dicts, so that an empty map differs from an empty array."""
    values = column.to_pylist()
    return [_mapped(value, type_) for value in values] if _has_map(type_) else values


def _has_map(type_: pa.DataType) -> bool:
    if pa.types.is_map(type_):
        return True
    if pa.types.is_struct(type_):
        return any(_has_map(type_.field(number).type) for number in range(type_.num_fields))
    return (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and _has_map(type_.value_type)


def _mapped(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(type_):
        return {name: _mapped(item, type_.item_type) for name, item in value}
    if pa.types.is_struct(type_):
        kinds: Mapping[str, pa.DataType] = {
            type_.field(number).name: type_.field(number).type for number in range(type_.num_fields)
        }
        return {name: _mapped(item, kinds[name]) for name, item in value.items()}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [_mapped(item, type_.value_type) for item in value]
    return value


def has_columns_of(schema: DocumentSchema, columns: StructType) -> bool:
    """Whether a table with these columns has those of the schema, with their types or wider ones."""
    row_type = from_arrow_schema(pa.schema(list(exact.row_type(schema))))
    lacks = table_columns.alterations(columns, row_type)
    return not (lacks.statements or lacks.impossible)


def newest(
    spark: SparkSession, table: tables.TableRef, options: CollectionSettings, *, silver: tables.TableRef
) -> TableVersion:
    """The table as it is now; `silver` is its collection's silver table, whose commits name the columns that settings added.

    Raises `TableNotOurs`.
    """
    if delta.found(spark, table) is None:
        return TableVersion(spark, table, None, options)
    version = table_history.version(spark, table)
    return TableVersion(spark, table, version, options, registry.silver_position(spark, silver).added)
