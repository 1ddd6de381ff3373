"""Small files of bronze that several collections read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core.bronze import columns
from pipelines.bronze import batch_rows, recent_files
from pipelines.delta import local_log

COLUMNS = ("collection", "offset", "after")


def _file(path: Path, texts: list[str]) -> Path:
    rows = columns.table(len(texts), offset=pa.array(range(len(texts)), pa.int64()), db="shop", after=pa.array(texts))
    pq.write_table(rows, path)
    return path


def test_a_file_is_read_once_for_all_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read = recent_files._read
    monkeypatch.setattr(recent_files, "_read", lambda path, names: reads.append(path) or read(path, names))
    files = recent_files.RecentFiles()
    path = _file(tmp_path / "a", ["x", "y"])
    first, second, other = (files.table(path, names) for names in (COLUMNS, COLUMNS, ("offset",)))
    assert first is second and first is not None and first["after"].to_pylist() == ["x", "y"]
    assert other is not None and other.column_names == ["offset"]
    assert reads == [path, path]


def test_no_more_is_held_than_was_allowed_and_nothing_of_what_is_large(tmp_path: Path) -> None:
    files = recent_files.RecentFiles(most_bytes=30_000)
    paths = [_file(tmp_path / str(number), [f"{number}" * 10_000]) for number in range(5)]
    tables = [files.table(path, COLUMNS) for path in paths]
    assert all(tables) and 0 < files._bytes <= 30_000 and 0 < len(files._tables) < 5
    assert files.table(paths[-1], COLUMNS) is tables[-1] and files.table(paths[0], COLUMNS) is not tables[0]
    # Equal documents take little on disk and much in memory.
    alike = _file(tmp_path / "alike", ["z" * 20_000] * 400)
    assert alike.stat().st_size < recent_files.SMALL_BYTES and files.table(alike, COLUMNS) is None


def test_a_small_file_gives_what_a_large_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading give the same rows, and None for a file that is gone."""
    names = pa.array(["a", "b", "a"])
    rows = columns.table(
        3, offset=pa.array([1, 2, 3], pa.int64()), db="shop", collection=names, after=pa.array(["x", "y", "z"])
    )
    pq.write_table(rows, tmp_path / "f")
    file = local_log.AddedFile(tmp_path / "f", {}, (tmp_path / "f").stat().st_size)
    among = {"db": "shop", "collection": "a"}
    small = batch_rows._matching([file], ["db", *COLUMNS], among, 2**20)
    monkeypatch.setattr(recent_files, "SMALL_BYTES", 0)
    large = batch_rows._matching([file], ["db", *COLUMNS], among, 2**20)
    assert small is not None and small.equals(large) and small["after"].to_pylist() == ["x", "z"]
    assert batch_rows._matching([file], ["db", *COLUMNS], among, 0) is None
    monkeypatch.undo()
    gone = local_log.AddedFile(tmp_path / "gone", {}, 10)
    assert batch_rows._matching([gone], ["db", *COLUMNS], among, 2**20) is None
