"""A cache of bronze's small files: in a service all collections read the same ones, one after the other."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_core.bronze import columns as bronze
from pipelines.delta import local_log

SMALL_BYTES = 256 * 2**10
"""The size up to which a file is small: opening it and reading its footer takes longer than reading its rows."""

KEPT_BYTES = 32 * 2**20
"""The memory that the cache may use."""

_FILE_BYTES = 4 * 2**20
"""The memory that one file may use: similar documents compress a hundredfold."""

_MOST_FILES = 1024
"""The number of files, including those that are too large to cache."""

_PART_ROWS = 4096

_File = tuple[Path, tuple[str, ...]]


class RecentFiles:
    """An LRU cache of columns of files, which never change."""

    def __init__(self, *, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._tables: OrderedDict[_File, pa.Table | None] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def table(self, path: Path, columns: Sequence[str]) -> pa.Table | None:
        """The columns of all rows; None where they are too large to cache. Raises Arrow's errors where the file cannot be read."""
        key = (path, tuple(columns))
        with self._lock:  # Also during the read: other threads want the same file.
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
            table = self._tables[key] = _read(path, columns)
            self._bytes += _nbytes(table)
            while self._bytes > self._most_bytes or len(self._tables) > _MOST_FILES:
                self._bytes -= _nbytes(self._tables.popitem(last=False)[1])
            return table


def _nbytes(rows: pa.Table | None) -> int:
    return 0 if rows is None else rows.nbytes


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
