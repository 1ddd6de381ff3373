"""How often, and after which waits, what failed is tried again; the server is told to drop connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cdc_core import errors
from pipelines import embedded_mongodb, mongodb


@pytest.fixture
def server(start_mongodb: Any) -> embedded_mongodb.EmbeddedMongoDB:
    """A server that can be told to fail."""
    return start_mongodb(embedded_mongodb.Options(arguments=("--setParameter", "enableTestCommands=1")))


def fail(client: Any, times: int | str, *commands: str) -> None:
    """The server drops the connection of the next `times` of these commands."""
    mode = {"times": times} if isinstance(times, int) else times
    data = {"failCommands": list(commands), "closeConnection": True, "appName": mongodb.APP_NAME}
    client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})


@contextlib.contextmanager
def stream(server: Any, *, retries: int) -> Iterator[mongodb.ChangeStream]:
    with contextlib.closing(mongodb.client(server.uri)) as client:
        opened = mongodb.ChangeStream(
            client, mongodb.StreamOptions(db="shop", max_await_ms=50), mongodb.Start(),
            retries=retries, initial_delay=0.1, max_delay=0.2,
        )  # fmt: skip
        opened.open()
        with contextlib.closing(opened):
            yield opened


def test_a_stream_is_tried_again_so_often(server: Any) -> None:
    """`errors.max.retries` attempts in a row, the waits doubling from the first to the longest; 0 is none, -1 no limit."""
    with contextlib.closing(mongodb.client(server.uri, appname="test")) as told:
        with stream(server, retries=4) as opened:
            for _ in range(2):
                fail(told, 4, "getMore", "aggregate")
                began = time.monotonic()
                opened.next()
                assert 0.1 + 0.2 + 0.2 + 0.2 <= time.monotonic() - began < 3
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
