"""`schema.on.conflict: retype`: the conflicts that rescued values show, and the schema whose columns hold those values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import orjson

from cdc_core.schema.cast import cast
from cdc_core.schema.column_types import BASE, ELEMENT, VALUE, Array, ColumnType, Map, Scalar, Steps, Struct, ddl
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.evolution import Change, ChangeKind, columns_of, leaf_paths
from cdc_core.schema.kinds import NOTHING, NUMBERS, Kind, kind, laid_out
from cdc_core.schema.pins import Pins


@dataclass(frozen=True)
class Conflict:
    """A place in the schema, and a kind of value that its column could not hold."""

    steps: Steps
    kind: Kind

    def to_json(self) -> str:
        """The conflict as one line of JSON."""
        return json.dumps([self.steps, self.kind.value])

    @staticmethod
    def from_json(text: str) -> Conflict:
        """The inverse of `to_json`."""
        steps, kind_value = json.loads(text)
        return Conflict(tuple(steps), Kind(kind_value))


def conflicts(schema: DocumentSchema, path: str, text: str) -> tuple[Conflict, ...]:
    """The conflicts that one entry of `__rescued` shows; empty if no other type would hold the value.

    That is the case for a path without a column (limits, `[]`, `{}`), a value outside its own type's range, and the
    earlier of two fields with one name. A path that can lead to two places gives a conflict for both.
    """
    numbers_fields = schema.naming.values.arrays_as_documents
    value = laid_out(orjson.loads(text), schema.naming.values)
    value_kind = kind(value)
    if value_kind in NOTHING:
        return ()
    # `#2` may mark a second value at one path, or be part of a field's name: the whole name is tried first.
    readings = (_places(schema.struct, names.split("."), numbers_fields) for names in (path, _NUMBERED.sub("", path)))
    places = next(filter(None, map(tuple, readings)), ())
    return tuple(
        Conflict(steps, value_kind) for steps, type_ in places if not _is_of(value_kind, type_) and cast(value, type_)[1]
    )


_NUMBERED = re.compile(r"#\d+$")


def _is_of(value_kind: Kind, type_: ColumnType) -> bool:
    """Whether the type is the one for this kind, though a value may be out of range."""
    match type_:
        case Struct() | Map():
            return value_kind is Kind.DOCUMENT
        case Array():
            return value_kind is Kind.ARRAY
        case _:
            return BASE.get(value_kind) is type_


def _places(type_: ColumnType, names: list[str], numbers_fields: bool) -> Iterator[tuple[Steps, ColumnType]]:
    """The places that a dotted path can lead to; names may contain dots."""
    if not names:
        yield (), type_
        return
    for end in _ends(type_, len(names)):
        name, inner_names = ".".join(names[:end]), names[end:]
        for step, inner in _below(type_, name, numbers_fields):
            yield from (((step, *steps), place_type) for steps, place_type in _places(inner, inner_names, numbers_fields))


def _ends(type_: ColumnType, count: int) -> range:
    """How many of the next `count` components of a path can be one name, or an index."""
    match type_:
        case Struct():
            return range(1, min(count, type_.most_dots + 1) + 1)
        case Array():
            return range(1, 2)
        case Map(Struct() | Array() | Map()):
            return range(1, count + 1)
        case Map():  # the path ends at a value
            return range(count, count + 1)
        case _:
            return range(0)


def _below(type_: ColumnType, name: str, numbers_fields: bool) -> Iterator[tuple[str | int, ColumnType]]:
    match type_:
        case Struct():
            # The value may be of a document or of an array that is laid out as one.
            names = (name, f"_{name}") if numbers_fields and name.isdecimal() else (name,)
            yield from ((each, type_.by_name[each].type) for each in names if each in type_.by_name)
        case Array(inner) if name.isdecimal():
            yield ELEMENT, inner
        case Map(inner):
            yield VALUE, inner


def with_wider_types(
    schema: DocumentSchema, conflicts: Iterable[Conflict], *, pins: Pins | None = None
) -> tuple[DocumentSchema, tuple[Change, ...]]:
    """The schema whose columns also hold these values, and its changes; pinned columns stay as they are.

    INT and BIGINT with doubles become DOUBLE. A DOUBLE with an int64 that is not exact as double, and all other
    conflicts, become TEXT, which replaces everything below the place.
    """
    kinds: dict[Steps, set[Kind]] = {}
    for conflict in conflicts:
        if not _is_pinned(conflict.steps, pins or {}):
            kinds.setdefault(conflict.steps, set()).add(conflict.kind)
    struct: ColumnType = schema.struct
    changes = []
    # Outer places first: one that becomes TEXT replaces the places below it.
    for steps in sorted(kinds, key=lambda steps: (len(steps), [str(step) for step in steps])):
        old_type = _type_of(struct, steps)
        if old_type is None or old_type is Scalar.TEXT:
            continue
        is_number = old_type in (Scalar.INT, Scalar.BIGINT) and kinds[steps] <= NUMBERS
        new_type = Scalar.DOUBLE if is_number else Scalar.TEXT
        struct = _with_type(struct, steps, new_type)
        changes.append(Change(".".join(_pin_path(steps)), ChangeKind.RETYPED, ddl(old_type), ddl(new_type)))
    assert isinstance(struct, Struct)  # the root is never replaced
    fields = struct.fields
    naming = schema.naming
    paths = {*(leaf_paths(fields, ()) if naming.flatten else ((item.name,) for item in fields))}
    remaining = tuple(column for column in schema.columns if column.path in paths)
    return DocumentSchema(fields, columns_of(remaining, fields, naming), naming), tuple(changes)


def _is_pinned(steps: Steps, pins: Pins) -> bool:
    """Whether the settings pin the type of a place; `map<int>` also pins the map's values."""
    path = _pin_path(steps)
    map_pin = pins.get(path[:-1]) if steps[-1:] == (VALUE,) else None
    return path in pins or (map_pin is not None and map_pin.type is not None)


def _pin_path(steps: Steps) -> tuple[str, ...]:
    """The path as in the settings: through arrays, `*` for the values of a map."""
    return tuple("*" if step == VALUE else str(step) for step in steps if step != ELEMENT)


def _type_of(type_: ColumnType, steps: Steps) -> ColumnType | None:
    """The type at a place, or None if a change above removed it."""
    for step in steps:
        match type_:
            case Struct() if step in type_.by_name:
                type_ = type_.by_name[str(step)].type
            case Array(inner) | Map(inner):
                type_ = inner
            case _:
                return None
    return type_


def _with_type(type_: ColumnType, steps: Steps, new: ColumnType) -> ColumnType:
    if not steps:
        return new
    match type_:
        case Struct(fields):
            new_fields = (
                replace(item, type=_with_type(item.type, steps[1:], new)) if item.name == steps[0] else item
                for item in fields
            )
            return Struct(tuple(new_fields))
        case Array(inner):
            return Array(_with_type(inner, steps[1:], new))
        case Map(inner):
            return Map(_with_type(inner, steps[1:], new))
        case _:
            return type_
