"""Resume tokens: the position and order in their `_data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.stream import resume_token

CASES = json.loads((Path(__file__).parents[2] / "cases" / "resume_token" / "tokens.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_tokens_of_real_servers(case: dict[str, str]) -> None:
    """The position is read in every version of the format, and a fragment belongs to its event."""
    position = resume_token.position(case["data"])
    assert resume_token.sequence(position) == resume_token.sequence_of(case["data"]) == case["sequence"]
    assert resume_token.without_fragment(case["data"]) == case.get("without_fragment", case["data"])


def _number(value: int) -> str:
    if value == 0:
        return "29"
    length = ((value << 1).bit_length() + 7) // 8
    return f"{0x2A + length:02X}{value << 1:0{2 * length}X}"


_uint32 = st.integers(0, 0xFFFFFFFE)


@given(_uint32, _uint32, _uint32, st.sampled_from([0, 1, 2]), st.sampled_from([0, 128]))
def test_positions_come_back(seconds: int, increment: int, index: int, version: int, kind: int) -> None:
    """Cluster time and index are read from any token, however many digits its numbers have."""
    numbers = (version, kind, index) if version else (version, index)
    data = f"82{seconds:08X}{increment:08X}{''.join(map(_number, numbers))}6E04"
    assert resume_token.position(data) == (seconds, increment, index)
    assert resume_token.sequence_of(data) == resume_token.sequence(resume_token.position(data))


@given(st.tuples(_uint32, _uint32, _uint32), st.tuples(_uint32, _uint32, _uint32))
def test_sequences_sort_as_positions_do(left: tuple[int, int, int], right: tuple[int, int, int]) -> None:
    """A sequence has 24 digits that sort like the events; the row of a snapshot comes after all events of its time."""
    first, second = resume_token.TokenPosition(*left), resume_token.TokenPosition(*right)
    assert (resume_token.sequence(first) < resume_token.sequence(second)) == (first < second)
    assert len(resume_token.sequence(first)) == 24
    snapshot = resume_token.snapshot_sequence(first.seconds, first.increment)
    assert resume_token.sequence(first) < snapshot
    assert (snapshot < resume_token.sequence(second)) == (first[:2] < second[:2])


@pytest.mark.parametrize(
    "data",
    [
        "",
        "82",
        "snapshot:1:1",
        "826B0137A500000001",
        "826B0137A5000000",
        "816B0137A5000000012B022C0100296E04",
        "82XB0137A5000000012B022C0100296E04",
        "826B0137A5000000012B022C0100",
        "826B0137A5000000012B022C01003C",
        "826B0137A5000000012B022C01002D02",
        "826B0137A5000000012B022C010030FFFFFFFFFFFF",
        "826B0137A5000000012B",
        "826B0137A500000001ZZ",
    ],
)
def test_what_is_no_token_is_refused(data: str) -> None:
    """A token that cannot be read raises ValueError with that reason; `without_fragment` returns it unchanged."""
    with pytest.raises(ValueError, match="resume token"):
        resume_token.position(data)
    with pytest.raises(ValueError, match="resume token"):
        resume_token.sequence_of(data)
    assert resume_token.without_fragment(data) == data


_uuid = "5A1004" + "AB" * 16


def _event(version: int, seconds: int, index: int, fragment: str = "") -> str:
    numbers = (version, 128, index) if version else (version, index)
    return f"82{seconds:08X}{1:08X}{''.join(map(_number, numbers))}{'6E' if version > 1 else ''}{_uuid}461E5F6964002B020000{fragment}04"


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 300), st.integers(0, 300), *[st.sampled_from([0, 1, 2])] * 2)
def test_places_compare_in_any_two_formats(
    time: int, other_time: int, index: int, other_index: int, version: int, other_version: int
) -> None:
    """A server writes another format after an upgrade, and if large events are split."""
    one, other = _event(version, time, index), _event(other_version, other_time, other_index)
    expected = (time, index), (other_time, other_index)
    assert resume_token.compare(one, other) == (expected[0] > expected[1]) - (expected[0] < expected[1])
    mark = f"82{time:08X}{1:08X}2B0{other_version * 2}{'29' if other_version else ''}296E04" if other_version else one
    assert resume_token.compare(mark, one) <= 0
    assert resume_token.compare(_event(version, time, index, "2B02"), one) == 0
    assert resume_token.compare(resume_token.behind(one), other) == (1 if other_time <= time else -1)


def test_the_instant_behind_an_event_comes_after_all_of_its_time() -> None:
    """`behind` an event is the next increment. High-water marks, and texts that are no tokens, are returned unchanged."""
    events = [case["data"] for case in CASES if resume_token._has_identifier(case["data"])]
    assert events
    for data in events:
        at, behind = resume_token.position(data), resume_token.behind(data)
        assert int(behind[2:10], 16) == at.seconds and int(behind[10:18], 16) == at.increment + 1
    marks = [case["data"] for case in CASES if not resume_token._has_identifier(case["data"])]
    assert all(resume_token.behind(data) == data for data in (*marks, "", "nothing"))
