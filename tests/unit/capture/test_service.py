"""Successive runs of the capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines.capture import service
from pipelines.capture.progress import NOTHING, CaptureResult

SETTINGS = settings.parse(
    {
        "name": "shop",
        "lakehouse": {"root": "lake"},
        "source": {"mongodb.connection.string": "mongodb://localhost", "retriable.restart.connector.wait.ms": 0},
    }
)


def test_a_table_is_taken_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--take-over` refers to the owner at that moment: who claimed the table while the source was away keeps it."""
    taken: list[bool] = []

    def run(*, once: bool, take_over: bool) -> CaptureResult:
        taken.append(take_over)
        if len(taken) < 3:
            raise errors.SourceUnreachable("away")
        return NOTHING

    @contextlib.contextmanager
    def connected(_: object) -> Iterator[Any]:
        yield SimpleNamespace(run=run, has_begun=True, has_progressed=False, attempts=1, result=lambda: NOTHING)

    monkeypatch.setattr(service, "_connected", connected)
    nothing: Any = None
    service.run(nothing, SETTINGS, take_over=True)
    assert taken == [True, False, False]
