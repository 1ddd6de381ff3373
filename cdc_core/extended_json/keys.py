"""The `key` of a document: one text for all values of `_id` that MongoDB's unique index treats as equal.

It is Extended JSON in which equal numbers have equal text, at every depth:

* An integer of 64 bits is its plain digits: int32 5, int64 5, double 5.0 and decimal 5.00 are `5`. Zero is `0`.
* Another number is its exact value, `{"$numberDecimal":"<digits>E<exponent>"}` without trailing zeros.
* A double whose exact value has more than 34 digits equals no decimal: `{"$numberDouble":"<shortest>"}`. So double 0.1 and
  decimal 0.1 have two keys, as MongoDB has two documents.
* All NaNs are one value, and each infinity is one.

A symbol equals a string. Field order counts. Booleans are not numbers, binary subtypes differ, and strings are neither
case-folded nor normalised. A value with invalid UTF-8 is given by its bytes, `{"$bytes":{"base64":…,"type":…}}`,
because its repaired text could equal another value.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from decimal import Decimal

import orjson
from bson.code import Code
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId

from cdc_core.extended_json import bson_to_json, raw_bson, wrappers

# The precision of a Decimal128: a double with more digits equals none.
_DECIMAL_DIGITS = 34
_INT64 = range(-(1 << 63), 1 << 63)
_int32 = struct.Struct("<i").unpack
_int64 = struct.Struct("<q").unpack


_OBJECT_ID_FIRST = b"\x07_id\0"
"""The bytes that follow the length of a document that begins with an ObjectId `_id`, as nearly all do."""


def canonical(value: object) -> str:
    """The key of a Python or bson value of `_id`; raises `ValueError` if the value has no BSON type."""
    kind = type(value)
    # The common types first, by identity: subclasses (`Code` is a `str`) and booleans take the slow path.
    if kind is ObjectId:
        return f'{{"$oid":"{value}"}}'
    if kind is str:
        return orjson.dumps(value).decode()
    if kind is int or kind is Int64:
        return str(value)
    return _text(value)


def canonical_raw(raw_document: bytes) -> str:
    """The key of a raw BSON document's `_id`, exact also where decoding is not (undefined, repeated fields).

    Raises `KeyError` if the document has no `_id`, `ValueError` if the bytes are not BSON.
    """
    # A slice instead of a walk over the document: the snapshot calls this for each row.
    if raw_document[4:9] == _OBJECT_ID_FIRST and len(raw_document) > 21:
        return f'{{"$oid":"{raw_document[9:21].hex()}"}}'
    element = raw_bson.find(raw_document, b"_id")
    return _canonical_bytes(element.kind, raw_document[element.start : element.end])


def _canonical_bytes(kind: int, raw: bytes) -> str:
    if kind == 0x07:
        return f'{{"$oid":"{raw.hex()}"}}'
    if kind == 0x10:
        return str(_int32(raw)[0])
    if kind == 0x12:
        return str(_int64(raw)[0])
    value, is_repaired = raw_bson.repaired(kind, raw)
    if is_repaired:
        return f'{{"$bytes":{{"base64":"{base64.b64encode(raw).decode()}","type":{kind}}}}}'
    return canonical(value)


def _text(value: object) -> str:
    # Before the integers: a Python boolean is an integer, a BSON boolean equals none.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _double(value)
    if isinstance(value, Decimal128):
        return _decimal(value)
    if isinstance(value, raw_bson.Symbol):
        return orjson.dumps(value.text).decode()
    if isinstance(value, Mapping):
        return _document(value.items())
    if isinstance(value, raw_bson.RepeatedFields):
        return _document(value.items)
    if isinstance(value, DBRef):
        return _document(value.as_doc().items())
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, raw_bson.ScopedCode):
        return _scoped(value.code, _document(value.scope.items))
    if isinstance(value, Code) and value.scope is not None:
        return _scoped(str(value), _document(value.scope.items()))
    return bson_to_json.dumps_value(value).decode()


def _document(items: Iterable[tuple[str, object]]) -> str:
    fields = (f"{orjson.dumps(wrappers.escape_key(name)).decode()}:{_text(item)}" for name, item in items)
    return f"{{{','.join(fields)}}}"


def _scoped(code: str, scope: str) -> str:
    return f'{{"$code":{orjson.dumps(code).decode()},"$scope":{scope}}}'


def _double(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return _special(value)
    # MongoDB compares numbers by their exact value, whatever their type: 5.0 is the document 5.
    if value.is_integer() and int(value) in _INT64:
        return str(int(value))
    # The exact value and not its shortest text: double 0.1 is 0.1000000000000000055…, which differs from decimal 0.1.
    sign, digits, exponent = Decimal(value).as_tuple()
    stripped = _stripped(digits)
    if len(stripped) > _DECIMAL_DIGITS:
        return f'{{"$numberDouble":"{value!r}"}}'
    return _number(sign, stripped, int(exponent) + len(digits) - len(stripped))


def _decimal(value: Decimal128) -> str:
    number = value.to_decimal()
    if not number.is_finite():
        # Decimal128 has NaNs with signs and payloads; the index treats all of them as one.
        return _special(float("nan") if number.is_nan() else float(number))
    sign, digits, exponent = number.as_tuple()
    stripped = _stripped(digits)
    return _number(sign, stripped, int(exponent) + len(digits) - len(stripped))


def _special(value: float) -> str:
    return f'{{"$numberDecimal":"{bson_to_json.special_double(value)}"}}'


def _stripped(digits: tuple[int, ...]) -> str:
    return "".join(map(str, digits)).rstrip("0")


def _number(sign: int, digits: str, exponent: int) -> str:
    """The text of ±digits × 10^exponent."""
    if not digits:
        return "0"
    minus = "-" if sign else ""
    # An integer of 64 bits has at most 19 digits; the bound avoids computing huge powers of ten.
    if 0 <= exponent < 20 and int(minus + digits) * 10**exponent in _INT64:
        return f"{minus}{digits}{'0' * exponent}"
    return f'{{"$numberDecimal":"{minus}{digits}E{exponent}"}}'
