"""The document schema of a collection: what was seen, which column types hold it, and what does not fit.

Everything here works on *parsed EJSON*: `orjson.loads` of type-exact Extended JSON v2. Three steps:

    observe   a document -> a `Shape`: the kinds of BSON value at each path, and when each was seen first
    join      a `DocumentSchema` and a `Shape` -> the schema, only ever wider, and the list of its changes
    cast      a document and a schema -> a row, and what did not fit as dotted path -> Extended JSON text

A path's column type comes from the first value that was seen there, in the order of the events; after that

    INT     widens to BIGINT, DOUBLE        whole numbers of 32 bits are exact in both
    STRUCT  gets new fields, ARRAY and MAP widen inside
    a pin   from the settings rules over what was seen; INT, BIGINT widen to a pinned DECIMAL that holds them
    other   types stay: a value that does not fit is rescued

so the schema depends on the documents and their order alone, and not on how they were cut into batches.
Values that are seen for the first time side by side in one array and have no common type make a TEXT
column: a STRING that holds strings as they are and other values as their JSON. A path that was only ever
null, `[]` or `{}` has no column; a `[]` or `{}` without a column is rescued.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import orjson

from cdc_core import errors
from cdc_core.schema import names as column_names
from cdc_core.sql.names import identifier

MAX_DEPTH = 32
"""Nesting of a column's type; what lies deeper is the JSON text of its document or array."""

MAX_FIELDS = 1000
"""Fields of one nested document. Seen with more at first sight, it is a MAP; later fields beyond are
rescued.
"""

MAX_COLUMNS = 10_000
"""Columns of one table; fields beyond are rescued."""


class Kind(enum.Enum):
    """What a value of parsed EJSON is; NON_FINITE is a double in a wrapper: NaN or an infinity. The order
    decides between kinds that one document shows at one path.
    """

    DOCUMENT = "document"
    ARRAY = "array"
    DOUBLE = "double"
    NON_FINITE = "nonFinite"
    INT64 = "int64"
    INT32 = "int32"
    DECIMAL = "decimal"
    STRING = "string"
    OBJECT_ID = "objectId"
    SYMBOL = "symbol"
    CODE = "code"
    MIN_KEY = "minKey"
    MAX_KEY = "maxKey"
    BOOLEAN = "bool"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BINARY = "binary"
    REGEX = "regex"
    CODE_WITH_SCOPE = "codeWithScope"
    DB_POINTER = "dbPointer"
    EMPTY_DOCUMENT = "{}"
    EMPTY_ARRAY = "[]"
    UNDEFINED = "undefined"
    NULL = "null"


NOTHING = frozenset({Kind.EMPTY_DOCUMENT, Kind.EMPTY_ARRAY, Kind.UNDEFINED, Kind.NULL})
"""Kinds from which no column can come."""
_ABSENT = frozenset({Kind.UNDEFINED, Kind.NULL})
_RANK = {kind: rank for rank, kind in enumerate(Kind)}

WRAPPERS: Mapping[str, Kind] = {
    "$oid": Kind.OBJECT_ID,
    "$numberInt": Kind.INT32,
    "$numberLong": Kind.INT64,
    "$numberDouble": Kind.NON_FINITE,
    "$numberDecimal": Kind.DECIMAL,
    "$date": Kind.DATE,
    "$timestamp": Kind.TIMESTAMP,
    "$binary": Kind.BINARY,
    "$regularExpression": Kind.REGEX,
    "$symbol": Kind.SYMBOL,
    "$code": Kind.CODE,
    "$minKey": Kind.MIN_KEY,
    "$maxKey": Kind.MAX_KEY,
    "$undefined": Kind.UNDEFINED,
    "$dbPointer": Kind.DB_POINTER,
}
"""The key by which each wrapper of Extended JSON is known; users' keys of these names are escaped."""

_INT32 = range(-(2**31), 2**31)


class ArrayDocument(dict[str, Any]):
    """An array read as a document of `_0`, `_1`, …: `array.encoding=document`."""


def kind(value: Any) -> Kind:
    """The kind of one value of parsed EJSON."""
    if isinstance(value, str):
        return Kind.STRING
    if isinstance(value, bool):
        return Kind.BOOLEAN
    if isinstance(value, int):
        return Kind.INT32 if value in _INT32 else Kind.INT64
    if isinstance(value, float):
        return Kind.DOUBLE
    if value is None:
        return Kind.NULL
    if isinstance(value, list):
        return Kind.ARRAY if value else Kind.EMPTY_ARRAY
    return _kind_of_object(value)


def _kind_of_object(value: Mapping[str, Any]) -> Kind:
    if not value:
        return Kind.EMPTY_ARRAY if isinstance(value, ArrayDocument) else Kind.EMPTY_DOCUMENT
    if len(value) <= 2:
        for key in value:
            wrapper = WRAPPERS.get(key)
            if wrapper is Kind.CODE and len(value) == 2:
                return Kind.CODE_WITH_SCOPE
            if wrapper is not None:
                return wrapper
    return Kind.DOCUMENT


def arrays_as_documents(value: Any) -> Any:
    """The value with every array as an `ArrayDocument`, at every depth."""
    if isinstance(value, list):
        return ArrayDocument((f"_{index}", arrays_as_documents(item)) for index, item in enumerate(value))
    if isinstance(value, dict) and _kind_of_object(value) is Kind.DOCUMENT:
        return {key: arrays_as_documents(item) for key, item in value.items()}
    return value


# --- what was seen ------------------------------------------------------------------------------------------


@dataclass
class Shape:
    """What was seen at one path.

    `kinds` says of each kind the least `mark` it was seen at; marks are texts that sort as the events do. A
    document or an array that holds nothing a column could come from counts as empty. `fields` are those of
    the documents (by their own names, in the order seen), `element` what was in the arrays. `opaque` says
    that there was a mix nobody has looked into: only a column whose type no value could change may be
    joined with it.
    """

    kinds: dict[Kind, str] = field(default_factory=dict)
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None
    opaque: bool = False

    def see(self, value: Any, mark: str) -> bool:
        """Adds one value, and tells whether a column could come from it: not from null, nor from what holds
        only that.
        """
        seen = kind(value)
        if seen is Kind.DOCUMENT and not self._see_fields(value, mark):
            seen = Kind.EMPTY_DOCUMENT
        elif seen is Kind.ARRAY and not self._see_elements(value, mark):
            seen = Kind.EMPTY_ARRAY
        if seen is Kind.NULL:
            return False
        first = self.kinds.get(seen)
        if first is None or mark < first:
            self.kinds[seen] = mark
        return seen not in NOTHING

    def _see_fields(self, value: Mapping[str, Any], mark: str) -> bool:
        found = [self._field(column_names.unescaped(key)).see(item, mark) for key, item in value.items() if item is not None]
        return any(found)

    def _see_elements(self, value: Sequence[Any], mark: str) -> bool:
        if self.element is None:
            self.element = Shape()
        found = [self.element.see(item, mark) for item in value if item is not None]
        return any(found)

    def _field(self, name: str) -> Shape:
        found = self.fields.get(name)
        if found is None:
            found = self.fields[name] = Shape()
        return found

    def add(self, other: Shape) -> None:
        """Adds what another shape has seen."""
        for seen, mark in other.kinds.items():
            self.kinds[seen] = min(mark, self.kinds.get(seen, mark))
        for name, shape in other.fields.items():
            self._field(name).add(shape)
        if other.element is not None:
            if self.element is None:
                self.element = Shape()
            self.element.add(other.element)
        self.opaque = self.opaque or other.opaque

    def ordered(self, like: Any) -> Shape:
        """The same with fields in the order of the document `like`, those that it has not by name."""
        names = [column_names.unescaped(key) for key in like] if isinstance(like, dict) else []
        rank = {name: number for number, name in enumerate(names)}
        values = dict(zip(names, like.values())) if names else {}
        elements = like if isinstance(like, list) else []
        sample = next((item for item in elements if isinstance(item, dict)), None)
        return Shape(
            kinds=self.kinds,
            fields={
                name: self.fields[name].ordered(values.get(name))
                for name in sorted(self.fields, key=lambda name: (rank.get(name, len(rank)), name))
            },
            element=None if self.element is None else self.element.ordered(sample),
            opaque=self.opaque,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kinds": {seen.value: mark for seen, mark in self.kinds.items()},
            "fields": {name: shape.to_json() for name, shape in self.fields.items()},
            "element": None if self.element is None else self.element.to_json(),
            "opaque": self.opaque,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Shape:
        """The inverse of `to_json`."""
        return Shape(
            kinds={Kind(seen): mark for seen, mark in value["kinds"].items()},
            fields={name: Shape.from_json(shape) for name, shape in value["fields"].items()},
            element=None if value["element"] is None else Shape.from_json(value["element"]),
            opaque=value["opaque"],
        )


def observe(parsed_document: Any, *, mark: str = "") -> Shape:
    """The shape of one document; `mark` sorts as its event does among those that are joined together."""
    shape = Shape()
    shape.see(parsed_document, mark)
    return shape


# --- column types -------------------------------------------------------------------------------------------


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

_DOUBLES = frozenset({Kind.DOUBLE, Kind.NON_FINITE})
_NUMBERS = frozenset({Kind.INT32, Kind.INT64, *_DOUBLES})


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
    naming: column_names.Naming = column_names.Naming()

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

    def column_of(self, *path: str) -> str | None:
        """The name of the column at a path, if it is one."""
        return next((column.name for column in self.columns if column.path == path), None)

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
            naming=column_names.Naming.from_json(value["naming"]),
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
        match_ = _DECIMAL.fullmatch(value)
        return Decimal(int(match_[1]), int(match_[2])) if match_ else Scalar(value)
    if "struct" in value:
        return Struct(tuple(_field_from_json(item) for item in value["struct"]))
    if "array" in value:
        return Array(_type_from_json(value["array"]))
    return Map(_type_from_json(value["map"]))


# --- pins ---------------------------------------------------------------------------------------------------

_DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", re.IGNORECASE)
_MAP = re.compile(r"map(?:\s*<\s*(?:string\s*,)?\s*(.+?)\s*>)?", re.IGNORECASE)
_PINS: Mapping[str, Scalar] = {
    "int": Scalar.INT,
    "bigint": Scalar.BIGINT,
    "double": Scalar.DOUBLE,
    "string": Scalar.TEXT,
    "boolean": Scalar.BOOLEAN,
    "timestamp": Scalar.TIMESTAMP,
    "binary": Scalar.BINARY,
}


@dataclass(frozen=True)
class Pin:
    """What the settings say about one path: a type, or a map of values whose type is seen."""

    type: Scalar | Decimal | None
    is_map: bool = False


Pins = Mapping[tuple[str, ...], Pin]


def parse_pins(pins: Mapping[str, str], *, where: str = "schema") -> Pins:
    """The pins of a collection's settings (dotted path -> type); every mistake at once as `SettingsError`.

    Types: `int`, `bigint`, `double`, `string` (any value; what is no text becomes its JSON), `boolean`,
    `timestamp`, `binary`, `decimal(p,s)`, `map`, `map<type>`. A path leads through arrays: `items.price` is
    the price of each item.
    """
    parsed: dict[tuple[str, ...], Pin] = {}
    problems = []
    for path, text in pins.items():
        try:
            parsed[tuple(path.split("."))] = _pin(str(text).strip())
        except ValueError as refused:
            problems.append(errors.Problem(f"{where}.{path}", str(refused)))
    if problems:
        raise errors.SettingsError(problems)
    return parsed


def _pin(text: str) -> Pin:
    if match_ := _MAP.fullmatch(text):
        return Pin(_pin(match_[1]).type if match_[1] else None, is_map=True)
    if match_ := _DECIMAL.fullmatch(text):
        precision, scale = int(match_[1]), int(match_[2])
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(f"{text} is no decimal: 1 to 38 digits are expected, the scale among them")
        return Pin(Decimal(precision, scale))
    if text.lower() not in _PINS:
        raise ValueError(f"one of {', '.join(_PINS)}, decimal(p,s), map, map<type> is expected, not {text!r}")
    return Pin(_PINS[text.lower()])


# --- join ---------------------------------------------------------------------------------------------------


class What(enum.Enum):
    """What happened to a path's column."""

    ADDED = "added"
    WIDENED = "widened"
    RETYPED = "retyped"
    REMOVED = "removed"
    REBUILT = "rebuilt"


@dataclass(frozen=True)
class Change:
    """One change of a schema: the dotted path, what happened, the types before and after in Spark SQL.

    REBUILT is about no path: everything was read again, and what changed thereby follows.
    """

    path: str
    what: What
    from_type: str | None
    to_type: str | None


def join(
    schema: DocumentSchema,
    shape: Shape,
    *,
    pins: Pins | None = None,
    naming: column_names.Naming | None = None,
) -> tuple[DocumentSchema, tuple[Change, ...]]:
    """The schema that also holds what the shape saw, and the changes that this took, in order of the columns.

    Joining the same shape twice changes nothing the second time. `naming` is taken by the first join; a
    schema that has columns keeps the layout it has and only takes over which names are reserved.
    """
    laid_out = schema.naming if schema.fields or naming is None else naming
    if naming is not None:
        laid_out = replace(laid_out, reserved=naming.reserved)
    joining = _Join(pins or {}, laid_out)
    fields = joining.fields(schema.fields, shape, (), depth=0, limit=MAX_COLUMNS)
    columns = _columns(schema.columns, fields, laid_out)
    if laid_out.flatten:
        fields = _with_columns(fields, {column.path for column in columns}, ())
    else:
        names = {column.path[0]: column.name for column in columns}
        fields = tuple(replace(item, column=names[item.name]) for item in fields if item.name in names)
    joined = DocumentSchema(fields, columns, laid_out)
    return joined, tuple(joining.changes)


class _Join:
    """One join: what the settings pin, how names are given, and the changes so far."""

    def __init__(self, pins: Pins, naming: column_names.Naming) -> None:
        self.pins = pins
        self.naming = naming
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
        """The fields of a document, joined with those seen; new ones after the others, `_id` first of the
        root's.
        """
        known = {item.name for item in current}
        joined = [
            self._joined(item, shape.fields[item.name], (*path, item.name), depth=depth + 1)
            if item.name in shape.fields
            else item
            for item in current
        ]
        taken = column_names.Taken(item.column for item in current)
        fresh = [name for name in shape.fields if name not in known]
        if not path and "_id" in fresh:
            fresh = ["_id", *(name for name in fresh if name != "_id")]
        for name in fresh:
            if len(joined) >= limit:
                break
            type_ = self.added(shape.fields[name], (*path, name), depth=depth + 1)
            if type_ is not None:
                joined.append(Field(name, column_names.nested(name, taken=taken, naming=self.naming), type_))
        return tuple(joined)

    def _joined(self, item: Field, shape: Shape, path: tuple[str, ...], *, depth: int) -> Field:
        return replace(item, type=self.known(item.type, shape, path, depth=depth))

    def added(self, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType | None:
        type_ = self.fresh(shape, path, depth=depth)
        if type_ is not None:
            self.changes.append(Change(".".join(path), What.ADDED, None, ddl(type_)))
        return type_

    def known(self, type_: ColumnType, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType:
        before = len(self.changes)
        joined = self.wider(type_, shape, path, depth=depth)
        if joined != type_ and len(self.changes) == before:
            self.changes.append(Change(".".join(path), What.WIDENED, ddl(type_), ddl(joined)))
        return joined

    def fresh(self, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType | None:
        """The type for a path without one, or None where nothing was seen that a column could hold."""
        pin = self.pins.get(path)
        if pin is not None and (shape.kinds or shape.opaque):
            pinned = self._pinned(pin, shape, path, depth)
            if pinned is not None:
                return pinned
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
        """The type of the kinds that were seen first, all by one document."""
        containers = {Kind.DOCUMENT, Kind.ARRAY}.intersection(group)
        if not containers:
            return _common(group)
        if len(group) > 1 or depth >= MAX_DEPTH:
            return Scalar.TEXT
        if Kind.DOCUMENT in containers:
            return self._document(shape, path, depth)
        element = Shape() if shape.element is None else shape.element
        type_ = self._quiet().fresh(element, path, depth=depth + 1)
        return None if type_ is None else Array(type_)

    def _document(self, shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        if sum(bool(seen.kinds) for seen in shape.fields.values()) > MAX_FIELDS:
            return self._map(shape, path, depth)
        fields: list[Field] = []
        taken = column_names.Taken()
        for name, seen in shape.fields.items():
            type_ = self._quiet().fresh(seen, (*path, name), depth=depth + 1)
            if type_ is not None:
                fields.append(Field(name, column_names.nested(name, taken=taken, naming=self.naming), type_))
        return Struct(tuple(fields)) if fields else None

    def _map(self, shape: Shape, path: tuple[str, ...], depth: int) -> ColumnType | None:
        value = self._quiet().fresh(values(shape), (*path, "*"), depth=depth + 1)
        return None if value is None else Map(value)

    def _quiet(self) -> _Join:
        """The same join, for the parts of a column that is new as a whole."""
        return _Join(self.pins, self.naming)

    def wider(self, type_: ColumnType, shape: Shape, path: tuple[str, ...], *, depth: int) -> ColumnType:
        """The type of a path that has one, after what was seen."""
        pin = self.pins.get(path)
        if pin is not None and not pin.is_map and pin.type is not None and widens(type_, pin.type):
            return pin.type
        if pin is not None and not pin.is_map:
            return type_
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
                if Kind.DOCUMENT not in shape.kinds:
                    return type_
                return Map(self.wider(value, values(shape), (*path, "*"), depth=depth + 1))
            case _:
                for group in groups(shape):
                    type_ = _absorbed(type_, group)
                return type_


def groups(shape: Shape) -> list[list[Kind]]:
    """The kinds that could make a column, by the document that showed each first, in the order of the
    events.
    """
    by_mark: dict[str, list[Kind]] = {}
    for seen in sorted(shape.kinds, key=lambda seen: (shape.kinds[seen], _RANK[seen])):
        if seen not in NOTHING:
            by_mark.setdefault(shape.kinds[seen], []).append(seen)
    return list(by_mark.values())


def _common(kinds: Sequence[Kind]) -> ColumnType:
    """The type that holds all of these scalar kinds, TEXT where there is none."""
    bases = {BASE[seen] for seen in kinds}
    if len(bases) == 1:
        return bases.pop()
    if _NUMBERS.issuperset(kinds):
        return Scalar.BIGINT if _DOUBLES.isdisjoint(kinds) else Scalar.DOUBLE
    return Scalar.TEXT


def _absorbed(type_: ColumnType, group: Iterable[Kind]) -> ColumnType:
    """A scalar type after kinds that it may have to widen for."""
    if type_ is not Scalar.INT:
        return type_
    if not _DOUBLES.isdisjoint(group):
        return Scalar.DOUBLE
    return Scalar.BIGINT if Kind.INT64 in group else type_


def values(shape: Shape) -> Shape:
    """What was seen at any name of documents that are used as maps."""
    merged = Shape()
    for name in sorted(shape.fields):
        merged.add(shape.fields[name])
    return merged


def widens(type_: ColumnType, pin: Scalar | Decimal) -> bool:
    """Whether Delta changes the type into the pinned one in place."""
    match (type_, pin):
        case (Scalar.INT, Scalar.BIGINT | Scalar.DOUBLE):
            return True
        case (Scalar.INT, Decimal(precision, scale)):
            return precision - scale >= 10
        case (Scalar.BIGINT, Decimal(precision, scale)):
            return precision - scale >= 20
        case (Scalar.STRING, Scalar.TEXT):
            return True
        case (Decimal(precision, scale), Decimal(wider, longer)):
            holds = longer >= scale and wider - longer >= precision - scale
            return holds and (wider, longer) != (precision, scale)
        case _:
            return False


def _columns(current: tuple[Column, ...], fields: tuple[Field, ...], naming: column_names.Naming) -> tuple[Column, ...]:
    """The table's columns: those that it has, then a new one for each path that needs it."""
    known = {column.path for column in current}
    columns = list(current)
    taken = column_names.Taken([*(column.name for column in current), *naming.reserved])
    paths = _leaves(fields, ()) if naming.flatten else [(item.name,) for item in fields]
    for path in paths:
        if path not in known and len(columns) < MAX_COLUMNS:
            columns.append(Column(path, column_names.top_level(path, taken=taken, naming=naming)))
    return tuple(columns)


def _with_columns(fields: Iterable[Field], paths: set[tuple[str, ...]], path: tuple[str, ...]) -> tuple[Field, ...]:
    """The flattened fields without those that found no place among the columns; their values are rescued."""
    kept = []
    for item in fields:
        here = (*path, item.name)
        if isinstance(item.type, Struct):
            inner = _with_columns(item.type.fields, paths, here)
            kept += [replace(item, type=Struct(inner))] if inner else []
        elif here in paths or (item.type in PARTS and (*here, PARTS[item.type][0]) in paths):
            kept.append(item)
    return tuple(kept)


def _leaves(fields: Iterable[Field], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    leaves: list[tuple[str, ...]] = []
    for item in fields:
        here = (*path, item.name)
        if isinstance(item.type, Struct):
            leaves.extend(_leaves(item.type.fields, here))
        elif item.type in PARTS:
            leaves.extend((*here, part) for part in PARTS[item.type])
        else:
            leaves.append(here)
    return leaves


# --- retype -------------------------------------------------------------------------------------------------

Steps = tuple[str | int, ...]
"""A way into a schema: names of fields, ELEMENT for what is in an array, VALUE for what is in a map."""
ELEMENT, VALUE = 0, 1


@dataclass(frozen=True)
class Conflict:
    """A place of the schema, and a kind of value that its column could not hold."""

    steps: Steps
    kind: Kind

    def to_json(self) -> str:
        """The conflict as one line of JSON."""
        return json.dumps([self.steps, self.kind.value])

    @staticmethod
    def from_json(text: str) -> Conflict:
        """The inverse of `to_json`."""
        steps, seen = json.loads(text)
        return Conflict(tuple(steps), Kind(seen))


def conflicts(schema: DocumentSchema, path: str, text: str) -> tuple[Conflict, ...]:
    """What one entry of `__rescued` says against the schema; nothing where no other type would hold the value.

    That is so for a place without a column (limits, `[]` and `{}`), for a value that is out of its own type's range,
    and for the earlier of two fields of one name. A path that may lead to two places speaks of both.
    """
    numbers_fields = schema.naming.arrays_as_documents
    value = arrays_as_documents(orjson.loads(text)) if numbers_fields else orjson.loads(text)
    seen = kind(value)
    if seen in NOTHING:
        return ()
    ways = (_places(schema.struct, given.split("."), numbers_fields) for given in (path, _NUMBERED.sub("", path)))
    places = next(filter(None, map(tuple, ways)), ())
    return tuple(Conflict(steps, seen) for steps, type_ in places if not _is_of(seen, type_) and cast(value, type_)[1])


_NUMBERED = re.compile(r"#\d+$")


def _is_of(seen: Kind, type_: ColumnType) -> bool:
    """Whether a kind is what the type is for, though a value of it may be out of its range."""
    match type_:
        case Struct() | Map():
            return seen is Kind.DOCUMENT
        case Array():
            return seen is Kind.ARRAY
        case _:
            return BASE.get(seen) is type_


def _places(type_: ColumnType, names: list[str], numbers_fields: bool) -> Iterator[tuple[Steps, ColumnType]]:
    """Where a dotted path may lead: names may hold dots."""
    if not names:
        yield (), type_
        return
    for end in range(1, len(names) + 1):
        name, rest = ".".join(names[:end]), names[end:]
        for step, inner in _below(type_, name, numbers_fields):
            yield from (((step, *steps), found) for steps, found in _places(inner, rest, numbers_fields))


def _below(type_: ColumnType, name: str, numbers_fields: bool) -> Iterator[tuple[str | int, ColumnType]]:
    match type_:
        case Struct():
            found = type_.by_name.get(name) or (type_.by_name.get(f"_{name}") if numbers_fields else None)
            if found is not None:
                yield found.name, found.type
        case Array(inner) if name.isdecimal():
            yield ELEMENT, inner
        case Map(inner):
            yield VALUE, inner


def retyped(
    schema: DocumentSchema, found: Iterable[Conflict], *, pins: Pins | None = None
) -> tuple[DocumentSchema, tuple[Change, ...]]:
    """The schema whose columns hold these values too, and its changes; pinned columns stay as they are.

    INT and BIGINT that met doubles become DOUBLE. A DOUBLE that met an int64 which is not exact there, and everything else,
    becomes TEXT. A place below one that becomes TEXT goes with it.
    """
    kinds: dict[Steps, set[Kind]] = {}
    for each in found:
        if _pin_path(each.steps) not in (pins or {}):
            kinds.setdefault(each.steps, set()).add(each.kind)
    struct: ColumnType = schema.struct
    changes = []
    for steps in sorted(kinds, key=lambda steps: (len(steps), [str(step) for step in steps])):
        old = _type_of(struct, steps)
        if old is None or old is Scalar.TEXT:
            continue
        is_number = old in (Scalar.INT, Scalar.BIGINT) and kinds[steps] <= _NUMBERS
        new = Scalar.DOUBLE if is_number else Scalar.TEXT
        struct = _with_type(struct, steps, new)
        changes.append(Change(".".join(_pin_path(steps)), What.RETYPED, ddl(old), ddl(new)))
    assert isinstance(struct, Struct)  # steps lead into it
    fields = struct.fields
    naming = schema.naming
    paths = {*(_leaves(fields, ()) if naming.flatten else ((item.name,) for item in fields))}
    kept = tuple(column for column in schema.columns if column.path in paths)
    return DocumentSchema(fields, _columns(kept, fields, naming), naming), tuple(changes)


def _pin_path(steps: Steps) -> tuple[str, ...]:
    """The path as settings write it: through arrays, `*` for the values of a map."""
    return tuple("*" if step == VALUE else str(step) for step in steps if step != ELEMENT)


def _type_of(type_: ColumnType, steps: Steps) -> ColumnType | None:
    """The type at a place, or None where a change above has taken the place away."""
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
            changed = (
                replace(item, type=_with_type(item.type, steps[1:], new)) if item.name == steps[0] else item
                for item in fields
            )
            return Struct(tuple(changed))
        case Array(inner):
            return Array(_with_type(inner, steps[1:], new))
        case Map(inner):
            return Map(_with_type(inner, steps[1:], new))
        case _:
            return type_


def differences(before: DocumentSchema, after: DocumentSchema) -> tuple[Change, ...]:
    """What makes the second schema out of the first, field by field; the order of fields and names of columns do not count."""
    return tuple(_differences(before.struct, after.struct, ()))


def _differences(before: Struct, after: Struct, path: tuple[str, ...]) -> Iterator[Change]:
    for item in after.fields:
        here = (*path, item.name)
        old = before.by_name.get(item.name)
        if old is None:
            yield Change(".".join(here), What.ADDED, None, ddl(item.type))
        elif isinstance(old.type, Struct) and isinstance(item.type, Struct):
            yield from _differences(old.type, item.type, here)
        elif old.type != item.type:
            yield Change(".".join(here), What.RETYPED, ddl(old.type), ddl(item.type))
    for name, gone in before.by_name.items():
        if name not in after.by_name:
            yield Change(".".join((*path, name)), What.REMOVED, ddl(gone.type), None)


# --- cast ---------------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """A value that its column cannot hold."""


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
MIN_DATE_MS = -62_135_424_000_000
"""0001-01-03T00:00:00Z: Python's clocks, which PySpark's `collect()` goes by, do not reach the two days before it in every zone."""
MAX_DATE_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last."""


def ejson(value: Any) -> str:
    """The Extended JSON text of a value of parsed EJSON."""
    try:
        return orjson.dumps(_arrays_back(value)).decode()
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits, which no BSON has
        return json.dumps(_arrays_back(value), separators=(",", ":"), ensure_ascii=False)


def _arrays_back(value: Any) -> Any:
    if isinstance(value, ArrayDocument):
        return [_arrays_back(item) for item in value.values()]
    if isinstance(value, dict):
        return {key: _arrays_back(item) for key, item in value.items()}
    return [_arrays_back(item) for item in value] if isinstance(value, list) else value


def cast(parsed_value: Any, column_type: ColumnType, *, path: str = "") -> tuple[Any, dict[str, str]]:
    """One value as its column type holds it, and what did not fit: dotted path -> Extended JSON text.

    Structs are dicts by column name, arrays lists, maps dicts, timestamps aware datetimes in UTC, decimals
    `decimal.Decimal`, binary bytes. What did not fit is None in its place. Never raises for a value of
    parsed EJSON.
    """
    rescued: dict[str, str] = {}
    return _cast(parsed_value, column_type, path or None, rescued), rescued


def row(parsed_document: Any, schema: DocumentSchema) -> tuple[dict[str, Any], dict[str, str]]:
    """One document as a row of the table (column name -> value, as `cast` gives it), and what did not fit.

    Where documents are flattened, one whose columns are all null is rescued as `{}`, or it could not be
    told from a document that is not there.
    """
    document = arrays_as_documents(parsed_document) if schema.naming.arrays_as_documents else parsed_document
    value, rescued = cast(document, schema.struct)
    if not schema.naming.flatten:
        return {name: (value or {}).get(name) for name, _ in schema.table()}, rescued
    for path in _emptied(value, schema.struct, ""):
        rescued.setdefault(path, "{}")
    return {column.name: _value_at(value, schema.struct, column.path) for column in schema.columns}, rescued


def _value_at(value: Any, type_: ColumnType, path: Sequence[str]) -> Any:
    for name in path:
        if value is None:
            return None
        if isinstance(type_, Struct):
            item = type_.by_name[name]
            value, type_ = value.get(item.column), item.type
        else:
            value = value.get(name)
    return value


def _emptied(value: Any, type_: Struct, prefix: str) -> list[str]:
    """The paths of documents that are there but have no value in any column."""
    paths = []
    for item in type_.fields:
        inner = None if value is None else value.get(item.column)
        if isinstance(item.type, Struct) and inner is not None:
            path = f"{prefix}{item.name}"
            paths += [path] if _is_blank(inner, item.type) else _emptied(inner, item.type, f"{path}.")
    return paths


def _is_blank(value: Any, type_: ColumnType) -> bool:
    if value is None or not isinstance(type_, Struct):
        return value is None
    return all(_is_blank(value.get(item.column), item.type) for item in type_.fields)


def _cast(value: Any, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> Any:
    seen = kind(value)
    if seen in _ABSENT:
        return None
    try:
        match type_:
            case Struct():
                return _cast_document(value, seen, type_, path, rescued)
            case Array(element):
                return _cast_array(value, seen, element, path, rescued)
            case Map(item_type):
                return _cast_map(value, seen, item_type, path, rescued)
            case Decimal(precision, scale):
                return _to_decimal(value, seen, precision, scale)
            case _:
                return _TO_SCALAR[type_](value, seen)
    except (_Misfit, KeyError, TypeError, ValueError, ArithmeticError):
        rescue(rescued, path or "", ejson(value))
        return None


def rescue(rescued: dict[str, str], path: str, text: str) -> None:
    """Keeps the value's text; names with dots can give two values one path, the later is then `path#2`,
    `#3`, …
    """
    free, number = path, 1
    while free in rescued:
        number += 1
        free = f"{path}#{number}"
    rescued[free] = text


def _cast_document(value: Any, seen: Kind, type_: Struct, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if seen not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT) and not isinstance(value, ArrayDocument):
        raise _Misfit
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = column_names.unescaped(key)
        step = key[1:] if isinstance(value, ArrayDocument) else name
        below = step if path is None else f"{path}.{step}"
        known = type_.by_name.get(name)
        if known is not None and known.column not in result:
            result[known.column] = _cast(item, known.type, below, rescued)
        elif kind(item) not in _ABSENT:
            rescue(rescued, below, ejson(item))
    return result


def _cast_array(value: Any, seen: Kind, element: ColumnType, path: str | None, rescued: dict[str, str]) -> list[Any]:
    if not isinstance(value, list):
        raise _Misfit
    return [_cast(item, element, f"{path}.{index}", rescued) for index, item in enumerate(value)]


def _cast_map(value: Any, seen: Kind, type_: ColumnType, path: str | None, rescued: dict[str, str]) -> dict[str, Any]:
    if seen not in (Kind.DOCUMENT, Kind.EMPTY_DOCUMENT):
        raise _Misfit
    return {
        name: _cast(item, type_, f"{path}.{name}", rescued)
        for name, item in ((column_names.unescaped(key), item) for key, item in value.items())
    }


def _to_int(value: Any, seen: Kind) -> int:
    if seen is not Kind.INT32:
        raise _Misfit
    return value if isinstance(value, int) else int(value["$numberInt"])


def _to_bigint(value: Any, seen: Kind) -> int:
    match seen:
        case Kind.INT32:
            return _to_int(value, seen)
        case Kind.INT64:
            number = value if isinstance(value, int) else int(value["$numberLong"])
            if not -(2**63) <= number < 2**63:
                raise _Misfit
            return number
        case _:
            raise _Misfit


def _to_double(value: Any, seen: Kind) -> float:
    if seen in _DOUBLES:
        return value if isinstance(value, float) else float(value["$numberDouble"])
    number = _to_bigint(value, seen)
    if float(number) != number:
        raise _Misfit
    return float(number)


def _to_string(value: Any, seen: Kind) -> str:
    match seen:
        case Kind.STRING:
            return str(value)
        case Kind.OBJECT_ID:
            return str(value["$oid"])
        case Kind.DECIMAL:
            return str(value["$numberDecimal"])
        case Kind.SYMBOL:
            return str(value["$symbol"])
        case Kind.CODE:
            return str(value["$code"])
        case Kind.MIN_KEY:
            return "MinKey"
        case Kind.MAX_KEY:
            return "MaxKey"
        case _:
            raise _Misfit


def _to_text(value: Any, seen: Kind) -> str:
    return _to_string(value, seen) if BASE.get(seen) is Scalar.STRING else ejson(value)


def _to_boolean(value: Any, seen: Kind) -> bool:
    if seen is not Kind.BOOLEAN:
        raise _Misfit
    return bool(value)


def _to_timestamp(value: Any, seen: Kind) -> datetime.datetime:
    match seen:
        case Kind.DATE:
            milliseconds = int(value["$date"]["$numberLong"])
        case Kind.TIMESTAMP:
            milliseconds = int(value["$timestamp"]["t"]) * 1000
        case _:
            raise _Misfit
    if not MIN_DATE_MS <= milliseconds <= MAX_DATE_MS:
        raise _Misfit
    return _EPOCH + datetime.timedelta(milliseconds=milliseconds)


def _to_binary(value: Any, seen: Kind) -> bytes:
    if seen is not Kind.BINARY:
        raise _Misfit
    return base64.b64decode(value["$binary"]["base64"], validate=True)


def _to_regex(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.REGEX:
        raise _Misfit
    expression = value["$regularExpression"]
    return {"regex": str(expression["pattern"]), "options": str(expression["options"])}


def _to_code_with_scope(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.CODE_WITH_SCOPE:
        raise _Misfit
    return {"code": str(value["$code"]), "scope": ejson(value["$scope"])}


def _to_db_pointer(value: Any, seen: Kind) -> dict[str, str]:
    if seen is not Kind.DB_POINTER:
        raise _Misfit
    pointer = value["$dbPointer"]
    return {"$ref": str(pointer["$ref"]), "$id": str(pointer["$id"]["$oid"])}


def _to_decimal(value: Any, seen: Kind, precision: int, scale: int) -> decimal.Decimal:
    """The number where its shortest decimal writing has no more digits than the column."""
    match seen:
        case Kind.INT32 | Kind.INT64:
            number = decimal.Decimal(_to_bigint(value, seen))
        case Kind.DOUBLE | Kind.NON_FINITE:
            number = decimal.Decimal(repr(_to_double(value, seen)))
        case Kind.DECIMAL:
            number = decimal.Decimal(value["$numberDecimal"])
        case _:
            raise _Misfit
    with decimal.localcontext() as context:
        context.prec = 80
        exact = number.quantize(decimal.Decimal(1).scaleb(-scale))
    if exact != number or len(exact.as_tuple().digits) > precision:
        raise _Misfit
    return exact


_TO_SCALAR: Mapping[Scalar, Callable[[Any, Kind], Any]] = {
    Scalar.INT: _to_int,
    Scalar.BIGINT: _to_bigint,
    Scalar.DOUBLE: _to_double,
    Scalar.STRING: _to_string,
    Scalar.TEXT: _to_text,
    Scalar.BOOLEAN: _to_boolean,
    Scalar.TIMESTAMP: _to_timestamp,
    Scalar.BINARY: _to_binary,
    Scalar.REGEX: _to_regex,
    Scalar.CODE_WITH_SCOPE: _to_code_with_scope,
    Scalar.DB_POINTER: _to_db_pointer,
}
