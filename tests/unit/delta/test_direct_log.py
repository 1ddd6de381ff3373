"""Commits through Delta's log, without Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.delta import checkpoint_writer, direct_log


@pytest.mark.parametrize(("seconds", "listed"), [(0.01, 21), (3.0, 2)])
def test_a_long_log_is_not_listed_for_each_checkpoint(
    seconds: float, listed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing a log of a month of commits per second takes seconds: done for every checkpoint, it would use a whole core for twenty
    tables."""
    now, lists = [0.0], [0]

    def newest() -> None:
        now[0] += seconds
        lists[0] += 1

    log: Any = SimpleNamespace(store=SimpleNamespace(is_remote=False, folder=tmp_path), _interval=500, _newest=newest)
    monkeypatch.setattr(direct_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint_writer, "write", lambda *_: True)
    for version in range(1001):
        direct_log._checkpointed(log, version)
        now[0] += 1
    assert lists[0] == listed
