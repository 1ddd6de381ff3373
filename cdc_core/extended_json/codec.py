"""Type-exact Extended JSON v2: BSON as JSON text and back, with the same bytes.

int32, finite doubles (always with a point or an exponent), strings, booleans and null are plain JSON;
everything else stands in its canonical wrapper of "MongoDB Extended JSON (v2)". A user's key that looks like
a wrapper's gets one more `$`, at every depth, and readers strip one, so that any Extended JSON parser takes
the text and no document of a user is taken for a typed value.

The way of a document is decode, encode again and compare: equal bytes prove that the decoded values are the
document. What fails the proof (repeated fields, symbol, undefined, dbPointer, odd regex options, text that is
not UTF-8) is read element by element instead. What JSON cannot say does not survive: the sign and payload of
a NaN, a decimal's spelling that IEEE 754 calls non-canonical, the keys of an array's elements, bytes that are
not UTF-8 (these alone are flagged).
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import bson
import orjson
from bson.binary import Binary
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.regex import Regex
from bson.timestamp import Timestamp

CODEC_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
"""What a document must be decoded with before the functions here see it: dates of any year stay numbers."""

WRAPPERS = frozenset(
    "$oid $symbol $numberInt $numberLong $numberDouble $numberDecimal $binary $uuid $code $timestamp"
    " $regularExpression $dbPointer $date $minKey $maxKey $undefined".split()
)
"""The first keys of Extended JSON's wrappers: in our text an object that begins with one is a wrapper."""

RESERVED = WRAPPERS | {"$regex", "$ref"}
"""The keys that are escaped in a user's document: some parser of Extended JSON takes them for its own."""

MAX_DEPTH = 250
"""Levels of nesting that are written; a MongoDB server holds no more than that."""


class Encoded(NamedTuple):
    """A document's text, and whether bytes that were not UTF-8 had to be replaced in it."""

    text: bytes
    lossy: bool


@dataclass(frozen=True)
class Symbol:
    """BSON's deprecated symbol, which is a string to every index."""

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
    """A regular expression whose options `bson.Regex` would not keep as they are."""

    pattern: str
    options: str


@dataclass(frozen=True)
class ScopedCode:
    """Code whose scope is a document with repeated fields."""

    code: str
    scope: RepeatedFields


@dataclass(frozen=True)
class RepeatedFields:
    """A document in which a field name stands more than once, which no dict can hold."""

    items: tuple[tuple[str, object], ...]


# --- user keys that look like wrappers ---

_NAMES = "|".join(sorted(re.escape(name[1:]) for name in RESERVED))
_is_reserved = re.compile(rf"\$+(?:{_NAMES})").fullmatch
_is_escaped = re.compile(rf"\$\$+(?:{_NAMES})").fullmatch
_may_hold_reserved = re.compile(rf"\$(?:{_NAMES})\0".encode()).search


def escape_key(key: str) -> str:
    """A user's field name as it stands in our text: one more `$` where it looks like a wrapper's key."""
    return "$" + key if key[:1] == "$" and _is_reserved(key) else key


def unescape_key(key: str) -> str:
    """The user's field name of a key in our text."""
    return key[1:] if key[:2] == "$$" and _is_escaped(key) else key


def is_wrapper(parsed: Mapping[str, object]) -> bool:
    """Whether an object of our text, parsed, is a typed value and not a user's document."""
    return next(iter(parsed), None) in WRAPPERS


# --- BSON to text ---


def encode(raw: bytes) -> Encoded:
    """The text of one BSON document, proven to be exact; ValueError if the bytes are no BSON document."""
    try:
        document = bson.decode(raw, CODEC_OPTIONS)
    except _UNREADABLE:
        return _encode_elements(raw)
    return encode_decoded(document, raw)


def encode_decoded(document: Mapping[str, Any], raw: bytes) -> Encoded:
    """The same for a document that was decoded from `raw` with `CODEC_OPTIONS` already."""
    if is_exact(document, raw):
        return Encoded(dumps_value(document, proven=raw), False)
    return _encode_elements(raw)


def is_exact(document: Mapping[str, Any], raw: bytes) -> bool:
    """Whether a document decoded with `CODEC_OPTIONS` is all of `raw`: encoded again it is the same bytes."""
    try:
        # Inside another document, because bson moves the `_id` of the outermost one to the front.
        return bson.encode({"": document}, False, CODEC_OPTIONS)[6:-1] == raw
    except _UNREADABLE:
        return False


_UNREADABLE = (BSONError, ValueError, OverflowError, RecursionError)


def _encode_elements(raw: bytes) -> Encoded:
    repairs: list[bytes] = []
    try:
        document = _document(raw, 0, len(raw), repairs)
    except (struct.error, IndexError) as error:
        raise ValueError("no BSON document: it ends too early") from error
    except RecursionError as error:
        raise ValueError(f"a document nested deeper than {MAX_DEPTH} levels") from error
    return Encoded(dumps_value(document), bool(repairs))


def dumps(raw: bytes) -> bytes:
    """The text of one BSON document, UTF-8; bytes in it that were not UTF-8 come out as U+FFFD."""
    return encode(raw).text


def dumps_value(value: object, *, proven: bytes | None = None) -> bytes:
    """The text of one Python or bson value.

    Give as `proven` the raw BSON that the value was decoded from, once `is_exact` holds of all that was decoded;
    it may hold more than the value. The value is then known to be clean and takes the fast way.
    Raises ValueError for what BSON cannot hold.
    """
    if proven is not None and not (b"$" in proven and _may_hold_reserved(proven)):
        try:
            text = orjson.dumps(value, _wrapped, _OPTIONS)
        except TypeError:
            return _dumps_spelled(value)
        if b"null" not in text or not _may_hold_special_double(proven):
            return text
    return _dumps_spelled(value)


_OPTIONS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def _dumps_spelled(value: object) -> bytes:
    try:
        return orjson.dumps(_spelled(value), _wrapped, _OPTIONS)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a value of BSON, or nested deeper than {MAX_DEPTH} levels: {error}") from error


_ends_7f = re.compile(rb"\x7f(?<=\0.{6}[\xf0-\xff]\x7f)", re.DOTALL).finditer
_ends_ff = re.compile(rb"\xff(?<=\0.{6}[\xf0-\xff]\xff)", re.DOTALL).finditer


def _may_hold_special_double(raw: bytes) -> bool:
    """Whether something in `raw` looks like an infinity or a NaN, which orjson writes as null.

    Every such double is found: type byte 1, a name, a NUL, and eight bytes that end in an exponent of ones.
    """
    return (b"\x7f" in raw and any(_follows_name(raw, end.start() - 7) for end in _ends_7f(raw))) or (
        b"\xff" in raw and any(_follows_name(raw, end.start() - 7) for end in _ends_ff(raw))
    )


def _follows_name(raw: bytes, at: int) -> bool:
    return raw.find(1, raw.rfind(0, 0, at - 1) + 1, at - 1) >= 0


def _wrapped(value: Any) -> object:
    """orjson's `default`: the wrapper of a value that JSON has no plain form for."""
    kind = type(value)
    if kind is ObjectId:
        return {"$oid": value.binary.hex()}
    if kind is Int64:
        return {"$numberLong": str(value)}
    if kind is DatetimeMS:
        return {"$date": {"$numberLong": str(value.__int__())}}
    return _WRAP[kind](value)


def _binary(value: bytes, subtype: int) -> dict[str, object]:
    encoded = base64.b64encode(value).decode()
    return {"$binary": {"base64": encoded, "subType": f"{subtype:02x}"}}


def _code(value: Code) -> dict[str, object]:
    code: dict[str, object] = {"$code": str(value)}
    return code if value.scope is None else {**code, "$scope": value.scope}


_FLAGS = tuple(
    (flag, letter) for letter, flag in (("i", re.I), ("l", re.L), ("m", re.M), ("s", re.S), ("u", re.U), ("x", re.X))
)


def _regex(value: Regex[Any]) -> dict[str, object]:
    options = "".join(letter for flag, letter in _FLAGS if value.flags & flag)
    pattern = value.pattern if isinstance(value.pattern, str) else value.pattern.decode()
    return {"$regularExpression": {"pattern": pattern, "options": options}}


def _date(value: datetime.datetime) -> dict[str, object]:
    return {"$date": {"$numberLong": str(int(DatetimeMS(value)))}}


def decimal_text(value: Decimal128) -> str:
    """A decimal as Extended JSON spells it, with every digit and its exponent."""
    bits = int.from_bytes(value.bid, "little")
    sign = "-" if bits >> 127 else ""
    if bits >> 122 & 0x1F == 0x1F:
        return "NaN"
    if bits >> 122 & 0x1F == 0x1E:
        return sign + "Infinity"
    if bits >> 125 & 3 == 3:
        coefficient, exponent = 0, bits >> 111 & 0x3FFF
    else:
        coefficient, exponent = bits & (1 << 113) - 1, bits >> 113 & 0x3FFF
    return sign + _decimal_digits(coefficient if coefficient < 10**34 else 0, exponent - 6176)


def _decimal_digits(coefficient: int, exponent: int) -> str:
    """IEEE 754's to-scientific-string, as "BSON Decimal128 Type Handling in Drivers" asks for."""
    digits = str(coefficient)
    adjusted = exponent + len(digits) - 1
    if exponent > 0 or adjusted < -6:
        point = "." if len(digits) > 1 else ""
        return f"{digits[0]}{point}{digits[1:]}E{adjusted:+d}"
    if exponent == 0:
        return digits
    padded = digits.rjust(1 - exponent, "0")
    return f"{padded[:exponent]}.{padded[exponent:]}"


_WRAP: dict[type, Any] = {
    Decimal128: lambda value: {"$numberDecimal": decimal_text(value)},
    bytes: lambda value: _binary(value, 0),
    Binary: lambda value: _binary(value, value.subtype),
    Timestamp: lambda value: {"$timestamp": {"t": value.time, "i": value.inc}},
    Regex: _regex,
    RegularExpression: lambda value: {"$regularExpression": {"pattern": value.pattern, "options": value.options}},
    Code: _code,
    Symbol: lambda value: {"$symbol": value.text},
    Undefined: lambda value: {"$undefined": True},
    DBPointer: lambda value: {"$dbPointer": {"$ref": value.collection, "$id": {"$oid": str(value.id)}}},
    MinKey: lambda value: {"$minKey": 1},
    MaxKey: lambda value: {"$maxKey": 1},
    datetime.datetime: _date,
}


def _spelled(value: Any) -> object:
    """A value without what orjson would write wrongly: reserved keys, infinities, large plain ints."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        return {escape_key(key): _spelled(item) for key, item in value.items()}
    if kind is list:
        return [_spelled(item) for item in value]
    if kind is float:
        return value if math.isfinite(value) else {"$numberDouble": _special_double(value)}
    if kind is int:
        return _spelled_int(value)
    if kind in _PLAIN:
        return value
    return _spelled_rare(value)


_PLAIN = frozenset({ObjectId, Int64, DatetimeMS, *_WRAP} - {Code})


def _special_double(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _spelled_int(value: int) -> object:
    if -(1 << 31) <= value < 1 << 31:
        return value
    if -(1 << 63) <= value < 1 << 63:
        return {"$numberLong": str(value)}
    raise ValueError("an integer of more than 64 bits has no BSON type")


def _spelled_rare(value: object) -> object:
    if isinstance(value, RepeatedFields):
        return _repeated(value)
    if isinstance(value, ScopedCode):
        return {"$code": value.code, "$scope": _repeated(value.scope)}
    if isinstance(value, Code):
        code: dict[str, object] = {"$code": str(value)}
        return code if value.scope is None else {**code, "$scope": _spelled(dict(value.scope))}
    if isinstance(value, DBRef):
        return _spelled(dict(value.as_doc()))
    if isinstance(value, RawBSONDocument):
        return orjson.Fragment(dumps(bytes(value.raw)))
    if isinstance(value, Mapping):
        return _spelled(dict(value.items()))
    if isinstance(value, tuple):
        return _spelled(list(value))
    if isinstance(value, uuid.UUID):
        return _binary(value.bytes, 4)
    raise TypeError(f"{type(value).__name__} has no BSON type")


def _repeated(document: RepeatedFields) -> orjson.Fragment:
    items = (orjson.dumps(escape_key(key)) + b":" + dumps_value(item) for key, item in document.items)
    return orjson.Fragment(b"{" + b",".join(items) + b"}")


# --- raw BSON, element by element ---

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
    """One element of a BSON document: its type byte, its name, and where its value lies in the raw bytes."""

    kind: int
    name: bytes
    start: int
    end: int


def elements(raw: bytes, at: int = 0) -> Iterator[Element]:
    """The elements, in order, of the document or array that begins at `at`; ValueError if it is no BSON."""
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
    """The top-level elements of a document by name, as type byte and raw value, without looking into them."""
    return {
        element.name.decode("utf-8", "replace"): (element.kind, raw[element.start : element.end])
        for element in elements(raw)
    }


def decoded(kind: int, raw: bytes) -> object:
    """The Python, bson or own value of one element, from its type byte and raw value.

    Text that is not UTF-8 is repaired; ValueError where the bytes are no BSON.
    """
    return repaired(kind, raw)[0]


def repaired(kind: int, raw: bytes) -> tuple[object, bool]:
    """The same, and whether something had to be repaired: other bytes may then give the same value."""
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
        repairs.append(part)
        return part.decode("utf-8", "replace")


def _document(raw: bytes, start: int, end: int, repairs: list[bytes]) -> dict[str, object] | RepeatedFields:
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
    return document if len(document) == len(items) else RepeatedFields(items)


def _value(raw: bytes, kind: int, start: int, end: int, repairs: list[bytes]) -> object:
    match kind:
        case 0x01:
            return _double(raw, start)[0]
        case 0x02:
            return _text(raw, start + 4, end - 1, repairs)
        case 0x03:
            return _document(raw, start, end, repairs)
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
            middle = raw.index(0, start)
            return _regular_expression(_text(raw, start, middle, repairs), _text(raw, middle + 1, end - 1, repairs))
        case 0x0C:
            return DBPointer(_text(raw, start + 4, end - 13, repairs), ObjectId(raw[end - 12 : end]))
        case 0x0D:
            return Code(_text(raw, start + 4, end - 1, repairs))
        case 0x0E:
            return Symbol(_text(raw, start + 4, end - 1, repairs))
        case 0x0F:
            scope_at = start + 8 + _int32(raw, start + 4)[0]
            return _scoped(_text(raw, start + 8, scope_at - 1, repairs), _document(raw, scope_at, end, repairs))
        case 0x10:
            return _int32(raw, start)[0]
        case 0x11:
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
    elif len(payload) >= 4 and _int32(payload, 0)[0] == len(payload) - 4:
        binary = Binary(payload[4:], 2)
    else:
        repairs.append(payload)
        binary = Binary(payload, 2)
    return binary


_ordinary_options = re.compile("i?l?m?s?u?x?").fullmatch


def _regular_expression(pattern: str, options: str) -> Regex[str] | RegularExpression:
    return Regex(pattern, options) if _ordinary_options(options) else RegularExpression(pattern, options)


def _scoped(code: str, scope: dict[str, object] | RepeatedFields) -> Code | ScopedCode:
    return ScopedCode(code, scope) if isinstance(scope, RepeatedFields) else Code(code, scope)


# --- text to BSON ---


def loads(text: bytes | str) -> bytes:
    """The BSON document of a text: the inverse of `dumps`, byte for byte; ValueError if it is none."""
    document = loads_value(text)
    if not isinstance(document, (dict, RepeatedFields)):
        raise ValueError("no document: the text is one value")
    try:
        return bson.encode({"": document}, False, CODEC_OPTIONS)[6:-1]
    except (BSONError, OverflowError):
        return _written(document)


def loads_value(text: bytes | str) -> object:
    """The Python, bson or own value of a text (Int64, Decimal128, DatetimeMS, Symbol, RepeatedFields, …).

    Extended JSON of others is read too, canonical or relaxed. ValueError if a wrapper holds what it cannot.
    """
    decoded = text if isinstance(text, str) else bytes(text).decode()
    try:
        return json.loads(decoded, object_pairs_hook=_assembled, parse_constant=_refused_constant)
    except RecursionError as error:
        raise ValueError("the text is nested too deeply") from error


def unwrapped(parsed: object) -> object:
    """The same for a text that is parsed already (by orjson, say), and for any part of it."""
    if isinstance(parsed, dict):
        return _assembled([(key, unwrapped(item)) for key, item in parsed.items()])
    if isinstance(parsed, list):
        return [unwrapped(item) for item in parsed]
    return parsed


def _refused_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _assembled(pairs: list[tuple[str, Any]]) -> object:
    """What a JSON object stands for, its values being assembled already."""
    if pairs and pairs[0][0] in WRAPPERS:
        try:
            return _typed(pairs)
        except (TypeError, KeyError, AttributeError, ArithmeticError, ValueError, BSONError) as error:
            raise ValueError(f"{pairs[0][0]} holds what it cannot hold") from error
    items = [(unescape_key(key), item) for key, item in pairs]
    document = dict(items)
    return document if len(document) == len(items) else RepeatedFields(tuple(items))


def _typed(pairs: list[tuple[str, Any]]) -> object:
    name, content = pairs[0]
    if len(pairs) > 1:
        (second, scope), *rest = pairs[1:]
        if name != "$code" or second != "$scope" or rest:
            raise ValueError("other keys beside it")
        return _scoped(content, scope)
    match name:
        case "$oid":
            return ObjectId(content)
        case "$symbol":
            return Symbol(_string(content))
        case "$numberInt":
            return int(content)
        case "$numberLong":
            return Int64(content)
        case "$numberDouble":
            return float(content)
        case "$numberDecimal":
            return Decimal128(_string(content))
        case "$binary":
            return _binary_of(content)
        case "$uuid":
            return Binary(uuid.UUID(content).bytes, 4)
        case "$code":
            return Code(_string(content))
        case "$timestamp":
            return Timestamp(content["t"], content["i"])
        case "$regularExpression":
            return _regular_expression(_string(content["pattern"]), _string(content["options"]))
        case "$dbPointer":
            return DBPointer(_string(content["$ref"]), content["$id"])
        case "$date":
            return _date_of(content)
        case "$minKey":
            return MinKey()
        case "$maxKey":
            return MaxKey()
        case "$undefined":
            return Undefined()
        case _:
            raise ValueError("no wrapper")


def _string(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError("no string")
    return content


def _binary_of(content: Mapping[str, str]) -> bytes | Binary:
    payload = base64.b64decode(content["base64"], validate=True)
    subtype = int(content["subType"], 16)
    return Binary(payload, subtype) if subtype else payload


def _date_of(content: object) -> DatetimeMS:
    if isinstance(content, int):
        return DatetimeMS(int(content))
    moment = datetime.datetime.fromisoformat(_string(content).replace("Z", "+00:00"))
    return DatetimeMS(moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc))


def _written(value: dict[str, object] | RepeatedFields | list[object]) -> bytes:
    """A document or array as BSON, with what `bson` has no types for."""
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
            return element(0x03, _written(value))
        case list():
            return element(0x04, _written(value))
        case Undefined():
            return element(0x06, b"")
        case RegularExpression(pattern, options):
            return element(0x0B, _cstring(pattern) + _cstring(options))
        case DBPointer(collection, id_):
            return element(0x0C, _counted(collection) + id_.binary)
        case Symbol(text):
            return element(0x0E, _counted(text))
        case ScopedCode(code, scope):
            return element(0x0F, _scoped_code(code, scope))
        case Code(scope=dict() as scope):
            return element(0x0F, _scoped_code(str(value), scope))
        case _:
            return _plain_element(name, value)


def _plain_element(name: str, value: object) -> bytes:
    try:
        return bson.encode({name: value}, False, CODEC_OPTIONS)[4:-1]
    except (BSONError, OverflowError) as error:
        raise ValueError(f"a {type(value).__name__} that BSON cannot hold") from error


def _scoped_code(code: str, scope: dict[str, object] | RepeatedFields) -> bytes:
    content = _counted(code) + _written(scope)
    return struct.pack("<i", len(content) + 4) + content


def _cstring(text: str) -> bytes:
    if "\0" in text:
        raise ValueError("a NUL in a field name or a regular expression")
    return text.encode() + b"\0"


def _counted(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<i", len(encoded) + 1) + encoded + b"\0"
