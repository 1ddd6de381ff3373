"""Where a stream starts, and where it must not."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.properties.source import SnapshotMode
from pipelines.bronze import log as bronze
from pipelines.capture import stream_opener
from pipelines.mongodb import change_stream

NOW = 0x66000000


@pytest.mark.parametrize("ahead", [0, 3600])
def test_another_deployment_whose_clock_is_behind_is_not_captured_into_these_tables(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Its snapshot would also count as older than the existing documents. A deployment whose clock is not behind gets a gap and a
    snapshot."""
    monkeypatch.setattr(stream_opener.mongodb_server, "operation_time", lambda _: Timestamp(NOW, 1))
    monkeypatch.setattr(stream_opener.catalog, "database_names", lambda _: [])
    accepted: Any = SimpleNamespace(begins="begins")
    monkeypatch.setattr(stream_opener.StreamOpener, "_first_accepted", lambda *_: accepted)
    deployment: Any = SimpleNamespace(client=None, source=SimpleNamespace(snapshot_mode=SnapshotMode.WHEN_NEEDED))
    opener = stream_opener.StreamOpener(
        deployment, change_stream.StreamOptions(), threading.Event(), replica_sets=("rs-before", "rs-now")
    )
    position = bronze.BronzePosition(f"82{NOW + ahead:08X}000000012B022C0100296E04", 1, 1)
    if ahead:
        with pytest.raises(errors.SourceUnsuitable, match="behind bronze's position"):
            opener.open_or_restart(position)
    else:
        assert opener.open_or_restart(position).gap is not None


def test_the_time_of_another_deployment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock may be slightly behind: documents from an earlier snapshot would count as older than the existing ones, and be ignored."""
    times = [NOW - 40, NOW - 2, NOW - 1, NOW]
    monkeypatch.setattr(stream_opener.mongodb_server, "operation_time", lambda _: Timestamp(times.pop(0), 1))
    opened: list[int] = []
    accepted: Any = SimpleNamespace(begins="begins")
    monkeypatch.setattr(stream_opener.StreamOpener, "_first_accepted", lambda *_: opened.append(len(times)) or accepted)
    deployment: Any = SimpleNamespace(client=None, source=SimpleNamespace(snapshot_mode=SnapshotMode.WHEN_NEEDED))
    halt: Any = SimpleNamespace(wait=lambda seconds: None)
    opener = stream_opener.StreamOpener(deployment, change_stream.StreamOptions(), halt, replica_sets=("before", "now"))
    position = bronze.BronzePosition(f"82{NOW:08X}000000012B022C0100296E04", 1, 1)
    assert opener.open_or_restart(position).gap is not None and opened == [0]
    times += [NOW - 1] * 1000
    with pytest.raises(errors.SourceUnreachable, match="has not reached"):
        opener.open_or_restart(position)


def test_a_start_in_the_servers_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts it and sends nothing until then. A snapshot would be taken now, and the changes in between would be lost."""
    monkeypatch.setattr(stream_opener.mongodb_server, "operation_time", lambda _: Timestamp(NOW, 1))
    monkeypatch.setattr(stream_opener.catalog, "database_names", lambda _: [])
    starts: list[change_stream.StreamStart] = []
    accepted: Any = SimpleNamespace(begins="begins")
    monkeypatch.setattr(
        stream_opener.StreamOpener, "_first_accepted", lambda _, places, __: starts.extend(places) or accepted
    )
    for seconds, is_refused in ((NOW + 3600, True), (NOW, False)):
        source = SimpleNamespace(capture_start_op_time=seconds << 32 | 7, snapshot_mode=SnapshotMode.INITIAL)
        deployment: Any = SimpleNamespace(client=None, source=source)
        opener = stream_opener.StreamOpener(deployment, change_stream.StreamOptions(), threading.Event())
        with (
            pytest.raises(errors.SettingsError, match="start.op.time: it is in") if is_refused else contextlib.nullcontext()
        ):
            opener.open_or_restart(None)
    assert starts == [change_stream.StreamStart(at=Timestamp(NOW, 7))]
