"""How the thread that reads the stream ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from pipelines.bronze import log as bronze_log
from pipelines.capture import byte_queue, reader, threads
from pipelines.mongodb import failures as mongodb_failures


@pytest.mark.parametrize(("replaces", "error"), [(True, errors.SourceUnreachable), (False, errors.PositionLost)])
def test_an_oplog_that_overtakes_the_stream_ends_the_run(replaces: bool, error: type[Exception]) -> None:
    """If `snapshot.mode` answers a lost position with a snapshot, the capture starts over, and the error does not recommend that mode."""

    def overtaken() -> None:
        raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)

    stream: Any = SimpleNamespace(next=overtaken, close=lambda: None)
    log: Any = SimpleNamespace(position=bronze_log.BronzePosition("8265A1B2C3000000012B022C010029", 1, 1))
    running, nothing = threads.Threads(byte_queue.ByteQueue(10)), SimpleNamespace()
    reader.StreamReader(stream, running, log, nothing, nothing, replaces_lost_position=replaces).run()  # type: ignore[arg-type]
    assert type(running.stream_failure) is error
    assert ("when_needed" in str(running.stream_failure)) is not replaces
