"""Schema evolution: widens a document schema to fit the documents, and lists the changes.

A path's column type comes from the first value seen there, in event order. After that:

    INT     widens to BIGINT or DOUBLE (both hold all 32-bit integers)
    STRUCT  gets new fields; ARRAY and MAP widen inside
    a pin   from the settings takes precedence; INT and BIGINT widen to a pinned DECIMAL that holds them
    others  stay: a value that does not fit is rescued

So the schema depends only on the documents and their order, not on how they were cut into batches. Values that are
first seen together in one array and have no common type make a TEXT column: a STRING with strings as they are and other
values as JSON. A path where only null, `[]` or `{}` was seen has no column, pinned or not; `[]` and `{}` without a
column are rescued.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cdc_core.schema import names as column_names
from cdc_core.schema.column_types import BASE, PARTS, Array, ColumnType, Field, Map, Scalar, Struct, ddl
from cdc_core.schema.document_schema import Column, DocumentSchema
from cdc_core.schema.kinds import DOUBLES, NOTHING, NUMBERS, Kind
from cdc_core.schema.pins import Pin, Pins, widens
from cdc_core.schema.shape import Shape

MAX_DEPTH = 32
"""Maximum nesting of a column's type; anything deeper is stored as JSON text."""

MAX_FIELDS = 1000
"""Maximum fields of one nested document. With more at first sight it becomes a MAP; fields that appear later are rescued."""

MANY_FIELDS = 100
"""Fields of a nested document. More that appear later may be data: the keys of a map. More at first sight, with names like `DATA_NAME`, are."""

DATA_NAME = re.compile(r"[0-9]|[0-9A-Fa-f-]{16,}\Z|[^/@:]*[/@:]")
"""A name that hardly anyone gives to a field: a number, a date, a version, a digest, a UUID, a path, an address, a URL."""

MAX_COLUMNS = 10_000
"""Maximum columns of one table, counting nested fields; further fields are rescued."""
_RANK = {kind: rank for rank, kind in enumerate(Kind)}


class ChangeKind(enum.Enum):
    """What happened to a path's column."""

    ADDED = "added"
    WIDENED = "widened"
    RETYPED = "retyped"
    REMOVED = "removed"
    REBUILT = "rebuilt"


@dataclass(frozen=True)
class Change:
    """One change of a schema: dotted path, kind of change, Spark SQL types before and after.

    REBUILT has no path: all documents were read again, and the resulting changes follow.
    """

    path: str
    what: ChangeKind
    from_type: str | None
    to_type: str | None


def join(
    schema: DocumentSchema,
    shape: Shape,
    *,
    pins: Pins | None = None,
    naming: column_names.ColumnNaming | None = None,
) -> tuple[DocumentSchema, tuple[Change, ...]]:
    """The schema widened by the shape, and the changes, in column order.

    Joining the same shape again changes nothing. `naming` only applies to a schema without columns; otherwise just its
    reserved names are taken over.
    """
    current_naming = schema.naming if schema.fields or naming is None else naming
    if naming is not None:
        current_naming = replace(current_naming, reserved=naming.reserved)
    joining = _Join(pins or {}, current_naming, _Room(MAX_COLUMNS - leaf_count(schema.struct)))
    fields = joining.fields(schema.fields, shape, (), depth=0, limit=MAX_COLUMNS)
    columns = columns_of(schema.columns, fields, current_naming, shape=shape)
    if current_naming.flatten:
        fields = _with_columns(fields, {column.path for column in columns}, ())
    else:
        # A field beyond MAX_COLUMNS has no column: without its entry in the schema its values are rescued.
        names = {column.path[0]: column.name for column in columns}
        fields = tuple(replace(item, column=names[item.name]) for item in fields if item.name in names)
    joined_schema = DocumentSchema(fields, columns, current_naming)
    return joined_schema, tuple(joining.changes)


@dataclass
class _Room:
    """How many more columns and fields a table can get; data used as keys on two levels could make hundreds of thousands."""

    left: int


def leaf_count(type_: ColumnType) -> int:
    """The number of scalar columns in a type, of which a table may have `MAX_COLUMNS`."""
    match type_:
        case Struct(fields):
            return sum(leaf_count(field.type) for field in fields)
        case Array(element):
            return leaf_count(element)
        case Map(value):
            return leaf_count(value)
        case _:
            return len(PARTS.get(type_, "1"))


class _Join:
    """One join: pins, naming, remaining room, and the changes so far."""

    def __init__(self, pins: Pins, naming: column_names.ColumnNaming, room: _Room) -> None:
        self.pins = pins
        self.naming = naming
        self.room = room
        self.changes: list[Change] = []

    def fields(
        self,
        current: tuple[Field, ...],
        shape: Shape,
        path: tuple[str, ...],
        *,
        depth: int,
        limit: int = MAX_FIELDS,
    ) -> tuple[Field, ...]:
        """The fields of a document joined with those seen; new ones come last, except `_id`, which is first at the root."""
        current_names = {item.name for item in current}
        joined_fields = [
            replace(item, type=self.known(item.type, shape.fields[item.name], (*path, item.name), depth=depth + 1))
            if item.name in shape.fields
            else item
            for item in current
        ]
        used_names = column_names.UsedNames(item.column for item in current)
        new_names = [name for name, _ in shape.in_order() if name not in current_names]
        if not path and "_id" in new_names:
            new_names = ["_id", *(name for name in new_names if name != "_id")]
        for name in new_names:
            if len(joined_fields) >= limit:
                break
            type_ = self.added(shape.fields[name], (*path, name), depth=depth + 1)
            if type_ is not None:
                joined_fields.append(
                    Field(name, column_names.nested(name, used_names=used_names, naming=self.naming), type_)
                )
        return tuple(joined_fields)

    def added(self, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType | None:
        type_ = self.fresh(shape, path, depth=depth)
        if type_ is not None:
            self.changes.append(Change(".".join(path), ChangeKind.ADDED, None, ddl(type_)))
        return type_

    def known(self, type_: ColumnType, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType:
        change_count = len(self.changes)
        joined_type = self.wider(type_, shape, path, depth=depth)
        if joined_type != type_ and len(self.changes) == change_count:
            self.changes.append(Change(".".join(path), ChangeKind.WIDENED, ddl(type_), ddl(joined_type)))
        return joined_type

    def fresh(self, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType | None:
        """The type for a new path; None if nothing that a column could hold was seen, or there is no room."""
        if self.room.left <= 0:
            return None
        type_ = self._fresh(shape, path, depth=depth)
        # The contents of a struct, an array or a map are already counted.
        if type_ is None or isinstance(type_, (Struct, Array, Map)):
            return type_
        if leaf_count(type_) > self.room.left:
            return None
        self.room.left -= leaf_count(type_)
        return type_

    def _fresh(self, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType | None:
        pin = self.pins.get(path)
        if pin is not None and shape.first is not None:
            # A map without values yet has no column; other kinds of value at the path are rescued and do not choose a
            # type.
            return self._pinned(pin, shape, path, depth)
        type_: ColumnType | None = None
        for group in groups(shape):
            if type_ is None:
                type_ = self._first(group, shape, path, depth)
            else:
                type_ = _absorbed(type_, group)
        return type_

    def _pinned(self, pin: Pin, shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        if not pin.is_map:
            return pin.type
        if pin.type is not None:
            return Map(pin.type)
        return self._map(shape, path, depth)

    def _first(self, group: list[Kind], shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        """The type for the kinds that were seen first, all in one document."""
        containers = {Kind.DOCUMENT, Kind.ARRAY}.intersection(group)
        if not containers:
            return _common(group)
        # If one document shows a container beside another kind, neither is first: TEXT holds both.
        if len(group) > 1 or depth >= MAX_DEPTH:
            return Scalar.TEXT
        if Kind.DOCUMENT in containers:
            return self._document(shape, path, depth)
        element = Shape() if shape.element is None else shape.element
        type_ = self._quiet().fresh(element, path, depth=depth + 1)
        return None if type_ is None else Array(type_)

    def _document(self, shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        if self._is_map(shape, path):
            return self._map(shape, path, depth)
        fields: list[Field] = []
        used_names = column_names.UsedNames()
        for name, field_shape in shape.in_order():
            type_ = self._quiet().fresh(field_shape, (*path, name), depth=depth + 1)
            if type_ is not None:
                fields.append(Field(name, column_names.nested(name, used_names=used_names, naming=self.naming), type_))
        return Struct(tuple(fields)) if fields else None

    def _is_map(self, shape: Shape, path: tuple[str, ...]) -> bool:
        """Whether the names are data used as keys (ids, dates), which would become columns without limit."""
        names = [name for name, field_shape in shape.fields.items() if field_shape.kinds]
        if not MANY_FIELDS < len(names) <= MAX_FIELDS:
            return len(names) > MAX_FIELDS
        below = len(path)
        if any(pinned[:below] == path and pinned[below : below + 1] not in ((), ("*",)) for pinned in self.pins):
            return False
        # Counted, and not a share: what looks like a map must still be one after more documents.
        return sum(1 for name in names if DATA_NAME.match(name)) > MANY_FIELDS and _are_alike(values(shape))

    def _map(self, shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        value = self._quiet().fresh(values(shape), (*path, "*"), depth=depth + 1)
        return None if value is None else Map(value)

    def _quiet(self) -> _Join:
        """The same join without recording changes, for the parts of a column that is new as a whole."""
        return _Join(self.pins, self.naming, self.room)

    def wider(self, type_: ColumnType, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType:
        """The type of an existing column after what was seen."""
        pin = self.pins.get(path)
        if pin is not None and not pin.is_map:
            # A pin that cannot widen the column in place needs a rebuild; until then other values are rescued.
            return pin.type if pin.type is not None and widens(type_, pin.type) else type_
        match type_:
            case Struct(fields):
                if Kind.DOCUMENT not in shape.kinds:
                    return type_
                return Struct(self.fields(fields, shape, path, depth=depth))
            case Array(element):
                if shape.element is None:
                    return type_
                return Array(self.wider(element, shape.element, path, depth=depth + 1))
            case Map(value):
                # `map<int>` also pins the values.
                if Kind.DOCUMENT not in shape.kinds or (pin is not None and pin.type is not None):
                    return type_
                return Map(self.wider(value, values(shape), (*path, "*"), depth=depth + 1))
            case _:
                for group in groups(shape):
                    type_ = _absorbed(type_, group)
                return type_


def grown(before: DocumentSchema, after: DocumentSchema) -> dict[str, int]:
    """The nested documents that have grown beyond `MANY_FIELDS`, or to `MAX_FIELDS`: number of fields by path, as pins have it."""
    return {".".join(path): count for path, count in _grown(before.struct, after.struct, ())}


def _grown(before: ColumnType, after: ColumnType, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    match before, after:
        case Struct(), Struct():
            count = len(after.fields)
            if path and any(len(before.fields) < limit <= count for limit in (MANY_FIELDS + 1, MAX_FIELDS)):
                yield path, count
            for name in before.by_name.keys() & after.by_name.keys():
                yield from _grown(before.by_name[name].type, after.by_name[name].type, (*path, name))
        case Array(inner_before), Array(inner_after):
            yield from _grown(inner_before, inner_after, path)
        case Map(value_before), Map(value_after):
            yield from _grown(value_before, value_after, (*path, "*"))


def waiting_pins(schema: DocumentSchema, pins: Pins) -> Iterator[str]:
    """The pinned paths whose columns have another type that does not widen to the pin: they need a rebuild."""
    for path, pin in pins.items():
        type_ = _type_at(schema.struct, path)
        if type_ is None:
            continue
        if pin.is_map:
            is_pinned = isinstance(type_, Map) and pin.type in (None, type_.value)
        else:
            is_pinned = type_ == pin.type or (pin.type is not None and widens(type_, pin.type))
        if not is_pinned:
            yield ".".join(path)


def _type_at(type_: ColumnType, path: tuple[str, ...]) -> ColumnType | None:
    """The type at a path (through arrays, and by `*` through maps); None if there is none."""
    for name in path:
        while isinstance(type_, Array):
            type_ = type_.element
        if isinstance(type_, Map) and name == "*":
            type_ = type_.value
        elif isinstance(type_, Struct) and name in type_.by_name:
            type_ = type_.by_name[name].type
        else:
            return None
    return type_


def groups(shape: Shape) -> list[list[Kind]]:
    """The kinds that can make a column, grouped by the document that first showed them, in event order."""
    by_mark: dict[str, list[Kind]] = {}
    for kind in sorted(shape.kinds, key=lambda seen: (shape.kinds[seen], _RANK[seen])):
        if kind not in NOTHING:
            by_mark.setdefault(shape.kinds[kind], []).append(kind)
    return list(by_mark.values())


def _common(kinds: Sequence[Kind]) -> ColumnType:
    """The type that holds all of these scalar kinds; TEXT if there is none."""
    bases = {BASE[kind] for kind in kinds}
    if len(bases) == 1:
        return bases.pop()
    if NUMBERS.issuperset(kinds):
        return Scalar.BIGINT if DOUBLES.isdisjoint(kinds) else Scalar.DOUBLE
    return Scalar.TEXT


def _are_alike(shape: Shape) -> bool:
    """Whether one type other than TEXT holds all values: the merged shape `values` of a document's fields."""
    present_kinds = shape.kinds.keys() - NOTHING
    if present_kinds & {Kind.DOCUMENT, Kind.ARRAY}:
        return len(present_kinds) == 1
    return _common([*present_kinds]) is not Scalar.TEXT


def _absorbed(type_: ColumnType, group: Iterable[Kind]) -> ColumnType:
    """A scalar type, widened for the kinds if possible."""
    # BIGINT does not widen to DOUBLE, which cannot hold every 64-bit integer.
    if type_ is not Scalar.INT:
        return type_
    if not DOUBLES.isdisjoint(group):
        return Scalar.DOUBLE
    return Scalar.BIGINT if Kind.INT64 in group else type_


def values(shape: Shape) -> Shape:
    """The merged shape of all values of documents used as maps."""
    merged = Shape()
    # By name, because the order of fields depends on which partition was merged first.
    for name in sorted(shape.fields):
        merged.add(shape.fields[name])
    return merged


def columns_of(
    current: tuple[Column, ...], fields: tuple[Field, ...], naming: column_names.ColumnNaming, *, shape: Shape | None = None
) -> tuple[Column, ...]:
    """The table's columns: the current ones, then new ones for paths without a column, in the order in which they were
    `shape`.
    """
    current_paths = {column.path for column in current}
    columns = list(current)
    # Reserved names are not given to new columns; existing columns keep their names.
    used_names = column_names.UsedNames([*(column.name for column in current), *naming.reserved])
    paths = leaf_paths(fields, ()) if naming.flatten else [(item.name,) for item in fields]
    if naming.flatten and shape is not None:
        # If two paths give one name, the later one is changed. In struct order, that would depend on how events are cut
        # into batches.
        paths.sort(key=functools.partial(_first_seen, Struct(fields), shape))
    for path in paths:
        if path not in current_paths and len(columns) < MAX_COLUMNS:
            columns.append(Column(path, column_names.top_level(path, used_names=used_names, naming=naming)))
    return tuple(columns)


def _with_columns(fields: Iterable[Field], paths: set[tuple[str, ...]], path: tuple[str, ...]) -> tuple[Field, ...]:
    """The flattened fields that have columns; the values of the others are rescued."""
    remaining = []
    for item in fields:
        field_path = (*path, item.name)
        if isinstance(item.type, Struct):
            inner_fields = _with_columns(item.type.fields, paths, field_path)
            remaining += [replace(item, type=Struct(inner_fields))] if inner_fields else []
        elif field_path in paths or (item.type in PARTS and (*field_path, PARTS[item.type][0]) in paths):
            remaining.append(item)
    return tuple(remaining)


def leaf_paths(fields: Iterable[Field], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths of the leaves below these fields, which are the columns of flattened documents."""
    leaves: list[tuple[str, ...]] = []
    for item in fields:
        field_path = (*path, item.name)
        if isinstance(item.type, Struct):
            leaves.extend(leaf_paths(item.type.fields, field_path))
        elif item.type in PARTS:
            leaves.extend((*field_path, part) for part in PARTS[item.type])
        else:
            leaves.append(field_path)
    return leaves


def _first_seen(type_: ColumnType, shape: Shape, path: tuple[str, ...]) -> tuple[str, int]:
    """Where a leaf was seen first: the document's mark, and the place in it; `_id` comes before the other fields."""
    is_id = path[0] == "_id"
    for step in path:
        if not isinstance(type_, Struct):  # a part of a REGEX or the like
            break
        type_, shape = type_.by_name[step].type, shape.fields.get(step) or Shape()
    mark, place = shape.first or ("", 0)
    return mark, -1 if is_id else place


def differences(before: DocumentSchema, after: DocumentSchema) -> tuple[Change, ...]:
    """The changes from the first schema to the second, by field; order of fields and column names are ignored."""
    return tuple(_differences(before.struct, after.struct, ()))


def _differences(before: Struct, after: Struct, path: tuple[str, ...]) -> Iterator[Change]:
    for item in after.fields:
        field_path = (*path, item.name)
        old_field = before.by_name.get(item.name)
        if old_field is None:
            yield Change(".".join(field_path), ChangeKind.ADDED, None, ddl(item.type))
        elif isinstance(old_field.type, Struct) and isinstance(item.type, Struct):
            yield from _differences(old_field.type, item.type, field_path)
        elif old_field.type != item.type:
            yield Change(".".join(field_path), ChangeKind.RETYPED, ddl(old_field.type), ddl(item.type))
    for name, removed in before.by_name.items():
        if name not in after.by_name:
            yield Change(".".join((*path, name)), ChangeKind.REMOVED, ddl(removed.type), None)
