"""The threads of one run, and the error that ends it.

An error of a thread ends all threads at once. An error of the stream, or of one of its events, ends the run after everything
that was read before it is committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelines.capture import byte_queue

IDLE_WAIT = 0.2
"""Seconds between two checks for the end of the run, in a thread that waits for something else."""
CLOSE_SECONDS = 30.0
"""Seconds to wait for the end of a thread that must finish its work, such as the committer."""
COMMITTER = "capture-committer"
READER = "capture-reader"
SIGNALS = "capture-signals"
SNAPSHOT = "capture-snapshot"


@dataclass
class Threads:
    """The threads of one run. They end when `halt` is set; `queue`, the reader's, is then closed so that none waits at it.

    `failure` is the first error of a thread, `stream_failure` an error of the stream.
    """

    queue: byte_queue.ByteQueue
    halt: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    stream_failure: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread; its error becomes `failure`, which the main thread raises."""

        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                # Keep the first error: later ones are consequences of ending the threads.
                self.failure = self.failure or error
                self.end()

        # A daemon: a thread that waits for an unreachable server must not keep the process alive.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        # Not before: a thread that the system refuses to start cannot be joined.
        self._threads.append(thread)

    def end(self) -> None:
        """Signal the end to all threads."""
        self.halt.set()
        # After `halt`: a reader that the closed queue releases checks `halt` next.
        self.queue.close()

    def is_alive(self, name: str) -> bool:
        """Whether the thread of this name runs."""
        return any(thread.is_alive() for thread in self._threads if thread.name == name)

    def join(self, name: str, *, until: float | None = None) -> None:
        """Wait for the end of a thread, at most until the monotonic time `until`.

        A thread that still runs then commits nothing: a closed `BronzeLog` accepts no rows.
        """
        for thread in self._threads:
            if thread.name == name:
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def join_all(self, *, leave_at: float | None) -> None:
        """Wait for the end of every thread: `CLOSE_SECONDS` for each, or until the monotonic time `leave_at`.

        The committer always gets `CLOSE_SECONDS`, to finish the commit that it has begun.
        """
        for thread in self._threads:
            if leave_at is None or thread.name == COMMITTER:
                thread.join(timeout=CLOSE_SECONDS)
            else:
                thread.join(timeout=max(0.0, leave_at - time.monotonic()))
