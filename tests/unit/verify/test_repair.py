"""A repair waits for the running capture as long as it makes progress."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from cdc_core.tables.layout import Layer
from pipelines.capture import service as capture
from pipelines.gold import publish
from pipelines.silver import run as silver
from pipelines.verify import repair

SETTINGS = settings.parse(
    {"name": "hand", "lakehouse": {"root": "/nowhere"}, "source": {"mongodb.connection.string": "${env:NOWHERE}"}}
)
SIGNALS = [f"repair-{number}" for number in range(10)]


class Clock:
    """Time advances with each wait; every `pace` seconds the capture has read the keys of one more signal."""

    def __init__(self, pace: float | None) -> None:
        self.now, self.pace = 0.0, pace

    def monotonic(self) -> float:
        return self.now

    def wait(self, _: float) -> bool:
        self.now += 50
        return False

    def states(self, _: Any) -> list[Any]:
        done = SIGNALS[: int(self.now / self.pace)] if self.pace else []
        return [SimpleNamespace(signal=each, is_done=True) for each in done]


def waited(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(repair, "time", clock)
    monkeypatch.setattr(repair.snapshot_state, "states", clock.states)
    monkeypatch.setattr(repair.bronze_log, "snapshot_heartbeats", lambda *_: [])
    monkeypatch.setattr(repair.bronze_log, "handled_signal_ids", lambda *_: set())
    repair._wait(None, SETTINGS, SIGNALS, stop=clock)  # type: ignore[arg-type]


def test_many_signals_are_waited_for_while_one_after_the_other_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(pace=repair.SIGNAL_SECONDS - 50)
    waited(monkeypatch, clock)
    assert clock.now > 2 * repair.SIGNAL_SECONDS


def test_a_capture_that_takes_none_up_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.Temporary, match="repair-0, repair-1, repair-2 are still waiting"):
        waited(monkeypatch, Clock(pace=None))


@pytest.mark.parametrize("is_done", [True, False])
def test_a_pause_that_holds_the_repair_back_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_done: bool
) -> None:
    """Otherwise nothing explains why the same keys still differ after it."""
    for layer in (capture, silver, publish):
        monkeypatch.setattr(layer, "run", lambda *_, **__: None)
    monkeypatch.setattr(repair.sparks, "sessions", lambda _: lambda: None)
    read = CollectionState(chunks=1, completed=is_done)
    states = SnapshotState("s", ("shop.a",), {"shop.a": read}, SnapshotKind.INCREMENTAL, signal="repair-1")
    monkeypatch.setattr(repair.bronze_log, "snapshot_heartbeats", lambda *_: [states.begun(), states.progress("shop.a")])
    unused: Any = None
    repair._run(unused, SETTINGS, ["repair-1"], layer=Layer.GOLD, stop=threading.Event())
    assert ("resume-snapshot" in caplog.text) is not is_done
