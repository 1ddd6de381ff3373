"""Data files that this process writes in parts, and their statistics in the log."""

from __future__ import annotations

import datetime
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deltalake
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core import errors
from cdc_core.tables.layout import TableRef
from pipelines.delta import log_actions
from pipelines.delta.data_file import ParquetFile
from pipelines.delta.table_files import LocalFiles, commit_name

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("flag", pa.bool_())])


def _part(*rows: tuple[object, ...]) -> pa.Table:
    return pa.table([pa.array(column, at.type) for column, at in zip(zip(*rows), SCHEMA)], schema=SCHEMA)


def _written(folder: Path, parts: Iterator[pa.Table]) -> ParquetFile:
    table = TableRef(f"delta.`{folder}`", str(folder))
    return ParquetFile.write(LocalFiles(folder), parts, schema=SCHEMA, statistics=SCHEMA.names, table=table)


def test_statistics_are_those_of_all_parts(tmp_path: Path) -> None:
    """Statistics are as Delta writes them: bounds of ordered types, long strings truncated, times in milliseconds, counts of nulls."""
    early, late = (datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (1, 2))
    parts = (
        _part(("b", 5, late, True), (None, None, None, None)),
        _part(("a" * 40, -1, early, False), ("é" * 40, 7, None, None)),
    )
    file = _written(tmp_path, iter(parts))
    assert pq.read_table(tmp_path / file.name) == pa.concat_tables(parts)
    assert json.loads(file.stats) == {
        "numRecords": 4,
        "minValues": {"key": "a" * 32, "n": -1, "at": "2024-01-01T00:00:00.000Z"},
        "maxValues": {"key": "é" * 32 + "\U0010ffff", "n": 7, "at": "2024-01-02T00:00:00.000Z"},
        "nullCount": {"key": 1, "n": 1, "at": 2, "flag": 2},
    }


def test_other_readers_find_a_value_with_a_rare_character(tmp_path: Path) -> None:
    """delta-rs and Polars decode an escape of such a character in the statistics as a lower one, and would skip the file."""
    name = "\U00020bb7\u91ce"  # a Japanese surname
    rows = pa.table({"key": [name]})
    table = TableRef(f"delta.`{tmp_path}`", str(tmp_path))
    deltalake.write_deltalake(tmp_path, rows.slice(0, 0))
    file = ParquetFile.write(LocalFiles(tmp_path), [rows], schema=rows.schema, statistics=["key"], table=table)
    commit = json.dumps(log_actions.added(file), ensure_ascii=False)  # as Delta writes it
    (tmp_path / commit_name(1)).write_text(commit, "utf-8")
    found = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(tmp_path))
    assert pa.table(found.execute(f"SELECT * FROM t WHERE key = '{name}'").read_all()).num_rows == 1
    assert pl.scan_delta(str(tmp_path)).filter(pl.col("key") == name).collect().height == 1


def test_nested_columns_have_no_statistics(tmp_path: Path) -> None:
    """Delta expects statistics for each nested field: it cannot parse a number in their place, and then ignores all statistics of the
    file."""
    rows = pa.table({"key": ["a"], "deep": [{"n": 1}], "many": [[1]]})
    table = TableRef(f"delta.`{tmp_path}`", str(tmp_path))
    file = ParquetFile.write(LocalFiles(tmp_path), [rows], schema=rows.schema, statistics=rows.column_names, table=table)
    assert json.loads(file.stats)["nullCount"] == {"key": 0}


WRITES = """
import sys, pathlib
import pyarrow as pa
from cdc_core import errors
from cdc_core.tables.layout import TableRef
from pipelines.delta.data_file import ParquetFile
from pipelines.delta.table_files import LocalFiles
rows = pa.table({"after": [f"{number}" * 2**22 for number in range(8)]})
table, held = TableRef("t", sys.argv[1]), pa.default_memory_pool().max_memory()
ParquetFile.write(LocalFiles(pathlib.Path(sys.argv[1])), [rows], schema=rows.schema, statistics=(), table=table)
print(pa.default_memory_pool().max_memory() - held)
"""


def test_large_rows_are_written_one_at_a_time(tmp_path: Path) -> None:
    """Each row of megabytes gets its own page: one page for all rows would need several times their memory."""
    # In its own process, because Arrow reports the maximum since the process started.
    ended = subprocess.run([sys.executable, "-c", WRITES, tmp_path], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 8 * 2**22, "eight rows of 2**22 bytes, and four times as much in one page"


def test_a_small_file_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every retry would leave another partial file on a full disk."""
    write = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError):
        LocalFiles(tmp_path).write("deletion_vector_1.bin", b"vector")
    assert not [*tmp_path.iterdir()]


def test_a_table_that_is_removed_under_its_writer_is_no_bug(tmp_path: Path) -> None:
    """A layer that is made again from the one before it tries again by itself."""
    with pytest.raises(errors.CommitConflict, match="removed"):
        _written(tmp_path / "removed", iter([_part(("a", 1, None, True))]))


def test_no_parts_make_a_file_without_rows(tmp_path: Path) -> None:
    """A commit of bronze may contain no rows."""
    file = _written(tmp_path, iter(()))
    assert pq.read_table(tmp_path / file.name).schema == SCHEMA
    assert json.loads(file.stats)["numRecords"] == 0


def test_a_part_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    """No commit names the file, so nothing would remove it."""

    def parts() -> Iterator[pa.Table]:
        yield _part(("a", 1, None, None))
        raise LookupError("the source is gone")

    with pytest.raises(LookupError, match="the source is gone"):
        _written(tmp_path, parts())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_on_the_disk_before_a_commit_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure the file could be empty, which Spark reads as a file without rows. The same holds for deletion vectors."""
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    file = tmp_path / _written(tmp_path, iter([_part(("a", 1, None, True))])).name
    LocalFiles(tmp_path).write("deletion_vector.bin", b"rows")
    assert synced == [(each.stat().st_ino, each.stat().st_size) for each in (file, tmp_path / "deletion_vector.bin")]
    assert all(size > 0 for _, size in synced)
