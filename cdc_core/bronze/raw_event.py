"""One change-stream document as it came from the server: decoded, with its documents as bronze's texts.

If decoding was exact, the texts are made from the decoded values, which is faster, otherwise from the bytes. The full
document stays bytes if possible, because many documents of a collection are encoded at once (`batch_encoder`).
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from bson import decode
from bson.errors import InvalidBSON, InvalidStringData
from bson.objectid import ObjectId

from cdc_core import errors
from cdc_core.extended_json import bson_to_json, raw_bson, wrappers
from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.stream import cursor_pipeline
from cdc_core.stream import fields as field_filters

_EXACT = raw_bson.CODEC_OPTIONS


def filtered(text: bytes, *, fields: field_filters.FieldRules, name_conflicts: set[str]) -> bytes:
    """A document's text after `field.exclude.list` and `field.renames`.

    `name_conflicts` receives new names that the document already had: there the field keeps its old name.
    """
    # Applied to the text, because the decoded document may not be exact.
    document, conflicts = field_filters.document(_parsed(text), fields=fields)
    name_conflicts.update(conflicts)
    return _text(document)


class _AgainName(str):
    """A repeated field name: equal to the first one as text, but another key in a dict."""

    __slots__ = ()
    __hash__ = object.__hash__


def _with_all_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        document[_AgainName(name) if name in document else name] = value
    return document


def _parsed(text: bytes) -> dict[str, Any]:
    """A document's text as a dict that keeps repeated fields."""
    document: dict[str, Any] = orjson.loads(text)
    # orjson silently keeps only the last of repeated fields.
    is_complete = orjson.dumps(document) == text
    return document if is_complete else json.loads(text, object_pairs_hook=_with_all_fields)


def _text(document: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError:  # a repeated name, which orjson refuses
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def filtered_update(row: Mapping[str, Any], *, fields: field_filters.FieldRules, name_conflicts: set[str]) -> dict[str, Any]:
    """The same for an `updateDescription`."""
    update, conflicts = field_filters.update(
        field_filters.UpdateDescription(
            updated=_by_names(row["updatedFields"] or b"{}"),
            removed=tuple(row["removedFields"] or ()),
            truncated=tuple((entry["field"], entry["size"]) for entry in row["truncatedArrays"] or ()),
            disambiguated=None if row["disambiguatedPaths"] is None else _by_names(row["disambiguatedPaths"]),
        ),
        fields=fields,
    )
    name_conflicts.update(conflicts)
    return {
        "updatedFields": None if row["updatedFields"] is None else _text_of_names(update.updated),
        "removedFields": list(update.removed) or None,
        "truncatedArrays": [{"field": path, "size": size} for path, size in update.truncated] or None,
        "disambiguatedPaths": None if update.disambiguated is None else _text_of_names(update.disambiguated),
    }


def filtered_key(text: bytes, *, fields: field_filters.FieldRules, name_conflicts: set[str]) -> bytes:
    """The same for a `documentKey`, whose names are paths: of the shard key `{"a.b": 1}` it has a field `a.b`. Its `_id` stays, as in the
    connector's key."""
    names = _by_names(text)
    shard_key = {name: value for name, value in names.items() if name != "_id"}
    update, conflicts = field_filters.update(field_filters.UpdateDescription(updated=shard_key), fields=fields)
    name_conflicts.update(conflicts)
    kept = {name: names[name] for name in names if name == "_id" or name in update.updated}
    return _text_of_names({**kept, **update.updated})


def key_document(text: bytes) -> bytes:
    """What a `documentKey` tells of its document: a field `a` for the path `a.b`."""
    document: dict[str, Any] = {}
    for path, value in _by_names(text).items():
        *above, name = map(wrappers.escape_key, path.split("."))
        inner: Any = None if above[:1] == ["_id"] else document  # of the `_id` the key has all
        for step in above:
            inner = inner.setdefault(step, {}) if debezium_json.is_document(inner) else None
        if debezium_json.is_document(inner):
            inner[name] = value
    return _text(document)


def _by_names(text: bytes) -> dict[str, Any]:
    """A document whose names are paths, with unescaped names."""
    return {wrappers.unescape_key(path): value for path, value in _parsed(text).items()}


def _text_of_names(document: Mapping[str, Any]) -> bytes:
    return _text({wrappers.escape_key(path): value for path, value in document.items()})


def check_unchanged(event: Mapping[str, Any], raw: bytes) -> None:
    """Raise `SettingsError` if a stage of `cursor.pipeline` removed or changed what an event needs."""
    # The decoded event is checked first, which is cheap; only differences are confirmed on the bytes.
    differing = cursor_pipeline.changed(event)
    if not differing:
        return
    current, copy = raw_bson.fields(raw), raw_bson.fields(part(raw, (cursor_pipeline.GUARD.encode(),)))
    names = [name for name in differing if current.get(name) != copy.get(name)]
    if names:
        raise errors.SettingsError(
            errors.Problem(
                "source.cursor.pipeline",
                f"its stages remove or change {', '.join(names)} of an event ({copy['operationType'][1][4:-1].decode()}), "
                "which is needed to store it. The event was not captured, and the position is before it",
                "do not change these fields",
            )
        )


def check_types(event: Mapping[str, Any]) -> None:
    """Raise `SettingsError` if a stage of `cursor.pipeline` gave a field a type that no server writes there."""
    if names := cursor_pipeline.retyped(event):
        raise errors.SettingsError(
            errors.Problem(
                "source.cursor.pipeline",
                f"its stages give {', '.join(names)} of an event ({event['operationType']}) another type than the server does. "
                "Nothing of the event was captured, and the position did not move past it",
                "leave the types of these fields as they are, or remove the fields ($unset)",
            )
        )


def update_description(description: Mapping[str, Any], text: EventText) -> dict[str, Any]:
    updated_fields = description.get("updatedFields")
    paths = description.get("disambiguatedPaths")
    return {
        "updatedFields": None if updated_fields is None else text.of(updated_fields, b"updateDescription", b"updatedFields"),
        "removedFields": description.get("removedFields") or None,
        "truncatedArrays": [
            {"field": entry["field"], "size": entry["newSize"]} for entry in description.get("truncatedArrays") or ()
        ]
        or None,
        "disambiguatedPaths": None if paths is None else text.of(paths, b"updateDescription", b"disambiguatedPaths"),
    }


NAME_BYTES = 100
"""The memory of a path besides its text."""


def description_bytes(row: Mapping[str, Any]) -> int:
    """The approximate size of a row's `updateDescription`; paths may be as long as the values."""
    paths = [*(row["removedFields"] or ()), *(entry["field"] for entry in row["truncatedArrays"] or ())]
    texts = len(row["updatedFields"] or b"") + len(row["disambiguatedPaths"] or b"")
    return texts + sum(map(len, paths)) + NAME_BYTES * len(paths)


def key(document_key: Mapping[str, Any], raw: bytes, *, is_exact: bool) -> str:
    """The key of an event's document, from the bytes if decoding was not exact."""
    return (
        canonical_keys.canonical(document_key["_id"])
        if is_exact
        else canonical_keys.canonical_raw(part(raw, (b"documentKey",)))
    )


def original(raw: bytes, *, fields: field_filters.FieldRules | None) -> bytes:
    """The payload with the bytes of an event or a document with repaired text.

    The bytes are left out (`{"bson": null}`) if fields are excluded or renamed, because they have every field under its
    old name.
    """
    return orjson.dumps({"bson": None if fields is not None else base64.b64encode(raw).decode()})


def lsid(event: Mapping[str, Any], proven: bytes | None) -> str | None:
    lsid = event.get("lsid")
    return None if lsid is None else _strict(bson_to_json.dumps_value(lsid, proven=proven))


@functools.lru_cache(maxsize=10_000)
def _strict(text: bytes) -> str:
    """`source.lsid` in Debezium's JSON."""
    return debezium_json.render(orjson.loads(text), debezium_json.Dialect.STRICT)


_SAME_IN_KEY = (ObjectId, str, int)
"""Types of `_id` whose canonical key equals their Extended JSON."""


def document_key_text(document_key: Mapping[str, Any], key: str) -> bytes | None:
    """The text of a document key that is only an `_id` of a common type, made from the key; None for others."""
    # Saves encoding the same value twice for nearly all events. `type`, because a boolean is an `int` too.
    if len(document_key) == 1 and type(document_key["_id"]) in _SAME_IN_KEY:
        return f'{{"_id":{key}}}'.encode()
    return None


class EventText:
    """The Extended JSON of an event's documents, from the decoded ones if decoding was exact."""

    __slots__ = ("_is_exact", "_raw", "lossy")

    def __init__(self, raw: bytes, is_exact: bool) -> None:
        self._raw = raw
        self._is_exact = is_exact
        self.lossy = 0

    def of(self, document: Mapping[str, Any], *path: bytes) -> bytes:
        # The usual case: the driver's decoder with orjson is far faster than walking the bytes.
        if self._is_exact:
            return bson_to_json.dumps_value(document, proven=self._raw)
        encoded = bson_to_json.encode(part(self._raw, path))
        self.lossy += encoded.lossy
        return encoded.text


class FullDocument(NamedTuple):
    """The place of the full document in the event's bytes, and the rules for its fields."""

    event: bytes
    start: int
    end: int
    fields: field_filters.FieldRules | None = None

    @property
    def raw(self) -> bytes:
        return self.event[self.start : self.end]


class Envelope(NamedTuple):
    """A decoded event, the bytes it was decoded from, whether decoding was exact, and the full document if it was left out."""

    event: dict[str, Any]
    raw: bytes
    is_exact: bool
    document: FullDocument | None = None


# The order in which servers write an event. It is matched from the first byte, so user data cannot be mistaken for it.
_before_document = re.compile(
    rb".{4}(?:\x03_id\0.{4}\x02_data\0.{4}[0-9A-F]+\0\0|\x02operationType\0.{4}(?:insert|update|replace)\0"
    rb"|\x11clusterTime\0.{8}|\x05collectionUUID\0\x10\0\0\0\x04.{16}|\x09wallTime\0.{8}|\x12txnNumber\0.{8}"
    rb"|\x03lsid\0.{4}\x05id\0\x10\0\0\0\x04.{16}\x05uid\0\x20\0\0\0\0.{32}\0)*(\x03fullDocument\0)",
    re.DOTALL,
).match


def envelope(raw: bytes, *, is_used: Callable[[Mapping[str, Any]], bool]) -> Envelope:
    """The event, without its full document if that can stay bytes; it is decoded if `is_used` says so of the event."""
    match = _before_document(raw)
    if match is not None:
        element_start, start = match.start(1), match.end()
        end = start + int.from_bytes(raw[start : start + 4], "little")
        without_document = (len(raw) - (end - element_start)).to_bytes(4, "little") + raw[4:element_start] + raw[end:]
        event, is_exact = decoded(without_document) if end < len(raw) else ({}, False)
        if is_exact and not is_used(event):
            return Envelope(event, without_document, True, FullDocument(raw, start, end))
    event, is_exact = decoded(raw)
    return Envelope(event, raw, is_exact)


def decoded(raw: bytes) -> tuple[dict[str, Any], bool]:
    """The event, and whether decoding was exact. What the driver refuses to decode is read from the bytes."""
    try:
        event = decode(raw, _EXACT)
        return event, bson_to_json.is_exact(event, raw)
    except (InvalidBSON, InvalidStringData, ValueError):
        pass
    # The driver refuses invalid UTF-8. Raised here it would stop the stream of all collections.
    document = raw_bson.decoded(0x03, raw)
    if not isinstance(document, dict):
        raise ValueError("a change event with repeated fields")
    return document, False


def part(raw: bytes, path: Sequence[bytes]) -> bytes:
    """The raw bytes of an embedded document."""
    part = raw
    for name in path:
        part = raw_bson.fields(part)[name.decode()][1]
    return bytes(part)
