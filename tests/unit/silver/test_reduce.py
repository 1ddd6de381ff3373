from __future__ import annotations

import json

import pytest

from cdc_core.silver import reduce

RANGES = [
    ([], (0, 0), 10, []),
    ([], (3, 9), 10, [(3, 9)]),
    ([(4, 5), (6, 5)], (3, 9), 10, [(3, 9)]),
    ([(4, 5), (6, 6)], (3, 9), 10, [(3, 4), (4, 9)]),
    ([(4, 50), (5, 50), (8, 1)], (3, 9), 10, [(3, 4), (4, 5), (5, 9)]),
    ([(4, 4), (5, 4), (6, 4), (7, 4)], (3, 7), 8, [(3, 5), (5, 7)]),
]


@pytest.mark.parametrize(("batches", "span", "limit", "wanted"), RANGES)
def test_ranges(batches: list[tuple[int, int]], span: tuple[int, int], limit: int, wanted: list[tuple[int, int]]) -> None:
    """A span is cut between batches; each piece holds at most the limit, or one batch, and none is left out."""
    found = reduce.ranges(batches, span=reduce.BatchRange(*span), limit=limit)
    assert [(each.after, each.to) for each in found] == wanted


def payload(**collections: dict[str, object]) -> str:
    return json.dumps({"snapshot": {"id": "s", "collections": collections}})


DONE = {"chunks": 2, "completed": True, "first": "0a", "sweep": True}


def test_sweeps() -> None:
    """A finished snapshot sweeps once, at the first heartbeat that says so; filtered and unfinished ones do not."""
    heartbeats = [
        (1, payload(a={**DONE, "completed": False}, b=DONE)),
        (2, payload(a=DONE, b=DONE, c={**DONE, "sweep": False}, d={**DONE, "first": None})),
        (7, payload(a={**DONE, "first": "0f"})),
    ]
    assert reduce.sweeps(heartbeats) == (
        reduce.Sweep("b", 1, "0a"),
        reduce.Sweep("a", 2, "0a"),
        reduce.Sweep("a", 7, "0f"),
    )


@pytest.mark.parametrize(("cause", "is_due"), [("snapshot", False), ("drop", True), ("rename", True)])
def test_what_is_due_behind_a_newer_sweep(cause: str, is_due: bool) -> None:
    """A snapshot's end that heartbeats repeat is done; a drop that the stream comes to late is not, until its batch is."""
    sweep = reduce.Sweep("a", 7, "0a", reduce.SweepCause(cause))
    assert sweep.is_due(after=6, swept="0f") is is_due
    assert not sweep.is_due(after=7, swept="")
    assert sweep.is_due(after=6, swept="")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"snapshot": 5}', '{"snapshot": {"collections": [1]}}'])
def test_other_heartbeats_sweep_nothing(text: str) -> None:
    """A payload that is not about a snapshot, or cannot be read, counts for nothing."""
    assert reduce.sweeps([(1, text)]) == ()
