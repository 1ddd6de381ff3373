"""A collection that gives way to one of another kind while its snapshot is read: the snapshot is completed with what is there now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.snapshot.state import SnapshotState
from pipelines.mongodb import catalog
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server
from pipelines.snapshot import chunk_reader, snapshot
from tests.harness import captured


@pytest.fixture(autouse=True)
def workers(mongodb_uri: str) -> Iterator[None]:
    """Chunks are read in this process, with the client that an executor's process would use."""
    yield
    captured.close_worker_clients(connections.Connection(mongodb_uri))


class Log:
    """Bronze's log, which calls `then` after the first commit."""

    position = SimpleNamespace(token="82")

    def __init__(self, then: Callable[[], object]) -> None:
        self.keys: list[str] = []
        self._then: Callable[[], object] | None = then

    def append(self, numbered: Callable[[int, int], Any]) -> None:
        self.keys += [key for key in numbered(1, 0)["key"].to_pylist() if key is not None]
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def heartbeat(self, *_: object, **__: object) -> None:
        pass


def capped(database: Any) -> None:
    database.a.drop()
    database.command({"create": "a", "capped": True, "size": 100_000})
    database.a.insert_many([{"_id": number} for number in range(30)])


def converted(database: Any) -> None:
    database.command({"convertToCapped": "a", "size": 100_000})


def view(database: Any) -> None:
    database.other.insert_many([{"_id": number} for number in range(20)])
    database.a.drop()
    database.command({"create": "a", "viewOn": "other", "pipeline": []})


def timeseries(database: Any) -> None:
    database.a.drop()
    database.command({"create": "a", "timeseries": {"timeField": "at"}})


@pytest.mark.parametrize(
    ("replace", "expected"),
    [(capped, 30), (converted, 20), (view, 2), (timeseries, 2)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_is_there_now_is_read_to_its_end(
    mongodb_uri: str, mongo: Any, database: Any, replace: Callable[[Any], None], expected: int
) -> None:
    """A capped collection has no snapshot reads, and a view no bounds: the server refuses them in their own ways. A collection that was
    replaced by a view is gone, as at a start: it has not failed."""
    database.a.insert_many([{"_id": number} for number in range(20)])
    collections = catalog.collections(mongo, [database.name])
    halt, log = threading.Event(), Log(lambda: replace(database))
    halt.wait = lambda timeout=None: False  # type: ignore[assignment, misc]  # no pause between attempts
    nothing: Any = None
    reader = chunk_reader.ChunkReader(
        nothing,
        connections.Connection(mongodb_uri),
        after=mongodb_server.operation_time(mongo),
        chunk_bytes=1 << 20,
        stopped=halt,
    )
    reader.on_driver.set()
    reader.without_helpers.set()
    plan = SnapshotState("s", (f"{database.name}.a",))
    taking = snapshot.Snapshot(
        log=log,
        name="shop",
        reader=reader,
        collections=collections,
        state=plan,
        threads=1,
        stopped=halt,
        documents_max=2,  # type: ignore[arg-type]
    )
    state = taking.run()
    assert (state.failed, state.is_done) == ({}, True)
    assert log.keys == [str(number) for number in range(expected)]
