"""Documents' texts as Arrow columns: decoded in C by types that are made for the schema, column by column.

`Decoder.typed` gives for every text what `exact.rows` gives, and says which documents would change the schema. Three proofs
stand between the fast way and a wrong value:

    the decoder refuses     a key without a column, a document where a scalar is expected, a number out of range, bad JSON
    the classes of values   each column's are looked at before it is made of them: 5.5 is no INT, "5" neither
    the count of keys       in the texts and in what was decoded: a field that stands twice in a document differs there

A value that its column does not hold is cast by `cast.cast`, alone. A document that is refused goes the exact way,
and the decoder learns from it (a key that holds only null, an ObjectId in a column of strings), so that the next one like
it need not. What was learned changes the speed and never a result.
"""

from __future__ import annotations

import base64
import bisect
import functools
import gc
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.schema import cast, document_schema, evolution, kinds
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import PARTS, Array, ColumnType, DocumentSchema, Map, Scalar, Struct
from cdc_core.schema.kinds import WRAPPERS, Kind
from cdc_core.schema.pins import Pins, widens
from cdc_core.schema.shape import Shape
from cdc_core.typed import exact

SLICE = 1 << 20
"""About so many bytes of text are decoded at once: what they give stays in the processor's cache."""

SLICE_ROWS = 250
"""But so many documents at least, where they are large: each column costs something by itself."""

LEARNED = 4000
"""So many keys without a column are learned for one place."""

_LESSONS = (8, 100, 1000, 10_000)
"""The decoder is made anew after so many refused documents."""

_UNSET = msgspec.UNSET
_Unset = msgspec.UnsetType
_None = type(None)


_Classes = set[type]


def _any_of(*hints: Any) -> Any:
    """The type of values that are of one of these; they are known at runtime only."""
    return Union[hints]


def _wrapper(name: str, key: str, type_: Any) -> type[Any]:
    return msgspec.defstruct(name, [("v", type_)], rename={"v": key}, forbid_unknown_fields=True, gc=False)


_Long = _wrapper("Long", "$numberLong", str)
_Base64 = msgspec.defstruct("Base64", [("base64", str), ("subType", str)], forbid_unknown_fields=True, gc=False)
_STRINGS = {key: _wrapper("Text", key, str) for key in ("$oid", "$numberDecimal", "$symbol", "$code")}
_DOUBLE = _wrapper("Double", "$numberDouble", str)
_DATE = _wrapper("Date", "$date", _Long)
_BINARY = _wrapper("Binary", "$binary", _Base64)
_KEYS: dict[type, int] = {_Long: 1, _DOUBLE: 1, _DATE: 2, _BINARY: 3} | dict.fromkeys(_STRINGS.values(), 1)
"""The wrappers that are decoded as such, and how many keys each has."""

_OF_TYPE: dict[ColumnType, dict[str, type[Any]]] = {
    Scalar.BIGINT: {"$numberLong": _Long},
    Scalar.DOUBLE: {"$numberDouble": _DOUBLE},
    Scalar.STRING: _STRINGS,
    Scalar.TEXT: _STRINGS,
    Scalar.TIMESTAMP: {"$date": _DATE},
    Scalar.BINARY: {"$binary": _BINARY},
}
_PLAIN: dict[ColumnType, type[Any]] = {
    Scalar.INT: int,
    Scalar.BIGINT: int,
    Scalar.DOUBLE: float,
    Scalar.STRING: str,
    Scalar.TEXT: str,
    Scalar.BOOLEAN: bool,
}
_SCALARS = (str, int, float, bool, _None)
_CHANGES_INT = frozenset({Kind.INT64, Kind.DOUBLE, Kind.NON_FINITE})
_EXACT_IN_DOUBLE = 2**53
_MILLISECONDS = pa.timestamp("ms", tz="UTC")


def escaped(name: str) -> str:
    """The key that Extended JSON has for a field's own name."""
    return f"${name}" if column_names.unescaped(f"${name}") == name else name


# --- what is found out about the documents of one slice ------------------------------------------------------


@dataclass
class _Found:
    """What reading the columns says about documents, by their number in the slice."""

    rescued: dict[int, dict[str, str]] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    """Those that would change the schema."""
    hard: set[int] = field(default_factory=set)
    """Those that only the exact way can tell."""
    keys: int = 0

    def rescue(self, row: int, path: str | None, text: str) -> None:
        """Keeps a value; two of one path are told apart by the exact way, which knows their order."""
        entries = self.rescued.setdefault(row, {})
        if path in entries:
            self.hard.add(row)
        entries[path or ""] = text


Where = Callable[[int], "tuple[int, str | None]"]
"""The document and the dotted path of the value with this number; the document itself has none."""


def _of_field(where: Where, name: str) -> Where:
    def place(number: int) -> tuple[int, str | None]:
        row, path = where(number)
        return row, name if path is None else f"{path}.{name}"

    return place


def _inside(where: Where, starts: Sequence[int], names: Sequence[str] | None) -> Where:
    """The elements of arrays, or the values of maps by their `names`."""

    def place(number: int) -> tuple[int, str | None]:
        container = bisect.bisect_right(starts, number) - 1
        row, path = where(container)
        return row, f"{path}.{number - starts[container] if names is None else names[number]}"

    return place


def _count_keys(value: Any) -> int:
    """The fields of all documents in a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(_count_keys, value.values()))
    return sum(map(_count_keys, value)) if isinstance(value, list) else 0


# --- readers: one for each column type -----------------------------------------------------------------------


class _Reader:
    """How the values of one place become an Arrow array; `hint` is their type for the decoder.

    `is_due` says that a pin waits for any value here to change the column.
    """

    hint: Any
    type: ColumnType
    is_due: bool

    def read(self, values: list[Any], classes: _Classes, where: Where, found: _Found) -> pa.Array:
        """The values as the column holds them; `classes` are theirs, None is a value that is not there."""
        raise NotImplementedError

    def _misfit(self, value: Any, number: int, where: Where, found: _Found) -> Any:
        """A value that is not of the class expected, as the column holds it, or rescued."""
        if type(value) in _KEYS:
            value = msgspec.to_builtins(value)
        else:
            found.keys += _count_keys(value)
        held, rescued = cast.cast(value, self.type)
        if rescued or self.type is Scalar.INT:
            row, path = where(number)
            for text in rescued.values():
                found.rescue(row, path, text)
            if self.type is Scalar.INT and kinds.kind(value) in _CHANGES_INT:
                found.new.add(row)
        return held

    def _note_due(self, values: list[Any], where: Where, found: _Found) -> None:
        found.new.update(where(number)[0] for number, value in enumerate(values) if value is not None)


class _Leaf(_Reader):
    """A scalar: plain, or in its wrapper; everything else value by value."""

    def __init__(self, type_: ColumnType, lesson: _Lesson | None, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._arrow = exact.arrow(type_)
        self._plain = _PLAIN.get(type_)
        known = _OF_TYPE.get(type_, {})
        wrappers = set(lesson.wrappers) if lesson else set()
        if not wrappers and type_ in (Scalar.BIGINT, Scalar.TIMESTAMP, Scalar.BINARY, Scalar.DOUBLE):
            wrappers = {next(iter(known))}
        self._wrapper = known.get(next(iter(wrappers))) if len(wrappers) == 1 else None
        if self._wrapper is not None:
            self.hint = _any_of(self._wrapper, list, *_SCALARS)
        else:
            self.hint = Any if wrappers or type_ not in _PLAIN else _any_of(list, *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, found: _Found) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, found)
        if self._wrapper is not None and self._wrapper in classes:
            is_wrapper = len(values) if len(classes) == 1 else sum(type(value) is self._wrapper for value in values)
            found.keys += is_wrapper * _KEYS[self._wrapper]
        try:
            array = self._fast(values, classes)
        except (pa.ArrowInvalid, OverflowError, ValueError):
            array = None
        return self._slow(values, where, found) if array is None else array

    def _fast(self, values: list[Any], classes: set[type]) -> pa.Array | None:
        """The array where all values are of the class that is expected, or of its wrapper."""
        others = classes - {_None}
        if not others:
            return pa.nulls(len(values), self._arrow)
        if others == {self._plain}:
            return pa.array(values, self._arrow)
        if others == {self._wrapper}:
            held = [value.v for value in values] if len(classes) == 1 else [value and value.v for value in values]
            return self._unwrapped(held, has_null=len(classes) > 1)
        if others == {self._plain, self._wrapper}:
            convert: Any = self._plain
            return pa.array([convert(value.v) if type(value) is self._wrapper else value for value in values], self._arrow)
        if self.type is Scalar.DOUBLE and others <= {float, int}:
            whole = [value for value in values if type(value) is int]
            if -_EXACT_IN_DOUBLE <= min(whole) and max(whole) <= _EXACT_IN_DOUBLE:
                return pa.array([None if value is None else float(value) for value in values], self._arrow)
        return None

    def _unwrapped(self, held: list[Any], *, has_null: bool) -> pa.Array:
        match self.type:
            case Scalar.BIGINT:
                numbers = [None if value is None else int(value) for value in held] if has_null else [*map(int, held)]
                return pa.array(numbers, self._arrow)
            case Scalar.DOUBLE:
                return pa.array([None if value is None else float(value) for value in held], self._arrow)
            case Scalar.TIMESTAMP:
                return self._times(held, has_null)
            case Scalar.BINARY:
                held = [None if value is None else base64.b64decode(value.base64, validate=True) for value in held]
        return pa.array(held, self._arrow)

    def _times(self, held: list[Any], has_null: bool) -> pa.Array:
        times: Sequence[int | None]
        if has_null:
            times = [None if value is None else int(value.v) for value in held]
            there = [value for value in times if value is not None]
        else:
            there = [int(value.v) for value in held]
            times = there
        if min(there) < cast.MIN_DATE_MS or max(there) > cast.MAX_DATE_MS:
            raise OverflowError
        return pa.array(times, _MILLISECONDS).cast(self._arrow)

    def _slow(self, values: list[Any], where: Where, found: _Found) -> pa.Array:
        """The array, by the exact cast for each value that is not plainly what the column holds."""
        is_held = self._is_held
        held = [
            value if value is None or is_held(value) else self._misfit(value, number, where, found)
            for number, value in enumerate(values)
        ]
        return pa.array(held, self._arrow)

    def _is_held(self, value: Any) -> bool:
        if type(value) is not self._plain:
            return False
        return self._plain is not int or -(2**31) <= value < 2**31


class _Elements(_Reader):
    """An array."""

    def __init__(self, type_: Array, inner: _Reader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self._arrow = exact.arrow(type_)
        self.hint = _any_of(types.GenericAlias(list, (inner.hint,)), dict[str, Any], *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, found: _Found) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, found)
        if not classes <= {list, _None}:
            values = [
                value if value is None or type(value) is list else self._misfit(value, number, where, found)
                for number, value in enumerate(values)
            ]
        has_null = classes != {list}
        lists = [value or () for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, lists), initial=0)]
        flat = [*itertools.chain.from_iterable(lists)]
        inner = self._inner.read(flat, {*map(type, flat)}, _inside(where, starts, None), found)
        return pa.ListArray.from_arrays(_offsets(values, starts, has_null), inner)


class _Entries(_Reader):
    """A document used as a map."""

    def __init__(self, type_: Map, inner: _Reader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self.hint = _any_of(types.GenericAlias(dict, (str, inner.hint)), list, *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, found: _Found) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, found)
        if not classes <= {dict, _None}:
            values = [
                value if value is None or type(value) is dict else self._misfit(value, number, where, found)
                for number, value in enumerate(values)
            ]
        has_null = classes != {dict}
        maps = [value or {} for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, maps), initial=0)]
        names = [*itertools.chain.from_iterable(maps)]
        found.keys += len(names)
        found.hard.update(  # escaped names, and what may be a wrapper
            where(bisect.bisect_right(starts, number) - 1)[0] for number, name in enumerate(names) if name.startswith("$")
        )
        flat = [*itertools.chain.from_iterable(each.values() for each in maps)]
        inner = self._inner.read(flat, {*map(type, flat)}, _inside(where, starts, names), found)
        return pa.MapArray.from_arrays(_offsets(values, starts, has_null), pa.array(names, pa.string()), inner)


def _offsets(values: Sequence[Any], starts: list[int], has_null: bool) -> pa.Array:
    if has_null:
        places = [None if value is None else start for value, start in zip(values, starts)]
        return pa.array([*places, *starts[-1:]], pa.int32())
    return pa.array(starts, pa.int32())


@functools.cache
def _getter(number: int) -> Callable[[list[Any]], list[Any]]:
    """The values of a struct's member in many structs; as written code it takes half the time of `attrgetter`."""
    getter: Callable[[list[Any]], list[Any]] = eval(f"lambda structs: [struct.f{number} for struct in structs]")
    return getter


class _Document(_Reader):
    """A document: known fields have readers, those that were learned have none and are rescued where they hold something.

    A field whose key no struct can have has no reader either: documents that hold it are refused. Of each stranger is told
    whether a pin waits there, or below.
    """

    def __init__(
        self,
        type_: Struct,
        readers: list[tuple[str, _Reader] | None],
        strangers: Mapping[str, bool],
        is_due: bool = False,
    ) -> None:
        self.type: Struct = type_
        self.is_due = is_due
        self._strangers = strangers
        self._readers = [None if each is None else each[1] for each in readers]
        named = [each for each in readers if each is not None]
        hints = [*(_any_of(reader.hint, _Unset, _None) for _, reader in named), *itertools.repeat(Any, len(strangers))]
        rename = {f"f{number}": key for number, key in enumerate((*(key for key, _ in named), *strangers))}
        members = [(f"f{number}", hint, _UNSET) for number, hint in enumerate(hints)]
        self.struct = msgspec.defstruct("Document", members, rename=rename, forbid_unknown_fields=True, gc=False)
        self._blank = self.struct()
        self.hint = _any_of(self.struct, list, *_SCALARS)
        self._fields = [pa.field(item.column, exact.arrow(item.type)) for item in type_.fields]

    def read(self, values: list[Any], classes: set[type], where: Where, found: _Found) -> pa.Array:
        structs, absent = self.structs(values, classes, where, found)
        members = [*self.members(structs, where, found)]
        arrays = [
            pa.nulls(len(structs), at.type) if reader is None else reader.read(held, kinds, place, found)
            for at, (_, reader, held, kinds, place) in zip(self._fields, members)
        ]
        mask = None if absent is None else pa.array(absent, pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=self._fields, mask=mask)

    def structs(
        self, values: list[Any], classes: set[type], where: Where, found: _Found
    ) -> tuple[list[Any], list[bool] | None]:
        """The structs, blank where there is none, and where that is; None where all are there."""
        if self.is_due:
            self._note_due(values, where, found)
        if classes == {self.struct}:
            return values, None
        for number, value in enumerate(values) if not classes <= {self.struct, _None} else ():
            if value is not None and type(value) is not self.struct:
                self._misfit(value, number, where, found)
        absent = [type(value) is not self.struct for value in values]
        return [self._blank if isnt else value for isnt, value in zip(absent, values)], absent

    def members(
        self, structs: list[Any], where: Where, found: _Found
    ) -> Iterator[tuple[document_schema.Field, _Reader | None, list[Any], set[type], Where]]:
        """Each field with its reader and what that reads. What the strangers among the members hold is rescued."""
        numbers = itertools.count()
        for item, reader in zip(self.type.fields, self._readers):
            place = _of_field(where, item.name)
            if reader is None:
                yield item, None, [], set(), place
            else:
                yield item, reader, *_present(_getter(next(numbers))(structs), found), place
        for number, (key, is_due) in zip(numbers, self._strangers.items()):
            values, classes = _present(_getter(number)(structs), found)
            if classes - {_None}:
                place = _of_field(where, column_names.unescaped(key))
                self._rescue_all(values, place, found)
                if is_due:
                    self._note_due(values, place, found)

    @staticmethod
    def _rescue_all(values: list[Any], where: Where, found: _Found) -> None:
        for number, value in enumerate(values):
            if value is None:
                continue
            found.keys += _count_keys(value)
            if kinds.kind(value) is Kind.UNDEFINED:
                continue
            row, path = where(number)
            found.rescue(row, path, cast.ejson(value))
            if Shape().see(value, ""):
                found.new.add(row)


def _present(values: list[Any], found: _Found) -> tuple[list[Any], set[type]]:
    """A member's values with None for what is not there, and their classes; its keys are counted."""
    classes = {*map(type, values)}
    if _Unset not in classes:
        found.keys += len(values)
        return values, classes
    if len(classes) == 1:
        return [None] * len(values), {_None}
    classes.discard(_Unset)
    found.keys += len(values) - sum(value is _UNSET for value in values)
    return [None if value is _UNSET else value for value in values], classes | {_None}


# --- what is learned -----------------------------------------------------------------------------------------

_ELEMENT, _VALUE = 0, 1
_Place = tuple[Union[str, int], ...]


@dataclass
class _Lesson:
    """What refused documents showed at one place."""

    keys: dict[str, None] = field(default_factory=dict)
    wrappers: set[str] = field(default_factory=set)


class _Lessons:
    """What was learned, by place."""

    def __init__(self) -> None:
        self.at: dict[_Place, _Lesson] = {}

    def learn(self, value: Any, type_: ColumnType, place: _Place = ()) -> None:
        """Notes what stands in a document that the schema does not tell."""
        match type_:
            case Struct():
                if kinds.kind(value) is Kind.DOCUMENT:
                    self._learn_fields(value, type_, place)
            case Array(inner):
                for item in value if isinstance(value, list) else ():
                    self.learn(item, inner, (*place, _ELEMENT))
            case Map(inner):
                for item in value.values() if isinstance(value, dict) else ():
                    self.learn(item, inner, (*place, _VALUE))
            case _:
                if isinstance(value, dict):
                    self._lesson(place).wrappers.add(next((key for key in value if key in WRAPPERS), ""))

    def _learn_fields(self, value: dict[str, Any], type_: Struct, place: _Place) -> None:
        for key, item in value.items():
            name = column_names.unescaped(key)
            known = type_.by_name.get(name)
            if known is not None:
                self.learn(item, known.type, (*place, name))
            is_told = known is not None and escaped(name) == key
            if not is_told and key not in WRAPPERS and _NAMEABLE.fullmatch(key):
                lesson = self._lesson(place)
                if len(lesson.keys) < LEARNED:
                    lesson.keys[key] = None

    def _lesson(self, place: _Place) -> _Lesson:
        return self.at.setdefault(place, _Lesson())


_NAMEABLE = re.compile(r'[^"\\\x00-\x1f]*')
"""Keys that a struct of msgspec can have; documents with others go the exact way."""


class _Making:
    """The readers of one schema, after what was learned."""

    def __init__(self, pins: Pins, lessons: _Lessons) -> None:
        self._pins = pins
        self._lessons = lessons

    def reader(self, type_: ColumnType, place: _Place, path: tuple[str, ...]) -> _Reader:
        pin = self._pins.get(path)
        is_due = pin is not None and not pin.is_map and pin.type is not None and widens(type_, pin.type)
        match type_:
            case Struct():
                return self.document(type_, place, path, is_due)
            case Array(inner):
                return _Elements(type_, self.reader(inner, (*place, _ELEMENT), path), is_due)
            case Map(inner):
                return _Entries(type_, self.reader(inner, (*place, _VALUE), (*path, "*")), is_due)
            case _:
                return _Leaf(type_, self._lessons.at.get(place), is_due)

    def document(self, type_: Struct, place: _Place, path: tuple[str, ...], is_due: bool = False) -> _Document:
        lesson = self._lessons.at.get(place, _Lesson())
        seen = {column_names.unescaped(key): key for key in lesson.keys}
        readers = []
        for item in type_.fields:
            key = seen.get(item.name, escaped(item.name))
            reader = self.reader(item.type, (*place, item.name), (*path, item.name))
            readers.append((key, reader) if _NAMEABLE.fullmatch(key) else None)
        strangers = {key: self._may_be_pinned((*path, name)) for name, key in seen.items() if name not in type_.by_name}
        return _Document(type_, readers, strangers, is_due)

    def _may_be_pinned(self, path: tuple[str, ...]) -> bool:
        return any(pinned[: len(path)] == path for pinned in self._pins)


# --- the decoder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Typed:
    """Texts as columns: as `exact.rows` gives them, with what is known of each document.

    `new` are those that may change the schema: one too many perhaps, never one too few. `refused` are not JSON to the letter.
    `exact` counts those that went the exact way.
    """

    rows: pa.StructArray
    new: pa.BooleanArray
    refused: pa.BooleanArray
    exact: int = 0

    def with_doubts(self) -> pa.StructArray:
        """`rows` with `is_doubtful`: new or refused. No row of it is null."""
        document, rescued, unreadable = self.rows.flatten()
        columns = [document, rescued, pc.fill_null(unreadable, False), pc.or_(self.new, self.refused)]
        return pa.StructArray.from_arrays(columns, names=["document", "rescued", "unreadable", "is_doubtful"])


class Decoder:
    """Types texts by one schema, and learns from those that are refused; not for two threads at once."""

    def __init__(self, schema: DocumentSchema, pins: Pins | None = None) -> None:
        self.schema = schema
        self._pins = pins or {}
        self._lessons = _Lessons()
        self._refused = 0
        self._typed = 0
        self._root: _Document | None = None
        self._decode: Callable[[str], Any] = _refuse
        self._make()

    def typed(self, texts: pa.Array) -> Typed:
        """Every text's row; the row of a null is null."""
        was_enabled = gc.isenabled()
        gc.disable()  # millions of values that hold no cycle
        try:
            parts = [self._slice(part) for part in self._slices(texts)]
        finally:
            if was_enabled:
                gc.enable()
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Typed(pa.nulls(0, exact.result_type(self.schema)), pa.nulls(0, pa.bool_()), pa.nulls(0, pa.bool_()))
        rows, new, refused = zip(*((part.rows, part.new, part.refused) for part in parts))
        count = sum(part.exact for part in parts)
        return Typed(pa.concat_arrays(rows), pa.concat_arrays(new), pa.concat_arrays(refused), count)

    def _slices(self, texts: pa.Array) -> Iterator[pa.Array]:
        """The texts in parts of about `SLICE` bytes; small ones at first, while there is much to learn."""
        size = max(SLICE_ROWS, SLICE * max(1, len(texts)) // max(1, texts.nbytes))
        start = 0
        while start < len(texts):
            part = texts.slice(start, min(size, 32 + self._typed))
            yield part
            self._typed += len(part)
            start += len(part)

    def _make(self) -> None:
        """A decoder for the schema and what was learned so far."""
        if self.schema.fields and not self.schema.naming.arrays_as_documents:
            self._root = _Making(self._pins, self._lessons).document(self.schema.struct, (), ())
            self._decode = msgspec.json.Decoder(self._root.struct).decode

    def _slice(self, texts: pa.Array) -> Typed:
        given = texts.to_pylist()
        refused = _hazardous(texts, given) if self._root is not None else {*range(len(given))}
        taken, structs = self._decoded(given, refused)
        found = _Found()
        try:
            fast = self._columns(structs, found) if structs else None
            if structs and _fields(texts, given, taken) != found.keys:
                found.hard.update(at for at, number in enumerate(taken) if not _has_fields_once(given[number]))
        except RecursionError:  # deeper than any BSON
            taken, found, fast = [], _Found(), None
        hard = {number for number, text in enumerate(given) if text is not None}.difference(taken)
        exactly = sorted(hard.union(taken[at] for at in found.hard))
        rows = self._assembled(given, None if fast is None else _rows(fast, found), taken, exactly)
        new = {taken[at] for at in found.new}
        if exactly and self._change([given[number] for number in exactly]):
            new.update(exactly)
        odd = {number for number in exactly if not _is_json(given[number])}
        return Typed(rows, _flags(new, len(given)), _flags(odd, len(given)), len(exactly))

    def _decoded(self, given: Sequence[str | None], refused: set[int]) -> tuple[list[int], list[Any]]:
        """The numbers of the texts that the decoder takes, and what it makes of them."""
        decode = self._decode
        taken, structs = [], []
        for number, text in enumerate(given):
            if text is not None and number not in refused:
                try:
                    structs.append(decode(text))
                except (msgspec.DecodeError, RecursionError):
                    continue
                taken.append(number)
        return taken, structs

    def _columns(self, structs: list[Any], found: _Found) -> pa.StructArray:
        """The table's columns of decoded documents."""
        assert self._root is not None
        arrays: dict[tuple[str, ...], pa.Array] = {}
        if self.schema.naming.flatten:
            _, emptied = _flattened(self._root, structs, _root, (), arrays, found)
            for row, path in emptied:
                found.rescued.setdefault(row, {}).setdefault(path or "", "{}")
        else:
            for item, reader, values, classes, place in self._root.members(structs, _root, found):
                if reader is not None:
                    arrays[(item.name,)] = reader.read(values, classes, place, found)
        return _of_arrays(self.schema, arrays, len(structs))

    def _assembled(
        self, given: list[str | None], fast: pa.StructArray | None, taken: list[int], exactly: list[int]
    ) -> pa.StructArray:
        """All rows in order, out of those that were decoded and those that go the exact way."""
        if fast is not None and len(taken) == len(given) and not exactly:
            return fast
        parts = [] if fast is None else [fast]
        if exactly:
            parts.append(exact.rows(pa.array([given[number] for number in exactly], pa.string()), self.schema))
        if not parts:
            return pa.nulls(len(given), exact.result_type(self.schema))
        place = {number: at for at, number in enumerate((*taken, *exactly))}  # the exact row of one that was decoded, too
        order = pa.array([place.get(number) for number in range(len(given))], pa.int64())
        return pa.concat_arrays(parts).take(order)

    def _change(self, texts: list[str]) -> bool:
        """Whether some of the documents would change the schema; the decoder learns from all of them."""
        shape = Shape()
        for text in texts:
            document = exact.seen(shape, text, "", arrays_as_documents=self.schema.naming.arrays_as_documents)
            if document is not None and self._refused < _LESSONS[-1]:
                self._lessons.learn(document, self.schema.struct)
        before, self._refused = self._refused, self._refused + len(texts)
        if any(before < lesson <= self._refused for lesson in _LESSONS):
            self._make()
        return bool(evolution.join(self.schema, shape, pins=self._pins)[1])


def _refuse(text: str) -> Any:
    raise msgspec.DecodeError


def _root(number: int) -> tuple[int, str | None]:
    return number, None


def _flattened(
    document: _Document,
    structs: list[Any],
    where: Where,
    path: tuple[str, ...],
    arrays: dict[tuple[str, ...], pa.Array],
    found: _Found,
) -> tuple[pa.BooleanArray, list[tuple[int, str | None]]]:
    """Puts the columns below a document into `arrays`; where all of them are null, and the documents below that hold nothing."""
    blank = pa.array(itertools.repeat(True, len(structs)), pa.bool_())
    emptied: list[tuple[int, str | None]] = []
    for item, reader, values, classes, place in document.members(structs, where, found):
        here = (*path, item.name)
        if isinstance(reader, _Document):
            inner, absent = reader.structs(values, classes, place, found)
            is_null, below = _flattened(reader, inner, place, here, arrays, found)
            holds_nothing = is_null if absent is None else pc.and_not(is_null, pa.array(absent, pa.bool_()))
            own = {row for row, isnt in enumerate(holds_nothing.to_pylist()) if isnt} if holds_nothing.true_count else set()
            emptied += [each for each in below if each[0] not in own]
            emptied += [place(row) for row in own]
        elif reader is not None:
            array = reader.read(values, classes, place, found)
            is_null = array.is_null()
            parts = PARTS.get(item.type, ())
            arrays.update(
                {(*here, part): pc.struct_field(array, number) for number, part in enumerate(parts)} or {here: array}
            )
        else:
            continue
        blank = pc.and_(blank, is_null)
    return blank, emptied


def _of_arrays(schema: DocumentSchema, arrays: dict[tuple[str, ...], pa.Array], count: int) -> pa.StructArray:
    """The table's columns as a struct, null where there is no array."""
    fields = [pa.field(name, exact.arrow(type_)) for name, type_ in schema.table()]
    columns = [
        arrays[column.path] if column.path in arrays else pa.nulls(count, at.type)
        for column, at in zip(schema.columns, fields)
    ]
    return pa.StructArray.from_arrays(columns, fields=fields)


def _rows(documents: pa.StructArray, found: _Found) -> pa.StructArray:
    """Documents with what was rescued, as `exact.rows` gives them."""
    count = len(documents)
    rescued = pa.nulls(count, exact.RESCUED)
    if any(found.rescued.values()):
        entries = [[*found.rescued[row].items()] or None if row in found.rescued else None for row in range(count)]
        rescued = pa.array(entries, exact.RESCUED)
    unreadable = pa.array(itertools.repeat(False, count), pa.bool_())
    return pa.StructArray.from_arrays([documents, rescued, unreadable], names=["document", "rescued", "unreadable"])


# --- texts ---------------------------------------------------------------------------------------------------


def _bytes(texts: pa.Array) -> bytes:
    """The texts one after the other; what a null hides may be among them."""
    offsets = memoryview(texts.buffers()[1]).cast("q" if pa.types.is_large_string(texts.type) else "i")
    data = texts.buffers()[2]
    if data is None:
        return b""
    return bytes(memoryview(data)[offsets[texts.offset] : offsets[texts.offset + len(texts)]])


_HAZARD = re.compile(r'\\u[dD]|\\\\":|"[ \t\r\n]+:')
"""Halves of surrogate pairs perhaps; and what makes the count of fields unsure: a key that ends with a backslash, or has space
after it."""


def _hazardous(texts: pa.Array, given: list[str | None]) -> set[int]:
    """The numbers of texts in which something stands that the fast way does not read."""
    blob = _bytes(texts)  # one sign alone is sought ten times as fast as two
    has_spaces = (b" " in blob and b'" ' in blob) or any(sign in blob for sign in (b"\n", b"\t", b"\r"))
    has_escapes = b"\\" in blob and (b"\\u" in blob or b'\\\\":' in blob)
    if not has_spaces and not has_escapes:
        return set()
    return {number for number, text in enumerate(given) if text is not None and _HAZARD.search(text)}


def _fields(texts: pa.Array, given: list[str | None], taken: list[int]) -> int:
    """How many fields these texts have: what ends a key, without what looks so inside a string.

    A string that begins with a colon counts, too: the count is never too small.
    """
    if len(taken) == len(given):
        blob = _bytes(texts)
    else:
        blob = "\n".join([text for number in taken if (text := given[number]) is not None]).encode()
    return blob.count(b'":') - (blob.count(b'\\":') if b"\\" in blob else 0)


def _has_fields_once(text: str | None) -> bool:
    """Whether no field of the document stands in it twice, as far as its text proves it."""
    assert text is not None
    return text.count('":') - text.count('\\":') == _count_keys(_ANY.decode(text))


def _is_json(text: str | None) -> bool:
    """Whether the text is JSON to the letter; the exact way also reads NaN and halves of surrogate pairs."""
    try:
        _ANY.decode(text or "")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


_ANY = msgspec.json.Decoder()


def refused(texts: pa.Array) -> pa.BooleanArray:
    """Which texts are not JSON to the letter."""
    return pa.array([text is not None and not _is_json(text) for text in texts.to_pylist()], pa.bool_())


def _flags(numbers: set[int], count: int) -> pa.BooleanArray:
    """True at these numbers."""
    return pa.array(
        [number in numbers for number in range(count)] if numbers else itertools.repeat(False, count), pa.bool_()
    )
