"""A Debezium change event, in any of its usual forms.

    {"key": {"id": "1"}, "value": {"op": "c", "after": "…", "source": {…}}}     a record, schemas disabled
    {"key": {"schema": …, "payload": …}, "value": {"schema": …, "payload": …}}  a record, schemas enabled
    {"schema": …, "payload": {"op": …}}                                         a value, schemas enabled
    {"op": "c", "after": "…", "source": {…}}                                    a value
    {"key": "<JSON text>", "value": "<JSON text>"}                              a record with Kafka's bytes as text

A schema's name decides what a value is, as in the SMT (`….Key`, `….Envelope`). Without a schema a value is an envelope if
it has an `op` and one of the fields of a change. Everything else (heartbeats, transaction metadata, notifications, other
messages) is not a change event, and `read` returns None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from cdc_core.extended_json import dialects as debezium_json

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_ENVELOPE_FIELDS = frozenset({"after", "before", "updateDescription", "source", "patch", "filter"})
_RECORD_FIELDS = frozenset({"key", "value"})


@dataclass(frozen=True)
class ChangeEvent:
    """The key (`None` if the event came without one) and the envelope, which a tombstone does not have."""

    key: Json
    envelope: Mapping[str, Json] | None

    @property
    def collection(self) -> str:
        """`db.collection` of `source`; empty if missing."""
        source = self.part("source")
        names = (source.get("db"), source.get("collection"))
        return ".".join(name for name in names if isinstance(name, str))

    def part(self, name: str) -> Mapping[str, Json]:
        """A struct of the envelope; empty if it is null or absent."""
        value = (self.envelope or {}).get(name)
        return value if isinstance(value, dict) else {}


def read(event: Json) -> ChangeEvent | None:
    """The change event in a decoded JSON value; None if it is something else."""
    key, value = _key_and_value(event)
    key_name, key = _without_schema(key)
    value_name, value = _without_schema(value)
    if key_name is not None and not key_name.endswith(".Key"):
        return None
    if value is None:
        return ChangeEvent(key, None) if key_name is not None or key is None or _is_key(key) else None
    if value_name is not None and not value_name.endswith(".Envelope"):
        return None
    return ChangeEvent(key, value) if _is_envelope(value) else None


def _key_and_value(event: Json) -> tuple[Json, Json]:
    if isinstance(event, dict) and not _RECORD_FIELDS.isdisjoint(event) and "op" not in event:
        return event.get("key"), event.get("value")
    return None, event


def _without_schema(part: Json) -> tuple[str | None, Json]:
    """The name of the schema ("" if it has none, None without a schema), and the payload."""
    decoded = _decoded(part)
    if isinstance(decoded, dict) and set(decoded) == {"schema", "payload"}:
        schema = decoded["schema"]
        if isinstance(schema, dict) and schema:  # an empty one says nothing
            return str(schema.get("name") or ""), decoded["payload"]
        return (None, decoded["payload"])
    return None, decoded


def _decoded(part: Json) -> Json:
    if not isinstance(part, str):
        return part
    try:
        value: Json = json.loads(part)
    except ValueError:
        return part
    return debezium_json.without_surrogates(value) if "\\u" in part else value


def _is_key(key: Json) -> bool:
    return isinstance(key, dict) and set(key) == {"id"}


def _is_envelope(value: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(value, dict) and "op" in value and not _ENVELOPE_FIELDS.isdisjoint(value)
