"""Fields that are removed from events (`field.exclude.list`) or renamed in them (`field.renames`).

An entry is `database.collection.path`, or `database.collection.path:name`. `*` stands for any characters in the names
of the database and the collection, and for any one field as a step of the path. Only field names are case-sensitive. A
dot that is part of a name is written with a backslash before it. Paths lead through arrays, also nested ones, without
an index. Exclusions come first, then the renames one after the other, each applied to the result of the one before.

Documents are parsed type-exact Extended JSON: typed values are not documents, and escaped names match unescaped. Update
descriptions have the plain names. Neither is modified in place. Of keys, only those of deletes are changed, because they
may become rows. Intended differences from Debezium: a truncated array above or below an excluded field is no error;
`$unset` of a document is kept if only a field of it is excluded; a rename onto an existing name keeps the field as it is
and reports it, instead of ending the capture.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from cdc_core.extended_json import wrappers
from cdc_core.properties import types as values

Path = tuple[str, ...]
Document = Mapping[str, Any]

ANY = "*"
"""A step that stands for any one field."""


@dataclass(frozen=True)
class Rename:
    """The field at `path` gets the name `name`."""

    path: Path
    name: str


@dataclass(frozen=True)
class FieldRules:
    """The exclusions and renames of one collection."""

    excluded: tuple[Path, ...] = ()
    renamed: tuple[Rename, ...] = ()


@dataclass(frozen=True)
class UpdateDescription:
    """A change event's `updateDescription`.

    `truncated` are (path, new size) pairs. `disambiguated` has, by path, its steps: array indexes as numbers, names as
    strings; None if the server sent none.
    """

    updated: Document = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    truncated: tuple[tuple[str, int], ...] = ()
    disambiguated: Mapping[str, Sequence[str | int]] | None = None


@dataclass(frozen=True)
class _FieldRule:
    namespace: re.Pattern[str]
    path: Path
    name: str | None = None


@dataclass(frozen=True)
class FieldFilter:
    """The entries of both lists."""

    entries: tuple[_FieldRule, ...] = ()

    def of(self, db: str, collection: str) -> FieldRules | None:
        """The rules of one collection; None if there are none."""
        matches = [entry for entry in self.entries if entry.namespace.fullmatch(f"{db}.{collection}")]
        if not matches:
            return None
        return FieldRules(
            tuple(entry.path for entry in matches if entry.name is None),
            tuple(Rename(entry.path, entry.name) for entry in matches if entry.name is not None),
        )


def read(exclude: Sequence[str], renames: Sequence[str]) -> FieldFilter:
    """The entries of `field.exclude.list` and `field.renames`; raises `values.InvalidValue` if one is malformed."""
    return FieldFilter((*map(_exclusion, exclude), *map(_rename, renames)))


def document(before: Document, *, fields: FieldRules) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The document with fields excluded and renamed, and the new names that were already taken."""
    result = _excluded(before, fields.excluded)
    conflicts: list[str] = []
    for rename in fields.renamed:
        result = _renamed(result, rename.path, rename.name, conflicts)
    return result, tuple(conflicts)


def update(before: UpdateDescription, *, fields: FieldRules) -> tuple[UpdateDescription, tuple[str, ...]]:
    """The same for an update description: in its keys and values, and its removed and truncated paths.

    An update in which nothing remains is still an update.
    """
    result = _excluded_update(before, fields.excluded)
    conflicts: list[str] = []
    beginnings = _beginnings(result) if fields.renamed else None
    for rename in fields.renamed:
        # None: a path may match whatever it begins with.
        if beginnings is None or rename.path[0] == ANY or rename.path[0] in beginnings:
            result = _renamed_update(result, rename, conflicts)
            beginnings = _beginnings(result)
    return result, tuple(conflicts)


def _exclusion(entry: str) -> _FieldRule:
    return _entry(entry, "database.collection.field")


def _rename(entry: str) -> _FieldRule:
    path, colon, name = entry.rpartition(":")
    if not colon or not name.strip() or "." in name:
        raise values.InvalidValue(f"database.collection.field:name is expected, found {entry}")
    return replace(_entry(path, "database.collection.field:name"), name=name.strip())


def _entry(entry: str, expected: str) -> _FieldRule:
    steps = [_ESCAPED_DOT.sub(".", step) for step in _DOT.split(entry.strip())]
    if len(steps) < 3 or not all(steps):
        raise values.InvalidValue(f"{expected} is expected, found {entry}")
    # In these two names `*` stands for any characters, in a field's path for one whole field, as in Debezium.
    namespace = r"\.".join(".*".join(map(re.escape, step.split("*"))) for step in steps[:2])
    return _FieldRule(re.compile(namespace, re.IGNORECASE | re.DOTALL), tuple(steps[2:]))


def _is_meant(step: str, key: str) -> bool:
    """Whether a step of a path matches the field with this key."""
    return step in (ANY, wrappers.unescape_key(key) if key[:1] == "$" else key)


def _is_document(node: Any) -> TypeGuard[Document]:
    return isinstance(node, Mapping) and not wrappers.is_wrapper(node)


def _excluded(node: Any, paths: Sequence[Path]) -> Any:
    if not paths or not isinstance(node, Mapping | list):
        return node
    return _without(node, _by_name(tuple(paths)))


@functools.lru_cache(maxsize=1000)
def _by_name(paths: tuple[Path, ...]) -> Mapping[str, Sequence[Path]]:
    """The rests of the paths by their first step."""
    paths_by_name: dict[str, list[Path]] = {}
    for path in paths:
        paths_by_name.setdefault(path[0], []).append(path[1:])
    return paths_by_name


def _without(node: Any, paths_by_name: Mapping[str, Sequence[Path]]) -> Any:
    """The node without excluded fields; the paths are grouped once for all elements of an array."""
    if isinstance(node, list):
        return [_without(element, paths_by_name) for element in node]
    if not _is_document(node):
        return node
    remaining = {}
    has_any = ANY in paths_by_name
    for name, value in node.items():
        # A fast exit, as most fields are not excluded. A repeated name is of a class with a hash of its own.
        if not has_any and name not in paths_by_name and type(name) is str and name[:1] != "$":
            remaining[name] = value
            continue
        rests = [*paths_by_name.get(ANY, ()), *paths_by_name.get(str(wrappers.unescape_key(name)), ())]
        if not rests:
            remaining[name] = value
        elif () not in rests:
            remaining[name] = _excluded(value, rests)
    return remaining


def _renamed(node: Any, path: Path, name: str, conflicts: list[str]) -> Any:
    if isinstance(node, list):
        return [_renamed(element, path, name, conflicts) for element in node]
    if not _is_document(node):
        return node
    # A fast exit, as most renames concern other fields. An escaped name has one more `$`.
    if path[0] != ANY and path[0] not in node and f"${path[0]}" not in node:
        return node
    if len(path) > 1:
        return {
            key: _renamed(value, path[1:], name, conflicts) if _is_meant(path[0], key) else value
            for key, value in node.items()
        }
    # `*` may match several fields, which cannot share the new name.
    new_name = wrappers.escape_key(name)
    old_names = [key for key in node if _is_meant(path[0], key) and key != new_name]
    if not old_names:
        return dict(node)
    # Overwriting would lose one of two values.
    if new_name in node or len(old_names) > 1:
        conflicts.append(name)
        return dict(node)
    return {**{key: value for key, value in node.items() if key != old_names[0]}, new_name: node[old_names[0]]}


def _excluded_update(before: UpdateDescription, paths: Sequence[Path]) -> UpdateDescription:
    # MongoDB 6.0 does not say which dots of a key divide. A name with dots is left out there also where it may be a path: otherwise its
    # value would be captured. Below the key, in a value, names are certain.
    dotted = [
        (".".join(path[:end]).split("."), path[end:])
        for path in (paths if before.disambiguated is None else ())
        for end, step in enumerate(path, 1)
        if "." in step
    ]
    by_beginning: dict[str, list[Path]] = {}
    for path in paths:
        by_beginning.setdefault(path[0], []).append(path)
    rests = {}
    for key in _keys(before):
        steps = _steps(key, before)
        # Most paths begin with another name than the key.
        is_plain = type(steps[0]) is str
        candidates = [*by_beginning.get(ANY, ()), *by_beginning.get(str(steps[0]), ())] if is_plain else paths
        rests[key] = _rests(steps, candidates)
        rests[key] += [rest for begin, tail in dotted for rest in _rests(steps, [(*begin, *tail)]) if len(rest) <= len(tail)]
    remaining = {key for key in rests if () not in rests[key]}
    return UpdateDescription(
        updated={key: _excluded(value, rests[key]) for key, value in before.updated.items() if key in remaining},
        removed=tuple(key for key in before.removed if key in remaining),
        truncated=tuple((key, size) for key, size in before.truncated if key in remaining),
        disambiguated=_disambiguated(before, {key: (key, None) for key in remaining}),
    )


def _renamed_update(before: UpdateDescription, rename: Rename, conflicts: list[str]) -> UpdateDescription:
    key_steps = {key: _steps(key, before) for key in _keys(before)}
    new_steps = {key: _renamed_steps(steps, rename) for key, steps in key_steps.items()}
    new_keys = {key: key if steps is None else ".".join(map(str, steps)) for key, steps in new_steps.items()}
    counts = Counter(new_keys.values())
    for key, name in new_keys.items():
        if name != key and (name in new_keys or counts[name] > 1):
            conflicts.append(name)
            new_keys[key] = key
    in_place = {
        key: _renamed_below(value, key_steps[key], rename, conflicts)
        for key, value in before.updated.items()
        if new_keys[key] == key
    }
    moved = {new_keys[key]: value for key, value in before.updated.items() if new_keys[key] != key}
    return UpdateDescription(
        updated={**in_place, **moved},
        removed=tuple(new_keys[key] for key in before.removed),
        truncated=tuple((new_keys[key], size) for key, size in before.truncated),
        disambiguated=_disambiguated(
            before, {key: (name, None if name == key else new_steps[key]) for key, name in new_keys.items()}
        ),
    )


def _beginnings(update: UpdateDescription) -> set[str] | None:
    """The steps with which a path must begin to match a key, or something in its value; None if any may."""
    return None if update.disambiguated else {key.partition(".")[0] for key in _keys(update)}


def _disambiguated(
    before: UpdateDescription, keys: Mapping[str, tuple[str, Sequence[str | int] | None]]
) -> Mapping[str, Sequence[str | int]] | None:
    """The steps of the remaining keys, under their new names."""
    if before.disambiguated is None:
        return None
    remaining = ((keys[key], steps) for key, steps in before.disambiguated.items() if key in keys)
    return {name: new_steps or steps for (name, new_steps), steps in remaining}


def _renamed_below(value: Any, steps: Sequence[str | int], rename: Rename, conflicts: list[str]) -> Any:
    for rest in _rests(steps, [rename.path]):
        if rest:
            return _renamed(value, rest, rename.name, conflicts)
    return value


def _keys(before: UpdateDescription) -> dict[str, None]:
    truncated = (key for key, _ in before.truncated)
    return dict.fromkeys((*before.updated, *before.removed, *truncated, *(before.disambiguated or ())))


class _NameOrIndex(str):
    """A step that may be a name or an index: the server does not say which."""


def _steps(key: str, before: UpdateDescription) -> Sequence[str | int]:
    """The steps of a key.

    They are as the server states them if names contain dots or are numeric. Otherwise dots divide, and numbers are
    indexes.
    """
    disambiguated = before.disambiguated
    steps = None if disambiguated is None else disambiguated.get(key)
    if steps and isinstance(steps, list | tuple):  # a stage of cursor.pipeline may have replaced it
        return steps
    number: Callable[[str], str | int] = _NameOrIndex if disambiguated is None else int
    first, *others = key.split(".")
    return [first, *(number(step) if _INDEX.fullmatch(step) else step for step in others)]


def _rests(steps: Sequence[str | int], paths: Sequence[Path]) -> list[Path]:
    """The rest of each path below a dotted key; ``()`` if the path matches the key or a beginning of it."""
    return [rest for path in paths if _may_match(path, steps) for rest, _ in _walks(path, steps)]


def _may_match(path: Path, steps: Sequence[str | int]) -> bool:
    """A fast filter: a key begins with a name, and most paths begin with another one."""
    return type(steps[0]) is not str or path[0] in (ANY, steps[0])


def _walks(path: Path, steps: Sequence[str | int]) -> Iterator[tuple[Path, int]]:
    """Every match of the path along the key, as (rest of the path, index of the key's last matched step).

    An index may be skipped.
    """
    # (steps of the path, steps of the key) matched so far. `seen` keeps this polynomial: a name may have thousands of parts.
    pending, seen = [(0, 0)], set[tuple[int, int]]()
    while pending:
        path_index, key_index = state = pending.pop()
        if state in seen:
            continue
        seen.add(state)
        if path_index == len(path) or key_index == len(steps):
            yield path[path_index:], key_index - 1
            continue
        step = steps[key_index]
        # A path does not name indexes: it continues in every element.
        if isinstance(step, int | _NameOrIndex):
            pending.append((path_index, key_index + 1))
        if isinstance(step, str) and path[path_index] in (ANY, step):
            pending.append((path_index + 1, key_index + 1))


def _renamed_steps(steps: Sequence[str | int], rename: Rename) -> list[str | int] | None:
    """The steps of the key with the renamed step; None if the path does not end in the key."""
    for rest, index in _walks(rename.path, steps) if _may_match(rename.path, steps) else ():
        if not rest:
            return [*steps[:index], rename.name, *steps[index + 1 :]]
    return None


_INDEX = re.compile("0|[1-9][0-9]{0,9}")
"""An array index. More digits cannot be one, and Python refuses to parse thousands."""
_DOT = re.compile(r"(?<!\\)\.")
_ESCAPED_DOT = re.compile(r"\\\.")
