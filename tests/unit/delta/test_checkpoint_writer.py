"""Checkpoints of hand-written logs; `tests/spark/delta/test_checkpoint_writer.py` compares checkpoints with Delta's own."""

from __future__ import annotations

import errno
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pipelines.delta import checkpoint, checkpoint_writer

METADATA = {
    "metaData": {
        "id": "m",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": "{}",
        "partitionColumns": [],
        "configuration": {"delta.checkpointInterval": "500", "medallion.format": "1"},
        "createdTime": 1,
    }
}
PROTOCOL = {
    "protocol": {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "domainMetadata"],
    }
}


def commit(folder: Path, version: int, *actions: dict[str, Any]) -> None:
    lines = [json.dumps(each) for each in ({"commitInfo": {"operation": "WRITE"}}, *actions)]
    (folder / "_delta_log" / f"{version:020}.json").write_text("\n".join(lines) + "\n", "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table with one commit."""
    (tmp_path / "_delta_log").mkdir()
    commit(tmp_path, 0, PROTOCOL, METADATA)
    return tmp_path


def content(folder: Path, version: int) -> set[str]:
    """The actions of a checkpoint, each as JSON."""
    rows = pq.read_table(folder / "_delta_log" / checkpoint.name(version)).to_pylist()
    return {json.dumps({kind: action for kind, action in row.items() if action is not None}, sort_keys=True) for row in rows}


def random_commits(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Commits that add and remove files, add removed ones again, and change deletion vectors, with transactions and domain metadata."""
    live: dict[str, dict[str, Any]] = {}
    for number in range(40):
        actions: list[dict[str, Any]] = [{"txn": {"appId": rng.choice("ab"), "version": number, "lastUpdated": number}}]
        for _ in range(rng.randrange(4)):
            path = f"part-{rng.randrange(12)}%20ü.parquet"
            if path in live:
                gone = {key: live[path][key] for key in ("path", "size", "deletionVector") if key in live[path]}
                said = {"deletionTimestamp": number, "dataChange": True, "tags": {}, "stats": "{}"}
                actions.append({"remove": {**gone, **said}})
                if rng.random() < 0.4:
                    live.pop(path)
                    continue
            live[path] = {
                "path": path,
                "partitionValues": {},
                "size": number,
                "modificationTime": number,
                "dataChange": True,
            }
            live[path] |= {"stats": '{"numRecords":1}', "tags": {"t": "1"}}
            if rng.random() < 0.5:
                place = {"storageType": "u", "pathOrInlineDv": f"v{number}", "offset": rng.randrange(3)}
                live[path]["deletionVector"] = {**place, "sizeInBytes": 1, "cardinality": 1}
            actions.append({"add": live[path]})
        if rng.random() < 0.2:
            actions.append({"domainMetadata": {"domain": "d", "configuration": str(number), "removed": rng.random() < 0.5}})
        if rng.random() < 0.1:
            actions.append({"metaData": {**METADATA["metaData"], "name": str(number)}})
        yield actions


@pytest.mark.parametrize("seed", range(20))
def test_a_checkpoint_of_a_checkpoint_is_that_of_all_commits(folder: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole = tmp_path / "whole"
    (whole / "_delta_log").mkdir(parents=True)
    commit(whole, 0, PROTOCOL, METADATA)
    for version, actions in enumerate(random_commits(rng), 1):
        commit(folder, version, *actions)
        commit(whole, version, *actions)
        if rng.random() < 0.2 or version == 40:
            assert checkpoint_writer.write(folder, version)
            assert checkpoint.noted(folder / "_delta_log") == version
    assert checkpoint_writer.write(whole, 40)
    assert content(folder, 40) == content(whole, 40)
    live: dict[tuple[str, str], Any] = {}
    for version in range(41):
        for line in (whole / "_delta_log" / f"{version:020}.json").read_text("utf-8").splitlines():
            ((kind, action),) = json.loads(line).items()
            if kind in ("add", "remove"):
                live[action["path"], json.dumps(action.get("deletionVector"))] = (kind, action.get("size"))
    rows = pq.read_table(folder / "_delta_log" / checkpoint.name(40))
    expected = sorted(size for kind, size in live.values() if kind == "add")
    assert sorted(each["size"] for each in rows["add"].to_pylist() if each) == expected
    assert len([each for each in rows["remove"].to_pylist() if each]) == len(live) - len(expected)
    noted = json.loads((folder / "_delta_log" / checkpoint.NOTED).read_text())
    assert (noted["size"], noted["numOfAddFiles"]) == (rows.num_rows, len(expected))


@pytest.mark.parametrize(
    "action",
    [
        {"sidecar": {"path": "x"}},
        {"add": {"path": "x", "newer": 1}},
        {"add": {"path": "x", "deletionVector": {"storageType": "z", "newer": 1}}},
        {"protocol": {**PROTOCOL["protocol"], "writerFeatures": ["newer"]}},
        {"metaData": {**METADATA["metaData"], "configuration": {"delta.checkpointPolicy": "v2"}}},
    ],
)
def test_unknown_actions_and_features_are_left_to_delta(folder: Path, action: dict[str, Any]) -> None:
    commit(folder, 1, action)
    assert not checkpoint_writer.write(folder, 1)
    assert [each.name for each in (folder / "_delta_log").iterdir() if "heckpoint" in each.name] == []


def test_no_row_group_is_empty(folder: Path) -> None:
    """Older readers refuse an empty row group."""
    for version in (1, 2):
        commit(folder, version, {"txn": {"appId": "a", "version": version}})
        assert checkpoint_writer.write(folder, version)
    held = pq.read_metadata(folder / "_delta_log" / checkpoint.name(2))
    assert all(held.row_group(number).num_rows for number in range(held.num_row_groups))


def test_a_table_with_a_dropped_feature_has_checkpoints(folder: Path) -> None:
    """Delta then sets `checkpointProtection`, which only restricts the cleanup of the log."""
    protocol = {**PROTOCOL["protocol"], "readerFeatures": [], "writerFeatures": ["appendOnly", "checkpointProtection"]}
    commit(folder, 1, {"protocol": protocol})
    assert checkpoint_writer.write(folder, 1)


def test_parsed_statistics_without_their_json_are_left_to_delta(folder: Path) -> None:
    """The checkpoint was written while `delta.checkpoint.writeStatsAsJson` was off: it has no statistics as JSON to copy."""
    commit(folder, 1, {"add": {"path": "x", "size": 1, "stats": '{"numRecords":1}'}})
    assert checkpoint_writer.write(folder, 1)
    path = folder / "_delta_log" / checkpoint.name(1)
    rows = pq.read_table(path)
    parsed = [each and {"path": each["path"], "stats_parsed": {"numRecords": 1}} for each in rows["add"].to_pylist()]
    pq.write_table(rows.set_column(rows.column_names.index("add"), "add", [parsed]), path)
    commit(folder, 2, {"txn": {"appId": "a", "version": 2}})
    assert not checkpoint_writer.write(folder, 2)


def test_a_checkpoint_of_delta_rs_is_continued(tmp_path: Path) -> None:
    """delta-rs writes a column for each kind of action, and more fields of each removed file."""
    table = str(tmp_path)
    for number, mode in enumerate(("append", "overwrite", "append")):
        write_deltalake(table, pa.table({"n": [number]}), mode=mode)  # type: ignore[call-overload]  # the modes are literals there
        if number == 1:
            DeltaTable(table).create_checkpoint()
    assert checkpoint_writer.write(tmp_path, 2)
    for version in (0, 1):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    assert sorted(DeltaTable(table).to_pyarrow_table()["n"].to_pylist()) == [1, 2]


def test_unchanged_actions_are_copied_without_being_parsed(folder: Path) -> None:
    """A table with a commit per second has over half a million tombstones after a week: parsing each takes seconds, and a kilobyte of
    memory each."""
    commit(folder, 1, *({"remove": {"path": f"part-{number}.parquet", "size": 1}} for number in range(20_000)))
    assert checkpoint_writer.write(folder, 1)
    commit(folder, 2, {"add": {"path": "part-7.parquet", "size": 2}})
    path = folder / "_delta_log" / checkpoint.name(2)
    for act in (lambda: checkpoint_writer.write(folder, 2), lambda: len(list(checkpoint.actions(path))) == 3):
        tracemalloc.start()
        try:
            assert act()
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()
    rows = pq.read_table(path)
    assert (rows.num_rows, rows["remove"].null_count) == (20_002, 3)


def test_an_existing_checkpoint_and_a_later_note_stay(folder: Path) -> None:
    """An existing checkpoint is kept, and a later one that another writer noted stays noted."""
    for version in (1, 2, 3):
        commit(folder, version, {"txn": {"appId": "a", "version": version}})
    assert checkpoint_writer.write(folder, 3)
    made = (folder / "_delta_log" / checkpoint.name(3)).stat().st_mtime_ns
    assert not checkpoint_writer.write(folder, 3)
    assert (folder / "_delta_log" / checkpoint.name(3)).stat().st_mtime_ns == made
    assert checkpoint_writer.write(folder, 2)
    assert checkpoint.noted(folder / "_delta_log") == 3


def test_the_checksum_of_an_older_note_is_removed(folder: Path) -> None:
    """Hadoop's local file system refuses a file that does not match its checksum."""
    stale = folder / "_delta_log" / f".{checkpoint.NOTED}.crc"
    stale.write_bytes(b"crc\0")
    commit(folder, 1, {"txn": {"appId": "a", "version": 1}})
    assert checkpoint_writer.write(folder, 1)
    assert not stale.exists()


@pytest.mark.parametrize("name", [checkpoint.name(1), checkpoint.NOTED])
def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Only the checkpoint fails: the commit exists, and its writer continues."""
    commit(folder, 1, {"txn": {"appId": "a", "version": 1}})
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    assert not checkpoint_writer.write(folder, 1)
    assert [each.name for each in (folder / "_delta_log").iterdir() if "tmp" in each.name] == []
    assert not (folder / "_delta_log" / name).exists()


def test_tables_with_a_short_interval_get_all_checkpoints_from_delta() -> None:
    assert [checkpoint_writer.every(interval) for interval in (10, 99, 500, 730)] == [None, None, 50, 73]
