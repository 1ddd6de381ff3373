"""Debezium's JSON dialects, converted from and to parsed type-exact Extended JSON.

A Debezium event mixes dialects. By default (`legacy`) `before` and `after` are STRICT, `updatedFields` and the key
RELAXED; other modes use one dialect for all. `parse` reads any of them, also mixed in one text, as the SMT does
(`BsonDocument.parse`): an integer without a wrapper is an int32 if it fits, else an int64; a number with a point or an
exponent is a double; bare `NaN` and `Infinity` are doubles; the last of repeated fields counts.

The dialects are ambiguous: a stored sub-document `{"$numberLong": "5"}` prints exactly like the int64 5, and is read as
one. What no dialect prints (`{"$oid": "x"}`, `{"$date": "soon"}`) is a user's document, and its key is escaped.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import json
import re
import unicodedata
import uuid
from collections.abc import Callable, Mapping
from typing import Final, TypeGuard

from bson import decimal128

from cdc_core.extended_json.wrappers import escape_key, unescape_key

EjsonValue = dict[str, "EjsonValue"] | list["EjsonValue"] | str | int | float | bool | None
Pairs = list[tuple[str, EjsonValue]]

INT32 = range(-(2**31), 2**31)
INT64 = range(-(2**63), 2**63)
UINT32 = range(2**32)

_OBJECT_ID = re.compile(r"[0-9a-fA-F]{24}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_DOUBLE = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_ISO_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d|[+-]\d\d)", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_FINITE = {"NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity", "+Infinity": "Infinity"}


class Dialect(enum.Enum):
    """Debezium's `json.serialization.mode`, without `legacy`, which mixes STRICT and RELAXED."""

    STRICT = "strict"
    RELAXED = "relaxed"
    EXTENDED = "extended"


def parse(text: str) -> EjsonValue:
    """The value of a text in any of the dialects, as parsed type-exact JSON.

    Raises `ValueError` if the text is not JSON or an integer is beyond int64. Lone surrogates become U+FFFD.
    """
    value = _DECODER.decode(text)
    return without_surrogates(value) if "\\u" in text or _SURROGATE.search(text) else value


def parse_fields(text: str) -> dict[str, EjsonValue]:
    """The document of a text that is no typed value: in `{"$date": 5}` it has a field `$date`.

    Raises `ValueError` as `parse` does, and if the text is not a JSON object.
    """
    value = parse(text)
    if is_document(value):
        return value
    if text.lstrip()[:1] != "{":
        raise ValueError("a JSON text of the event holds no document")
    outermost: Pairs = []

    def kept(pairs: Pairs) -> EjsonValue:
        nonlocal outermost
        outermost = pairs  # of the objects of a text, it is decoded last
        return _object(pairs)

    _decoder(kept).decode(text)
    return {escape_key(name): without_surrogates(item) for name, item in outermost}


def is_document(value: object) -> TypeGuard[dict[str, EjsonValue]]:
    """Whether a parsed value is a user's document and not the wrapper of a scalar."""
    if not isinstance(value, dict):
        return False
    first = next(iter(value), "")
    return first[:1] != "$" or first not in WRAPPERS


WRAPPERS = frozenset(
    "$oid $symbol $numberLong $numberDouble $numberDecimal $binary $code $timestamp $regularExpression $dbPointer"
    " $date $minKey $maxKey $undefined".split()
)


# --- reading ---------------------------------------------------------------------------------------------------------


def _integer(text: str) -> EjsonValue:
    number = int(text)
    if number in INT32:
        return number
    if number in INT64:
        return {"$numberLong": text}
    raise ValueError("an integer beyond 64 bits")


def _double(text: str) -> EjsonValue:
    return _of_double(float(text))


def _of_double(number: float) -> EjsonValue:
    if number != number:
        return {"$numberDouble": "NaN"}
    if number in (float("inf"), float("-inf")):
        return {"$numberDouble": "Infinity" if number > 0 else "-Infinity"}
    return number


def _constant(name: str) -> EjsonValue:
    return {"$numberDouble": name}


def _object(pairs: Pairs) -> EjsonValue:
    if pairs and pairs[0][0][:1] == "$":
        wrapper = _wrapper(pairs)
        if wrapper is not _NO_WRAPPER:
            return wrapper
    return {escape_key(name): value for name, value in pairs}


class _No(enum.Enum):
    WRAPPER = enum.auto()


_NO_WRAPPER: Final = _No.WRAPPER


def _wrapper(pairs: Pairs) -> EjsonValue | _No:
    """The wrapped value, or `_NO_WRAPPER` for a user's document that only begins like a wrapper."""
    if len(pairs) == 1:
        return _single(*pairs[0])
    if len(pairs) == 2:
        return _two_keys(dict(pairs))
    return _NO_WRAPPER


def _single(name: str, value: EjsonValue) -> EjsonValue | _No:
    size = len(value) if isinstance(value, dict) else 0
    match (name, value):
        case ("$oid", str()) if _OBJECT_ID.fullmatch(value):
            return {"$oid": value.lower()}
        case ("$numberInt", str()) if _INTEGER.fullmatch(value) and int(value) in INT32:
            return int(value)
        case ("$numberLong", str()) if _INTEGER.fullmatch(value) and int(value) in INT64:
            return {"$numberLong": str(int(value))}
        case ("$numberDouble", str()):
            return _wrapped_double(value)
        case ("$numberDecimal", str()):
            return _wrapped_decimal(value)
        case ("$date", _):
            return _wrapped_date(value)
        case ("$binary", {"base64": str(data), "subType": str(subtype)}) if size == 2:
            return _wrapped_binary(data, subtype)
        case ("$uuid", str()):
            return _wrapped_uuid(value)
        case ("$timestamp", {"t": seconds, "i": increment}) if size == 2:
            return _wrapped_timestamp(seconds, increment)
        case ("$regularExpression", {"pattern": str(), "options": str()}) if size == 2:
            return {name: value}
        case ("$symbol" | "$code", str()) | ("$minKey" | "$maxKey", int()) | ("$undefined", True):
            return {name: value}
        case ("$dbPointer", {"$$ref": str(namespace), "$id": {"$oid": str()} as pointer}) if size == 2:
            return {name: {"$ref": namespace, "$id": pointer}}
        case _:
            return _NO_WRAPPER


def _two_keys(value: Mapping[str, EjsonValue]) -> EjsonValue | _No:
    match value:
        case {"$binary": str(data), "$type": str(subtype)}:
            return _wrapped_binary(data, subtype)
        case {"$regex": str(pattern), "$options": str(options)}:
            return {"$regularExpression": {"pattern": pattern, "options": options}}
        case {"$code": str(code), "$scope": dict(scope)}:
            return {"$code": code, "$scope": scope}
        case _:
            return _NO_WRAPPER


def _wrapped_double(text: str) -> EjsonValue | _No:
    if text in _NOT_FINITE:
        return {"$numberDouble": _NOT_FINITE[text]}
    return _of_double(float(text)) if _DOUBLE.fullmatch(text) else _NO_WRAPPER


def _wrapped_decimal(text: str) -> EjsonValue | _No:
    try:
        return {"$numberDecimal": str(decimal128.Decimal128(text))}
    except (decimal.DecimalException, ValueError):
        return _NO_WRAPPER


def _wrapped_date(value: EjsonValue) -> EjsonValue | _No:
    match value:
        case bool():
            return _NO_WRAPPER
        case int():
            return {"$date": {"$numberLong": str(value)}}
        case {"$numberLong": str()}:
            return {"$date": value}
        case str():
            milliseconds = _milliseconds(value)
            return _NO_WRAPPER if milliseconds is None else {"$date": {"$numberLong": str(milliseconds)}}
        case _:
            return _NO_WRAPPER


def _milliseconds(text: str) -> int | None:
    """Milliseconds since 1970 of an ISO 8601 date, None for other text; fractions are truncated, as in the driver."""
    match = _ISO_DATE.fullmatch(text)
    if not match:
        return None
    *numbers, fraction, zone = match.groups()
    year, month, day, hour, minute, second = map(int, numbers)
    try:
        moment = datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
    except ValueError:
        return None
    offset = 0 if zone == "Z" else _offset_minutes(zone)
    elapsed = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    total_seconds = elapsed.days * 86_400 + elapsed.seconds - offset * 60
    return total_seconds * 1000 + int((fraction or "0").ljust(3, "0")[:3])


def _offset_minutes(zone: str) -> int:
    digits = zone[1:].replace(":", "").ljust(4, "0")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return -minutes if zone[0] == "-" else minutes


def _wrapped_binary(data: str, subtype: str) -> EjsonValue | _No:
    if not re.fullmatch(r"[0-9a-fA-F]{1,2}", subtype):
        return _NO_WRAPPER
    try:
        base64.b64decode(data, validate=True)
    except ValueError:
        return _NO_WRAPPER
    return {"$binary": {"base64": data, "subType": f"{int(subtype, 16):02x}"}}


def _wrapped_uuid(text: str) -> EjsonValue | _No:
    try:
        data = uuid.UUID(text).bytes
    except ValueError:
        return _NO_WRAPPER
    return {"$binary": {"base64": base64.b64encode(data).decode(), "subType": "04"}}


def _wrapped_timestamp(seconds: EjsonValue, increment: EjsonValue) -> EjsonValue | _No:
    parts: list[EjsonValue] = [
        part for part in map(_plain_integer, (seconds, increment)) if part is not None and part in UINT32
    ]
    return {"$timestamp": {"t": parts[0], "i": parts[1]}} if len(parts) == 2 else _NO_WRAPPER


def _plain_integer(value: EjsonValue) -> int | None:
    match value:
        case {"$numberLong": str(number)}:
            return int(number)
        case bool():
            return None
        case int():
            return value
        case _:
            return None


def without_surrogates(value: EjsonValue) -> EjsonValue:
    """The value with U+FFFD for lone surrogates, which JSON text may escape but UTF-8 cannot contain."""
    match value:
        case str():
            return _SURROGATE.sub("\ufffd", value)
        case list():
            return [without_surrogates(item) for item in value]
        case dict():
            return {_SURROGATE.sub("\ufffd", name): without_surrogates(item) for name, item in value.items()}
        case _:
            return value


def _decoder(of_object: Callable[[Pairs], EjsonValue]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=of_object, parse_int=_integer, parse_float=_double, parse_constant=_constant, strict=False
    )


_DECODER = _decoder(_object)


# --- writing ---------------------------------------------------------------------------------------------------------


def render(value: EjsonValue, dialect: Dialect, *, comma: str = ",") -> str:
    """The text that Debezium 3.3 writes for a parsed value, byte for byte except for doubles that older JDKs print longer.

    A space follows each colon but not each comma (`legacy` writes `updatedFields` with `comma=", "`). As in Debezium,
    RELAXED loses the type of a small int64, and a user's document that looks like a wrapper is not escaped.
    """
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return _quoted(value)
        case int():
            return f'{{"$numberInt": "{value}"}}' if dialect is Dialect.EXTENDED else str(value)
        case float():
            text = _java_double(value)
            return f'{{"$numberDouble": "{text}"}}' if dialect is Dialect.EXTENDED else text
        case list():
            return "[" + comma.join(render(item, dialect, comma=comma) for item in value) + "]"
        case dict() if is_document(value):
            return _rendered_document({unescape_key(name): item for name, item in value.items()}, dialect, comma)
        case _:
            return _rendered_wrapper(value, dialect, comma)


def _rendered_document(document: Mapping[str, EjsonValue], dialect: Dialect, comma: str) -> str:
    fields = (f"{_quoted(name)}: {render(item, dialect, comma=comma)}" for name, item in document.items())
    return "{" + comma.join(fields) + "}"


def _rendered_wrapper(value: dict[str, EjsonValue], dialect: Dialect, comma: str) -> str:
    strict, relaxed = dialect is Dialect.STRICT, dialect is Dialect.RELAXED
    match value:
        case {"$numberLong": str(number)} if relaxed:
            return number
        case {"$numberDouble": str(name)} if strict:
            return name
        case {"$date": {"$numberLong": str(number)}} if strict:
            return f'{{"$date": {number}}}'
        case {"$date": {"$numberLong": str(number)}} if relaxed and 0 <= int(number) < 253_402_300_800_000:
            return f'{{"$date": "{_iso_date(int(number))}"}}'
        case {"$binary": {"base64": data, "subType": str(subtype)}} if strict:
            return f'{{"$binary": "{data}"{comma}"$type": "{subtype.upper()}"}}'
        case {"$binary": {"base64": data, "subType": str(subtype)}}:
            return f'{{"$binary": {{"base64": "{data}"{comma}"subType": "{subtype.upper()}"}}}}'
        case {"$regularExpression": {"pattern": str(pattern), "options": str(options)}} if strict:
            return f'{{"$regex": {_quoted(pattern)}{comma}"$options": {_quoted(options)}}}'
        case {"$dbPointer": {"$ref": namespace, "$id": pointer}} if dialect is not Dialect.EXTENDED:
            return _rendered_document({"$ref": namespace, "$id": pointer}, dialect, comma)
        case {"$code": str(code), "$scope": scope}:
            return f'{{"$code": {_quoted(code)}{comma}"$scope": {render(scope, dialect, comma=comma)}}}'
        case _:
            return _as_written(value, comma)


def _as_written(value: EjsonValue, comma: str) -> str:
    """The content of a wrapper, in which numbers are plain in every dialect."""
    if isinstance(value, dict):
        return "{" + comma.join(f"{_quoted(name)}: {_as_written(item, comma)}" for name, item in value.items()) + "}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _iso_date(milliseconds: int) -> str:
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=milliseconds)
    fraction = f".{milliseconds % 1000:03d}".rstrip("0") if milliseconds % 1000 else ""
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + fraction + "Z"


def _java_double(number: float) -> str:
    """Java's `Double.toString`: plain from 10⁻³ to 10⁷, else one digit before the point and an exponent."""
    shortest = decimal.Decimal(repr(number)).normalize()
    if not number or 1e-3 <= abs(number) < 1e7:
        return _with_fraction(f"{shortest:f}")
    digits, _, exponent = f"{shortest:E}".partition("E")
    return f"{_with_fraction(digits)}E{int(exponent)}"


def _with_fraction(digits: str) -> str:
    return digits if "." in digits else f"{digits}.0"


_RAW_CATEGORIES = frozenset("Lu Ll Lt Lo Nd Nl No Zs Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split())
_SIMPLE = re.compile(r"[ !#-\[\]-~]*")


def _quoted(text: str) -> str:
    if _SIMPLE.fullmatch(text):
        return f'"{text}"'
    return '"' + "".join(map(_escaped_character, text)) + '"'


def _escaped_character(character: str) -> str:
    is_raw = character <= "\uffff" and unicodedata.category(character) in _RAW_CATEGORIES
    return character if is_raw and character not in '"\\' else json.dumps(character)[1:-1]
