"""A repair: a snapshot of single documents by their keys; a key without a document in the source is a delete.

It is stored as an additional condition, `{"$comment": "medallion repair [<keys>]"}`, which signals, plans in bronze and
resumed snapshots all keep. The keys are those of `__key`: canonical JSON of `_id`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from bson.raw_bson import RawBSONDocument

from cdc_core.extended_json import json_to_bson, raw_bson
from cdc_core.extended_json import keys as canonical_keys

_NAME = "medallion repair "


def filter_of(keys: Sequence[str]) -> str:
    """The condition of a signal that requests these keys."""
    return json.dumps({"$comment": _NAME + json.dumps(list(keys))})


def keys_of(filter_: str | None) -> tuple[str, ...] | None:
    """The keys of a condition; None if it is not a repair."""
    if filter_ is None or _NAME not in filter_:
        return None
    try:
        comment = json.loads(filter_).get("$comment")
        keys = json.loads(comment.removeprefix(_NAME)) if comment.startswith(_NAME) else None
    except (ValueError, AttributeError, RecursionError):
        return None
    # A user's own comment may begin like this. Taken for keys it would stop the capture at every start.
    return tuple(keys) if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else None


PORTION_BYTES = 2 * 1024 * 1024
"""Keys are requested in portions of this much text: as BSON it may be five times as long, and a command is limited to 16 MB."""


def portions(keys: Iterable[str], *, most: int) -> Iterator[list[str]]:
    """The keys in portions that fit into one command, of at most `most` keys."""
    portion: list[str] = []
    size = 0
    for key in keys:
        size += len(key)
        if portion and (len(portion) == most or size > PORTION_BYTES):
            yield portion
            portion, size = [], len(key)
        portion.append(key)
    if portion:
        yield portion


def condition(keys: Iterable[str]) -> dict[str, Any]:
    """The find filter that matches the documents of these keys.

    Keys that a filter cannot express are left out (`can_ask`).
    """
    # Any value with the key finds the document, because the unique index treats 5, 5.0 and NumberLong(5) as equal. The filter is
    # built from bytes: Python would change some values (a repeated field, an undefined, a DBPointer), which then find nothing.
    ids = filter(None, map(_value, keys))
    array = b"".join(bytes((kind,)) + str(index).encode() + b"\0" + raw for index, (kind, raw) in enumerate(ids))
    return {"_id": RawBSONDocument(_document(b"\x04$in\0" + _document(array)))}


def can_ask(key: str) -> bool:
    """Whether a filter can express the key; if not, its document may exist although no filter finds it."""
    return _value(key) is not None


def is_key(text: str) -> bool:
    """Whether a document can have this key; a row that was written by something else may have any text or null."""
    try:
        return canonical_keys.canonical_raw(_with_id(text)) == text
    except (ValueError, KeyError, RecursionError):
        return False


_UNDEFINED, _DOCUMENT = 0x06, 0x03


def _value(key: str) -> tuple[int, bytes] | None:
    """The BSON type and bytes of an `_id` with this key; None if there is none, or if a filter must not contain it."""
    try:
        raw = _with_id(key)
        element = raw_bson.find(raw, b"_id")
        value = raw[element.start : element.end]
        if canonical_keys.canonical_raw(raw) != key or element.kind == _UNDEFINED:
            return None
        # For a document whose first field starts with `$`: the server would take it for an operator.
        first = next(raw_bson.elements(value), None) if element.kind == _DOCUMENT else None
    except (ValueError, KeyError, RecursionError):
        return None
    is_operator = first is not None and first.name.startswith(b"$") and first.name != b"$ref"
    return None if is_operator else (element.kind, value)


_LEVELS = 181
"""The most levels of a key's text: MongoDB stores documents of 180 levels, and a wrapper has two more inside the last. A server refuses
a whole command for a value that is nested somewhat deeper."""

_NO_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[^][{}"]+', re.DOTALL)


def _with_id(key: str) -> bytes:
    """A document whose `_id` has the key; raises `ValueError` if there is none."""
    steps = (1 if bracket in "[{" else -1 for bracket in _NO_BRACKETS.sub("", key))
    if max(accumulate(steps), default=0) > _LEVELS:
        raise ValueError("nested deeper than a document can be")
    if key.startswith(_BYTES):
        binary = json.loads(key)["$bytes"]
        value = base64.b64decode(binary["base64"], validate=True)
        return _document(bytes((binary["type"],)) + b"_id\0" + value)
    return json_to_bson.loads(f'{{"_id":{key}}}')


_BYTES = '{"$bytes":{'
"""The beginning of a key that is given by its bytes. Other keys never begin so: the server refuses such a name in an `_id`."""


def _document(elements: bytes) -> bytes:
    return (len(elements) + 5).to_bytes(4, "little") + elements + b"\0"
