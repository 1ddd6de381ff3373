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


def is_same(held: T.DataType, wanted: T.DataType) -> bool:
    """Whether rows of both types can be in files of one table: the same names and types, in any order."""
    match held, wanted:
        case T.StructType(), T.StructType():
            fields = {each.name: each.dataType for each in wanted}
            return fields.keys() == {each.name for each in held} and all(
                is_same(each.dataType, fields[each.name]) for each in held
            )
        case T.ArrayType(), T.ArrayType():
            return is_same(held.elementType, wanted.elementType)
        case T.MapType(), T.MapType():
            return is_same(held.keyType, wanted.keyType) and is_same(held.valueType, wanted.valueType)
        case _:
            return bool(held == wanted)


def are_alike(held: T.StructType, wanted: T.StructType) -> bool:
    """Whether both have the same columns of the same types, with nested fields in the same order, because Spark unions
    those by position.
    """
    return {each.name: ddl(each.dataType) for each in held} == {each.name: ddl(each.dataType) for each in wanted}


def fields_by_name(struct: T.StructType) -> dict[str, T.StructField]:
    """The fields of a struct by name; `StructType` searches all fields for each name, which takes seconds for ten thousand
    columns.
    """
    return {each.name: each for each in struct.fields}


def alterations(current: T.StructType, wanted: T.StructType) -> Alteration:
    """The statements after which the columns of `current` can hold those of `wanted`; none if they already can.

    New columns are placed after their neighbour in `wanted`, new fields at the end of their struct. A type only changes
    to one that Delta can widen to in place. Columns that `wanted` lacks stay as they are.
    """
    added: list[str] = []
    widened: list[str] = []
    impossible: list[str] = []
    previous: str | None = None
    held = fields_by_name(current)
    for field in wanted.fields:
        if field.name in held:
            _compare(held[field.name].dataType, field.dataType, identifier(field.name), added, widened, impossible)
        else:
            place = "FIRST" if previous is None else f"AFTER {identifier(previous)}"
            added.append(f"{identifier(field.name)} {ddl(field.dataType)} {place}")
        previous = field.name
    adding = (f"ADD COLUMNS ({', '.join(added)})",) if added else ()
    return Alteration(adding, tuple(f"ALTER COLUMN {change}" for change in widened), tuple(impossible))


def lacking(current: T.DataType, wanted: T.DataType, path: str = "") -> Iterator[str]:
    """The columns of `wanted`, and their nested fields, that `current` lacks, as dotted paths."""
    match current, wanted:
        case T.StructType(), T.StructType():
            held = fields_by_name(current)
            for field in wanted.fields:
                below = f"{path}.{field.name}" if path else field.name
                if field.name in held:
                    yield from lacking(held[field.name].dataType, field.dataType, below)
                else:
                    yield below
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
    new: dict[str | None, list[T.StructField]] = {}
    previous: str | None = None
    for field in wanted.fields:
        if field.name in fields:
            held = fields[field.name]
            fields[field.name] = T.StructField(
                held.name, _grown(held.dataType, field.dataType), held.nullable, held.metadata
            )
            previous = field.name
        else:
            new.setdefault(previous, []).append(T.StructField(field.name, _unmarked(field.dataType)))
    placed = ([field, *new.get(field.name, ())] for field in fields.values())
    return T.StructType([*new.get(None, ()), *itertools.chain.from_iterable(placed)])


def _grown(current: T.DataType, wanted: T.DataType) -> T.DataType:
    """A column's type plus the struct fields that it lacks."""
    match current, wanted:
        case T.StructType(), T.StructType():
            types = {each.name: each.dataType for each in wanted}
            held = [
                T.StructField(
                    each.name, _grown(each.dataType, types.get(each.name, each.dataType)), each.nullable, each.metadata
                )
                for each in current
            ]
            names = {*current.names}
            new = [T.StructField(each.name, _unmarked(each.dataType)) for each in wanted if each.name not in names]
            return T.StructType([*held, *new])
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_grown(current.elementType, wanted.elementType), current.containsNull)
        case T.MapType(), T.MapType():
            return T.MapType(current.keyType, _grown(current.valueType, wanted.valueType), current.valueContainsNull)
        case _:
            return current


def widened(held: T.StructType, wanted: T.StructType) -> T.StructType:
    """The held columns in their order, each with a type that takes its values and those of the wanted column."""
    types = {each.name: each.dataType for each in wanted}
    return T.StructType([T.StructField(each.name, _wider(each.dataType, types.get(each.name))) for each in held])


def _wider(held: T.DataType, wanted: T.DataType | None) -> T.DataType:
    match held, wanted:
        case T.StructType(), T.StructType():
            return widened(held, wanted)
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_wider(held.elementType, wanted.elementType))
        case T.MapType(), T.MapType():
            return T.MapType(held.keyType, _wider(held.valueType, wanted.valueType))
        case _:
            return wanted if wanted is not None and _widens(held, wanted) else held


def _unmarked(type_: T.DataType) -> T.DataType:
    """The type without its fields' metadata: Delta records a column's widening there, which must not get into another
    table.
    """
    match type_:
        case T.StructType():
            return T.StructType([T.StructField(each.name, _unmarked(each.dataType)) for each in type_])
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
        held = fields_by_name(current)
        for field in wanted.fields:
            below = f"{path}.{identifier(field.name)}"
            if field.name in held:
                _compare(held[field.name].dataType, field.dataType, below, added, widened, impossible)
            else:
                added.append(f"{below} {ddl(field.dataType)}")
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
            grown: int = wanted.scale - current.scale
            return grown >= 0 and wanted.precision - current.precision >= grown
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
