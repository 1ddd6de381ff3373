"""Types documents in this process, and many documents in helper processes too, because decoding holds the interpreter's lock.

Each process has a decoder that adapts to the documents; this affects its speed, and never a result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import pyarrow as pa

from cdc_core.schema.pins import Pin
from cdc_core.typed.decoding import Decoder, Detail, TypedTexts, joined, slice_rows, without_collector
from cdc_core.typed.plan import decoder_of
from pipelines import helper_processes

_Part: TypeAlias = "tuple[int, pa.Array]"
"""The position of the first text, and the texts."""

_Task: TypeAlias = "tuple[str, tuple[tuple[tuple[str, ...], Pin], ...]]"
"""A schema, as JSON, and its pins."""


def typed(decoder: Decoder, texts: pa.Array) -> TypedTexts:
    """The texts typed by the decoder, in helper processes too where they are many."""
    return joined(decoder.schema, _parts(decoder, texts, Detail.ALL))


def typed_if_known(decoder: Decoder, texts: pa.Array) -> TypedTexts | None:
    """The same; None as soon as a document may change the schema, because documents like it take the exact path."""
    parts = _parts(decoder, texts, Detail.KNOWN)
    return None if any(part.new.true_count for _, part in parts) else joined(decoder.schema, parts)


def _parts(decoder: Decoder, texts: pa.Array, detail: Detail) -> list[tuple[int, TypedTexts]]:
    """The typed parts with their positions, with `Detail.KNOWN` no more after one with a new document."""
    if texts.nbytes < helper_processes.MANY_BYTES:
        return [(0, decoder.typed(texts, detail))]
    task = decoder.schema.to_json(), tuple(decoder.pins.items())
    with without_collector(), helper_processes.DOCUMENTS.borrowed(helper_processes.cores()) as helpers:
        tasks = TextTasks(texts, portion=lambda: decoder.portion(texts), share=2 * (len(helpers) + 1))

        def checked(part: TypedTexts) -> TypedTexts:
            if detail is Detail.KNOWN and part.new.true_count:
                tasks.close()
            return part

        return helper_processes.shared(
            tasks,
            lambda part: checked(decoder.typed(part, detail)),
            lambda helper, part: checked(_by_helper(helper, task, part)),
            helpers,
        )


class TextTasks:
    """Texts that are taken in parts: by this thread from the beginning, by helpers from the end."""

    def __init__(self, texts: pa.Array, *, portion: Callable[[], int], share: int) -> None:
        self._texts = texts
        self._portion, self._share = portion, share
        self._least = slice_rows(texts)
        self._most = max(1, helper_processes.PART_BYTES * len(texts) // max(1, texts.nbytes))
        self._start, self._end = 0, len(texts)
        self._lock = threading.Lock()

    def first(self) -> _Part | None:
        """A portion from the beginning of the remaining texts; None at the end."""
        with self._lock:
            start = self._start
            self._start = min(self._end, start + self._portion())
            return self._part(start, self._start)

    def last(self) -> _Part | None:
        """A share from the end of the remaining texts, from one slice to `helper_processes.PART_BYTES`; None at the end."""
        with self._lock:
            end = self._end
            count = min(self._most, max(self._least, (end - self._start) // self._share))
            self._end = max(self._start, end - count)
            return self._part(self._end, end)

    def close(self) -> None:
        """Drop the remaining texts."""
        with self._lock:
            self._end = self._start

    def _part(self, start: int, end: int) -> _Part | None:
        return (start, self._texts.slice(start, end - start)) if start < end else None


def _by_helper(helper: helper_processes.HelperProcess, by: _Task, texts: pa.Array) -> TypedTexts:
    columns = pa.RecordBatch.from_arrays([texts], names=["texts"])
    exact, typed_columns = helper.call(_answer, by, columns, seconds=helper_processes.PART_SECONDS)
    assert typed_columns is not None
    return TypedTexts(typed_columns["rows"], typed_columns["new"], typed_columns["refused"], exact)


def _answer(task: _Task, columns: pa.RecordBatch | None) -> tuple[int, pa.RecordBatch | None]:
    """Runs in a helper process."""
    assert columns is not None
    typed_texts = decoder_of(*task).typed(columns["texts"])
    return typed_texts.exact, pa.RecordBatch.from_arrays(
        [typed_texts.rows, typed_texts.new, typed_texts.refused], names=["rows", "new", "refused"]
    )
