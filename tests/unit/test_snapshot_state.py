from __future__ import annotations

from cdc_core.snapshot import state as snapshot_state
from cdc_core.snapshot.state import CollectionState, Kind, State


def test_a_state_is_what_its_heartbeats_say() -> None:
    """A plan, a chunk, a pause and a stop, read back, give the state that wrote them."""
    plan = State("i", ("db.a", "db.b"), kind=Kind.INCREMENTAL, conditions={"db.a": "{}"}, signal="s")
    read = plan.advanced("db.a", CollectionState(1, 10, None, "f", completed=True, sweep=False))
    stopped = snapshot_state.replace(read, is_paused=True).without(["db.b", "db.unknown"])
    payloads = [plan.begun(), read.progress("db.a"), stopped.controlled()]
    assert snapshot_state.states(payloads[:1]) == (plan,)
    assert snapshot_state.states(payloads[:2]) == (read,)
    assert snapshot_state.states(payloads) == (stopped,)
    assert (plan.missing, read.missing, stopped.missing) == (("db.a", "db.b"), ("db.b",), ())
    assert stopped.is_done


def test_a_plan_with_marks_keeps_them() -> None:
    """A collection that was replaced is swept up to that moment, whatever its chunks say."""
    plan = State("r", ("db.a",), {"db.a": CollectionState(first="0001")}, Kind.REPLACED)
    assert snapshot_state.states([plan.begun()]) == (plan,)


def test_only_the_newest_initial_snapshot_counts() -> None:
    """The others are those that signals asked for, in the order of their plans."""
    first, asked, second = State("1", ("db.a",)), State("2", ("db.a",), kind=Kind.BLOCKING), State("3", ("db.a",))
    assert snapshot_state.states([first.begun(), asked.begun(), second.begun()]) == (asked, second)


def test_heartbeats_of_earlier_versions_are_read() -> None:
    """They name no type, and say `done` where a snapshot of nothing was over at once."""
    old = {"snapshot": {"id": "x", "planned": [], "collections": {}, "done": True}}
    (state,) = snapshot_state.states([old])
    assert state.is_done and state.kind is Kind.INITIAL


def test_a_gap_is_open_until_a_whole_snapshot_that_began_after_it_ends() -> None:
    """One that began before it, or that is read in part, repairs nothing."""
    done = CollectionState(1, 1, None, "f", completed=True)
    before, partly = State("1", ("db.a", "db.b")), State("2", ("db.a",), kind=Kind.INCREMENTAL, conditions={"db.a": "{}"})
    after = State("3", ("db.a", "db.b"))
    gap = {"gap": {"from": "x", "to": "y", "since": "then", "collections": ["db.a", "db.b"]}}
    payloads = [before.begun(), gap, before.advanced("db.a", done).progress("db.a")]
    payloads += [partly.begun(), partly.advanced("db.a", done).progress("db.a"), after.begun()]
    assert snapshot_state.unrepaired(payloads[:1]) == {}
    assert snapshot_state.unrepaired(payloads) == {"db.a": "then", "db.b": "then"}
    payloads.append(after.advanced("db.a", done).progress("db.a"))
    assert snapshot_state.unrepaired(payloads) == {"db.b": "then"}
