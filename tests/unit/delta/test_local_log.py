"""Reading a table's log without Spark: commits, positions, restores, files and checkpoints."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.delta import checkpoint, local_log, ops_tables, table_definition, table_history
from pipelines.delta.live_files import LiveFiles

NO_SPARK: Any = None


def commit(folder: Path, version: int, *actions: dict[str, object], to: object = None, **info: object) -> None:
    """Writes one commit of a log; with a position it is one of this project."""
    log = folder / "_delta_log"
    log.mkdir(exist_ok=True)
    said = {"userMetadata": claims.WriterIdentity("w", "host", 1, "").metadata(now_ms=0, to=to)} if to is not None else {}
    lines = [{"commitInfo": {"timestamp": version, "operation": "WRITE", **said, **info}}, *actions]
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, lines)))


def add(path: str, vector: str | None = None) -> dict[str, object]:
    return {"add": {"path": path, **({"deletionVector": {"pathOrInlineDv": vector, "offset": 1}} if vector else {})}}


def remove(path: str, vector: str | None = None) -> dict[str, object]:
    return {"remove": {"path": path, **({"deletionVector": {"pathOrInlineDv": vector, "offset": 1}} if vector else {})}}


BY_TIME = {"operation": "RESTORE", "operationParameters": {"version": None, "timestamp": "2026-01-01 00:00:00"}}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Versions 0 to 4: two appends, a commit without rows, an upsert by a deletion vector, a rewrite."""
    commit(tmp_path, 0, add("a"), to=1)
    commit(tmp_path, 1, add("b"), to=2)
    commit(tmp_path, 2, to=3)
    commit(tmp_path, 3, remove("a"), add("a", "v"), add("c"), to=4)
    commit(tmp_path, 4, remove("a", "v"), remove("b"), remove("c"), add("d"), to=5)
    return tmp_path


@pytest.mark.parametrize(
    ("actions", "version"),
    [
        (
            [remove("d"), add("a"), add("b")],
            2,
        ),  # the newest version with these files: a commit without rows moved its position
        ([remove("d"), add("a", "v"), add("b"), add("c")], 3),
        ([remove("d"), add("a")], 0),
        ([], 4),
        ([remove("d"), add("gone")], -1),  # older than the log: no commit has the position of these rows
    ],
)
def test_a_restore_to_a_time_is_told_by_its_files(table: Path, actions: list[dict[str, object]], version: int) -> None:
    """Versions with the same files have the same rows."""
    commit(table, 5, *actions, **BY_TIME)
    newest = next(iter(local_log.commits(table)))
    assert (newest.version, newest.restored) == (5, version)


def test_a_restore_across_a_damaged_commit_has_no_known_version(table: Path) -> None:
    """One before a checkpoint, which Delta does not read any more."""
    commit(table, 5, remove("d"), add("a"), **BY_TIME)
    assert next(local_log.commits(table)).restored == 0
    damaged = table / "_delta_log" / f"{3:020}.json"
    damaged.write_text(damaged.read_text()[:-9])
    assert next(local_log.commits(table)).restored == local_log.UNKNOWN


def test_a_restore_to_a_version_says_it(table: Path) -> None:
    commit(table, 5, operation="RESTORE", operationParameters={"version": "1", "timestamp": None})
    assert next(iter(local_log.commits(table))).restored == 1


@pytest.mark.parametrize(
    ("operation", "parameters", "is_replaced"),
    [
        ("CLONE", {"source": "delta.`/backup/t`", "sourceVersion": "3", "isShallow": "true"}, True),
        ("WRITE", {"mode": "Overwrite", "partitionBy": "[]"}, True),
        ("WRITE", {"mode": "Overwrite", "partitionBy": "[]", "predicate": "day = 3"}, False),
        ("WRITE", {"mode": "Overwrite", "partitionBy": "[]", "predicate": "true"}, True),  # replaceWhere of all rows
        ("WRITE", {"mode": "Append", "partitionBy": "[]"}, False),
        ("CREATE OR REPLACE TABLE AS SELECT", {"isV1SaveAsTableOverwrite": True, "partitionBy": "[]"}, True),  # saveAsTable
        ("CREATE OR REPLACE TABLE AS SELECT", {"partitionBy": "[]", "properties": '{"medallion.format":"1"}'}, True),
        ("REPLACE TABLE", {"partitionBy": "[]", "properties": '{"medallion.format":"1"}'}, True),
        ("OPTIMIZE", {"predicate": "[]"}, False),
        ("DELETE", {"predicate": '["true"]'}, True),  # DELETE FROM t
        ("DELETE", {"predicate": "[]"}, True),  # DeltaTable.delete()
        ("DELETE", {}, True),  # delta-rs
        ("DELETE", {"predicate": "[\"(key = '42')\"]"}, False),
        ("TRUNCATE", {}, True),
    ],
)
def test_a_position_is_void_after_its_rows_were_replaced_or_deleted(
    table: Path, operation: str, parameters: dict[str, str], is_replaced: bool
) -> None:
    """A backup that is copied over the table lacks newer changes, so the old position is void. A later commit of ours states its own."""
    commit(table, 5, operation=operation, operationParameters=parameters)
    found = table_history.standing(NO_SPARK, tables.TableRef.at(str(table))).position
    assert (found is None) == is_replaced
    commit(table, 6, operation=operation, operationParameters=parameters, to=6)
    found = table_history.standing(NO_SPARK, tables.TableRef.at(str(table))).position
    assert found is not None and found.version == 6


def test_what_was_appended_is_told_across_a_compaction_that_says_nothing(tmp_path: Path) -> None:
    """Compactions have no position, neither bronze's own nor an operator's."""
    commit(tmp_path, 0, add("a"), to=1)
    commit(tmp_path, 1, add("b"), to=2)
    commit(tmp_path, 2, remove("a"), remove("b"), add("ab"), operation="OPTIMIZE")
    commit(tmp_path, 3, add("c"), to=3)

    def is_before(each: local_log.Commit) -> bool:
        return each.metadata is not None and each.metadata["to"] == 1

    found = local_log.appended(tmp_path, is_before)
    assert found is not None
    assert {each.path.name for each in found} == {"c", "ab"}


def test_what_columns_take_counts_those_with_dots_in_their_names(tmp_path: Path) -> None:
    rows = pa.table({"a": [{"b": "x" * 10}], "a.b": ["y" * 1000], "a.c": [["z" * 500]], "other": ["w" * 5000]})
    pq.write_table(rows, tmp_path / "f.parquet", use_dictionary=False, write_statistics=False)
    sizes = [local_log.columns_bytes(tmp_path / "f.parquet", {name}) for name in ("a.b", "a.c", "other")]
    assert [size // 500 for size in sizes] == [2, 1, 10]


@pytest.mark.parametrize(
    "said",
    ['{"writer": "alice"}', '{"job": 7}', '"writer"', "7", "[" * 100_000, '{"writer"', "", None, 7],
    ids=lambda said: repr(said)[:20],
)
def test_the_user_metadata_of_others_is_not_ours(said: object, tmp_path: Path) -> None:
    """Another program, such as an OPTIMIZE each night, may name its writer: taken for one of ours it would end the claim and the position."""
    (tmp_path / "_delta_log").mkdir()
    info = {"commitInfo": {"operation": "OPTIMIZE", "userMetadata": said}}
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text(json.dumps(info))
    assert [each.metadata for each in local_log.commits(tmp_path)] == [None]


@pytest.mark.parametrize(
    "damaged", ["", "[]", "null", '{"version": Infinity}', '{"version": 1e300}', '{"version": -1}', '{"version": "0"}']
)
def test_small_files_of_a_log_that_are_damaged_are_as_good_as_none(damaged: str, tmp_path: Path) -> None:
    """The hint at the last checkpoint, and the checksum of a commit: with Delta, a table can be read without them."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    for version in range(2):
        (log / f"{version:020}.json").write_text('{"commitInfo":{"operation":"WRITE"}}\n')
    (log / "_last_checkpoint").write_text(damaged)
    (log / f"{1:020}.crc").write_text(damaged.replace("version", "tableSizeBytes"))
    assert checkpoint.noted(log) is None and checkpoint.newest(tmp_path) is None
    assert local_log.newest_version(tmp_path) == 1 and local_log.size(tmp_path) is None


def test_a_truncated_commit_needs_a_decision(tmp_path: Path) -> None:
    """A commit that a power failure left empty counts as one without metadata, and the position is that of the commit before. A truncated
    one needs a decision."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    last = log / f"{1:020}.json"
    for commit in (log / f"{0:020}.json", last):
        commit.write_text('{"commitInfo":{"operation":"WRITE","userMetadata":"{\\"writer\\":\\"a\\",\\"to\\":1}"}}\n')
    os.truncate(last, 0)
    assert [each.metadata for each in local_log.commits(tmp_path)] == [None, {"writer": "a", "to": 1}]
    last.write_text('{"commitInfo":{"operation":"WRI')
    with pytest.raises(errors.DecisionNeeded, match="truncated or damaged"):
        next(local_log.commits(tmp_path))


def test_a_commit_whose_actions_are_cut_off_is_left_to_delta(table: Path) -> None:
    """Spark then reads it, and its error names the damaged file and what to do."""
    newest = table / "_delta_log" / f"{5:020}.json"
    commit(table, 5, {"metaData": {"id": "a", "configuration": {}, "schemaString": '{"fields": []}'}}, to=6)
    text = newest.read_text()
    newest.write_text(text[:-9])
    assert table_definition.properties(table) is table_definition.columns(table) is table_definition.table_id(table) is None
    assert local_log.appended(table, lambda commit: commit.version < 4) is None
    assert local_log.files(table) is None
    newest.write_text(text)
    assert table_definition.properties(table) == {} and table_definition.columns(table) == []


def test_a_long_log_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a commit per second the log has millions of entries, and every poll asks for the newest."""
    (tmp_path / "_delta_log").mkdir()
    assert local_log.newest_version(tmp_path) is None and not local_log.exists(tmp_path)
    commit(tmp_path, 0, {"metaData": {"schemaString": '{"fields": []}', "configuration": {"a": "b"}}}, to=0)
    commit(tmp_path, 1, to=1)
    pq.write_table(pa.table({"metaData": pa.array([None], pa.struct([("id", pa.string())]))}), _checkpoint_of(tmp_path, 0))
    (tmp_path / "_delta_log" / "_last_checkpoint").write_text('{"version": 0}')
    assert local_log.newest_version(tmp_path) == 1
    with monkeypatch.context() as patch:
        patch.setattr(local_log.os, "scandir", None)
        commit(tmp_path, 2, {"metaData": {"schemaString": '{"fields": []}', "configuration": {"a": "c"}}}, to=2)
        commit(tmp_path, 3, to=3)
        assert local_log.exists(tmp_path) and local_log.newest_version(tmp_path) == 3
        assert [each.version for each in local_log.commits(tmp_path)] == [3, 2, 1, 0]
        assert table_definition.properties(tmp_path) == {"a": "c"}
    for version in (0, 1):  # past their retention
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    assert [each.version for each in local_log.commits(tmp_path)] == [3, 2]
    for version in (2, 3):  # removed, and made anew
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    commit(tmp_path, 0, to=7)
    assert local_log.newest_version(tmp_path) == 0


def test_a_log_with_a_noted_checkpoint_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start and every command ask for the files several times, and listing a month's log takes seconds."""
    for version, path in enumerate("abcd"):
        commit(tmp_path, version, add(path), to=version)
    held = pa.table({"add": pa.array([{"path": "a"}, {"path": "b"}], pa.struct([("path", pa.string())]))})
    pq.write_table(held, _checkpoint_of(tmp_path, 1))
    (tmp_path / "_delta_log" / "_last_checkpoint").write_text('{"version": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(local_log.os, "scandir", None)
        found = local_log.files(tmp_path)
        assert found is not None and [each.path.name for each in found] == ["a", "b", "c", "d"]
        assert local_log.newest_version(tmp_path) == 3
    (tmp_path / "_delta_log" / f"{2:020}.json").unlink()
    assert local_log.files(tmp_path) is None


def test_a_checkpoint_that_is_noted_and_gone_or_newer_than_wanted_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    for version in (10, 20):
        _checkpoint_of(tmp_path, version).write_bytes(b"")
    _checkpoint_of(tmp_path, 15).with_suffix(".0000000001.0000000002.parquet").write_bytes(b"")
    noted = tmp_path / "_delta_log" / "_last_checkpoint"
    for text in (None, '{"version": 20}', '{"version": 30}', "{", "[]"):
        if text is not None:
            noted.write_text(text)
        found = [checkpoint.newest(tmp_path, version) for version in (None, 25, 20, 19, 9)]
        assert [path and int(path.name[:20]) for path in found] == [20, 20, 20, 10, None]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 cut off"])
def test_a_checkpoint_that_cannot_be_read_is_left_to_delta(tmp_path: Path, content: bytes) -> None:
    """Delta starts from an older one, or from the first commit."""
    commit(tmp_path, 0, {"metaData": {"schemaString": '{"fields": []}', "configuration": {}}}, to=0)
    commit(tmp_path, 1, add("a"), to=1)
    _checkpoint_of(tmp_path, 0).write_bytes(content)
    assert local_log.rows(tmp_path, pa.schema([("n", pa.int64())])) is None
    assert local_log.files(tmp_path) is table_definition.columns(tmp_path) is table_definition.properties(tmp_path) is None
    assert not LiveFiles(tmp_path).move_to(1)


def test_a_table_of_a_feature_that_is_not_known_is_left_to_delta(tmp_path: Path) -> None:
    """The feature may change how the log names files: bronze would be read without some of its events."""
    commit(tmp_path, 0, add("a"))
    assert [file.path.name for file in local_log.files(tmp_path) or ()] == ["a"]
    for version, feature in ((1, "deletionVectors"), (2, "somethingNew")):
        commit(tmp_path, version, {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature]}})
        assert (local_log.files(tmp_path) is None) == (version == 2)


def _checkpoint_of(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020}.checkpoint.parquet"


def test_a_checkpoint_of_a_clustered_table(tmp_path: Path) -> None:
    """Bronze and silver are clustered: Delta stores the clustering columns as domain metadata, beside the table's properties."""
    domain = {"domain": "delta.clustering", "configuration": '{"clusteringColumns":[["batch"]]}', "removed": False}
    text = [("domain", pa.string()), ("configuration", pa.string()), ("removed", pa.bool_())]
    properties = pa.struct([("configuration", pa.map_(pa.string(), pa.string()))])
    rows = [{"metaData": {"configuration": [("delta.appendOnly", "true")]}}, {"domainMetadata": domain}]
    path = tmp_path / "c.parquet"
    schema = pa.schema([("metaData", properties), ("domainMetadata", pa.struct(text))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    assert list(checkpoint.actions(path)) == [{"metaData": {"configuration": {"delta.appendOnly": "true"}}}]


def test_a_checkpoint_of_many_files_is_read_a_part_at_a_time(tmp_path: Path) -> None:
    """The statistics of each file of a wide table have kilobytes."""
    path = tmp_path / "c.parquet"
    add = pa.StructArray.from_arrays([pa.array(["x" * 1000] * 20_000)], names=["stats"])
    pq.write_table(pa.table({"add": add}), path)
    tracemalloc.start()
    try:
        assert sum(len(each["add"]["stats"]) for each in checkpoint.actions(path)) == 20_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


def test_a_checkpoint_with_dates_beyond_python(tmp_path: Path) -> None:
    stats = pa.struct([("maxValues", pa.struct([("at", pa.timestamp("us"))]))])
    parsed = pa.array([{"maxValues": {"at": 2**62}}], pa.struct([("maxValues", pa.struct([("at", pa.int64())]))])).cast(
        stats
    )
    add = pa.StructArray.from_arrays([pa.array(["a.parquet"]), parsed], names=["path", "stats_parsed"])
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"add": add, "txn": pa.nulls(1, pa.struct([("appId", pa.string())]))}), path)
    assert list(checkpoint.actions(path)) == [{"add": {"path": "a.parquet"}}]


def test_a_folder_is_the_one_that_spark_takes(tmp_path: Path) -> None:
    """Also behind a link, where the operating system resolves `..` to another folder."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    for path in (f"{tmp_path}/link/../lake", f"file:{tmp_path}/link/../lake", f"{tmp_path}//lake"):
        assert local_log.folder(tables.TableRef.at(path)) == tmp_path / "lake"
    assert local_log.folder(tables.TableRef.at("/Volumes/lake")) is None


def test_long_texts_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """Where field names are data, each version of a schema has a megabyte, and a compaction puts thousands into one file."""
    commit(tmp_path, 0, {"metaData": {"configuration": {}}}, add("f.parquet"))
    rows = pa.table({"number": range(1000)})
    pq.write_table(rows, tmp_path / "f.parquet")
    table = tables.TableRef.at(str(tmp_path))
    parts = list(ops_tables.parts(NO_SPARK, table, rows.schema))
    assert pa.concat_tables(parts) == rows
    assert max(map(len, parts)) < 100


def test_rows_that_delta_rs_wrote_are_read_beside_others(tmp_path: Path) -> None:
    """delta-rs writes strings that Arrow reads as another type, also in tables of facts, which every command reads."""
    table, schema = str(tmp_path), pa.schema([("name", pa.string()), ("names", pa.list_(pa.string()))])
    for name in "abc":
        write_deltalake(table, pa.table({"name": [name], "names": [[name]]}), mode="append")
    DeltaTable(table).update({"name": "'z'"}, predicate="name = 'b'")
    found = local_log.rows(tmp_path, schema)
    assert found is not None and found.schema == schema
    assert sorted(found["name"].to_pylist()) == ["a", "c", "z"]
