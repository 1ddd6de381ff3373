"""What SIGTERM and Ctrl-C do to a command."""

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
"""A signal so soon after the first is the same request: `timeout` sends one to its command, and one to the group that it is in."""


STOP_SECONDS = 45.0
"""So long a stop waits for the end of what is being written, of which a store that hangs may keep the answer for hours: less than who
started the command waits before it kills."""


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; a second one interrupts at once, and so does the end of `STOP_SECONDS`."""
    stop, asked = threading.Event(), 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if not asked:
            asked = time.monotonic()
            # In a thread: the one that was interrupted holds the event's lock for a moment each time that it waits for the event.
            try:
                threading.Thread(target=stop.set, name="stop", daemon=True).start()
            except RuntimeError:  # it may start no more threads
                stop.set()
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)
        elif time.monotonic() >= asked + AGAIN_SECONDS:
            # Other threads wait for the JVM, too: without it their calls fail, and the process can end.
            abandon()
            raise KeyboardInterrupt

    with _handling(ask, signal.SIGALRM):
        try:
            yield stop
        finally:
            if asked:
                signal.setitimer(signal.ITIMER_REAL, 0)


def finished(spark: SparkSession, stop: threading.Event, run: Callable[[], Result]) -> Result:
    """What a run gives that has one end; `Temporary` where it was stopped before, and its jobs were cancelled."""
    from cdc_core import errors
    from pipelines.spark import session as sparks

    with sparks.cancelling(spark, stop):
        return run()
    raise errors.Temporary("stopped before it was done; committed data is safe. Start it again")


PATIENCE = 2
"""How often Ctrl-C or SIGTERM wait for the end of what is being written; the next one interrupts."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block of seconds that writes one thing: Ctrl-C and SIGTERM wait for its end, and it is done then."""
    requests = itertools.count(1)

    def ask(number: int, frame: object) -> None:
        if next(requests) > PATIENCE:
            raise KeyboardInterrupt

    with _handling(ask):
        yield


@contextmanager
def _handling(ask: Callable[[int, object], None], *others: signal.Signals) -> Iterator[None]:
    """Handles SIGTERM and Ctrl-C, and others, in a block; in another thread than the main one the block is as it is without."""
    # Python allows handlers of signals in the main thread only; tests and notebooks run commands in others.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def abandon() -> None:
    """End the JVM, so that no call waits for Spark any more."""
    # Imported only where Spark was: a command without it ends at once.
    if "pyspark" in sys.modules:
        from pipelines.spark import jvm

        jvm.abandon()
