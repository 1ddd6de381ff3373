"""The wrapper keys of Extended JSON, and the escaping of users' field names that look like one.

Such a name gets one more `$`, at every depth, and readers remove one. So a user's field is never read as a typed value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WRAPPERS = frozenset(
    "$oid $symbol $numberInt $numberLong $numberDouble $numberDecimal $binary $uuid $code $timestamp"
    " $regularExpression $dbPointer $date $minKey $maxKey $undefined".split()
)
"""The first keys of Extended JSON's wrappers: in type-exact JSON an object that begins with one is a typed value."""

RESERVED = WRAPPERS | {"$regex", "$ref"}
"""The keys that are escaped in users' documents: some Extended JSON parser gives each of them a meaning."""

RESERVED_NAMES = "|".join(sorted(re.escape(name[1:]) for name in RESERVED))
"""The reserved keys without their `$`, as alternatives of a regular expression."""

_is_reserved = re.compile(rf"\$+(?:{RESERVED_NAMES})").fullmatch
_is_escaped = re.compile(rf"\$\$+(?:{RESERVED_NAMES})").fullmatch
# For raw BSON, where a name ends with NUL: if nothing matches, no key needs escaping.
may_hold_reserved = re.compile(rf"\$(?:{RESERVED_NAMES})\0".encode()).search


def escape_key(key: str) -> str:
    """A user's field name as type-exact JSON spells it: with one more `$` if it looks like a wrapper's key."""
    return "$" + key if key[:1] == "$" and _is_reserved(key) else key


def unescape_key(key: str) -> str:
    """The user's field name of a key in type-exact JSON."""
    return key[1:] if key[:2] == "$$" and _is_escaped(key) else key


def is_wrapper(parsed: Mapping[str, object]) -> bool:
    """Whether a parsed object of type-exact JSON is a typed value and not a user's document."""
    return next(iter(parsed), None) in WRAPPERS
