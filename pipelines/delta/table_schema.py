"""A table's columns in Arrow, from Delta's log; rows converted to them; and a check of the table features that a reader needs.

Source: Delta's protocol, "Schema Serialization Format", "Column Invariants", "Generated Columns", "Identity Columns".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


class NotReadable(Exception):
    """The table, or this version of it, uses something that this process does not read, or is too large for it."""


_READS = frozenset(
    {"columnMapping", "deletionVectors", "typeWidening", "typeWidening-preview", "v2Checkpoint", "vacuumProtocolCheck"}
)
"""The reader features that a table may have here: `columnMapping` where it is off, `v2Checkpoint` with classic checkpoints."""


def check(action: Mapping[str, Any]) -> None:
    """Raise `NotReadable` where an action of the log requires something that is not supported here, such as another reader feature,
    column mapping, partitions or sidecar files."""
    protocol, metadata = action.get("protocol") or {}, action.get("metaData") or {}
    is_mapped = (metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none") != "none"
    is_known = protocol.get("minReaderVersion") != 2 and _READS.issuperset(protocol.get("readerFeatures") or ())
    if not is_known or is_mapped or metadata.get("partitionColumns") or action.get("sidecar"):
        raise NotReadable


_TYPES = {
    "string": pa.string(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}
_DECIMAL = re.compile(r"decimal\(([0-9]+),\s*([0-9]+)\)")


def arrow_schema(struct: Mapping[str, Any]) -> pa.Schema:
    """A table's columns in Arrow, from the JSON of the log's schema.

    A column has metadata where Delta or Spark require more than its type, of itself or of a value inside: not null, a length, an
    expression, an identity. Raises `NotReadable` for a type that no table of this project has.
    """
    return pa.schema(
        [
            pa.field(
                field["name"],
                _arrow(field["type"]),
                nullable=field["nullable"],
                metadata={"demanded": "true"} if _is_demanding(field) else None,
            )
            for field in struct["fields"]
        ]
    )


_DEMANDS = frozenset(
    {
        *("delta.generationExpression", "delta.invariants", "delta.identity.start", "CURRENT_DEFAULT"),
        "__CHAR_VARCHAR_TYPE_STRING",
    }
)


def _is_demanding(field: Mapping[str, Any]) -> bool:
    return not field["nullable"] or bool(_DEMANDS & (field.get("metadata") or {}).keys()) or _holds_demanding(field["type"])


def _holds_demanding(type_: Any) -> bool:
    """Whether Delta or Spark require more than the type of a value inside a type."""
    if isinstance(type_, str):
        return False
    if type_["type"] == "struct":
        return any(map(_is_demanding, type_["fields"]))
    contents = {"array": (("elementType", "containsNull"),), "map": (("valueType", "valueContainsNull"),)}
    inner = contents.get(type_["type"], ())
    return any(not type_.get(may_be_null, True) or _holds_demanding(type_[key]) for key, may_be_null in inner)


def _arrow(type_: Any) -> pa.DataType:
    if isinstance(type_, str):
        if decimal := _DECIMAL.fullmatch(type_):
            return pa.decimal128(*map(int, decimal.groups()))
        if type_ not in _TYPES:
            raise NotReadable
        return _TYPES[type_]
    if type_["type"] == "struct":
        return pa.struct([pa.field(each["name"], _arrow(each["type"])) for each in type_["fields"]])
    if type_["type"] == "array":
        return pa.list_(_arrow(type_["elementType"]))
    if type_["type"] == "map":
        return pa.map_(_arrow(type_["keyType"]), _arrow(type_["valueType"]))
    raise NotReadable


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """The column's values as one array. A single chunk is not copied, which `combine_chunks` would do."""
    is_one = column.num_chunks == 1 and not column.chunk(0).offset
    return column.chunk(0) if is_one else column.combine_chunks()


def with_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The table with other values in one of its columns."""
    return table.set_column(table.column_names.index(name), name, column)


def chosen(rows: pa.Table, is_chosen: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The rows for which `is_chosen` is true. They are not copied if it is true for all: that takes long with hundreds of columns."""
    return rows if pc.all(is_chosen, skip_nulls=False).as_py() else rows.filter(is_chosen)


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's rows with the columns of a schema, in its order and with its types; null where a column is missing.

    Raises `NotReadable` where a value cannot be converted.
    """
    names = {name: number for number, name in enumerate(table.column_names)}
    try:
        columns = [
            _conformed(as_array(table.column(names[field.name])), field.type)
            if field.name in names
            else pa.nulls(len(table), field.type)
            for field in schema
        ]
    except pa.ArrowException as error:
        raise NotReadable from error
    return pa.table(columns, schema=schema)


def _conformed(values: pa.Array, type_: pa.DataType) -> pa.Array:
    if values.type.equals(type_):
        return values
    if pa.types.is_struct(type_) and pa.types.is_struct(values.type):
        names = {field.name for field in values.type}
        if not names <= {field.name for field in type_}:
            raise NotReadable
        # `flatten` would add the struct's nulls to its fields. Here the mask of the struct has them.
        columns = [
            _conformed(values.field(field.name), field.type) if field.name in names else pa.nulls(len(values), field.type)
            for field in type_
        ]
        return pa.StructArray.from_arrays(columns, fields=list(type_), mask=values.is_null())
    if pa.types.is_list(type_) and pa.types.is_list(values.type):
        # Copied, because the offsets of a slice refer to values outside of it.
        plain = pa.concat_arrays([values])
        return pa.ListArray.from_arrays(
            plain.offsets, _conformed(plain.values, type_.value_type), type=type_, mask=plain.is_null()
        )
    if pa.types.is_map(type_) and pa.types.is_map(values.type):
        plain = pa.concat_arrays([values])
        items = _conformed(plain.items, type_.item_type)
        return pa.MapArray.from_arrays(plain.offsets, plain.keys, items, type=type_, mask=plain.is_null())
    return values.cast(type_)
