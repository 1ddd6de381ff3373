"""Large data files in a store: searches and single rows copy only the ranges that they need."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.delta import key_index, key_search, live_files, stored_files, stored_ranges, table_schema
from pipelines.delta.live_files import LiveFiles
from tests.harness.folder_store import Folder

FIELDS = {"__key": "string", "n": "long", "text": "string"}
GROUP_ROWS = 5_000


class Table:
    """A table of two large files and a small one in a store, and this process' reader of it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder / "store"
        self.rows: dict[str, dict[str, Any]] = {}
        files = [
            self._file(f"{name} {rng.random()}.parquet", count) for name, count in (("a", 20_000), ("b", 12_000), ("c", 5))
        ]
        schema = [{"name": name, "type": type_, "nullable": True, "metadata": {}} for name, type_ in FIELDS.items()]
        metadata = {"schemaString": json.dumps({"type": "struct", "fields": schema}), "partitionColumns": []}
        (self.folder / "_delta_log").mkdir()
        commit = self.folder / "_delta_log" / f"{0:020}.json"
        commit.write_text(
            "".join(json.dumps(each) + "\n" for each in [{"metaData": metadata}, *({"add": each} for each in files)])
        )
        self.files = Folder(self.folder, folder / "copies")
        stored_files._COPIED[self.files.folder] = stored_files.CopiedLog(self.files)
        self.live = LiveFiles(self.files.folder)
        assert self.live.move_to_newest() and self.live.version == 0
        self.files.asked.clear()

    def _file(self, name: str, count: int) -> dict[str, Any]:
        self.folder.mkdir(exist_ok=True)
        start = len(self.rows)
        rows = [{"__key": f"key {start + n}", "n": start + n, "text": f"{start + n} " * 30} for n in range(count)]
        self.rows |= {each["__key"]: each for each in rows}
        pq.write_table(pa.Table.from_pylist(rows), self.folder / name, row_group_size=GROUP_ROWS, compression="none")
        size = (self.folder / name).stat().st_size
        return {"path": name.replace(" ", "%20"), "size": size, "stats": json.dumps({"numRecords": count})}

    def found(self, keys: list[str], columns: Sequence[str] = (*FIELDS,)) -> list[dict[str, Any]]:
        sizes = {"size_bytes": 10**9, "read_bytes": 10**9}
        rows = live_files.rows_at(self.live, self.live.places("__key", keys), columns=columns, **sizes)
        return sorted(rows.to_pylist(), key=lambda row: int(row["n"]))

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.parquet"))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.setattr(stored_ranges, "FEW_BYTES", 2**20)
    monkeypatch.setattr(stored_ranges, "SMALL_BYTES", 2**16)
    monkeypatch.setattr(key_index, "_HELD", key_index._HeldIndexes())
    made = Table(tmp_path, random.Random(7))
    yield made
    del stored_files._COPIED[made.files.folder]


def test_a_few_rows_of_a_large_table_are_a_few_ranges_of_it(table: Table) -> None:
    """The ranges have less than the table, and are requested once; then the keys are known without the store."""
    wanted = ["key 7", "key 25000", "key 32004", "none"]
    expected = [table.rows[key] for key in wanted[:3]]
    assert table.found(wanted) == expected
    ranges = [each for each in table.files.asked if isinstance(each, tuple)]
    assert len(ranges) > 4 and sum(size for *_, size in ranges) < table.size_bytes() / 2
    whole = [name for name in table.files.asked if isinstance(name, str)]
    assert [name[0] for name in whole] == ["c"], "what is small comes whole"
    for _ in range(3):
        table.files.asked.clear()
        assert table.found(wanted) == expected and table.files.asked == []
    for copy in table.files.folder.glob("*.parquet*"):
        copy.unlink()
    assert [rows for _, rows in table.live.places("__key", wanted)] == [[7], [5000], [4]] and table.files.asked == []


@pytest.mark.parametrize("seed", range(5))
def test_any_rows_are_those_of_the_table(table: Table, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        keys, columns = rng.sample([*table.rows], rng.choice([1, 10, 1_000])), rng.sample([*FIELDS], 2)
        columns = [*dict.fromkeys(["n", *columns])] if len(keys) == 1 else ["n", "__key"]
        expected = sorted((table.rows[key] for key in keys), key=lambda row: int(row["n"]))
        assert table.found(keys, columns) == [{name: row[name] for name in columns} for row in expected]


def test_a_range_that_cannot_be_read_is_an_error(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the store, or a file that is shorter than the log says, must not return wrong rows."""
    with monkeypatch.context() as outage, pytest.raises(OSError, match="away"):
        outage.setattr(Folder, "download_range", lambda *_: (_ for _ in ()).throw(OSError(5, "away")))
        table.found(["key 7"])
    for path in table.folder.glob("a *"):
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(OSError, match="not as long"):
        table.found(["key 7"])


def test_too_much_of_a_store_is_left_to_executors(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(key_search, "STORED_ROWS", 31_999)
        table.found(["key 7"])
    monkeypatch.setattr(stored_ranges, "READ_BYTES", 2**16)
    with pytest.raises(table_schema.NotReadable):
        table.found(["key 7", "key 25000"])
