"""The unwrap over Spark DataFrames with Debezium's events, for example from Kafka or from files.

    events = spark.read.format("kafka")…            # columns key and value, text or bytes
    rows = frames.unwrapped(events, options=unwrap_options.parse({"delete.tombstone.handling.mode": "rewrite"}))

All rows get one schema, so events of several collections should be separated before. The rows are computed by
`cdc_core.unwrap.new_document_state`, record by record in Arrow batches (about ten thousand events per second and core).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import pyarrow as pa

from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.schema import cast, column_types, document_schema, evolution
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.shape import Shape
from cdc_core.sql.names import identifier
from cdc_core.typed import exact
from cdc_core.unwrap import new_document_state, printed_records
from cdc_core.unwrap.change_event import Json
from cdc_core.unwrap.new_document_state import ExtractedRecord, UnchangedRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMING = column_names.ColumnNaming(reserved=frozenset({printed_records.RESCUED}))
_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))


def unwrapped(df: DataFrame, *, options: UnwrapOptions, schema: DocumentSchema | None = None) -> DataFrame:
    """The events as rows, without dropped ones; order and partitions are kept.

    In: `value` (text or bytes), and `key` if there is one. Out:

        key         STRING, the key's JSON with its `id` typed
        value       STRUCT of the document's columns and `__rescued` MAP<STRING, STRING>; null for a delete
        deleted     BOOLEAN, whether the event is a delete or a tombstone
        headers     ARRAY<STRUCT<name, value>>, other values than text as JSON
        collection  STRING, `db.collection`
        passed      STRING, the unchanged value of a record that is not a change event; the columns above are null
        error       STRING, why an event could not be read; `passed` has its value

    Without a `schema` this call runs a Spark job over the events to find it (`schema_of`). The result is lazy. Values
    that do not fit a given schema are rescued.
    """
    table = schema_of(df, options=options) if schema is None else schema

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arrow = _arrow_schema(table)
        for batch in batches:
            all_rows = [_row(result, value, table) for result, value in _results(batch, options)]
            remaining_rows = [row for row in all_rows if row is not None]
            yield pa.RecordBatch.from_pylist(remaining_rows, schema=arrow)

    return _texts(df).mapInArrow(rows, _ddl(table))


def schema_of(df: DataFrame, *, options: UnwrapOptions) -> DocumentSchema:
    """The schema of the events' documents; the first type of a field counts, in the first partition that has it."""

    def shapes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        shape = Shape()
        # Marks sort by partition and row, so the first type of a field does not depend on which task ends first.
        for number, document in enumerate(_documents(batches, options)):
            shape.see(document, f"{partition:06d}.{number:012d}")
        yield pa.RecordBatch.from_pydict({"shape": [msgspec.json.encode(shape).decode()]})

    merged_shape = Shape()
    for row in _texts(df).mapInArrow(shapes, "shape STRING").collect():
        merged_shape.add(msgspec.json.decode(row["shape"], type=Shape))
    schema, _ = evolution.join(document_schema.EMPTY, merged_shape, naming=_NAMING)
    return schema


def _texts(df: DataFrame) -> DataFrame:
    """Keys and values as bytes: a topic may hold invalid UTF-8, which Arrow refuses in a STRING."""
    key = "key" if "key" in df.columns else "NULL"
    return df.selectExpr(*(f"CAST(CAST({column} AS STRING) AS BINARY)" for column in (key, "value")))


def _documents(batches: Iterable[pa.RecordBatch], options: UnwrapOptions) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for result, _ in _results(batch, options):
            if isinstance(result, ExtractedRecord) and result.document is not None:
                yield result.document


def _results(batch: pa.RecordBatch, options: UnwrapOptions) -> Iterator[tuple[object, str | None]]:
    """The result of each event, or the `ValueError` of one that cannot be read, with its original value."""
    for key, value in zip(_decoded(batch.column(0)), _decoded(batch.column(1))):
        try:
            yield new_document_state.extracted(_event(key, value), options=options), value
        except ValueError as error:
            yield error, value
        except RecursionError:
            yield ValueError("it is nested too deeply"), value


def _decoded(column: pa.Array) -> Iterator[str | None]:
    """Texts, with U+FFFD for invalid UTF-8."""
    return (None if value is None else value.decode("utf-8", "replace") for value in column.to_pylist())


def _event(key: str | None, value: str | None) -> Json:
    record = None if value is None else orjson.loads(value)
    # A value alone may be a record that contains its key; a key alone is a tombstone.
    return {"key": key, "value": record} if key is not None or value is None else record


def _row(result: object, value: str | None, schema: DocumentSchema) -> dict[str, Any] | None:
    match result:
        case ExtractedRecord():
            return _typed(result, schema)
        case UnchangedRecord():
            return {"passed": value}
        case ValueError():
            return {"passed": value, "error": str(result)}
        case _:
            return None


def _typed(result: ExtractedRecord, schema: DocumentSchema) -> dict[str, Any]:
    return {
        "key": None if result.key is None else orjson.dumps(printed_records.printed_key(result.key)).decode(),
        "value": None if result.document is None else _value(result, schema),
        "deleted": result.is_delete,
        "headers": [{"name": name, "value": _header(value)} for name, value in result.headers],
        "collection": result.collection or None,
    }


def _value(result: ExtractedRecord, schema: DocumentSchema) -> dict[str, Any]:
    values, rescued = cast.row(result.document, schema)
    rescued_values = {**result.displaced}
    for path, text in rescued.items():
        cast.rescue(rescued_values, path, text)
    return {**values, printed_records.RESCUED: rescued_values or None}


def _header(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


# --- schemas ---------------------------------------------------------------------------------------------------------


def _ddl(schema: DocumentSchema) -> str:
    rescued = f"{printed_records.RESCUED}: MAP<STRING, STRING>"
    columns = [f"{identifier(name)}: {column_types.ddl(type_)}" for name, type_ in schema.table()]
    return (
        f"key STRING, value STRUCT<{', '.join([*columns, rescued])}>, deleted BOOLEAN, "
        "headers ARRAY<STRUCT<name: STRING, value: STRING>>, collection STRING, passed STRING, error STRING"
    )


def _arrow_schema(schema: DocumentSchema) -> pa.Schema:
    columns = [(name, exact.arrow(type_)) for name, type_ in schema.table()]
    value = pa.struct([*columns, (printed_records.RESCUED, pa.map_(pa.string(), pa.string()))])
    texts = [(name, pa.string()) for name in ("collection", "passed", "error")]
    return pa.schema([("key", pa.string()), ("value", value), ("deleted", pa.bool_()), ("headers", _HEADERS), *texts])
