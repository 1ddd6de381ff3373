"""Events above 16 MB that the server sent in fragments (`$changeStreamSplitLargeEvent`), put together again.

Each fragment holds some of the event's top-level fields whole, its own resume token, and `splitEvent` with its number
and how many there are. The token of the last fragment is the event's.

Source: MongoDB manual, "Large Change Stream Events"; Debezium `cursor.oversize.handling.mode=split`.
"""

from __future__ import annotations

from bson import decode

from cdc_core.extended_json import raw_bson
from cdc_core.stream import resume_token

_NAME = b"splitEvent"


class MissingFragment(ValueError):
    """Fragments did not come in order: the stream must be opened again behind the last whole event."""


class Fragments:
    """The fragments of the one event that is being received."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return bool(self._parts)

    def whole(self, raw: bytes) -> bytes | None:
        """The event, when `raw` is one or completes one; None while fragments are missing.

        An event whose fragments came may come again in one piece: its document is looked up anew where a stream is opened
        again, and may be smaller by then. Raises `MissingFragment` where a fragment was left out.
        """
        split = _split(raw)
        if split is None:
            if self._parts and _event(raw) != _event(self._parts[0]):
                raise MissingFragment("a fragment of a large event is missing")
            self._parts = []
            return raw
        number, count = split
        if number == 1:
            self._parts = []  # a stream that was opened again gives the event from its beginning
        if number != len(self._parts) + 1:
            raise MissingFragment(f"fragment {number} of {count} came after {len(self._parts)}")
        self._parts.append(raw)
        if number < count:
            return None
        parts, self._parts = self._parts, []
        return _joined(parts)


def is_unfinished(raw: bytes) -> bool:
    """Whether an event is a fragment that others follow: its token is no place to go on from."""
    split = _split(raw)
    return split is not None and split[0] < split[1]


def _split(raw: bytes) -> tuple[int, int] | None:
    # A search in the bytes, for nearly all events the only one; a document may hold the word, so that the element decides.
    if _NAME not in raw:
        return None
    for element in raw_bson.elements(raw):
        if element.name == _NAME and element.kind == 0x03:
            found = decode(raw[element.start : element.end])
            return found["fragment"], found["of"]
    return None


def _event(raw: bytes) -> str:
    """The token of an event, or of the event that a fragment belongs to."""
    token = raw_bson.find(raw, b"_id")
    return resume_token.without_fragment(decode(raw[token.start : token.end])["_data"])


def _joined(parts: list[bytes]) -> bytes:
    """One document of all fields: the first that has a field gives it, but the token is the last one's."""
    found: dict[bytes, bytes] = {}
    for raw in parts:
        for element in raw_bson.elements(raw):
            if element.name in (_NAME, b"_id"):
                continue
            # Copied as bytes: the joined event is as exact as its fragments.
            found.setdefault(element.name, _element(raw, element))
    token = raw_bson.find(parts[-1], b"_id")
    body = _element(parts[-1], token) + b"".join(found.values())
    return (len(body) + 5).to_bytes(4, "little") + body + b"\0"


def _element(raw: bytes, element: raw_bson.Element) -> bytes:
    return bytes((element.kind,)) + element.name + b"\0" + raw[element.start : element.end]
