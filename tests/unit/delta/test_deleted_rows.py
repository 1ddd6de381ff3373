"""Rows that are removed from a file: the actions, and deletion vectors that this process cannot read."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap64

from cdc_core.tables import deletion_vector
from pipelines.delta import deleted_rows
from pipelines.delta.table_files import LocalFiles
from pipelines.delta.table_schema import NotReadable

FILE = {"path": "a.parquet", "size": 9, "partitionValues": {}, "stats": json.dumps({"numRecords": 5})}


def test_a_files_vector_grows_until_no_row_is_left(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    added, removed = deleted_rows.without([(FILE, [1, 3])], files)
    assert removed["remove"]["path"] == "a.parquet" and "deletionVector" not in removed["remove"]
    file = added["add"]
    assert sorted(deleted_rows.of(file["deletionVector"], files)) == [1, 3]
    assert deleted_rows.without([(file, [3])], files) == [], "gone already"
    added, removed = deleted_rows.without([(file, [0, 3])], files)
    assert removed["remove"]["deletionVector"] == file["deletionVector"]
    assert added["add"]["deletionVector"]["cardinality"] == 3
    (gone,) = deleted_rows.without([(added["add"], [2, 4])], files)
    assert gone["remove"]["deletionVector"] == added["add"]["deletionVector"]


def test_the_vectors_of_one_commit_are_one_file(tmp_path: Path) -> None:
    """In a store each file is a request, and a batch deletes rows of many data files."""
    files, rows = LocalFiles(tmp_path), {"a": [1], "b": [0, 1, 2, 3, 4], "c": [0, 2, 4], "d": range(2)}
    actions = deleted_rows.without((({**FILE, "path": name}, rows[name]) for name in rows), files)
    added = {each["add"]["path"]: each["add"]["deletionVector"] for each in actions if "add" in each}
    assert {name: sorted(deleted_rows.of(vector, files)) for name, vector in added.items()} == {
        "a": [1],
        "c": [0, 2, 4],
        "d": [0, 1],
    }
    assert [each["remove"]["path"] for each in actions if "remove" in each] == ["a", "b", "c", "d"]
    assert len([*tmp_path.iterdir()]) == 1 and all(deleted_rows.is_there(vector, tmp_path) for vector in added.values())


def _vector(folder: Path, content: bytes) -> dict[str, Any]:
    name = uuid.uuid4()
    (folder / f"deletion_vector_{name}.bin").write_bytes(content)
    return {"storageType": "u", "pathOrInlineDv": deletion_vector.encoded_name(name), "offset": 1, "sizeInBytes": 44}


WHOLE = deletion_vector.file(deletion_vector.serialized(BitMap64([1])))
ANOTHER = deletion_vector.file((1681511376).to_bytes(4, "little") + bytes(40))


@pytest.mark.parametrize("content", [b"", WHOLE[:3], WHOLE[:20], WHOLE[:-1] + b"x", ANOTHER], ids=range(5))
def test_a_vector_that_cannot_be_read_here_is_left_to_delta(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(NotReadable):
        deleted_rows.of(_vector(tmp_path, content), LocalFiles(tmp_path))


def test_a_vector_elsewhere_is_left_to_delta(tmp_path: Path) -> None:
    with pytest.raises(NotReadable):
        deleted_rows.of({"storageType": "p", "pathOrInlineDv": "file:/x.bin", "sizeInBytes": 9}, LocalFiles(tmp_path))


@pytest.mark.parametrize("said", ["", ',"tightBounds":true', ', "tightBounds" : true', ',"tightBounds":false'])
def test_bounds_keep_their_digits(tmp_path: Path, said: str) -> None:
    """A decimal's bound may have more digits than a float; rounded, it would exclude the file from queries that need it."""
    bounds = '"minValues":{"d":9007199254740993.5,"s":"\\"tightBounds\\":true"},"maxValues":{"d":12345678901234567890.123}'
    stats = f'{{"numRecords":5,{bounds}{said}}}'
    added, _ = deleted_rows.without([({**FILE, "stats": stats}, [1])], LocalFiles(tmp_path))
    assert bounds in added["add"]["stats"]
    assert json.loads(added["add"]["stats"])["tightBounds"] is False


@pytest.mark.parametrize("stats", ["", "{}", '{"minValues":{}}', "null"])
def test_statistics_without_a_count_are_left_to_delta(tmp_path: Path, stats: str) -> None:
    with pytest.raises(NotReadable):
        deleted_rows.without([({**FILE, "stats": stats}, [1])], LocalFiles(tmp_path))
