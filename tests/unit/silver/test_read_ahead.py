"""Ranges that are read ahead give the same events, and each range is read once."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from cdc_core.bronze.batch_range import BatchRange
from pipelines.silver import read_ahead
from pipelines.silver.read_ahead import ReadAhead

FIRST, SECOND, THIRD = BatchRange(0, 1), BatchRange(1, 2), BatchRange(2, 3)
COLUMNS = ("after",)


@pytest.fixture(autouse=True)
def ahead_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 50)


class Bronze:
    """Ranges of events whose size in bytes is the number of the last batch."""

    def __init__(self) -> None:
        self.read: list[tuple[BatchRange, str]] = []

    def __call__(self, range_: BatchRange, columns: tuple[str, ...], size_bytes: int = 100) -> pa.Table | None:
        self.read.append((range_, threading.current_thread().name.split("_")[0]))
        if range_.to == 13:
            raise OSError("unlucky")
        return pa.table({"batch": [range_.to]}) if range_.to <= size_bytes else None


def batches(ahead: ReadAhead, bronze: Bronze, *ranges: BatchRange, columns: tuple[str, ...] = COLUMNS) -> list[object]:
    found = [ahead.events(each, columns, bronze) for each in ranges]
    return [None if each is None else each["batch"].to_pylist()[0] for each in found]


def test_the_expected_range_is_read_beside_the_one_that_is_applied() -> None:
    ahead, bronze = ReadAhead(), Bronze()
    found = []
    for range_, then in ((FIRST, SECOND), (SECOND, THIRD), (THIRD, None)):
        ahead.expect(then)
        found += batches(ahead, bronze, range_)
    assert found == [1, 2, 3]
    assert bronze.read == [(FIRST, "MainThread"), (SECOND, "medallion-ahead"), (THIRD, "medallion-ahead")]


@pytest.mark.parametrize(
    ("range_", "columns"), [(THIRD, COLUMNS), (SECOND, ("after", "before"))], ids=["another range", "other columns"]
)
def test_what_was_not_expected_is_read_when_it_is_asked_for(range_: BatchRange, columns: tuple[str, ...]) -> None:
    ahead, bronze = ReadAhead(), Bronze()
    ahead.expect(SECOND)
    assert batches(ahead, bronze, FIRST) == [1]
    ahead.expect(None)
    assert batches(ahead, bronze, range_, columns=columns) == [range_.to]
    assert bronze.read[-1] == (range_, "MainThread")


def test_a_range_that_is_too_large_to_be_held_beside_another_is_read_when_it_is_asked_for() -> None:
    ahead, bronze = ReadAhead(), Bronze()
    large, too_large = BatchRange(1, 60), BatchRange(60, 101)
    for range_, then, batch in ((FIRST, large, 1), (large, too_large, 60), (too_large, THIRD, None)):
        ahead.expect(then)
        assert batches(ahead, bronze, range_) == [batch]
    assert (large, "MainThread") in bronze.read, "of 60 bytes, and 50 may be held beside another"
    assert (THIRD, "medallion-ahead") not in bronze.read, (
        "what this process cannot apply is not followed by a range that it can"
    )


def test_an_error_is_that_of_the_range() -> None:
    ahead, bronze = ReadAhead(), Bronze()
    unlucky = BatchRange(1, 13)
    ahead.expect(unlucky)
    assert batches(ahead, bronze, FIRST) == [1]
    with pytest.raises(OSError, match="unlucky"):
        batches(ahead, bronze, unlucky)


def test_forgotten_ranges_are_read_again() -> None:
    ahead, bronze = ReadAhead(), Bronze()
    ahead.expect(SECOND)
    batches(ahead, bronze, FIRST)
    ahead.forget()
    assert batches(ahead, bronze, SECOND) == [2]
    assert [range_ for range_, _ in bronze.read].count(SECOND) == 2


def test_a_range_that_was_begun_is_not_read_again() -> None:
    ahead, bronze = ReadAhead(), Bronze()
    ahead.begin(FIRST, COLUMNS, bronze)
    assert batches(ahead, bronze, FIRST, SECOND) == [1, 2]
    assert bronze.read == [(FIRST, "medallion-ahead"), (SECOND, "MainThread")]
