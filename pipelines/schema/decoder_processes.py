"""Documents typed in processes beside this one, where they are many.

Most of decoding holds the interpreter's lock, so that threads would not help. A process is started when it is first needed, is sent
texts as Arrow with the schema that they are typed by, and ends when it has had nothing to do for a while, or when this
process is gone. Where there is none (one core, one that was killed, nothing may be started here), this process types all of
them; a decoder learns for itself, which changes the speed and never a result.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import pyarrow as pa

from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.typed.decoding import Decoder, TypedTexts, joined, slice_rows, without_collector

log = logging.getLogger(__name__)

MANY_BYTES = 24 * 2**20
"""Texts of fewer bytes are typed before a process has started."""

PART_BYTES = 8 * 2**20
"""A process is sent so many bytes at most at a time."""

PIPE_BYTES = 2**20

IDLE_SECONDS = 10
"""After so long without work a process ends: it holds some 200 MB."""


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TextQueue:
    """Texts that are taken in parts, by this thread from their beginning, by others from their end."""

    def __init__(self, texts: pa.Array) -> None:
        self._texts = texts
        self._least = slice_rows(texts)
        self._most = max(1, PART_BYTES * len(texts) // max(1, texts.nbytes))
        self._start, self._end = 0, len(texts)
        self._lock = threading.Lock()

    def first(self, count: int) -> tuple[int, pa.Array] | None:
        """At most so many from the beginning of what is left, with their place; None where nothing is left."""
        with self._lock:
            start = self._start
            self._start = min(self._end, start + count)
            return self._part(start, self._start)

    def last(self, share: int) -> tuple[int, pa.Array] | None:
        """The `share`-th part of what is left, from its end, but a slice at least and at most `PART_BYTES`."""
        with self._lock:
            end = self._end
            count = min(self._most, max(self._least, (end - self._start) // share))
            self._end = max(self._start, end - count)
            return self._part(self._end, end)

    def close(self) -> None:
        """Nothing more is taken."""
        with self._lock:
            self._end = self._start

    def _part(self, start: int, end: int) -> tuple[int, pa.Array] | None:
        return (start, self._texts.slice(start, end - start)) if start < end else None


class DecoderProcess:
    """A process that types texts, for one thread at a time; it is started when there is something for it to do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process where it is not there; raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _started()

    def parts(self, task: bytes, texts: TextQueue, *, share: int) -> _Answers:
        """The rows of the texts that it takes until none is left; the texts that it took and did not type."""
        found: list[tuple[int, TypedTexts]] = []
        while (part := texts.last(share)) is not None:
            start, taken = part
            try:
                found.append((start, self._typed(task, taken)))
            except (OSError, EOFError, pickle.UnpicklingError, pa.ArrowException) as error:
                self.close(error)
                return found, [part]
        return found, []

    def close(self, error: Exception | None = None) -> None:
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
        if error is not None:
            log.debug("documents are typed here: the process beside this one is gone (%r)", error)

    def _typed(self, task: bytes, texts: pa.Array) -> TypedTexts:
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        _send(process.stdin, task, {"texts": texts})
        exact, columns = _received(process.stdout)
        return TypedTexts(columns["rows"], columns["new"], columns["refused"], exact)


_Answers = tuple[list[tuple[int, TypedTexts]], list[tuple[int, pa.Array]]]
_PROCESSES = [DecoderProcess() for _ in range(min(3, cores()) - 1)]


def prepare(size_bytes: int) -> None:
    """Start the processes for texts of so many bytes, which come soon."""
    if size_bytes >= MANY_BYTES:
        with _free() as processes, contextlib.suppress(OSError):
            for each in processes:
                each.start()


def typed(decoder: Decoder, texts: pa.Array) -> TypedTexts:
    """What the decoder makes of the texts; of many, processes beside this one type a part."""
    if texts.nbytes < MANY_BYTES:
        return decoder.typed(texts)
    with _free() as processes:
        if not processes:
            return decoder.typed(texts)
        queue = TextQueue(texts)
        task = pickle.dumps((decoder.schema.to_json(), dict(decoder.pins)))
        with ThreadPoolExecutor(len(processes), thread_name_prefix="medallion-typing") as pool:
            share = 2 * (len(processes) + 1)
            theirs = [pool.submit(each.parts, task, queue, share=share) for each in processes]
            try:
                parts = _parts(decoder, texts, queue)
            finally:
                queue.close()
            answers = [each.result() for each in theirs]
    for found, untyped in answers:
        parts += found
        parts += [(start, decoder.typed(each)) for start, each in untyped]
    return joined(decoder.schema, parts)


def _parts(decoder: Decoder, texts: pa.Array, queue: TextQueue) -> list[tuple[int, TypedTexts]]:
    """The rows of the texts that the decoder takes until none is left."""
    parts = []
    with without_collector():
        while (taken := queue.first(decoder.portion(texts))) is not None:
            start, part = taken
            parts.append((start, decoder.part(part)))
    return parts


@atexit.register
def close() -> None:
    """End the processes; the next texts start others."""
    with _free() as processes:
        for each in processes:
            each.close()


@contextlib.contextmanager
def _free() -> Iterator[list[DecoderProcess]]:
    """The processes that no other thread has."""
    free = [each for each in _PROCESSES if each.lock.acquire(blocking=False)]
    try:
        yield free
    finally:
        for each in free:
            each.lock.release()


def _started() -> subprocess.Popen[bytes]:
    if not sys.executable:  # Python inside another program
        raise FileNotFoundError("no interpreter that could be started")
    # By argument, not by environment: what lies in the working folder is not to stand in for a module.
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = sys.argv[1:]; import {__name__} as own; own.main()", *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pipesize=PIPE_BYTES,
        start_new_session=True,  # what a terminal's interrupt does is for this process to say
    )


def _send(pipe: IO[bytes], head: Any, columns: dict[str, pa.Array]) -> None:
    """An object and columns of one length, which `_received` reads."""
    pickle.dump(head, pipe)
    batch = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
    with pa.ipc.new_stream(pa.PythonFile(pipe, "w"), batch.schema) as stream:
        stream.write_batch(batch)
    pipe.flush()


def _received(pipe: IO[bytes]) -> tuple[Any, pa.RecordBatch]:
    head = pickle.load(pipe)
    with pa.ipc.open_stream(pa.PythonFile(pipe, "r")) as stream:
        (batch,) = stream
        return head, batch


def main() -> None:
    """Type what comes through the standard input until it ends, or nothing comes."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    decoder, held = None, b""
    while select.select([source], [], [], IDLE_SECONDS)[0]:
        try:
            task, columns = _received(source)
        except EOFError:
            return
        if decoder is None or task != held:
            schema, pins = pickle.loads(task)
            decoder, held = Decoder(DocumentSchema.from_json(schema), pins), task
        found = decoder.typed(columns["texts"])
        _send(sink, found.exact, {"rows": found.rows, "new": found.new, "refused": found.refused})
