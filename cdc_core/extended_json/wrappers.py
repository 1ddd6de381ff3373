"""The wrapper keys of Extended JSON, and users' keys that look like one: those carry one more `$`, at every depth.

Readers strip one `$`, so that no field of a user is taken for a typed value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WRAPPERS = frozenset(
    "$oid $symbol $numberInt $numberLong $numberDouble $numberDecimal $binary $uuid $code $timestamp"
    " $regularExpression $dbPointer $date $minKey $maxKey $undefined".split()
)
"""The first keys of Extended JSON's wrappers: in our text an object that begins with one is a wrapper."""

RESERVED = WRAPPERS | {"$regex", "$ref"}
"""The keys that are escaped in a user's document: some parser of Extended JSON takes them for its own."""

RESERVED_NAMES = "|".join(sorted(re.escape(name[1:]) for name in RESERVED))
"""The reserved keys without their `$`, as the alternatives of a pattern."""

_is_reserved = re.compile(rf"\$+(?:{RESERVED_NAMES})").fullmatch
_is_escaped = re.compile(rf"\$\$+(?:{RESERVED_NAMES})").fullmatch
# In raw BSON, where a name ends with a NUL: without one of these a document needs no look at its keys.
may_hold_reserved = re.compile(rf"\$(?:{RESERVED_NAMES})\0".encode()).search


def escape_key(key: str) -> str:
    """A user's field name as it stands in our text: one more `$` where it looks like a wrapper's key."""
    return "$" + key if key[:1] == "$" and _is_reserved(key) else key


def unescape_key(key: str) -> str:
    """The user's field name of a key in our text."""
    return key[1:] if key[:2] == "$$" and _is_escaped(key) else key


def is_wrapper(parsed: Mapping[str, object]) -> bool:
    """Whether an object of our text, parsed, is a typed value and not a user's document."""
    return next(iter(parsed), None) in WRAPPERS
