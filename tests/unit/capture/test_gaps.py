"""The gaps that a start records when the settings let in more events than before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.properties.source import Source
from cdc_core.snapshot import state as snapshot_state
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens
from pipelines.capture.gaps import Gaps, OtherStream, settings_metadata
from tests.harness.sources import source

WHOLE = source({})
SKIPPING = source({"skipped.operations": "d"})
NARROW = source({"skipped.operations": "d", "collection.include.list": "shop.a"})
STAGES = ['{"$match": {"fullDocument.a": 1}}', '{"$match": {"fullDocument.b": 1}}']
MATCHING, NARROWER = (source({"cursor.pipeline": f"[{', '.join(STAGES[:number])}]"}) for number in (1, 2))
KEEP = '[{{"$addFields": {{"keep": {{"$eq": ["$fullDocument.region", "{}"]}}}}}}, {{"$match": {{"keep": true}}}}{}]'
MARKED, BEHIND, ELSEWHERE = (
    source({"cursor.pipeline": KEEP.format(*each)}) for each in (("EU", ""), ("EU", ', {"$unset": "keep"}'), ("US", ""))
)
MASKED, MASKED_OTHERWISE, REMOVED, MADE = (
    source({"cursor.pipeline": f"[{stage}]"})
    for stage in (
        '{"$unset": "fullDocument.a"}',
        '{"$project": {"fullDocument.b": 0}}',
        '{"$set": {"fullDocument": {"a": "$$REMOVE"}}}',
        '{"$set": {"fullDocument.made": 1}}',
    )
)


def token(second: int) -> str:
    return f"82{second:08X}000000012B022C0100296E04"


def noted(
    monkeypatch: pytest.MonkeyPatch,
    streams: Sequence[tuple[int, Source]],
    now: Source,
    *,
    captured: Sequence[str] = ("shop.a",),
    states: Sequence[SnapshotState] = (),
) -> OtherStream:
    """What a start with the settings `now` records at second 90, for a bronze that began at 10 and has two collections. `streams` are the
    earlier settings with the second at which each began, the first with the table."""
    first, *changes = streams
    notes = [
        bronze_log.FilterChange(token(at), filters.fingerprint(each), frozenset(captured), frozenset())
        for at, each in changes
    ]
    monkeypatch.setattr(bronze_log, "notes", lambda *_: notes)
    monkeypatch.setattr(bronze_log, "first_token", lambda *_: token(first[0]))
    found = start(monkeypatch, streams[-1][1], now)
    return found.of_other_stream(states, fingerprint=filters.fingerprint(now), id_="1")


def start(monkeypatch: pytest.MonkeyPatch, before: Source, now: Source) -> Gaps:
    """A start with the settings `now` at second 90, with a bronze of two collections written with the settings `before`."""
    monkeypatch.setattr(bronze_log, "captured_collections", lambda *_: [("shop", "a"), ("shop", "b")])
    log: Any = SimpleNamespace(
        table=None,
        position=SimpleNamespace(token=token(90)),
        writer=SimpleNamespace(metadata=settings_metadata(before)),
    )
    deployment: Any = SimpleNamespace(
        source=now, filter=filters.of(now), namespaces=lambda: ["shop.a", "shop.b", "shop.new"]
    )
    nothing: Any = None
    return Gaps(nothing, deployment, log)


@pytest.mark.parametrize(
    ("streams", "now", "since"),
    [
        ([(10, SKIPPING)], WHOLE, 10),
        ([(10, WHOLE), (20, SKIPPING), (30, NARROW)], WHOLE, 20),
        ([(10, SKIPPING), (20, WHOLE), (30, SKIPPING)], WHOLE, 30),
        ([(10, SKIPPING)], NARROW, None),
        ([(10, WHOLE)], SKIPPING, None),
        ([(10, WHOLE), (20, MATCHING)], WHOLE, 20),
        ([(10, MATCHING), (20, NARROWER)], MATCHING, 20),
        ([(10, MATCHING)], SKIPPING, 10),
        ([(10, WHOLE), (20, MATCHING)], NARROWER, None),
        ([(10, WHOLE), (20, MARKED)], ELSEWHERE, 20),
        ([(10, WHOLE), (20, MARKED)], BEHIND, None),
        ([(10, WHOLE), (20, BEHIND)], MARKED, None),
        ([(10, WHOLE), (20, MASKED)], WHOLE, 20),
        ([(10, MASKED)], MASKED_OTHERWISE, 10),
        ([(10, REMOVED)], MADE, 10),
        ([(10, MADE)], WHOLE, None),
        ([(10, WHOLE)], MASKED, None),
    ],
)
def test_what_was_left_out_is_missing_when_it_is_captured_again(
    monkeypatch: pytest.MonkeyPatch, streams: Sequence[tuple[int, Source]], now: Source, since: int | None
) -> None:
    """Holds for every existing collection, whether operations or stages were left out: no event has the changes of that time."""
    gaps = [each["gap"] for each in noted(monkeypatch, streams, now).payloads if "gap" in each]
    known = [each for each in gaps if each["collections"] != ["shop.new"]]
    assert [each["collections"] for each in known] == [["shop.a"], ["shop.b"]] * (since is not None)
    assert all((each["from"], each["to"]) == (token(since or 0), token(90)) for each in gaps)


INSERTS_SKIPPED = source({"skipped.operations": "c"})


@pytest.mark.parametrize(("before", "is_new_too"), [(INSERTS_SKIPPED, True), (MATCHING, True), (SKIPPING, False)])
def test_a_collection_without_rows_may_lack_what_was_inserted(
    monkeypatch: pytest.MonkeyPatch, before: Source, is_new_too: bool
) -> None:
    """It was created while inserts were left out: no event has its documents, and status must not call it complete."""
    captured = ["shop.a", "shop.b"]
    found = noted(monkeypatch, [(10, WHOLE), (20, before)], WHOLE, captured=captured).payloads
    gaps = [each["gap"]["collections"] for each in found if "gap" in each]
    assert gaps == [["shop.a"], ["shop.b"]] + [["shop.new"]] * is_new_too


PARTIAL = {"capture.mode": "change_streams"}
EXCLUDED = {"field.exclude.list": "shop.a.x, shop.none.x"}
RENAMED = {"field.renames": "shop.a.x:y"}


@pytest.mark.parametrize(
    ("before", "now", "is_incomplete", "is_told"),
    [
        (PARTIAL, {**PARTIAL, **RENAMED}, True, True),
        ({**PARTIAL, **RENAMED}, PARTIAL, True, True),
        (PARTIAL, {**PARTIAL, **EXCLUDED}, True, True),
        (EXCLUDED, {}, True, True),
        ({}, EXCLUDED, False, True),
        ({}, RENAMED, False, True),
        ({**PARTIAL, **EXCLUDED}, {**PARTIAL, "field.exclude.list": "shop.none.y, shop.a.x"}, False, False),
    ],
)
def test_rows_with_the_fields_of_before_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: dict[str, str],
    now: dict[str, str],
    is_incomplete: bool,
    is_told: bool,
) -> None:
    """Excluded fields are missing, and changes alone would be folded onto documents with the old names: only another snapshot repairs
    this."""
    with caplog.at_level(logging.WARNING):
        noted = [each["gap"] for each in start(monkeypatch, source(before), source(now)).of_other_fields([])]
    gaps = [each for each in noted if each["collections"]]
    assert [(each["since"], each["collections"]) for each in gaps] == [(tokens.utc(token(90)), ["shop.a"])] * is_incomplete
    told = [each.getMessage() for each in caplog.records if each.getMessage().startswith("field.exclude.list")]
    assert len(told) == is_told and all(each.endswith("execute-snapshot --data-collections shop.a") for each in told)


@pytest.mark.parametrize("lists", [EXCLUDED, RENAMED])
def test_rows_with_the_fields_of_before_are_told_when_changes_alone_begin_to_come(
    monkeypatch: pytest.MonkeyPatch, lists: dict[str, str]
) -> None:
    """The names changed long before `capture.mode`: changes would silently be folded onto documents that were not read since."""
    payloads = start(monkeypatch, WHOLE, source(lists)).of_other_fields([])
    assert snapshot_state.unrepaired(payloads) == {}
    assert start(monkeypatch, source(lists), source(lists)).of_other_fields(payloads) == []
    before, now = source(lists), source({**PARTIAL, **lists})
    read_since = [*payloads, *read(SnapshotKind.INCREMENTAL, {}, "2", ["shop.a"])]
    assert start(monkeypatch, before, now).of_other_fields(read_since) == []
    payloads += start(monkeypatch, before, now).of_other_fields(payloads)
    assert list(snapshot_state.unrepaired(payloads)) == ["shop.a"]
    assert start(monkeypatch, now, now).of_other_fields(payloads) == []
    payloads += read(SnapshotKind.INCREMENTAL, {}, "2", ["shop.a"])
    assert start(monkeypatch, now, now).of_other_fields(payloads) == []


def test_lists_of_fields_are_read_once_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 500 entries once per collection delays a start with 2,000 collections by a minute."""
    read, reads = field_filters.read, []
    monkeypatch.setattr(field_filters, "read", lambda *given: reads.append(given) or read(*given))
    assert start(monkeypatch, source({"field.exclude.list": "shop.a.x, shop.b.x"}), source({})).of_other_fields([])
    assert len(reads) == 2


FILTERS = {"shop.a": '{"n":1}', "shop.b": '{"n":1}', "shop.gone": '{"n":1}'}


def read(kind: SnapshotKind, filters_: dict[str, str], id_: str, names: Sequence[str]) -> list[Any]:
    """The heartbeats of a finished snapshot of these collections, each with its filter."""
    state = SnapshotState(id_, tuple(names), kind=kind)
    for name in names:
        state = state.advanced(
            name, CollectionState(1, 1, filter=filters_.get(name), completed=True, sweep=not filters_.get(name))
        )
    return [state.begun(), *(state.progress(name) for name in names)]


@pytest.mark.parametrize(
    ("now", "expected", "is_told"),
    [(FILTERS, [], False), ({**FILTERS, "shop.b": "{}"}, [], True), ({}, ["shop.a", "shop.b"], True)],
)
def test_what_the_filter_of_a_snapshot_left_out_is_missing_when_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    now: dict[str, str],
    expected: list[str],
    is_told: bool,
) -> None:
    """It is recorded and logged once; not for a collection that was read as a whole since, nor for one that no longer exists. A collection
    with another filter is only logged: not all of it is wanted."""
    payloads = read(SnapshotKind.INITIAL, FILTERS, "1", list(FILTERS))
    before, after = (replace(WHOLE, snapshot_collection_filter_overrides=each) for each in (FILTERS, now))

    def noted_of(settings: Source = after) -> list[Any]:
        return start(monkeypatch, settings, after).of_other_snapshots(payloads)

    with caplog.at_level(logging.WARNING):
        found = noted_of(before)
    assert [each["gap"]["collections"] for each in found] == [[name] for name in expected]
    assert [each.getMessage().endswith("--data-collections shop.b") for each in caplog.records] == [True] * is_told
    payloads += found
    caplog.clear()
    assert noted_of() == [] and not caplog.records
    payloads += read(SnapshotKind.INCREMENTAL, {}, "2", ["shop.a", "shop.b"])
    assert noted_of() == [] and snapshot_state.unrepaired(payloads) == {}


@pytest.mark.parametrize(("now", "is_told"), [(FILTERS, False), ({**FILTERS, "shop.b": "{}"}, True)])
def test_a_filter_that_is_there_again_leaves_nothing_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, now: dict[str, str], is_told: bool
) -> None:
    """With the filter no snapshot would ever end the gap, and all that it should read exists. A gap for another reason remains."""
    with_filters, again = (replace(WHOLE, snapshot_collection_filter_overrides=each) for each in (FILTERS, now))
    payloads = read(SnapshotKind.INITIAL, FILTERS, "1", list(FILTERS))
    payloads += start(monkeypatch, with_filters, WHOLE).of_other_snapshots(payloads)
    payloads.append({"gap": {"since": "later", "collections": ["shop.b"]}})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        payloads += start(monkeypatch, WHOLE, again).of_other_snapshots(payloads)
    assert [each.getMessage().endswith("--data-collections shop.b") for each in caplog.records] == [True] * is_told
    found = snapshot_state.unrepaired(payloads)
    assert {name: gap.causes for name, gap in found.items()} == {"shop.b": ("changes were lost",)}
    assert start(monkeypatch, again, again).of_other_snapshots(payloads) == []
    gaps = [each["gap"] for each in start(monkeypatch, again, WHOLE).of_other_snapshots(payloads)]
    assert [each["collections"] for each in gaps] == [["shop.a"]]


def test_a_collection_that_no_snapshot_is_to_read_any_more_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`snapshot.include.collection.list` let it in, and left it out again before a snapshot read it."""
    only_a = replace(WHOLE, snapshot_include_collection_list=("shop.a",))
    both = replace(WHOLE, snapshot_include_collection_list=("shop.[ab]",))
    payloads = read(SnapshotKind.INITIAL, {}, "1", ["shop.a"])
    payloads += start(monkeypatch, only_a, both).of_other_snapshots(payloads)
    assert list(snapshot_state.unrepaired(payloads)) == ["shop.b"]
    payloads += start(monkeypatch, both, only_a).of_other_snapshots(payloads)
    assert snapshot_state.unrepaired(payloads) == {}
    assert start(monkeypatch, only_a, both).of_other_snapshots(payloads)


def test_a_collection_that_no_snapshot_was_to_read_is_told_when_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a collection that the list let in before and that was created since, nor where no snapshot was taken at all."""
    only_a = replace(WHOLE, snapshot_include_collection_list=("shop.a",))
    payloads = read(SnapshotKind.INITIAL, {}, "1", ["shop.a"])
    found = start(monkeypatch, only_a, replace(WHOLE, snapshot_include_collection_list=("shop.[ab]",))).of_other_snapshots(
        payloads
    )
    assert [each["gap"]["collections"] for each in found] == [["shop.b"]]
    assert start(monkeypatch, only_a, WHOLE).of_other_snapshots([]) == []
    assert start(monkeypatch, WHOLE, only_a).of_other_snapshots(payloads) == []
    assert start(monkeypatch, only_a, only_a).of_other_snapshots(payloads) == []


def test_a_collection_that_was_made_since_is_not_told_as_new(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bronze has everything it ever contained: no snapshot is needed."""
    with caplog.at_level(logging.WARNING):
        noted(monkeypatch, [(10, WHOLE), (20, WHOLE)], source({"cursor.pipeline": "[]"}))
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == ["shop.new"]


def test_a_collection_that_was_empty_is_left_out_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later documents are in no event either, and it has no earlier rows that show that it was captured."""
    only_a = source({"collection.include.list": "shop.a"})
    names = ["shop.a", "shop.b", "shop.new"]
    for streams in ([(10, WHOLE)], [(10, WHOLE), (20, WHOLE)]):
        begun = SnapshotState("1", tuple(names))
        note, *_ = noted(monkeypatch, streams, only_a, captured=names, states=[begun]).payloads
        assert note["left_out"] == ["shop.b", "shop.new"]
