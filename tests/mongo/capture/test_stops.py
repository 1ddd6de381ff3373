"""The end of a capture: soon after it is asked for, whatever the server does, and with all events that could be read."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.capture import service as capture
from tests.harness.captures import Running, check_numbers, once, pipeline, rows, until
from tests.harness.network import Proxy


def test_a_long_wait_for_events_does_not_delay_the_end(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """`cursor.max.await.time.ms: 60000`: a capture that is asked to stop ends within seconds, with all events that it has read."""
    given = {"cursor.max.await.time.ms": 60_000, "snapshot.mode": "no_data"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    once(spark, found)
    with Running(spark, found) as running:
        database.orders.insert_one({"_id": 1})
        until(lambda: any(row.kind == "change" for row in rows(spark, found)))
        time.sleep(0.5)  # the stream waits for the next reply
        began = time.monotonic()
        running.stop.set()
        running._thread.join(60)
        took = time.monotonic() - began
    assert running.result is not None
    assert took < 30, took  # a few seconds on an idle machine


def test_a_server_that_does_not_answer_does_not_hold_a_capture(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """If the server stops answering, a requested stop still succeeds, during a run and before the first reply."""
    with Proxy(mongodb_uri.removeprefix("mongodb://").split("/")[0]) as proxy:
        uri = f"mongodb://{proxy.address}/?directConnection=true"
        found = pipeline(uri, lakehouse, database.name, **{"snapshot.mode": "no_data"})
        database.create_collection("orders")
        once(spark, found)
        with Running(spark, found) as running:
            database.orders.insert_one({"_id": 1})
            until(lambda: any(row.kind == "change" for row in rows(spark, found)))
            proxy.stall()
            began = time.monotonic()
            running.stop.set()
            running._thread.join(60)
            took = time.monotonic() - began
        assert running.result is not None and running.result.events == 1
        assert took < 20, took
        stop = threading.Event()
        threading.Timer(0.5, stop.set).start()
        began = time.monotonic()
        assert capture.run(spark, found, stop=stop).events == 0
        with pytest.raises(capture.StoppedBeforeStart):
            capture.check_source(found, stop)
        assert time.monotonic() - began < 15
        proxy.mend()
    assert once(spark, pipeline(mongodb_uri, lakehouse, database.name, **{"snapshot.mode": "no_data"})).events == 0


def test_what_came_before_an_event_that_cannot_be_read_is_committed(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """An event above 16 MB, or one that a stage of `cursor.pipeline` changes too much, ends a capture after the events before it are
    committed.
    """
    given = {"capture.mode": "change_streams_update_full", "snapshot.mode": "no_data"}
    found = pipeline(mongodb_uri, lakehouse / "large", database.name, **given)
    once(spark, found)
    database.orders.insert_many([{"_id": 1}, {"_id": 2}])
    database.orders.update_one({"_id": 2}, {"$set": {"pad": "x" * 9_000_000}})
    for _ in range(2):
        with pytest.raises(errors.SourceUnsuitable, match="10334"):
            once(spark, found)
        landed = rows(spark, found)
        check_numbers(landed)
        assert [row.key for row in landed if row.kind == "change"] == ["1", "2"]
    skipping = {**given, "cursor.oversize.handling.mode": "skip", "cursor.oversize.skip.threshold": 16_777_216}
    database.orders.insert_one({"_id": 3})
    result = once(spark, pipeline(mongodb_uri, lakehouse / "large", database.name, **skipping))
    assert (result.events, result.skipped_events) == (1, 1)

    stages = [{"$replaceWith": {"$cond": [{"$eq": ["$fullDocument.bad", True]}, "$fullDocument", "$$ROOT"]}}]
    spoiling = {"cursor.pipeline": json.dumps(stages), "snapshot.mode": "when_needed"}
    found = pipeline(mongodb_uri, lakehouse / "spoilt", database.name, **spoiling)
    once(spark, found)
    database.orders.insert_many([{"_id": 4}, {"_id": 5, "bad": True}, {"_id": 6}])
    for _ in range(2):
        with pytest.raises(errors.SettingsError, match="cursor.pipeline: its stages remove or change"):
            once(spark, found)
        assert [row.key for row in rows(spark, found) if row.kind == "change"] == ["4"]
    assert {row.resume_token for row in rows(spark, found) if row.kind == "snapshot"}  # exactly one snapshot
    assert len({row.resume_token.split(":")[1] for row in rows(spark, found) if row.kind == "snapshot"}) == 1
