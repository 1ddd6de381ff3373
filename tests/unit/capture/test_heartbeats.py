"""How far bronze says that it is complete, to those who ask."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.capture import heartbeats

EVENT = "826B0137A5000000012B022C0100296E5A1004A15E3B936AF64823BE0BB493BC4F795A46645F696400646B0137A401E6691CEBC3F6C70004"
MARK = "826B0137A5000000012B0229296E04"
LATER = "826B0137AF000000012B0229296E04"


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ([(EVENT, False), (EVENT, True), (EVENT, True)], ["826B0137A500000002"]),  # that whole time, not only its beginning
        ([(MARK, True), (LATER, True), (LATER, True)], [LATER]),  # a mark may come before the events of its own time
    ],
)
def test_a_capture_that_is_asked_says_at_once_how_far_it_has_read(reads: list[tuple[str, bool]], said: list[str]) -> None:
    """One answer for each time that the stream reaches, and none that the rows already give: a cut does not wait for the lease."""
    told: list[Any] = []
    committed = SimpleNamespace(token=EVENT)
    log: Any = SimpleNamespace(position=committed, numbered=1, renew=lambda *, complete: told.append(complete))
    beats = heartbeats.Heartbeats(log, 0, 0.0, threading.Event())
    for token, is_drained in reads:
        beats.commit_requested.set()
        beats.answer(token, is_drained=is_drained)
    assert told == said
