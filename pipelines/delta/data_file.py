"""Parquet files of a table: those that its log names, and those that this process writes for a commit."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc_core.tables import layout as tables
from pipelines.delta import file_statistics, table_errors
from pipelines.delta.table_files import TableFiles


@dataclass(frozen=True)
class DataFile:
    """A file of a table's newest version: its name in the log, Delta's statistics, its deletion vector, and whether it is complete."""

    name: str
    stats: Mapping[str, Any]
    vector: Mapping[str, Any] | None
    is_there: bool

    def between(self, column: str) -> tuple[Any, Any] | None:
        """The minimum and maximum of a column; None where one of them is unknown."""
        return file_statistics.between(self.stats, column)


@dataclass(frozen=True)
class ParquetFile:
    """A new Parquet file in the table's folder, which no commit names yet. `stats` is JSON for Delta's log."""

    files: TableFiles
    name: str
    size: int
    stats: str

    @staticmethod
    def write(
        files: TableFiles, parts: Iterable[pa.Table], *, schema: pa.Schema, statistics: Sequence[str], table: tables.TableRef
    ) -> ParquetFile:
        """Write the parts, one at a time, into a new file; `statistics` names the columns with minimum, maximum and null count."""
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        draft = files.draft(name)
        stats = _FileStatistics(statistics)
        try:
            remaining = iter(parts)
            first_part = next(remaining, schema.empty_table())
            with pq.ParquetWriter(
                draft,
                schema,
                compression="snappy",
                use_dictionary=_dictionaries(first_part),
                write_batch_size=_rows_within(first_part, _PAGE_BYTES, most=_PAGE_ROWS),
            ) as writer:
                for part in itertools.chain([first_part], remaining):
                    writer.write_table(part, row_group_size=_rows_within(part, _GROUP_BYTES, most=part.num_rows))
                    stats.add(part)
            size = draft.stat().st_size
            with table_errors.translating(table):
                files.put(name)
        except OSError as error:
            # No commit names the draft, and the disk may be full.
            draft.unlink(missing_ok=True)
            raise table_errors.disk_error(error, table) from error
        except Exception:  # raised by the iterable of parts
            draft.unlink(missing_ok=True)
            raise
        return ParquetFile(files, name, size, stats.to_json())

    def discard(self) -> None:
        self.files.remove(self.name)


_REPEATED = ("batch", "kind", "op", "db", "collection", "source", "ts_ms")
"""Bronze's columns whose values repeat within a commit; only these are dictionary-encoded."""

_MANY_ROWS = 1_000
"""From this many rows on, all columns of a table of documents are dictionary-encoded. For fewer rows a dictionary saves nothing."""


def _dictionaries(rows: pa.Table) -> bool | list[str]:
    """The columns that are dictionary-encoded; true for all."""
    columns = [name for name in rows.column_names if name in _REPEATED]
    return rows.num_rows >= _MANY_ROWS or columns if len(columns) < len(_REPEATED) else columns


_GROUP_BYTES = 32 * 2**20
"""Bytes of a row group, in memory. To read a few rows, whole row groups are read."""


_PAGE_BYTES = 2**20
_PAGE_ROWS = 1024
"""Arrow tests whether a page is full only after this many rows, or fewer for large rows: otherwise a page of documents of 16 MB would hold
the whole file, twice in memory."""


def _rows_within(rows: pa.Table, size_bytes: int, *, most: int) -> int:
    """How many of the rows have about `size_bytes` in memory: from 1 to `most`."""
    row_bytes = rows.nbytes // max(1, rows.num_rows)
    return max(1, min(most, size_bytes // max(1, row_bytes)))


@dataclass
class _FileStatistics:
    """Delta's statistics of a file, collected from the parts that were written."""

    columns: Sequence[str]
    rows: int = 0
    nulls: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    times: set[str] = field(default_factory=set)

    def add(self, part: pa.Table) -> None:
        self.rows += part.num_rows
        for name in self.columns:
            column = part.column(name)
            if pa.types.is_nested(column.type):
                continue  # Delta needs a number for each inner field, and ignores any other shape
            self.nulls[name] = self.nulls.get(name, 0) + column.null_count
            if not _has_bounds(column.type):
                continue
            # As numbers: a BSON date may be outside of Python's range.
            if pa.types.is_timestamp(column.type):
                self.times.add(name)
                column = column.cast(pa.int64())
            low, high = pc.min_max(column).as_py().values()
            if low is not None:
                bounds = self.bounds.get(name, (low, high))
                self.bounds[name] = min(low, bounds[0]), max(high, bounds[1])

    def to_json(self) -> str:
        low, high = {}, {}
        for name, (least, greatest) in self.bounds.items():
            is_time = name in self.times
            low[name] = _time(least) if is_time else _bound(least, is_upper=False)
            high[name] = _time(greatest + 999) if is_time else _bound(greatest, is_upper=True)
        statistics = {
            "numRecords": self.rows,
            "minValues": {name: bound for name, bound in low.items() if bound is not None},
            "maxValues": {name: bound for name, bound in high.items() if bound is not None},
            "nullCount": self.nulls,
        }
        # Not escaped: Arrow's JSON reader in Rust decodes some escaped pairs as a lower character (`\ud842\udfb7`, U+20BB7, as U+10BB7), and
        # readers on top of it, such as Polars and delta-rs, would skip files because of their maximum.
        return json.dumps(statistics, ensure_ascii=False)


def _has_bounds(type_: pa.DataType) -> bool:
    """Whether the log can represent minimum and maximum of a type exactly. Without them the file is only read more often."""
    return pa.types.is_string(type_) or pa.types.is_integer(type_) or pa.types.is_timestamp(type_)


PREFIX = 32
"""Delta truncates the bounds of strings to this many characters."""

_LAST = "\U0010ffff"


def _bound(value: Any, *, is_upper: bool) -> Any:
    """A bound in the form of Delta's statistics; None where they cannot represent it."""
    if isinstance(value, str):
        if len(value) <= PREFIX:
            return value
        # The truncated maximum must not be less than the value.
        return value[:PREFIX] if not is_upper else None if value[PREFIX] == _LAST else value[:PREFIX] + _LAST
    return value


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _time(micros: int) -> str | None:
    """Microseconds since 1970 as an ISO 8601 time in UTC, rounded down to milliseconds; None outside of Python's range."""
    try:
        return (_EPOCH + timedelta(milliseconds=micros // 1000)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return None
