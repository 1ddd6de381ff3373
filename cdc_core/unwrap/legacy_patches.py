"""The `patch` of Debezium 1.x's events, which it read from the oplog, as fields of a record.

`updateDescription` becomes fields of a record in `new_document_state`, and of a table's row in `cdc_core.silver.fold`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

from cdc_core.extended_json.dialects import EjsonValue
from cdc_core.unwrap import record_fields


class NoId(enum.Enum):
    """An event without an `_id`."""

    NO_ID = enum.auto()


NO_ID: Final = NoId.NO_ID


def identified(document: record_fields.Document, identity: EjsonValue | NoId) -> record_fields.Document:
    return document if "_id" in document or identity is NO_ID else {**document, "_id": identity}


def patched(patch: record_fields.Document, identity: EjsonValue | NoId) -> record_fields.Document:
    """The document of a legacy event: the fields of `$set`, those of `$unset` as nulls, or a replacement as it is."""
    operators = {name: value for name, value in patch.items() if name in _PATCH_OPERATORS}
    fields = {name: value for name, value in patch.items() if name not in _PATCH_OPERATORS and name != "$v"}
    unknown_operators = [name for name in fields if name.startswith("$") and not name.startswith("$$")]
    if unknown_operators:
        raise ValueError(f"a patch with {unknown_operators[0]} says nothing about the fields")
    for name, value in operators.items():
        fields.update(_diff_fields(value, "") if name == "diff" else _patch_fields(name, value))
    return identified(fields, identity)


_PATCH_OPERATORS = ("$set", "$unset", "diff")


def _patch_fields(operator: str, fields: EjsonValue) -> Iterator[tuple[str, EjsonValue]]:
    for name, value in fields.items() if isinstance(fields, dict) else ():
        yield name, value if operator == "$set" else None


def _diff_fields(diff: EjsonValue, prefix: str) -> Iterator[tuple[str, EjsonValue]]:
    """The fields of an oplog entry of version 2: `u`, `i` and `d` contain fields, `s<name>` a diff of a field.

    In the diff of an array (`"a": true`) `u<index>` and `s<index>` stand for elements.
    """
    if not isinstance(diff, dict):
        return
    is_array = diff.get("a") is True
    for name, value in diff.items():
        if name[:1] == "s" and len(name) > 1:
            yield from _diff_fields(value, f"{prefix}{name[1:]}.")
        elif is_array and name[:1] == "u":
            yield prefix + name[1:], value
        elif name in ("u", "i", "d") and isinstance(value, dict):
            for field_name, field_value in value.items():
                yield prefix + field_name, None if name == "d" else field_value
