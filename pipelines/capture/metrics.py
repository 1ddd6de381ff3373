"""Debezium's snapshot and streaming metrics of a running capture, for Prometheus.

Names and labels are those of Debezium's JMX exporter configuration
(`debezium_metrics_MilliSecondsBehindSource{plugin="mongodb",name="shop",context="streaming"}`), so that the connector's
dashboards work here too. Attributes whose value is text are left out.

The capture counts per batch and per commit; everything else is computed when Prometheus scrapes.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import statistics
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cdc_core import errors
from pipelines.snapshot import queue as snapshot_queue

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from pipelines.bronze import log as bronze_log
    from pipelines.capture.byte_queue import ByteQueue
    from pipelines.mongodb import change_stream

PATIENCE = 3.0
"""Seconds for which `scrape` waits for a capture's metrics."""
MOST_BYTES = 1 << 24
"""The most that `scrape` reads: another program at the port may never end its answer."""
PREFIX = "debezium_metrics_"
KEPT_LAGS = 10_000
"""Commits over which the statistics of the lag are computed."""

LabelValues = Mapping[str, float]
"""A value for each collection, or for each part of a position."""


@dataclass
class StreamingMetrics:
    """The counts of the stream since the service started. Each field is written by one thread only."""

    queue: ByteQueue | None = None
    stream: change_stream.ChangeStream | None = None
    captured: Sequence[str] = ()
    seen: int = 0
    filtered: int = 0
    erroneous: int = 0
    transactions: int = 0
    operations: dict[str, int] = field(default_factory=lambda: dict.fromkeys("cud", 0))
    last_event_at: float | None = None
    last_poll_at: float | None = None
    last_empty_poll_at: float | None = None
    empty_polls: int = 0
    position: tuple[int, int] | None = None
    lags: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LAGS))
    closed_disconnects: int = 0
    closed_elections: frozenset[Any] = frozenset()

    def opened(self, stream: change_stream.ChangeStream) -> None:
        """Use another stream, after a restart of the capture, and keep the counts of the stream before."""
        self.closed_disconnects = self.disconnects
        self.closed_elections = self._known_elections
        self.stream = stream

    def polled(self, events: int, *, at: float) -> None:
        """Count a batch of the reader."""
        self.seen += events
        if events:
            self.last_poll_at = at
        else:
            self.last_empty_poll_at, self.empty_polls = at, self.empty_polls + 1

    def committed(self, operations: Mapping[str | None, int], *, position: tuple[int, int] | None, at: float) -> None:
        """Count a commit: its rows by operation, and the cluster time of the last event."""
        # Heartbeats, signals and other rows that are not events of the source have none of these operations.
        for op in self.operations:
            self.operations[op] += operations.get(op, 0)
        if position is not None:
            self.last_event_at, self.position = at, position
            self.lags.append(max(0.0, (at - position[0]) * 1000))

    @property
    def disconnects(self) -> int:
        return self.closed_disconnects + (self.stream.reconnects if self.stream else 0)

    @property
    def elections(self) -> int:
        """Primary elections since the first stream was opened; the driver also reports the last one before that, which does not count."""
        return max(0, len(self._known_elections) - 1)

    @property
    def _known_elections(self) -> frozenset[Any]:
        return self.closed_elections | self.stream.elections if self.stream else self.closed_elections


@dataclass
class Metrics:
    """All metrics of one capture service, across the runs in it."""

    name: str
    streaming: StreamingMetrics = field(default_factory=StreamingMetrics)
    snapshot: snapshot_queue.SnapshotMetrics = field(default_factory=snapshot_queue.SnapshotMetrics)
    headroom_hours: float | None = None
    restarts: int = 0
    bronze: bronze_log.BronzeLog | None = None
    closed_commits: int = 0

    def opened(self, bronze: bronze_log.BronzeLog) -> None:
        """Use a newly claimed bronze log, after a restart of the capture, and keep the commits counted before."""
        self.closed_commits, self.bronze = self.commits, bronze

    @property
    def commits(self) -> int:
        """The commits of rows since the service started: of the stream, snapshots and heartbeats."""
        return self.closed_commits + (self.bronze.commits if self.bronze is not None else 0)

    def families(self, *, now: float) -> Iterator[Metric]:
        """All metrics at the time `now`, in seconds since 1970."""
        labels = {"plugin": "mongodb", "name": self.name}
        families: dict[str, Metric] = {}
        for context, values in (("streaming", _streaming(self.streaming, now)), ("snapshot", self._snapshot(now))):
            for name, value in values.items():
                family = _family(name, value, {**labels, "context": context})
                # One group per name, as the format asks.
                if (group := families.setdefault(name, family)) is not family:
                    group.samples += family.samples
        yield from families.values()
        yield _gauge("medallion_commits", "Bronze commits since the service started.", self.name, self.commits)
        yield _gauge("medallion_restarts", "Starts after a temporary error.", self.name, self.restarts)
        if self.headroom_hours is not None:
            description = "Hours until the oplog would no longer hold the position, if the capture stopped now."
            yield _gauge("medallion_oplog_headroom_hours", description, self.name, self.headroom_hours)

    def _snapshot(self, now: float) -> dict[str, float | LabelValues]:
        return {
            **_snapshot(self.snapshot, now),
            **_queue(self.streaming.queue),
            "CapturedTables": dict.fromkeys(self.streaming.captured, 1),
            "NumberOfDisconnects": self.streaming.disconnects,
        }


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """One thread per request: a page that takes seconds does not delay the metrics."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        # Only addresses of IPv6 have a colon.
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _SilentHandler(WSGIRequestHandler):
    """Logs no requests. A connection without a request is closed after `timeout` seconds, so that it does not keep its thread."""

    timeout = 30.0

    def handle(self) -> None:
        """Serve the request, if one comes in time, and before the client resets the connection."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


PAGE_SECONDS = 15.0
"""Seconds for which a page is served again: a new one takes Spark queries."""


_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
]
"""Of every answer: a browser runs nothing and loads nothing, whatever names from the source it shows."""


@dataclass
class _Site:
    """The WSGI application: the page at `/`, the metrics at any other path."""

    metrics: Callable[..., Iterable[bytes]]
    page: Callable[[], str]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[float, bytes] | None = None

    def __call__(self, request: Mapping[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]]) -> object:
            return start_response(status, [*headers, *_HEADERS])

        if request.get("PATH_INFO") not in ("", "/", "/index.html"):
            return self.metrics(request, start)
        try:
            body, status, content_type = self._current(), "200 OK", "text/html; charset=utf-8"
        except errors.MedallionError as error:
            body, status, content_type = f"{error}\n".encode(), "503 Service Unavailable", "text/plain; charset=utf-8"
        except Exception as error:  # Named by its class: its text may hold a document.
            text = f"the page could not be created: {type(error).__name__}\n"
            body, status, content_type = text.encode(), "500 Internal Server Error", "text/plain; charset=utf-8"
        start(status, [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]

    def _current(self) -> bytes:
        # Locked during the queries: a second request waits for the same page.
        with self._lock:
            if self._made is None or time.monotonic() - self._made[0] > PAGE_SECONDS:
                self._made = (time.monotonic(), self.page().encode())
            return self._made[1]


@contextlib.contextmanager
def serve(metrics: Metrics, *, port: int | None, address: str, page: Callable[[], str] | None = None) -> Iterator[None]:
    """Serve the metrics at `http://<address>:<port>/metrics`, and the page at `/`, while the block runs; nothing without a port.

    Raises `SettingsError` where the server cannot listen there.
    """
    if port is None:
        yield
        return
    registry = prometheus_client.CollectorRegistry()
    registry.register(_OnScrape(lambda: metrics.families(now=time.time())))
    metrics_app = prometheus_client.make_wsgi_app(registry)
    site = metrics_app if page is None else _Site(metrics_app, page)
    try:
        server = make_server(address, port, site, _MetricsServer, _SilentHandler)
    except OSError as error:
        # Another program has the port, or it is only for the superuser; all other errors are about the address.
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        name, hint = (
            ("port", "choose another port") if is_port else ("address", "an address of this machine, or 0.0.0.0 for all")
        )
        message = f"cannot listen on {address}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE and scrape(metrics.name, port=port, address=address):
            hint = "stop that one first, or choose another port if it is of another lakehouse"
            message = f"a capture of {metrics.name} is running, and listens on {address}:{port}"
        raise errors.SettingsError(errors.Problem(f"source.metrics.{name}", message, hint)) from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # In this order: `serve_forever` must return before its socket is closed.
        server.shutdown()
        server.server_close()
        thread.join(5)


def scrape(name: str, *, port: int | None, address: str) -> dict[str, float]:
    """The current samples of this pipeline's capture at that port, by name with labels; empty where it does not answer in time, or another
    program does."""
    if port is None:
        return {}
    # The wildcard addresses are for listening only.
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(address, address)
    answers: list[dict[str, float]] = []
    # In a thread: the time limit of a connection is one for each part of the answer, which may drip.
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    thread = threading.Thread(target=lambda: answers.append(_scraped(name, url)), name="scrape", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers[0] if answers else {}


def _scraped(name: str, url: str) -> dict[str, float]:
    # Without the proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PATIENCE) as answer:
            families = [*text_string_to_metric_families(answer.read(MOST_BYTES).decode())]
    except (OSError, http.client.HTTPException, ValueError, IndexError):
        return {}
    samples = (sample for family in families for sample in family.samples if sample.labels.get("name") == name)
    return {_sample_name(sample.name, sample.labels): sample.value for sample in samples}


def _sample_name(name: str, labels: Mapping[str, str]) -> str:
    shown_labels = {key: value for key, value in labels.items() if key not in ("plugin", "name")}
    return name + (f"{{{','.join(f'{key}={value}' for key, value in shown_labels.items())}}}" if shown_labels else "")


@dataclass(frozen=True)
class _OnScrape(Collector):
    """Collects the metrics at scrape time."""

    families: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.families()


def _streaming(metrics: StreamingMetrics, now: float) -> dict[str, float | LabelValues]:
    seconds, increment = metrics.position or (-1, -1)
    return {
        "Connected": metrics.stream is not None and metrics.stream.is_open,
        "NumberOfDisconnects": metrics.disconnects,
        "NumberOfPrimaryElections": metrics.elections,
        "TotalNumberOfEventsSeen": metrics.seen,
        "TotalNumberOfCreateEventsSeen": metrics.operations["c"],
        "TotalNumberOfUpdateEventsSeen": metrics.operations["u"],
        "TotalNumberOfDeleteEventsSeen": metrics.operations["d"],
        "NumberOfEventsFiltered": metrics.filtered,
        "NumberOfErroneousEvents": metrics.erroneous,
        "NumberOfUnchangedEventsSkipped": 0,
        "NumberOfCommittedTransactions": metrics.transactions,
        "NumberOfEmptyPolls": metrics.empty_polls,
        "LastSourceEventPollTime": _milliseconds(metrics.last_poll_at),
        "LastEmptyPollTime": _milliseconds(metrics.last_empty_poll_at),
        "MilliSecondsSinceLastEvent": _since(metrics.last_event_at, now),
        "SourceEventPosition": {"sec": seconds, "ord": increment},
        "CapturedTables": dict.fromkeys(metrics.captured, 1),
        **_lags(list(metrics.lags)),
        **_queue(metrics.queue),
    }


def _lags(lags: Sequence[float]) -> dict[str, float]:
    """The lag of the last commit in milliseconds, and the statistics of the recent ones; -1 without a commit, as in Debezium."""
    name = "MilliSecondsBehindSource"
    if not lags:
        return {name: -1}
    # `quantiles` refuses a single value before Python 3.13.
    percentiles = statistics.quantiles(lags, n=100, method="inclusive") if len(lags) > 1 else list(lags) * 99
    return {
        name: lags[-1],
        f"{name}MinValue": min(lags),
        f"{name}MaxValue": max(lags),
        f"{name}AverageValue": statistics.fmean(lags),
        f"{name}P50": percentiles[49],
        f"{name}P95": percentiles[94],
        f"{name}P99": percentiles[98],
    }


def _queue(queue: ByteQueue | None) -> dict[str, float]:
    """The capacity and the use of the queue, all in bytes, because it is bounded by bytes; all uncommitted events count as used."""
    size, used = (queue.max_bytes, queue.held_bytes) if queue else (0, 0)
    return {
        "MaxQueueSizeInBytes": size,
        "CurrentQueueSizeInBytes": used,
        "QueueTotalCapacity": size,
        "QueueRemainingCapacity": max(0, size - used),
    }


def _snapshot(metrics: snapshot_queue.SnapshotMetrics, now: float) -> dict[str, float | LabelValues]:
    state = metrics.newest.state if metrics.newest is not None else None
    controls = metrics.newest.controls if metrics.newest is not None else None
    namespaces = state.planned if state else ()
    collections = {name: state.of(name) for name in namespaces} if state else {}
    is_ended = metrics.ended_at is not None
    is_paused = not is_ended and controls is not None and controls.is_paused
    seconds = (
        0.0 if metrics.began_at is None else (metrics.ended_at if metrics.ended_at is not None else now) - metrics.began_at
    )
    return {
        "SnapshotRunning": state is not None and not is_ended and not is_paused,
        "SnapshotPaused": is_paused,
        "SnapshotCompleted": state is not None and is_ended and not metrics.is_aborted,
        "SnapshotAborted": metrics.is_aborted,
        "SnapshotSkipped": metrics.is_skipped,
        "SnapshotDurationInSeconds": seconds,
        "SnapshotPausedDurationInSeconds": 0 if controls is None else controls.paused_seconds,
        "TotalTableCount": len(namespaces),
        "RemainingTableCount": sum(not collection.completed for collection in collections.values()),
        "RowsScanned": {name: collection.documents for name, collection in collections.items()},
        "TableChunksCompletedCounts": {name: collection.chunks for name, collection in collections.items()},
        "MilliSecondsSinceLastEvent": _since(metrics.last_chunk_at, now),
        "TotalNumberOfEventsSeen": sum(collection.documents for collection in collections.values()),
        "NumberOfEventsFiltered": 0,
        "NumberOfErroneousEvents": 0,
    }


def _milliseconds(at: float | None) -> float:
    return 0 if at is None else round(at * 1000)


def _since(at: float | None, now: float) -> float:
    return -1 if at is None else max(0, round((now - at) * 1000))


def _family(name: str, value: float | LabelValues, labels: Mapping[str, str]) -> Metric:
    description = f"Debezium's {name}."
    if not isinstance(value, Mapping):
        family = UnknownMetricFamily(PREFIX + name, description, labels=list(labels))
        family.add_metric(list(labels.values()), float(value))
        return family
    part = "field" if name == "SourceEventPosition" else "table"
    family = UnknownMetricFamily(PREFIX + name, description, labels=[*labels, part])
    for key, part_value in value.items():
        family.add_metric([*labels.values(), key], float(part_value))
    return family


def _gauge(name: str, about: str, pipeline: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, about, labels=["name"])
    family.add_metric([pipeline], value)
    return family
