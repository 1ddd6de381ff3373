"""A repair waits for the running capture as long as it gets on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines.verify import repair

SETTINGS = settings.parse(
    {"name": "hand", "lakehouse": {"root": "/nowhere"}, "source": {"mongodb.connection.string": "${env:NOWHERE}"}}
)
SIGNALS = [f"repair-{number}" for number in range(10)]


class Clock:
    """Time that passes where one waits; every `pace` seconds the capture has read one signal's keys again."""

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
    with pytest.raises(errors.Temporary, match="repair-0, repair-1, repair-2 wait for it"):
        waited(monkeypatch, Clock(pace=None))
