"""Processes beside this one, for work that holds the interpreter's lock, on a core of its own and without a job of Spark.

A helper is started when it is first needed, calls one function after the other with what it is sent, and ends when it has had nothing
to do for a while, or when this process is gone. Whoever uses one has another way to do the work: where there is none (Python
inside another program, no memory for one, one that was killed), `call` raises `HelperGone`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.abc
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import IO, Any, TypeAlias

import pyarrow as pa

IDLE_SECONDS = 10
"""After so long without work a helper ends: it holds some 80 to 150 MB."""

STOPPED_WAIT = 0.2
"""So many seconds lie between two looks at whether a call is still wanted."""

PIPE_BYTES = 2**20

Function: TypeAlias = "Callable[[Any, pa.RecordBatch | None], tuple[Any, pa.RecordBatch | None]]"
"""What a helper calls: a function of a module, of what can be pickled and columns beside it, which gives the same."""


class HelperGone(Exception):
    """The helper could not be started, or ended before it answered."""


class HelperProcess:
    """One process, for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._used = 0.0

    def start(self) -> None:
        """Start the process where it is not there; raises `HelperGone`."""
        # One that is about to end, for it had nothing to do, would take what it is sent along.
        is_old = time.monotonic() - self._used > 0.8 * IDLE_SECONDS
        if self._process is None or is_old or self._process.poll() is not None:
            self.close()
            try:
                self._process = _started()
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
    ) -> tuple[Any, pa.RecordBatch | None]:
        """What the function gives there; it must not raise, and prints into nothing. Raises `HelperGone`, also where `stopped` is
        set before there is an answer."""
        head = pickle.dumps((function, given))
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, head, columns)
            while stopped is not None and not connection.wait([process.stdout.fileno()], STOPPED_WAIT):
                if stopped.is_set():
                    raise TimeoutError
            answer = _received(process.stdout)
        except Exception as error:  # whatever it was: what is left in the pipes would be taken for the next answer
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
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it was not sent any more
                pipe.close()


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

    def close(self) -> None:
        """End those that nobody uses; who needs one later starts it anew."""
        with self._lock:
            for each in self._idle:
                each.close()


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _started() -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise FileNotFoundError("there is no interpreter that could be started")
    # By argument, not by environment: what lies in the working folder is not to stand in for a module.
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = sys.argv[1:]; import {__name__} as own; own.main({os.getpid()})",
            *sys.path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what a terminal's interrupt does is for this process to say
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        # A user has only so many of that size, and `pipesize` of `Popen` would fail then and leave both ends open.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return process


def _send(pipe: IO[bytes], head: bytes, columns: pa.RecordBatch | None) -> None:
    pickle.dump((head, columns is not None), pipe)
    if columns is not None:
        with pa.ipc.new_stream(pa.PythonFile(pipe, "w"), columns.schema) as stream:
            stream.write_batch(columns)
    pipe.flush()


def _received(pipe: IO[bytes]) -> tuple[Any, pa.RecordBatch | None]:
    head, has_columns = pickle.load(pipe)
    if not has_columns:
        return pickle.loads(head), None
    with pa.ipc.open_stream(pa.PythonFile(pipe, "r")) as stream:
        (batch,) = stream
        return pickle.loads(head), batch


def main(parent: int) -> None:
    """Call what comes through the standard input until it ends, or nothing comes, or the process `parent` is gone."""
    sys.meta_path.insert(0, _WithoutPandas)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    source = sys.stdin.buffer
    # What a function prints must not stand among the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as sink:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while select.select([source], [], [], IDLE_SECONDS)[0]:
            try:
                (function, given), columns = _received(source)
            except EOFError:
                return
            found, columns = function(given, columns)
            _send(sink, pickle.dumps(found), columns)


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
