"""Where the log may be cut."""

from __future__ import annotations

import pytest

from cdc_core import errors
from cdc_core.gold import cut
from pipelines.gold import cut as published


def at(seconds: int, increment: int = 1) -> str:
    return f"{seconds:08x}{increment:08x}"


def test_a_cut_never_splits_a_cluster_time() -> None:
    """A batch that ends inside a transaction is none; the newest one is only where something says that no more comes of its time."""
    batches = [
        cut.Batch(1, at(10), at(12)),
        cut.Batch(2, at(13), at(15)),
        cut.Batch(3, at(15), at(15)),
        cut.Batch(4),
        cut.Batch(5, at(15), at(16)),
    ]
    ends = [cut.Boundary(1, at(12), at(13))]
    assert cut.boundaries(batches, reached=None) == ends
    assert cut.boundaries(batches, reached=at(16)) == ends
    assert cut.boundaries(batches, reached=at(17)) == [*ends, cut.Boundary(5, at(16), at(17))]


def test_snapshot_rows_must_not_be_newer_than_the_stream() -> None:
    """A chunk that was read at a time holds all changes up to it: the cut comes where the stream has passed that time."""
    batches = [
        cut.Batch(1, snapshot=at(20)),
        cut.Batch(2, at(18), at(19)),
        cut.Batch(3, at(22), at(22)),
        cut.Batch(4, at(23), at(24)),
    ]
    assert cut.boundaries(batches, reached=None) == [cut.Boundary(2, at(20), at(22)), cut.Boundary(3, at(22), at(23))]


def test_an_event_that_comes_back_late_moves_the_cut_behind_itself() -> None:
    """What a replay lands with its old time was missing before."""
    batches = [
        cut.Batch(1, at(10), at(11)),
        cut.Batch(2, at(12), at(12)),
        cut.Batch(3, at(10), at(10)),
        cut.Batch(4, at(20), at(20)),
    ]
    assert [each.batch for each in cut.boundaries(batches, reached=None)] == [3]


def test_the_newest_boundary_that_can_be_reached_is_chosen() -> None:
    """Not before what a table holds, not after the time that is asked."""
    found = [cut.Boundary(n, at(n), at(n + 1)) for n in (1, 2, 3)]
    assert cut.chosen(found, at_least=0, asked=None) == found[2]
    assert cut.chosen(found, at_least=2, asked=at(2, 9)) == found[1]
    assert cut.chosen(found, at_least=3, asked=at(2)) is None


def test_a_time_is_asked_in_three_ways() -> None:
    """Seconds stand for their end."""
    assert cut.parsed("10") == cut.parsed("1970-01-01T00:00:10Z") == cut.parsed("1970-01-01 00:00:10") == at(10, 0xFFFFFFFF)
    assert cut.parsed("10:2") == at(10, 2)
    assert cut.shown(at(10, 2)) == "10:2 (1970-01-01 00:00:10 UTC)"
    with pytest.raises(errors.SettingsError):
        cut.parsed("yesterday")


def test_the_query_over_a_cut_takes_any_name() -> None:
    """A collection's name may hold a quote."""
    tables = (published.CutTable("shop.o'brien", "delta.`/lake/x`", 3),)
    made = published.Cut("1-1", 0, at(1), at(2), 1, "exact", (), tables)
    assert "'shop.o\\u0027brien' AS `table`" in made.sql
