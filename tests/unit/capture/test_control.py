"""What the capture does in response to events, with events as the server sends them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

from cdc_core.bronze import event_rows as events
from cdc_core.snapshot import state as snapshot_state
from pipelines.capture.control import ControlEvents
from pipelines.capture.signal_reader import Inbox
from pipelines.snapshot import queue as snapshot_queue

TOKEN = "826B0137A500{:06X}2B022C0100296E5A1004421E9C2BE69342E885031C52C7B7562704"


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
