"""What the demo says where nobody looks at a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipelines.capture.progress import CaptureProgress
from pipelines.demo import run as demo


def test_plain_lines_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at once and then one every ten seconds, each with the whole picture and without control characters."""
    now = [100.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    played = demo.DemoRun(capture=CaptureProgress(events=1234))
    with demo.telling(Console(file=out, width=120)) as tell:
        for seconds in (0, 3, 9, 10, 15, 21):
            now[0] = 100.0 + seconds
            tell("Starting" if seconds < 10 else demo._picture(played, "The shop is open"))
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["0", "s"], ["10", "s"], ["21", "s"]]
    assert "Starting" in lines[0] and "The shop is open" in lines[1] and "1,234 events" in lines[1]
    assert out.getvalue().isprintable() or "\x1b" not in out.getvalue()
