"""Type-exact Extended JSON v2 (see `bson_to_json`) as BSON; canonical and relaxed Extended JSON of other writers is read too."""

from __future__ import annotations

import base64
import datetime
import json
import uuid
from collections.abc import Mapping
from typing import Any

import bson
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from cdc_core.extended_json.raw_bson import (
    CODEC_OPTIONS,
    DBPointer,
    RepeatedFields,
    Symbol,
    Undefined,
    regular_expression,
    scoped_code,
    write_document,
)
from cdc_core.extended_json.wrappers import WRAPPERS, unescape_key


def loads(text: bytes | str) -> bytes:
    """The BSON document of a text, the exact inverse of `bson_to_json.dumps`; raises `ValueError` if the text is not a document."""
    document = loads_value(text)
    if not isinstance(document, (dict, RepeatedFields)):
        raise ValueError("no document: the text is one value")
    try:
        # Inside another document, because bson moves the `_id` of the outermost one to the front.
        return bson.encode({"": document}, False, CODEC_OPTIONS)[6:-1]
    # `bson` has no classes for the rare types, so their documents take the slow writer. Its message shows the whole
    # document, for which a deep one exceeds Python's recursion limit.
    except (BSONError, OverflowError, RecursionError):
        return write_document(document)


def loads_value(text: bytes | str) -> object:
    """The Python, bson or own value of a text (Int64, Decimal128, DatetimeMS, Symbol, RepeatedFields, …).

    Raises `ValueError` if the text is not JSON or a wrapper has invalid content.
    """
    decoded = text if isinstance(text, str) else bytes(text).decode()
    try:
        # Not orjson, which drops repeated field names.
        return json.loads(decoded, object_pairs_hook=_assembled, parse_constant=_refused_constant)
    except RecursionError as error:
        raise ValueError("the text is nested too deeply") from error


def _refused_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _assembled(pairs: list[tuple[str, Any]]) -> object:
    """The value of a JSON object whose own values are assembled already."""
    # The first key decides: a user's key of that name would be escaped.
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
        (second, scope), *extra_pairs = pairs[1:]
        if name != "$code" or second != "$scope" or extra_pairs:
            raise ValueError("other keys beside it")
        return scoped_code(content, scope)
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
            return regular_expression(_string(content["pattern"]), _string(content["options"]))
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
    return DatetimeMS(moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC))
