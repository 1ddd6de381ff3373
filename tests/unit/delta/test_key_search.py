"""Finding the rows of keys in data files, against a search through all rows."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.delta import key_search, table_schema

DAY = datetime.date(2026, 5, 2)
NOON = datetime.datetime(2026, 5, 2, 12, tzinfo=datetime.UTC)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["", "a", "A", "\x00", "é", "7", None]),
    "number": (pa.int32(), [-(2**31), -1, 0, 7, 2**31 - 1, None]),
    "large": (pa.int64(), [-(2**63), 0, 7, 2**63 - 1, None]),
    "is": (pa.bool_(), [True, False, None]),
    "day": (pa.date32(), [DAY, DAY - datetime.timedelta(1), None]),
    "at": (pa.timestamp("us", "UTC"), [NOON, NOON + datetime.timedelta(microseconds=1), None]),
}


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_keys_in_several_columns(tmp_path: Path, seed: int) -> None:
    """Every value of a key may be in a row without its key; null is equal to null; a file may lack a column, and is then null in it."""
    rng = random.Random(seed)
    names = rng.sample([*VALUES], rng.randint(1, 3))
    schema = pa.schema([(name, VALUES[name][0]) for name in names])

    def drawn(count: int) -> pa.Table:
        return pa.table([pa.array(rng.choices(VALUES[name][1], k=count), VALUES[name][0]) for name in names], schema=schema)

    files, rows = [], []
    for number in range(rng.randint(1, 4)):
        part = drawn(rng.randint(0, 60))
        if len(names) > 1 and rng.random() < 0.3:
            part = part.drop_columns([rng.choice(names)])
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=rng.randint(1, 60))
        files.append({"path": f"{number}.parquet", "size": 1, "stats": f'{{"numRecords": {part.num_rows}}}'})
        rows.append(table_schema.conformed(part, schema))
    keys = drawn(rng.randint(0, 5))
    sought = {tuple(row.values()) for row in keys.to_pylist()}
    expected = [[number for number, row in enumerate(part.to_pylist()) if tuple(row.values()) in sought] for part in rows]
    places = key_search.places_of(tmp_path, files, keys, schema)
    assert [(file["path"], numbers) for file, numbers in places] == [
        (file["path"], numbers) for file, numbers in zip(files, expected, strict=True) if numbers
    ]


def keys_file(folder: Path, name: str, keys: list[str]) -> dict[str, Any]:
    """A data file with these keys; returns its `add` action."""
    pq.write_table(pa.table({"__key": keys}), folder / name)
    return {"path": name, "size": (folder / name).stat().st_size, "stats": f'{{"numRecords": {len(keys)}}}'}


def test_the_keys_of_small_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service searches them at each commit. A file that replaces another one of its name is read; the memory is limited."""
    reads, read = [], key_search._read
    monkeypatch.setattr(key_search, "_read", lambda source, column: (reads.append(source.name), read(source, column))[1])
    monkeypatch.setattr(key_search, "_KEPT", key_search._KeptKeys())

    def found(*files: dict[str, Any]) -> dict[str, list[int]]:
        places = key_search.places(tmp_path, files, "__key", ["b", "x"], is_kept=False)
        return {file["path"]: [*rows] for file, rows in places}

    one, two = keys_file(tmp_path, "1", ["a", "b"]), keys_file(tmp_path, "2", ["b", "b"])
    for _ in range(3):
        assert found(one, two) == {"1": [1], "2": [0, 1]}
    assert reads == ["1", "2"]
    (tmp_path / "1").unlink()
    assert found(keys_file(tmp_path, "1", ["x", "a", "x"]), two) == {"1": [0, 2], "2": [0, 1]}
    assert reads == ["1", "2", "1"]
    monkeypatch.setattr(key_search, "KEPT_BYTES", 1500)
    three = keys_file(tmp_path, "3", ["x"])
    assert found(three) == {"3": [0]} and found(two) == {"2": [0, 1]} and found(three) == {"3": [0]}
    assert reads == ["1", "2", "1", "3", "2", "3"]
    monkeypatch.setattr(key_search, "SMALL_BYTES", 10)
    assert found(three) == {"3": [0]} and reads[-2:] == ["3", "3"]
