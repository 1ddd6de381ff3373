"""The stages of `cursor.pipeline`, with guards so that they affect only events of documents.

A drop, a rename, `$out` and an invalidate change what a table must contain, whatever a user's stages say about
documents. They pass every stage unchanged, and no expression is evaluated over them. A `$match` lets them pass beside
its own condition. Before the first stage that transforms events, a copy of the event is added to it as the field
`GUARD`, and after the last stage other events are replaced by that copy.

For events of documents the copy holds the fields that are needed to store the event. After the stages `changed` returns
those that a stage removed or changed; `problems` finds such stages before the stream opens, as far as their text shows
it. The copy also holds the types of the event's documents: a stage that sets a field of a missing `fullDocument`
creates one (`made_up`). `retyped` returns fields with a type that no server writes there.

Source: MongoDB manual, "Modify Change Stream Output" (the stages that a change stream accepts).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128

from cdc_core.stream import resume_token

Stage = Mapping[str, Any]

GUARD = "medallionEvent"
"""The field that holds the copy of the event."""

PROTECTED = ("_id", "operationType", "clusterTime", "ns", "documentKey")
"""The fields that a change of a document needs for its row and its order."""

GIVEN = ("fullDocument", "fullDocumentBeforeChange", "updateDescription")
"""The content that a change of a document may have."""

DOCUMENTS = ("delete", "insert", "replace", "update")
"""The operation types of events about documents."""

_OF_EVENTS: Mapping[str, Any] = {
    **dict.fromkeys((*GIVEN, "lsid"), Mapping | None),
    "wallTime": datetime.datetime | DatetimeMS | None,
    "txnNumber": int | None,
}
"""The types of the other fields that are read from an event of a document, where present."""

_TRANSFORMING = frozenset({"$addFields", "$set", "$project", "$unset", "$replaceRoot", "$replaceWith", "$redact"})
_SPLIT = "$changeStreamSplitLargeEvent"
_TYPES = "types"


def guarded(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The stages with guards; `$match` stages alone need no additional stage."""
    guarded_stages: list[dict[str, Any]] = []
    is_copied = False
    for stage in stages:
        name, argument = next(iter(stage.items()))
        # Only before the first stage that changes events: a `$match` alone needs no copy.
        if name in _TRANSFORMING and not is_copied:
            guarded_stages.append(_copied())
            is_copied = True
        guarded_stages.append(_guarded(name, argument, is_copied=is_copied))
    return [*guarded_stages, _restored()] if is_copied else guarded_stages


def changed(event: Mapping[str, Any]) -> list[str]:
    """The protected fields of a document's event that differ from what the server sent; empty without a copy."""
    copy = event.get(GUARD)
    return [] if copy is None else [name for name in PROTECTED if name not in event or not _is_same(name, event, copy)]


def _is_same(name: str, event: Mapping[str, Any], copy: Mapping[str, Any]) -> bool:
    if event[name] == copy.get(name):
        return True
    # A large event is split behind all stages, and its fragments have tokens of their own.
    return name == "_id" and resume_token.compare(event[name]["_data"], copy.get(name, {}).get("_data", "")) == 0


def made_up(event: Mapping[str, Any]) -> list[str]:
    """The documents that a stage created in a document's event; empty without a copy.

    A delete has no document, nor has an update without a look-up. `{"$set": {"fullDocument.a": 1}}` creates one there,
    which would be taken for the whole document.
    """
    types = event.get(GUARD, {}).get(_TYPES, {})
    return [name for name in GIVEN if name in event and types.get(name, "object") != "object"]


def retyped(event: Mapping[str, Any]) -> list[str]:
    """The fields of a document's event to which a stage gave a type that no server writes there; empty without a copy."""
    if GUARD not in event:
        return []
    retyped_fields = [name for name, types in _OF_EVENTS.items() if not isinstance(event.get(name), types)]
    description = event.get("updateDescription")
    if isinstance(description, Mapping) and not _is_description(description):
        retyped_fields.append("updateDescription")
    return retyped_fields


def _is_description(description: Mapping[str, Any]) -> bool:
    removed_fields, truncated_arrays = description.get("removedFields") or [], description.get("truncatedArrays") or []
    return (
        all(isinstance(description.get(name), Mapping | None) for name in ("updatedFields", "disambiguatedPaths"))
        and isinstance(removed_fields, list)
        and all(isinstance(path, str) for path in removed_fields)
        and isinstance(truncated_arrays, list)
        and all(
            isinstance(entry, Mapping) and isinstance(entry.get("field"), str) and isinstance(entry.get("newSize"), int)
            for entry in truncated_arrays
        )
    )


def leaves_out_fields(stage: Stage) -> bool:
    """Whether a stage visibly removes fields of documents, which a snapshot would then read again."""
    name, argument = next(iter(stage.items()))
    if name in ("$addFields", "$set"):
        return isinstance(argument, Mapping) and any(
            _covers(path, field) and value == "$$REMOVE" for path, value in _leaves(argument) for field in GIVEN
        )
    return any(_takes(name, argument, field) for field in GIVEN)


def problems(stages: Sequence[Stage], *, needs_description: bool = False) -> list[str]:
    """What is wrong with the stages, as far as their text shows it; `needs_description` protects `updateDescription` too."""
    protected = (*PROTECTED, "updateDescription") if needs_description else PROTECTED
    return [problem for stage in stages for problem in _problems(stage, protected)]


def _problems(stage: Stage, protected: Sequence[str]) -> Iterator[str]:
    name, argument = next(iter(stage.items()))
    if name == _SPLIT:
        yield f"{_SPLIT} is set with cursor.oversize.handling.mode: split"
    elif name != "$match" and name not in _TRANSFORMING:
        yield f"{name} is no stage that a change stream takes"
    if (expected := _wanted(name, argument)) is not None:
        yield f"{name} expects {expected}"
        return
    for field in protected:
        if _takes(name, argument, field):
            yield f"{name} takes {field} away from the events or changes it; without it an event has no place in a table"


def _wanted(name: str, argument: Any) -> str | None:
    """What the stage expects where its argument is something else that no server takes; None otherwise."""
    if name == "$unset":
        paths = argument if isinstance(argument, list) else [argument]
        return None if all(isinstance(path, str) for path in paths) else "a field or a list of fields"
    has_fields = name in ("$match", "$addFields", "$set", "$project", "$replaceRoot")
    return "a document" if has_fields and not isinstance(argument, Mapping) else None


def _takes(name: str, argument: Any, field: str) -> bool:
    """Whether a stage visibly removes or changes a field."""
    match name:
        case "$unset":
            return any(_covers(path, field) for path in ([argument] if isinstance(argument, str) else argument))
        case "$addFields" | "$set" if isinstance(argument, Mapping):
            return any(_covers(path, field) and value != f"${field}" for path, value in _leaves(argument))
        case "$project" if isinstance(argument, Mapping):
            return _is_projected_away(argument, field)
        case "$replaceRoot" if isinstance(argument, Mapping):
            return _is_replaced(argument.get("newRoot"), field)
        case "$replaceWith":
            return _is_replaced(argument, field)
        case _:
            return False


def _is_projected_away(projection: Mapping[str, Any], field: str) -> bool:
    leaves = list(_leaves(projection))
    if any(_covers(path, field) and _is_flag(value) and not _is_set(value) for path, value in leaves):
        return True
    if any(_covers(path, field) and not _is_flag(value) and value != f"${field}" for path, value in leaves):
        return True
    return field != "_id" and _is_inclusion(projection) and not any(_covers(path, field) for path, _ in leaves)


def _is_replaced(replacement: Any, field: str) -> bool:
    if isinstance(replacement, str):
        return replacement not in ("$$ROOT", "$$CURRENT")
    if not isinstance(replacement, Mapping):
        return True
    if not _is_expression(replacement):
        return field != "_id" and replacement.get(field) != f"${field}" and not isinstance(replacement.get(field), Mapping)
    objects = replacement.get("$mergeObjects")
    if isinstance(objects, Sequence) and not isinstance(objects, str):
        overrides = [
            fields for fields in objects if isinstance(fields, Mapping) and not _is_expression(fields) and field in fields
        ]
        return any(fields[field] != f"${field}" for fields in overrides)
    return False


def _covers(path: str, field: str) -> bool:
    return path == field or path.startswith(f"{field}.")


def _leaves(projection: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted paths of a projection, each with its value: a flag, a literal or an expression."""
    for name, value in projection.items():
        if isinstance(value, Mapping) and value and not _is_expression(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_expression(value: Mapping[str, Any]) -> bool:
    return next(iter(value), "").startswith("$")


def _is_flag(value: Any) -> bool:
    return isinstance(value, (Number, Decimal128))


def _is_set(value: Any) -> bool:
    return bool(value.to_decimal() if isinstance(value, Decimal128) else value)


def _is_inclusion(projection: Mapping[str, Any]) -> bool:
    """Whether a projection names the fields to keep, and not those to remove."""
    flags = [value for path, value in _leaves(projection) if path != "_id"]
    return any(not _is_flag(value) or _is_set(value) for value in flags or projection.values())


# --- the guards ---


def _copied() -> dict[str, Any]:
    types = {name: {"$type": f"${name}"} for name in GIVEN}
    copy = {_TYPES: types, **{name: f"${name}" for name in PROTECTED}}
    return {"$addFields": {GUARD: {"$cond": [{"$in": ["$operationType", list(DOCUMENTS)]}, copy, "$$ROOT"]}}}


_IS_DOCUMENTS = {"$in": [f"$$ROOT.{GUARD}.operationType", list(DOCUMENTS)]}


def _restored() -> dict[str, Any]:
    # The token is restored, because the server ends a stream whose pipeline changes an event's `_id`.
    with_token = {"$mergeObjects": ["$$ROOT", {"_id": f"${GUARD}._id"}]}
    return {"$replaceWith": {"$cond": [_IS_DOCUMENTS, with_token, f"${GUARD}"]}}


def _guarded(name: str, argument: Any, *, is_copied: bool) -> dict[str, Any]:
    match name:
        case "$match":
            field = f"{GUARD}.operationType" if is_copied else "operationType"
            return {name: {"$or": [{field: {"$nin": list(DOCUMENTS)}}, _condition(argument, field)]}}
        case "$addFields" | "$set":
            return {name: _computed(argument)}
        case "$project":
            return {name: {**_computed(argument), **({GUARD: 1} if _is_inclusion(argument) else {})}}
        case "$replaceRoot":
            return _replaced(argument["newRoot"] if isinstance(argument, Mapping) and "newRoot" in argument else argument)
        case "$replaceWith":
            return _replaced(argument)
        case "$redact":
            is_kept = {"$or": [{"$not": [_IS_DOCUMENTS]}, {"$eq": ["$$CURRENT", f"$$ROOT.{GUARD}"]}]}
            return {name: {"$cond": [is_kept, "$$KEEP", argument]}}
        case _:
            return {name: argument}


def _replaced(replacement: Any) -> dict[str, Any]:
    with_copy = {"$mergeObjects": [replacement, {GUARD: f"${GUARD}"}]}
    return {"$replaceWith": {"$cond": [_IS_DOCUMENTS, with_copy, "$$ROOT"]}}


def _condition(expression: Any, field: str) -> Any:
    """A condition whose expressions are only evaluated over events of documents."""
    if not isinstance(expression, Mapping):
        return expression
    condition: dict[str, Any] = {}
    for name, value in expression.items():
        if name in ("$and", "$or", "$nor") and isinstance(value, list):
            condition[name] = [_condition(part, field) for part in value]
        elif name == "$expr":
            condition[name] = {"$cond": [{"$in": [f"${field}", list(DOCUMENTS)]}, value, True]}
        else:
            condition[name] = value
    return condition


def _computed(projection: Any) -> Any:
    """A projection whose expressions are only evaluated over events of documents."""
    if not isinstance(projection, Mapping):
        return projection
    if projection and _is_expression(projection):
        return {"$cond": [_IS_DOCUMENTS, projection, None]}
    return {name: _computed(value) if isinstance(value, Mapping) else _element(value) for name, value in projection.items()}


def _element(value: Any) -> Any:
    return {"$cond": [_IS_DOCUMENTS, value, None]} if isinstance(value, list) else value
