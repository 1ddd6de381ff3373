"""Whether the process that holds a table's claim is alive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.delta import owners


def test_a_process_that_proc_hides_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc hides other users' processes (hidepid, ProtectProc), another user's service must not count as dead."""
    read = Path.read_text

    def hidden(path: Path, *arguments: object) -> str:
        if path == Path("/proc", str(os.getppid()), "stat"):
            raise FileNotFoundError(path)
        return read(path)

    started = owners._started(os.getppid())
    assert owners._is_alive(os.getppid(), started) and not owners._is_alive(os.getppid(), "another boot:7")
    monkeypatch.setattr(Path, "read_text", hidden)
    assert owners._is_alive(os.getppid(), started)
