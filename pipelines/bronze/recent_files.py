"""A cache of bronze's small files: all collections read the same ones, one after the other."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc_core.bronze import columns as bronze
from pipelines.delta import local_log

SMALL_BYTES = 256 * 2**10
"""The size up to which a file is small: opening it and reading its footer takes longer than reading its rows."""

KEPT_BYTES = 64 * 2**20
"""The memory that the cache may use."""

_FILE_BYTES = 4 * 2**20
"""The memory that one file may use: similar documents compress a hundredfold."""

MOST_FILES = 1024
"""The number of files, including those that are too large to cache. The capture compacts them long before there are so many
(`bronze.log.COMPACT_EVERY`)."""

_PART_ROWS = 4096

_File = tuple[Path, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class _FileRows:
    """The rows of a file, and the ascending indexes of those with the same values of some columns."""

    rows: pa.Table
    indexes: Mapping[tuple[object, ...], np.ndarray]

    @staticmethod
    def of(rows: pa.Table, names: Sequence[str]) -> _FileRows:
        codes = np.zeros(rows.num_rows, np.int64)
        for name in names:
            column = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
            codes = codes * len(column.dictionary) + column.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        ends = np.flatnonzero(np.diff(codes[order])) + 1
        groups = np.split(order, ends) if rows.num_rows else []
        return _FileRows(rows, {tuple(rows[name][group[0]].as_py() for name in names): group for group in groups})

    def having(self, values: tuple[object, ...]) -> pa.Table:
        """The rows with these values, in order."""
        return at(self.rows, self.indexes.get(values, _NONE))


_NONE = np.empty(0, np.int64)


def at(rows: pa.Table, indexes: np.ndarray) -> pa.Table:
    """The rows of ascending indexes; without a copy where they are adjacent, such as those of a chunk before its heartbeat."""
    first, last = (indexes[0], indexes[-1]) if len(indexes) else (0, -1)
    return rows.slice(first, len(indexes)) if last - first + 1 == len(indexes) else rows.take(indexes)


class RecentFiles:
    """An LRU cache of columns of files, which never change."""

    def __init__(self, *, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._files: OrderedDict[_File, _FileRows | None] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def rows(self, path: Path, columns: Sequence[str], among: Mapping[str, str]) -> pa.Table | None:
        """These columns of the rows that have values `among` these; None where the file is too large to cache. Raises Arrow's errors where
        it cannot be read."""
        with self._lock:  # Also during the read: other threads want the same file.
            file = self._file((path, tuple(columns), tuple(among)))
        return None if file is None else file.having(tuple(among.values()))

    def _file(self, key: _File) -> _FileRows | None:
        if key in self._files:
            self._files.move_to_end(key)
            return self._files[key]
        path, columns, names = key
        rows = _read(path, columns)
        file = self._files[key] = None if rows is None else _FileRows.of(rows, names)
        self._bytes += _nbytes(file)
        while self._bytes > self._most_bytes or len(self._files) > MOST_FILES:
            self._bytes -= _nbytes(self._files.popitem(last=False)[1])
        return file


_GROUP_BYTES = 300
"""The memory of the indexes of one group, besides their numbers."""


def _nbytes(file: _FileRows | None) -> int:
    return 0 if file is None else file.rows.nbytes + 8 * file.rows.num_rows + _GROUP_BYTES * len(file.indexes)


def _read(path: Path, columns: Sequence[str]) -> pa.Table | None:
    schema = pa.schema([bronze.SCHEMA.field(name) for name in columns])
    parts: list[pa.RecordBatch] = []
    total_bytes = 0
    with pq.ParquetFile(path) as parquet:
        batch_size = local_log.rows_at_a_time(parquet, columns, most=_PART_ROWS, size_bytes=_FILE_BYTES)
        for part in parquet.iter_batches(batch_size, columns=list(columns)):
            total_bytes += part.nbytes
            if total_bytes > _FILE_BYTES:
                return None
            parts.append(part)
    return local_log.aligned(pa.Table.from_batches(parts), schema) if parts else schema.empty_table()
