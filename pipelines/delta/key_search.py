"""Where some keys are in the data files of a table: by reading the files' keys, or by an index where one is held."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.delta import file_statistics, key_index, stored_ranges, table_schema
from pipelines.delta.stored_ranges import Source

THREADS = min(4, os.cpu_count() or 1)

STORED_ROWS = 10_000_000
"""Of a store the keys of at most so many rows, some 300 MB, are read for a search; executors share more."""

_GROUP_ROWS = 500_000
"""So many of their keys each thread holds at a time."""

Places = Sequence[tuple[dict[str, Any], list[int]]]
"""Rows of a table: files, by their `add` actions, each with the numbers of some of its rows in order."""


def places(folder: Path, files: Sequence[dict[str, Any]], column: str, values: Sequence[str], *, is_kept: bool) -> Places:
    """The files that hold one of these values in a column of texts, each with the numbers of the rows, deleted ones too.

    Where it `is_kept` the files' values are remembered (`key_index`). Raises `OSError`.
    """
    sought = key_index.SearchKeys(pa.array(values, pa.string()), is_kept=is_kept)
    # Arrow leaves Python's lock alone while it reads and compares.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion-keys") as pool:
        found = [*pool.map(lambda file: key_index.rows(folder, file, column, sought), files)]
        missing = [number for number, rows in enumerate(found) if rows is None]
        unread = [files[number] for number in missing]
        groups = _groups([*zip(unread, _sources(folder, unread), strict=True)])
        read = pool.map(lambda group: _rows(folder, group, column, sought), groups)
        for number, rows in zip(missing, itertools.chain.from_iterable(read), strict=True):
            found[number] = rows
    return [(file, rows) for file, rows in zip(files, found, strict=True) if rows]


def _sources(folder: Path, files: Sequence[dict[str, Any]]) -> list[Source]:
    """Where the files can be read. Raises `OSError`, also where of a store too much would have to be."""
    found = stored_ranges.sources(folder, files)
    ranged = [file for file, source in zip(files, found, strict=True) if not isinstance(source, Path)]
    if sum(map(file_statistics.row_count, ranged)) > STORED_ROWS:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder))
    return found


_SourcedFile: TypeAlias = tuple[dict[str, Any], Source]
"""A file, by its `add` action, and where it can be read."""


def _groups(files: Sequence[_SourcedFile]) -> Iterator[list[_SourcedFile]]:
    """The files in groups of at most `_GROUP_ROWS` rows, or one file."""
    group: list[_SourcedFile] = []
    count = 0
    for each in files:
        rows = file_statistics.row_count(each[0])
        if group and count + rows > _GROUP_ROWS:
            yield group
            group, count = [], 0
        group.append(each)
        count += rows
    if group:
        yield group


def _rows(folder: Path, files: Sequence[_SourcedFile], column: str, sought: key_index.SearchKeys) -> list[list[int]]:
    """The numbers of the rows of each file that hold one of the values."""
    columns = [_texts(source, column) for _, source in files]
    # Many files at once: Arrow hashes the values that are looked for in each call.
    chunks = [chunk for texts in columns for chunk in texts.chunks]
    is_sought = pc.is_in(pa.chunked_array(chunks, pa.string()), value_set=sought.keys)
    found, start = [], 0
    for (file, _), texts in zip(files, columns, strict=True):
        found.append(pc.indices_nonzero(is_sought.slice(start, len(texts))).to_pylist())
        start += len(texts)
        key_index.saw(folder, file, column, texts, sought)
    return found


def _texts(source: Source, column: str) -> pa.ChunkedArray:
    """A column of a file, with the rows that are deleted in it, in the chunks that it was read in: one of them all would be a copy,
    which takes as long as the reading."""
    with pq.ParquetFile(source) as parquet:
        has_column = column in parquet.schema_arrow.names  # a file that is older than a column has none of it
        rows = parquet.read([column] if has_column else [])
    if has_column and pa.types.is_string(rows[column].type):
        return rows[column]
    return table_schema.conformed(rows, pa.schema([(column, pa.string())]))[column]
