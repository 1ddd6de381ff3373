"""Finds the rows of keys in a table's data files, by reading the files' key column or by an index (`key_index`)."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.delta import file_statistics, key_index, stored_ranges, table_schema
from pipelines.delta.stored_ranges import Source

THREADS = min(4, os.cpu_count() or 1)

FEW_ROWS = 100_000
"""So many rows, or fewer, are searched without threads of their own: to start these takes longer, for each of hundreds of collections."""

STORED_ROWS = 10_000_000
"""The most rows whose keys one search reads from a store, some 300 MB. Larger searches are for executors."""

SMALL_BYTES = 64 * 2**10
"""The size up to which a file is small: its keys are kept, because a service searches it at each commit until a compaction merges it."""

KEPT_BYTES = 32 * 2**20
"""The memory of the keys that are kept: those of some ten thousand files."""

_ENTRY_BYTES = 1000
"""The memory of a file's entry, besides its keys."""

_GROUP_ROWS = 500_000
"""The rows whose keys a thread reads at a time."""

Places = Sequence[tuple[dict[str, Any], list[int]]]
"""Rows of a table: `add` actions of files, each with some of its row numbers, ascending."""


def places(folder: Path, files: Sequence[dict[str, Any]], column: str, values: Sequence[str], *, is_kept: bool) -> Places:
    """The files that hold one of the values in a STRING column, each with the row numbers, deleted rows included.

    `is_kept` allows indexes of the files' values (`key_index`). Raises `OSError`.
    """
    search_keys = key_index.SearchKeys(pa.array(values, pa.string()), is_kept=is_kept)
    with mapped(is_little=_are_few(files)) as map_:
        file_rows = [*map_(lambda file: key_index.rows(folder, file, column, search_keys), files)]
        missing_numbers = [number for number, rows in enumerate(file_rows) if rows is None]
        unread_files = [files[number] for number in missing_numbers]
        groups = _groups([*zip(unread_files, _sources(folder, unread_files), strict=True)])
        group_rows = map_(lambda group: _rows(folder, group, column, search_keys), groups)
        for number, rows in zip(missing_numbers, itertools.chain.from_iterable(group_rows), strict=True):
            file_rows[number] = rows
    return [(file, rows) for file, rows in zip(files, file_rows, strict=True) if rows]


def places_of(folder: Path, files: Sequence[dict[str, Any]], keys: pa.Table, schema: pa.Schema) -> Places:
    """The files that hold one of these keys in the columns of `schema`, each with the row numbers; deleted rows included.

    Raises `OSError`, or `NotReadable` where a file has columns of other types.
    """
    value_sets = [pc.unique(column) for column in keys.columns]
    sought_tuples = set(tuples(keys))

    def rows(source: Source) -> list[int]:
        with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as parquet:
            present_columns = [name for name in schema.names if name in parquet.schema_arrow.names]
            file_rows = table_schema.conformed(parquet.read(present_columns), schema)
        is_in = [pc.is_in(column, value_set=values) for column, values in zip(file_rows.columns, value_sets, strict=True)]
        numbers = pc.indices_nonzero(functools.reduce(pc.and_, is_in))
        if len(schema) == 1:
            return list(numbers.to_pylist())
        # Each of its values is sought, but maybe in different keys.
        return [
            *itertools.compress(numbers.to_pylist(), (each in sought_tuples for each in tuples(file_rows.take(numbers))))
        ]

    with mapped(is_little=_are_few(files)) as map_:
        file_rows = map_(rows, _sources(folder, files))
        return [(file, numbers) for file, numbers in zip(files, file_rows, strict=True) if numbers]


@contextlib.contextmanager
def mapped(*, is_little: bool) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map`, by threads during the block unless the work is little. Arrow releases the interpreter's lock while it reads and compares."""
    if is_little:
        yield map
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion-keys") as pool:
        yield pool.map


def _are_few(files: Sequence[dict[str, Any]]) -> bool:
    return sum(map(file_statistics.row_count, files)) <= FEW_ROWS


def tuples(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The rows as values of Python that are equal where those of Arrow are. Times and dates are numbers: Python has none after year 9999."""
    return zip(*(_comparable(column).to_pylist() for column in rows.columns))


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _sources(folder: Path, files: Sequence[dict[str, Any]]) -> list[Source]:
    """Sources of the files. Raises `OSError`, also where more than `STORED_ROWS` would be read from a store."""
    sources = stored_ranges.sources(folder, files)
    ranged = [file for file, source in zip(files, sources, strict=True) if not isinstance(source, Path)]
    if sum(map(file_statistics.row_count, ranged)) > STORED_ROWS:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder))
    return sources


_SourcedFile: TypeAlias = tuple[dict[str, Any], Source]
"""The `add` action of a file, and its source."""


def _groups(files: Sequence[_SourcedFile]) -> Iterator[list[_SourcedFile]]:
    """The files in groups of at most `_GROUP_ROWS` rows, or of one file."""
    group: list[_SourcedFile] = []
    count = 0
    for sourced_file in files:
        rows = file_statistics.row_count(sourced_file[0])
        if group and count + rows > _GROUP_ROWS:
            yield group
            group, count = [], 0
        group.append(sourced_file)
        count += rows
    if group:
        yield group


def _rows(folder: Path, files: Sequence[_SourcedFile], column: str, search_keys: key_index.SearchKeys) -> list[list[int]]:
    """The numbers of the rows of each file that hold one of the values."""
    columns = [_texts(folder, file, source, column) for file, source in files]
    # One call for all files: Arrow hashes the sought values in each call.
    chunks = [chunk for texts in columns for chunk in texts.chunks]
    is_sought = pc.is_in(pa.chunked_array(chunks, pa.string()), value_set=search_keys.keys)
    row_numbers, start = [], 0
    for (file, _), texts in zip(files, columns, strict=True):
        row_numbers.append(pc.indices_nonzero(is_sought.slice(start, len(texts))).to_pylist())
        start += len(texts)
        key_index.saw(folder, file, column, texts, search_keys)
    return row_numbers


def _texts(folder: Path, file: dict[str, Any], source: Source, column: str) -> pa.ChunkedArray:
    """A STRING column of a file, deleted rows included; that of a small file is kept."""
    if file["size"] > SMALL_BYTES:
        return _read(source, column)
    name = key_index.key_column(folder, file, column)
    texts = _KEPT.get(name)
    if texts is None:
        _KEPT.put(name, texts := _read(source, column))
    return texts


def _read(source: Source, column: str) -> pa.ChunkedArray:
    """A STRING column of a file. Keeps the chunks of the read: combining them takes as long as reading."""
    with pq.ParquetFile(source) as parquet:
        has_column = column in parquet.schema_arrow.names  # a file that is older than the column lacks it
        rows = parquet.read([column] if has_column else [])
    if has_column and pa.types.is_string(rows[column].type):
        return rows[column]
    return table_schema.conformed(rows, pa.schema([(column, pa.string())]))[column]


class _KeptKeys:
    """An LRU cache of the keys of small files, which never change."""

    def __init__(self) -> None:
        self._columns: OrderedDict[key_index.KeyColumn, pa.ChunkedArray] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, name: key_index.KeyColumn) -> pa.ChunkedArray | None:
        with self._lock:
            if name in self._columns:
                self._columns.move_to_end(name)
            return self._columns.get(name)

    def put(self, name: key_index.KeyColumn, texts: pa.ChunkedArray) -> None:
        with self._lock:
            if name not in self._columns:
                self._columns[name] = texts
                self._size_bytes += texts.nbytes + _ENTRY_BYTES
            while self._size_bytes > KEPT_BYTES:
                self._size_bytes -= self._columns.popitem(last=False)[1].nbytes + _ENTRY_BYTES


_KEPT = _KeptKeys()
"""Those of all tables of this process."""
