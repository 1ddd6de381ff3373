"""Small files of bronze that several collections read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core.bronze import columns
from pipelines.bronze import batch_rows, recent_files
from pipelines.delta import local_log

COLUMNS = ("db", "collection", "offset", "after")


def _file(path: Path, texts: list[str]) -> Path:
    rows = columns.table(len(texts), offset=pa.array(range(len(texts)), pa.int64()), db="shop", after=pa.array(texts))
    pq.write_table(rows, path)
    return path


OF_SHOP = {"db": "shop"}


def test_a_file_is_read_once_for_all_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read = recent_files._read
    monkeypatch.setattr(recent_files, "_read", lambda path, names: reads.append(path) or read(path, names))
    files = recent_files.RecentFiles()
    path = _file(tmp_path / "a", ["x", "y"])
    for _ in range(2):
        rows = files.rows(path, COLUMNS, OF_SHOP)
        assert rows is not None and rows["after"].to_pylist() == ["x", "y"]
    other = files.rows(path, ("db", "offset"), OF_SHOP)
    assert other is not None and other.column_names == ["db", "offset"]
    nothing = files.rows(path, COLUMNS, {"db": "other"})
    assert nothing is not None and nothing.schema == rows.schema and not nothing.num_rows
    assert reads == [path, path]


def test_the_rows_of_each_collection_come_in_order(tmp_path: Path) -> None:
    """Adjacent or not; also with rows of no collection, such as heartbeats, and names that are equal in one column."""
    places = [("a", "x"), (None, None), ("a", "y"), ("b", "x"), ("a", "x"), ("a", None), ("b", "x")]
    rows = columns.table(
        len(places),
        offset=pa.array(range(len(places)), pa.int64()),
        db=pa.array([db for db, _ in places]),
        collection=pa.array([name for _, name in places]),
    )
    pq.write_table(rows, tmp_path / "f")
    files = recent_files.RecentFiles()
    for db, name in {place for place in places if None not in place} | {("b", "y")}:
        found = files.rows(tmp_path / "f", COLUMNS, {"db": db, "collection": name})
        wanted = [offset for offset, place in enumerate(places) if place == (db, name)]
        assert found is not None and found["offset"].to_pylist() == wanted


def test_no_more_is_held_than_was_allowed_and_nothing_of_what_is_large(tmp_path: Path) -> None:
    files = recent_files.RecentFiles(most_bytes=30_000)
    paths = [_file(tmp_path / str(number), [f"{number}" * 10_000]) for number in range(5)]
    assert all(files.rows(path, COLUMNS, OF_SHOP) for path in paths)
    assert 0 < files._bytes <= 30_000
    assert paths[0] not in {path for path, *_ in files._files} and paths[-1] in {path for path, *_ in files._files}
    # Equal documents take little on disk and much in memory.
    alike = _file(tmp_path / "alike", ["z" * 20_000] * 400)
    assert alike.stat().st_size < recent_files.SMALL_BYTES and files.rows(alike, COLUMNS, OF_SHOP) is None


def test_a_small_file_gives_what_a_large_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading give the same rows, and None for a file that is gone."""
    names = pa.array(["a", "b", "a"])
    rows = columns.table(
        3, offset=pa.array([1, 2, 3], pa.int64()), db="shop", collection=names, after=pa.array(["x", "y", "z"])
    )
    pq.write_table(rows, tmp_path / "f")
    file = local_log.AddedFile(tmp_path / "f", {}, (tmp_path / "f").stat().st_size)
    among = {"db": "shop", "collection": "a"}
    small = batch_rows._matching([file], [*COLUMNS], among, 2**20)
    monkeypatch.setattr(recent_files, "SMALL_BYTES", 0)
    large = batch_rows._matching([file], [*COLUMNS], among, 2**20)
    assert small is not None and small.equals(large) and small["after"].to_pylist() == ["x", "z"]
    assert batch_rows._matching([file], [*COLUMNS], among, 0) is None
    monkeypatch.undo()
    gone = local_log.AddedFile(tmp_path / "gone", {}, 10)
    assert batch_rows._matching([gone], [*COLUMNS], among, 2**20) is None
