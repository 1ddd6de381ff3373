"""Quiet hours: which minutes they contain, and that tables are maintained once in each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from cdc_core import errors
from cdc_core.settings import parse
from pipelines import run as pipeline
from pipelines.delta import tables as delta
from pipelines.operations import maintain

SMALLEST = {"name": "shop", "lakehouse": {"root": "lake"}, "source": {"mongodb.connection.string": "mongodb://localhost"}}


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("02:00-05:00", (120, 299), (119, 300)), ("22:30-01:00", (1350, 1439, 0, 59), (60, 1349))],
)
def test_a_part_of_the_day_may_go_over_midnight(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    """They contain the start, and not the end."""
    quiet = parse.parse({**SMALLEST, "maintenance": {"quiet.hours": text}}).maintenance.quiet_hours
    assert quiet is not None
    assert all(map(quiet.holds, inside)) and not any(map(quiet.holds, outside))


@pytest.mark.parametrize(
    ("text", "says"),
    [("2-5", "a time of day in UTC is expected, found 2-5"), ("02:00-02:00", "two times of day are expected, found 02:00")],
)
def test_what_holds_no_minute_of_the_day_is_refused(text: str, says: str) -> None:
    """The message has the setting's path, what is expected, and an example."""
    with pytest.raises(errors.SettingsError, match=f"maintenance.quiet.hours: {says}"):
        parse.parse({**SMALLEST, "maintenance": {"quiet.hours": text}})


def test_tables_are_maintained_once_each_time_and_a_failure_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three simulated days maintenance runs once each day, and fails on the second."""
    settings = parse.parse({**SMALLEST, "maintenance": {"quiet.hours": "02:00-05:00"}})
    stop, minutes, asked = threading.Event(), iter(range(3 * 1440)), []

    def now_ms() -> int:
        minute = next(minutes, None)
        if minute is None:
            stop.set()
            return 0
        return minute * 60_000

    def act() -> None:
        asked.append(True)
        if len(asked) == 2:
            raise errors.CommitConflict("other commits came first")

    monkeypatch.setattr(pipeline.clock, "now_ms", now_ms)
    monkeypatch.setattr(pipeline, "LOOK_SECONDS", 0.0)
    assert pipeline._kept(settings, act, stop=stop) == 2
    assert len(asked) == 3


def test_what_stays_is_told_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For example events that are kept in bronze because rows wait for them: some users only read the log."""
    settings = parse.parse({**SMALLEST, "maintenance": {"quiet.hours": "00:00-23:59", "bronze.retention.days": 30}})
    size, stop = delta.TableSize(1, 10), threading.Event()
    left = maintain.TableResult("bronze/shop", maintain.TableKind.BRONZE, size, size, left=("events stay",))

    claims = []

    def run(*_: object, capture: object, **__: object) -> maintain.MaintenanceResult:
        stop.set()
        claims.append(capture)
        return maintain.MaintenanceResult("shop", (left,), 0.0)

    monkeypatch.setattr(maintain, "run", run)

    def captured(*_: object, opened: Callable[[str], None], **__: object) -> None:
        opened("bronze")
        layers._maintain(stop)
        stop.clear()

    monkeypatch.setattr(pipeline.capture, "run", captured)
    with caplog.at_level(logging.INFO, logger=pipeline.log.name):
        layers = pipeline._Run(settings, lambda: None, False, False, stop, None)  # type: ignore[arg-type, return-value]
        layers._capture(stop)
        layers._maintain(stop)
    assert [each.getMessage() for each in caplog.records] == ["bronze/shop: events stay"] * 2
    assert claims == ["bronze", None], (
        "what goes from bronze goes under the claim of the capture that holds it, while there is one"
    )
