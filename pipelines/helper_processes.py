"""Child processes for work that holds Python's interpreter lock: on another core, without a Spark job.

A helper starts when it is first needed, calls one function after another with the arguments that it receives, and ends after some
idle time or when its parent process is gone. `call` raises `HelperGone` where no helper can run (Python embedded in another program,
too little memory) or it was killed: callers must be able to do the work themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import logging
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import pyarrow as pa

log = logging.getLogger(__name__)

IDLE_SECONDS = 10
"""A helper ends after this time without work: it uses some 80 to 150 MB."""

STOPPED_WAIT = 0.2
"""Seconds between two checks whether a call has to be given up."""

TRANSFER_SECONDS = 60
"""A helper that does not read or write for so long during a transfer counts as gone: it is stopped, or the machine swaps."""

_SIZES = struct.Struct("<QQ")
"""A message's header: the sizes of its pickle and of its columns in bytes, 0 without columns."""

Function: TypeAlias = "Callable[[Any, pa.RecordBatch | None], tuple[Any, pa.RecordBatch | None]]"
"""A module's function that a helper calls: takes a value that can be pickled and optional columns, and returns the same."""


_Task = TypeVar("_Task")
_Given = TypeVar("_Given", covariant=True)
_Result = TypeVar("_Result")


class HelperGone(Exception):
    """The helper could not be started, or ended before it answered."""


class HelperProcess:
    """One process, for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._used = 0.0

    def start(self) -> None:
        """Start the process unless it runs; raises `HelperGone`."""
        # An idle helper that is about to end would lose what it is sent.
        is_old = time.monotonic() - self._used > 0.8 * IDLE_SECONDS
        if self._process is None or is_old or self._process.poll() is not None:
            self.close()
            try:
                self._process, self._channel = _started()
            except OSError as error:
                raise HelperGone(str(error)) from error
            self._used = time.monotonic()

    def call(
        self,
        function: Function,
        argument: Any,
        columns: pa.RecordBatch | None = None,
        *,
        stopped: threading.Event | None = None,
        seconds: float = math.inf,
    ) -> tuple[Any, pa.RecordBatch | None]:
        """The result of the function in the helper, where it must not raise; its output is discarded.

        Raises `HelperGone`, also without an answer within `seconds` or before `stopped` is set.
        """
        head = pickle.dumps((function, argument))
        self.start()
        process, channel = self._process, self._channel
        assert process is not None and channel is not None
        try:
            _send(channel, head, columns)
            deadline = time.monotonic() + seconds
            while not connection.wait([channel], STOPPED_WAIT):
                if time.monotonic() > deadline or (stopped is not None and stopped.is_set()):
                    raise TimeoutError
            answer = _received(channel)
        except Exception as error:  # any error: an answer that is still on its way would be read as the next one
            self.close()
            raise HelperGone(f"it ended with exit code {process.returncode}") from error
        self._used = time.monotonic()
        return answer

    def kill(self) -> None:
        """Kill the process if it runs, from any thread: a call that waits for it raises `HelperGone`."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert self._channel is not None
        self._channel.close()


class HelperProcesses:
    """The helpers for one kind of work: all threads together use at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._idle: list[HelperProcess] = []
        self._all: list[HelperProcess] = []
        self._lock = threading.Lock()
        atexit.register(self.close)
        _POOLS.append(self)

    @contextlib.contextmanager
    def borrowed(self, count: int) -> Iterator[list[HelperProcess]]:
        """Up to `count` helpers; fewer or none while others use them."""
        with self._lock:
            helper_count = min(count, self._left)
            self._left -= helper_count
            helpers = [self._idle.pop() if self._idle else self._new() for _ in range(helper_count)]
        try:
            yield helpers
        finally:
            with self._lock:
                self._left += helper_count
                self._idle += helpers

    def _new(self) -> HelperProcess:
        helper = HelperProcess()
        self._all.append(helper)
        return helper

    def start(self) -> None:
        """Start the idle helpers ahead of work that comes soon."""
        with self.borrowed(cores()) as helpers, contextlib.suppress(HelperGone):
            for helper in helpers:
                helper.start()

    def close(self) -> None:
        """End the idle helpers; the next use starts them again."""
        with self._lock:
            for helper in self._idle:
                helper.close()

    def kill(self) -> None:
        """Kill all helpers, those at work too; the next use starts them again."""
        with self._lock:
            for helper in self._all:
                helper.kill()


_POOLS: list[HelperProcesses] = []
"""All pools of this process, for `kill_all`."""


def kill_all() -> None:
    """Kill every helper of this process. At its end Python waits for the threads that wait for them, and one may hang."""
    for pool in _POOLS:
        pool.kill()


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DOCUMENTS = HelperProcesses(min(3, cores()) - 1)
"""For work on the texts of many documents."""

MANY_BYTES = 24 * 2**20
"""Smaller inputs are processed before a helper has even started."""

PART_BYTES = 8 * 2**20
"""At most so many bytes of texts are sent to a helper at a time."""

PART_SECONDS = 60
"""A helper needs far less time than this for `PART_BYTES`."""


class Tasks(Protocol[_Given]):
    """Numbered tasks: this thread takes the first, helpers take the last; None when none is left."""

    def first(self) -> tuple[int, _Given] | None: ...

    def last(self) -> tuple[int, _Given] | None: ...

    def close(self) -> None:
        """Give out no more tasks."""


class ListedTasks(Generic[_Task]):
    """Tasks of a list."""

    def __init__(self, tasks: Iterable[_Task]) -> None:
        self._tasks = deque(enumerate(tasks))

    def first(self) -> tuple[int, _Task] | None:
        return self._taken(self._tasks.popleft)

    def last(self) -> tuple[int, _Task] | None:
        return self._taken(self._tasks.pop)

    def close(self) -> None:
        self._tasks.clear()

    def _taken(self, take: Callable[[], tuple[int, _Task]]) -> tuple[int, _Task] | None:
        try:
            return take()
        except IndexError:
            return None


def shared(
    tasks: Tasks[_Task],
    here: Callable[[_Task], _Result],
    by_helper: Callable[[HelperProcess, _Task], _Result],
    helpers: Iterable[HelperProcess],
) -> list[tuple[int, _Result]]:
    """The result of each task with its number, in order: this thread runs `here` from the start, helpers run `by_helper` from the end.

    A task whose `by_helper` raises `HelperGone` is done by `here`.
    """
    results: list[tuple[int, _Result]] = []
    remaining: list[tuple[int, _Task]] = []

    def helped(helper: HelperProcess) -> None:
        for number, task in iter(tasks.last, None):
            try:
                results.append((number, by_helper(helper, task)))
            except HelperGone as gone:
                log.debug("done here, without a helper: %s", gone)
                remaining.append((number, task))
                return

    with ThreadPoolExecutor(thread_name_prefix="medallion-helped") as pool:
        futures = [pool.submit(helped, helper) for helper in helpers]
        try:
            results += [(number, here(task)) for number, task in iter(tasks.first, None)]
        finally:
            tasks.close()
        for future in futures:
            future.result()
    results += [(number, here(task)) for number, task in remaining]
    return sorted(results, key=itemgetter(0))


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    if not sys.executable:
        raise FileNotFoundError("there is no interpreter that could be started")
    ours, theirs = socket.socketpair()
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", TRANSFER_SECONDS, 0))
    # By argument, not by environment: a file in the working directory must not shadow a module.
    script = f"import sys; sys.path[:] = sys.argv[1:]; import {__name__} as own; own.main({theirs.fileno()}, {os.getpid()})"
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt goes to this process alone
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


# Few blocking calls: after each one, getting the interpreter's lock back from a busy thread takes up to five milliseconds.


def _send(channel: socket.socket, head: bytes, columns: pa.RecordBatch | None) -> None:
    sink = pa.BufferOutputStream()
    if columns is not None:
        with pa.ipc.new_stream(sink, columns.schema) as stream:
            stream.write_batch(columns)
    body = sink.getvalue()
    channel.sendall(_SIZES.pack(len(head), body.size) + head)
    channel.sendall(body)


def _received(channel: socket.socket) -> tuple[Any, pa.RecordBatch | None]:
    """The next message; raises `EOFError` at the end."""
    head_bytes, body_bytes = _SIZES.unpack(_read(channel, _SIZES.size))
    message = pickle.loads(_read(channel, head_bytes))
    if not body_bytes:
        return message, None
    with pa.ipc.open_stream(_read(channel, body_bytes)) as stream:
        (batch,) = stream
        return message, batch


def _read(channel: socket.socket, count: int) -> pa.Buffer:
    buffer = pa.allocate_buffer(count)
    remaining = memoryview(buffer).cast("B")
    while remaining:
        received_bytes = channel.recv_into(remaining, 0, socket.MSG_WAITALL)
        if not received_bytes:
            raise EOFError
        remaining = remaining[received_bytes:]
    return buffer


def main(channel: int, parent: int) -> None:
    """Serve calls from the socket with the descriptor `channel` until it closes, idles too long, or the process `parent` is gone."""
    sys.meta_path.insert(0, _WithoutPandas)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with socket.socket(fileno=channel) as channel_socket:
        while connection.wait([channel_socket], IDLE_SECONDS):
            try:
                (function, argument), columns = _received(channel_socket)
            except EOFError:
                return
            result, columns = function(argument, columns)
            _send(channel_socket, pickle.dumps(result), columns)


class _WithoutPandas(importlib.abc.MetaPathFinder):
    """Hides pandas: Arrow imports it when it converts a list, which takes longer than all other imports of a helper."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _end_with_parent(parent: int) -> None:
    """End this process, even during a call, when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
