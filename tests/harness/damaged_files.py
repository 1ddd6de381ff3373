"""Parquet files with damaged columns: only a reader that does not read these columns succeeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq


def damage(path: Path, is_chosen: Callable[[int, str], bool]) -> None:
    """Overwrite with zeros the columns for which `is_chosen` is true, given the number of the row group and the column's name."""
    metadata = pq.ParquetFile(path).metadata
    with path.open("r+b") as file:
        for group, column in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
            chunk = metadata.row_group(group).column(column)
            if is_chosen(group, chunk.path_in_schema):
                file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                file.write(bytes(chunk.total_compressed_size))
