"""Runs capture, silver and gold in one Spark application, makes requested cuts, and maintains tables in quiet hours."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from pipelines import clock, standstill
from pipelines.bronze import log as bronze_log
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureProgress, CaptureResult, refuse_unread
from pipelines.delta import owners, query_execution
from pipelines.gold import expectations, publish
from pipelines.gold.run import GoldResult
from pipelines.new_commits import NewCommits
from pipelines.operations import cut, cut_requests, maintain
from pipelines.page import page as pages
from pipelines.silver import run as silver
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm, parallel
from pipelines.spark import session as sparks
from pipelines.work_progress import WorkProgress

log = logging.getLogger(__name__)

Layer = Callable[[threading.Event], object]

SNAPSHOT_SECONDS = 30.0
"""Silver starts when the initial snapshot is in bronze, at the latest after so long: a small snapshot is then merged at once."""

RUN_SECONDS = 60.0
"""A Spark that ended sooner would probably end again: the error goes to the scheduler instead."""

IDLE_SECONDS = 0.5

STOP_SECONDS = 8.0
"""Layers may take so long to end after `stop`, then they are abandoned. A commit is atomic: it happens or not."""

ABANDONED_SECONDS = 60.0
"""How long the next run waits for layers that the one before has abandoned, such as a capture whose MongoDB or Kafka does not answer."""


def run_again(
    spark: SparkSession,
    settings: Settings,
    *,
    again: Callable[[], SparkSession],
    once: bool,
    take_over: bool = False,
    stop: threading.Event,
    progress: Callable[[CaptureProgress], None] | None = None,
    turn: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    work: Callable[[WorkProgress], None] | None = None,
) -> dict[str, object]:
    """The result of `run`, which starts again in a new session (from `again`) whenever Spark's JVM has ended.

    Every table carries its own position, so the layers continue where they were. Raises `SparkLost` if the JVM ended within
    `RUN_SECONDS`, or if the session is not ours to start.
    """
    gates: list[expectations.Gate] = []
    while True:
        started_at = time.monotonic()
        try:
            return run(
                spark,
                settings,
                once=once,
                take_over=take_over,
                stop=stop,
                progress=progress,
                turn=turn,
                work=work,
                gates=gates,
            )
        except Exception as error:
            is_early = time.monotonic() - started_at < RUN_SECONDS
            _check_lost(error, is_final=stop.is_set() or is_early or sparks.is_given() or not sparks.is_local(spark))
        log.warning("Spark ended; starting another JVM, and every layer continues from its tables")
        jvm.forget()
        # A thread that was abandoned at its work may keep a writer alive, which commits nothing without its JVM.
        owners.HELD.clear()
        spark, take_over = again(), False  # take_over was meant for the owners at the first start


def _check_lost(error: Exception, *, is_final: bool) -> None:
    """Raise the error unless it is the loss of Spark; with `is_final` also that."""
    # Here, so that no variable keeps it: its frames hold all that the run had read, while the next one runs for weeks.
    spark_error = spark_failures.translated(error)
    if not isinstance(spark_error, errors.SparkLost):
        raise error
    if is_final:
        raise spark_error from error


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool,
    take_over: bool = False,
    stop: threading.Event,
    progress: Callable[[CaptureProgress], None] | None = None,
    turn: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    work: Callable[[WorkProgress], None] | None = None,
    gates: list[expectations.Gate] | None = None,
) -> dict[str, object]:
    """The result of each layer by its name, after all have ended.

    With `once` the layers run one after another, each up to what exists when it starts, and inside `turn` of its name; otherwise all
    run at the same time until `stop` is set. `progress` hears how far the capture is, `work` how far silver and gold are. A layer that fails stops the others cleanly, and its error is raised. Every table carries
    its own position: the next run continues from there. `gates` keeps the expectations for the next run of the same service.
    """
    if not once:
        query_execution.share(spark)
    halt = stop if once else threading.Event()  # a failed layer halts the others; `stop` belongs to the caller
    sessions, layer_results = sparks.sessions(spark), _LayerResults()
    layers = _Run(settings, sessions, once, take_over, halt, progress, work, [] if gates is None else gates).layers()
    with sparks.cancelling(spark, halt) as cancelled:
        _in_turn(layers, layer_results, stop=stop, turn=turn) if once else _together(
            layers, layer_results, stop=stop, halt=halt
        )
    for error, came_after in layer_results.failures:
        if not (came_after and cancelled.is_set()):
            raise _with_unread(error, layer_results.results.get("capture")) if once else error
    layer_results.results.pop("cuts", None)  # not a layer; the log has each cut
    gold_results = layer_results.results.pop("gold", None)
    return layer_results.results | (gold_results if isinstance(gold_results, dict) else {})


def _with_unread(error: BaseException, captured: object) -> BaseException:
    """The error of a layer, together with that of snapshots that failed before it: no later run tells of those of signals.

    Without an error, the command tells of them after it has shown the results.
    """
    if not isinstance(captured, CaptureResult) or not isinstance(error, errors.MedallionError):
        return error
    try:
        refuse_unread(captured, is_stopped=False)
    except errors.CollectionsFailed as unread:
        return errors.together({"capture": unread, "silver or gold": error})
    return error


@dataclass
class _Run:
    """The layers of one run, each a function of its stop event, and the signals between them."""

    settings: Settings
    sessions: Callable[[], SparkSession]
    once: bool
    take_over: bool
    halt: threading.Event
    progress: Callable[[CaptureProgress], None] | None
    work: Callable[[WorkProgress], None] | None = None
    gates: list[expectations.Gate] = field(default_factory=list)
    """The expectations as they were at the start of the service, also when gold starts again after a cut, or with another JVM."""
    of_bronze: NewCommits = field(default_factory=NewCommits)
    of_silver: NewCommits = field(default_factory=NewCommits)
    still: standstill.Standstill = field(default_factory=standstill.Standstill)
    has_read_snapshots: threading.Event = field(default_factory=threading.Event)
    commit_requested: threading.Event = field(default_factory=threading.Event)
    bronze: bronze_log.BronzeLog | None = None
    batches: int = 0

    def layers(self) -> Mapping[str, Layer]:
        """The layers by name, in the order in which `once` runs them."""
        if self.once:
            return {"capture": self._capture, "silver": self._silver, "gold": self._gold}
        silver_rounds = self.still.stoppable("silver", self._silver, together=silver.together)
        gold_rounds = self.still.stoppable("gold", self._gold, together=_published_together)
        layers: dict[str, Layer] = {
            "cuts": self._cuts,
            "capture": self._capture,
            "silver": silver_rounds,
            "gold": gold_rounds,
        }
        is_maintained = self.settings.maintenance.quiet_hours is not None
        return {**layers, "maintain": self._maintain} if is_maintained else layers

    def _on_progress(self, now: CaptureProgress) -> None:
        """Wake silver when bronze has a new batch, and pass the progress on."""
        if now.batches != self.batches:
            self.batches = now.batches
            self.of_bronze.tell()
        if now.has_read_snapshots:
            self.has_read_snapshots.set()
        if self.progress is not None:
            self.progress(now)

    def _capture(self, stop: threading.Event) -> object:
        try:
            return capture.run(
                self.sessions(),
                self.settings,
                once=self.once,
                take_over=self.take_over,
                stop=stop,
                progress=self._on_progress,
                sessions=self.sessions,
                page=pages.text,
                commit_requested=self.commit_requested,
                opened=self._take_bronze,
            )
        finally:
            self.bronze = None

    def _take_bronze(self, opened: bronze_log.BronzeLog) -> None:
        """Remember bronze's writer while the capture runs: with `snapshot.mode: initial_only` it ends before the other layers."""
        self.bronze = opened

    def _silver(self, stop: threading.Event) -> silver.SilverResult:
        end = time.monotonic() + (0 if self.once else SNAPSHOT_SECONDS)
        while not (stop.is_set() or self.has_read_snapshots.is_set()) and time.monotonic() < end:
            self.has_read_snapshots.wait(0.2)
        return silver.run(
            self.sessions(),
            self.settings,
            once=self.once,
            take_over=self.take_over,
            sessions=self.sessions,
            stop=stop,
            bronze_news=self.of_bronze,
            news=self.of_silver,
            progress=self.work,
        )

    @property
    def _gate(self) -> expectations.Gate:
        if not self.gates:
            self.gates.append(publish.gate(self.sessions(), self.settings))
        return self.gates[0]

    def _gold(self, stop: threading.Event) -> dict[str, object]:
        return publish.run(
            self.sessions(),
            self.settings,
            once=self.once,
            take_over=self.take_over,
            sessions=self.sessions,
            stop=stop,
            silver_news=self.of_silver,
            audit=None if self.once else self._gate,
            progress=self.work,
        )

    def _maintain(self, stop: threading.Event) -> object:
        def act() -> None:
            failures = parallel.Failures()
            session, bronze = self.sessions(), self.bronze
            result = maintain.run(session, self.settings, beside_writers=True, capture=bronze, stop=stop, failures=failures)
            # The command shows these lines in a table, which a service has not.
            for entry in result.tables:
                for line in entry.left:
                    log.info("%s: %s", entry.table, line)
            failures.raised()

        return _kept(self.settings, act, stop=stop)

    def _cuts(self, stop: threading.Event) -> object:
        return cut_requests.serve(self.sessions(), self.settings, self._make_cut, stop=stop)

    def _make_cut(self, as_of: str) -> cut.Cut:
        # A cut writes the tables of silver and gold: their claims must be free.
        with self.still.standing(self.halt):
            self.take_over = False  # take_over was meant for the owners at the start
            return cut.run(
                self.sessions(),
                self.settings,
                as_of=as_of,
                sessions=self.sessions,
                stop=self.halt,
                patience=cut.PATIENCE_SECONDS,
                ask=self.commit_requested.set,
            )


def _published_together(before: dict[str, object], last: dict[str, object]) -> dict[str, object]:
    """The results of two runs of gold as one; models in a service have no result."""
    results = before.get("gold"), last.get("gold")
    if isinstance(results[0], GoldResult) and isinstance(results[1], GoldResult):
        return {**last, "gold": GoldResult(results[0].changed + results[1].changed, results[0].seconds + results[1].seconds)}
    return {**before, **last}


LOOK_SECONDS = 30.0


def _kept(settings: Settings, act: Callable[[], object], *, stop: threading.Event) -> int:
    """Call `act` once each time the quiet hours begin, until `stop`; returns how often it succeeded. Its errors are only logged."""
    quiet, count, is_done = settings.maintenance.quiet_hours, 0, False
    assert quiet is not None
    while not stop.is_set():
        is_quiet = quiet.holds(clock.now_ms() // 60_000 % 1440)
        # Once a night, even if the maintenance ends long before the quiet hours do.
        if is_quiet and not is_done:
            try:
                act()
                count += 1
            except Exception as error:  # the next quiet hours try again
                message = str(error) if isinstance(error, errors.MedallionError) else type(error).__name__
                log.warning("maintenance failed: %s", message)
        is_done = is_quiet
        stop.wait(LOOK_SECONDS)
    return count


@dataclass
class _LayerResults:
    """The results of the layers, and their errors, each with whether it came after the halt: a job that was cancelled is no error."""

    results: dict[str, object] = field(default_factory=dict)
    failures: list[tuple[BaseException, bool]] = field(default_factory=list)


def _in_turn(
    layers: Mapping[str, Layer],
    ended: _LayerResults,
    *,
    stop: threading.Event,
    turn: Callable[[str], AbstractContextManager[object]],
) -> None:
    """Run each layer after the one before it; if collections fail in silver, gold processes the others."""
    for name, layer in layers.items():
        if stop.is_set():
            break
        try:
            with turn(name):
                ended.results[name] = layer(stop)
        except Exception as error:
            if name == "capture" or isinstance(spark_failures.translated(error), errors.SparkLost):
                raise
            ended.failures.append((error, stop.is_set()))
    # `run` raises the first failure: put the most severe one there.
    if ended.failures:
        worst = errors.worst([each for each, _ in ended.failures])
        ended.failures.sort(key=lambda failure: failure[0] is not worst)


def _together(layers: Mapping[str, Layer], ended: _LayerResults, *, stop: threading.Event, halt: threading.Event) -> None:
    """Run each layer in its own thread until `stop` is set or one fails; then set `halt`, wait `STOP_SECONDS`, and abandon the rest."""

    def body(name: str, layer: Layer) -> None:
        try:
            ended.results[name] = layer(halt)
        except BaseException as error:
            ended.failures.append((error, halt.is_set()))
            halt.set()

    threads = [threading.Thread(target=body, args=(name, layer), name=name, daemon=True) for name, layer in layers.items()]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not (stop.wait(IDLE_SECONDS) or halt.is_set()):
        pass
    halt.set()
    deadline = time.monotonic() + STOP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        jvm.abandon()
    # Another run may follow in this process, and needs what they hold: the port of the metrics, for example.
    end = time.monotonic() + ABANDONED_SECONDS
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end and not stop.wait(IDLE_SECONDS):
        pass
