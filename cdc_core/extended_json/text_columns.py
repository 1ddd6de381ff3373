"""Arrow string columns, built from parts that are the same in all rows and parts that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Places: TypeAlias = npt.NDArray[np.int64]

Part: TypeAlias = "str | pa.StringArray"
"""A text that all rows share, or one text per row."""


def strings(data: npt.NDArray[np.uint8], offsets: Places) -> pa.StringArray:
    """A string array over `data`, in which the strings follow each other."""
    buffers = pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))
    return pa.StringArray.from_buffers(len(offsets) - 1, *buffers)


def digits(numbers: npt.NDArray[Any]) -> pa.StringArray:
    """Integers as decimal text."""
    return pa.array(np.ascontiguousarray(numbers)).cast(pa.string())


def joined(parts: Sequence[Part], rows: int) -> pa.StringArray:
    """The concatenation of the parts, one text per row; a part that is null in a row is left out there."""
    pieces: list[Part] = []
    for part in parts:
        last = pieces[-1] if pieces else None
        if isinstance(part, str) and isinstance(last, str):
            pieces[-1] = last + part
        else:
            pieces.append(part)
    if len(pieces) == 1 and not isinstance(pieces[0], str):
        return pieces[0]
    if all(isinstance(part, str) for part in pieces):
        return pa.repeat(pa.scalar("".join(pieces), pa.string()), rows)
    # The "" keeps a row in which every part is null: Arrow would drop it and return fewer rows.
    columns = [pa.scalar(part, pa.string()) if isinstance(part, str) else part for part in ("", *pieces)]
    return pc.binary_join_element_wise(*columns, "", null_handling="skip")


def closed(parts: list[Part], is_first_certain: bool, rows: int) -> list[Part]:
    """The parts of a document from those of its fields, each of which starts with a comma.

    `is_first_certain` says that all rows have the same first field.
    """
    if not parts:
        return ["{}"]
    if is_first_certain:
        first = parts[0]
        assert isinstance(first, str)
        return ["{", first[1:], *parts[1:], "}"]
    text = joined(parts, rows)
    # The first field differs by row, so the first comma is removed from the joined text. No field at all: an empty document.
    text = pc.fill_null(pc.binary_replace_slice(text.view(pa.binary()), 0, 1, b""), b"").view(pa.string())
    return ["{", text, "}"]


def spread(texts: pa.StringArray, places: Places, rows: int) -> pa.StringArray:
    """The texts at `places` of an array with `rows` rows; the other rows are null."""
    index = np.zeros(rows, np.int64)
    index[places] = np.arange(len(places))
    is_null = np.ones(rows, bool)
    is_null[places] = False
    return texts.take(pa.array(index, mask=is_null))


def merged(texts: Sequence[pa.StringArray], places: Sequence[Places]) -> pa.StringArray:
    """One array of all texts, each at its place; together the places are all rows."""
    if len(texts) == 1:
        return texts[0]
    index = np.empty(sum(map(len, places)), np.int64)
    index[np.concatenate(places)] = np.arange(len(index))
    return pa.concat_arrays(texts).take(pa.array(index))
