"""How the commands show progress and status."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cdc_core import errors
from pipelines.capture.progress import CaptureProgress
from pipelines.operations import cut, findings, maintain, model_status, quarantine, repair, schema, status, units
from pipelines.silver import run as silver
from pipelines.snapshot.snapshot import SnapshotProgress
from pipelines.terminal import live_lines
from pipelines.terminal import tables as report

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("seconds", "told"),
    ((0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h"), (86400 * 400 + 60, "400 d 1 min")),
)
def test_a_length_of_time_is_told_in_two_units(seconds: float, told: str) -> None:
    assert units.duration(seconds) == told


def test_a_rate_is_that_of_the_last_ten_seconds() -> None:
    """The rate of a count that stops growing falls to zero."""
    now = iter((0.0, 5.0, 9.0, 30.0, 35.0))
    rate = live_lines.Rate(clock=lambda: next(now))
    assert [rate.of(count) for count in (0, 500, 900, 900, 900)] == [0, 100, 100, 0, 0]


def test_a_rate_is_of_a_hundred_counts_however_often_it_is_told() -> None:
    """A stream that returns its events one by one reports a thousand counts per second: keeping all of them used a whole core."""
    now = iter(number / 1000 for number in range(30_000))
    rate = live_lines.Rate(clock=lambda: next(now))
    rates = [rate.of(count) for count in range(30_000)]
    assert rates[-1] == pytest.approx(1000) and len(rate._seen) <= 101


def test_progress_tells_the_snapshot_and_the_stream() -> None:
    """Documents read, estimated total, rate and time left; then events, rate and lag."""
    snapshot = SnapshotProgress("shop.orders", 500, 1000, 2500, 10_000, 1250.0, 6.0)
    line = live_lines.described(CaptureProgress(events=1234, lag_seconds=1.6, snapshot=snapshot), rate=99.5)
    assert line == (
        "snapshot of shop.orders: 2,500 of about 10,000 documents, 1,250/s, 6 s left · "
        "stream: 1,234 events, 100/s, 2 s behind"
    )


def test_a_quiet_stream_is_not_behind() -> None:
    """The lag is the last commit's: with no event since, the line said "30 s behind" while nothing waited."""
    assert live_lines.described(CaptureProgress(events=5, lag_seconds=30.0), rate=0.0) == "stream: 5 events, 0/s"


NAME = "shop.a[/b] [red] :apple:"
"""A collection's name that looks like Rich markup."""


def _cut_of(name: str) -> None:
    report.cut(cut.Cut("1-1", 0, f"{1:016x}", f"{2:016x}", 1, "exact", (), (cut.CutTable(name, "x", 1),)))


@pytest.mark.parametrize(
    "show",
    [
        lambda name: report.findings([findings.Finding(f"snapshot of {name}", findings.CheckVerdict.WRONG, "refused")]),
        lambda name: report.findings([findings.Finding("collections", findings.CheckVerdict.WRONG, name, name)]),
        lambda name: report.replayed({name: quarantine.ReplayResult(1, 2)}),
        lambda name: report.status(status.PipelineStatus("shop", 0, status.ServerStatus(), None, (_collection(name),))),
        _cut_of,
    ],
)
def test_a_name_is_shown_as_it_is(show: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """A bracket in a collection's name causes no error and is not lost, and control characters are escaped."""
    show(NAME)
    assert NAME in capsys.readouterr().out
    show("shop.\x1b[2J\x9b")
    shown = capsys.readouterr().out
    assert r"shop.\x1b[2J\x9b" in shown and shown.replace("\n", "").isprintable()


def test_a_check_is_shown_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path or a command that is longer than its column goes on in the next line: cut, it would be of no use."""
    path = f"/data/{'x' * 50}/tables"
    monkeypatch.setattr(report, "console", lambda: report.Console(width=40))
    report.findings([findings.Finding("lakehouse", findings.CheckVerdict.FINE, path)])
    assert path in "".join(capsys.readouterr().out.split())


def test_a_terminal_obeys_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of fields and keys may contain control characters and line breaks, which are escaped."""
    name = "a\x1b[2J\nb\u202ec\x9b"
    change = schema.SchemaLogEntry(1, name, "added", None, "INT", 1, None, None)
    report.schemas([schema.SchemaHistory("shop.orders", 1, (schema.SilverColumn(name, "INT"),), (change,))])
    held = quarantine.QuarantinedEvent("shop.orders", "t", "change", "c", name, "s", 1, "r", quarantine.EventState.HELD)
    report.quarantined([held])
    shown = capsys.readouterr().out
    assert shown.count(r"a\x1b[2J\nb\u202ec\x9b") == 3 and shown.replace("\n", "").isprintable()


def test_of_many_events_in_quarantine_the_first_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million lines would take an hour on a terminal, and too much memory."""
    monkeypatch.setattr(report, "SHOWN_EVENTS", 3)
    held = quarantine.QuarantinedEvent("shop.orders", "t", "change", "c", "1", "s", 1, "r", quarantine.EventState.HELD)
    report.quarantined([held] * 3)
    whole = capsys.readouterr().out.splitlines()
    report.quarantined([held] * 4)
    *same, more = capsys.readouterr().out.splitlines()
    assert same == whole and more.startswith("and more than these 3: --json lists all of them")


def test_a_capture_goes_on_whatever_its_collections_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is a live line on a terminal."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with live_lines.capture_progress() as hear:
        hear(CaptureProgress(events=1, snapshot=SnapshotProgress(NAME, 1, 2, 1, 2, 1.0, 6.0)))
    assert NAME in terminal.getvalue()


def test_what_is_waited_for_is_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with live_lines.waiting("checking"), live_lines.waiting("starting Spark"):
        pass
    assert stream.getvalue() == ""


def test_a_live_line_says_what_is_waited_for_inside_it() -> None:
    """A capture said that it was connecting while Spark started, which takes longest."""
    written, _ = _on_a_terminal(
        "import time; from pipelines.terminal import live_lines\n"
        "with live_lines.capture_progress():\n"
        "    with live_lines.waiting('starting Spark'):\n        time.sleep(0.5)\n"
        "    time.sleep(0.5)\n"
        "with live_lines.waiting('checking'):\n    pass"
    )
    assert re.search(r"starting Spark[^\n]*capture: connecting[^\n]*\n.*checking", written), repr(written)


def _on_a_terminal(program: str) -> tuple[str, int]:
    """What a program writes to a terminal, and its return code."""
    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    code = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, stderr=far, check=False).returncode
    os.close(far)
    with open(near, "rb", buffering=0) as terminal:
        return terminal.read(100_000).decode(), code


def test_a_log_line_is_no_part_of_a_live_line() -> None:
    """The log of silver and gold is configured before their live line is shown."""
    written, _ = _on_a_terminal(
        "import logging; from jobs import log_lines; from pipelines.terminal import live_lines; log_lines.configure()\n"
        "with live_lines.waiting('starting Spark'):\n    logging.warning('one'); logging.warning('two')"
    )
    # Between them the live line is drawn below the first one, and then removed.
    assert re.search(r"one\r\n.*starting Spark\r\x1b\[2K[^\r\n]* two\r\n", written), repr(written)


def test_a_terminal_has_its_cursor_after_sigterm() -> None:
    """`timeout 9 medallion check` ended with the line of what it was waiting for, and without a cursor."""
    written, code = _on_a_terminal(
        "import os, signal; from pipelines.terminal import live_lines\n"
        "with live_lines.waiting('checking'):\n    os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    )
    assert (code, written.rpartition("\x1b[?25")[2]) == (-signal.SIGTERM, "h"), repr(written)


def _collection(name: str) -> status.CollectionStatus:
    return status.CollectionStatus(name, None, None, None, 0, 0, problem=f"{name} is damaged")


def test_the_line_at_the_end_of_a_run_has_seconds_as_one_reads_them(caplog: pytest.LogCaptureFixture) -> None:
    """Seconds are rounded to milliseconds."""
    with caplog.at_level(logging.INFO):
        report.result("silver", silver.SilverResult(batch=3, events=250, seconds=1.6047282039999118))
    (line,) = caplog.records
    assert line.getMessage() == "silver done" and vars(line)["seconds"] == 1.605
    assert line.name == "pipelines.silver.run"  # the same logger as its other lines


@pytest.mark.parametrize(
    ("verb", "says"),
    (
        ("silver", "/lakehouse/bronze/shop: bronze is empty: run medallion capture first"),
        ("gold", "silver has no collections: run medallion silver first"),
    ),
)
def test_a_run_before_the_layer_below_it_says_what_comes_first(tmp_path: Path, verb: str, says: str) -> None:
    """There is nothing to do, and Spark is not started. The exit code is 0, for a scheduler that is a minute early."""
    (tmp_path / "shop.yml").write_text(
        f"name: shop\nlakehouse: {{root: '{tmp_path}/lakehouse'}}\nsource: {{mongodb.connection.string: mongodb://nowhere.invalid}}\n"
    )
    asked = [sys.executable, "-m", "jobs", verb, "--config", str(tmp_path / "shop.yml")]
    run = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and says in run.stderr and f"{verb} done" in run.stderr, run.stderr


def test_maintenance_of_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and no table without rows."""
    report.maintained(maintain.MaintenanceResult("shop", (), seconds=0.0))
    assert capsys.readouterr().out == "there are no tables yet: start the pipeline first\n"


def test_a_repair_says_no_more_than_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """No log tells of a table whose folder is gone. A dry run restores nothing."""
    report.repaired([])
    assert capsys.readouterr().out == "no files are missing in the tables that are there\n"
    lost = repair.RepairResult("/silver/shop/a", ("a.parquet",), 1, "medallion silver will apply all of bronze again", None)
    report.repaired([lost, replace(lost, version=7)])
    trial, done = capsys.readouterr().out.splitlines()
    assert "nothing was changed. After a repair: medallion silver will" in trial
    assert "missing files: 1; files removed from the table: 1. medallion silver will" in done


def test_the_newest_of_no_cuts_is_none_yet() -> None:
    """The error says how to make one."""
    with pytest.raises(errors.SettingsError, match="there is no cut yet .*make one with medallion gold --as-of now"):
        cut.named((), None)


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
    """A line for the source, one for bronze, and one per collection with the backlog of each layer."""
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
    assert "MongoDB 7.0.1, oplog reaches back 2 h" in text
    assert "3,456 rows in 12 batches, complete up to 2023-11-14 22:13:20 UTC, 5 s behind, headroom 2 h, 250 events/s" in text
    assert "written by process 17 on host-a (lease 80 s)" in text
    assert "shop.orders 10 so far 100 7 (1 min 5 s) – 3 2" in text
    assert "incomplete" not in text


def test_status_is_whole_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 80 columns, large numbers left no room for the name of the collection, and were cut off themselves."""
    layer = _layer(rows=1_234_567, lag_events=12_345, lag_seconds=65, rate=1200.0)
    orders = status.CollectionStatus("shop.customer_orders", None, layer, layer, 0, 0, history=layer)
    server = status.ServerStatus("MongoDB 7.0.1", 1_700_000_005, 1_699_992_800)
    monkeypatch.setattr(report, "console", lambda: Console(width=80))
    text = _shown(status.PipelineStatus("shop", 0, server, None, (orders,)), capsys)
    assert f"shop.customer_orders{' 1,234,567 12,345 (1 min 5 s) 1,200' * 3}" in text


def test_status_shows_what_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """A history that stands still, beside one that is not kept, and a gold table whose first version was refused."""
    kept = _layer(rows=9), _layer(rows=8, rate=3.0), 0, 0, None, None, _layer(version=-1, lag_events=7, lag_seconds=65)
    refused, empty = _layer(rows=9, deleted=2, incomplete=6), _layer(rows=9, deleted=3, incomplete=6)
    found = (
        status.CollectionStatus("shop.found", None, None, None, 1234, 0),
        status.CollectionStatus("shop.kept", None, *kept),
        status.CollectionStatus("shop.new", None, refused, None, 0, 0),
        status.CollectionStatus("shop.old", None, empty, None, 0, 0),
    )
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus(), None, found), capsys)
    assert "silver backlog /s gold backlog /s history backlog /s" in text
    assert "shop.found – 1,234 –" in text
    assert "shop.kept 9 0 8 0 3 0 7 (1 min 5 s)" in text
    assert "shop.new: not in gold yet; run medallion gold" in text
    assert "shop.old 9 0 – –" in text and "shop.old:" not in text


def test_status_names_the_models_that_are_not_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Their collections are all up to date, and no other line tells of them."""
    found = (model_status.ModelStatus("fine", "current", 5), model_status.ModelStatus("late", "behind", 7200))
    waits = model_status.ModelStatus("new", "waits", why="shop.x: not in gold yet")
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus(), None, (), models=(*found, waits)), capsys)
    assert "model late: behind, made 2 h ago model new: waits, never made: shop.x: not in gold yet" in text
    assert "fine" not in text


def test_status_before_anything_ran_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an answer from the source and without tables there is still a status."""
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus(problem="no server answered"), None, ()), capsys)
    assert "no server answered" in text and "run medallion capture first" in text


def test_a_position_behind_the_oplog_is_called_lost(capsys: pytest.CaptureFixture[str]) -> None:
    log = status.BronzeStatus("bronze", 1, 1, 100, 0, -5, None, None)
    text = _shown(status.PipelineStatus("shop", 0, status.ServerStatus("MongoDB 6.0.5", 100, 105), log, ()), capsys)
    assert "headroom 0 s (the position is lost)" in text and "no writer" in text


def test_a_service_without_a_terminal_says_that_it_is_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and then regularly: the log shows early that the source is followed."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO), live_lines.capture_progress() as hear:
        hear(CaptureProgress())
        hear(CaptureProgress(events=1))
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("pipelines.capture.service", "progress: stream: 0 events, 0/s")
    ]
