from __future__ import annotations

import json

import bson
import pytest

from cdc_core.snapshot import state as snapshot_state
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from tests.harness import pace


def test_a_state_is_what_its_heartbeats_say() -> None:
    """A plan, a chunk, a pause and a stop are read back as the state that wrote them."""
    plan = SnapshotState("i", ("db.a", "db.b"), kind=SnapshotKind.INCREMENTAL, conditions={"db.a": "{}"}, signal="s")
    read = plan.advanced("db.a", CollectionState(1, 10, None, "f", completed=True, sweep=False))
    stopped = snapshot_state.replace(read, is_paused=True).without(["db.b", "db.unknown"])
    payloads = [plan.begun(), read.progress("db.a"), stopped.controlled()]
    assert snapshot_state.states(payloads[:1]) == (plan,)
    assert snapshot_state.states(payloads[:2]) == (read,)
    assert snapshot_state.states(payloads) == (stopped,)
    assert (plan.missing, read.missing, stopped.missing) == (("db.a", "db.b"), ("db.b",), ())
    assert stopped.is_done


def test_a_plan_with_marks_keeps_them() -> None:
    """A replaced collection is swept up to that moment, whatever its chunks say."""
    plan = SnapshotState("r", ("db.a",), {"db.a": CollectionState(first="0001")}, SnapshotKind.REPLACED)
    assert snapshot_state.states([plan.begun()]) == (plan,)


def test_only_the_newest_initial_snapshot_counts() -> None:
    """The other states are snapshots that signals requested, in the order of their plans."""
    first, asked, second = (
        SnapshotState("1", ("db.a",)),
        SnapshotState("2", ("db.a",), kind=SnapshotKind.BLOCKING),
        SnapshotState("3", ("db.a",)),
    )
    assert snapshot_state.states([first.begun(), asked.begun(), second.begun()]) == (asked, second)


def test_the_states_of_many_collections_are_read_at_once() -> None:
    """Reading a state takes linear time: a heartbeat costs as much with twenty thousand collections as with one."""
    names = tuple(f"db.{number}" for number in range(20_000))
    done = CollectionState(1, 1, None, "f", completed=True)
    payloads = [SnapshotState("s", names).begun()]
    payloads += [{"snapshot": {"id": "s", "collections": {name: done.as_json()}, "done": False}} for name in names]
    with pace.within(1):
        (state,) = snapshot_state.states(payloads)
    assert state.is_done and state.documents == len(names)


def test_heartbeats_of_earlier_versions_are_read() -> None:
    """They name no type, and say `done` if a snapshot of nothing ended at once."""
    old = {"snapshot": {"id": "x", "planned": [], "collections": {}, "done": True}}
    (state,) = snapshot_state.states([old])
    assert state.is_done and state.kind is SnapshotKind.INITIAL


def test_a_gap_is_open_until_a_whole_snapshot_that_began_after_it_ends() -> None:
    """A snapshot that began before the gap, or that reads only a part, does not repair it."""
    done = CollectionState(1, 1, None, "f", completed=True)
    before, partly = (
        SnapshotState("1", ("db.a", "db.b")),
        SnapshotState("2", ("db.a",), kind=SnapshotKind.INCREMENTAL, conditions={"db.a": "{}"}),
    )
    after = SnapshotState("3", ("db.a", "db.b"))
    gap = {"gap": {"from": "x", "to": "y", "since": "then", "collections": ["db.a", "db.b"]}}
    payloads = [before.begun(), gap, before.advanced("db.a", done).progress("db.a")]
    payloads += [partly.begun(), partly.advanced("db.a", done).progress("db.a"), after.begun()]

    def since(number: int) -> dict[str, str]:
        return {name: found.since for name, found in snapshot_state.unrepaired(payloads[:number]).items()}

    assert since(1) == {}
    assert since(6) == {"db.a": "then", "db.b": "then"}
    payloads.append(after.advanced("db.a", done).progress("db.a"))
    assert since(7) == {"db.b": "then"}


def test_what_was_lost_around_a_time_is_lost_although_a_snapshot_followed() -> None:
    """A history shows the versions from before a gap as valid until the snapshot after it."""
    gap = {"from": "8265F0C0FF0000000A2B02", "to": "8265F0D0FF000000012B02", "since": "then", "collections": ["db.a"]}
    whole = SnapshotState("3", ("db.a",))
    payloads = [{"gap": gap}, whole.begun(), whole.advanced("db.a", CollectionState(1, 1, completed=True)).progress("db.a")]
    payloads.append({"gap": {**gap, "to": gap["from"], "collections": ["db.b"]}})  # of settings: nothing was lost before it
    payloads.append({"gap": {"since": "then", "collections": [], "folded": ["db.c"]}})
    times = ["65f0c0ff00000009", "65f0c0ff0000000a", "65f0cfff00000000", "65f0d0ff00000001"]
    assert [snapshot_state.lost_at(payloads, each) for each in times] == [set(), {"db.a"}, {"db.a"}, set()]


def test_the_end_of_a_collection_ends_its_gap() -> None:
    """A dropped or renamed collection has nothing to be read again; if it is created again, it may have a new gap."""
    gap, end = {"gap": {"since": "then", "collections": ["db.a", "db.b"]}}, {"ended": "db.a"}
    assert list(snapshot_state.unrepaired([gap, end])) == list(snapshot_state.unrepaired([end, gap, end])) == ["db.b"]
    assert sorted(snapshot_state.unrepaired([gap, end, gap])) == ["db.a", "db.b"]


def test_a_gap_says_why_it_is_open() -> None:
    """No snapshot read the collection again, or only a part of it, or the snapshot failed. A collection that is gone is complete."""
    gap = {"gap": {"since": "then", "collections": ["db.none", "db.part", "db.failed", "db.gone", "db.begun"]}}
    plan = SnapshotState("1", ("db.part", "db.failed", "db.gone", "db.begun"))
    ends = {
        "db.part": CollectionState(1, 1, completed=True, sweep=False),
        "db.failed": CollectionState(1, 1, failed="error 2"),
        "db.gone": CollectionState(1, 1, completed=True, sweep=False, is_gone=True),
    }
    read = [plan.advanced(name, state).progress(name) for name, state in ends.items()]
    found = {name: each.why for name, each in snapshot_state.unrepaired([gap, plan.begun(), *read]).items()}
    assert found == {
        "db.none": "changes were lost, and no snapshot has read it again",
        "db.part": "changes were lost, and only what a filter lets through was read again",
        "db.failed": "changes were lost, and the snapshot that read it again failed: error 2",
        "db.begun": "changes were lost, and the snapshot that reads it again is not at its end",
    }
    other = {"gap": {"since": "now", "cause": "fields changed", "collections": ["db.none", "db.other"]}}
    later = snapshot_state.unrepaired([gap, other])
    assert (later["db.none"].since, later["db.none"].why) == ("then", found["db.none"])
    assert (later["db.other"].since, later["db.other"].why) == ("now", "fields changed, and no snapshot has read it again")


def test_a_collection_that_failed_is_missing_only_when_it_is_retried() -> None:
    """A snapshot is done once its other collections are read. Its next start reads the failed one, from the last chunk on."""
    state = SnapshotState("1", ("db.a",)).advanced("db.a", CollectionState(2, 7, None, filter="{}", failed="error 2"))
    (read,) = snapshot_state.states([SnapshotState("1", ("db.a",)).begun(), state.progress("db.a")])
    assert (read, read.is_done, read.failed) == (state, True, {"db.a": "error 2"})
    assert read.retried().missing == ("db.a",) and read.retried().of("db.a").documents == 7


@pytest.mark.parametrize("text", [b"\x80\x80x", b"\xff\xfe", "é".encode(), b"plain"])
def test_the_end_of_a_chunk_is_kept_to_the_byte(text: bytes) -> None:
    """Also if its text is not UTF-8: a repaired end would sort elsewhere, and documents would be skipped."""
    hi = bson.encode({"hi": "Q" * len(text)}).replace(b"Q" * len(text), text)
    state = SnapshotState("1", ("db.a",)).advanced("db.a", CollectionState(2, 7, hi))
    (read,) = snapshot_state.states([SnapshotState("1", ("db.a",)).begun(), json.loads(json.dumps(state.progress("db.a")))])
    assert read.of("db.a").hi == hi
    assert ("hi_bson" in state.of("db.a").as_json()) == (text in (b"\x80\x80x", b"\xff\xfe"))


def test_what_is_incomplete_is_told_whatever_the_reason() -> None:
    """An initial snapshot that is running, failed or was stopped, and lost changes.

    A repeated snapshot on request that fails changes nothing.
    """
    done = CollectionState(1, 1, None, "f", completed=True)
    failed = CollectionState(1, 1, None, "f", failed="why")
    first = SnapshotState("1", ("db.a", "db.b", "db.c"))
    read = first.advanced("db.a", done)
    broken = read.advanced("db.b", failed)
    payloads = [first.begun(), read.progress("db.a"), broken.progress("db.b")]
    assert snapshot_state.incomplete(payloads[:1]) == ("db.a", "db.b", "db.c")
    assert snapshot_state.incomplete(payloads) == ("db.b", "db.c")
    payloads.append(broken.without(["db.c"]).controlled())
    assert snapshot_state.incomplete(payloads) == ("db.b", "db.c")
    asked = SnapshotState("2", ("db.a", "db.c"), kind=SnapshotKind.INCREMENTAL)
    payloads += [asked.begun(), asked.advanced("db.c", done).progress("db.c")]
    assert snapshot_state.incomplete(payloads) == ("db.a", "db.b")
    payloads.append(asked.advanced("db.c", done).without(["db.a"]).controlled())
    assert snapshot_state.incomplete(payloads) == ("db.b",)
    partly = SnapshotState("3", ("db.b",), kind=SnapshotKind.INCREMENTAL, conditions={"db.b": "{}"})
    payloads += [partly.begun(), partly.advanced("db.b", done).progress("db.b")]
    assert snapshot_state.incomplete(payloads) == ("db.b",)
    payloads.append({"gap": {"from": "x", "to": "y", "since": "then", "collections": ["db.a"]}})
    assert snapshot_state.incomplete(payloads) == ("db.a", "db.b")


def test_nothing_is_missing_of_a_collection_that_ended() -> None:
    """It was dropped after its requested snapshot had failed, and nothing tries again. A snapshot that was planned later counts."""
    failed = SnapshotState("1", ("db.a", "db.b"), kind=SnapshotKind.INCREMENTAL)
    for name in failed.planned:
        failed = failed.advanced(name, CollectionState(1, 1, failed="why"))
    payloads = [failed.begun(), *map(failed.progress, failed.planned), {"ended": "db.a"}]
    assert snapshot_state.incomplete(payloads) == ("db.b",)
    assert snapshot_state.incomplete([*payloads, SnapshotState("2", ("db.a",)).begun()]) == ("db.a", "db.b")


def test_what_is_missing_is_looked_for_once_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look goes through all collections: one per collection made a cut during a snapshot of 2,000 take 20 seconds."""
    looks: list[SnapshotState] = []
    found = SnapshotState.missing.fget
    assert found is not None
    monkeypatch.setattr(SnapshotState, "missing", property(lambda state: looks.append(state) or found(state)))
    assert snapshot_state.incomplete([SnapshotState("1", ("db.a", "db.b")).begun()]) == ("db.a", "db.b")
    assert len(looks) == 1
