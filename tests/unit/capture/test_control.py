"""What the capture does in response to events, with events as the server sends them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.bronze import event_rows as events
from cdc_core.signals import signal as signals
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import patterns
from pipelines.capture import control
from pipelines.capture.control import ControlEvents
from pipelines.capture.signal_reader import Inbox
from pipelines.snapshot import queue as snapshot_queue

TOKEN = "826B0137A500{:06X}2B022C0100296E5A1004421E9C2BE69342E885031C52C7B7562704"


SLOW = {"data-collections": [r"shop\.(?:(a+)\1*)+b"]}


@pytest.mark.parametrize("type_", ["execute-snapshot", "stop-snapshot"])
def test_a_signal_that_would_be_matched_for_years_is_refused_and_noted(
    type_: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The capture goes on, stops nothing by halves, and its next start knows the signal by its row."""
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    nobody: Any = SimpleNamespace(notify=lambda *_, **__: None)
    nothing: Any = None
    deployment: Any = SimpleNamespace(namespaces=lambda: ["shop.b", "shop." + "a" * 200])
    snapshots = snapshot_queue.SnapshotQueue(nothing, nobody, threading.Event(), snapshot_queue.SnapshotMetrics())
    control, rows = ControlEvents(deployment, snapshots, Inbox()), events.EventRows("shop")
    for number, planned in enumerate([("shop.ab",), ("shop." + "a" * 200,)]):
        snapshots.add(snapshot_state.SnapshotState(str(number), planned, kind=snapshot_state.SnapshotKind.INCREMENTAL))
    sent = {"_id": "slow", "type": type_, "data": SLOW}
    event = {"_id": {"_data": TOKEN.format(1)}, "operationType": "insert", "fullDocument": sent}
    control.handle(rows, {**event, "ns": {"db": "shop", "coll": "signals"}})
    (landed,) = rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    assert "takes too long" in json.loads(landed["payload"])["refused"] and "signal slow" in caplog.text
    assert not any(each.stopped for each in (entry.now for entry in snapshots._entries))


def test_many_signals_are_handled_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lists the source's collections: a repair sends thousands, and the lease is renewed by commits in between."""
    monkeypatch.setattr(control, "TURN_SECONDS", 0)
    nothing: Any = None
    snapshots = snapshot_queue.SnapshotQueue(nothing, nothing, threading.Event(), snapshot_queue.SnapshotMetrics())
    inbox, handled, rows = Inbox(), [], events.EventRows("shop")
    channel: Any = SimpleNamespace(handled=handled.append)
    for number in range(3):
        signal = signals.Signal(str(number), "log", {"message": "m"}, "table")
        inbox.put(channel, signals.ReceivedSignal(signal, str(number)))
    inbox.polled()
    control_events = ControlEvents(nothing, snapshots, inbox)
    for count in (1, 2, 3):
        assert not inbox.is_read
        control_events.handle_received(rows, token=TOKEN.format(1))
        assert len(rows) == len(rows.then) == count
    assert inbox.is_read


def test_a_collection_whose_parts_are_renamed_one_after_the_other_is_read_once() -> None:
    """Each shard reports the rename. The snapshot that counts is that of the last one, after which no shard has the old name."""
    nobody: Any = SimpleNamespace(notify=lambda *_, **__: None)
    nothing: Any = None
    deployment: Any = SimpleNamespace(filter=SimpleNamespace(includes=lambda db, name: True))
    snapshots = snapshot_queue.SnapshotQueue(nothing, nobody, threading.Event(), snapshot_queue.SnapshotMetrics())
    control, rows = ControlEvents(deployment, snapshots, Inbox()), events.EventRows("shop")
    for number, target in enumerate(["new", "new", "other", "new"]):
        renamed = {"_id": {"_data": TOKEN.format(number)}, "operationType": "rename", "to": {"db": "shop", "coll": target}}
        control.handle(rows, renamed)
    landed = rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    found = snapshot_state.states(json.loads(row["payload"]) for row in landed)
    assert [(each.planned[0], each.missing) for each in found] == [
        ("shop.new", ()), ("shop.new", ()), ("shop.other", ("shop.other",)), ("shop.new", ("shop.new",)),
    ]  # fmt: skip
    assert [each.of(each.planned[0]).completed for each in found] == [False] * 4


def test_a_name_that_is_misspelt_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The other collections of a signal are read, or stopped. A filter for a misspelt name would not be missed otherwise."""
    nobody: Any = SimpleNamespace(notify=lambda *_, **__: None)
    nothing: Any = None
    deployment: Any = SimpleNamespace(namespaces=lambda: ["shop.orders", "shop.stock"])
    snapshots = snapshot_queue.SnapshotQueue(nothing, nobody, threading.Event(), snapshot_queue.SnapshotMetrics())
    control, rows = ControlEvents(deployment, snapshots, Inbox()), events.EventRows("shop")

    def send(type_: str, *names: str, **more: Any) -> str:
        caplog.clear()
        sent = {"_id": "s", "type": type_, "data": {"data-collections": names, **more}}
        event = {"_id": {"_data": TOKEN.format(1)}, "operationType": "insert", "fullDocument": sent}
        control.handle(rows, {**event, "ns": {"db": "shop", "coll": "signals"}})
        return " ".join(each.getMessage() for each in caplog.records if each.levelname == "WARNING")

    conditions = [{"data-collection": "shop.stok", "filter": "{}"}]
    told = send("execute-snapshot", r"shop\.Orders", "shop.order", "shop.s.*", **{"additional-conditions": conditions})
    assert told.endswith("matches shop.order, shop.stok")
    assert send("stop-snapshot", "shop.orders", "shop.stokc").endswith("matches shop.stokc")
    assert [each.now.missing for each in snapshots._entries] == [("shop.stock",)]
    assert not send("stop-snapshot", "shop.stock") and not send("stop-snapshot")
