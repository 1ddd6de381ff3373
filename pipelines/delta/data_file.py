"""The Parquet files of a table: as its log names them, and as this process writes them for a commit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_core.tables import layout as tables
from pipelines.delta import table_errors
from pipelines.delta.table_files import TableFiles


@dataclass(frozen=True)
class DataFile:
    """A file of a table's newest version: its name in the log, Delta's statistics, its deletion vector, and whether it is there."""

    name: str
    stats: Mapping[str, Any]
    vector: Mapping[str, Any] | None
    is_there: bool

    def between(self, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest value of a column, where they are known."""
        low, high = (self.stats.get(each, {}).get(column) for each in ("minValues", "maxValues"))
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file inside the table's folder that no commit names yet."""

    files: TableFiles
    name: str
    size: int
    stats: str

    @staticmethod
    def write(files: TableFiles, rows: pa.Table, *, statistics: Sequence[str], table: tables.TableRef) -> ParquetFile:
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        repeated = [name for name in rows.column_names if name in _REPEATED]
        draft = files.draft(name)
        try:
            pq.write_table(rows, draft, compression="snappy", use_dictionary=repeated)
            size = draft.stat().st_size
            with table_errors.translating(table):
                files.put(name)
        except OSError as error:
            # No commit names it, and what is half written only fills the disk that may have been full.
            draft.unlink(missing_ok=True)
            raise table_errors.disk_error(error, table) from error
        return ParquetFile(files, name, size, json.dumps(_statistics(rows, statistics)))

    def discard(self) -> None:
        self.files.remove(self.name)


_REPEATED = ("batch", "kind", "op", "db", "collection", "source", "ts_ms")
"""Columns that repeat within a commit: dictionary-encoded. The others would only fill a dictionary in vain."""


def _statistics(rows: pa.Table, columns: Sequence[str]) -> dict[str, Any]:
    import pyarrow.compute as pc

    low, high, nulls = {}, {}, {}
    for name in columns:
        column = rows.column(name)
        bounds = pc.min_max(column).as_py()
        nulls[name] = column.null_count
        if bounds["min"] is not None and not _is_long(bounds):
            low[name], high[name] = bounds["min"], bounds["max"]
    return {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _is_long(bounds: Mapping[str, Any]) -> bool:
    """Delta cuts string statistics at 32 characters; longer ones are left out, which only skips less."""
    return any(isinstance(bound, str) and len(bound) > 32 for bound in bounds.values())
