"""Events above 16 MB that the server sent in fragments (`$changeStreamSplitLargeEvent`), joined again.

Each fragment holds some of the event's top-level fields, its own resume token, and `splitEvent` with its number and
their count. The token of the last fragment is the event's.

Source: MongoDB manual, "Large Change Stream Events"; Debezium `cursor.oversize.handling.mode=split`.
"""

from __future__ import annotations

from bson import decode

from cdc_core.extended_json import raw_bson
from cdc_core.stream import resume_token

_NAME = b"splitEvent"


class MissingFragment(ValueError):
    """Fragments came out of order; the stream must be reopened after the last whole event."""


class Fragments:
    """Collects the fragments of one event."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return bool(self._parts)

    def whole(self, raw: bytes) -> bytes | None:
        """The event if `raw` is one or completes one; None while fragments are missing.

        After a stream is reopened, an event that came in fragments may come in one piece: its document is looked up
        again and may be smaller. Raises `MissingFragment` if a fragment is missing.
        """
        split = _split(raw)
        if split is None:
            if self._parts and _event(raw) != _event(self._parts[0]):
                raise MissingFragment("a fragment of a large event is missing")
            self._parts = []
            return raw
        number, count = split
        if number == 1:
            self._parts = []  # a reopened stream sends the event from its beginning
        if number != len(self._parts) + 1:
            raise MissingFragment(f"fragment {number} of {count} came after {len(self._parts)}")
        self._parts.append(raw)
        if number < count:
            return None
        parts, self._parts = self._parts, []
        return _joined(parts)


def is_unfinished(raw: bytes) -> bool:
    """Whether an event is a fragment that others follow; a stream cannot resume from its token."""
    split = _split(raw)
    return split is not None and split[0] < split[1]


def _split(raw: bytes) -> tuple[int, int] | None:
    # A search in the bytes is enough for nearly all events. The word may also be in a document, so the element decides.
    if _NAME not in raw:
        return None
    for element in raw_bson.elements(raw):
        if element.name == _NAME and element.kind == 0x03:
            split = decode(raw[element.start : element.end])
            return split["fragment"], split["of"]
    return None


def _event(raw: bytes) -> str:
    """The token of an event, or of the event that a fragment belongs to."""
    token = raw_bson.find(raw, b"_id")
    return resume_token.without_fragment(decode(raw[token.start : token.end])["_data"])


def _joined(parts: list[bytes]) -> bytes:
    """One document with all fields of the fragments and the last one's token; the first fragment with a field wins."""
    elements: dict[bytes, bytes] = {}
    for raw in parts:
        for element in raw_bson.elements(raw):
            if element.name in (_NAME, b"_id"):
                continue
            # Bytes are copied, so the joined event is as exact as its fragments.
            elements.setdefault(element.name, _element(raw, element))
    token = raw_bson.find(parts[-1], b"_id")
    body = _element(parts[-1], token) + b"".join(elements.values())
    return (len(body) + 5).to_bytes(4, "little") + body + b"\0"


def _element(raw: bytes, element: raw_bson.Element) -> bytes:
    return bytes((element.kind,)) + element.name + b"\0" + raw[element.start : element.end]
