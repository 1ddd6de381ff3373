"""The order of change events, from their resume tokens.

A token's `_data` is the hex of a KeyString, MongoDB's encoding that sorts bytewise: cluster time, version of the
format, type of the token (from version 1), index of the operation inside the cluster time, and the event's identifier.
Only MongoDB promises that. A token of another server that cannot be read raises `ValueError`.

Sources: MongoDB's `resume_token.h` (order of the fields) and `key_string.h` (encoding of numbers).
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

SNAPSHOT_INDEX = "ffffffff"
"""The index of snapshot rows: after every change up to their cluster time, before every later one."""

_token = re.compile(r"82([0-9A-Fa-f]{8})([0-9A-Fa-f]{8})([0-9A-Fa-f]{2,})").fullmatch
# KeyString integers: version 1 or 2, type 128 (an event), index 0.
_FIRST_OF_ITS_TIME = frozenset({"2B022C010029", "2B042C010029"})
_VERSION = slice(18, 22)
_LARGEST_INDEX = 0xFFFFFFFE
_ZERO = 0x29
_ONE_BYTE = 0x2B
_EIGHT_BYTES = 0x32
_TRUE = "6F"
_BOOLEANS = frozenset({"6E", _TRUE})
_UUID = "5A1004"
_NULL = "14"
_DOCUMENT = "46"
_fragment = re.compile(r"(?:29|2B(?!00)[0-9A-F][02468ACE])04").fullmatch


class TokenPosition(NamedTuple):
    """An event's cluster time, and its index among the events of that time."""

    seconds: int
    increment: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used


def position(data: str) -> TokenPosition:
    """The position of a token's `_data`; raises `ValueError` if it is not a token of MongoDB."""
    match = _token(data)
    if match is None:
        raise _unreadable(data, "it does not begin with a cluster time")
    seconds, increment, rest = match.groups()
    index, _at = _index(data) if rest[:12] not in _FIRST_OF_ITS_TIME else (0, 30)
    return TokenPosition(int(seconds, 16), int(increment, 16), index)


def seconds(data: str) -> int:
    """The seconds of the cluster time with which a token's `_data` begins, also one from `behind`, which has nothing else."""
    return int(data[2:10], 16)


def sequence(position: TokenPosition) -> str:
    """A position as 24 hex digits that sort in the order in which events apply to a key."""
    return f"{position.seconds:08x}{position.increment:08x}{position.index:08x}"


def sequence_of(data: str) -> str:
    """The sequence of a token's `_data`; equals `sequence(position(data))`, but is faster."""
    # Nearly every event is the first of its cluster time, which one comparison of twelve digits shows.
    if data[18:30] in _FIRST_OF_ITS_TIME and _token(data):
        return f"{data[2:18].lower()}00000000"
    return sequence(position(data))


def snapshot_sequence(seconds: int, increment: int) -> str:
    """The sequence of the rows that a snapshot reads at a cluster time."""
    return f"{seconds:08x}{increment:08x}{SNAPSHOT_INDEX}"


def neighbour(sequence: str, step: int) -> str:
    """The sequence `step` places after another one; before it if negative."""
    return f"{int(sequence, 16) + step:024x}"


def resumes_alone(data: str) -> bool:
    """Whether the server can resume after this token with its `_data` alone.

    It cannot always do so after an event of a document: the types of the numbers in its key are in the token's
    `_typeBits`, and without them the server does not find an event whose `_id` is int64 2**40, double 0.5 or decimal
    1.5 (errors 280, 50810, 50825 …). It can do so after a high-water mark, which has no event, and after an invalidate,
    which has no document.
    """
    try:
        version, offset = _number(data, 18)
        if version == 0:
            return False
        kind, _at = _number(data, offset)
        _number_, offset = _index(data)
    except ValueError:
        return True
    return kind == 0 or data[offset : offset + 2] == _TRUE


def behind(data: str) -> str:
    """The beginning of a token just after an event's cluster time; a high-water mark is returned as it is.

    When a stream reports that nothing follows an event, all events of its cluster time have been sent: those of a
    transaction become visible at once. A high-water mark may precede events of its own time.
    """
    try:
        is_event, token_position = _has_identifier(data), position(data)
    except ValueError:
        return data
    if not is_event:
        return data
    # The beginning of a token sorts before every token of that time. It is never sent to a server.
    # No carry is needed: a second never has 2**32 operations.
    return f"82{token_position.seconds:08X}{token_position.increment + 1:08X}"


def is_invalidate(data: str) -> bool:
    """Whether this is the token of an invalidate event."""
    try:
        version, offset = _number(data, 18)
        _number_, offset = _index(data)
    except ValueError:
        return False
    return version > 0 and data[offset : offset + 2] == _TRUE


def without_fragment(data: str) -> str:
    """A token without the number of its fragment, which all fragments of a split event have in common.

    The number follows the event's identifier, a document, which ends with a zero byte. Fragments are about 16 MB each,
    so the number takes at most one byte. A high-water mark, or text that is not a token, is returned as it is.
    """
    try:
        if not _has_identifier(data):
            return data
    except ValueError:
        return data
    for length in (4, 6):
        if data[-length - 2 : -length] == "00" and _fragment(data[-length:]):
            return data[:-length] + "04"
    return data


def compare(this: str, other: str) -> int:
    """-1, 0 or 1 if one token is before, at or after the other. Fragments of one event are equal.

    Tokens of one format sort as text. A server writes another format after an upgrade, and MongoDB 6.0 also if large
    events are split. Tokens of different formats are compared by cluster time and by the operation inside it.
    """
    first, second = without_fragment(this), without_fragment(other)
    # Text order is right within one format, and between two formats at different cluster times, with which both begin.
    if first[: _VERSION.start] == second[: _VERSION.start] and first[_VERSION] != second[_VERSION]:
        with contextlib.suppress(ValueError):
            first_place, second_place = _place(first), _place(second)
            return (first_place > second_place) - (first_place < second_place)
    return (first > second) - (first < second)


def later(this: str, other: str) -> str:
    """The later of two tokens; `this` if they are equal."""
    return this if compare(this, other) >= 0 else other


def _place(data: str) -> tuple[bool, int]:
    """A token's place inside its cluster time; a high-water mark is before every event."""
    index, _at = _index(data)
    return _has_identifier(data), index


def _has_identifier(data: str) -> bool:
    _number_, offset = _index(data)
    if data[offset : offset + 2] in _BOOLEANS:
        offset += 2
    if data[offset : offset + 6] == _UUID:
        offset += 6 + 32
    elif data[offset : offset + 2] == _NULL:
        offset += 2
    return data[offset : offset + 2] == _DOCUMENT


def _index(data: str) -> tuple[int, int]:
    """The index of the operation inside its cluster time, and where the next value begins."""
    version, offset = _number(data, 18)
    if version > 0:
        _type, offset = _number(data, offset)
    index, offset = _number(data, offset)
    if index > _LARGEST_INDEX:
        raise _unreadable(data, "an index of more than 32 bits")
    return index, offset


def _number(data: str, at: int) -> tuple[int, int]:
    """The non-negative integer at `at`, and where the next value begins."""
    kind = int(data[at : at + 2] or "0", 16)
    if kind == _ZERO:
        return 0, at + 2
    end = at + 2 + 2 * (kind - _ONE_BYTE + 1)
    if not _ONE_BYTE <= kind <= _EIGHT_BYTES or end > len(data):
        raise _unreadable(data, f"no integer at digit {at}")
    return int(data[at + 2 : end], 16) >> 1, end


def _unreadable(data: str, reason: str) -> ValueError:
    return ValueError(f"not a resume token of MongoDB, its position cannot be read: {data[:40]!r}: {reason}")
