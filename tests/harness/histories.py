"""Histories of documents, drawn by Hypothesis, as the events that a capture would land of them, and what must come of it.

A history is one document's life: inserts, edits, replacements and deletes. What it must give is what plain Python says
that the document is at its end. `events` renders it as a capture mode does: whole documents, whole documents that were
looked up late, or descriptions of what changed, which are worked out here from the documents before and after, as a
server describes a pipeline's update.
"""

from __future__ import annotations

import copy
import datetime
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import bson
import hypothesis
from bson import Binary, Code, DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.codec_options import CodecOptions
from hypothesis import strategies as st

from cdc_core.extended_json import bson_to_json

Document = dict[str, Any]
CODEC: CodecOptions[Document] = CodecOptions(uuid_representation=bson.binary.UuidRepresentation.STANDARD)

NAMES = ("a", "b", "c", "A", "0", "", "x y", "d.e", "$f")
"""Few, so that histories meet in columns; `0` may be an index as well, `d.e` two names."""

_scalars = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**63), 2**63 - 1).map(Int64),
    st.floats(allow_nan=True, width=64),
    st.text(max_size=4),
    st.sampled_from(
        [
            None,
            True,
            False,
            "1",
            Int64(1),
            1.0,
            -0.0,
            Decimal128("1.50"),
            Decimal128("NaN"),
            Decimal128("1E+40"),
            ObjectId("65f0c0ffee0123456789abcd"),
            datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
            DatetimeMS(2**62),
            Timestamp(5, 1),
            uuid.UUID(int=7),
            Binary(b"\x00\xff", 0),
            Regex("a+", "i"),
            Code("f()"),
            MinKey(),
            MaxKey(),
        ]
    ),
)
_names = st.sampled_from(NAMES)
VALUES = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)),
    max_leaves=5,
)
DOCUMENTS = st.dictionaries(_names, VALUES, max_size=4)


class What(Enum):
    """One step of a document's life."""

    SET = "set"
    UNSET = "unset"
    PUSH = "push"
    TRUNCATE = "truncate"
    REPLACE = "replace"
    DELETE = "delete"


@dataclass(frozen=True)
class Step:
    """A step as it is drawn: it finds its place in whatever document there is; `path` holds numbers that choose."""

    what: What
    path: tuple[int, ...]
    name: str
    value: Any
    document: Document


_whats = st.sampled_from([What.SET] * 4 + [What.UNSET, What.PUSH, What.TRUNCATE, What.REPLACE] + [What.DELETE] * 3)
_paths = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def steps(draw: st.DrawFn, before: Document | None) -> Step:
    """Any step of a document that is as it was `before`, with what it takes: drawing is most of what a history costs."""
    what = draw(_whats)
    if before is None or what is What.REPLACE:
        return Step(what, (), "", None, draw(DOCUMENTS))
    return Step(what, draw(_paths), draw(_names), draw(VALUES) if what in (What.SET, What.PUSH) else None, {})


@dataclass(frozen=True)
class History:
    """`versions` are the documents one after the other, None where there is none; the first is what was there before.

    `snapshot` is the number of the version that a snapshot reads, and `late` how many batches after the stream's event of
    that version its row lands, None where no snapshot reads it; `cuts` say after which versions a batch ends;
    `again` are versions whose events come once more in the last batch; `behind` by how many versions a look-up is late.
    """

    versions: tuple[Document | None, ...]
    snapshot: int | None
    late: int
    cuts: tuple[int, ...]
    again: tuple[int, ...]
    behind: int

    @property
    def end(self) -> Document | None:
        """What the document is in the end."""
        return self.versions[-1]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Any history; what a snapshot does not hold is in the stream from its beginning."""
    is_snapshotted = draw(st.booleans())
    versions: list[Document | None] = [draw(DOCUMENTS) if is_snapshotted else None]
    for _ in range(draw(st.integers(0 if is_snapshotted else 1, 7))):
        versions.append(_stepped(versions[-1], draw(steps(versions[-1]))))
    if draw(st.sampled_from([False, False, False, True])):
        versions.append(None)
    last = len(versions) - 1
    numbers = st.integers(0, last)
    return History(
        tuple(versions),
        draw(numbers) if is_snapshotted else None,
        draw(st.integers(0, 2)),
        tuple(sorted(draw(st.lists(numbers, min_size=BATCHES - 1, max_size=BATCHES - 1)))),
        tuple(draw(st.lists(numbers, max_size=2))),
        draw(st.integers(0, 3)),
    )


BATCHES = 3


def drawn(count: int, *, seed: int = 0) -> list[History]:
    """So many histories, the same ones for the same seed."""
    found: list[History] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(histories())
    def collect(history: History) -> None:
        found.append(history)

    collect()
    return found


# --- what happens to a document ---------------------------------------------------------------------------------------


def _stepped(document: Document | None, step: Step) -> Document | None:
    if document is None or step.what is What.REPLACE:
        return step.document
    if step.what is What.DELETE:
        return None
    changed = copy.deepcopy(document)
    container = _container(changed, step.path)
    match step.what, container:
        case What.UNSET, dict() if container:
            del container[_chosen(container, step)]
        case What.SET, list() if container:
            container[len(step.name) % len(container)] = step.value
        case What.PUSH, list():
            container.append(step.value)
        case What.TRUNCATE, list() if container:
            container.pop()
        case _, dict():
            container[step.name] = [step.value] if step.what is What.PUSH else step.value
        case _:
            pass
    return changed


def _container(value: Any, path: Sequence[int]) -> Any:
    """The document or array that the numbers lead to."""
    found = value
    for number in path:
        inner = list(found.values()) if isinstance(found, dict) else found
        if not inner or not isinstance(inner[number % len(inner)], dict | list):
            break
        found = inner[number % len(inner)]
    return found


def _chosen(container: Mapping[str, Any], step: Step) -> str:
    return list(container)[len(step.path) % len(container)]


# --- as events --------------------------------------------------------------------------------------------------------


class Mode(Enum):
    """What an update's event holds."""

    WHOLE = "the document after it"
    LOOKED_UP = "a document that was looked up, perhaps later"
    DESCRIBED = "what changed"


@dataclass(frozen=True)
class Placed:
    """An event's row, and the batch in which it lands."""

    batch: int
    event: Mapping[str, Any]


def events(history: History, *, key: Any, mode: Mode, has_pre_images: bool, first: int) -> Iterator[Placed]:
    """The events of a history, by batch; version n happens at second `first` + n."""
    for number, (before, after) in enumerate(zip(history.versions, history.versions[1:]), 1):
        event = _event(history, number, before, after, mode)
        if event is None:
            continue
        if has_pre_images and before is not None:
            event["before"] = before
        event = {name: text(value, key) if name in ("before", "after") else value for name, value in event.items()}
        event |= {"key": key, "at": first + number}
        batch = _batch(history, number)
        yield Placed(batch, event)
        if number in history.again:
            yield Placed(BATCHES - 1, event)
    if history.snapshot is not None and (document := history.versions[history.snapshot]) is not None:
        at = _batch(history, history.snapshot)
        row = {"op": "r", "key": key, "at": first + history.snapshot, "after": text(document, key)}
        yield Placed(min(BATCHES - 1, at + history.late), row)


def _batch(history: History, number: int) -> int:
    return sum(cut < number for cut in history.cuts)


def _event(
    history: History, number: int, before: Document | None, after: Document | None, mode: Mode
) -> dict[str, Any] | None:
    if after is None:
        return None if before is None else {"op": "d"}
    if before is None:
        return {"op": "c", "after": after}
    if mode is Mode.WHOLE:
        return {"op": "u", "after": after}
    description = described(before, after)
    if mode is Mode.LOOKED_UP:
        found = history.versions[min(number + history.behind, len(history.versions) - 1)]
        return {"op": "u", **description, **({} if found is None else {"after": found})}
    return {"op": "u", **description}


def described(before: Document, after: Document) -> dict[str, Any]:
    """What a server says of an update from one document to another."""
    change = _Change({}, [], [], {})
    change.documents(before, after, ())
    return {
        "update": bson_to_json.encode(_bytes(change.updated)).text.decode(),
        "removed": change.removed,
        "truncated": change.truncated,
        "disambiguated": change.paths,
    }


@dataclass
class _Change:
    updated: dict[str, Any]
    removed: list[str]
    truncated: list[dict[str, Any]]
    paths: dict[str, list[str | int]]

    def documents(self, before: Document, after: Document, path: tuple[str | int, ...]) -> None:
        for name in before.keys() - after.keys():
            self.removed.append(self._named((*path, name)))
        for name, value in after.items():
            if name not in before:
                self.updated[self._named((*path, name))] = value
            else:
                self._values(before[name], value, (*path, name))

    def _arrays(self, before: list[Any], after: list[Any], path: tuple[str | int, ...]) -> None:
        if len(after) < len(before):
            self.truncated.append({"field": self._named(path), "size": len(after)})
        for number, value in enumerate(after):
            if number < len(before):
                self._values(before[number], value, (*path, number))
            else:
                self.updated[self._named((*path, number))] = value

    def _values(self, before: Any, after: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(before, dict) and isinstance(after, dict) and after:
            self.documents(before, after, path)
        elif isinstance(before, list) and isinstance(after, list) and after:
            self._arrays(before, after, path)
        elif _bytes({"": before}) != _bytes({"": after}):
            self.updated[self._named(path)] = after

    def _named(self, path: tuple[str | int, ...]) -> str:
        named = ".".join(map(str, path))
        if any(isinstance(part, int) or "." in part or part.isdigit() for part in path):
            self.paths[named] = list(path)
        return named


def _bytes(document: Document) -> bytes:
    return bson.encode(document, codec_options=CODEC)


def raw(document: Document, key: Any) -> bytes:
    """The document with its `_id`, as BSON."""
    return _bytes({"_id": key, **document})


def text(document: Document, key: Any) -> str:
    """The same as bronze holds it."""
    return bson_to_json.encode(raw(document, key)).text.decode()
