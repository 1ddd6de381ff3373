"""Spark SQL's names for Arrow types; each of our tables is defined once, as an Arrow schema."""

from __future__ import annotations

import pyarrow as pa

_NAMES = {pa.string(): "STRING", pa.int64(): "BIGINT", pa.int32(): "INT", pa.bool_(): "BOOLEAN"}


def spark_type(type_: pa.DataType) -> str:
    """The Spark SQL name of an Arrow type; KeyError for a type that no table of ours has."""
    if pa.types.is_list(type_):
        return f"ARRAY<{spark_type(type_.value_type)}>"
    if pa.types.is_map(type_):
        return f"MAP<{spark_type(type_.key_type)}, {spark_type(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(f'{field.name}: {spark_type(field.type)}' for field in type_)}>"
    return _NAMES[type_]


def columns_ddl(schema: pa.Schema) -> str:
    """The schema's columns for CREATE TABLE."""
    return ", ".join(f"`{field.name}` {spark_type(field.type)}" for field in schema)
