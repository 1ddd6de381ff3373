"""Column types: the type for each BSON type (`BASE`), and types for documents, arrays and maps.

A Decimal128 is a STRING with the digits that the server shows. If the settings pin a DECIMAL(p,s) (`pins`), it becomes
that if it fits exactly, otherwise null with its text in `__rescued` (`cast._to_decimal`). `evolution` joins two types
of one field; values are converted one by one in `cast`, and by column in `cdc_core.typed.readers`.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from cdc_core.schema.kinds import Kind
from cdc_core.sql.names import identifier


class Scalar(enum.Enum):
    """The column types without parameters; the value is the Spark SQL type unless `ddl` has another."""

    INT = "INT"
    BIGINT = "BIGINT"
    DOUBLE = "DOUBLE"
    STRING = "STRING"
    TEXT = "TEXT"  # a STRING for values of several kinds, each as its text
    BOOLEAN = "BOOLEAN"
    TIMESTAMP = "TIMESTAMP"
    BINARY = "BINARY"
    REGEX = "REGEX"
    CODE_WITH_SCOPE = "CODE_WITH_SCOPE"
    DB_POINTER = "DB_POINTER"

    __hash__ = object.__hash__  # see `Kind`


PARTS: Mapping[ColumnType, tuple[str, str]] = {
    Scalar.REGEX: ("regex", "options"),
    Scalar.CODE_WITH_SCOPE: ("code", "scope"),
    Scalar.DB_POINTER: ("$ref", "$id"),
}
"""The types that are a STRUCT of two STRINGs, and its fields."""


@dataclass(frozen=True)
class Decimal:
    """DECIMAL(precision, scale); only for pinned columns."""

    precision: int
    scale: int


@dataclass(frozen=True)
class Field:
    """A field of a document: its own name, its name in the struct, its type."""

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

    @functools.cached_property
    def most_dots(self) -> int:
        """The largest number of dots in a field's name."""
        return max((item.name.count(".") for item in self.fields), default=0)


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
"""A path into a schema: names of fields, ELEMENT for array elements, VALUE for map values."""
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
    # As in the SMT; a DECIMAL column has one scale, but a field's values may have any.
    Kind.DECIMAL: Scalar.STRING,
    Kind.STRING: Scalar.STRING,
    # 24 hex digits: readers can join on them, but do not know the type.
    Kind.OBJECT_ID: Scalar.STRING,
    Kind.SYMBOL: Scalar.STRING,
    Kind.CODE: Scalar.STRING,
    Kind.MIN_KEY: Scalar.STRING,
    Kind.MAX_KEY: Scalar.STRING,
    Kind.BOOLEAN: Scalar.BOOLEAN,
    Kind.DATE: Scalar.TIMESTAMP,
    # Only the seconds: the increment orders entries within one second.
    Kind.TIMESTAMP: Scalar.TIMESTAMP,
    Kind.BINARY: Scalar.BINARY,
    Kind.REGEX: Scalar.REGEX,
    Kind.CODE_WITH_SCOPE: Scalar.CODE_WITH_SCOPE,
    Kind.DB_POINTER: Scalar.DB_POINTER,
}
"""The column type of each scalar kind on its own."""


def type_at(type_: ColumnType, path: Sequence[str]) -> ColumnType:
    """The type of the field at a path below a struct; the parts of REGEX and similar types are strings."""
    for name in path:
        match type_:
            case Struct():
                type_ = type_.by_name[name].type
            case _:
                type_ = Scalar.STRING
    return type_


DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", re.IGNORECASE)
