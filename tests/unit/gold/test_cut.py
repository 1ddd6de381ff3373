"""Where the log may be cut."""

from __future__ import annotations

import dataclasses
import re

import pytest

from cdc_core import errors
from cdc_core.gold import cut
from cdc_core.sql.names import literal
from pipelines.operations import cut as pipeline
from pipelines.verify import run as verify


def at(seconds: int, increment: int = 1) -> str:
    return f"{seconds:08x}{increment:08x}"


def test_a_cut_never_splits_a_cluster_time() -> None:
    """No cut before the first event, or at a batch that ends inside a transaction. The newest batch is a boundary only if a heartbeat says
    that its time is complete."""
    batches = [
        cut.BatchTimes(0),
        cut.BatchTimes(1, at(10), at(12)),
        cut.BatchTimes(2, at(13), at(15)),
        cut.BatchTimes(3, at(15), at(15)),
        cut.BatchTimes(4),
        cut.BatchTimes(5, at(15), at(16)),
    ]
    ends = [cut.CutBoundary(1, at(12), at(13))]
    assert cut.boundaries(batches, complete_time=None) == ends
    assert cut.boundaries(batches, complete_time=at(16)) == ends
    assert cut.boundaries(batches, complete_time=at(17)) == [*ends, cut.CutBoundary(5, at(16), at(17))]


def test_snapshot_rows_must_not_be_newer_than_the_stream() -> None:
    """A chunk contains all changes up to the time of its read: the cut comes after the stream has passed that time."""
    batches = [
        cut.BatchTimes(1, snapshot=at(20)),
        cut.BatchTimes(2, at(18), at(19)),
        cut.BatchTimes(3, at(22), at(22)),
        cut.BatchTimes(4, at(23), at(24)),
    ]
    assert cut.boundaries(batches, complete_time=None) == [
        cut.CutBoundary(2, at(20), at(22)),
        cut.CutBoundary(3, at(22), at(23)),
    ]


def test_an_event_that_comes_back_late_moves_the_cut_behind_itself() -> None:
    """An event with an old time from a replay was missing in earlier cuts."""
    batches = [
        cut.BatchTimes(1, at(10), at(11)),
        cut.BatchTimes(2, at(12), at(12)),
        cut.BatchTimes(3, at(10), at(10)),
        cut.BatchTimes(4, at(20), at(20)),
    ]
    assert [each.batch for each in cut.boundaries(batches, complete_time=None)] == [3]


def test_the_newest_boundary_that_can_be_reached_is_chosen() -> None:
    """Not before the batch that a table is at, and not after the requested time."""
    found = [cut.CutBoundary(n, at(n), at(n + 1)) for n in (1, 2, 3)]
    assert cut.chosen(found, at_least=0, latest=None) == found[2]
    assert cut.chosen(found, at_least=2, latest=at(2, 9)) == found[1]
    assert cut.chosen(found, at_least=3, latest=at(2)) is None


def test_the_query_over_a_cut_names_each_table_once() -> None:
    """Names that differ only in capitals, or in characters that a query's names cannot have, are distinguished. Quotes are escaped."""
    names = ("shop.a_b", "shop_a.b", "Shop.A_B", "shop.it's", "shop.`x`")
    made = [pipeline.CutTable(name, "delta.`/lake`", 7) for name in names]
    past = pipeline.CutTable("shop.old", "delta.`/lake`", None, "`__sequence` <= '1'")
    shown = pipeline.Cut("10-1", 0, at(10), at(11), 1, pipeline.EXACT, (), (*made, past))
    lines = shown.sql.splitlines()
    parts = re.findall(r"(`[^`]*`) AS \(SELECT \* FROM delta\.`/lake`", shown.sql)
    assert parts == ["`shop_a_b`", "`shop_a_b_2`", "`Shop_A_B_3`", "`shop_it_s`", "`shop__x_`", "`shop_old`"]
    assert "`shop_old` AS (SELECT * FROM delta.`/lake` WHERE `__sequence` <= '1')" in lines[5]
    assert f"SELECT {literal(names[3])} AS `table`, count(*) AS `rows` FROM `shop_it_s`" in lines[9]
    assert dataclasses.replace(shown, tables=()).sql == ""


def test_times_are_accepted_in_three_forms() -> None:
    """A time without an increment includes its whole second; `verify` accepts the same times as gold."""
    assert cut.parsed("10") == cut.parsed("1970-01-01T00:00:10Z") == cut.parsed("1970-01-01 00:00:10") == at(10, 0xFFFFFFFF)
    assert cut.parsed("1970-01-01T02:00:10+02:00") == at(10, 0xFFFFFFFF)
    assert cut.parsed("10:2") == at(10, 2)
    assert cut.parsed(" Now ") is None
    assert (cut.shown(at(10, 2)), cut.shown("")) == ("10:2 (1970-01-01 00:00:10 UTC)", "the beginning")
    assert (verify.as_of("10:2"), verify.as_of("10.2"), verify.as_of("now")) == ((10, 2), (10, 2), None)


NO_TIMES = ("yesterday", "", "-5", "1e9", "nan", "10:", "10:-1", "١٠", "9" * 5000)
OUT_OF_RANGE = ("9999999999", "10:4294967296", "1969-12-31T23:59:59Z", "2200-01-01", "0001-01-01T00:00:00+14:00")


@pytest.mark.parametrize("text", [*NO_TIMES, *OUT_OF_RANGE])
def test_invalid_times_are_refused(text: str) -> None:
    """Refuses words, negative numbers, and times that no cluster time can represent."""
    with pytest.raises(errors.SettingsError, match="--as-of: "):
        verify.as_of(text)
