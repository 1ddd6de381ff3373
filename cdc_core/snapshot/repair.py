"""A repair: a snapshot of single documents by their keys, in which a key that the source does not hold is a delete.

It travels as an additional condition, `{"$comment": "medallion repair [<keys>]"}`, because that is what a signal, a plan in
bronze and a snapshot that goes on after a kill all keep. The keys are those of `__key`: canonical JSON of `_id`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bson import decode
from bson.codec_options import CodecOptions, DatetimeConversion

from cdc_core.extended_json import json_to_bson

_NAME = "medallion repair "
_EXACT: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)


def filter_of(keys: Sequence[str]) -> str:
    """The condition of a signal that asks for these keys."""
    return json.dumps({"$comment": _NAME + json.dumps(list(keys))})


def keys_of(filter_: str | None) -> tuple[str, ...] | None:
    """The keys that a condition asks for; None for one that is no repair."""
    if filter_ is None or _NAME not in filter_:
        return None
    try:
        said = json.loads(filter_).get("$comment")
        return tuple(json.loads(said.removeprefix(_NAME))) if said.startswith(_NAME) else None
    except (ValueError, AttributeError):
        return None


def condition(keys: Sequence[str]) -> dict[str, Any]:
    """The find filter that the documents of these keys match: MongoDB holds equal whatever has one key."""
    # Canonical keys and the unique index agree on what is equal: 5, 5.0 and NumberLong(5) are found by any one of them.
    return {"_id": {"$in": [identifier(key) for key in keys]}}


def identifier(key: str) -> Any:
    """A value of `_id` that has the key."""
    return decode(json_to_bson.loads(f'{{"_id":{key}}}'), _EXACT)["_id"]
