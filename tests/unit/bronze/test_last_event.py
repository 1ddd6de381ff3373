"""The last event before bronze's position, by which a start knows the source again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cdc_core.bronze.last_event import LastEvent
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log

AN_EVENT, ANOTHER = (f"826B0137A50000000{number}2B042C0100296E5A1004{'AB' * 16}461E5F6964002B020004" for number in (1, 3))
A_TIME, LATER_TIME = (f"826B0137A50000000{number}2B0429296E1404" for number in (2, 4))


def test_a_position_without_an_event_comes_with_the_event_before_it() -> None:
    """A position that is an event needs no other."""
    assert LastEvent.of({}, AN_EVENT) == LastEvent(AN_EVENT)
    assert LastEvent.of({}, A_TIME) == LastEvent.of({}, None) == LastEvent()
    assert LastEvent(AN_EVENT).metadata(AN_EVENT) == LastEvent().metadata(A_TIME) == {}
    metadata = LastEvent(AN_EVENT).at(A_TIME).metadata(A_TIME)
    assert metadata == {"event": AN_EVENT}
    assert LastEvent.of(metadata, A_TIME) == LastEvent(AN_EVENT)
    assert LastEvent.of(metadata, ANOTHER) == LastEvent(ANOTHER)


def test_a_forgotten_event_does_not_come_back() -> None:
    """Of another source, or of a stream with another filter: until the next event none is known."""
    unknown = LastEvent(forgotten=AN_EVENT)
    assert unknown.at(AN_EVENT) == unknown.at(A_TIME) == unknown
    assert unknown.at(ANOTHER) == LastEvent(ANOTHER)


def test_commits_at_a_forgotten_position_tell_so() -> None:
    """A start with the same filter does not look for this event either. A time is in every stream."""
    metadata = LastEvent(forgotten=AN_EVENT).metadata(AN_EVENT)
    assert LastEvent.of(metadata, AN_EVENT).is_forgotten(AN_EVENT)
    assert not LastEvent.of(metadata, ANOTHER).is_forgotten(ANOTHER)
    assert LastEvent(forgotten=A_TIME).metadata(A_TIME) == LastEvent(forgotten=AN_EVENT).metadata(A_TIME) == {}


def test_commits_carry_the_last_event() -> None:
    commits: list[dict[str, Any]] = []
    writer: Any = SimpleNamespace(metadata={}, append_arrow=lambda *_, extra, **__: commits.append(extra))
    nothing: Any = None
    log = bronze_log.BronzeLog(nothing, tables.TableRef.at("/lake/bronze/shop"), writer, None)
    for token in (AN_EVENT, A_TIME, ANOTHER, LATER_TIME):
        log.heartbeat({}, token=token, ts_ms=0)
    assert [extra.get("event") for extra in commits] == [None, AN_EVENT, None, ANOTHER]
