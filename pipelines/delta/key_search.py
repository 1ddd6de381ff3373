"""Where some keys are in the data files of a table: by reading the files' keys, or by an index where one is held."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.delta import file_statistics, key_index, local_log, table_schema

THREADS = min(4, os.cpu_count() or 1)

_GROUP_ROWS = 500_000
"""So many of their keys each thread holds at a time."""

Places = Sequence[tuple[dict[str, Any], list[int]]]
"""Rows of a table: files, by their `add` actions, each with the numbers of some of its rows in order."""


def places(folder: Path, files: Sequence[dict[str, Any]], column: str, values: Sequence[str], *, is_large: bool) -> Places:
    """The files that hold one of these values in a column of texts, each with the numbers of the rows, deleted ones too.

    Of a table that `is_large` the values are remembered (`key_index`). Raises `OSError`.
    """
    sought = key_index.SearchKeys(pa.array(values, pa.string()), is_kept=is_large)
    # Arrow leaves Python's lock alone while it reads and compares.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion-keys") as pool:
        found = pool.map(lambda group: _places(folder, group, column, sought), _groups(files))
        return [*itertools.chain.from_iterable(found)]


def _groups(files: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The files in groups of at most `_GROUP_ROWS` rows, or one file."""
    group: list[dict[str, Any]] = []
    count = 0
    for file in files:
        if group and count + file_statistics.row_count(file) > _GROUP_ROWS:
            yield group
            group, count = [], 0
        group.append(file)
        count += file_statistics.row_count(file)
    if group:
        yield group


def _places(folder: Path, files: Sequence[dict[str, Any]], column: str, sought: key_index.SearchKeys) -> Places:
    """`places` in these files."""
    paths = [local_log.data_path(folder, each["path"]) for each in files]
    found = [key_index.rows(path, column, sought) for path in paths]
    read = [number for number, rows in enumerate(found) if rows is None]
    columns = [_texts(paths[number], column) for number in read]
    # Many files at once: Arrow hashes the values that are looked for in each call.
    chunks = [chunk for rows in columns for chunk in rows.chunks]
    is_sought = pc.is_in(pa.chunked_array(chunks, pa.string()), value_set=sought.keys)
    start = 0
    for number, rows in zip(read, columns, strict=True):
        found[number] = pc.indices_nonzero(is_sought.slice(start, len(rows))).to_pylist()
        start += len(rows)
        key_index.saw(paths[number], column, rows, sought)
    return [(each, rows) for each, rows in zip(files, found, strict=True) if rows]


def _texts(path: Path, column: str) -> pa.ChunkedArray:
    """A column of a file, with the rows that are deleted in it, in the chunks that it was read in: one of them all would be a copy,
    which takes as long as the reading."""
    with pq.ParquetFile(path) as parquet:
        has_column = column in parquet.schema_arrow.names  # a file that is older than a column has none of it
        rows = parquet.read([column] if has_column else [])
    if has_column and pa.types.is_string(rows[column].type):
        return rows[column]
    return table_schema.conformed(rows, pa.schema([(column, pa.string())]))[column]
