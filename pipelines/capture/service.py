"""The capture service: every change event of the source lands in bronze, once, in order.

    reader thread     change stream ─→ raw batches ─→ bounded queue                         (`reader`, `byte_queue`)
    main thread       queue ─→ rows (decode, encode) ─→ at most one full commit waiting     (`main_loop`)
                        whole and new events ─→ rows; signals and renames ─→ plans          (`intake`, `encoder`, `control`)
    committer thread  rows ─→ numbers ─→ Parquet ─→ one Delta commit                        (`committer`)
    snapshot thread   chunks from executors ─→ commits in between (`pipelines.snapshot.queue`, begun by `snapshot_start`)
    signals thread    a file, a table, Kafka ─→ the main thread's inbox (`signal_reader`, `pipelines.channels.signals`)
    oplog thread      warns when the oplog could soon lose the position                     (`oplog_watch`)

The position is in the table (`pipelines.bronze.log`): after `kill -9` at any instant the next start reads it there and
resumes after it (`stream_opener`). A first start commits the stream's token before anything is read (`start`), so that the
stream begins before a snapshot's first chunk. This module runs one `capture.Capture` after the other.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from pipelines.bronze import log as bronze_log
from pipelines.capture import metrics
from pipelines.capture.capture import Capture, CaptureService
from pipelines.capture.logger import log
from pipelines.capture.progress import NOTHING, CaptureProgress, CaptureResult, joined
from pipelines.capture.threads import IDLE_WAIT
from pipelines.delta import tables as delta
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = False,
    take_over: bool = False,
    stop: threading.Event | None = None,
    progress: Callable[[CaptureProgress], None] | None = None,
    sessions: Callable[[], SparkSession] | None = None,
    page: Callable[[SparkSession, Settings], str] | None = None,
    commit_requested: threading.Event | None = None,
    opened: Callable[[bronze_log.BronzeLog], None] | None = None,
) -> CaptureResult:
    """Capture until `stop` is set, or with `once` until everything up to the start of the run is in bronze.

    When the source becomes unreachable, the capture restarts after `retriable.restart.connector.wait.ms`, at most
    `errors.max.retries` times in a row. A first start that does not reach the source raises at once.

    Safe to repeat and to kill: the table carries the position. Raises one of `errors`, after everything that was read before
    the error is committed.

    `page` returns the HTML that `metrics.port` serves at `/`. Setting `commit_requested` requests a commit that says how far bronze is
    complete, even without events. `opened` is called with each newly claimed `BronzeLog`.
    """
    stop = stop or threading.Event()
    service_metrics = metrics.Metrics(settings.name)
    service = CaptureService(
        spark, settings, stop, progress, sessions, service_metrics, commit_requested or threading.Event(), opened
    )

    def shown() -> str:
        assert page is not None
        return page(service.session(), settings)

    port, address = settings.source.metrics_port, settings.source.metrics_address
    # Around all runs: counters that restarted with each run would look like a reset to Prometheus.
    with metrics.serve(service_metrics, port=port, address=address, page=shown if page else None):
        result, attempts = None, 0
        while True:
            capture = None
            try:
                with _connected(service) as capture:
                    return joined(result, capture.run(once=once, take_over=take_over))
            except StoppedBeforeStart:
                return result or NOTHING
            except errors.CommitConflict as error:
                _check_there(service, error)
                raise
            except errors.SourceUnreachable as error:
                has_begun = capture is not None and capture.has_begun
                # Attempts in a row: a run that committed something resets the count.
                attempts = (0 if capture is not None and capture.has_progressed else attempts) + (
                    capture.attempts if capture else 1
                )
                if stop.is_set():
                    return joined(result, capture.result()) if capture is not None and has_begun else result or NOTHING
                # Negative: no limit, as in Debezium.
                is_last = 0 <= settings.source.errors_max_retries < attempts
                # A first start that does not reach its source raises at once: a person is there to see it.
                if is_last or not (has_begun or result):
                    raise
                delay = settings.source.retriable_restart_connector_wait_ms / 1000
                log.warning("%s; restarting the capture in %.1f s", error, delay)
            if capture is not None and has_begun:
                result = joined(result, capture.result())
                # `take_over` named the owner at the start. Whoever has claimed the table since is another one.
                take_over = False
            service_metrics.restarts += 1
            if stop.wait(delay) and result is not None:
                return result


def _check_there(service: CaptureService, error: errors.CommitConflict) -> None:
    """Raise `DecisionNeeded` where the error came because bronze is gone. Not temporary: a restart would make a new table."""
    table = delta.layout(service.settings.lakehouse).bronze(service.settings.name)
    if not delta.exists(service.spark, table):
        raise errors.DecisionNeeded(
            f"{table.label}: the table is gone: it was removed or moved, or its disk is not mounted. Put it back and start "
            "again. Without it, a start makes a new table with a new snapshot, and silver has to be rebuilt from that"
        ) from error


class StoppedBeforeStart(Exception):
    """The run was stopped while it waited for the server's first answer; nothing was changed."""


def check_source(settings: Settings, stop: threading.Event | None = None) -> None:
    """Raise what `run` would raise for a source that it cannot reach, log in to or follow, without starting Spark.

    Raises `StoppedBeforeStart` where `stop` is set before the server has answered.
    """
    with _suitable(settings, stop or threading.Event()):
        pass


def _answer(request: Callable[[], mongodb_server.ServerInfo], stop: threading.Event) -> mongodb_server.ServerInfo:
    """The server's answer to a request; raises `StoppedBeforeStart` where `stop` is set first."""
    answers: queue.SimpleQueue[mongodb_server.ServerInfo | BaseException] = queue.SimpleQueue()

    def send() -> None:
        try:
            answers.put(request())
        except BaseException as error:  # Raised by the thread that waits.
            answers.put(error)

    # The driver cannot be interrupted during server selection: after a stop its daemon thread is abandoned.
    threading.Thread(target=send, name="capture-connecting", daemon=True).start()
    while True:
        try:
            answer = answers.get(timeout=IDLE_WAIT)
        except queue.Empty:
            if stop.is_set():
                raise StoppedBeforeStart from None
        else:
            if isinstance(answer, BaseException):
                raise answer
            return answer


@contextlib.contextmanager
def _suitable(settings: Settings, stop: threading.Event) -> Iterator[tuple[connections.Connection, mongodb.Client]]:
    """A connection and a client of the source, which is checked first; the client is closed at the end."""
    connection = connections.connection(settings.source)
    client = connection.client()
    try:
        info = _answer(functools.partial(mongodb_server.server_info, client), stop)
        mongodb_server.check_suitable(info)
        connections.check_oversize(settings.source, info)
        yield connection, client
    finally:
        mongodb.close(client)


@contextlib.contextmanager
def _connected(service: CaptureService) -> Iterator[Capture]:
    """A capture with its own client, both closed at the end."""
    with _suitable(service.settings, service.stop) as (connection, client):
        capture = Capture(service, connection, client)
        try:
            yield capture
        finally:
            capture.close()
