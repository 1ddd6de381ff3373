"""Successive runs of the capture."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from pipelines.capture import service
from pipelines.capture.capture import Capture, CaptureService
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


def test_a_capture_whose_table_is_gone_does_not_start_over_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A restart would make a new table where the old one was moved away, or where its disk is not mounted."""

    def run(**_: object) -> CaptureResult:
        raise errors.CommitConflict("its folder was removed while it was written")

    @contextlib.contextmanager
    def connected(_: object) -> Iterator[Any]:
        yield SimpleNamespace(run=run)

    monkeypatch.setattr(service, "_connected", connected)
    found = dataclasses.replace(SETTINGS, lakehouse=dataclasses.replace(SETTINGS.lakehouse, root=str(tmp_path)))
    nothing: Any = None
    with pytest.raises(errors.DecisionNeeded, match="gone"):
        service.run(nothing, found)
    log = tmp_path / "bronze" / "shop" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").touch()
    with pytest.raises(errors.CommitConflict):
        service.run(nothing, found)


def test_a_failed_snapshot_of_a_signal_is_told_after_a_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken again, so the next run has nothing of its own to tell. A collection that a later snapshot reads is not told."""
    nothing: Any = None
    outcomes = [
        {"shop.a": CollectionState(failed="its filter fails"), "shop.b": CollectionState(failed="its filter fails")},
        {"shop.b": CollectionState(completed=True)},
    ]

    def run(self: Any, **_: object) -> CaptureResult:
        self._log = SimpleNamespace(commits=1, position=None)
        self._counts.begin(commits=0)
        snapshots, collections = self._snapshots(self._log), outcomes.pop(0)

        def taken(state: SnapshotState, _: object) -> Any:
            """A snapshot that ends with these collections, and the run with it."""
            ended = SimpleNamespace(state=state, has_paused=False)

            def read() -> None:
                ended.state = dataclasses.replace(state, collections=collections)
                snapshots.halt.set()

            ended.run = read
            return ended

        snapshots.taking = taken
        snapshots.add(SnapshotState("asked", tuple(collections), kind=SnapshotKind.INCREMENTAL))
        snapshots.run()
        if outcomes:
            raise errors.SourceUnreachable("away")
        return self.result()

    @contextlib.contextmanager
    def connected(given: CaptureService) -> Iterator[Capture]:
        yield Capture(given, nothing, nothing)

    monkeypatch.setattr(Capture, "run", run)
    monkeypatch.setattr(service, "_connected", connected)
    assert service.run(nothing, SETTINGS).failed_snapshots == {"shop.a": "its filter fails"}
