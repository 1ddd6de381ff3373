"""The decisions of a snapshot, with a faked source."""

from __future__ import annotations

import errno
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.timestamp import Timestamp
from pymongo import errors as driver

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.snapshot.state import SnapshotState
from pipelines import helper_processes
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.snapshot import chunk_reader, chunks, snapshot

COLLECTION = catalog.SourceCollection("db", "a", None)
UNREACHABLE = {"outcome": "error", "class": "SourceUnreachable", "message": "no server answered"}


def executors(execute: Callable[[Any], pa.Table], asked: list[str] | None = None) -> Any:
    """A Spark whose workers do this with what they are given."""

    def executed(read: Any, _: str) -> Any:
        if asked is not None:
            asked.append("a worker")
        return SimpleNamespace(toArrow=lambda: execute(read))

    return SimpleNamespace(range=lambda *_, **__: SimpleNamespace(mapInArrow=executed))


def run(read: Any) -> pa.Table:
    return pa.Table.from_batches(read(iter(())))


def answer(**meta: str) -> Callable[[Any], pa.Table]:
    """Workers that answer without reading."""
    return lambda _: pa.table({"meta": [json.dumps(meta)], "rows": pa.array([None], pa.binary())})


@pytest.fixture
def waits() -> list[float]:
    """The seconds of all waits."""
    return []


@pytest.fixture
def taking(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> snapshot.Snapshot:
    """A snapshot of one collection that never sleeps."""
    monkeypatch.setattr(catalog, "collections", lambda *_: [COLLECTION])

    class Halt(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return self.is_set()

    halt = Halt()
    connection: Any = SimpleNamespace(client=lambda: SimpleNamespace(close=lambda: None))
    spark = executors(answer(outcome="expired"))
    reader = chunk_reader.ChunkReader(spark, connection, after=Timestamp(1, 1), chunk_bytes=1 << 20, stopped=halt)
    given: dict[str, Any] = {"log": None, "name": "shop", "collections": [COLLECTION], "reader": reader, "threads": 1}
    return snapshot.Snapshot(**given, state=SnapshotState("s", ("db.a",)), stopped=halt)


def test_a_server_that_does_not_answer_does_not_hold_the_end(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver waits for the reply to the end of its sessions, up to its timeouts."""
    closed, answers = threading.Event(), threading.Event()

    def close() -> None:
        answers.wait(20)
        closed.set()

    monkeypatch.setattr(taking.reader.connection, "client", lambda: SimpleNamespace(close=close))
    monkeypatch.setattr(mongodb, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(taking, "collections", [])
    monkeypatch.setattr(taking, "state", SnapshotState("s"))
    taking.run()
    assert not closed.is_set()
    answers.set()


@pytest.mark.parametrize("asked", ["boundary", "size"])
def test_what_passes_by_itself_is_waited_for(
    taking: snapshot.Snapshot, waits: list[float], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A single error of the server costs a second, and no restart of the capture; one that persists is raised."""
    answers: list[Any] = [errors.SourceUnreachable("error 24"), errors.SourceUnreachable("error 262"), "answer"]

    def answer(*_: Any, **__: Any) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(catalog if asked == "size" else snapshot_read, asked, answer)

    def ask() -> Any:
        if asked == "size":
            return taking.reader.size(None, COLLECTION)  # type: ignore[arg-type]
        return next(taking.reader.ranges(None, COLLECTION, behind=None, documents=1)).hi  # type: ignore[arg-type]

    assert ask() == "answer" and waits == [1.0, 2.0]
    answers += [errors.SourceUnreachable("error 24")] * chunk_reader.ATTEMPTS
    with pytest.raises(errors.SourceUnreachable, match="24"):
        ask()
    assert not answers


def test_a_collection_that_is_never_the_one_that_was_listed_is_given_up(
    taking: snapshot.Snapshot, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its name cannot be encoded, or it is replaced each time, it is not read again without end."""

    def changed(*_: Any, **__: Any) -> Any:
        raise mongodb_failures.CollectionChanged

    failed: list[str] = []
    monkeypatch.setattr(catalog, "size", lambda *_: catalog.CollectionSize(1, 1))
    monkeypatch.setattr(snapshot_read, "boundary", lambda *_, **__: None)
    monkeypatch.setattr(chunk_reader.ChunkReader, "read", changed)
    monkeypatch.setattr(snapshot.Snapshot, "_mark_failed", lambda self, name, reason: failed.append(reason))
    runs = threading.Thread(target=taking.run, daemon=True)
    runs.start()
    runs.join(10)
    taking.stopped.set()
    assert not runs.is_alive() and len(failed) == 1 and "error 361" in failed[0]
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_pause_ends_the_run(taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run returns, and another one continues after the resume. It does not wait for stopped collections."""
    monkeypatch.setattr(catalog, "size", lambda *_: catalog.CollectionSize(1, 1))
    taking.controls.pause(True)
    runs = threading.Thread(target=taking.run, daemon=True)
    runs.start()
    runs.join(5)
    assert not runs.is_alive()
    assert taking.has_paused and taking.state.missing == ("db.a",)
    taking.controls.pause(False)
    assert not taking._may_read("db.a")  # chunks that were cut short must not be skipped
    again = replace(taking, has_paused=False)
    again.controls.pause(True)
    again.controls.stop(["db.a"])
    assert again.run().is_done and not again.has_paused


class Log:
    """Records the heartbeats."""

    position = SimpleNamespace(token="82")

    def __init__(self) -> None:
        self.told: list[Any] = []

    def heartbeat(self, *payloads: Any, token: str, ts_ms: int) -> None:
        self.told += payloads


def test_a_chunk_costs_the_same_however_many_collections_there_are(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work per chunk does not grow with the collections: with 10,000 of them the stream waited for minutes.

    Progress counts all of them.
    """
    names = [f"c{number:03}" for number in range(150)]
    looks: list[str] = []
    of, told = SnapshotState.of, list[snapshot.SnapshotProgress]()
    documents = pa.table({"key": ["1", "2"], "after": ["{}", "{}"], "payload": pa.nulls(2, pa.string())}, schema=chunks.ROWS)
    monkeypatch.setattr(SnapshotState, "of", lambda self, name: looks.append(name) or of(self, name))
    monkeypatch.setattr(catalog, "size", lambda *_: catalog.CollectionSize(5, 1))
    monkeypatch.setattr(snapshot_read, "boundary", lambda *_, **__: None)
    monkeypatch.setattr(chunk_reader.ChunkReader, "read", lambda *_, **__: chunks.ChunkRows(documents, (1, 1)))
    many = replace(
        taking,
        log=SimpleNamespace(append=lambda numbered: numbered(1, 0), position=Log.position, heartbeat=Log().heartbeat),
        collections=[replace(COLLECTION, name=name) for name in names[1:]],
        state=SnapshotState("s", tuple(f"db.{name}" for name in names)),
        report=told.append,
    )
    assert many.run().is_done and len(looks) < 40 * len(names)
    assert [(each.total_documents, each.total_about) for each in told] == [
        (2 * read, 2 * read + 5 * (len(names) - 1 - read)) for read in range(1, len(names))
    ]


@pytest.mark.parametrize("where", ["chunk", "boundary"])
def test_a_collection_that_the_server_gives_up_fails_alone(
    taking: snapshot.Snapshot, waits: list[float], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Otherwise the capture would restart for ever, and nothing else would be read."""

    def boundary(*_: Any, **__: Any) -> None:
        if where == "boundary":
            raise mongodb_failures.SnapshotExpired

    monkeypatch.setattr(catalog, "size", lambda *_: catalog.CollectionSize(1, 1))
    monkeypatch.setattr(snapshot_read, "boundary", boundary)
    taking.log = Log()  # type: ignore[assignment]
    assert taking.run().failed.keys() == {"db.a"}
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert "gave up" in str(taking.log.told)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "expected"), [(95, [*range(10, 110, 10), 400, 700, None]), (0, [10, 310, 610, 910, None])])
def test_a_collection_that_grows_faster_than_small_chunks_are_read_has_an_end(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch, size: int, expected: list[int | None]
) -> None:
    """`incremental.snapshot.chunk.size: 1024`, as in Debezium, reads a thousand documents per commit. What was inserted meanwhile is
    read in chunks of the usual size, not in one of millions of small documents."""

    def boundary(*_: Any, lo: bytes | None, documents: int) -> bytes | None:
        hi = documents + (bson.decode(lo)["lo"] if lo else 0)
        return bson.encode({"hi": hi}) if hi < 1_000 else None

    monkeypatch.setattr(snapshot_read, "boundary", boundary)
    small = replace(taking, documents_max=10)
    client: Any = None
    ranges = list(small._ranges(client, COLLECTION, 300, size))
    ends = [bson.decode(each.hi)["hi"] if each.hi else None for each in ranges]
    assert ends == expected
    assert [each.lo for each in ranges[1:]] == [snapshot_read.hi_as_lo(each.hi) for each in ranges[:-1] if each.hi]


def test_a_chunk_of_small_documents_is_no_larger_than_a_commit(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has twenty columns besides its document: millions of documents of 22 bytes would exceed the driver's memory."""
    asked: list[int] = []

    def boundary(*_: Any, documents: int, **__: Any) -> None:
        asked.append(documents)
        raise mongodb_failures.ReadRefused("enough")

    monkeypatch.setattr(catalog, "size", lambda *_: catalog.CollectionSize(10**8, 22))
    monkeypatch.setattr(snapshot_read, "boundary", boundary)
    taking.log = Log()  # type: ignore[assignment]
    taking.run()
    assert asked == [taking.reader.chunk_bytes // events.ROW_BYTES]


def test_a_snapshot_that_ends_while_it_waits_fails_no_collection(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start resumes it."""

    def boundary(*_: Any, **__: Any) -> None:
        taking.stopped.set()
        raise mongodb_failures.SnapshotExpired

    monkeypatch.setattr(snapshot_read, "boundary", boundary)
    with pytest.raises(errors.SourceUnreachable):
        next(taking.reader.ranges(None, COLLECTION, behind=None, documents=1))  # type: ignore[arg-type]
    assert not taking.state.failed


def test_what_executors_do_not_reach_is_read_here(taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """If executors cannot reach MongoDB, as on serverless compute, the driver reads, and does not ask them again."""
    asked: list[str] = []
    meta = {"outcome": "read", "at": [1, 1], "cut": None}
    monkeypatch.setattr(chunks, "_read_chunk", lambda _: iter([(meta, chunks.ROWS.empty_table())]))
    reader = replace(taking.reader, spark=executors(answer(**UNREACHABLE), asked))
    reader.without_helpers.set()
    for _ in range(2):
        assert reader.read(COLLECTION, snapshot_read.IdRange(), condition=None).at == (1, 1)
    assert asked == ["a worker"]


@pytest.mark.parametrize("harm", [None, "unwritten", "gone", "no folder"])
def test_on_one_machine_a_helper_reads_a_chunk(
    taking: snapshot.Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    harm: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If it cannot, Spark's workers read this chunk and the next ones. Its file is private, and removed afterwards."""
    asked: list[str] = []
    meta = {"outcome": "read", "at": [1, 1], "cut": None}
    rows = pa.table([["1"], ["{}"], pa.nulls(1, pa.string())], schema=chunks.ROWS)
    monkeypatch.setattr(chunks, "_read_chunk", lambda _: iter([(None, rows), (meta, rows)]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pipelines.spark.session.is_local", lambda _: True)

    def folder() -> Path:
        asked.append("a helper")
        raise OSError(errno.ENOSPC, "No space left on device")

    def call(_: Any, function: Any, given: Any, *, stopped: Any, seconds: float) -> Any:
        asked.append("a helper")
        assert not Path(given[1]).stat().st_mode & 0o077
        if harm == "gone":
            raise helper_processes.HelperGone("it ended with exit code -9")
        return function((given[0], "/dev/full") if harm else given, None)

    monkeypatch.setattr(helper_processes.HelperProcess, "call", call)
    if harm == "no folder":
        monkeypatch.setattr("pipelines.spark.scratch.folder", folder)
    reader = replace(taking.reader, spark=executors(run, asked))
    for _ in range(2):
        assert reader.read(COLLECTION, snapshot_read.IdRange(), condition=None).rows.to_pylist() == rows.to_pylist() * 2
    assert asked == (["a helper", "a worker", "a worker"] if harm else ["a helper", "a helper"])
    assert not [*tmp_path.rglob("chunk-*")]
    assert len(caplog.records) == (1 if harm else 0)


def test_a_helper_that_somebody_stopped_is_not_waited_for(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its chunk is read in another way: otherwise the snapshot, and those queued after it, would stand still."""
    helpers = helper_processes.HelperProcesses(1)
    with helpers.borrowed(1) as [helper]:
        helper.start()
        assert helper._process is not None
        helper._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(chunk_reader, "_HELPERS", helpers)
    monkeypatch.setattr(chunk_reader, "HELPER_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pipelines.spark.session.is_local", lambda _: True)
    meta = {"outcome": "read", "at": [1, 1], "cut": None}
    monkeypatch.setattr(chunks, "_read_chunk", lambda _: iter([(meta, chunks.ROWS.empty_table())]))
    reader = replace(taking.reader, spark=executors(run), connection=connections.Connection("mongodb://nobody"))
    found = []
    reads = threading.Thread(
        target=lambda: found.append(reader.read(COLLECTION, snapshot_read.IdRange(), condition=None)), daemon=True
    )
    reads.start()
    reads.join(20)
    taking.stopped.set()
    assert [each.at for each in found] == [(1, 1)]


def test_a_capture_that_ends_waits_for_no_helper(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server may never answer. Nothing else reads the chunk then, and nothing is logged."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pipelines.spark.session.is_local", lambda _: True)

    def call(*_: Any, stopped: threading.Event, **__: Any) -> Any:
        stopped.set()
        raise helper_processes.HelperGone("it ended with exit code -9")

    monkeypatch.setattr(helper_processes.HelperProcess, "call", call)
    reader = replace(taking.reader, spark=None)  # type: ignore[arg-type]
    with pytest.raises(errors.SourceUnreachable, match="the capture ends"):
        reader.read(COLLECTION, snapshot_read.IdRange(), condition=None)
    assert not [*tmp_path.rglob("chunk-*")] and not caplog.records


def test_a_chunk_that_was_given_up_leaves_no_file(tmp_path: Path) -> None:
    meta = chunks.read_into_file(None, str(tmp_path / "gone"))  # type: ignore[arg-type]
    assert meta["outcome"] == "unwritten" and not [*tmp_path.iterdir()]


def test_a_source_that_nobody_reaches_is_told(taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver does not reach it either, the source itself is unreachable, and executors are asked again."""
    monkeypatch.setattr(chunks, "_read_chunk", lambda _: iter([(UNREACHABLE, None)]))
    reader = replace(taking.reader, spark=executors(answer(**UNREACHABLE)))
    with pytest.raises(errors.SourceUnreachable):
        reader.read(COLLECTION, snapshot_read.IdRange(), condition=None)
    assert not reader.on_driver.is_set()


def test_a_time_that_a_server_never_hears_of_gives_up_one_collection(
    taking: snapshot.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the capture would restart for ever. The error says nothing about whether executors reach the source."""
    reads: list[str] = []

    def behind(_: Any) -> Any:
        reads.append("a chunk")
        with mongodb_failures.translating_read("reading"):
            raise driver.OperationFailure("InvalidOptions", 72)

    monkeypatch.setattr(chunks, "encoded_chunk", behind)
    reader = replace(taking.reader, spark=executors(run))
    with pytest.raises(mongodb_failures.ReadRefused, match="72"):
        reader.read(COLLECTION, snapshot_read.IdRange(), condition=None)
    assert len(reads) == chunk_reader.ATTEMPTS
