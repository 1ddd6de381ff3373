"""The document schema of a collection: the fields of its documents, their column types, and the columns of its table.

Other modules make it wider (`evolution`), change its types (`retype`), and make rows by it (`cast`).
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from cdc_core.schema import names as column_names
from cdc_core.schema.kinds import Kind
from cdc_core.sql.names import identifier


class Scalar(enum.Enum):
    """The column types without a part that could vary; the value is the Spark SQL type."""

    INT = "INT"
    BIGINT = "BIGINT"
    DOUBLE = "DOUBLE"
    STRING = "STRING"
    TEXT = "TEXT"
    BOOLEAN = "BOOLEAN"
    TIMESTAMP = "TIMESTAMP"
    BINARY = "BINARY"
    REGEX = "REGEX"
    CODE_WITH_SCOPE = "CODE_WITH_SCOPE"
    DB_POINTER = "DB_POINTER"


PARTS: Mapping[ColumnType, tuple[str, str]] = {
    Scalar.REGEX: ("regex", "options"),
    Scalar.CODE_WITH_SCOPE: ("code", "scope"),
    Scalar.DB_POINTER: ("$ref", "$id"),
}
"""The types that are a STRUCT of two STRINGs, and its fields."""


@dataclass(frozen=True)
class Decimal:
    """DECIMAL(precision, scale): only ever pinned."""

    precision: int
    scale: int


@dataclass(frozen=True)
class Field:
    """A field of a document: its own name, its name inside the struct, its type."""

    name: str
    column: str
    type: ColumnType


@dataclass(frozen=True)
class Struct:
    """A document."""

    fields: tuple[Field, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Field]:
        """The fields by their own names."""
        return {item.name: item for item in self.fields}


@dataclass(frozen=True)
class Array:
    """An array; null elements are values that were null or did not fit."""

    element: ColumnType


@dataclass(frozen=True)
class Map:
    """A document used as a map from names to values."""

    value: ColumnType


ColumnType = Union[Scalar, Decimal, Struct, Array, Map]

Steps = tuple[str | int, ...]
"""A way into a schema: names of fields, ELEMENT for what is in an array, VALUE for what is in a map."""
ELEMENT, VALUE = 0, 1


def ddl(type_: ColumnType) -> str:
    """The type as Spark SQL writes it."""
    match type_:
        case Scalar.TEXT:
            return "STRING"
        case Scalar.REGEX | Scalar.CODE_WITH_SCOPE | Scalar.DB_POINTER:
            return f"STRUCT<{', '.join(f'{identifier(part)}: STRING' for part in PARTS[type_])}>"
        case Scalar():
            return str(type_.value)
        case Decimal(precision, scale):
            return f"DECIMAL({precision},{scale})"
        case Struct(fields):
            return f"STRUCT<{', '.join(f'{identifier(item.column)}: {ddl(item.type)}' for item in fields)}>"
        case Array(element):
            return f"ARRAY<{ddl(element)}>"
        case Map(value):
            return f"MAP<STRING, {ddl(value)}>"


BASE: Mapping[Kind, Scalar] = {
    Kind.DOUBLE: Scalar.DOUBLE,
    Kind.NON_FINITE: Scalar.DOUBLE,
    Kind.INT64: Scalar.BIGINT,
    Kind.INT32: Scalar.INT,
    Kind.DECIMAL: Scalar.STRING,
    Kind.STRING: Scalar.STRING,
    Kind.OBJECT_ID: Scalar.STRING,
    Kind.SYMBOL: Scalar.STRING,
    Kind.CODE: Scalar.STRING,
    Kind.MIN_KEY: Scalar.STRING,
    Kind.MAX_KEY: Scalar.STRING,
    Kind.BOOLEAN: Scalar.BOOLEAN,
    Kind.DATE: Scalar.TIMESTAMP,
    Kind.TIMESTAMP: Scalar.TIMESTAMP,
    Kind.BINARY: Scalar.BINARY,
    Kind.REGEX: Scalar.REGEX,
    Kind.CODE_WITH_SCOPE: Scalar.CODE_WITH_SCOPE,
    Kind.DB_POINTER: Scalar.DB_POINTER,
}
"""The column type of each scalar kind, seen alone."""


@dataclass(frozen=True)
class Column:
    """A column of the table: the path of the field that it holds, and its name."""

    path: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class DocumentSchema:
    """The fields of a collection's documents, and the table's columns, in the table's order."""

    fields: tuple[Field, ...] = ()
    columns: tuple[Column, ...] = ()
    naming: column_names.ColumnNaming = column_names.ColumnNaming()

    @property
    def struct(self) -> Struct:
        """The fields as the type of the whole document."""
        return Struct(self.fields)

    def table(self) -> tuple[tuple[str, ColumnType], ...]:
        """Names and types of the table's columns, in order, `_id` first."""
        return tuple((column.name, type_at(self.struct, column.path)) for column in self.columns)

    def table_ddl(self) -> str:
        """The table's columns as Spark SQL writes them in CREATE TABLE."""
        return ", ".join(f"{identifier(name)} {ddl(type_)}" for name, type_ in self.table())

    def to_json(self) -> str:
        """The schema as one line of JSON, the same for the same schema."""
        value = {
            "fields": [_field_to_json(item) for item in self.fields],
            "columns": [[list(column.path), column.name] for column in self.columns],
            "naming": self.naming.to_json(),
        }
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    @staticmethod
    def from_json(text: str | bytes) -> DocumentSchema:
        """The inverse of `to_json`."""
        value = json.loads(text)
        return DocumentSchema(
            fields=tuple(_field_from_json(item) for item in value["fields"]),
            columns=tuple(Column(tuple(path), name) for path, name in value["columns"]),
            naming=column_names.ColumnNaming.from_json(value["naming"]),
        )


EMPTY = DocumentSchema()


def type_at(type_: ColumnType, path: Sequence[str]) -> ColumnType:
    """The type of the field at a path below a struct; the parts of a REGEX and its like are strings."""
    for name in path:
        match type_:
            case Struct():
                type_ = type_.by_name[name].type
            case _:
                type_ = Scalar.STRING
    return type_


def _field_to_json(item: Field) -> dict[str, Any]:
    return {"name": item.name, "column": item.column, "type": _type_to_json(item.type)}


def _field_from_json(value: Mapping[str, Any]) -> Field:
    return Field(value["name"], value["column"], _type_from_json(value["type"]))


def _type_to_json(type_: ColumnType) -> Any:
    match type_:
        case Scalar():
            return type_.value
        case Decimal(precision, scale):
            return f"DECIMAL({precision},{scale})"
        case Struct(fields):
            return {"struct": [_field_to_json(item) for item in fields]}
        case Array(element):
            return {"array": _type_to_json(element)}
        case Map(value):
            return {"map": _type_to_json(value)}


def _type_from_json(value: Any) -> ColumnType:
    if isinstance(value, str):
        match_ = DECIMAL.fullmatch(value)
        return Decimal(int(match_[1]), int(match_[2])) if match_ else Scalar(value)
    if "struct" in value:
        return Struct(tuple(_field_from_json(item) for item in value["struct"]))
    if "array" in value:
        return Array(_type_from_json(value["array"]))
    return Map(_type_from_json(value["map"]))


DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", re.IGNORECASE)
