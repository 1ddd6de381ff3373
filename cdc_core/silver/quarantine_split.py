"""`quarantine.split` for events of this process, without a query: the same rules, and the same events and facts.

The rules are explained in `cdc_core.silver.quarantine`.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze
from cdc_core.silver import fold, reduce
from cdc_core.silver.quarantine import IDENTITY, Reason
from cdc_core.typed import exact

SCHEMA = bronze.SCHEMA.append(pa.field("reason", pa.string())).append(pa.field("to", pa.int64()))
"""The columns of a quarantine."""


class LocalSplit(NamedTuple):
    """`events` are what silver applies, in order of `sequence` and `offset`, and `facts` the quarantine's new rows."""

    events: pa.Table
    facts: pa.Table


def split(
    events: pa.Table, *, waiting: pa.Table, stored: Callable[[Collection[str]], Mapping[str, str]], to: int
) -> LocalSplit | None:
    """The events of a range that ends with batch `to`, split; None if each can be read and nothing waits.

    `events` have the columns `bronze.SCHEMA`, and `waiting`, the held events of their documents, also `reason`. `stored` returns for keys the
    sequence up to which the document's row has everything, if it has one.
    """
    all_events = pa.concat_tables([events, waiting.select(bronze.SCHEMA.names)]).combine_chunks()
    reasons: list[str | None] = [*_reasons(events)]
    has_bad_before = [is_unreadable(text.as_py()) for text in all_events["before"]]
    if not waiting.num_rows and not any(reasons) and not any(has_bad_before):
        return None
    # What only followed another event can be read: whether it waits is decided anew.
    reasons += [None if reason == Reason.FOLLOWS else reason for reason in waiting["reason"].to_pylist()]
    columns = (all_events[name].to_pylist() for name in ("key", "sequence", "offset"))
    identities = zip(*(all_events[name].to_pylist() for name in IDENTITY))
    is_old = itertools.chain(itertools.repeat(False, events.num_rows), itertools.repeat(True))
    judged = [*map(_Event._make, zip(identities, *columns, reduce.are_partial(all_events).to_pylist(), reasons, is_old))]
    concerned_keys = {event.key for event in judged if event.key is not None and (event.is_old or event.reason is not None)}
    placed = _placed(judged, stored(concerned_keys) if concerned_keys else {})
    placed.facts.extend(
        (number, Reason.UNREADABLE_BEFORE)
        for number in placed.applied
        if has_bad_before[number] and not judged[number].is_old
    )
    before = pc.if_else(pa.array(has_bad_before, pa.bool_()), None, all_events["before"])
    applied = _with(all_events, before=before).take(_numbers(placed.applied))
    given = pa.concat_tables([applied, _marks(all_events.take(_numbers(placed.marks)))]).combine_chunks()
    order = pc.sort_indices(given, [("sequence", "ascending"), ("offset", "ascending")])
    return LocalSplit(given.take(order), _facts(all_events, placed.facts, to))


def with_holes(events: pa.Table) -> pa.Table | None:
    """`quarantine.readable`, with holes, for events of this process; None if each can be read."""
    reasons = [*_reasons(events)]
    has_bad_before = [is_unreadable(text.as_py()) for text in events["before"]]
    if not any(reasons) and not any(has_bad_before):
        return None
    is_hole = pa.array([reason is not None for reason in reasons], pa.bool_())
    lacks_before = pc.or_(is_hole, pa.array(has_bad_before, pa.bool_()))
    columns = {name: pc.if_else(is_hole, None, events[name]) for name in ("after", "updateDescription")}
    columns |= {"before": pc.if_else(lacks_before, None, events["before"]), "op": pc.if_else(is_hole, "u", events["op"])}
    return _with(events, **columns).filter(pa.array([_has_place(reason) for reason in reasons], pa.bool_()))


def _reasons(events: pa.Table) -> Iterator[Reason | None]:
    """For each event why it cannot be read."""
    for batch in events.select(_JUDGED).to_batches(max_chunksize=_ROWS):
        yield from map(reason, batch.to_pylist())


_JUDGED = ("key", "sequence", "op", "after", "updateDescription")
_ROWS = 1000
"""How many events are Python objects at a time."""


def _marks(events: pa.Table) -> pa.Table:
    """An update of which nothing is known just before each of these events."""
    nulls = {
        name: pa.nulls(events.num_rows, events.schema.field(name).type) for name in ("before", "after", "updateDescription")
    }
    op = pa.array([bronze.Op.UPDATE.value] * events.num_rows, pa.string())
    return _with(events, **nulls, op=op, sequence=pa.array(map(_just_before, events["sequence"].to_pylist()), pa.string()))


def _facts(events: pa.Table, facts: Sequence[tuple[int, str]], to: int) -> pa.Table:
    columns = [pa.array([str(reason) for _, reason in facts], pa.string()), pa.array([to] * len(facts), pa.int64())]
    return pa.table([*events.take(_numbers([number for number, _ in facts])).columns, *columns], schema=SCHEMA)


def _with(events: pa.Table, **columns: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The events with other values in these columns."""
    for name, column in columns.items():
        events = events.set_column(events.column_names.index(name), name, column)
    return events


def _numbers(numbers: Sequence[int]) -> pa.Array:
    return pa.array(numbers, pa.int64())


def _just_before(sequence: str) -> str:
    """A text that sorts after every smaller sequence, and before this one."""
    time, index = sequence[:16], int(sequence[16:24], 16)
    return f"{time}{index - 1:08x}~" if index else time


# What can be read


def reason(event: Mapping[str, Any]) -> Reason | None:
    """Why an event, given by bronze's columns, cannot be read; None if it can."""
    op, after, update = event["op"], event["after"], event["updateDescription"]
    if event["key"] is None:
        return Reason.NO_KEY
    if event["sequence"] is None or not _SEQUENCE.fullmatch(event["sequence"]):
        return Reason.NO_SEQUENCE
    if op not in _OPS:
        return Reason.UNKNOWN_OPERATION
    if op == bronze.Op.DELETE:
        return None
    if after is not None:
        return Reason.UNREADABLE_AFTER if is_unreadable(after) else None
    if op != bronze.Op.UPDATE:
        return Reason.NO_DOCUMENT
    if update is None:
        return None
    if is_unreadable(update["updatedFields"], by=fold.is_document):
        return Reason.UNREADABLE_UPDATE
    return Reason.UNREADABLE_PATHS if is_unreadable(update["disambiguatedPaths"], by=fold.is_document) else None


_SEQUENCE = re.compile(bronze.SEQUENCE)
_OPS = frozenset(each.value for each in bronze.Op)


def is_unreadable(text: str | None, *, by: Callable[[str], bool] = exact.is_document) -> bool:
    """Whether the text is present and is not one JSON document."""
    return text is not None and not by(text)


# What happens to each event


class _Event(NamedTuple):
    """An event as the rules see it. `is_old`: it waited, and was not delivered now."""

    identity: tuple[str | None, ...]
    key: str | None
    sequence: str | None
    offset: int
    is_partial: bool
    reason: str | None
    is_old: bool

    @property
    def is_whole(self) -> bool:
        return self.reason is None and not self.is_partial


def _has_place(reason: str | None) -> bool:
    """Whether an event belongs to a document, and has a place in its history."""
    return reason not in (Reason.NO_KEY, Reason.NO_SEQUENCE)


class _Placement(NamedTuple):
    """Indexes into the events: those that are applied, those before which a document is marked, and those with new facts."""

    applied: list[int]
    marks: list[int]
    facts: list[tuple[int, str]]


def _placed(events: Sequence[_Event], stored: Mapping[str, str]) -> _Placement:
    has_come = {event.identity for event in events if not event.is_old}
    mended: dict[tuple[str | None, ...], int] = {}
    for event in events:
        if event.reason is None and not event.is_old:
            mended[event.identity] = max(event.offset, mended.get(event.identity, 0))
    documents: defaultdict[str | None, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        # A rebuild finds an event and its replay in one range: then the unreadable one holds nothing back.
        is_mended = event.reason is not None and event.offset < mended.get(event.identity, 0)
        if not is_mended and not (event.is_old and event.identity in has_come):
            documents[event.key].append(number)
    placed, was_held = _Placement([], [], []), {event.identity for event in events if event.is_old}
    for key, numbers in documents.items():
        numbers.sort(key=lambda number: (events[number].sequence or "", events[number].offset))
        _place(events, numbers, "" if key is None else stored.get(key, ""), was_held, placed)
    return placed


def _place(
    events: Sequence[_Event],
    numbers: Sequence[int],
    stored: str,
    was_held: Collection[tuple[str | None, ...]],
    placed: _Placement,
) -> None:
    """Place the events of one document, which are in order."""
    last = max((stored, *(events[number].sequence or "" for number in numbers if events[number].is_whole)))
    hole = whole = ""
    awaited = []
    for number in numbers:
        event, sequence = events[number], events[number].sequence or ""
        if event.is_whole:
            whole = max(whole, sequence)
        elif event.reason is not None and _has_place(event.reason):
            hole = max(hole, sequence)
        follows = event.is_partial and hole > max(whole, stored if stored < sequence else "")
        if event.reason is None and not follows:
            placed.applied.append(number)
            if event.identity in was_held:
                placed.facts.append((number, Reason.REPLAYED))
            continue
        if not event.is_old:
            placed.facts.append((number, event.reason or Reason.FOLLOWS))
        if _has_place(event.reason) and last > sequence:
            placed.facts.append((number, Reason.SUPERSEDED))
        elif _has_place(event.reason):
            awaited.append(number)
    if awaited and not all(events[number].is_old for number in numbers):
        first = events[awaited[0]].sequence
        placed.marks.extend(number for number in awaited if events[number].sequence == first)
