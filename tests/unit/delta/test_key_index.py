"""The index of a file's keys, compared with a search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.delta import key_index, key_search


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[key_index._HeldIndexes]:
    """An empty index, as at the start of a process."""
    held = key_index._HeldIndexes()
    monkeypatch.setattr(key_index, "_HELD", held)
    yield held


def _searched(keys: list[str]) -> key_index.SearchKeys:
    return key_index.SearchKeys(pa.array(keys, pa.string()), is_kept=True)


def _write(path: Path, keys: list[str]) -> dict[str, str]:
    pq.write_table(pa.table({"__key": pa.array(keys, pa.string())}), path)
    return {"path": path.name, "size": path.stat().st_size, "stats": f'{{"numRecords": {len(keys)}}}'}


@pytest.mark.parametrize("seed", range(20))
def test_an_index_finds_what_a_search_finds(seed: int) -> None:
    """With keys of any length, repeated keys, and any chunks."""
    rng = random.Random(seed)
    known = [
        "",
        "\u0000",
        "é" * 1000,
        *(chr(rng.randrange(1, 0xD7FF)) * rng.randrange(1, 5) for _ in range(rng.randrange(3000))),
    ]
    keys = [rng.choice(known) for _ in range(rng.randrange(1, 5000))]
    cut = rng.randrange(len(keys))
    index = key_index.KeyIndex(pa.chunked_array([pa.array(keys[:cut], pa.string()), pa.array(keys, pa.string())[cut:]]))
    wanted = {*rng.sample(known, min(len(known), rng.choice([1, 5, 500]))), "none of them"}
    assert index.rows(_searched([*wanted])) == [number for number, key in enumerate(keys) if key in wanted]
    assert index.size_bytes <= key_index._ROW_BYTES * len(keys) + 8


def test_an_empty_file_and_an_empty_search() -> None:
    assert key_index.KeyIndex(pa.chunked_array([], pa.string())).rows(_searched(["a"])) == []
    assert key_index.KeyIndex(pa.chunked_array([["a"]])).rows(_searched([])) == []


def test_files_are_read_three_times_and_then_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small table gets no index, and is read every time."""
    files = [_write(tmp_path / f"{name}.parquet", [name, "both"]) for name in "ab"]
    read: list[str] = []
    texts = key_search._read
    monkeypatch.setattr(key_search, "_read", lambda path, column: read.append(path.stem) or texts(path, column))
    monkeypatch.setattr(key_search, "SMALL_BYTES", 0)
    for _ in range(5):
        assert key_search.places(tmp_path, files, "__key", ["b", "both"], is_kept=True) == [
            (files[0], [1]),
            (files[1], [0, 1]),
        ]
    assert read == ["a", "b"] * 3
    for _ in range(5):
        assert key_search.places(tmp_path, files[:1], "other", ["b"], is_kept=False) == []
    assert read == [*["a", "b"] * 3, *["a"] * 5]


def test_tables_of_many_rows_or_of_long_keys_get_indexes() -> None:
    """Keys of a kilobyte are read from 20,000 rows as long as ObjectIds from half a million."""
    object_id = f'{{"$oid":"{1:024x}"}}'
    cases = [
        (500_000, [object_id]),
        (400_000, [object_id]),
        (20_000, ["x" * 1000]),
        (10_000, ["x" * 1000, "y"]),
        (10**6, []),
    ]
    assert [key_index.is_large(rows, keys) for rows, keys in cases] == [True, False, True, False, False]


def test_a_replaced_file_of_the_same_name_is_read_again(tmp_path: Path) -> None:
    """A table may be removed and brought back by other means than Delta's."""
    for keys in (["a", "b"], ["b", "a", "a"]):
        file = _write(tmp_path / "x.parquet", keys)
        for _ in range(4):
            assert key_search.places(tmp_path, [file], "__key", ["a"], is_kept=True) == [
                (file, [number for number, key in enumerate(keys) if key == "a"])
            ]


def test_a_search_makes_few_indexes_and_memory_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: key_index._HeldIndexes
) -> None:
    """Recently used indexes stay; unused ones make room."""
    files = [_write(tmp_path / f"{number}.parquet", ["a"] * 100) for number in range(4)]
    monkeypatch.setattr(key_index, "_ROWS_AT_ONCE", 200)
    monkeypatch.setattr(key_index, "HELD_BYTES", 3 * 100 * key_index._ROW_BYTES)

    def held(rounds: int, some: list[dict[str, str]]) -> int:
        for _ in range(rounds):
            assert len(key_search.places(tmp_path, some, "__key", ["a"], is_kept=True)) == len(some)
        return sum(each.index is not None for each in index._entries.values())

    assert [held(rounds, files) for rounds in (2, 1, 1, 1, 5)] == [0, 2, 3, 3, 3]
    for each in index._entries.values():
        each.used -= key_index._KEPT_SECONDS
    assert held(1, files[3:]) == 1 and len(index._entries) == 1
    monkeypatch.setattr(key_index, "_ROWS_AT_ONCE", 50)
    monkeypatch.setattr(key_index, "HELD_BYTES", 10 * 100 * key_index._ROW_BYTES)
    assert [held(rounds, files) for rounds in (2, 1, 1, 1)] == [1, 2, 3, 4], "one that is larger, at a time"
    assert index._size_bytes == sum(each.index.size_bytes for each in index._entries.values() if each.index)
