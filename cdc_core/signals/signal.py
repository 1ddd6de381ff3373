"""Signals: requests to a running capture, in Debezium's format.

    {"id": "ad-hoc-1", "type": "execute-snapshot", "data": {"data-collections": ["shop.orders"], "type": "incremental"}}

In the source's signal collection the identifier is `_id`, and `data`, which may be called `payload`, is a document or
its JSON text. Source: Debezium "Sending signals", signal actions of the MongoDB connector.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson
from bson import json_util

from cdc_core import errors
from cdc_core.extended_json import query
from cdc_core.properties import types as values
from cdc_core.stream import patterns


class SignalType(StrEnum):
    """The action that a signal requests."""

    EXECUTE_SNAPSHOT = "execute-snapshot"
    STOP_SNAPSHOT = "stop-snapshot"
    PAUSE_SNAPSHOT = "pause-snapshot"
    RESUME_SNAPSHOT = "resume-snapshot"
    LOG = "log"


class SnapshotType(StrEnum):
    """Whether the stream continues during an ad hoc snapshot, or waits for its end."""

    INCREMENTAL = "incremental"
    BLOCKING = "blocking"


def snapshot_command(*names: str) -> str:
    """The shell command for a new snapshot of these collections and no others."""
    # A name with one dot is also a regular expression that matches no other name.
    arguments = (name if _UNAMBIGUOUS.fullmatch(name) else shlex.quote(_expression(name)) for name in names)
    return "medallion signal execute-snapshot" + "".join(f" --data-collections {argument}" for argument in arguments)


_UNAMBIGUOUS = re.compile(r"[\w-]+\.[\w-]+")


def _expression(name: str) -> str:
    # The option takes a comma-separated list.
    return patterns.literal(name).text.replace(",", r"\,")


class SignalRefused(ValueError):
    """An invalid signal; the message says what is wrong."""


@dataclass(frozen=True)
class AdditionalCondition:
    """An additional condition: the filter for the collections that a regular expression matches."""

    data_collection: str
    filter: str


@dataclass(frozen=True)
class Signal:
    """One signal as received: its identifier, its type as written, and its data."""

    id: str
    type: str
    data: Mapping[str, Any] = field(default_factory=dict)
    channel: str = "source"

    def payload(self, **more: object) -> dict[str, Any]:
        """The signal as the payload of a bronze row; without data, and with escaped text, if it cannot be written as JSON."""
        payload = {"id": self.id, "type": self.type, "data": dict(self.data), "channel": self.channel, **more}
        if _is_json(payload):
            return payload
        return {
            name: _plain(value) if isinstance(value, str) else value for name, value in payload.items() if name != "data"
        }


@dataclass(frozen=True)
class ReceivedSignal:
    """A signal, and its channel's mark for it."""

    signal: Signal
    mark: str


@dataclass(frozen=True)
class SignalRequest:
    """A validated signal; `collections` are regular expressions over ``database.collection``, none for all."""

    type: SignalType
    collections: tuple[str, ...] = ()
    snapshot_type: SnapshotType = SnapshotType.INCREMENTAL
    conditions: tuple[AdditionalCondition, ...] = ()
    message: str = ""

    def chosen(self, namespaces: Iterable[str]) -> tuple[str, ...]:
        """The selected namespaces, in their order. Raises `SignalRefused` if an expression takes too long."""
        if not self.collections:
            return tuple(namespaces)
        with _refusing():
            return tuple(filter(self._is_meant, namespaces))

    @functools.cached_property
    def _is_meant(self) -> Callable[[str], bool]:
        return patterns.any_of([_pattern(text) for text in self.collections])

    def without_match(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """The expressions, also of conditions, that match none of the `chosen` namespaces. Raises as `chosen`."""
        texts = dict.fromkeys((*self.collections, *(condition.data_collection for condition in self.conditions)))
        expressions = {_pattern(text): text for text in texts}
        with _refusing():
            return tuple(expressions[pattern] for pattern in patterns.without_match(expressions, chosen))

    def filters(self, namespaces: Iterable[str]) -> dict[str, str]:
        """The find filter of each namespace that has one; the first condition that matches it counts. Raises as `chosen`."""
        conditions: dict[patterns.Pattern, str] = {}
        for condition in self.conditions:
            conditions.setdefault(_pattern(condition.data_collection), condition.filter)
        filters: dict[str, str] = {}
        with _refusing():
            for pattern, names in patterns.matched([*conditions], namespaces):
                for name in names:
                    filters.setdefault(name, conditions[pattern])
        return filters


def from_document(document: object) -> Signal:
    """The signal in a document of the signal collection. Raises `SignalRefused`."""
    if document is None:
        raise SignalRefused("its document is missing: a stage of cursor.pipeline takes it away")
    if not isinstance(document, Mapping):
        raise SignalRefused("one of its fields stands in it more than once")
    if "_id" not in document:
        raise SignalRefused("a signal's identifier, _id, is missing")
    return _signal({**document, "id": document["_id"]}, "source")


def from_json(text: str, *, channel: str) -> Signal:
    """The signal in a line of a file, or in a message. Raises `SignalRefused`."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SignalRefused(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SignalRefused('a JSON object is expected, {"id": …, "type": …, "data": {…}}')
    return _signal(fields, channel)


def _signal(fields: Mapping[str, Any], channel: str) -> Signal:
    type_ = fields.get("type")
    if not isinstance(type_, str) or not type_:
        raise SignalRefused("a signal's type is missing")
    # Accepts both names, because signals that were written for the connector may have either.
    data = fields.get("payload") if fields.get("data") is None else fields["data"]
    if isinstance(data, str):
        try:
            data = json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError) as error:
            raise SignalRefused(f"its data is no JSON: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise SignalRefused("its data must be an object")
    identifier = fields.get("id")
    return Signal("" if identifier is None else str(identifier), type_, data, channel)


def request(signal: Signal) -> SignalRequest:
    """The validated request of a signal. Raises `SignalRefused` for what the connector would not do either."""
    # A bronze row records each executed signal, so one that it cannot hold is refused first.
    if "data" not in signal.payload():
        raise SignalRefused("its text is not Unicode, a number has more than 64 bits, or its data has too many levels")
    try:
        type_ = SignalType(signal.type)
    except ValueError:
        hint = values.did_you_mean(signal.type, [known_type.value for known_type in SignalType])
        raise SignalRefused(f"there is no signal of type {signal.type}{f', {hint}' if hint else ''}") from None
    # Its data is only a message for the log.
    if type_ is SignalType.LOG:
        if not (message := str(signal.data.get("message") or "")):
            raise SignalRefused("message is missing: what shall be logged?")
        return SignalRequest(type_, message=message)
    _check_names(signal.data)
    collections = _collections(signal.data, is_required=type_ is SignalType.EXECUTE_SNAPSHOT)
    snapshot_type = _snapshot_type(signal.data)
    if snapshot_type is SnapshotType.BLOCKING and type_ is not SignalType.EXECUTE_SNAPSHOT:
        raise SignalRefused("a blocking snapshot can be neither stopped nor paused")
    return SignalRequest(type_, collections, snapshot_type, _conditions(signal.data))


_FIELDS = ("data-collections", "type", "additional-conditions", "surrogate-key")


def _check_names(data: Mapping[str, Any]) -> None:
    """Raises `SignalRefused` for a name that is nearly a field's. A connector ignores other fields, but knew `additional-condition`
    for long, and a misspelt `data-collections` would stop all snapshots."""
    for name in (each for each, value in data.items() if value and each not in _FIELDS):
        if hint := values.did_you_mean(name, _FIELDS):
            raise SignalRefused(f"its data has no field {name}, {hint}")


def _collections(data: Mapping[str, Any], *, is_required: bool) -> tuple[str, ...]:
    expressions = data.get("data-collections") or []
    if isinstance(expressions, str):
        expressions = [expressions]
    if not isinstance(expressions, (list, tuple)) or not all(isinstance(text, str) and text for text in expressions):
        raise SignalRefused("data-collections must be a list of regular expressions over database.collection")
    if is_required and not expressions:
        raise SignalRefused("data-collections is missing: which collections shall be read?")
    for text in expressions:
        _pattern(text)
    return tuple(map(str, expressions))  # BSON's type of code is a text that cannot be hashed.


def _snapshot_type(data: Mapping[str, Any]) -> SnapshotType:
    text = str(data.get("type") or SnapshotType.INCREMENTAL.value)
    try:
        return SnapshotType(text.lower())
    except ValueError:
        raise SignalRefused(f"there is no snapshot of type {text}: incremental or blocking") from None


def _conditions(data: Mapping[str, Any]) -> tuple[AdditionalCondition, ...]:
    if data.get("surrogate-key"):
        raise SignalRefused("surrogate-key is not supported: documents are read in the order of _id")
    entries = data.get("additional-conditions") or []
    if isinstance(entries, Mapping):
        entries = [entries]
    if not isinstance(entries, (list, tuple)):
        raise SignalRefused("additional-conditions must be a list of objects")
    conditions = []
    for entry in entries:
        if not isinstance(entry, Mapping) or "data-collection" not in entry or "filter" not in entry:
            raise SignalRefused('additional-conditions must be objects {"data-collection": …, "filter": …}')
        text = _filter_text(entry["filter"])
        _check_filter(text)
        _pattern(str(entry["data-collection"]))
        conditions.append(AdditionalCondition(str(entry["data-collection"]), text))
    return tuple(conditions)


def _filter_text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json_util.dumps(value)
    except query.UNREADABLE as error:
        raise SignalRefused("its filter cannot be written as JSON") from error


def _check_filter(text: str) -> None:
    """Raises `SignalRefused` for a filter that cannot be read, or cannot be sent to a server."""
    try:
        is_object = isinstance(query.checked(text), dict)
    except ValueError as error:
        raise SignalRefused(f"its filter is {error}") from error
    if not is_object:
        raise SignalRefused("its filter must be an object, as find takes it")


def _pattern(text: str) -> patterns.Pattern:
    try:
        return patterns.regex(text.strip())
    except values.InvalidValue as error:
        raise SignalRefused(f"{text} is no regular expression that can be used here: {error.hint}") from error


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise `SignalRefused` for an expression of the block that takes too long."""
    try:
        yield
    except errors.SettingsError as error:
        raise SignalRefused(str(error)) from error


def _is_json(payload: Mapping[str, Any]) -> bool:
    """Whether a row can hold the payload, as `event_rows.EventRows.mark` writes it."""
    try:
        orjson.dumps(payload, default=str)
    except (TypeError, RecursionError):
        return False
    return True


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
