"""When an outage of the source is logged."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo import errors as driver

from pipelines.mongodb import change_stream


@pytest.mark.parametrize(("lasts", "lines"), [(0.0, 0), (0.1, 2)])
def test_an_outage_begins_with_the_first_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lasts: float, lines: int
) -> None:
    """An election is not logged, even if the stream was not read for a while because rows waited for their commit.

    An outage that lasts is logged with its reason, and its end too.
    """
    nothing: Any = None
    stream = change_stream.ChangeStream(nothing, change_stream.StreamOptions(), change_stream.StreamStart(), initial_delay=0)
    monkeypatch.setattr(change_stream, "OUTAGE_SECONDS", 0.1)
    monkeypatch.setattr(stream, "_cursor", SimpleNamespace(is_open=True, forget=lambda: None))
    answers = iter([True, False, False, False, True])

    def more() -> change_stream.EventBatch:
        time.sleep(lasts if stream.attempts else 0)
        if next(answers):
            return change_stream.EventBatch([], "82", 1, is_drained=True)
        raise driver.ServerSelectionTimeoutError('No replica set members available for replica set name "rs0", Timeout: 30s')

    monkeypatch.setattr(stream, "_more", more)
    stream.next()
    time.sleep(0.15)
    stream.next()
    assert len(caplog.records) == lines
    assert all('for replica set name "rs0")' in message for message in caplog.messages[:1])
