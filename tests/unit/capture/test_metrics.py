"""The metrics: all of Debezium's names, or a reason why not, with values that are computed on request."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.snapshot import state as snapshot_state
from pipelines.capture import byte_queue, metrics, oplog_watch
from pipelines.mongodb import change_stream
from pipelines.mongodb import server as mongodb_server
from pipelines.snapshot.controls import SnapshotControls
from tests.harness import captures, processes

ROOT = Path(__file__).resolve().parents[3]
ATTRIBUTES: dict[str, list[str]] = json.loads((ROOT / "tests" / "cases" / "metrics.json").read_text(encoding="utf-8"))


def told(found: metrics.Metrics, *, now: float = 0) -> dict[tuple[str, ...], float]:
    """Every sample by its context, its name without the prefix, and its own label."""
    return {
        (sample.labels.get("context", ""), sample.name.removeprefix(metrics.PREFIX), *_own(sample.labels)): sample.value
        for family in found.families(now=now)
        for sample in family.samples
    }


def _own(labels: dict[str, str]) -> list[str]:
    return [value for name, value in labels.items() if name in ("table", "field")]


def documented(context: str) -> dict[str, str]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {context.capitalize()}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))


@pytest.mark.parametrize("context", ["streaming", "snapshot"])
def test_every_attribute_of_the_connector_is_told_or_left_out_with_a_reason(context: str) -> None:
    """docs/metrics.md has each attribute once; exactly those that it does not call "Not provided" are exported."""
    found = metrics.Metrics("shop")
    found.streaming.committed({}, position=(5, 6), at=7)
    shown = {family.name.removeprefix(metrics.PREFIX) for family in found.families(now=0)}
    table = documented(context)
    assert sorted(table) == sorted(ATTRIBUTES[context])
    kept = {name for name, about in table.items() if not about.startswith("Not provided")}
    assert kept <= shown
    labelled = {key[1] for key in told(found) if key[0] == context}
    by_collection = {"CapturedTables", "RowsScanned", "TableChunksCompletedCounts"}  # none before there is a collection
    assert kept - by_collection <= labelled <= kept


def test_all_samples_of_a_name_are_one_group() -> None:
    """As Prometheus' text format asks: `promtool check metrics` refuses a second TYPE line of a name that streaming and snapshot share."""
    names = [family.name for family in metrics.Metrics("shop").families(now=0)]
    assert sorted(names) == sorted(set(names))


def test_commits_are_counted_whoever_brings_them() -> None:
    """Snapshots and heartbeats also commit. A restart continues the count."""
    found = metrics.Metrics("shop")
    assert told(found)["", "medallion_commits"] == 0
    for commits in (3, 2):
        log: Any = SimpleNamespace(commits=0)
        found.opened(log)
        log.commits = commits
    assert told(found)["", "medallion_commits"] == 5


def test_the_room_that_is_told_is_what_the_reader_has() -> None:
    """The reader also waits for batches that left the queue and are not committed."""
    found = metrics.Metrics("shop")
    queue = found.streaming.queue = byte_queue.ByteQueue(10, uncommitted=lambda: 5)
    queue.put(change_stream.EventBatch([b"event"], "82", 3, is_drained=True))
    for context in ("streaming", "snapshot"):
        values = [told(found)[context, f"{name}InBytes"] for name in ("MaxQueueSize", "CurrentQueueSize")]
        assert [*values, told(found)[context, "QueueRemainingCapacity"]] == [10, 8, 2]


def test_the_stream_counts_by_the_batch_and_the_commit() -> None:
    """Batches and commits add up; lags are given as the last, the extremes, and statistics."""
    found = metrics.Metrics("shop")
    assert told(found)["streaming", "MilliSecondsBehindSource"] == -1
    found.streaming.polled(3, at=10)
    found.streaming.polled(0, at=11)
    for lag in range(1, 101):
        found.streaming.committed({"c": 2, "u": 1, None: 1}, position=(100, 7), at=100 + lag)
    values = told(found, now=201)
    streaming = {name: value for (context, name, *rest), value in values.items() if context == "streaming" and not rest}
    assert streaming["TotalNumberOfEventsSeen"] == 3
    assert streaming["TotalNumberOfCreateEventsSeen"] == 200
    assert streaming["TotalNumberOfUpdateEventsSeen"] == 100
    assert streaming["TotalNumberOfDeleteEventsSeen"] == 0
    assert (streaming["NumberOfEmptyPolls"], streaming["LastEmptyPollTime"]) == (1, 11_000)
    assert streaming["MilliSecondsSinceLastEvent"] == 1000
    assert streaming["MilliSecondsBehindSource"] == 100_000
    assert streaming["MilliSecondsBehindSourceMinValue"] == 1000
    assert streaming["MilliSecondsBehindSourceAverageValue"] == 50_500
    assert streaming["MilliSecondsBehindSourceP50"] == pytest.approx(50_500)
    assert 94_000 < streaming["MilliSecondsBehindSourceP95"] < 97_000
    assert values["streaming", "SourceEventPosition", "sec"] == 100
    assert values["streaming", "SourceEventPosition", "ord"] == 7


def test_a_restart_of_the_capture_keeps_the_counts() -> None:
    """A new stream continues the counts, and an election that two streams see counts once."""

    class Stream:
        def __init__(self, reconnects: int, *elections: str) -> None:
            self.reconnects, self.elections, self.is_open = reconnects, frozenset(elections), False

    found = metrics.StreamingMetrics()
    assert (found.disconnects, found.elections) == (0, 0)
    for stream, elections in ((Stream(2, "first"), 0), (Stream(3, "second", "third"), 2), (Stream(0, "third"), 2)):
        found.opened(stream)  # type: ignore[arg-type]
        assert found.elections == elections
    assert found.disconnects == 5


def test_a_snapshot_is_running_then_completed_or_aborted() -> None:
    """At most one of the three at a time; the start that continues an aborted snapshot completes it."""
    controls = SnapshotControls()
    taken = SimpleNamespace(state=snapshot_state.SnapshotState("x", planned=("shop.a", "shop.b")), controls=controls)
    found = metrics.Metrics("shop")

    def states(now: float) -> tuple[float, ...]:
        values = told(found, now=now)
        return tuple(
            values["snapshot", f"Snapshot{name}"] for name in ("Running", "Completed", "Aborted", "DurationInSeconds")
        )

    assert states(0) == (0, 0, 0, 0)
    found.snapshot.begun(taken, at=10)  # type: ignore[arg-type]
    assert states(15) == (1, 0, 0, 5)
    for is_paused in (True, False):
        controls.pause(is_paused)
        paused_and_running = [told(found)["snapshot", name] for name in ("SnapshotPaused", "SnapshotRunning")]
        assert paused_and_running == [is_paused, not is_paused]  # as in Debezium
    assert told(found)["snapshot", "SnapshotPausedDurationInSeconds"] > 0
    taken.state = taken.state.advanced("shop.a", snapshot_state.CollectionState(chunks=2, documents=7, completed=True))
    assert told(found)["snapshot", "RemainingTableCount"] == 1
    assert told(found)["snapshot", "RowsScanned", "shop.a"] == 7
    found.snapshot.ended(at=20)
    assert states(90) == (0, 0, 1, 10)
    found.snapshot.begun(taken, at=100)  # type: ignore[arg-type]
    taken.state = taken.state.advanced("shop.b", snapshot_state.CollectionState(completed=True))
    found.snapshot.ended(at=101)
    assert states(200) == (0, 1, 0, 1)
    read = taken.state
    # A collection that ends this way is not retried in this run: it is no longer planned, and was not read.
    for taken.state in (
        read.advanced("shop.b", snapshot_state.CollectionState(failed="error 2")),
        read.without(read.planned),
    ):
        found.snapshot.ended(at=101)
        assert states(200) == (0, 0, 1, 1)
    taken.state = read.without(["shop.b"])
    found.snapshot.ended(at=101)
    assert states(200) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("size", "retention", "hours"),
    [
        (100, 0, 6),  # full: the position is 6 hours from its end
        (50, 0, 16),  # half full: as much again fits, 10 hours at this rate
        (100, 48, 44),  # kept for 48 hours, and the position is 4 hours old
        (120, 0, 6),
    ],
)
def test_headroom(size: int, retention: int, hours: int) -> None:
    """The time until a position falls off, from what the oplog contains, its free space, and its minimum retention."""
    hour = 3600
    oplog = mongodb_server.Oplog(mongodb_server.OplogWindow(0, 10 * hour), size, 100, retention * hour)
    assert oplog.headroom_seconds(6 * hour) == hours * hour


def test_a_look_at_the_oplog_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any error the headroom is unknown, and shown again when the next look succeeds."""
    halt, found, looks = threading.Event(), metrics.Metrics("shop"), iter([KeyError("size"), None])
    log = SimpleNamespace(position=SimpleNamespace(token="8200000001000000012B022C0100296E04"))
    source = SimpleNamespace(oplog_headroom_warning_hours=0)
    deployment = SimpleNamespace(client=None, source=source)

    def looked(_: object) -> mongodb_server.Oplog:
        failure = next(looks)
        if failure is not None:
            raise failure
        halt.set()
        return mongodb_server.Oplog(mongodb_server.OplogWindow(0, 3601), 100, 100)

    monkeypatch.setattr(mongodb_server, "oplog", looked)
    monkeypatch.setattr(oplog_watch, "OPLOG_EVERY", 0.01)
    oplog_watch.OplogWatch(deployment, log, found, halt).run()  # type: ignore[arg-type]
    assert found.headroom_hours == pytest.approx(1 / 3600)


def test_who_connects_and_asks_nothing_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host that vanished before its request stays silent: over months there may be many."""
    monkeypatch.setattr(metrics._SilentHandler, "timeout", 0.2)
    port = processes.free_port()
    before = threading.active_count()
    with metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(
            ("127.0.0.1", port), timeout=10
        ) as probe:  # like a load balancer's, which ends it with a reset
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert "debezium_metrics_Connected" in " ".join(metrics.scrape("shop", port=port, address="127.0.0.1"))
    captures.until(lambda: threading.active_count() <= before)  # the answer arrives before its thread has ended
    assert not capfd.readouterr().err


def test_what_somebody_else_shows_at_the_port_is_not_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another pipeline's capture, or a program with another protocol. No proxy of the environment is used for this host."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def speak() -> None:
            connection = other.accept()[0]
            with connection:
                connection.recv(1000)
                connection.sendall(b"\xff\xfenothing of HTTP\r\n")

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        assert metrics.scrape("shop", port=port, address="127.0.0.1") == {}
        speaker.join(5)
    with metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1"):
        assert metrics.scrape("mall", port=port, address="127.0.0.1") == {}
        assert metrics.scrape("shop", port=port, address="127.0.0.1")["medallion_restarts"] == 0


@contextlib.contextmanager
def another_program(speak: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a program that begins an answer, and continues it with `speak` until nobody reads it any more."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection = other.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                speak(connection)

        threading.Thread(target=answer, daemon=True).start()
        yield other.getsockname()[1]


def test_an_answer_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program at the port, which sends for as long as somebody reads, held up status for ever."""
    monkeypatch.setattr(metrics, "MOST_BYTES", 1000)
    is_left = threading.Event()

    def speak(connection: socket.socket) -> None:
        try:
            for _ in range(1000):
                connection.sendall(b"# and so on\n" * 10_000)
        except OSError:
            is_left.set()

    with another_program(speak) as port:
        assert metrics.scrape("shop", port=port, address="127.0.0.1") == {}
        assert is_left.wait(10)


def test_an_answer_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its bytes comes in time, and status waited for the last one."""
    monkeypatch.setattr(metrics, "PATIENCE", 0.3)

    def speak(connection: socket.socket) -> None:
        for _ in range(100):
            connection.sendall(b"#")
            time.sleep(0.1)

    with another_program(speak) as port:
        started = time.monotonic()
        assert metrics.scrape("shop", port=port, address="127.0.0.1") == {}
        assert time.monotonic() - started < 5


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("address", ["::", "::1"] if has_ipv6() else ["0.0.0.0"])
def test_an_address_of_ipv6(address: str) -> None:
    """The port listens there, and status finds it."""
    port = processes.free_port()
    with metrics.serve(metrics.Metrics("shop"), port=port, address=address):
        assert metrics.scrape("shop", port=port, address=address)["medallion_restarts"] == 0


def test_an_address_that_this_machine_lacks_is_no_wrong_port() -> None:
    """Whoever chose another port would get the same error."""
    with (
        pytest.raises(errors.SettingsError, match=r"source.metrics.address: cannot listen on 192\.0\.2\.1:"),
        metrics.serve(metrics.Metrics("shop"), port=processes.free_port(), address="192.0.2.1"),
    ):
        pass


def test_a_capture_that_is_started_twice_is_told_so() -> None:
    """With another port it would only be refused later, because the first one owns the table."""
    port = processes.free_port()
    with metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1"):
        for name, told in (
            ("shop", "a capture of shop is running"),
            ("other", "Address already in use .choose another port"),
        ):
            with (
                pytest.raises(errors.SettingsError, match=f"source.metrics.port: .*{told}"),
                metrics.serve(metrics.Metrics(name), port=port, address="127.0.0.1"),
            ):
                pass
