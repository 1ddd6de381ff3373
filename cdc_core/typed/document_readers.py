"""Readers of documents: each field's values go to the reader of its column.

Documents that have most of their fields are decoded as structs. Documents with few of very many fields, or with keys that a
struct cannot have, are decoded key by key.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from cdc_core.extended_json.wrappers import escape_key, unescape_key
from cdc_core.schema import cast, evolution, kinds
from cdc_core.schema.column_types import ELEMENT, VALUE, Array, ColumnType, Field, Map, Steps, Struct
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.kinds import Kind
from cdc_core.schema.pins import Pins, widens
from cdc_core.typed import exact
from cdc_core.typed.lessons import NAMEABLE, Lesson, Lessons
from cdc_core.typed.readers import (
    ANY,
    SCALARS,
    ArrayReader,
    ColumnReader,
    Findings,
    MapReader,
    NoneType,
    ScalarReader,
    Where,
    any_of,
    count_keys,
    of_field,
)

WIDE, ENOUGH, SPARSE = 64, 100, 4
"""A document of at least so many fields, of which so many were read and had fewer than a quarter of them, is sparse."""

_EMPTY: dict[type, str] = {dict: "{}", list: "[]"}
_NOT_THERE = msgspec.UNSET
_NotThere = msgspec.UnsetType


@functools.cache
def _getter(number: int) -> Callable[[list[Any]], list[Any]]:
    """Reads one member of many structs; generated code takes half the time of `attrgetter`."""
    getter: Callable[[list[Any]], list[Any]] = eval(f"lambda structs: [struct.f{number} for struct in structs]")
    return getter


class DocumentReader(ColumnReader):
    """A document: known fields have readers; learned keys have none, and their values are rescued.

    A field whose key a struct cannot have has no reader either: documents with it are refused. `strangers` are the
    learned keys, each with whether the settings pin a type at or below it. `is_full`: there is no room for more fields, so that none is new.
    """

    struct: type[Any]
    """The class of decoded documents."""

    has_pins = False
    """Whether the settings pin a type at or below the document."""

    def __init__(
        self,
        type_: Struct,
        readers: list[tuple[str, ColumnReader] | None],
        strangers: Mapping[str, bool],
        is_due: bool = False,
        is_full: bool = False,
    ) -> None:
        self.type: Struct = type_
        self.is_due = is_due
        self._is_full = is_full
        self._strangers = strangers
        self._readers = readers
        self.decoded = self._decoded([reader for reader in readers if reader is not None])
        self._blank = self.struct()
        self.hint = any_of(self.decoded, list, *SCALARS)
        self._fields = [pa.field(item.column, exact.arrow(item.type)) for item in type_.fields]
        self._documents = self._present = 0

    def _decoded(self, named: Sequence[tuple[str, ColumnReader]]) -> Any:
        """The decoder's type for such a document, whose class is `struct`; `named` are keys with their readers."""
        hints = [any_of(reader.hint, _NotThere, NoneType) for _, reader in named] + [Any] * len(self._strangers)
        # Members are f0, f1, …, because keys need not be Python identifiers.
        rename = {f"f{number}": key for number, key in enumerate((*(key for key, _ in named), *self._strangers))}
        # The default is UNSET, not None: a null counts among a text's keys, an absent field does not.
        members = [(f"f{number}", hint, _NOT_THERE) for number, hint in enumerate(hints)]
        self.struct = msgspec.defstruct("Document", members, rename=rename, forbid_unknown_fields=True, gc=False)
        return self.struct

    @property
    def is_sparse(self) -> bool:
        """Whether the documents read so far have so few of the fields that most of the struct is empty."""
        fields = len(self._readers)
        return fields >= WIDE and self._documents >= ENOUGH and self._present * SPARSE < self._documents * fields

    def read(self, values: list[Any], classes: set[type], where: Where, findings: Findings) -> pa.Array:
        if NoneType in classes:
            numbers = [number for number, value in enumerate(values) if value is not None]
            if len(numbers) * 2 < len(values):
                return self._read_few(numbers, values, classes, where, findings)
        structs, absent, laid_out = self.structs(values, classes, where, findings)
        members = [*self.members(structs, where, findings, laid_out)]
        arrays = [
            pa.nulls(len(structs), field.type)
            if reader is None or kinds == {NoneType}
            else reader.read(member_values, kinds, place, findings)
            for field, (_, reader, member_values, kinds, place) in zip(self._fields, members)
        ]
        mask = None if absent is None else pa.array(absent, pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=self._fields, mask=mask)

    def _read_few(
        self, numbers: list[int], values: list[Any], classes: set[type], where: Where, findings: Findings
    ) -> pa.Array:
        """The array, where only the values with these numbers are present: the others cost nothing."""
        if not numbers:
            return pa.nulls(len(values), pa.struct(self._fields))
        present = [values[number] for number in numbers]
        read = self.read(present, classes - {NoneType}, lambda number: where(numbers[number]), findings)
        places: list[int | None] = [None] * len(values)
        for place, number in enumerate(numbers):
            places[number] = place
        return read.take(pa.array(places, pa.int32()))

    def structs(
        self, values: list[Any], classes: set[type], where: Where, findings: Findings
    ) -> tuple[list[Any], list[bool] | None, Collection[int]]:
        """The structs, blank where there is none; flags for those, None if all exist; and the numbers of arrays laid out as documents."""
        if self.is_due:
            self._note_due(values, where, findings)
        if classes == {self.struct}:
            return values, None, ()
        laid_out: Collection[int] = ()
        if list in classes and self.values.arrays_as_documents:
            laid_out = {number for number, value in enumerate(values) if type(value) is list}
            values = [
                self._of_array(value, where(number)[0], findings) if number in laid_out else value
                for number, value in enumerate(values)
            ]
            classes = {*map(type, values)}
        for number, value in enumerate(values) if not classes <= {self.struct, NoneType} else ():
            if value is not None and type(value) is not self.struct:
                self._cast_alone(value, number, where, findings)
        # Arrow masks a null struct but needs values for its members: those of the blank one.
        absent = [type(value) is not self.struct for value in values]
        return [self._blank if is_absent else value for is_absent, value in zip(absent, values)], absent, laid_out

    def _of_array(self, value: list[Any], row: int, findings: Findings) -> Any:
        """An array laid out as a document, in decoded form; None if it needs the exact path."""
        # A null does not need its key, which may have no column.
        items = {f"_{index}": item for index, item in enumerate(value) if item is not None}
        try:
            document = self._of_items(items)
        except (msgspec.ValidationError, OverflowError):
            findings.keys += count_keys(value)
            findings.hard.add(row)
            return None
        findings.keys -= len(items)  # these keys do not appear in the text
        return document

    def _of_items(self, items: dict[str, Any]) -> Any:
        return msgspec.convert(items, self.struct)

    def members(
        self, structs: list[Any], where: Where, findings: Findings, laid_out: Collection[int] = ()
    ) -> Iterator[tuple[Field, ColumnReader | None, list[Any], set[type], Where]]:
        """Each field with its reader and the values for it; values of learned keys are rescued. `laid_out` is as from `structs`."""
        numbers = itertools.count()
        self._documents += len(structs)
        for item, keyed_reader in zip(self.type.fields, self._readers):
            place = of_field(where, item.name, laid_out)
            if keyed_reader is None:
                yield item, None, [], set(), place
            else:
                keys_before = findings.keys
                values, classes = _present(_getter(next(numbers))(structs), findings)
                self._present += findings.keys - keys_before
                yield item, keyed_reader[1], values, classes, place
        for number, key in zip(numbers, self._strangers):
            values, classes = _present(_getter(number)(structs), findings)
            self._rescue_all(key, values, classes, of_field(where, unescape_key(key), laid_out), findings)

    def _rescue_all(self, key: str, values: list[Any], classes: set[type], where: Where, findings: Findings) -> None:
        """Rescues the values of a learned key, at their places `where`."""
        if not classes - {NoneType}:
            return
        if self._strangers.get(key) and not self._is_full:
            self._note_due(values, where, findings)
        for number, value in enumerate(values):
            if value is None:
                continue
            if not value and type(value) in _EMPTY:  # most values without a column
                findings.rescue(*where(number), _EMPTY[type(value)])
                continue
            findings.keys += count_keys(value)
            if kinds.kind(value) is Kind.UNDEFINED:
                continue
            row, path = where(number)
            findings.rescue(row, path, cast.ejson(value))
            if not self._is_full and kinds.holds_something(value):
                findings.new.add(row)


def _present(values: list[Any], findings: Findings) -> tuple[list[Any], set[type]]:
    """A member's values with None for absent fields, and their classes; adds the present ones to `findings.keys`."""
    classes = {*map(type, values)}
    if _NotThere not in classes:
        findings.keys += len(values)
        return values, classes
    if len(classes) == 1:
        return [None] * len(values), {NoneType}
    classes.discard(_NotThere)
    findings.keys += len(values) - values.count(_NOT_THERE)
    return [None if value is _NOT_THERE else value for value in values], classes | {NoneType}


class SparseReader(DocumentReader):
    """A document whose values are decoded key by key: absent fields cost nothing, and a key may have any characters.

    Values of keys without a column are rescued, as those of learned keys. A document takes the exact path with a value that its column's
    decoder refuses, with a key that may be a wrapper's, and with one that may be pinned.
    """

    def _decoded(self, named: Sequence[tuple[str, ColumnReader]]) -> Any:
        self.struct = dict
        self._decode = {key: msgspec.json.Decoder(any_of(reader.hint, NoneType)).decode for key, reader in named}
        self._decode |= dict.fromkeys(self._strangers, ANY.decode)
        return types.GenericAlias(dict, (str, msgspec.Raw))

    def _of_items(self, items: dict[str, Any]) -> Any:
        return {key: msgspec.Raw(msgspec.json.encode(item)) for key, item in items.items()}

    def members(
        self, structs: list[Any], where: Where, findings: Findings, laid_out: Collection[int] = ()
    ) -> Iterator[tuple[Field, ColumnReader | None, list[Any], set[type], Where]]:
        raws_by_key: dict[str, tuple[list[int], list[msgspec.Raw]]] = {}
        for number, document in enumerate(structs):
            for key, raw in document.items():
                if key not in raws_by_key:
                    raws_by_key[key] = ([], [])
                numbers, raws = raws_by_key[key]
                numbers.append(number)
                raws.append(raw)
        for key in [key for key in raws_by_key if key not in self._decode]:
            self._rescue_unknown(key, *raws_by_key.pop(key), where, laid_out, findings)
        columns = {key: self._column(key, len(structs), *entry, where, findings) for key, entry in raws_by_key.items()}
        absent: tuple[list[Any], set[type]] = ([None] * len(structs), {NoneType})
        for item, keyed_reader in zip(self.type.fields, self._readers):
            place = of_field(where, item.name, laid_out)
            if keyed_reader is None:
                yield item, None, [], set(), place
            else:
                values, classes = columns.get(keyed_reader[0], absent)
                yield item, keyed_reader[1], values, classes, place
        for key in self._strangers:
            if key in columns:
                self._rescue_all(key, *columns[key], of_field(where, unescape_key(key), laid_out), findings)

    def _rescue_unknown(
        self,
        key: str,
        numbers: list[int],
        raws: list[msgspec.Raw],
        where: Where,
        laid_out: Collection[int],
        findings: Findings,
    ) -> None:
        """Rescues the values of a key that was not learned, in the documents with these numbers."""
        findings.keys += len(raws)
        is_plain = not key.startswith("$") and key not in self.type.by_name and (self._is_full or not self.has_pins)
        decode = ANY.decode if is_plain else None
        values = [self._alone(decode, raw, where(number)[0], findings) for number, raw in zip(numbers, raws)]
        place = of_field(where, key, laid_out)
        self._rescue_all(key, values, {*map(type, values)}, lambda number: place(numbers[number]), findings)

    def _column(
        self, key: str, count: int, numbers: list[int], raws: list[msgspec.Raw], where: Where, findings: Findings
    ) -> tuple[list[Any], set[type]]:
        """A key's values, None where absent, and their classes; adds them to `findings.keys`."""
        findings.keys += len(raws)
        decode = self._decode[key]
        try:
            present = [*map(decode, raws)]
        except (msgspec.DecodeError, RecursionError):
            present = [self._alone(decode, raw, where(number)[0], findings) for number, raw in zip(numbers, raws)]
        if len(present) == count:
            return present, {*map(type, present)}
        values: list[Any] = [None] * count
        for number, value in zip(numbers, present):
            values[number] = value
        return values, {NoneType, *map(type, present)}

    @staticmethod
    def _alone(decode: Callable[[msgspec.Raw], Any] | None, raw: msgspec.Raw, row: int, findings: Findings) -> Any:
        """The decoded value; None, and the document takes the exact path, if the decoder refuses it."""
        try:
            if decode is not None:
                return decode(raw)
        except (msgspec.DecodeError, RecursionError):
            pass
        findings.hard.add(row)
        try:
            findings.keys += count_keys(ANY.decode(raw))
        except (msgspec.DecodeError, RecursionError):  # the counts then differ, and each document is checked
            pass
        return None


class ReaderBuilder:
    """The readers of one schema with what was learned; documents at the places of `sparse` are decoded key by key.

    `documents` are the document readers by place.
    """

    def __init__(self, schema: DocumentSchema, pins: Pins, lessons: Lessons, sparse: Collection[Steps] = ()) -> None:
        self._has_room = evolution.leaf_count(schema.struct) < evolution.MAX_COLUMNS
        self._pins = pins
        self._lessons = lessons
        self._values = schema.naming.values
        self._sparse = sparse
        self.documents: dict[Steps, DocumentReader] = {}

    def reader(self, type_: ColumnType, place: Steps, path: tuple[str, ...]) -> ColumnReader:
        reader, pin = self._reader(type_, place, path), self._pins.get(path)
        reader.values = self._values
        reader.is_pinned = pin is not None and not pin.is_map
        return reader

    def _reader(self, type_: ColumnType, place: Steps, path: tuple[str, ...]) -> ColumnReader:
        pin = self._pins.get(path)
        is_due = pin is not None and not pin.is_map and pin.type is not None and widens(type_, pin.type)
        match type_:
            case Struct():
                return self.document(type_, place, path, is_due)
            case Array(inner):
                return ArrayReader(type_, self.reader(inner, (*place, ELEMENT), path), is_due)
            case Map(inner):
                return MapReader(type_, self.reader(inner, (*place, VALUE), (*path, "*")), is_due)
            case _:
                return ScalarReader(type_, self._lessons.at.get(place), is_due)

    def document(self, type_: Struct, place: Steps, path: tuple[str, ...], is_due: bool = False) -> DocumentReader:
        lesson = self._lessons.at.get(place, Lesson())
        keys = {unescape_key(key): key for key in lesson.keys}
        is_sparse = place in self._sparse
        readers = []
        for item in type_.fields:
            key = keys.get(item.name, escape_key(item.name))
            reader = self.reader(item.type, (*place, item.name), (*path, item.name))
            readers.append((key, reader) if is_sparse or NAMEABLE.fullmatch(key) else None)
        strangers = {
            key: self._may_be_pinned((*path, name))
            for name, key in keys.items()
            if name not in type_.by_name and (is_sparse or NAMEABLE.fullmatch(key))
        }
        reader_class = SparseReader if is_sparse else DocumentReader
        is_full = not self._has_room or (bool(path) and len(type_.fields) >= evolution.MAX_FIELDS)
        reader = self.documents[place] = reader_class(type_, readers, strangers, is_due, is_full)
        reader.has_pins = self._may_be_pinned(path)
        return reader

    def _may_be_pinned(self, path: tuple[str, ...]) -> bool:
        return any(pin_path[: len(path)] == path for pin_path in self._pins)
