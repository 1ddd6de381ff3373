"""Processes beside this one, for work that holds the interpreter's lock, on a core of its own and without a job of Spark.

A helper is started when it is first needed, calls one function after the other with what it is sent, and ends when it has had nothing
to do for a while, or when this process is gone. Whoever uses one has another way to do the work: where there is none (Python
inside another program, no memory for one, one that was killed), `call` raises `HelperGone`.
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
"""After so long without work a helper ends: it holds some 80 to 150 MB."""

STOPPED_WAIT = 0.2
"""So many seconds lie between two looks at whether a call is still wanted."""

TRANSFER_SECONDS = 60
"""A helper that takes or gives nothing for so long, while it should, is gone: somebody has stopped it, or the machine swaps."""

_SIZES = struct.Struct("<QQ")
"""What a message begins with: the bytes of its pickle, and those of its columns, none where there are none."""

Function: TypeAlias = "Callable[[Any, pa.RecordBatch | None], tuple[Any, pa.RecordBatch | None]]"
"""What a helper calls: a function of a module, of what can be pickled and columns beside it, which gives the same."""


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
        """Start the process where it is not there; raises `HelperGone`."""
        # One that is about to end, for it had nothing to do, would take what it is sent along.
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
        given: Any,
        columns: pa.RecordBatch | None = None,
        *,
        stopped: threading.Event | None = None,
        seconds: float = math.inf,
    ) -> tuple[Any, pa.RecordBatch | None]:
        """What the function gives there; it must not raise, and prints into nothing. Raises `HelperGone`, also where there is no answer
        within `seconds`, or before `stopped` is set."""
        head = pickle.dumps((function, given))
        self.start()
        process, channel = self._process, self._channel
        assert process is not None and channel is not None
        try:
            _send(channel, head, columns)
            ends = time.monotonic() + seconds
            while not connection.wait([channel], STOPPED_WAIT):
                if time.monotonic() > ends or (stopped is not None and stopped.is_set()):
                    raise TimeoutError
            answer = _received(channel)
        except Exception as error:  # whatever it was: what is still on its way would be taken for the next answer
            self.close()
            raise HelperGone(f"it ended with exit code {process.returncode}") from error
        self._used = time.monotonic()
        return answer

    def close(self) -> None:
        """End the process, which may have ended before."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert self._channel is not None
        self._channel.close()


class HelperProcesses:
    """The helpers for one kind of work: at most so many are used at a time, by all threads together."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._idle: list[HelperProcess] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    @contextlib.contextmanager
    def borrowed(self, count: int) -> Iterator[list[HelperProcess]]:
        """Up to so many helpers, fewer or none where others have them."""
        with self._lock:
            taken = min(count, self._left)
            self._left -= taken
            helpers = [self._idle.pop() if self._idle else HelperProcess() for _ in range(taken)]
        try:
            yield helpers
        finally:
            with self._lock:
                self._left += taken
                self._idle += helpers

    def start(self) -> None:
        """Start those that nobody uses, for work that comes soon."""
        with self.borrowed(cores()) as helpers, contextlib.suppress(HelperGone):
            for each in helpers:
                each.start()

    def close(self) -> None:
        """End those that nobody uses; who needs one later starts it anew."""
        with self._lock:
            for each in self._idle:
                each.close()


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DOCUMENTS = HelperProcesses(min(3, cores()) - 1)
"""For what is done with the texts of many documents."""

MANY_BYTES = 24 * 2**20
"""Texts of fewer bytes are done with before a helper has started."""

PART_BYTES = 8 * 2**20
"""A helper is sent so many bytes of texts at most at a time."""

PART_SECONDS = 60
"""And is done with them long before this."""


class Tasks(Protocol[_Given]):
    """Numbered tasks, of which this thread takes the first and others the last; None where none is left."""

    def first(self) -> tuple[int, _Given] | None: ...

    def last(self) -> tuple[int, _Given] | None: ...

    def close(self) -> None:
        """Nothing more is taken."""


class ListedTasks(Generic[_Task]):
    """Tasks as they are listed."""

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
    """What `here` gives for each task, by their numbers; from the end on helpers do some, which may raise `HelperGone`."""
    found: list[tuple[int, _Result]] = []
    left: list[tuple[int, _Task]] = []

    def helped(helper: HelperProcess) -> None:
        for number, task in iter(tasks.last, None):
            try:
                found.append((number, by_helper(helper, task)))
            except HelperGone as gone:
                log.debug("done here, without a helper: %s", gone)
                left.append((number, task))
                return

    with ThreadPoolExecutor(thread_name_prefix="medallion-helped") as pool:
        working = [pool.submit(helped, each) for each in helpers]
        try:
            found += [(number, here(task)) for number, task in iter(tasks.first, None)]
        finally:
            tasks.close()
        for each in working:
            each.result()
    found += [(number, here(task)) for number, task in left]
    return sorted(found, key=itemgetter(0))


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    if not sys.executable:
        raise FileNotFoundError("there is no interpreter that could be started")
    ours, theirs = socket.socketpair()
    for each in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, each, struct.pack("@ll", TRANSFER_SECONDS, 0))
    # By argument, not by environment: what lies in the working folder is not to stand in for a module.
    script = f"import sys; sys.path[:] = sys.argv[1:]; import {__name__} as own; own.main({theirs.fileno()}, {os.getpid()})"
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what a terminal's interrupt does is for this process to say
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


# Each call that may wait takes up to five milliseconds where another thread is busy, to have the interpreter's lock back: so there are few.


def _send(channel: socket.socket, head: bytes, columns: pa.RecordBatch | None) -> None:
    sink = pa.BufferOutputStream()
    if columns is not None:
        with pa.ipc.new_stream(sink, columns.schema) as stream:
            stream.write_batch(columns)
    body = sink.getvalue()
    channel.sendall(_SIZES.pack(len(head), body.size) + head)
    channel.sendall(body)


def _received(channel: socket.socket) -> tuple[Any, pa.RecordBatch | None]:
    """Raises `EOFError` where there is no more."""
    head_bytes, body_bytes = _SIZES.unpack(_read(channel, _SIZES.size))
    found = pickle.loads(_read(channel, head_bytes))
    if not body_bytes:
        return found, None
    with pa.ipc.open_stream(_read(channel, body_bytes)) as stream:
        (batch,) = stream
        return found, batch


def _read(channel: socket.socket, count: int) -> pa.Buffer:
    read = pa.allocate_buffer(count)
    left = memoryview(read).cast("B")
    while left:
        received = channel.recv_into(left, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        left = left[received:]
    return read


def main(channel: int, parent: int) -> None:
    """Call what comes through the socket `channel` until it ends, or nothing comes, or the process `parent` is gone."""
    sys.meta_path.insert(0, _WithoutPandas)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with socket.socket(fileno=channel) as ours:
        while connection.wait([ours], IDLE_SECONDS):
            try:
                (function, given), columns = _received(ours)
            except EOFError:
                return
            found, columns = function(given, columns)
            _send(ours, pickle.dumps(found), columns)


class _WithoutPandas(importlib.abc.MetaPathFinder):
    """Arrow looks for pandas when it is given a list, and that takes longer to import than all that a helper needs."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _end_with_parent(parent: int) -> None:
    """A call may last, and nobody waits for its answer any more."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
