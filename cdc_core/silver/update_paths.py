"""The paths of an update, resolved against a document.

The server joins names with dots, but a name may contain dots itself:

* `disambiguatedPaths` (MongoDB 6.1 with `showExpandedEvents`) decides if present; a path that it does not list has no dotted
  names;
* otherwise a numeric component is an index in an array and a name in a document. If a *name with dots* could be part of the path,
  the path is undecided: nothing is applied, and the document is incomplete;
* a path that leads through a scalar: the base is probably newer than this update, and nothing is applied. The path stays undecided
  until a later update of the same history explains it, because a new field with dots in its name looks the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from cdc_core.extended_json import wrappers

Document: TypeAlias = dict[str, Any]
Container: TypeAlias = dict[str, Any] | list[Any]

PADDING_LIMIT = 1_500_000
"""How far past its end the server extends an array; a greater index is not an index."""
MANY_PATHS = 4096
"""The number of cached paths: updates name the same ones again and again."""
MANY_NAMES = 64
"""Names of updates with more paths are not cached: those of four thousand large updates would fill the memory."""
MAX_COMPONENTS = 200
"""A path with more components has a dotted name, because MongoDB allows only 180 levels."""

_INDEX = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z", re.ASCII)


class UndecidedPath(NamedTuple):
    """A path that is not applied. `blocked`: where the plain path ends; None if only a whole document can decide."""

    path: str
    blocked: str | None


class Target(NamedTuple):
    """A field of a document (container and stored name) or an element of an array (container and index)."""

    container: Any
    step: Any


class PathNames(NamedTuple):
    """An update's paths: undotted ones, each with the stored name, and dotted ones."""

    whole: tuple[tuple[str, str], ...]
    dotted: tuple[str, ...]
    gone: tuple[str, ...]
    dotted_gone: tuple[str, ...]


def path_names(fields: tuple[str, ...], removed: tuple[str, ...]) -> PathNames:
    """The paths that an update sets and removes, split into undotted and dotted ones."""
    are_few = len(fields) + len(removed) <= MANY_NAMES
    return (_path_names if are_few else _path_names.__wrapped__)(fields, removed)


@functools.lru_cache(maxsize=MANY_PATHS)
def _path_names(fields: tuple[str, ...], removed: tuple[str, ...]) -> PathNames:
    return PathNames(
        tuple((path, stored_name(path)) for path in fields if "." not in path),
        tuple(path for path in fields if "." in path),
        tuple(stored_name(path) for path in removed if "." not in path),
        tuple(path for path in removed if "." in path),
    )


class PathParts(NamedTuple):
    """What follows from the text of a dotted path alone; `stored` names and `indexes` have one entry per component.

    `above` are the paths of its parents; `dotted` the stored names that two or more components can form, by their first
    component.
    """

    components: tuple[str, ...]
    stored: tuple[str, ...]
    indexes: tuple[int | None, ...]
    above: frozenset[str]
    dotted: tuple[tuple[str, ...], ...]


@functools.lru_cache(maxsize=MANY_PATHS)
def _split(path: str) -> PathParts:
    return path_parts(tuple(path.split(".")))


@functools.lru_cache(maxsize=MANY_PATHS)
def path_parts(components: tuple[str, ...]) -> PathParts:
    """The `PathParts` of these components."""
    ends = range(1, len(components) + 1)
    return PathParts(
        components,
        tuple(map(stored_name, components)),
        tuple(int(name) if _INDEX.match(name) else None for name in components),
        frozenset(".".join(components[:end]) for end in ends[:-1]),
        tuple(
            tuple(stored_name(".".join(components[start:end])) for end in ends[start + 1 :])
            for start in range(len(components) - 1)
        ),
    )


def target(
    document: Document,
    path: str,
    others: AbstractSet[str],
    named: Mapping[str, Sequence[str | int]] | None,
    *,
    is_set: bool,
    dots: NamesWithDots,
) -> Target | UndecidedPath | None:
    """Where a dotted path leads in the document; None if there is nothing to do.

    `others` are paths that the same update sets or removes: no path that it sets lies inside one of them. `named` is
    its `disambiguatedPaths`; `dots` is the same object for all of its paths.
    """
    if named is not None and path in named:
        parts = path_parts(tuple(str(part) for part in named[path]))
    elif path.count(".") >= MAX_COMPONENTS:
        return UndecidedPath(path, None)
    else:
        parts = _split(path)
    chain, is_dotted = containers(document, parts)
    length, end = len(parts.components), chain[-1]
    step = _step(end, parts, length - 1) if len(chain) == length else None
    if named is None:
        # A dotted name could be part of it: an existing one, or a new one beside others with dots.
        is_new = is_set and not (step is not None and _has(end, step))
        if is_dotted or not others.isdisjoint(parts.above) or (is_new and dots.are_in(chain[: length - 1])):
            return UndecidedPath(path, None)
    if step is not None:
        return Target(end, step)
    return UndecidedPath(path, ".".join(parts.components[: len(chain)])) if is_set and named is None else None


def containers(document: Container, parts: PathParts) -> tuple[list[Container], bool]:
    """The containers that the components lead through, fewer if the path ends early; and whether one of them has a dotted
    name that the path can mean.
    """
    container, is_dotted = document, False
    chain = [container]
    for depth, names in enumerate(parts.dotted):  # no calls in this loop: folding spends most of its time here
        child: Any
        if isinstance(container, dict):
            is_dotted = is_dotted or not container.keys().isdisjoint(names)
            child = container.get(parts.stored[depth])
        else:
            index = parts.indexes[depth]
            child = container[index] if index is not None and index < len(container) else None
        if not is_container(child):
            break
        container = child
        chain.append(container)
    return chain, is_dotted


class NamesWithDots:
    """Which documents have a name with dots, while nothing in them changes.

    Each is looked through once: an update may set a new field in each of a hundred thousand documents of one document.
    """

    def __init__(self) -> None:
        self._answers: dict[int, bool] = {}

    def are_in(self, documents: Sequence[Container]) -> bool:
        """Whether one of the documents has a name with dots."""
        return any(self._answer(document) for document in documents if isinstance(document, dict))

    def _answer(self, document: Document) -> bool:
        answer = self._answers.get(id(document))
        if answer is None:
            answer = self._answers[id(document)] = any("." in name for name in document)
        return answer


def is_container(value: object) -> TypeGuard[Container]:
    """Whether the value is a document or an array, not the wrapper of a scalar."""
    if isinstance(value, dict):
        return not wrappers.is_wrapper(value)
    return isinstance(value, list)


def _has(container: Container, step: Any) -> bool:
    """Whether the field or element exists."""
    return step in container if isinstance(container, dict) else step < len(container)


def _step(container: Container, parts: PathParts, depth: int) -> Any:
    """The stored name in a document, the index in an array; None if it is not a valid index."""
    if isinstance(container, dict):
        return parts.stored[depth]
    index = parts.indexes[depth]
    return index if index is not None and index <= len(container) + PADDING_LIMIT else None


def stored_name(name: str) -> str:
    """A field's name as stored in Extended JSON."""
    return wrappers.escape_key(name) if name[:1] == "$" else name
