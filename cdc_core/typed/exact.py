"""Documents typed one by one, by `cast` on the parsed text: the reference for every faster path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

from cdc_core.extended_json import wrappers
from cdc_core.properties.unwrap import FieldValues
from cdc_core.schema import cast, column_types, kinds, retype
from cdc_core.schema.column_types import Array, ColumnType, Decimal, Map, Scalar, Struct
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.shape import Shape

RESCUED = pa.map_(pa.string(), pa.string())
"""What did not fit: dotted path -> Extended JSON text."""


def _pairs(pairs: list[tuple[str, Any]], repeated: dict[str, list[str]]) -> dict[str, Any]:
    """Of two fields with one name the last stays; earlier values are kept under the name alone."""
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            repeated.setdefault(wrappers.unescape_key(key), []).append(cast.ejson(_whole(result[key])))
        result[key] = value
    return result


def row_type(schema: DocumentSchema) -> pa.StructType:
    """The table's columns as an Arrow type."""
    return pa.struct([(name, arrow(type_)) for name, type_ in schema.table()])


def result_type(schema: DocumentSchema) -> pa.StructType:
    """The type of the rows of `rows`."""
    return pa.struct([("document", row_type(schema)), ("rescued", RESCUED), ("unreadable", pa.bool_())])


def rows(texts: pa.Array, schema: DocumentSchema) -> pa.StructArray:
    """Each text as a struct of `document`, `rescued`, `unreadable`; null for a null."""
    type_ = result_type(schema)
    found = [_row(text.as_py(), schema) for text in texts]
    documents = _columns([None if row is None else row["document"] for row in found], type_.field("document").type)
    others = pa.array(found, pa.struct([("rescued", RESCUED), ("unreadable", pa.bool_())]))
    columns = [documents, *(others.field(number) for number in range(2))]
    return pa.StructArray.from_arrays(columns, fields=[*type_], mask=others.is_null())


def _columns(documents: Sequence[dict[str, Any] | None], type_: pa.StructType) -> pa.StructArray:
    """The documents as a struct of this type; columns that none of them has cost nearly nothing."""
    names = set().union(*filter(None, documents))
    present = pa.array(documents, pa.struct([item for item in type_ if item.name in names]))
    columns = [present.field(item.name) if item.name in names else pa.nulls(len(documents), item.type) for item in type_]
    return pa.StructArray.from_arrays(columns, fields=[*type_], mask=present.is_null())


def _row(text: str | None, schema: DocumentSchema) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        document, repeated = parsed(text)
    except (ValueError, RecursionError):
        return {"document": None, "rescued": None, "unreadable": True}
    row, rescued = cast.present(document, schema)
    _add_repeated(rescued, repeated)
    return {"document": row, "rescued": list(rescued.items()) or None, "unreadable": False}


def whole_row(
    document: Mapping[str, Any], repeated: Mapping[str, Sequence[str]], schema: DocumentSchema
) -> tuple[dict[str, Any], dict[str, str]]:
    """`cast.row` of a document that `parsed` returned, with the earlier values of repeated fields among what did not fit."""
    row, rescued = cast.row(document, schema)
    _add_repeated(rescued, repeated)
    return row, rescued


def _add_repeated(rescued: dict[str, str], repeated: Mapping[str, Sequence[str]]) -> None:
    for name, texts in repeated.items():
        number = 1  # a name may be repeated in each of many thousand documents
        for text in texts:
            number = cast.rescue(rescued, name, text, taken=number)


def parsed(text: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """One document's text as parsed EJSON, and by name the earlier values of repeated fields, in order.

    Of two fields with one name the last stays, as in every BSON library. A lone surrogate becomes U+FFFD. Raises ValueError if the text
    is not a JSON object.
    """
    repeated: dict[str, list[str]] = {}
    # Not orjson: it silently keeps only the last of two fields with one name, and refuses lone surrogates.
    document = json.loads(text, object_pairs_hook=lambda pairs: _pairs(pairs, repeated))
    if not isinstance(document, dict):
        raise ValueError("a document is a JSON object")
    return (_whole(document) if "\\ud" in text.lower() else document), repeated


def is_document(text: str) -> bool:
    """Whether `parsed` accepts the text."""
    try:
        return isinstance(orjson.loads(text), dict)  # accepts less, and is many times faster
    except ValueError:
        pass
    try:
        parsed(text)
    except (ValueError, RecursionError):
        return False
    return True


def _whole(value: Any) -> Any:
    """The value with lone surrogates replaced."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def observed(shape: Shape, text: str, mark: str, *, values: FieldValues) -> dict[str, Any] | None:
    """Adds a document to a shape; returns the document, or None if it cannot be read."""
    try:
        document, _ = parsed(text)
        shape.see(kinds.laid_out(document, values), mark)
    except (ValueError, RecursionError):
        return None
    return document


def conflict_batches(schema_json: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow` over paths and texts of rescued values: each `Conflict` with the schema as JSON, once per
    partition.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = DocumentSchema.from_json(schema_json)
        conflicts: set[retype.Conflict] = set()
        for batch in batches:
            for path, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
                conflicts.update(retype.conflicts(schema, path, text))
        yield pa.RecordBatch.from_pydict({"conflict": pa.array([conflict.to_json() for conflict in conflicts], pa.string())})

    return look


def arrow(type_: ColumnType) -> pa.DataType:
    """The Arrow type of a column type, as Spark reads it."""
    match type_:
        case Struct(fields):
            return pa.struct([(item.column, arrow(item.type)) for item in fields])
        case Array(element):
            return pa.list_(arrow(element))
        case Map(value):
            return pa.map_(pa.string(), arrow(value))
        case Decimal(precision, scale):
            return pa.decimal128(precision, scale)
        case Scalar.REGEX | Scalar.CODE_WITH_SCOPE | Scalar.DB_POINTER:
            return pa.struct([(part, pa.string()) for part in column_types.PARTS[type_]])
        case _:
            return _ARROW[type_]


_ARROW = {
    Scalar.INT: pa.int32(),
    Scalar.BIGINT: pa.int64(),
    Scalar.DOUBLE: pa.float64(),
    Scalar.STRING: pa.string(),
    Scalar.TEXT: pa.string(),
    Scalar.BOOLEAN: pa.bool_(),
    Scalar.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Scalar.BINARY: pa.binary(),
}
