"""Documents typed by this process, and many of them also by helpers beside it: most of decoding holds the interpreter's lock.

A decoder learns for itself, which changes the speed and never a result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pyarrow as pa

from cdc_core.schema.pins import Pin
from cdc_core.typed.decoding import Decoder, TypedTexts, joined, slice_rows, without_collector
from cdc_core.typed.plan import decoder_of
from pipelines import helper_processes

log = logging.getLogger(__name__)

_Part: TypeAlias = "tuple[int, pa.Array]"
"""Some of the texts, and the place of the first."""

_Task: TypeAlias = "tuple[str, tuple[tuple[tuple[str, ...], Pin], ...]]"
"""A schema and its pins, by which the texts are typed."""

_Parts: TypeAlias = "list[tuple[int, TypedTexts]]"


def typed(decoder: Decoder, texts: pa.Array) -> TypedTexts:
    """What the decoder makes of the texts."""
    if texts.nbytes < helper_processes.MANY_BYTES:
        return decoder.typed(texts)
    with helper_processes.DOCUMENTS.borrowed(helper_processes.cores()) as helpers:
        return _typed(decoder, texts, helpers) if helpers else decoder.typed(texts)


def _typed(decoder: Decoder, texts: pa.Array, helpers: Sequence[helper_processes.HelperProcess]) -> TypedTexts:
    queue = TextQueue(texts, share=2 * (len(helpers) + 1))
    task = decoder.schema.to_json(), tuple(decoder.pins.items())
    with ThreadPoolExecutor(len(helpers), thread_name_prefix="medallion-typing") as pool:
        theirs = [pool.submit(_by_helper, each, task, queue) for each in helpers]
        try:
            parts = _here(decoder, texts, queue)
        finally:
            queue.close()
        answers = [each.result() for each in theirs]
    for found, untyped in answers:
        parts += found
        parts += [(start, decoder.typed(each)) for start, each in untyped]
    return joined(decoder.schema, parts)


class TextQueue:
    """Texts that are taken in parts, by this thread from their beginning, by others from their end."""

    def __init__(self, texts: pa.Array, *, share: int) -> None:
        self._texts = texts
        self._share = share
        self._least = slice_rows(texts)
        self._most = max(1, helper_processes.PART_BYTES * len(texts) // max(1, texts.nbytes))
        self._start, self._end = 0, len(texts)
        self._lock = threading.Lock()

    def first(self, count: int) -> _Part | None:
        """At most so many from the beginning of what is left; None where nothing is left."""
        with self._lock:
            start = self._start
            self._start = min(self._end, start + count)
            return self._part(start, self._start)

    def last(self) -> _Part | None:
        """A share of what is left, from its end, but a slice at least and at most `helper_processes.PART_BYTES`."""
        with self._lock:
            end = self._end
            count = min(self._most, max(self._least, (end - self._start) // self._share))
            self._end = max(self._start, end - count)
            return self._part(self._end, end)

    def close(self) -> None:
        """Nothing more is taken."""
        with self._lock:
            self._end = self._start

    def _part(self, start: int, end: int) -> _Part | None:
        return (start, self._texts.slice(start, end - start)) if start < end else None


def _here(decoder: Decoder, texts: pa.Array, queue: TextQueue) -> _Parts:
    """The rows of the texts that the decoder takes until none is left."""
    parts = []
    with without_collector():
        while (taken := queue.first(decoder.portion(texts))) is not None:
            start, part = taken
            parts.append((start, decoder.part(part)))
    return parts


def _by_helper(helper: helper_processes.HelperProcess, task: _Task, queue: TextQueue) -> tuple[_Parts, list[_Part]]:
    """The rows of the texts that the helper takes until none is left; the texts that it took and did not type."""
    found: _Parts = []
    while (part := queue.last()) is not None:
        start, texts = part
        try:
            exact, columns = helper.call(
                _answer,
                task,
                pa.RecordBatch.from_arrays([texts], names=["texts"]),
                seconds=helper_processes.PART_SECONDS,
            )
        except helper_processes.HelperGone as gone:
            log.debug("documents are typed here, without a helper: %s", gone)
            return found, [part]
        assert columns is not None
        found.append((start, TypedTexts(columns["rows"], columns["new"], columns["refused"], exact)))
    return found, []


def _answer(task: _Task, columns: pa.RecordBatch | None) -> tuple[int, pa.RecordBatch | None]:
    """Runs in a helper."""
    assert columns is not None
    found = decoder_of(*task).typed(columns["texts"])
    return found.exact, pa.RecordBatch.from_arrays([found.rows, found.new, found.refused], names=["rows", "new", "refused"])
