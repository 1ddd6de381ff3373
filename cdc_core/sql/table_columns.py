"""A table's columns as Spark types: what they lack compared to others, and the ALTER statements for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql import types as T

from cdc_core.sql.names import identifier


@dataclass(frozen=True)
class Alteration:
    """What a table's columns lack: clauses of ALTER TABLE statements, and changes that no statement can make."""

    added: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()

    @property
    def statements(self) -> tuple[str, ...]:
        """All statements, in a working order."""
        return (*self.added, *self.widened)


def is_same(table_type: T.DataType, row_type: T.DataType) -> bool:
    """Whether rows of both types can be in files of one table: the same names and types, in any order."""
    match table_type, row_type:
        case T.StructType(), T.StructType():
            fields = {field.name: field.dataType for field in row_type}
            return fields.keys() == {field.name for field in table_type} and all(
                is_same(field.dataType, fields[field.name]) for field in table_type
            )
        case T.ArrayType(), T.ArrayType():
            return is_same(table_type.elementType, row_type.elementType)
        case T.MapType(), T.MapType():
            return is_same(table_type.keyType, row_type.keyType) and is_same(table_type.valueType, row_type.valueType)
        case _:
            return bool(table_type == row_type)


def are_alike(table_type: T.StructType, row_type: T.StructType) -> bool:
    """Whether both have the same columns of the same types, with nested fields in the same order, because Spark unions
    those by position.
    """
    return {field.name: ddl(field.dataType) for field in table_type} == {
        field.name: ddl(field.dataType) for field in row_type
    }


def fields_by_name(struct: T.StructType) -> dict[str, T.StructField]:
    """The fields of a struct by name; `StructType` searches all fields for each name, which takes seconds for ten thousand
    columns.
    """
    return {field.name: field for field in struct.fields}


def alterations(current: T.StructType, wanted: T.StructType) -> Alteration:
    """The statements after which the columns of `current` can hold those of `wanted`; none if they already can.

    New columns are placed after their neighbour in `wanted`, new fields at the end of their struct. A type only changes
    to one that Delta can widen to in place. Columns that `wanted` lacks stay as they are; with the name of a new one,
    but for its case, they are in its way.
    """
    added: list[str] = []
    widened: list[str] = []
    impossible: list[str] = []
    previous: str | None = None
    current_fields = fields_by_name(current)
    others = {name.lower(): name for name in current_fields}  # Delta compares names without case
    for field in wanted.fields:
        if field.name in current_fields:
            _compare(current_fields[field.name].dataType, field.dataType, identifier(field.name), added, widened, impossible)
        elif (other := others.get(field.name.lower())) is not None:
            impossible.append(f"{identifier(field.name)} beside {identifier(other)}")
        else:
            position = "FIRST" if previous is None else f"AFTER {identifier(previous)}"
            added.append(f"{identifier(field.name)} {ddl(field.dataType)} {position}")
        previous = field.name
    add_columns = (f"ADD COLUMNS ({', '.join(added)})",) if added else ()
    return Alteration(add_columns, tuple(f"ALTER COLUMN {change}" for change in widened), tuple(impossible))


def lacking(current: T.DataType, wanted: T.DataType, path: str = "") -> Iterator[str]:
    """The columns of `wanted`, and their nested fields, that `current` lacks, as dotted paths."""
    match current, wanted:
        case T.StructType(), T.StructType():
            current_fields = fields_by_name(current)
            for field in wanted.fields:
                field_path = f"{path}.{field.name}" if path else field.name
                if field.name in current_fields:
                    yield from lacking(current_fields[field.name].dataType, field.dataType, field_path)
                else:
                    yield field_path
        case T.ArrayType(), T.ArrayType():
            yield from lacking(current.elementType, wanted.elementType, path)
        case T.MapType(), T.MapType():
            yield from lacking(current.valueType, wanted.valueType, path)


def grown(current: T.StructType, wanted: T.StructType) -> T.StructType | None:
    """The columns of `current` plus those that it lacks; None if a type would have to change."""
    change = alterations(current, wanted)
    if change.widened or change.impossible:
        return None
    return with_added(current, wanted) if change.added else current


def with_added(current: T.StructType, wanted: T.StructType) -> T.StructType:
    """The columns of `current` plus what `alterations` would add, in the same places."""
    fields = fields_by_name(current)
    new_fields: dict[str | None, list[T.StructField]] = {}
    previous: str | None = None
    for field in wanted.fields:
        if field.name in fields:
            current_field = fields[field.name]
            fields[field.name] = T.StructField(
                current_field.name,
                _grown(current_field.dataType, field.dataType),
                current_field.nullable,
                current_field.metadata,
            )
            previous = field.name
        else:
            new_fields.setdefault(previous, []).append(T.StructField(field.name, _unmarked(field.dataType)))
    groups = ([field, *new_fields.get(field.name, ())] for field in fields.values())
    return T.StructType([*new_fields.get(None, ()), *itertools.chain.from_iterable(groups)])


def _grown(current: T.DataType, wanted: T.DataType) -> T.DataType:
    """A column's type plus the struct fields that it lacks."""
    match current, wanted:
        case T.StructType(), T.StructType():
            types = {field.name: field.dataType for field in wanted}
            grown_fields = [
                T.StructField(
                    field.name, _grown(field.dataType, types.get(field.name, field.dataType)), field.nullable, field.metadata
                )
                for field in current
            ]
            names = {*current.names}
            new_fields = [
                T.StructField(field.name, _unmarked(field.dataType)) for field in wanted if field.name not in names
            ]
            return T.StructType([*grown_fields, *new_fields])
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_grown(current.elementType, wanted.elementType), current.containsNull)
        case T.MapType(), T.MapType():
            return T.MapType(current.keyType, _grown(current.valueType, wanted.valueType), current.valueContainsNull)
        case _:
            return current


def widened(table_type: T.StructType, row_type: T.StructType) -> T.StructType:
    """The held columns in their order, each with a type that takes its values and those of the wanted column."""
    types = {field.name: field.dataType for field in row_type}
    return T.StructType([T.StructField(field.name, _wider(field.dataType, types.get(field.name))) for field in table_type])


def _wider(table_type: T.DataType, row_type: T.DataType | None) -> T.DataType:
    match table_type, row_type:
        case T.StructType(), T.StructType():
            return widened(table_type, row_type)
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_wider(table_type.elementType, row_type.elementType))
        case T.MapType(), T.MapType():
            return T.MapType(table_type.keyType, _wider(table_type.valueType, row_type.valueType))
        case _:
            return row_type if row_type is not None and _widens(table_type, row_type) else table_type


def _unmarked(type_: T.DataType) -> T.DataType:
    """The type without its fields' metadata: Delta records a column's widening there, which must not get into another
    table.
    """
    match type_:
        case T.StructType():
            return T.StructType([T.StructField(field.name, _unmarked(field.dataType)) for field in type_])
        case T.ArrayType():
            return T.ArrayType(_unmarked(type_.elementType))
        case T.MapType():
            return T.MapType(_unmarked(type_.keyType), _unmarked(type_.valueType))
        case _:
            return type_


def _compare(
    current: T.DataType, wanted: T.DataType, path: str, added: list[str], widened: list[str], impossible: list[str]
) -> None:
    if isinstance(current, T.StructType) and isinstance(wanted, T.StructType):
        current_fields = fields_by_name(current)
        for field in wanted.fields:
            field_path = f"{path}.{identifier(field.name)}"
            if field.name in current_fields:
                _compare(current_fields[field.name].dataType, field.dataType, field_path, added, widened, impossible)
            else:
                added.append(f"{field_path} {ddl(field.dataType)}")
    elif isinstance(current, T.ArrayType) and isinstance(wanted, T.ArrayType):
        _compare(current.elementType, wanted.elementType, f"{path}.element", added, widened, impossible)
    elif isinstance(current, T.MapType) and isinstance(wanted, T.MapType):
        _compare(current.valueType, wanted.valueType, f"{path}.value", added, widened, impossible)
    elif current != wanted:
        if _widens(current, wanted):
            widened.append(f"{path} TYPE {ddl(wanted)}")
        # A wider column already holds the narrower values.
        elif not _widens(wanted, current):
            impossible.append(f"{path}: {current.simpleString()} to {wanted.simpleString()}")


def _widens(current: T.DataType, wanted: T.DataType) -> bool:
    """Whether Delta can widen the type in place: INT to BIGINT, DOUBLE, DECIMAL; BIGINT to DECIMAL; DECIMAL to a wider
    one.
    """
    # The integer digits that Delta requires of a DECIMAL that replaces the integer type.
    digits = {T.IntegerType: 10, T.LongType: 20}.get(type(current))
    if isinstance(wanted, T.DecimalType):
        if isinstance(current, T.DecimalType):
            scale_growth: int = wanted.scale - current.scale
            return scale_growth >= 0 and wanted.precision - current.precision >= scale_growth
        return digits is not None and bool(wanted.precision - wanted.scale >= digits)
    return isinstance(current, T.IntegerType) and isinstance(wanted, (T.LongType, T.DoubleType))


def ddl(type_: T.DataType) -> str:
    """The type in Spark SQL, with quoted names."""
    match type_:
        case T.StructType():
            return f"STRUCT<{', '.join(f'{identifier(field.name)}: {ddl(field.dataType)}' for field in type_.fields)}>"
        case T.ArrayType():
            return f"ARRAY<{ddl(type_.elementType)}>"
        case T.MapType():
            return f"MAP<{ddl(type_.keyType)}, {ddl(type_.valueType)}>"
        case _:
            return str(type_.simpleString()).upper()
