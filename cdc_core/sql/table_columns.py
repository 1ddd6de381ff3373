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


def is_same(current: T.DataType, row_type: T.DataType) -> bool:
    """Whether rows of both types can be in files of one table: the same names and types, in any order."""
    match current, row_type:
        case T.StructType(), T.StructType():
            fields = {field.name: field.dataType for field in row_type}
            return fields.keys() == {field.name for field in current} and all(
                is_same(field.dataType, fields[field.name]) for field in current
            )
        case T.ArrayType(), T.ArrayType():
            return is_same(current.elementType, row_type.elementType)
        case T.MapType(), T.MapType():
            return is_same(current.keyType, row_type.keyType) and is_same(current.valueType, row_type.valueType)
        case _:
            return bool(current == row_type)


def are_alike(current: T.StructType, row_type: T.StructType) -> bool:
    """Whether both have the same columns of the same types, with nested fields in the same order, because Spark unions
    those by position.
    """
    return {field.name: ddl(field.dataType) for field in current} == {field.name: ddl(field.dataType) for field in row_type}


def fields_by_name(struct: T.StructType) -> dict[str, T.StructField]:
    """The fields of a struct by name; `StructType` searches all fields for each name, which takes seconds for ten thousand
    columns.
    """
    return {field.name: field for field in struct.fields}


def alterations(current: T.StructType, row_type: T.StructType) -> Alteration:
    """The statements after which the columns of `current` can hold those of `row_type`; none if they already can.

    New columns are placed after their neighbour in `row_type`, new fields at the end of their struct. A type only changes
    to one that Delta can widen to in place. Columns that `row_type` lacks stay as they are; with the name of a new one,
    but for its case, they are in its way.
    """
    added: list[str] = []
    widened: list[str] = []
    impossible: list[str] = []
    previous: str | None = None
    current_fields = fields_by_name(current)
    others = {name.lower(): name for name in current_fields}  # Delta compares names without case
    for field in row_type.fields:
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


def lacking(current: T.DataType, row_type: T.DataType, path: str = "") -> Iterator[str]:
    """The columns of `row_type`, and their nested fields, that `current` lacks, as dotted paths."""
    match current, row_type:
        case T.StructType(), T.StructType():
            current_fields = fields_by_name(current)
            for field in row_type.fields:
                field_path = f"{path}.{field.name}" if path else field.name
                if field.name in current_fields:
                    yield from lacking(current_fields[field.name].dataType, field.dataType, field_path)
                else:
                    yield field_path
        case T.ArrayType(), T.ArrayType():
            yield from lacking(current.elementType, row_type.elementType, path)
        case T.MapType(), T.MapType():
            yield from lacking(current.valueType, row_type.valueType, path)


def with_added(current: T.StructType, row_type: T.StructType) -> T.StructType:
    """The columns of `current` plus what `alterations` would add, in the same places."""
    fields, names = fields_by_name(_grown_fields(current, row_type)), {*current.names}
    new_fields: dict[str | None, list[T.StructField]] = {}
    previous: str | None = None
    for field in row_type.fields:
        if field.name in names:
            previous = field.name
        else:
            new_fields.setdefault(previous, []).append(fields[field.name])
    groups = ([fields[name], *new_fields.get(name, ())] for name in current.names)
    return T.StructType([*new_fields.get(None, ()), *itertools.chain.from_iterable(groups)])


def _grown_fields(current: T.StructType, row_type: T.StructType) -> T.StructType:
    """The fields of a struct plus those that it lacks, at its end."""
    types, names = {field.name: field.dataType for field in row_type}, {*current.names}
    grown_fields = [
        T.StructField(
            field.name, _grown(field.dataType, types.get(field.name, field.dataType)), field.nullable, field.metadata
        )
        for field in current
    ]
    new_fields = [T.StructField(field.name, _unmarked(field.dataType)) for field in row_type if field.name not in names]
    return T.StructType([*grown_fields, *new_fields])


def _grown(current: T.DataType, row_type: T.DataType) -> T.DataType:
    """A column's type plus the struct fields that it lacks."""
    match current, row_type:
        case T.StructType(), T.StructType():
            return _grown_fields(current, row_type)
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_grown(current.elementType, row_type.elementType), current.containsNull)
        case T.MapType(), T.MapType():
            return T.MapType(current.keyType, _grown(current.valueType, row_type.valueType), current.valueContainsNull)
        case _:
            return current


def widened(current: T.StructType, row_type: T.StructType) -> T.StructType:
    """The current columns in their order, each with a type that takes its values and those of the column in `row_type`."""
    types = {field.name: field.dataType for field in row_type}
    return T.StructType([T.StructField(field.name, _wider(field.dataType, types.get(field.name))) for field in current])


def replacing(current: T.StructType, row_type: T.StructType) -> T.StructType:
    """The columns of `current`, widened and with what they lack, for a table that gets new files for all of its rows."""
    fields = fields_by_name(current)
    columns = with_added(widened(current, row_type), row_type)
    return T.StructType(
        [
            T.StructField(each.name, each.dataType, metadata=fields[each.name].metadata if each.name in fields else None)
            for each in columns
        ]
    )


def _wider(current: T.DataType, row_type: T.DataType | None) -> T.DataType:
    match current, row_type:
        case T.StructType(), T.StructType():
            return widened(current, row_type)
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_wider(current.elementType, row_type.elementType))
        case T.MapType(), T.MapType():
            return T.MapType(current.keyType, _wider(current.valueType, row_type.valueType))
        case _:
            return row_type if row_type is not None and _widens(current, row_type) else current


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
    current: T.DataType, row_type: T.DataType, path: str, added: list[str], widened: list[str], impossible: list[str]
) -> None:
    if isinstance(current, T.StructType) and isinstance(row_type, T.StructType):
        current_fields = fields_by_name(current)
        for field in row_type.fields:
            field_path = f"{path}.{identifier(field.name)}"
            if field.name in current_fields:
                _compare(current_fields[field.name].dataType, field.dataType, field_path, added, widened, impossible)
            else:
                added.append(f"{field_path} {ddl(field.dataType)}")
    elif isinstance(current, T.ArrayType) and isinstance(row_type, T.ArrayType):
        _compare(current.elementType, row_type.elementType, f"{path}.element", added, widened, impossible)
    elif isinstance(current, T.MapType) and isinstance(row_type, T.MapType):
        _compare(current.valueType, row_type.valueType, f"{path}.value", added, widened, impossible)
    elif current != row_type:
        if _widens(current, row_type):
            widened.append(f"{path} TYPE {ddl(row_type)}")
        # A wider column already holds the narrower values.
        elif not _widens(row_type, current):
            impossible.append(f"{path}: {current.simpleString()} to {row_type.simpleString()}")


def _widens(current: T.DataType, row_type: T.DataType) -> bool:
    """Whether Delta can widen the type in place: INT to BIGINT, DOUBLE, DECIMAL; BIGINT to DECIMAL; DECIMAL to a wider
    one.
    """
    # The integer digits that Delta requires of a DECIMAL that replaces the integer type.
    digits = {T.IntegerType: 10, T.LongType: 20}.get(type(current))
    if isinstance(row_type, T.DecimalType):
        if isinstance(current, T.DecimalType):
            scale_growth: int = row_type.scale - current.scale
            return scale_growth >= 0 and row_type.precision - current.precision >= scale_growth
        return digits is not None and bool(row_type.precision - row_type.scale >= digits)
    return isinstance(current, T.IntegerType) and isinstance(row_type, (T.LongType, T.DoubleType))


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
