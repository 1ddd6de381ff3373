"""Handles SIGTERM and Ctrl-C in commands."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")


AGAIN_SECONDS = 0.5
"""A second signal within this time is the same request: `timeout` signals its command and also the process group."""


STOP_SECONDS = 45.0
"""How long a stop waits for running writes, because a store that hangs may not answer for hours; less than the time after which schedulers
kill."""


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM or Ctrl-C sets. A second signal, or the end of `STOP_SECONDS`, interrupts at once."""
    stop, interrupted_at = threading.Event(), 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal interrupted_at
        if not interrupted_at:
            interrupted_at = time.monotonic()
            # In a thread: the interrupted thread may hold the event's lock, which it takes whenever it waits for the event.
            try:
                threading.Thread(target=stop.set, name="stop", daemon=True).start()
            except RuntimeError:  # no more threads can be started
                stop.set()
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)
        elif time.monotonic() >= interrupted_at + AGAIN_SECONDS:
            # Other threads also wait for the JVM: without it their calls fail, and the process can end.
            abandon()
            raise KeyboardInterrupt

    with _handling(ask, signal.SIGALRM):
        try:
            yield stop
        finally:
            if interrupted_at:
                signal.setitimer(signal.ITIMER_REAL, 0)


def finished(spark: SparkSession, stop: threading.Event, run: Callable[[], Result]) -> Result:
    """The result of `run`; raises `Temporary` if `stop` cancelled its jobs."""
    from cdc_core import errors
    from pipelines.spark import session as sparks

    with sparks.cancelling(spark, stop):
        return run()
    raise errors.Temporary("stopped before it was done; committed data is safe. Start it again")


PATIENCE = 2
"""The number of signals that `undisturbed` ignores; the next one interrupts."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """A short block with a single write, which Ctrl-C and SIGTERM do not interrupt, up to `PATIENCE` times."""
    requests = itertools.count(1)

    def ask(number: int, frame: object) -> None:
        if next(requests) > PATIENCE:
            raise KeyboardInterrupt

    with _handling(ask):
        yield


@contextmanager
def _handling(ask: Callable[[int, object], None], *others: signal.Signals) -> Iterator[None]:
    """Handle SIGTERM, Ctrl-C and `others` in a block; does nothing outside the main thread."""
    # Python only allows signal handlers in the main thread; tests and notebooks also use others.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, *others)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def abandon() -> None:
    """End the JVM, so that no call waits for Spark."""
    # Import nothing if Spark was not used: then the command ends at once.
    if "pyspark" in sys.modules:
        from pipelines.spark import jvm

        jvm.abandon()
