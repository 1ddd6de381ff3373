"""A repair: a snapshot of single documents by their keys, in which a key that the source does not hold is a delete.

It travels as an additional condition, `{"$comment": "medallion repair [<keys>]"}`, because that is what a signal, a plan in
bronze and a snapshot that goes on after a kill all keep. The keys are those of `__key`: canonical JSON of `_id`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bson.raw_bson import RawBSONDocument

from cdc_core.extended_json import json_to_bson, raw_bson
from cdc_core.extended_json import keys as canonical_keys

_NAME = "medallion repair "


def filter_of(keys: Sequence[str]) -> str:
    """The condition of a signal that asks for these keys."""
    return json.dumps({"$comment": _NAME + json.dumps(list(keys))})


def keys_of(filter_: str | None) -> tuple[str, ...] | None:
    """The keys that a condition asks for; None for one that is no repair."""
    if filter_ is None or _NAME not in filter_:
        return None
    try:
        said = json.loads(filter_).get("$comment")
        keys = json.loads(said.removeprefix(_NAME)) if said.startswith(_NAME) else None
    except (ValueError, AttributeError, RecursionError):
        return None
    # A person's own comment may begin so: taken for keys it would end the capture, and each start.
    return tuple(keys) if isinstance(keys, list) and all(isinstance(each, str) for each in keys) else None


PORTION_BYTES = 2 * 1024 * 1024
"""So much text of keys is asked for at once: as BSON it may be five times as long, and a command has 16 MB."""


def portions(keys: Iterable[str], *, most: int) -> Iterator[list[str]]:
    """The keys in portions that one command has room for, of `most` keys at most."""
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
    """The find filter that the documents of these keys match: MongoDB holds equal whatever has one key.

    Keys that no filter can name are left out (`can_ask`).
    """
    # Canonical keys and the unique index agree on what is equal: 5, 5.0 and NumberLong(5) are found by any one of them. As bytes: what
    # Python would make of a value may be another one (a repeated field, an undefined, a DBPointer), which finds nothing.
    found = filter(None, map(_value, keys))
    array = b"".join(bytes((kind,)) + str(at).encode() + b"\0" + raw for at, (kind, raw) in enumerate(found))
    return {"_id": RawBSONDocument(_document(b"\x04$in\0" + _document(array)))}


def can_ask(key: str) -> bool:
    """Whether a filter can name the key: where not, nothing is known of its document, and least of all that there is
    none."""
    return _value(key) is not None


def is_key(text: str) -> bool:
    """Whether a document can have this key: a row that another hand wrote may have any text, or none, in its place."""
    try:
        return canonical_keys.canonical_raw(_with_id(text)) == text
    except (ValueError, KeyError):
        return False


_UNDEFINED, _DOCUMENT = 0x06, 0x03


def _value(key: str) -> tuple[int, bytes] | None:
    """The BSON type and the bytes of an `_id` that has the key; None where there is none, or none that a filter may hold."""
    try:
        raw = _with_id(key)
        element = raw_bson.find(raw, b"_id")
        value = raw[element.start : element.end]
        if canonical_keys.canonical_raw(raw) != key or element.kind == _UNDEFINED:
            return None
        # The server would take it for an operator.
        first = next(raw_bson.elements(value), None) if element.kind == _DOCUMENT else None
    except (ValueError, KeyError):
        return None
    is_operator = first is not None and first.name.startswith(b"$") and first.name != b"$ref"
    return None if is_operator else (element.kind, value)


def _with_id(key: str) -> bytes:
    """A document whose `_id` has the key; ValueError where there is none."""
    if key.startswith(_BYTES):
        said = json.loads(key)["$bytes"]
        value = base64.b64decode(said["base64"], validate=True)
        return _document(bytes((said["type"],)) + b"_id\0" + value)
    return json_to_bson.loads(f'{{"_id":{key}}}')


_BYTES = '{"$bytes":{'
"""How a key of bytes begins that no text says: a document's field may not be called so."""


def _document(elements: bytes) -> bytes:
    return (len(elements) + 5).to_bytes(4, "little") + elements + b"\0"
