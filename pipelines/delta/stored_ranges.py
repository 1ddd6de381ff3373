"""Reads ranges of data files in a store that are too large to copy for a few columns or rows.

Parquet's reader reads the footer, and then each column chunk as a whole. Each of these reads is one request, and is cached as copied
files are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from pipelines.delta import local_log, stored_files

SMALL_BYTES = 4 * 2**20
"""Smaller files are copied whole: a footer and a column would take as many requests."""

FEW_BYTES = 16 * 2**20
"""Files that have fewer bytes together are all copied whole."""

READ_BYTES = 512 * 2**20
"""The most bytes, in memory, of row groups from which rows are read here; they take some seconds. Larger reads are for executors."""

TAIL_BYTES = 64 * 2**10
"""The end of a file with its footer, which Arrow reads first."""


class RangedFile(io.RawIOBase):
    """A file in a store, of which only the parts that are read are copied. Reading raises `OSError`."""

    def __init__(self, files: stored_files.StoredFiles, name: str, size_bytes: int) -> None:
        self._files, self._name, self._size_bytes = files, name, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._size_bytes - self._at)
        size = remaining if size < 0 else min(size, remaining)
        content = self._range(self._at, size) if size else b""
        self._at += len(content)
        return content

    def _range(self, start: int, size: int) -> bytes:
        tail = max(0, self._size_bytes - TAIL_BYTES)
        if start < tail:
            return self._files.fetch_range(self._name, start, size)
        # Arrow reads the end twice, with different lengths.
        content = self._files.fetch_range(self._name, tail, self._size_bytes - tail)
        return content[start - tail : start - tail + size]


Source: TypeAlias = Path | RangedFile
"""A data file as `pyarrow.parquet` opens it."""


def sources(folder: Path, files: Sequence[Mapping[str, Any]]) -> list[Source]:
    """Sources from which parts of data files, given by their `add` actions, can be read. Raises `OSError`.

    For a table in a store, copies the files up to `SMALL_BYTES`, or all of them where they have no more than `FEW_BYTES` together.
    """
    copied_log = stored_files.copied(folder)
    if copied_log is None:
        return [local_log.data_path(folder, each["path"]) for each in files]
    are_few = sum(each["size"] for each in files) <= FEW_BYTES
    entries = [(unquote(each["path"]), int(each["size"])) for each in files]
    ranged = [not are_few and size > SMALL_BYTES and not (folder / name).exists() for name, size in entries]
    stored_files.bring(folder, [each for each, is_ranged in zip(entries, ranged) if not is_ranged])
    return [
        RangedFile(copied_log.files, name, size) if is_ranged else folder / name
        for (name, size), is_ranged in zip(entries, ranged)
    ]
