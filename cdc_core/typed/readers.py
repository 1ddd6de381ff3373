"""One reader for each column type: the msgspec type that the decoder gets for it, and its decoded values as an Arrow array.

A reader looks at the classes of a whole column first: where all are what the column holds, the array is made at once; else
value by value, and `cast` decides about those that are not.
"""

from __future__ import annotations

import base64
import bisect
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec
import pyarrow as pa

from cdc_core.extended_json.wrappers import escape_key, unescape_key
from cdc_core.schema import cast, kinds
from cdc_core.schema.column_types import ELEMENT, VALUE, Array, ColumnType, Field, Map, Scalar, Steps, Struct
from cdc_core.schema.kinds import Kind
from cdc_core.schema.pins import Pins, widens
from cdc_core.schema.shape import Shape
from cdc_core.typed import exact
from cdc_core.typed.lessons import NAMEABLE, Lesson, Lessons

_NOT_THERE = msgspec.UNSET
_NotThere = msgspec.UnsetType
_None = type(None)


_Classes = set[type]


def _any_of(*hints: Any) -> Any:
    """The type of values that are of one of these; they are known at runtime only."""
    return Union[hints]


def _wrapper(name: str, key: str, type_: Any) -> type[Any]:
    # Without gc: a struct of texts holds no cycle, and the collector would walk through millions of them.
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


@dataclass
class Findings:
    """What reading the columns says about documents, by their number in the slice."""

    rescued: dict[int, dict[str, str]] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    """Those that would change the schema."""
    hard: set[int] = field(default_factory=set)
    """Those whose row only the exact way can decide."""
    keys: int = 0
    """The keys that the columns account for; the texts must hold as many."""

    def rescue(self, row: int, path: str | None, text: str) -> None:
        """Keeps a value; a document with two values of one path goes the exact way, which knows their order."""
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


def count_keys(value: Any) -> int:
    """The fields of all documents in a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(count_keys, value.values()))
    return sum(map(count_keys, value)) if isinstance(value, list) else 0


class ColumnReader:
    """How the values of one place become an Arrow array; `hint` is their type for the decoder.

    `is_due`: the settings pin another type, and the first value here changes the column to it.
    """

    hint: Any
    type: ColumnType
    is_due: bool

    def read(self, values: list[Any], classes: _Classes, where: Where, findings: Findings) -> pa.Array:
        """The values as the column holds them; `classes` are theirs, None is a value that is not there."""
        raise NotImplementedError

    def _cast_alone(self, value: Any, number: int, where: Where, findings: Findings) -> Any:
        """A value that is not of the class expected, as the column holds it, or rescued."""
        if type(value) in _KEYS:
            value = msgspec.to_builtins(value)
        else:
            findings.keys += count_keys(value)
        held, rescued = cast.cast(value, self.type)
        if rescued or self.type is Scalar.INT:
            row, path = where(number)
            for text in rescued.values():
                findings.rescue(row, path, text)
            # INT alone is widened by values of other kinds: such a document would change the schema.
            if self.type is Scalar.INT and kinds.kind(value) in _CHANGES_INT:
                findings.new.add(row)
        return held

    def _note_due(self, values: list[Any], where: Where, findings: Findings) -> None:
        findings.new.update(where(number)[0] for number, value in enumerate(values) if value is not None)


class _ScalarReader(ColumnReader):
    """A scalar: plain, or in its wrapper; everything else value by value."""

    def __init__(self, type_: ColumnType, lesson: Lesson | None, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._arrow = exact.arrow(type_)
        self._plain = _PLAIN.get(type_)
        known = _OF_TYPE.get(type_, {})
        wrappers = set(lesson.wrappers) if lesson else set()
        # These types have one wrapper that is read fast: the decoder expects it before any lesson.
        if not wrappers and type_ in (Scalar.BIGINT, Scalar.TIMESTAMP, Scalar.BINARY, Scalar.DOUBLE):
            wrappers = {next(iter(known))}
        self._wrapper = known.get(next(iter(wrappers))) if len(wrappers) == 1 else None
        # msgspec takes one dict-like type in a union: with a wrapper, a document here is refused as a whole; where several wrappers
        # were seen, values stay dicts. Lists are let through, so that one of them is rescued alone.
        if self._wrapper is not None:
            self.hint = _any_of(self._wrapper, list, *_SCALARS)
        else:
            self.hint = Any if wrappers or type_ not in _PLAIN else _any_of(list, *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if self._wrapper is not None and self._wrapper in classes:
            # The keys of wrappers stand in the text, too, and are counted there.
            findings.keys += self._wrappers(values, classes) * _KEYS[self._wrapper]
        try:
            array = self._fast(values, classes)
        except (pa.ArrowInvalid, OverflowError, ValueError):
            array = None
        return self._slow(values, where, findings) if array is None else array

    def _wrappers(self, values: list[Any], classes: set[type]) -> int:
        """How many of the values are in their wrapper."""
        if classes <= {self._wrapper, _None}:
            return len(values) - (values.count(None) if len(classes) > 1 else 0)
        return sum(type(value) is self._wrapper for value in values)

    def _fast(self, values: list[Any], classes: set[type]) -> pa.Array | None:
        """The array where all values are of the class that is expected, or of its wrapper."""
        others = classes - {_None}
        if not others:
            return pa.nulls(len(values), self._arrow)
        # By class and not by isinstance: to Python, True is an int.
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
            # Beyond 2**53 not every integer is a double: the exact cast says which.
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
        # Arrow takes any instant, and PySpark cannot collect those beyond Python's clocks.
        if min(there) < cast.MIN_DATE_MS or max(there) > cast.MAX_DATE_MS:
            raise OverflowError
        return pa.array(times, _MILLISECONDS).cast(self._arrow)

    def _slow(self, values: list[Any], where: Where, findings: Findings) -> pa.Array:
        """The array, by the exact cast for each value that is not plainly what the column holds."""
        is_held = self._is_held
        held = [
            value if value is None or is_held(value) else self._cast_alone(value, number, where, findings)
            for number, value in enumerate(values)
        ]
        return pa.array(held, self._arrow)

    def _is_held(self, value: Any) -> bool:
        # A plain number of more than 32 bits reads as int as well, and is no INT.
        if type(value) is not self._plain:
            return False
        return self._plain is not int or -(2**31) <= value < 2**31


class _ArrayReader(ColumnReader):
    """An array."""

    def __init__(self, type_: Array, inner: ColumnReader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self._arrow = exact.arrow(type_)
        self.hint = _any_of(types.GenericAlias(list, (inner.hint,)), dict[str, Any], *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if not classes <= {list, _None}:
            values = [
                value if value is None or type(value) is list else self._cast_alone(value, number, where, findings)
                for number, value in enumerate(values)
            ]
        has_null = classes != {list}
        lists = [value or () for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, lists), initial=0)]
        flat = [*itertools.chain.from_iterable(lists)]
        inner = self._inner.read(flat, {*map(type, flat)}, _inside(where, starts, None), findings)
        return pa.ListArray.from_arrays(_offsets(values, starts, has_null), inner)


class _MapReader(ColumnReader):
    """A document used as a map."""

    def __init__(self, type_: Map, inner: ColumnReader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self.hint = _any_of(types.GenericAlias(dict, (str, inner.hint)), list, *_SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if not classes <= {dict, _None}:
            values = [
                value if value is None or type(value) is dict else self._cast_alone(value, number, where, findings)
                for number, value in enumerate(values)
            ]
        has_null = classes != {dict}
        maps = [value or {} for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, maps), initial=0)]
        names = [*itertools.chain.from_iterable(maps)]
        findings.keys += len(names)
        findings.hard.update(  # escaped names, and what may be a wrapper
            where(bisect.bisect_right(starts, number) - 1)[0] for number, name in enumerate(names) if name.startswith("$")
        )
        flat = [*itertools.chain.from_iterable(each.values() for each in maps)]
        inner = self._inner.read(flat, {*map(type, flat)}, _inside(where, starts, names), findings)
        return pa.MapArray.from_arrays(_offsets(values, starts, has_null), pa.array(names, pa.string()), inner)


def _offsets(values: Sequence[Any], starts: list[int], has_null: bool) -> pa.Array:
    if has_null:
        # Arrow takes a null offset as the sign of a null list.
        places = [None if value is None else start for value, start in zip(values, starts)]
        return pa.array([*places, *starts[-1:]], pa.int32())
    return pa.array(starts, pa.int32())


@functools.cache
def _getter(number: int) -> Callable[[list[Any]], list[Any]]:
    """The values of a struct's member in many structs; as written code it takes half the time of `attrgetter`."""
    getter: Callable[[list[Any]], list[Any]] = eval(f"lambda structs: [struct.f{number} for struct in structs]")
    return getter


class DocumentReader(ColumnReader):
    """A document: known fields have readers; keys that were learned have none, and are rescued where they hold a value.

    A field whose key no struct can have has no reader either: documents that hold it are refused. `strangers` are
    the learned keys, each with whether the settings pin a type there or below.
    """

    def __init__(
        self,
        type_: Struct,
        readers: list[tuple[str, ColumnReader] | None],
        strangers: Mapping[str, bool],
        is_due: bool = False,
    ) -> None:
        self.type: Struct = type_
        self.is_due = is_due
        self._strangers = strangers
        self._readers = [None if each is None else each[1] for each in readers]
        named = [each for each in readers if each is not None]
        hints = [*(_any_of(reader.hint, _NotThere, _None) for _, reader in named), *itertools.repeat(Any, len(strangers))]
        # Members are f0, f1, …, since keys of documents need not be names in Python.
        rename = {f"f{number}": key for number, key in enumerate((*(key for key, _ in named), *strangers))}
        # UNSET and not None is the default: a key with null counts among the keys of a text, one that is absent does not.
        members = [(f"f{number}", hint, _NOT_THERE) for number, hint in enumerate(hints)]
        self.struct = msgspec.defstruct("Document", members, rename=rename, forbid_unknown_fields=True, gc=False)
        self._blank = self.struct()
        self.hint = _any_of(self.struct, list, *_SCALARS)
        self._fields = [pa.field(item.column, exact.arrow(item.type)) for item in type_.fields]

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        structs, absent = self.structs(values, classes, where, findings)
        members = [*self.members(structs, where, findings)]
        arrays = [
            pa.nulls(len(structs), at.type) if reader is None else reader.read(held, kinds, place, findings)
            for at, (_, reader, held, kinds, place) in zip(self._fields, members)
        ]
        mask = None if absent is None else pa.array(absent, pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=self._fields, mask=mask)

    def structs(
        self, values: list[Any], classes: set[type], where: Where, findings: Findings
    ) -> tuple[list[Any], list[bool] | None]:
        """The structs, blank where there is none, and where that is; None where all are there."""
        if self.is_due:
            self._note_due(values, where, findings)
        if classes == {self.struct}:
            return values, None
        for number, value in enumerate(values) if not classes <= {self.struct, _None} else ():
            if value is not None and type(value) is not self.struct:
                self._cast_alone(value, number, where, findings)
        # Arrow masks a null struct, but wants values for its members: those of a blank one.
        absent = [type(value) is not self.struct for value in values]
        return [self._blank if isnt else value for isnt, value in zip(absent, values)], absent

    def members(
        self, structs: list[Any], where: Where, findings: Findings
    ) -> Iterator[tuple[Field, ColumnReader | None, list[Any], set[type], Where]]:
        """Each field with its reader and what that reads. Values of learned keys are rescued."""
        numbers = itertools.count()
        for item, reader in zip(self.type.fields, self._readers):
            place = _of_field(where, item.name)
            if reader is None:
                yield item, None, [], set(), place
            else:
                yield item, reader, *_present(_getter(next(numbers))(structs), findings), place
        for number, (key, is_due) in zip(numbers, self._strangers.items()):
            values, classes = _present(_getter(number)(structs), findings)
            if classes - {_None}:
                place = _of_field(where, unescape_key(key))
                self._rescue_all(values, place, findings)
                if is_due:
                    self._note_due(values, place, findings)

    @staticmethod
    def _rescue_all(values: list[Any], where: Where, findings: Findings) -> None:
        for number, value in enumerate(values):
            if value is None:
                continue
            findings.keys += count_keys(value)
            if kinds.kind(value) is Kind.UNDEFINED:
                continue
            row, path = where(number)
            findings.rescue(row, path, cast.ejson(value))
            if Shape().see(value, ""):
                findings.new.add(row)


def _present(values: list[Any], findings: Findings) -> tuple[list[Any], set[type]]:
    """A member's values with None for what is not there (it never was, or `$unset` took it), and their classes; its keys
    are counted."""
    classes = {*map(type, values)}
    if _NotThere not in classes:
        findings.keys += len(values)
        return values, classes
    if len(classes) == 1:
        return [None] * len(values), {_None}
    classes.discard(_NotThere)
    findings.keys += len(values) - values.count(_NOT_THERE)
    return [None if value is _NOT_THERE else value for value in values], classes | {_None}


class ReaderBuilder:
    """The readers of one schema, after what was learned."""

    def __init__(self, pins: Pins, lessons: Lessons) -> None:
        self._pins = pins
        self._lessons = lessons

    def reader(self, type_: ColumnType, place: Steps, path: tuple[str, ...]) -> ColumnReader:
        pin = self._pins.get(path)
        is_due = pin is not None and not pin.is_map and pin.type is not None and widens(type_, pin.type)
        match type_:
            case Struct():
                return self.document(type_, place, path, is_due)
            case Array(inner):
                return _ArrayReader(type_, self.reader(inner, (*place, ELEMENT), path), is_due)
            case Map(inner):
                return _MapReader(type_, self.reader(inner, (*place, VALUE), (*path, "*")), is_due)
            case _:
                return _ScalarReader(type_, self._lessons.at.get(place), is_due)

    def document(self, type_: Struct, place: Steps, path: tuple[str, ...], is_due: bool = False) -> DocumentReader:
        lesson = self._lessons.at.get(place, Lesson())
        seen = {unescape_key(key): key for key in lesson.keys}
        readers = []
        for item in type_.fields:
            key = seen.get(item.name, escape_key(item.name))
            reader = self.reader(item.type, (*place, item.name), (*path, item.name))
            readers.append((key, reader) if NAMEABLE.fullmatch(key) else None)
        strangers = {key: self._may_be_pinned((*path, name)) for name, key in seen.items() if name not in type_.by_name}
        return DocumentReader(type_, readers, strangers, is_due)

    def _may_be_pinned(self, path: tuple[str, ...]) -> bool:
        return any(pinned[: len(path)] == path for pinned in self._pins)
