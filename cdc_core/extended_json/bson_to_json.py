"""Type-exact Extended JSON v2: BSON as JSON text that can be converted back to the same bytes.

int32, finite doubles (always with a point or an exponent), strings, booleans and null are plain JSON. Everything else
has its canonical wrapper of "MongoDB Extended JSON (v2)". Users' keys that look like a wrapper's are escaped
(`wrappers`), so any Extended JSON parser reads the text, and no user's document is read as a typed value.

A document is decoded, encoded again and compared: equal bytes prove that decoding was exact. Otherwise (repeated
fields, symbol, undefined, dbPointer, unusual regex options, invalid UTF-8) it is read element by element. Not
preserved, because JSON cannot express it: the sign and payload of a NaN, non-canonical encodings of a decimal, the keys
of array elements, and invalid UTF-8 (only the last is flagged).
"""

from __future__ import annotations

import base64
import datetime
import math
import re
import struct
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import bson
import orjson
from bson.binary import Binary
from bson.code import Code
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

from cdc_core.extended_json.raw_bson import (
    CODEC_OPTIONS,
    DBPointer,
    RegularExpression,
    RepeatedFields,
    ScopedCode,
    Symbol,
    Undefined,
    read_document,
)
from cdc_core.extended_json.wrappers import escape_key, may_hold_reserved

MAX_DEPTH = 250
"""The deepest nesting that is encoded, as in a MongoDB server."""


class DocumentText(NamedTuple):
    """A document's text, and whether invalid UTF-8 was replaced in it."""

    text: bytes
    lossy: bool


def encode(raw: bytes) -> DocumentText:
    """The exact text of a BSON document; raises `ValueError` if the bytes are not one."""
    try:
        document = bson.decode(raw, CODEC_OPTIONS)
    except _UNREADABLE:
        return _encode_elements(raw)
    return encode_decoded(document, raw)


def encode_decoded(document: Mapping[str, Any], raw: bytes) -> DocumentText:
    """The same for a document that is already decoded from `raw` with `CODEC_OPTIONS`."""
    # Encoding again is cheaper than reading element by element, and nearly every document passes.
    if is_exact(document, raw):
        return DocumentText(dumps_value(document, proven=raw), False)
    return _encode_elements(raw)


def is_exact(document: Mapping[str, Any], raw: bytes) -> bool:
    """Whether a document decoded with `CODEC_OPTIONS` encodes to the same bytes."""
    try:
        # Inside another document, because bson moves the `_id` of the outermost one to the front.
        return bson.encode({"": document}, False, CODEC_OPTIONS)[6:-1] == raw
    except _UNREADABLE:
        return False


_UNREADABLE = (BSONError, ValueError, OverflowError, RecursionError)


def _encode_elements(raw: bytes) -> DocumentText:
    repairs: list[bytes] = []
    try:
        document = read_document(raw, 0, len(raw), repairs)
    except (struct.error, IndexError) as error:
        raise ValueError("no BSON document: it ends too early") from error
    except RecursionError as error:
        raise ValueError(f"a document nested deeper than {MAX_DEPTH} levels") from error
    return DocumentText(dumps_value(document), bool(repairs))


def dumps(raw: bytes) -> bytes:
    """The text of a BSON document in UTF-8; invalid UTF-8 in it becomes U+FFFD."""
    return encode(raw).text


def dumps_value(value: object, *, proven: bytes | None = None) -> bytes:
    """The text of one Python or bson value; raises `ValueError` for a value that has no BSON type.

    `proven` enables the fast path. It is raw BSON that holds the value, and that was decoded with `is_exact` true; it
    may hold more than the value.
    """
    # A search for one byte is many times faster than the pattern, and most documents hold no `$`.
    if proven is not None and not (b"$" in proven and may_hold_reserved(proven)):
        try:
            text = orjson.dumps(value, _wrapped, _OPTIONS)
        except TypeError:
            return _dumps_spelled(value)
        # orjson writes NaN and infinities as null, so a text without null has none.
        if b"null" not in text or not _may_hold_special_double(proven):
            return text
    return _dumps_spelled(value)


# Int64 and Code are subclasses of int and str, which orjson would write without a wrapper.
_OPTIONS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def _dumps_spelled(value: object) -> bytes:
    try:
        return orjson.dumps(_spelled(value), _wrapped, _OPTIONS)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a value of BSON, or nested deeper than {MAX_DEPTH} levels: {error}") from error


_ends_7f = re.compile(rb"\x7f(?<=\0.{6}[\xf0-\xff]\x7f)", re.DOTALL).finditer
_ends_ff = re.compile(rb"\xff(?<=\0.{6}[\xf0-\xff]\xff)", re.DOTALL).finditer


def _may_hold_special_double(raw: bytes) -> bool:
    """Whether `raw` may hold an infinity or a NaN; there may be false positives, but no false negatives.

    Such a double is type byte 1, a name, a NUL, and eight bytes that end with an exponent of all ones.
    """
    return (b"\x7f" in raw and any(_follows_name(raw, end.start() - 7) for end in _ends_7f(raw))) or (
        b"\xff" in raw and any(_follows_name(raw, end.start() - 7) for end in _ends_ff(raw))
    )


def _follows_name(raw: bytes, at: int) -> bool:
    return raw.find(1, raw.rfind(0, 0, at - 1) + 1, at - 1) >= 0


def _wrapped(value: Any) -> object:
    """The `default` of orjson: the wrapper of a value that has no plain JSON form."""
    kind = type(value)
    # The most frequent types need no look-up in the table.
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
    """A decimal as Extended JSON spells it, with all digits and its exponent."""
    bits = int.from_bytes(value.bid, "little")
    sign = "-" if bits >> 127 else ""
    if bits >> 122 & 0x1F == 0x1F:
        return "NaN"
    if bits >> 122 & 0x1F == 0x1E:
        return sign + "Infinity"
    if bits >> 125 & 3 == 3:
        # Coefficients of this form have more than 34 digits, which IEEE 754 defines as zero.
        coefficient, exponent = 0, bits >> 111 & 0x3FFF
    else:
        coefficient, exponent = bits & (1 << 113) - 1, bits >> 113 & 0x3FFF
    # Python writes a decimal as "BSON Decimal128 Type Handling in Drivers" asks for.
    return str(Decimal(f"{sign}{coefficient if coefficient < 10**34 else 0}E{exponent - 6176}"))


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
    """A value in which everything is replaced that orjson would write wrongly: reserved keys, infinities, large plain ints."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        return {escape_key(key): _spelled(item) for key, item in value.items()}
    if kind is list:
        return [_spelled(item) for item in value]
    if kind is float:
        return value if math.isfinite(value) else {"$numberDouble": special_double(value)}
    if kind is int:
        return _spelled_int(value)
    if kind in _PLAIN:
        return value
    if kind is RepeatedFields:
        return _repeated(value)
    return _spelled_rare(value)


# Not Code: its scope is a document, which may have reserved keys.
_PLAIN = frozenset({ObjectId, Int64, DatetimeMS, *_WRAP} - {Code})


def special_double(value: float) -> str:
    """The Extended JSON name of a NaN or an infinity."""
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _spelled_int(value: int) -> object:
    if -(1 << 31) <= value < 1 << 31:
        return value
    if -(1 << 63) <= value < 1 << 63:
        return {"$numberLong": str(value)}
    raise ValueError("an integer of more than 64 bits has no BSON type")


def _spelled_rare(value: object) -> object:
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
    fields = []
    # A loop that calls `_spelled` itself: with more calls for each level a deep document exceeds Python's recursion limit.
    for key, item in document.items:
        fields.append(orjson.dumps(escape_key(key)) + b":" + orjson.dumps(_spelled(item), _wrapped, _OPTIONS))
    return orjson.Fragment(b"{" + b",".join(fields) + b"}")
