"""Which sweeps heartbeats announce, and when they are due."""

from __future__ import annotations

import json

import pytest

from cdc_core.bronze import collection_ends
from cdc_core.bronze.collection_ends import Sweep, SweepCause
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState


def payload(**collections: dict[str, object]) -> str:
    return json.dumps({"snapshot": {"id": "s", "collections": collections}})


DONE = {"chunks": 2, "completed": True, "first": "0a", "sweep": True}


def test_sweeps() -> None:
    """A finished snapshot sweeps once, at the first heartbeat that reports it; filtered and unfinished snapshots do not."""
    heartbeats = [
        (1, payload(a={**DONE, "completed": False}, b=DONE)),
        (2, payload(a=DONE, b=DONE, c={**DONE, "sweep": False}, d={**DONE, "first": None})),
        (7, payload(a={**DONE, "first": "0f"})),
    ]
    assert collection_ends.of_heartbeats(heartbeats) == (
        Sweep("b", 1, "0a"),
        Sweep("a", 2, "0a"),
        Sweep("a", 7, "0f"),
    )


@pytest.mark.parametrize(("cause", "is_due"), [("snapshot", False), ("drop", True), ("rename", True)])
def test_what_is_due_behind_a_newer_sweep(cause: str, is_due: bool) -> None:
    """The end of a snapshot is repeated by heartbeats, and is done. A drop that the stream reaches late is due until its batch is
    applied."""
    sweep = Sweep("a", 7, "0a", SweepCause(cause))
    assert sweep.is_due(after=6, swept="0f") is sweep.is_due(after=6, swept="0a") is is_due
    assert not sweep.is_due(after=7, swept="")
    assert sweep.is_due(after=6, swept="")


def test_a_replacement_is_due_behind_a_newer_sweep() -> None:
    """Its snapshot ends once, with the mark of the rename, to which the stream may come after another snapshot's end."""
    plan = SnapshotState("r", ("a",), kind=SnapshotKind.REPLACED)
    end = plan.advanced("a", CollectionState(1, 1, None, "0a", completed=True)).progress("a")
    (sweep,) = collection_ends.of_heartbeats([(7, json.dumps(end))])
    assert sweep.is_due(after=6, swept="0f") and not sweep.is_due(after=7, swept="")
    assert sweep.floor("", keeps_row=False) == ""


def test_nothing_from_before_a_drop_may_come_late() -> None:
    """A late event from before a snapshot is compared with its row, and so is every late event if deletes keep their row."""
    drop, snapshot = (Sweep("a", 7, "0c", cause) for cause in (SweepCause.DROP, SweepCause.SNAPSHOT))
    assert [drop.floor(before, keeps_row=False) for before in ("", "0a", "0f")] == ["0c", "0c", "0f"]
    assert (drop.floor("0a", keeps_row=True), snapshot.floor("0a", keeps_row=False)) == ("0a", "0a")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"snapshot": 5}', '{"snapshot": {"collections": [1]}}'])
def test_other_heartbeats_sweep_nothing(text: str) -> None:
    """Payloads that are not about snapshots, or are invalid, are ignored."""
    assert collection_ends.of_heartbeats([(1, text)]) == ()
