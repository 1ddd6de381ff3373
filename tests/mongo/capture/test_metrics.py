"""The metrics endpoint of a running capture, with a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc_core import errors
from pipelines.capture import metrics
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureProgress
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from tests.harness.captures import Running, held_snapshots, once, pipeline, step_down, until

FAILING = {"failCommands": ["getMore"], "closeConnection": True, "appName": mongodb.APP_NAME}
Values = dict[tuple[str, ...], float]


@pytest.fixture
def port() -> int:
    return embedded_mongodb._free_port()


@pytest.fixture
def clients() -> Iterator[contextlib.ExitStack]:
    """Clients that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield stack


def fetched(port: int) -> Values:
    """The samples of the endpoint by name, context and table; empty if nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {
        (
            sample.name.removeprefix("debezium_metrics_"),
            *(sample.labels[name] for name in ("context", "table") if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["name"] == "shop"
    }


def test_the_endpoint_of_a_running_capture(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, port: int) -> None:
    """During a capture its snapshot and stream have metrics with Debezium's names; afterwards nothing listens."""
    namespace = f"{database.name}.orders"
    database.orders.insert_many([{"_id": number} for number in range(200)])
    database.create_collection("other")
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"metrics.port": port, "metrics.address": "127.0.0.1"})
    with Running(spark, found):
        until(lambda: fetched(port).get(("SnapshotCompleted", "snapshot")) == 1)
        values = fetched(port)
        assert values["TotalTableCount", "snapshot"] == 2
        assert values["RemainingTableCount", "snapshot"] == 0
        assert values["RowsScanned", "snapshot", namespace] == 200
        assert values["SnapshotRunning", "snapshot"] == values["SnapshotAborted", "snapshot"] == 0
        assert values["SnapshotDurationInSeconds", "snapshot"] > 0
        assert values["CapturedTables", "streaming", namespace] == 1
        assert values["Connected", "streaming"] == 1
        asked = metrics.scrape(found.name, port=port, address="0.0.0.0")
        assert asked[f"debezium_metrics_RowsScanned{{context=snapshot,table={namespace}}}"] == 200
        database.orders.insert_many([{"_id": number} for number in range(200, 205)])
        database.orders.update_many({"_id": {"$lt": 3}}, {"$set": {"x": 1}})
        database.orders.delete_one({"_id": 7})
        until(lambda: fetched(port)["TotalNumberOfDeleteEventsSeen", "streaming"] == 1)
        values = fetched(port)
        assert values["TotalNumberOfEventsSeen", "streaming"] == 9
        assert values["TotalNumberOfCreateEventsSeen", "streaming"] == 5
        assert values["TotalNumberOfUpdateEventsSeen", "streaming"] == 3
        assert 0 <= values["MilliSecondsBehindSource", "streaming"] < 60_000
        assert values["NumberOfDisconnects", "streaming"] == 0
        assert values["MaxQueueSizeInBytes", "streaming"] == 256 * 1024 * 1024
        assert values["medallion_oplog_headroom_hours",] > 0
        assert values["medallion_commits",] >= 1
    assert fetched(port) == {}


def test_without_a_port_nobody_listens_and_a_port_in_use_is_refused(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, port: int
) -> None:
    """The endpoint is off by default. A port in use is a mistake in the settings, reported before anything is read."""
    assert pipeline(mongodb_uri, lakehouse, database.name).source.metrics_port is None
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        given = {"metrics.port": port, "metrics.address": "127.0.0.1"}
        with pytest.raises(errors.SettingsError, match=f"source.metrics.port: cannot listen on 127.0.0.1:{port}"):
            once(spark, pipeline(mongodb_uri, lakehouse, database.name, **given))


def test_elections_and_disconnects_are_counted_and_a_short_oplog_is_warned_of(
    spark: Any,
    start_mongodb: Any,
    clients: contextlib.ExitStack,
    lakehouse: Path,
    port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A primary that steps down counts as one election; an oplog with less headroom than configured is a warning in the log."""
    server = start_mongodb(embedded_mongodb.ServerOptions(oplog_mb=4, arguments=("--setParameter", "enableTestCommands=1")))
    client = clients.enter_context(contextlib.closing(mongodb.client(server.uri, appname="test")))
    client.shop.orders.insert_one({"_id": 1})
    given = {"metrics.port": port, "metrics.address": "127.0.0.1", "oplog.headroom.warning.hours": 10_000_000}
    with Running(spark, pipeline(server.uri, lakehouse, "shop", **given)):
        until(lambda: fetched(port).get(("Connected", "streaming")) == 1)
        until(lambda: "the oplog will hold its position" in caplog.text)
        step_down(client, 1)
        until(lambda: fetched(port).get(("NumberOfPrimaryElections", "streaming")) == 1)
        # The election may have closed the stream's connection, too, and this may be counted a moment later.
        before = fetched(port)["NumberOfDisconnects", "streaming"]
        client.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 2}, "data": FAILING})
        until(lambda: fetched(port)["NumberOfDisconnects", "streaming"] >= before + 2)
        client.shop.orders.insert_one({"_id": 2})
        until(lambda: fetched(port)["TotalNumberOfCreateEventsSeen", "streaming"] == 1)


def test_a_snapshot_is_counted_while_it_runs(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, port: int
) -> None:
    """During a snapshot the endpoint shows how many documents of which collection are in bronze."""
    database.orders.insert_many([{"_id": number, "pad": "x" * 1000} for number in range(1000)])
    given = {"metrics.port": port, "metrics.address": "127.0.0.1", "commit.max.bytes": 50_000, "snapshot.max.threads": 1}
    found = pipeline(mongodb_uri, lakehouse, database.name, **given)
    stop, seen = threading.Event(), []

    def look(progress: CaptureProgress) -> None:
        if progress.snapshot is not None and progress.snapshot.documents > 100 and not stop.is_set():
            seen.append(fetched(port))
            stop.set()

    with held_snapshots(100):
        capture.run(spark, found, stop=stop, progress=look)
    assert seen[0]["SnapshotRunning", "snapshot"] == seen[0]["RemainingTableCount", "snapshot"] == 1
    assert seen[0]["SnapshotCompleted", "snapshot"] == 0
    assert 100 < seen[0]["RowsScanned", "snapshot", f"{database.name}.orders"] < 1000
