"""Pauses running layers: each ends its round, releases its claims, and starts again afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cdc_core import errors
from pipelines.spark import failures as spark_failures

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LOOK_SECONDS = 0.2


class Standstill:
    """Pauses the layers that it wraps between two of their rounds, any number of times."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._layers: set[str] = set()
        self._standing: set[str] = set()
        self._changed = threading.Condition()

    def stoppable(
        self, name: str, layer: Callable[[threading.Event], Result], *, together: Callable[[Result, Result], Result]
    ) -> Callable[[threading.Event], Result]:
        """The layer, started again after each pause; `together` combines the results of two runs."""
        self._layers.add(name)

        def body(stop: threading.Event) -> Result:
            total: Result | None = None
            while True:
                try:
                    result = layer(Either(stop, self._requested))
                    # Combined at once: a service with a cut each minute would collect a list of results for weeks.
                    total = result if total is None else together(total, result)
                except Exception as error:
                    # The end of a round raises the errors of failed collections, a bug's too; the next round raises them again.
                    failure = spark_failures.translated(error) or error
                    if stop.is_set() or not self._requested.is_set() or isinstance(failure, errors.SparkLost):
                        raise
                    log.warning("%s has stopped, because of this earlier error: %s", name, errors.message_of(failure))
                if stop.is_set() and total is not None:
                    return total
                self._stand(name, stop)

        return body

    @contextmanager
    def standing(self, stop: threading.Event) -> Iterator[None]:
        """A block during which no layer runs. Raises `Temporary` if `stop` is set before all layers have paused."""
        self._requested.set()
        try:
            with self._changed:
                while self._standing != self._layers and not stop.is_set():
                    self._changed.wait(LOOK_SECONDS)
            if stop.is_set():
                raise errors.Temporary("stopped before silver and gold had paused")
            yield
        finally:
            with self._changed:
                self._requested.clear()
                self._changed.notify_all()

    def _stand(self, name: str, stop: threading.Event) -> None:
        with self._changed:
            self._standing.add(name)
            self._changed.notify_all()
            while self._requested.is_set() and not stop.is_set():
                self._changed.wait(LOOK_SECONDS)
            self._standing.discard(name)


class Either(threading.Event):
    """An event that is set while any of several events is set."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        """Whether any of the events is set."""
        return any(each.is_set() for each in self._events)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the first of the events."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            remaining = LOOK_SECONDS if end is None else min(LOOK_SECONDS, end - time.monotonic())
            if remaining <= 0:
                return False
            self._events[0].wait(remaining)
        return True
