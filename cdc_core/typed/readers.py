"""One reader per column type: the msgspec type for the decoder, and decoded values as an Arrow array. Documents have
theirs in `document_readers`.

A reader first checks the classes of a whole column: if all are what the column holds, the array is made at once;
otherwise value by value, with `cast` for those that differ.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import re
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.properties.unwrap import FieldValues
from cdc_core.schema import cast, kinds
from cdc_core.schema.column_types import Array, ColumnType, Decimal, Map, Scalar
from cdc_core.schema.kinds import Kind
from cdc_core.typed import exact
from cdc_core.typed.lessons import Lesson

ANY = msgspec.json.Decoder()
"""Reads any JSON, for a value that is inspected alone."""

NoneType = type(None)

_Classes = set[type]


def any_of(*hints: Any) -> Any:
    """The union of these types, which are only known at runtime."""
    return Union[hints]


def _wrapper(name: str, key: str, type_: Any) -> type[Any]:
    # Without gc: a struct of texts holds no cycles, and the collector would walk through millions of them.
    return msgspec.defstruct(name, [("v", type_)], rename={"v": key}, forbid_unknown_fields=True, gc=False)


_Long = _wrapper("Long", "$numberLong", str)
_Base64 = msgspec.defstruct("Base64", [("base64", str), ("subType", str)], forbid_unknown_fields=True, gc=False)
_STRINGS = {key: _wrapper("Text", key, str) for key in ("$oid", "$numberDecimal", "$symbol", "$code")}
_DOUBLE = _wrapper("Double", "$numberDouble", str)
_DATE = _wrapper("Date", "$date", _Long)
_BINARY = _wrapper("Binary", "$binary", _Base64)
_Moment = msgspec.defstruct("Moment", [("t", int), ("i", int)], forbid_unknown_fields=True, gc=False)
_TIMESTAMP = _wrapper("Timestamp", "$timestamp", _Moment)
_KEYS: dict[type, int] = {_Long: 1, _DOUBLE: 1, _DATE: 2, _BINARY: 3, _TIMESTAMP: 3} | dict.fromkeys(_STRINGS.values(), 1)
"""The wrappers that are decoded as structs, and how many keys each has."""

_OF_TYPE: dict[ColumnType, dict[str, type[Any]]] = {
    Scalar.BIGINT: {"$numberLong": _Long},
    Scalar.DOUBLE: {"$numberDouble": _DOUBLE},
    Scalar.STRING: _STRINGS,
    Scalar.TEXT: _STRINGS,
    Scalar.TIMESTAMP: {"$date": _DATE, "$timestamp": _TIMESTAMP},
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
SCALARS = (str, int, float, bool, NoneType)
_OF_DECIMAL: dict[str, type[Any]] = {"$numberDecimal": _STRINGS["$numberDecimal"]}
_AS_TEXT: dict[type, Callable[[Any], str]] = {
    int: str,
    float: lambda value: orjson.dumps(value).decode(),
    bool: lambda value: "true" if value else "false",
}
"""The text of plain values in a TEXT column."""
_CHANGES_INT = frozenset({Kind.INT64, Kind.DOUBLE, Kind.NON_FINITE})
_EXACT_IN_DOUBLE = 2**53
_MILLISECONDS = pa.timestamp("ms", tz="UTC")


@dataclass
class Findings:
    """What reading the columns found about documents, by their number in the slice."""

    rescued: dict[int, dict[str, str]] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    """Documents that would change the schema."""
    hard: set[int] = field(default_factory=set)
    """Documents that need the exact path."""
    keys: int = 0
    """The number of keys in the columns' values; the texts must have as many."""

    def rescue(self, row: int, path: str | None, text: str) -> None:
        """Stores a value; a document with two values at one path takes the exact path, which knows their order."""
        entries = self.rescued.setdefault(row, {})
        if path in entries:
            self.hard.add(row)
        entries[path or ""] = text


Where = Callable[[int], "tuple[int, str | None]"]
"""The document and the dotted path of the value with this number; a document itself has no path."""


def of_field(where: Where, name: str, arrays: Collection[int]) -> Where:
    """The places of a field's values; in the documents of `arrays`, which are laid out arrays, without the name's underscore."""

    def place(number: int) -> tuple[int, str | None]:
        row, path = where(number)
        step = name[1:] if number in arrays else name
        return row, step if path is None else f"{path}.{step}"

    return place


def _inside(where: Where, starts: Sequence[int], names: Sequence[str] | None) -> Where:
    """The places of an array's elements, or of a map's values by `names`."""

    def place(number: int) -> tuple[int, str | None]:
        container = bisect.bisect_right(starts, number) - 1
        row, path = where(container)
        return row, f"{path}.{number - starts[container] if names is None else names[number]}"

    return place


def count_keys(value: Any) -> int:
    """The number of fields of all documents in a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(count_keys, value.values()))
    return sum(map(count_keys, value)) if isinstance(value, list) else 0


class ColumnReader:
    """Turns the values of one place into an Arrow array; `hint` is their type for the decoder.

    `is_due`: the settings pin another type, and the first value here changes the column to it. `is_pinned`: they pin its type, and no other
    value changes it.
    """

    hint: Any
    type: ColumnType
    is_due: bool
    is_pinned = False
    values = FieldValues()

    def read(self, values: list[Any], classes: _Classes, where: Where, findings: Findings) -> pa.Array:
        """The values as the column's array; `classes` are their types, None stands for an absent value."""
        raise NotImplementedError

    def _cast_alone(self, value: Any, number: int, where: Where, findings: Findings) -> Any:
        """A value of an unexpected class, converted or rescued."""
        if type(value) in _KEYS:
            value = msgspec.to_builtins(value)
        else:
            findings.keys += count_keys(value)
            if type(value) is list and not self.values.are_kept:
                if not isinstance(self.type, (Scalar, Decimal)):
                    findings.hard.add(where(number)[0])
                    return None
                value = kinds.laid_out(value, self.values)
        cell, rescued = cast.cast(value, self.type)
        if rescued or self.type is Scalar.INT:
            row, path = where(number)
            for text in rescued.values():
                findings.rescue(row, path, text)
            # Only INT is widened by values of other kinds: such a document would change the schema.
            if self.type is Scalar.INT and not self.is_pinned and kinds.kind(value) in _CHANGES_INT:
                findings.new.add(row)
        return cell

    def _note_due(self, values: list[Any], where: Where, findings: Findings) -> None:
        findings.new.update(where(number)[0] for number, value in enumerate(values) if value is not None)


def _string_of(value: dict[str, Any]) -> str | None:
    key, text = next(iter(value.items()), ("", None))
    return text if key in _STRINGS and len(value) == 1 and type(text) is str else None


def _long_of(value: dict[str, Any]) -> int | None:
    text = value.get("$numberLong")
    if len(value) != 1 or type(text) is not str or not _DIGITS(text):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None


def _date_of(value: dict[str, Any]) -> int | None:
    """Microseconds since 1970."""
    content = value.get("$date")
    milliseconds = _long_of(content) if len(value) == 1 and type(content) is dict else None
    if milliseconds is None or not cast.MIN_DATE_MS <= milliseconds <= cast.MAX_DATE_MS:
        return None
    return milliseconds * 1000


_DIGITS = re.compile(r"-?[0-9]{1,19}").fullmatch
_UNWRAPPED: dict[ColumnType, tuple[Callable[[dict[str, Any]], Any], int]] = {
    Scalar.STRING: (_string_of, 1),
    Scalar.TEXT: (_string_of, 1),
    Scalar.BIGINT: (_long_of, _KEYS[_Long]),
    Scalar.TIMESTAMP: (_date_of, _KEYS[_DATE]),
}
"""Reads a value from its wrapper where a column has several wrappers, and the wrapper's number of keys; the function
returns None if `cast` must decide.
"""


class ScalarReader(ColumnReader):
    """A scalar, plain or in its wrapper; everything else value by value."""

    def __init__(self, type_: ColumnType, lesson: Lesson | None, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._arrow = exact.arrow(type_)
        self._plain = _PLAIN.get(type_)
        wrapper_classes = _OF_DECIMAL if isinstance(type_, Decimal) else _OF_TYPE.get(type_, {})
        wrappers = set(lesson.wrappers) if lesson else set()
        # These types have one wrapper with a fast path: the decoder expects it from the start.
        has_one = isinstance(type_, Decimal) or type_ in (Scalar.BIGINT, Scalar.TIMESTAMP, Scalar.BINARY, Scalar.DOUBLE)
        if not wrappers and has_one:
            wrappers = {next(iter(wrapper_classes))}
        self._wrapper = wrapper_classes.get(next(iter(wrappers))) if len(wrappers) == 1 else None
        # msgspec allows one dict-like type in a union: with a wrapper, the decoder refuses any other document here; if
        # several wrappers were seen, values stay dicts. Lists are accepted, so that one of them is rescued alone.
        if self._wrapper is not None:
            self.hint = any_of(self._wrapper, list, *SCALARS)
        else:
            self.hint = Any if wrappers or type_ not in _PLAIN else any_of(list, *SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if self._wrapper is not None and self._wrapper in classes:
            # The wrappers' keys are in the text as well, where they are counted.
            findings.keys += self._wrappers(values, classes) * _KEYS[self._wrapper]
        if isinstance(self.type, Decimal):
            return self._decimals(values, self.type, where, findings)
        try:
            array = self._fast(values, classes)
        except (pa.ArrowInvalid, OverflowError, ValueError):
            array = None
        return self._slow(values, where, findings) if array is None else array

    def _wrappers(self, values: list[Any], classes: set[type]) -> int:
        """How many of the values are in their wrapper."""
        if classes <= {self._wrapper, NoneType}:
            return len(values) - (values.count(None) if len(classes) > 1 else 0)
        return sum(type(value) is self._wrapper for value in values)

    def _fast(self, values: list[Any], classes: set[type]) -> pa.Array | None:
        """The array, if all values have the expected class or its wrapper."""
        value_classes = classes - {NoneType}
        if not value_classes:
            return pa.nulls(len(values), self._arrow)
        # By class, not isinstance: in Python, True is an int.
        if value_classes == {self._plain}:
            return pa.array(values, self._arrow)
        if value_classes == {self._wrapper}:
            contents = [value.v for value in values] if len(classes) == 1 else [value and value.v for value in values]
            return self._unwrapped(contents, has_null=len(classes) > 1)
        if value_classes == {self._plain, self._wrapper}:
            convert: Any = self._plain
            return pa.array([convert(value.v) if type(value) is self._wrapper else value for value in values], self._arrow)
        if self.type is Scalar.DOUBLE and value_classes <= {float, int}:
            integers = [value for value in values if type(value) is int]
            # Beyond 2**53 not every integer is a double: the exact cast decides.
            if -_EXACT_IN_DOUBLE <= min(integers) and max(integers) <= _EXACT_IN_DOUBLE:
                return pa.array([None if value is None else float(value) for value in values], self._arrow)
        return None

    def _unwrapped(self, inner: list[Any], *, has_null: bool) -> pa.Array:
        match self.type:
            case Scalar.BIGINT:
                numbers = [None if value is None else int(value) for value in inner] if has_null else [*map(int, inner)]
                return pa.array(numbers, self._arrow)
            case Scalar.DOUBLE:
                return pa.array([None if value is None else float(value) for value in inner], self._arrow)
            case Scalar.TIMESTAMP:
                return self._times(inner, has_null)
            case Scalar.BINARY:
                inner = [None if value is None else base64.b64decode(value.base64, validate=True) for value in inner]
        return pa.array(inner, self._arrow)

    def _times(self, inner: list[Any], has_null: bool) -> pa.Array:
        times: Sequence[int | None]
        if self._wrapper is _TIMESTAMP:
            times = [None if value is None else value.t * 1000 for value in inner]
            present = [value for value in times if value is not None]
        elif has_null:
            times = [None if value is None else int(value.v) for value in inner]
            present = [value for value in times if value is not None]
        else:
            present = [int(value.v) for value in inner]
            times = present
        # Arrow accepts any instant, but PySpark cannot collect those outside Python's datetime.
        if min(present) < cast.MIN_DATE_MS or max(present) > cast.MAX_DATE_MS:
            raise OverflowError
        return pa.array(times, _MILLISECONDS).cast(self._arrow)

    def _decimals(self, values: list[Any], type_: Decimal, where: Where, findings: Findings) -> pa.Array:
        """The array, with the exact cast for each value that is not written in digits that fit the column."""
        texts = pa.array(map(self._digits, values), pa.string())
        integer_digits = type_.precision - type_.scale
        integer_pattern = rf"[0-9]{{1,{integer_digits}}}" if integer_digits else "0"
        fraction_pattern = rf"(\.[0-9]{{1,{type_.scale}}})?" if type_.scale else ""
        is_plain = pc.fill_null(pc.match_substring_regex(texts, f"^-?{integer_pattern}{fraction_pattern}$"), False)
        array = pc.if_else(is_plain, texts, None).cast(self._arrow)
        if is_plain.true_count == len(values):
            return array
        cast_values = [
            None if fits or value is None else self._cast_alone(value, number, where, findings)
            for number, (value, fits) in enumerate(zip(values, is_plain.to_pylist()))
        ]
        return pc.coalesce(array, pa.array(cast_values, self._arrow))

    def _digits(self, value: Any) -> str | None:
        """A number as it is written; None for other values."""
        if type(value) is self._wrapper:
            text: str = value.v
            return text
        is_number = type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)
        return repr(value) if is_number else None

    def _slow(self, values: list[Any], where: Where, findings: Findings) -> pa.Array:
        """The array, with the exact cast for each value that the column does not simply hold."""
        is_held, (unwrapped, keys) = self._is_held, _UNWRAPPED.get(self.type, (None, 0))
        texts = _AS_TEXT if self.type is Scalar.TEXT else {}
        cells = []
        for number, value in enumerate(values):
            if type(value) in texts:
                value = texts[type(value)](value)
            elif value is not None and not is_held(value):
                content = unwrapped(value) if unwrapped is not None and type(value) is dict else None
                if content is None:
                    value = self._cast_alone(value, number, where, findings)
                else:
                    findings.keys += keys
                    value = content
            cells.append(value)
        return pa.array(cells, self._arrow)

    def _is_held(self, value: Any) -> bool:
        # A number of more than 32 bits is an int as well, but not an INT.
        if type(value) is not self._plain:
            return False
        return self._plain is not int or -(2**31) <= value < 2**31


class ArrayReader(ColumnReader):
    """An array."""

    def __init__(self, type_: Array, inner: ColumnReader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self._arrow = exact.arrow(type_)
        self.hint = any_of(types.GenericAlias(list, (inner.hint,)), dict[str, Any], *SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if not classes <= {list, NoneType}:
            values = [
                value if value is None or type(value) is list else self._cast_alone(value, number, where, findings)
                for number, value in enumerate(values)
            ]
        has_null = classes != {list}
        lists = [value or () for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, lists), initial=0)]
        elements = [*itertools.chain.from_iterable(lists)]
        element_array = self._inner.read(elements, {*map(type, elements)}, _inside(where, starts, None), findings)
        return pa.ListArray.from_arrays(_offsets(values, starts, has_null), element_array)


class MapReader(ColumnReader):
    """A document used as a map."""

    def __init__(self, type_: Map, inner: ColumnReader, is_due: bool) -> None:
        self.type = type_
        self.is_due = is_due
        self._inner = inner
        self.hint = any_of(types.GenericAlias(dict, (str, inner.hint)), list, *SCALARS)

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if self.is_due:
            self._note_due(values, where, findings)
        if not classes <= {dict, NoneType}:
            values = [
                value if value is None or type(value) is dict else self._cast_alone(value, number, where, findings)
                for number, value in enumerate(values)
            ]
        has_null = classes != {dict}
        maps = [value or {} for value in values] if has_null else values
        starts = [*itertools.accumulate(map(len, maps), initial=0)]
        names = [*itertools.chain.from_iterable(maps)]
        findings.keys += len(names)
        findings.hard.update(  # escaped names, and possible wrappers
            where(bisect.bisect_right(starts, number) - 1)[0] for number, name in enumerate(names) if name.startswith("$")
        )
        map_values = [*itertools.chain.from_iterable(entries.values() for entries in maps)]
        value_array = self._inner.read(map_values, {*map(type, map_values)}, _inside(where, starts, names), findings)
        return pa.MapArray.from_arrays(_offsets(values, starts, has_null), pa.array(names, pa.string()), value_array)


def _offsets(values: Sequence[Any], starts: list[int], has_null: bool) -> pa.Array:
    if has_null:
        # In Arrow, a null offset marks a null list.
        offsets = [None if value is None else start for value, start in zip(values, starts)]
        return pa.array([*offsets, *starts[-1:]], pa.int32())
    return pa.array(starts, pa.int32())
