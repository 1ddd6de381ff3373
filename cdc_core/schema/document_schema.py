"""The document schema of a collection: the fields of its documents, and the columns of its table.

`evolution` widens it, `retype` changes its types, and `cast` makes rows with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core.schema import names as column_names
from cdc_core.schema.column_types import DECIMAL, Array, ColumnType, Decimal, Field, Map, Scalar, Struct, type_at


@dataclass(frozen=True)
class Column:
    """A column of the table: the path of its field, and its name."""

    path: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class DocumentSchema:
    """The fields of a collection's documents, and the table's columns in table order."""

    fields: tuple[Field, ...] = ()
    columns: tuple[Column, ...] = ()
    naming: column_names.ColumnNaming = column_names.ColumnNaming()

    @functools.cached_property
    def struct(self) -> Struct:
        """The fields as the type of the whole document; cached for its `by_name`."""
        return Struct(self.fields)

    def table(self) -> tuple[tuple[str, ColumnType], ...]:
        """Names and types of the table's columns, in order, `_id` first."""
        return tuple((column.name, type_at(self.struct, column.path)) for column in self.columns)

    def to_json(self) -> str:
        """The schema as one line of JSON; equal schemas give equal text."""
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
