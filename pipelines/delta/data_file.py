"""The Parquet files of a table: as its log names them, and as this process writes them for a commit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_core.tables import layout as tables
from pipelines.delta import table_errors
from pipelines.delta.table_files import TableFiles


@dataclass(frozen=True)
class DataFile:
    """A file of a table's newest version: its name in the log, Delta's statistics, its deletion vector, and whether it
    is there."""

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
        nulls[name] = column.null_count
        if not _has_bounds(column.type):
            continue
        # As numbers: a BSON date may lie beyond Python's.
        is_time = pa.types.is_timestamp(column.type)
        bounds = pc.min_max(column.cast(pa.int64()) if is_time else column).as_py()
        if bounds["min"] is not None:
            low[name] = _time(bounds["min"]) if is_time else _bound(bounds["min"], is_upper=False)
            high[name] = _time(bounds["max"] + 999) if is_time else _bound(bounds["max"], is_upper=True)
    return {
        "numRecords": rows.num_rows,
        "minValues": {name: bound for name, bound in low.items() if bound is not None},
        "maxValues": {name: bound for name, bound in high.items() if bound is not None},
        "nullCount": nulls,
    }


def _has_bounds(type_: pa.DataType) -> bool:
    """Whether the log can hold the least and the greatest value of a type to the letter; without them a file is read
    once too often."""
    return pa.types.is_string(type_) or pa.types.is_integer(type_) or pa.types.is_timestamp(type_)


PREFIX = 32
"""Delta cuts the bounds of strings at so many characters."""

_LAST = "\U0010ffff"


def _bound(value: Any, *, is_upper: bool) -> Any:
    """A value as Delta's statistics write it; None for one that they cannot hold."""
    if isinstance(value, str):
        if len(value) <= PREFIX:
            return value
        # What is cut off must not make the greatest value smaller than it is.
        return value[:PREFIX] if not is_upper else None if value[PREFIX] == _LAST else value[:PREFIX] + _LAST
    return value


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _time(micros: int) -> str | None:
    """Microseconds since 1970 as a time of whole milliseconds, not after it."""
    try:
        return (_EPOCH + timedelta(milliseconds=micros // 1000)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return None
