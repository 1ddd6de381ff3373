"""Reading a table's files in this process; `tests/spark/delta/test_replace.py` compares it with Delta."""

from __future__ import annotations

import datetime
import json
import random
import shutil
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc_core.tables import deletion_vector
from pipelines.delta import file_statistics, key_search, live_files, local_log, table_schema
from pipelines.delta.live_files import LiveFiles
from pipelines.delta.table_schema import NotReadable

SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": "__key", "type": "string", "nullable": True, "metadata": {}},
        {"name": "__batch", "type": "long", "nullable": True, "metadata": {}},
        {"name": "n", "type": "long", "nullable": True, "metadata": {"delta.typeChanges": []}},
    ],
}

VECTORS = {"delta.enableDeletionVectors": "true"}


class Table:
    """A hand-written table."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, -1
        (folder / "_delta_log").mkdir()
        self.commit({"metaData": {"schemaString": json.dumps(SCHEMA), "partitionColumns": [], "configuration": {}}})

    def commit(self, *actions: dict[str, Any]) -> int:
        self.version += 1
        text = "\n".join(map(json.dumps, actions)) + "\n"
        (self.folder / "_delta_log" / f"{self.version:020}.json").write_text(text)
        return self.version

    def file(self, keys: list[str], batch: int, **more: Any) -> dict[str, Any]:
        name = f"part-{uuid.uuid4()}.parquet"
        numbers = pa.array(range(len(keys)), pa.int32())  # a file from before `n` was widened
        pq.write_table(pa.table({"__key": keys, "__batch": [batch] * len(keys), "n": numbers}), self.folder / name)
        stats = {"numRecords": len(keys), "minValues": {"__key": min(keys), "__batch": batch}}
        stats["maxValues"] = {"__key": max(keys), "__batch": batch}
        return {"path": name, "size": (self.folder / name).stat().st_size, "stats": json.dumps(stats), **more}

    def without(self, file: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        name, vector = uuid.uuid4(), deletion_vector.serialized(BitMap64(rows))
        (self.folder / f"deletion_vector_{name}.bin").write_bytes(deletion_vector.file(vector))
        said = {"storageType": "u", "pathOrInlineDv": z85(name.bytes), "offset": 1, "sizeInBytes": len(vector)}
        return {**file, "deletionVector": {**said, "cardinality": len(rows)}}


def z85(data: bytes) -> str:
    """Encodes as ZeroMQ's RFC 32 says, without the module's own alphabet."""
    signs = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    found = []
    for at in range(0, len(data), 4):
        value = int.from_bytes(data[at : at + 4], "big")
        found += [signs[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(found)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_rows_are_those_of_the_version_without_deleted_ones(table: Table) -> None:
    first, second = table.file(["a", "b", "c"], 1), table.file(["d", "e"], 2)
    begun = table.commit({"add": first}, {"add": second})
    cut = table.without(first, [0, 2])
    # The file with the vector is added before the one without it is removed: both have the same path.
    ended = table.commit({"add": cut}, {"remove": {"path": first["path"]}}, {"remove": {"path": second["path"]}})
    live = LiveFiles(table.folder)
    for version, keys in ((begun, ["a", "b", "c", "d", "e"]), (ended, ["b"]), (begun, ["a", "b", "c", "d", "e"])):
        assert live.move_to(version)
        rows = live.rows_above("__batch", 0, columns=["__key", "n"], limit=100)
        assert sorted(rows["__key"].to_pylist()) == keys
        assert rows.schema.field("n").type == pa.int64()


def test_many_rows_come_in_parts_without_the_deleted_ones(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any size of the parts, and deleted rows anywhere in them."""
    first, second = table.file([*"abcdefg"], 1), table.file([*"hij"], 2)
    version = table.commit({"add": table.without(first, [0, 3, 4, 6])}, {"add": second})
    live = LiveFiles(table.folder)
    assert live.move_to(version)
    for size in (1, 2, 3, 100):
        monkeypatch.setattr(live_files, "PART_ROWS", size)
        parts = [*live.parts_above("__batch", 0, columns=["__key"])]
        assert all(0 < part.num_rows <= size for part in parts)
        assert pa.concat_tables(parts)["__key"].to_pylist() == [*"bcfhij"]
        assert pa.concat_tables([*live.parts_above("__batch", 1, columns=["n"])])["n"].to_pylist() == [0, 1, 2]
    assert (live.count_above("__batch", 0), live.count_above("__batch", 1)) == (10, 3)
    (table.folder / second["path"]).unlink()
    with pytest.raises(NotReadable):
        [*live.parts_above("__batch", 0, columns=["__key"])]


def test_a_file_without_the_columns_has_its_rows_all_the_same(table: Table) -> None:
    """For example a file that somebody appended by Spark without these columns: its rows have nulls, and are above no batch."""
    file = table.file(["a", "b"], 1)
    pq.write_table(pa.table({"__key": ["c", "d", "e"]}), table.folder / "somebodys.parquet")
    somebodys = {"path": "somebodys.parquet", "size": 400, "stats": json.dumps({"numRecords": 3})}
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": file}, {"add": table.without(somebodys, [1])}))
    assert live.rows_above("__batch", 0, columns=["__key"], limit=100)["__key"].to_pylist() == ["a", "b"]
    assert live.rows(live.files(), ["n"])["n"].to_pylist() == [0, 1, None, None]
    places = [(each, [0]) for each in live.files()]
    read = live_files.rows_at(live, places, columns=["n"], size_bytes=1 << 20, read_bytes=1 << 20)
    assert read["n"].to_pylist() == [0, None]


def test_a_files_schema_is_made_once_however_many_columns_are_asked_for(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per column takes five seconds a file with 3,000 columns."""
    made = []

    class Counting(pq.ParquetFile):
        @property
        def schema_arrow(self) -> pa.Schema:
            made.append(1)
            return super().schema_arrow

    monkeypatch.setattr(live_files.pq, "ParquetFile", Counting)
    file = table.file(["a", "b"], 1)
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": file}))
    rows = live.rows([file])
    parts = [*live.parts_above("__batch", 0, columns=live.schema.names)]
    assert rows.num_rows == sum(each.num_rows for each in parts) == len(made) == 2


def test_parts_are_small_where_a_dictionary_makes_the_file_small(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that is in each document is stored once in a file, but takes memory in every row."""
    fields = [*SCHEMA["fields"], {"name": "picture", "type": "string", "nullable": True, "metadata": {}}]  # type: ignore[misc]
    file = table.file([f"{number:04}" for number in range(3000)], 1)
    held = pq.read_table(table.folder / file["path"]).append_column("picture", pa.array(["x" * 2000] * 3000))
    pq.write_table(held, table.folder / file["path"])
    text = json.dumps({"type": "struct", "fields": fields})
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"metaData": {"schemaString": text}}, {"add": file}))
    for name in ("PART_BYTES", "MANY_BYTES"):
        monkeypatch.setattr(live_files, name, 500_000)
    parts = [*live.parts_above("__batch", 0, columns=live.schema.names)]
    assert max(each.nbytes for each in parts) <= 1_100_000
    assert pa.concat_tables(parts)["__key"].to_pylist() == held["__key"].to_pylist()
    with pytest.raises(NotReadable):
        live.rows([file])


def test_keys_are_found_in_files_of_other_writers(table: Table) -> None:
    """One file has large strings, one has no keys."""
    first, large, none = table.file(["a", "b"], 1), table.file(["b", "c"], 1), table.file(["x"], 1)
    pq.write_table(pa.table({"__key": pa.array(["b", "c"], pa.large_string())}), table.folder / large["path"])
    pq.write_table(pa.table({"n": [1]}), table.folder / none["path"])
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": first}, {"add": large}, {"add": {**none, "stats": '{"numRecords": 1}'}}))
    assert live.places("__key", ["b", "x"]) == [(first, [1]), (large, [0])]


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_places_are_found_group_by_group(table: Table, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """With any number of rows in memory at a time."""
    monkeypatch.setattr(key_search, "_GROUP_ROWS", rows)
    files = [table.file(keys, 1) for keys in (["a", "b"], ["c", "d"], ["a", "e"], ["b"])]
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit(*({"add": each} for each in files)))
    assert live.places("__key", ["a", "b", "d"]) == [(files[0], [0, 1]), (files[1], [1]), (files[2], [0]), (files[3], [0])]


def test_places_are_found_and_files_without_them_not_opened(table: Table) -> None:
    first, second = table.file(["a", "b", "c"], 1), table.file(["x", "y"], 2)
    version = table.commit({"add": first}, {"add": second})
    (table.folder / second["path"]).unlink()
    live = LiveFiles(table.folder)
    assert live.move_to(version)
    assert live.places("__key", ["c", "missing", "a"]) == [(first, [0, 2])]
    with pytest.raises(FileNotFoundError):
        live.places("__key", ["x"])


@pytest.mark.parametrize(
    "action",
    [
        {"metaData": {"schemaString": json.dumps(SCHEMA), "partitionColumns": ["n"]}},
        {"metaData": {"schemaString": json.dumps(SCHEMA), "configuration": {"delta.columnMapping.mode": "name"}}},
        {"metaData": {"schemaString": '{"type": "struct", "fields": [{"name": "v", "type": "variant", "nullable": true}]}'}},
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["somethingNew"]}},
        {"sidecar": {"path": "x.parquet"}},
    ],
    ids=["partitions", "column mapping", "type", "feature", "sidecar"],
)
def test_unsupported_layouts_types_and_features_are_refused(table: Table, action: dict[str, Any]) -> None:
    """The table can be read again after a return to the version before."""
    live = LiveFiles(table.folder)
    assert live.move_to(0)
    assert not live.move_to(table.commit(action))
    assert live.move_to(0)


def test_a_hole_in_the_log_is_refused(table: Table) -> None:
    table.commit({"add": table.file(["a"], 1)})
    newest = table.commit({"add": table.file(["b"], 2)})
    (table.folder / "_delta_log" / f"{1:020}.json").unlink()
    assert not LiveFiles(table.folder).move_to(newest)


@pytest.mark.parametrize("more", [0, 1])
def test_a_table_that_was_made_again_is_another(table: Table, more: int) -> None:
    """The new versions have the same numbers as the old ones."""
    live = LiveFiles(table.folder)
    newest = table.commit({"add": table.file(["a"], 1)})
    assert live.move_to(newest)
    shutil.rmtree(table.folder)
    table.folder.mkdir()
    again = Table(table.folder)
    for key in "bc"[: 1 + more]:
        newest = again.commit({"add": again.file([key], 2)})
    assert live.move_to(newest)
    assert live.rows_above("__batch", 0, columns=["__key"], limit=10)["__key"].to_pylist() == [*"bc"[: 1 + more]]


def test_constraints_are_for_delta_to_check(table: Table) -> None:
    live, said = LiveFiles(table.folder), {"schemaString": json.dumps(SCHEMA), "configuration": VECTORS}
    assert live.takes_rows(table.commit({"metaData": said}))
    said = {**said, "configuration": {**VECTORS, "delta.constraints.positive": "n > 0"}}
    assert not live.takes_rows(table.commit({"metaData": said}))
    fields = [{**each, "nullable": each["name"] != "n"} for each in SCHEMA["fields"]]  # type: ignore[attr-defined]
    said = {"schemaString": json.dumps({"type": "struct", "fields": fields}), "configuration": VECTORS}
    assert not live.takes_rows(table.commit({"metaData": said}))


@pytest.mark.parametrize(
    "demanding",
    [
        {"type": {"type": "array", "elementType": "long", "containsNull": False}},
        {"type": {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": False}},
        {"type": {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": False, "metadata": {}}]}},
        {"type": "string", "metadata": {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}},
        {"type": "long", "metadata": {"delta.generationExpression": "n + 1"}},
        {"type": "long", "metadata": {"CURRENT_DEFAULT": "7"}},
    ],
)
def test_what_a_column_demands_is_for_spark_to_keep(table: Table, demanding: dict[str, Any]) -> None:
    column = {"name": "more", "nullable": True, "metadata": {}, **demanding}
    text = json.dumps({"type": "struct", "fields": [*SCHEMA["fields"], column]})
    live = LiveFiles(table.folder)
    version = table.commit({"metaData": {"schemaString": text, "configuration": VECTORS}})
    assert live.move_to(version) and not live.takes_rows(version)


@pytest.mark.parametrize("more", [{}, {"delta.enableChangeDataFeed": "true"}, {"delta.enableRowTracking": "true"}])
def test_rows_that_readers_follow_are_not_replaced(table: Table, more: dict[str, str]) -> None:
    """To readers of changes, a row that is deleted and written anew is another row."""
    said = {"schemaString": json.dumps(SCHEMA), "configuration": {**VECTORS, **more}}
    live = LiveFiles(table.folder)
    assert live.takes_rows(0) and live.takes_rows(table.commit({"metaData": said})) is not bool(more)


def test_parts_stay_small_where_large_rows_follow_on_small_ones(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents grow in the course of years, and a file that is written again begins with the old ones."""
    monkeypatch.setattr(live_files, "PART_BYTES", 100_000)
    keys = [f"s{number}" for number in range(100)] + [f"l{number}".ljust(10_000) for number in range(100)]
    file = table.file(keys, 1)
    path = table.folder / file["path"]
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": file}))
    parts = [*live_files.rest(live, [(file, [0, 150])])]
    assert [key for part in parts for key in part["__key"].to_pylist()] == [*keys[1:150], *keys[151:]]
    assert max(part.nbytes for part in parts) < 300_000


def test_the_statistics_of_many_files_are_read_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch needs the statistics of every file: parsing them for 40,000 files of a wide table takes three seconds."""
    stats = '{{"numRecords": 2, "minValues": {{"__key": "a{0}", "__batch": {0}}}, "maxValues": {{"__key": "b{0}", "__batch": {0}}}}}'
    monkeypatch.setattr(live_files, "MANY_ROWS", 1)
    live = LiveFiles(table.folder)
    assert live.move_to(
        table.commit(*({"add": {"path": str(each), "size": 1, "stats": stats.format(each)}} for each in range(45_000)))
    )
    assert live.count_above("__batch", 44_990) == 18 and live.is_many("__key", ["a7"])
    monkeypatch.delattr(file_statistics.json, "loads")
    assert live.count_above("__batch", 44_990) == 18 and live.is_many("__key", ["a7"])


@pytest.mark.parametrize("stats", ["not JSON", "[]", '"x"', '{"numRecords": "many"}', '{"numRecords": 2, "maxValues": [1]}'])
def test_statistics_in_another_form_count_as_none(table: Table, stats: str) -> None:
    live = LiveFiles(table.folder)
    file = {**table.file(["a", "b"], 7), "stats": stats}
    assert live.move_to(table.commit({"add": file}))
    assert live.row_count() == file_statistics.UNKNOWN_ROWS == live.count_above("__batch", 99)
    assert live.rows(live.files())["__key"].to_pylist() == ["a", "b"]
    assert file_statistics.may_hold(file, "__key", ["z"])
    files = local_log.files(table.folder)
    assert files is not None and files[0].between("__batch") is None and files[0].may_hold("__key", ["z"])


def test_many_rows_are_left_to_executors(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": table.file(["a", "b", "c"], 7)}))
    with pytest.raises(NotReadable):
        live.rows_above("__batch", 6, columns=["__key"], limit=2)
    assert not live.rows_above("__batch", 7, columns=["__key"], limit=2).num_rows
    with monkeypatch.context() as patch, pytest.raises(NotReadable):
        patch.setattr(live_files, "MANY_BYTES", 10)
        live.rows_above("__batch", 6, columns=["__key"], limit=3)
    monkeypatch.setattr(live_files, "MANY_ROWS", 2)
    with pytest.raises(NotReadable):
        live.places("__key", ["b"])


def test_the_smallest_files_are_chosen_and_read_without_their_deleted_rows(table: Table) -> None:
    one, two, three = (table.file(keys, 1, size=10) for keys in (["a", "b"], ["c"], ["d", "e", "f"]))
    cut = table.without(one, [1])
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": cut}, {"add": two}, {"add": three}))
    assert live.by_size(rows=3, size_bytes=100) == ([two, cut], [three])
    assert live.by_size(rows=9, size_bytes=15) == ([two], [cut, three])
    assert live.rows([two, cut])["__key"].to_pylist() == ["c", "a"]
    assert live.holds([two, cut]) and not live.holds([one])
    assert file_statistics.share_deleted(cut) == 0.5


def test_a_row_group_may_have_no_rows(table: Table) -> None:
    """Arrow writes an empty row group for an empty table."""
    file = table.file([f"{number:03}" for number in range(100)], 1)
    held = pq.read_table(table.folder / file["path"])
    with pq.ParquetWriter(table.folder / file["path"], held.schema) as writer:
        for part in (held[:0], held[:70], held[:0], held[70:]):
            writer.write_table(part)
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": file}))
    assert live.rows([file])["__key"].to_pylist() == held["__key"].to_pylist()
    places, sizes = live.places("__key", ["001", "071"]), {"size_bytes": 2**20, "read_bytes": 2**20}
    assert live_files.rows_at(live, places, columns=["n"], **sizes)["n"].to_pylist() == [1, 71]


def test_timestamps_in_the_form_of_old_spark_are_those_of_any_year(table: Table) -> None:
    far = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
    fields = [*SCHEMA["fields"], {"name": "at", "type": "timestamp", "nullable": True, "metadata": {}}]  # type: ignore[misc]
    file = table.file(["a"], 1)
    rows = pa.table({"__key": ["a"], "at": pa.array([far], pa.timestamp("us", tz="UTC"))})
    pq.write_table(rows, table.folder / file["path"], use_deprecated_int96_timestamps=True)
    text = json.dumps({"type": "struct", "fields": fields})
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"metaData": {"schemaString": text}}, {"add": file}))
    assert live.rows([file])["at"].to_pylist() == [far]


def test_structs_take_the_order_and_the_types_of_the_table() -> None:
    """Covers structs in lists and maps, slices, and null structs."""
    inner = pa.struct([("b", pa.int32()), ("a", pa.string())])
    wanted = pa.struct([("a", pa.string()), ("new", pa.bool_()), ("b", pa.int64())])
    values = [None, {"b": 1, "a": "x"}, {"b": None, "a": None}]
    held = pa.table(
        {
            "s": pa.array([values[1], *values], inner),
            "l": pa.array([[values[1]], values, None, []], pa.list_(inner)),
            "m": pa.array([[], [("k", values[1])], None, [("k", None)]], pa.map_(pa.string(), inner)),
        }
    ).slice(1)
    schema = pa.schema([("m", pa.map_(pa.string(), wanted)), ("l", pa.list_(wanted)), ("s", wanted), ("none", pa.int32())])
    whole: list[Any] = [each and {"a": each["a"], "new": None, "b": each["b"]} for each in values]
    assert table_schema.conformed(held, schema).to_pydict() == {
        "m": [[("k", whole[1])], None, [("k", None)]],
        "l": [whole, None, []],
        "s": whole,
        "none": [None] * 3,
    }


def test_a_field_without_a_place_is_refused() -> None:
    held = pa.table({"s": pa.array([{"lost": 1}])})
    with pytest.raises(NotReadable):
        table_schema.conformed(held, pa.schema([("s", pa.struct([("a", pa.int64())]))]))


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ({}, 3),
        ({"NumIndexedCols": "1"}, 1),
        ({"NumIndexedCols": "-1"}, 3),
        ({"StatsColumns": "`__batch`, __key"}, 2),
        ({"StatsColumns": "`n`.x,__key"}, 1),
    ],
)
def test_a_tables_properties_say_which_columns_are_measured(tmp_path: Path, said: dict[str, str], measured: int) -> None:
    """To Delta, -1 means all columns."""
    configuration = {f"delta.dataSkipping{name}": value for name, value in said.items()}
    live = LiveFiles(tmp_path, configuration=configuration, schema=table_schema.arrow_schema(SCHEMA))
    assert live_files.measured_columns(live) == ["__key", "__batch", "n"][:measured]


@pytest.mark.parametrize("seed", range(5))
def test_of_a_large_file_the_row_groups_are_read_that_hold_some_of_the_rows(table: Table, seed: int) -> None:
    """Without deleted rows, for any row groups, and reading no more bytes than the row groups have."""
    rng = random.Random(seed)
    keys = [f"{rng.random()}" for _ in range(10_000)]
    file = table.file(keys, 1)
    held = pq.read_table(table.folder / file["path"])
    pq.write_table(held, table.folder / file["path"], row_group_size=rng.choice([100, 999, 10_000]), use_dictionary=False)
    gone = rng.sample(range(10_000), 500)
    live = LiveFiles(table.folder)
    assert live.move_to(table.commit({"add": table.without(file, gone)}))
    numbers = sorted(rng.sample(range(10_000), rng.choice([1, 3, 300])))
    places = live.places("__key", [keys[number] for number in numbers])
    wanted = [number for number in numbers if number not in gone]
    sizes = {"size_bytes": 2**20, "read_bytes": 2**20}
    rows = live_files.rows_at(live, places, columns=["n", "__key"], **sizes)
    assert rows.to_pylist() == [{"n": number, "__key": keys[number]} for number in wanted]
    groups = len(local_log.row_groups(pq.ParquetFile(table.folder / file["path"]), wanted))
    path = table.folder / file["path"]
    few = local_log.columns_bytes(path, {"n", "__key"}, rows=wanted)
    assert few * pq.ParquetFile(path).num_row_groups == pytest.approx(
        local_log.columns_bytes(path, {"n", "__key"}) * groups, rel=0.2
    )
    with pytest.raises(NotReadable):
        live_files.rows_at(live, places, columns=["n", "__key"], **sizes | {"read_bytes": few - 1})


def test_what_a_version_has_beyond_another_is_found_by_its_places(tmp_path: Path) -> None:
    """From a file in both versions only the rows that the other has deleted, from other files all: one change in a large file is one
    row."""
    table = Table(tmp_path)
    large, gone = table.file([f"{number:04}" for number in range(1000)], 1), table.file(["a", "b"], 1)
    first = table.without(large, [1, 2])
    before = table.commit({"add": first}, {"add": gone})
    coming, second = table.file(["0005", "x"], 2), table.without(large, [1, 2, 5])
    removed = [{"remove": {**each, "dataChange": True}} for each in (first, gone)]
    after = table.commit(*removed, {"add": second}, {"add": coming})
    old, new = LiveFiles(tmp_path), LiveFiles(tmp_path)
    assert old.move_to(before) and new.move_to(after)

    def beyond(live: LiveFiles, other: LiveFiles) -> list[str]:
        places = live_files.rows_beyond(live, other, limit=10)
        rows = live_files.rows_at(live, places, columns=["__key"], size_bytes=2**20, read_bytes=2**20)
        return sorted(rows["__key"].to_pylist())

    assert beyond(old, new) == ["0005", "a", "b"] and beyond(new, old) == ["0005", "x"]
    assert beyond(new, new) == []
    # However many rows are deleted in both.
    assert sum(len(numbers) for _, numbers in live_files.rows_beyond(old, new, limit=3)) == 3
    with pytest.raises(NotReadable):
        live_files.rows_beyond(old, new, limit=2)
