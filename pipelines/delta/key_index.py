"""Indexes in memory from keys to the rows of data files, so that a small batch does not read the keys of millions of rows.

A data file never changes, so that its index stays valid. A file gets an index when its keys are read repeatedly, by a service or a run
with many batches. A command that applies one batch reads each file once, and builds none.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from pipelines.delta import local_log, stored_files

LARGE_ROWS = 500_000
"""Tables with fewer rows get no indexes: reading their keys is as fast."""

LARGE_BYTES = 16 * 2**20
"""The same for the bytes of their keys: a compound key may have a thousand."""

HELD_BYTES = 256 * 2**20
"""The most bytes of indexes that this process keeps: those of eleven million rows."""

_LOOKS = 3
"""A file gets an index at this reading of its keys. Building it takes as long as a dozen readings."""

_ROWS_AT_ONCE = 1_000_000
"""About the most rows that one search indexes, in half a second."""

_KEPT_SECONDS = 300
"""Entries that were not used for this time are evicted."""

_MANY_ENTRIES = 100_000
"""The most files whose readings are counted."""

_ROW_BYTES = 24
"""The most bytes of an index per row."""

_SEED = secrets.randbits(64)
"""A random seed, so that nobody can choose two keys with the same digest."""


def is_large(rows: int, keys: Sequence[str]) -> bool:
    """Whether a table with so many rows gets indexes, if its keys are as long as these."""
    return bool(keys) and (rows >= LARGE_ROWS or rows * sum(map(len, keys)) >= LARGE_BYTES * len(keys))


class SearchKeys:
    """The keys of one search; `is_kept` allows indexes."""

    def __init__(self, keys: pa.Array, *, is_kept: bool) -> None:
        self.keys, self.is_kept = keys, is_kept
        self.rows_left = _ROWS_AT_ONCE if is_kept else 0
        """How many rows this search may still index."""

    @functools.cached_property
    def digests(self) -> np.ndarray:
        return _digests(pa.chunked_array([self.keys]))


class KeyIndex:
    """The row numbers of the keys of one file, by their 128-bit xxh3 digests."""

    def __init__(self, keys: pa.ChunkedArray) -> None:
        digests = _digests(keys)
        order = np.argsort(digests[:, 0])
        self._high, self._low = digests[order].T.copy()
        self._rows = order.astype(np.uint32)
        # A bitmap of the digests' first bits excludes fifteen of sixteen keys that are not in the file.
        self._shift = np.uint64(64 - max(3, (len(order) * 16 - 1).bit_length()))
        marks = np.zeros(1 << (64 - int(self._shift)), bool)
        marks[self._high >> self._shift] = True
        self._marks = np.packbits(marks, bitorder="little")

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in (self._high, self._low, self._rows, self._marks))

    def rows(self, search_keys: SearchKeys) -> list[int]:
        """The numbers of the rows that have one of the keys, ascending."""
        slots = search_keys.digests[:, 0] >> self._shift
        is_marked = self._marks[slots >> np.uint64(3)] >> (slots & np.uint64(7)).astype(np.uint8) & 1
        high, low = search_keys.digests[is_marked.astype(bool)].T
        first, end = (np.searchsorted(self._high, high, side) for side in ("left", "right"))
        counts = end - first
        # All rows of each key: a history has several.
        positions = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers: list[int] = np.sort(self._rows[positions[self._low[positions] == np.repeat(low, counts)]]).tolist()
        return numbers


def _digests(keys: pa.ChunkedArray) -> np.ndarray:
    """The digests of keys without nulls: two unsigned 64-bit numbers each."""
    digest = xxhash.xxh3_128_digest
    data = b"".join([digest(key, _SEED) for chunk in keys.chunks for key in chunk.cast(pa.binary()).to_pylist()])
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


@dataclass
class _KnownKeys:
    """How often one file's keys were read, when they were used last (monotonic seconds), and their index."""

    looks: int = 0
    index: KeyIndex | None = None
    used: float = 0.0


KeyColumn: TypeAlias = tuple[Path, str, int, int]
"""A column of a data file: the file's path, the column's name, and what tells the file from another one of this path."""


class _HeldIndexes:
    """The cache of indexes by file; the least recently used come first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[KeyColumn, _KnownKeys] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, name: KeyColumn) -> KeyIndex | None:
        with self._lock:
            return self._used(name).index if name in self._entries else None

    def is_due(self, name: KeyColumn, rows: int) -> bool:
        """Count a reading of a file's keys; whether to build an index of `rows` rows. Evicts old entries."""
        with self._lock:
            self._entries.setdefault(name, _KnownKeys())
            entry = self._used(name)
            entry.looks += 1
            return entry.looks >= _LOOKS and entry.index is None and self._has_room(_ROW_BYTES * rows)

    def put(self, name: KeyColumn, index: KeyIndex) -> None:
        with self._lock:
            if name in self._entries and self._entries[name].index is None:
                self._entries[name].index = index
                self._size_bytes += index.size_bytes

    def _used(self, name: KeyColumn) -> _KnownKeys:
        entry = self._entries[name]
        entry.used = time.monotonic()
        self._entries.move_to_end(name)
        return entry

    def _has_room(self, size_bytes: int) -> bool:
        oldest = time.monotonic() - _KEPT_SECONDS
        while len(self._entries) > _MANY_ENTRIES or next(iter(self._entries.values())).used < oldest:
            _, entry = self._entries.popitem(last=False)
            self._size_bytes -= entry.index.size_bytes if entry.index else 0
        return self._size_bytes + size_bytes <= HELD_BYTES


_HELD = _HeldIndexes()


def rows(folder: Path, file: Mapping[str, Any], column: str, search_keys: SearchKeys) -> list[int] | None:
    """The numbers of a file's rows that have one of the keys, ascending; None where the column has no index yet. Raises `OSError`.

    `file` is the `add` action.
    """
    index = _HELD.get(key_column(folder, file, column)) if search_keys.is_kept else None
    return None if index is None else index.rows(search_keys)


def saw(folder: Path, file: Mapping[str, Any], column: str, keys: pa.ChunkedArray, search_keys: SearchKeys) -> None:
    """Note that a search read a file's column, `keys`; builds its index after some readings. Raises `OSError`."""
    if search_keys.rows_left <= 0 or keys.null_count:
        return
    name = key_column(folder, file, column)
    if _HELD.is_due(name, len(keys)):
        search_keys.rows_left -= len(keys)
        _HELD.put(name, KeyIndex(keys))


def key_column(folder: Path, file: Mapping[str, Any], column: str) -> KeyColumn:
    """The column of a file, given by its `add` action. Raises `OSError`."""
    path = local_log.data_path(folder, file["path"])
    if stored_files.copied(folder) is not None:  # the copy may be evicted, while its index stays valid
        return path, column, file["size"], file.get("modificationTime", 0)
    # A restored folder may have another file of the same name.
    status = os.stat(path)
    return path, column, status.st_size, status.st_mtime_ns
