"""What the commands show of progress and status."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from pipelines.capture.progress import CaptureProgress
from pipelines.operations import check, quarantine, status, units
from pipelines.snapshot.snapshot import SnapshotProgress
from pipelines.terminal import tables as report


@pytest.mark.parametrize(
    ("seconds", "told"),
    ((0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h"), (86400 * 400 + 60, "400 d 1 min")),
)
def test_a_length_of_time_is_told_in_two_units(seconds: float, told: str) -> None:
    """The two largest units that are not zero."""
    assert units.duration(seconds) == told


def test_a_rate_is_that_of_the_last_ten_seconds() -> None:
    """A count that grew and then stood still has a rate that falls to zero."""
    now = iter((0.0, 5.0, 9.0, 30.0, 35.0))
    rate = report.Rate(clock=lambda: next(now))
    assert [rate.of(count) for count in (0, 500, 900, 900, 900)] == [0, 100, 100, 0, 0]


def test_progress_tells_the_snapshot_and_the_stream() -> None:
    """Documents done of about how many, rate and time left; then events, rate and lag."""
    snapshot = SnapshotProgress("shop.orders", 500, 1000, 2500, 10_000, 1250.0, 6.0)
    line = report.described(CaptureProgress(events=1234, lag_seconds=1.6, snapshot=snapshot), rate=99.5)
    assert line == (
        "snapshot of shop.orders: 2,500 of about 10,000 documents, 1,250/s, 6 s left · "
        "stream: 1,234 events, 100/s, 2 s behind"
    )


NAME = "shop.a[/b] [red] :apple:"
"""A collection's name that a terminal's markup would be read from."""


@pytest.mark.parametrize(
    "show",
    [
        lambda: report.findings([check.Finding(f"snapshot of {NAME}", check.CheckVerdict.WRONG, "refused")]),
        lambda: report.replayed({NAME: quarantine.ReplayResult(1, 2)}),
        lambda: report.status(status.PipelineStatus("shop", 0, status.ServerStatus(), None, (_collection(NAME),))),
    ],
)
def test_a_name_is_shown_as_it_is(show: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    """No command ends with an error over a bracket in a collection's name, and none swallows a part of it."""
    show()
    assert NAME in capsys.readouterr().out


def test_a_capture_goes_on_whatever_its_collections_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its progress is a live line on a terminal."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with report.progress() as hear:
        hear(CaptureProgress(events=1, snapshot=SnapshotProgress(NAME, 1, 2, 1, 2, 1.0, 6.0)))
    assert NAME in terminal.getvalue()


def _collection(name: str) -> status.CollectionStatus:
    return status.CollectionStatus(name, None, None, None, 0, 0)


WRITER = status.WriterStatus("host-a", 17, has_left=False, lease_seconds=80)


def _layer(**fields: object) -> status.TableStatus:
    standing = dict.fromkeys(
        ("version", "batch", "rows", "deleted", "incomplete", "rescued", "lag_batches", "lag_events", "lag_seconds"), 0
    )
    return status.TableStatus(**{"table": "t", "rate": None, "writer": None, **standing, **fields})  # type: ignore[arg-type]


def _shown(found: status.PipelineStatus, capsys: pytest.CaptureFixture[str]) -> str:
    report.status(found)
    return " ".join(capsys.readouterr().out.split())


def test_status_shows_lag_headroom_and_writer(capsys: pytest.CaptureFixture[str]) -> None:
    """The source's line, the log's line, and a line a collection with what waits for each layer."""
    log = status.BronzeStatus("bronze", 12, 3456, 1_700_000_000, 5, 7200, 250.0, WRITER)
    orders = status.CollectionStatus(
        "shop.orders",
        status.SnapshotStatus(10, is_done=False),
        _layer(rows=100, lag_events=7, lag_seconds=65, rescued=3),
        None,
        7,
        2,
    )
    asked = status.ServerStatus("MongoDB 7.0.1", 1_700_000_005, 1_699_992_800)
    text = _shown(status.PipelineStatus("shop", 0, asked, log, (orders,)), capsys)
    assert "MongoDB 7.0.1, its oplog reaches back 2 h" in text
    assert "3,456 rows in 12 batches, complete up to 2023-11-14 22:13:20 UTC, 5 s behind, headroom 2 h, 250 events/s" in text
    assert "written by process 17 on host-a (lease 80 s)" in text
    assert "shop.orders 10 so far 100 7 (1 min 5 s) – 3 2" in text
    assert "incomplete" not in text


def test_status_shows_what_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """A history that stands still, beside one that is not kept, and a gold table whose first version was refused."""
    kept = _layer(rows=9), _layer(rows=8, rate=3.0), 0, 0, None, None, _layer(version=-1, lag_events=7, lag_seconds=65)
    refused, empty = _layer(rows=9, deleted=2, incomplete=6), _layer(rows=9, deleted=3, incomplete=6)
    found = (
        status.CollectionStatus("shop.kept", None, *kept),
        status.CollectionStatus("shop.new", None, refused, None, 0, 0),
        status.CollectionStatus("shop.old", None, empty, None, 0, 0),
    )
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus(), None, found), capsys)
    assert "silver waits /s gold waits /s history waits /s" in text
    assert "shop.kept 9 0 8 0 3 0 7 (1 min 5 s)" in text
    assert "shop.new: gold has no version of it yet; medallion gold publishes it, or tells why" in text
    assert "shop.old 9 0 – –" in text and "shop.old:" not in text


def test_status_before_anything_ran_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a source that answers nor a table: still a status."""
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus(problem="no server answered"), None, ()), capsys)
    assert "no server answered" in text and "medallion capture begins it" in text


def test_a_position_behind_the_oplog_is_called_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative headroom is said in words."""
    log = status.BronzeStatus("bronze", 1, 1, 100, 0, -5, None, None)
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus("MongoDB 6.0.5", 100, 105), log, ()), capsys)
    assert "headroom 0 s (the position is lost)" in text and "no writer" in text
