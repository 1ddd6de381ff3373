"""The folder for files that live as long as a process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pipelines.spark import scratch

GONE = 2**22 + 1
"""Linux has no process with such a number."""


def test_what_gone_processes_left_goes_but_for_their_last_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error that ended a process may name its log. Files of running processes also stay on systems without /proc."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to("/proc") and os.path.exists(path))
    mine = scratch.folder()
    kept = {
        mine / name for name in (f"spark-{os.getpid()}.log", f"packages-{os.getpid()}.zip", "delta-jars-4-123456789012.txt")
    }
    logs = [mine / f"spark-{GONE + number}.log" for number in range(scratch.KEPT_LOGS + 2)]
    for at, each in enumerate((*kept, *logs, mine / f"chunk-a-{GONE}.arrow")):
        each.touch()
        os.utime(each, (at, at))
    folders = [mine / f"spark-{number}.tmp" for number in (os.getpid(), GONE)]
    for each in folders:
        (each / "more").mkdir(parents=True)
    assert scratch.folder() == mine
    assert {*mine.iterdir()} == {*kept, *logs[2:], folders[0]}
