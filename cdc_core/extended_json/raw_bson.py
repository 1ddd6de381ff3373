"""BSON read and written element by element, with classes for types that `bson` lacks.

`bson` silently drops or changes some values: repeated fields, symbol, undefined, dbPointer, unusual regex options,
invalid UTF-8. This module keeps them, but is many times slower, so it only handles documents that have such values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import bson
from bson.binary import Binary
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

CODEC_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
"""The options with which documents are decoded before they are given to this package: dates of any year stay numbers."""


@dataclass(frozen=True)
class Symbol:
    """BSON's deprecated symbol; indexes treat it as a string."""

    text: str


@dataclass(frozen=True)
class Undefined:
    """BSON's deprecated undefined."""


@dataclass(frozen=True)
class DBPointer:
    """BSON's deprecated pointer to a document."""

    collection: str
    id: ObjectId


@dataclass(frozen=True)
class RegularExpression:
    """A regular expression with options that `bson.Regex` would change."""

    pattern: str
    options: str


@dataclass(frozen=True)
class ScopedCode:
    """Code whose scope has repeated fields."""

    code: str
    scope: RepeatedFields


@dataclass(frozen=True)
class RepeatedFields:
    """A document with repeated field names, which a dict cannot hold."""

    items: tuple[tuple[str, object], ...]


_int32: Callable[[bytes, int], tuple[int]] = struct.Struct("<i").unpack_from
_int64: Callable[[bytes, int], tuple[int]] = struct.Struct("<q").unpack_from
_uint64: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
_double: Callable[[bytes, int], tuple[float]] = struct.Struct("<d").unpack_from

_STRINGS = frozenset((0x02, 0x0D, 0x0E))
_SIZES = {
    0x01: 8, 0x06: 0, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0,
    0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16, 0x7F: 0, 0xFF: 0,
}  # fmt: skip


class Element(NamedTuple):
    """An element of a BSON document: its type byte, its name, and the bounds of its value in the raw bytes."""

    kind: int
    name: bytes
    start: int
    end: int


def elements(raw: bytes, at: int = 0) -> Iterator[Element]:
    """The elements, in order, of the document or array that begins at `at`; raises `ValueError` if it is not BSON."""
    try:
        last = at + _int32(raw, at)[0] - 1
        if not at + 4 <= last < len(raw) or raw[last]:
            raise ValueError("no BSON document: its length is wrong")
        at += 4
        while at < last:
            zero = raw.index(0, at + 1, last)
            start = zero + 1
            end = _end(raw, raw[at], start)
            if end > last:
                raise ValueError(f"no BSON document: an element at byte {at} is cut off")
            yield Element(raw[at], raw[at + 1 : zero], start, end)
            at = end
    except (struct.error, IndexError) as error:
        raise ValueError(f"no BSON document: it ends inside the element at byte {at}") from error


def find(raw: bytes, name: bytes, at: int = 0) -> Element:
    """The first element with this name in the document that begins at `at`; raises `KeyError` if there is none."""
    for element in elements(raw, at):
        if element.name == name:
            return element
    raise KeyError(name.decode())


def _end(raw: bytes, kind: int, start: int) -> int:
    size = _SIZES.get(kind)
    if size is not None:
        return start + size
    if kind == 0x0B:
        return raw.index(0, raw.index(0, start) + 1) + 1
    length = _int32(raw, start)[0]
    if length < 0:
        raise ValueError(f"no BSON document: a negative length at byte {start}")
    if kind in _STRINGS:
        return start + 4 + length
    if kind in (0x03, 0x04, 0x0F):
        return start + length
    if kind == 0x05:
        return start + 5 + length
    if kind == 0x0C:
        return start + 4 + length + 12
    raise ValueError(f"no BSON document: type 0x{kind:02x} at byte {start} is none of BSON's")


def fields(raw: bytes) -> dict[str, tuple[int, bytes]]:
    """The top-level elements of a document by name, as type byte and raw value."""
    return {
        element.name.decode("utf-8", "replace"): (element.kind, raw[element.start : element.end])
        for element in elements(raw)
    }


def decoded(kind: int, raw: bytes) -> object:
    """The Python, bson or own value of an element, from its type byte and raw value.

    Invalid UTF-8 is repaired; raises `ValueError` if the bytes are not BSON.
    """
    return repaired(kind, raw)[0]


def repaired(kind: int, raw: bytes) -> tuple[object, bool]:
    """The same, and whether text was repaired; then other bytes may give the same value."""
    repairs: list[bytes] = []
    try:
        return _value(raw, kind, 0, len(raw), repairs), bool(repairs)
    except (struct.error, IndexError) as error:
        raise ValueError("no BSON value: it ends too early") from error


def _text(raw: bytes, start: int, end: int, repairs: list[bytes]) -> str:
    part = raw[start:end]
    try:
        return part.decode()
    except UnicodeDecodeError:
        # Servers store invalid UTF-8 as they receive it, so it must not raise here.
        repairs.append(part)
        return part.decode("utf-8", "replace")


def read_document(raw: bytes, start: int, end: int, repairs: list[bytes]) -> dict[str, object] | RepeatedFields:
    if start + _int32(raw, start)[0] != end:
        raise ValueError(f"no BSON document: the length at byte {start} is wrong")
    items = tuple(
        (
            _text(element.name, 0, len(element.name), repairs),
            _value(raw, element.kind, element.start, element.end, repairs),
        )
        for element in elements(raw, start)
    )
    document = dict(items)
    # Fewer entries than elements: a name is repeated.
    return document if len(document) == len(items) else RepeatedFields(items)


def _value(raw: bytes, kind: int, start: int, end: int, repairs: list[bytes]) -> object:
    match kind:
        case 0x01:
            return _double(raw, start)[0]
        case 0x02:
            return _text(raw, start + 4, end - 1, repairs)
        case 0x03:
            return read_document(raw, start, end, repairs)
        case 0x04:
            return [_value(raw, item.kind, item.start, item.end, repairs) for item in elements(raw, start)]
        case 0x05:
            return _binary_value(raw[start + 4], raw[start + 5 : end], repairs)
        case 0x06:
            return Undefined()
        case 0x07:
            return ObjectId(raw[start:end])
        case 0x08:
            return raw[start] != 0
        case 0x09:
            return DatetimeMS(_int64(raw, start)[0])
        case 0x0A:
            return None
        case 0x0B:
            pattern_end = raw.index(0, start)
            return regular_expression(_text(raw, start, pattern_end, repairs), _text(raw, pattern_end + 1, end - 1, repairs))
        case 0x0C:
            return DBPointer(_text(raw, start + 4, end - 13, repairs), ObjectId(raw[end - 12 : end]))
        case 0x0D:
            return Code(_text(raw, start + 4, end - 1, repairs))
        case 0x0E:
            return Symbol(_text(raw, start + 4, end - 1, repairs))
        case 0x0F:
            scope_at = start + 8 + _int32(raw, start + 4)[0]
            return scoped_code(_text(raw, start + 8, scope_at - 1, repairs), read_document(raw, scope_at, end, repairs))
        case 0x10:
            return _int32(raw, start)[0]
        case 0x11:
            # The lower half is the increment, the upper half the seconds.
            return Timestamp(_uint64(raw, start)[0] >> 32, _uint64(raw, start)[0] & 0xFFFFFFFF)
        case 0x12:
            return Int64(_int64(raw, start)[0])
        case 0x13:
            return Decimal128.from_bid(raw[start:end])
        case 0x7F:
            return MaxKey()
        case 0xFF:
            return MinKey()
        case _:
            raise ValueError(f"no BSON document: type 0x{kind:02x} at byte {start} is none of BSON's")


def _binary_value(subtype: int, payload: bytes, repairs: list[bytes]) -> bytes | Binary:
    if subtype == 0:
        return payload
    binary: Binary
    if subtype != 2:
        binary = Binary(payload, subtype)
    # Subtype 2 repeats its length inside. `bson` recomputes it when it writes, so a wrong one is lost and is flagged.
    elif len(payload) >= 4 and _int32(payload, 0)[0] == len(payload) - 4:
        binary = Binary(payload[4:], 2)
    else:
        repairs.append(payload)
        binary = Binary(payload, 2)
    return binary


# `bson.Regex` keeps flags instead of the text: it would change options that are unknown, repeated or in another order.
_ordinary_options = re.compile("i?l?m?s?u?x?").fullmatch


def regular_expression(pattern: str, options: str) -> Regex[str] | RegularExpression:
    return Regex(pattern, options) if _ordinary_options(options) else RegularExpression(pattern, options)


def scoped_code(code: str, scope: dict[str, object] | RepeatedFields) -> Code | ScopedCode:
    return ScopedCode(code, scope) if isinstance(scope, RepeatedFields) else Code(code, scope)


def write_document(value: dict[str, object] | RepeatedFields | list[object]) -> bytes:
    """A document or array as BSON, with the types that `bson` lacks."""
    if isinstance(value, list):
        items: Iterable[tuple[str, object]] = ((str(index), item) for index, item in enumerate(value))
    else:
        items = value.items if isinstance(value, RepeatedFields) else value.items()
    body = b"".join(_element(name, item) for name, item in items)
    return struct.pack("<i", len(body) + 5) + body + b"\0"


def _element(name: str, value: object) -> bytes:
    def element(kind: int, content: bytes) -> bytes:
        return bytes([kind]) + _cstring(name) + content

    match value:
        case dict() | RepeatedFields():
            return element(0x03, write_document(value))
        case list():
            return element(0x04, write_document(value))
        case Undefined():
            return element(0x06, b"")
        case RegularExpression(pattern, options):
            return element(0x0B, _cstring(pattern) + _cstring(options))
        case DBPointer(collection, id_):
            return element(0x0C, _counted(collection) + id_.binary)
        case Symbol(text):
            return element(0x0E, _counted(text))
        case ScopedCode(code, scope):
            return element(0x0F, _code_with_scope(code, scope))
        case Code(scope=dict() as scope):
            return element(0x0F, _code_with_scope(str(value), scope))
        case _:
            return _plain_element(name, value)


def _plain_element(name: str, value: object) -> bytes:
    try:
        return bson.encode({name: value}, False, CODEC_OPTIONS)[4:-1]
    except (BSONError, OverflowError) as error:
        raise ValueError(f"a {type(value).__name__} that BSON cannot hold") from error


def _code_with_scope(code: str, scope: dict[str, object] | RepeatedFields) -> bytes:
    content = _counted(code) + write_document(scope)
    return struct.pack("<i", len(content) + 4) + content


def _cstring(text: str) -> bytes:
    if "\0" in text:
        raise ValueError("a NUL in a field name or a regular expression")
    return text.encode() + b"\0"


def _counted(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<i", len(encoded) + 1) + encoded + b"\0"
