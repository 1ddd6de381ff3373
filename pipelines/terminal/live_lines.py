"""What a command waits for, and how far a capture is: live lines on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from pipelines import signs
from pipelines.operations import units

if TYPE_CHECKING:
    from pipelines.capture.progress import CaptureProgress
    from pipelines.snapshot.snapshot import SnapshotProgress
    from pipelines.work_progress import WorkProgress

log = logging.getLogger("pipelines.capture.service")
"""The logger of a capture's other lines: users search the log by this name."""

PROGRESS = "progress: %s"
"""The message of the log lines about how far long work is."""

LOG_EVERY_SECONDS = 30.0

SHORT_SECONDS = 10.0
"""Work that takes no longer gets no log line: a service works on a few events many times a minute."""

_SHOWN: list[Status] = []
"""The live line that is shown: a second one would write over it."""


@contextmanager
def waiting(what: str, *, is_logged: bool = False) -> Iterator[None]:
    """Shows what a command waits for, as a live line on a terminal; inside another such line, in its place.

    Elsewhere, if `is_logged`, as a log line every 30 seconds: for long work that has no progress of its own.
    """
    if sys.stderr.isatty():
        with _shown(what):
            yield
    elif is_logged:
        with _logged(what):
            yield
    else:
        yield


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs every 30 seconds for how long the block has been running."""
    began, has_ended = time.monotonic(), threading.Event()

    def log_time() -> None:
        while not has_ended.wait(LOG_EVERY_SECONDS):
            line = f"{what}: running for {units.duration(time.monotonic() - began)}"
            logging.getLogger(f"pipelines.{what}").info(PROGRESS, line)

    threading.Thread(target=log_time, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


@contextmanager
def _shown(what: str) -> Iterator[Status]:
    """The live line, with this text until the end of the block."""
    for line in _SHOWN:
        outer = line.status
        line.update(what)
        try:
            yield line
        finally:
            line.update(outer)
        return
    with _cursor_comes_back(), Console(stderr=True, highlight=False).status(what) as line:
        _SHOWN.append(line)
        try:
            yield line
        finally:
            _SHOWN.clear()


@contextmanager
def _cursor_comes_back() -> Iterator[None]:
    """Shows the cursor, which a live line hides, also where SIGTERM ends the process: at once, unless the command handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        os.write(2, _CLEAR_LINE_SHOW_CURSOR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"


@contextmanager
def capture_progress() -> Iterator[Callable[[CaptureProgress], None]]:
    """Yields a callback that shows a capture's progress: a live line on a terminal, else a log line every 30 seconds."""
    if not sys.stderr.isatty():
        yield _ProgressLog().hear
        return
    with _shown("capture: connecting") as live:
        rate = Rate()
        yield lambda now: live.update(Text(signs.escaped(described(now, rate=rate.of(now.events)))))


def work_progress(*, is_service: bool = False) -> Callable[[WorkProgress], None]:
    """A callback that shows how far work over many tables is: in the live line that is shown (of a service it is the capture's), else as a
    log line every 30 seconds.
    """
    return _work_log() if is_service or not sys.stderr.isatty() else _show_work


def _show_work(now: WorkProgress) -> None:
    for line in _SHOWN:
        # A service then waits, maybe for hours.
        line.update(_RunningWork(now) if now.tables < now.all_tables else Text(now.work))


class _RunningWork:
    """The line about work, whose time goes on each time it is rendered."""

    def __init__(self, now: WorkProgress) -> None:
        self._now, self._heard_at = now, time.monotonic()

    def __rich__(self) -> Text:
        return Text(work_line(_later(self._now, self._heard_at)))


def _later(heard: WorkProgress, heard_at: float) -> WorkProgress:
    """The progress as of now, where nothing more was heard."""
    return replace(heard, seconds=heard.seconds + time.monotonic() - heard_at)


def _work_log() -> Callable[[WorkProgress], None]:
    logs: defaultdict[str, _WorkLog] = defaultdict(_WorkLog)
    return lambda now: logs[now.work].hear(now)


class _WorkLog:
    """Logs how far work is every `LOG_EVERY_SECONDS`, also during a step that takes minutes, such as a MERGE of a large table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._newest: WorkProgress | None = None
        self._heard_at = self._logged_at = -math.inf

    def hear(self, now: WorkProgress) -> None:
        with self._lock:
            self._newest, self._heard_at = now, time.monotonic()
            self._log(now)
            if self._timer is None:
                self._wait()

    def _again(self) -> None:
        """Log the newest progress once more if nothing was heard meanwhile; ends with the work."""
        with self._lock:
            self._timer, now = None, self._newest
            if now is not None and now.tables < now.all_tables:
                self._log(_later(now, self._heard_at))
                self._wait()

    def _wait(self) -> None:
        seconds_left = self._logged_at + LOG_EVERY_SECONDS - time.monotonic()
        self._timer = threading.Timer(seconds_left if seconds_left > 0 else LOG_EVERY_SECONDS, self._again)
        self._timer.daemon = True
        self._timer.start()

    def _log(self, now: WorkProgress) -> None:
        if now.seconds > SHORT_SECONDS and time.monotonic() >= self._logged_at + LOG_EVERY_SECONDS:
            self._logged_at = time.monotonic()
            logging.getLogger(f"pipelines.{now.work}").info(PROGRESS, work_line(now))


class Rate:
    """The rate over the last ten seconds of a count that grows; `of` may be called hundreds of times a second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, count: int) -> float:
        now = self._clock()
        while self._seen and now - self._seen[0][0] > 10:
            self._seen.popleft()
        if not self._seen or now - self._seen[-1][0] >= 0.1:
            self._seen.append((now, count))
        first_at, first_count = self._seen[0]
        return (count - first_count) / (now - first_at) if now > first_at else 0.0


def described(now: CaptureProgress, *, rate: float) -> str:
    """A capture's progress as one line: the snapshot if one runs, then the stream."""
    parts = []
    if now.snapshot is not None and now.snapshot.seconds_left != 0:
        parts.append(snapshot_line(now.snapshot))
    # The lag is that of the last commit: it says nothing about a stream that has been quiet since.
    lag = f", {now.lag_seconds:.0f} s behind" if rate and now.lag_seconds is not None else ""
    parts.append(f"stream: {now.events:,} events, {rate:,.0f}/s{lag}")
    if now.reconnects:
        parts.append(f"{now.reconnects} reconnects")
    return " · ".join(parts)


def snapshot_line(now: SnapshotProgress) -> str:
    """A snapshot's progress: documents read, estimated total, rate, time left."""
    remaining = "" if now.seconds_left is None else f", {units.duration(now.seconds_left)} left"
    return (
        f"snapshot of {now.collection}: {now.total_documents:,} of about {max(now.total_about, now.total_documents):,} "
        f"documents, {now.rate:,.0f}/s{remaining}"
    )


def work_line(now: WorkProgress) -> str:
    """How far work is: its tables, and its events where they were counted beforehand, with their rate and the time left; else its time."""
    line = f"{now.work}: {now.tables:,} of {now.all_tables:,} tables"
    if now.all_events:
        line += f", {now.events:,} of {now.all_events:,} events"
    elif now.seconds > SHORT_SECONDS and now.tables < now.all_tables:
        line += f", running for {units.duration(now.seconds)}"
    # Events count when their range is applied: where most are in one of the last tables, the rate says nothing of the time left.
    is_even = 10 * now.events * now.all_tables >= now.tables * now.all_events
    if 0 < now.events < now.all_events and now.seconds and now.tables < now.all_tables and is_even:
        rate = now.events / now.seconds
        line += f", {rate:,.0f}/s, {units.duration((now.all_events - now.events) / rate)} left"
    return line


class _ProgressLog:
    """Logs the first progress at once, then changed progress every `LOG_EVERY_SECONDS`."""

    def __init__(self) -> None:
        self._last_at = time.monotonic() - LOG_EVERY_SECONDS
        self._last_line: object = None
        self._rate = Rate()

    def hear(self, now: CaptureProgress) -> None:
        rate = self._rate.of(now.events)
        if time.monotonic() - self._last_at < LOG_EVERY_SECONDS or now == self._last_line:
            return
        self._last_at, self._last_line = time.monotonic(), now
        log.info(PROGRESS, described(now, rate=rate))
