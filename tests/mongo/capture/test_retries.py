"""How often failed operations are retried, and after which waits; the server is told to close connections."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import change_stream
from pipelines.mongodb import client as mongodb
from tests.harness.captures import Running, check_numbers, once, pipeline, rows, until


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded_mongodb.EmbeddedMongoDB]:
    """A server with fail points."""
    options = embedded_mongodb.ServerOptions(parameters={"enableTestCommands": 1})
    with embedded_mongodb.EmbeddedMongoDB(tmp_path_factory.mktemp("failing"), options) as started:
        yield started


@pytest.fixture
def server(failing: embedded_mongodb.EmbeddedMongoDB) -> Iterator[embedded_mongodb.EmbeddedMongoDB]:
    """The server without an earlier test's fail point and data."""
    with contextlib.closing(mongodb.client(failing.uri, appname="test")) as told:
        told.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        told.drop_database("shop")
    yield failing


def fail(client: Any, times: int | str, *commands: str) -> None:
    """The server closes the connection for the next `times` of these commands."""
    mode = {"times": times} if isinstance(times, int) else times
    data = {"failCommands": list(commands), "closeConnection": True, "appName": mongodb.APP_NAME}
    client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})


class Waits(threading.Event):
    """An event that is never set, and records the wait times."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


@contextlib.contextmanager
def stream(server: Any, *, retries: int, waits: Waits | None = None) -> Iterator[change_stream.ChangeStream]:
    # The driver checks the server at once after a closed connection, and adds no wait of its own.
    with contextlib.closing(mongodb.client(server.uri, heartbeatFrequencyMS=50)) as client:
        opened = change_stream.ChangeStream(
            client, change_stream.StreamOptions(db="shop", max_await_ms=50), change_stream.StreamStart(),
            retries=retries, initial_delay=0.1, max_delay=0.2, stopped=waits or Waits(),
        )  # fmt: skip
        opened.open()
        with contextlib.closing(opened):
            yield opened


def test_a_stream_is_tried_again_so_often(server: Any) -> None:
    """`errors.max.retries` is the number of attempts in a row; the waits double from the first to the longest. 0 is none, -1 no limit."""
    waits = Waits()
    with contextlib.closing(mongodb.client(server.uri, appname="test")) as told:
        with stream(server, retries=4, waits=waits) as opened:
            for _ in range(2):
                fail(told, 4, "getMore", "aggregate")
                opened.next()
            assert waits.seconds == [0.1, 0.2, 0.2, 0.2] * 2
            assert opened.reconnects == 8
            fail(told, 5, "getMore", "aggregate")
            with pytest.raises(errors.SourceUnreachable) as given_up:
                opened.next()
            assert given_up.value.exit_code == 75
        with stream(server, retries=0) as opened:
            fail(told, 1, "getMore")
            with pytest.raises(errors.SourceUnreachable):
                opened.next()
            assert opened.reconnects == 0
        with stream(server, retries=-1) as opened:
            fail(told, 7, "getMore", "aggregate")
            opened.next()
            assert opened.reconnects == 7


@pytest.mark.journey
def test_a_capture_starts_over_after_a_lost_connection(
    spark: Any, server: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`retriable.restart.connector.wait.ms` after the connection was lost the capture continues from its position, and nothing is lost."""
    found = pipeline(server.uri, lakehouse, "shop", **{"retriable.restart.connector.wait.ms": 300})
    with contextlib.closing(mongodb.client(server.uri, appname="test")) as told:
        told.shop.orders.insert_many([{"_id": number} for number in range(20)])
        fail(told, 2, "find")
        began = time.monotonic()
        result = once(spark, found)
        assert time.monotonic() - began >= 0.6
        told.shop.orders.insert_one({"_id": 20})
        assert once(spark, found).events == 1
    assert result.snapshot_documents == 20
    assert caplog.text.count("restarting the capture in 0.3 s") == 2
    landed = rows(spark, found)
    check_numbers(landed)
    assert sorted(json.loads(row.key) for row in landed if row.op) == list(range(21))


def test_a_capture_that_may_not_start_over_ends(spark: Any, server: Any, lakehouse: Path) -> None:
    """`errors.max.retries` limits the restarts in a row; after them, or at once with 0, the exit code is that of a temporary error."""
    for retries in (0, 2):
        given = {"retriable.restart.connector.wait.ms": 10, "errors.max.retries": retries}
        found = pipeline(server.uri, lakehouse / str(retries), "shop", **given)
        with contextlib.closing(mongodb.client(server.uri, appname="test")) as told:
            told.shop.orders.insert_one({})
            fail(told, retries + 1, "find")
            with pytest.raises(errors.SourceUnreachable) as ended:
                once(spark, found)
            assert ended.value.exit_code == 75
        assert once(spark, found).snapshot_documents > 0


def test_a_capture_that_waits_to_start_over_can_be_stopped(
    spark: Any, server: Any, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stop ends the wait and the run normally, and releases the claim."""
    found = pipeline(server.uri, lakehouse, "shop", **{"retriable.restart.connector.wait.ms": 3_600_000})
    with contextlib.closing(mongodb.client(server.uri, appname="test")) as told:
        told.shop.orders.insert_one({"_id": 1})
        fail(told, 1, "find")
        with Running(spark, found) as running:
            until(lambda: "restarting the capture in 3600.0 s" in caplog.text)
        assert running.result is not None
    assert once(spark, found).snapshot_documents == 1


def test_waits_have_an_end_however_long_the_source_is_away(mongo: Any) -> None:
    """After thousands of attempts the wait is still the longest one, without an overflow."""
    stream = change_stream.ChangeStream(
        mongo, change_stream.StreamOptions(), change_stream.StreamStart(), initial_delay=0.3, max_delay=10
    )
    waits = []
    for stream.attempts in (1, 2, 3, 7, 5000):
        waits.append(stream.delay())
    assert waits == [0.3, 0.6, 1.2, 10, 10]
