"""Small files of bronze as they were read last: in a service each collection asks for the same ones, one after the other."""

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
"""A file of so many bytes is opened, and its footer read, for longer than its rows are."""

KEPT_BYTES = 32 * 2**20
"""So much of them is held at a time, in memory."""

_FILE_BYTES = 4 * 2**20
"""A file of more bytes in memory is none to hold: documents that resemble each other compress a hundredfold."""

_MOST_FILES = 1024
"""And of so many files, of which those that are too large to hold take no bytes."""

_PART_ROWS = 4096

_File = tuple[Path, tuple[str, ...]]


class RecentFiles:
    """Columns of files, which never change once they are there; those that were asked for last."""

    def __init__(self, *, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[_File, pa.Table | None] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def table(self, path: Path, columns: Sequence[str]) -> pa.Table | None:
        """The columns of all rows; None where they are too large to be held. Raises as Arrow does where the file cannot be read."""
        key = (path, tuple(columns))
        with self._lock:  # while it is read, too: whoever comes meanwhile wants the same one
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            found = self._held[key] = _read(path, columns)
            self._bytes += _nbytes(found)
            while self._bytes > self._most_bytes or len(self._held) > _MOST_FILES:
                self._bytes -= _nbytes(self._held.popitem(last=False)[1])
            return found


def _nbytes(rows: pa.Table | None) -> int:
    return 0 if rows is None else rows.nbytes


def _read(path: Path, columns: Sequence[str]) -> pa.Table | None:
    schema = pa.schema([bronze.SCHEMA.field(name) for name in columns])
    parts: list[pa.RecordBatch] = []
    held = 0
    with pq.ParquetFile(path) as parquet:
        at_a_time = local_log.rows_at_a_time(parquet, columns, most=_PART_ROWS, size_bytes=_FILE_BYTES)
        for part in parquet.iter_batches(at_a_time, columns=list(columns)):
            held += part.nbytes
            if held > _FILE_BYTES:
                return None
            parts.append(part)
    return local_log.aligned(pa.Table.from_batches(parts), schema) if parts else schema.empty_table()
