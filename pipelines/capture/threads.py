"""The threads of one run: how they start, what ends them, and the error that ends the run.

An error of a thread ends all of them at once. An error of the stream, or of one of its events, ends the run behind what
was read before it: that is committed first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelines.capture import byte_queue

IDLE_WAIT = 0.2
"""Seconds between two checks whether the run is to end, while a thread waits for something else."""
CLOSE_SECONDS = 30.0
"""How long the end of a thread is waited for that must not be left behind."""
COMMITTER = "capture-committer"
READER = "capture-reader"
SIGNALS = "capture-signals"
SNAPSHOT = "capture-snapshot"


@dataclass
class Threads:
    """The threads of one run. `halt` is set when they are to end; `queue` is the reader's, closed so that none waits at it.

    `failure` is the error of a thread, `stream_failure` that of the stream.
    """

    queue: byte_queue.ByteQueue
    halt: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    stream_failure: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread; the main thread raises what it raises."""

        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                # The first one counts: those that follow come of the end that it brought.
                self.failure = self.failure or error
                self.end()

        # A daemon: one that waits for a server that is gone must not hold up the end of the process.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Let every thread see that it is to end."""
        self.halt.set()
        # After `halt`: a reader that is let go from the queue looks at it next, and must find it set.
        self.queue.close()

    def is_alive(self, name: str) -> bool:
        """Whether this thread runs."""
        return any(thread.is_alive() for thread in self._threads if thread.name == name)

    def join(self, name: str, *, until: float | None = None) -> None:
        """Wait for a thread's end; one that waits for a server that does not answer is left behind at `until`.

        It commits nothing after that: a log that is closed takes no rows.
        """
        for thread in self._threads:
            if thread.name == name:
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def join_all(self, *, leave_at: float | None) -> None:
        """Wait for the end of every thread, `CLOSE_SECONDS` for each, or until `leave_at`.

        The committer is never left earlier: what it began is to be in the table.
        """
        for thread in self._threads:
            if leave_at is None or thread.name == COMMITTER:
                thread.join(timeout=CLOSE_SECONDS)
            else:
                thread.join(timeout=max(0.0, leave_at - time.monotonic()))
