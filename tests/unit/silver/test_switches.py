"""Options of a collection that change after its table exists."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bson
import pytest

from pipelines.delta.writer import Writer
from tests.harness import layers, oracle, without_spark
from tests.harness.without_spark import Hop

NESTED = bson.encode({"_id": 1, "n": {"x": 1}})


def columns(hop: Hop) -> Sequence[str]:
    silver = oracle.read(hop.silver_table.path or "")
    return [name for name in silver.column_names if not name.startswith("__")]


def test_a_table_without_columns_begins_as_the_settings_are(tmp_path: Path) -> None:
    """An older schema may be on record, from a run that was killed before its first commit, or for a table that was removed."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, NESTED))
        hop.silver()
        shutil.rmtree(hop.silver_table.path or "")
        hop.settings = layers.pipeline(tmp_path, **{"flatten.struct": True})
        hop.silver()
        assert columns(hop) == ["_id", "n_x"]
        hop.append((2, bson.encode({"_id": 2, "n": {"y": 2}})))
        hop.run()
        assert columns(hop) == ["_id", "n_x", "n_y"]


@pytest.mark.parametrize(
    ("option", "is_told"),
    [
        ({"flatten.struct": True}, True),
        ({"array.encoding": "document"}, True),
        ({"sanitize.field.names": True}, True),
        ({"schema": {"n.x": "string"}}, True),
        ({"map.fields": ["n"]}, True),
        ({"schema": {"n.x": "bigint", "n.y": "string", "none": "double", "_id": "int"}}, False),
        ({"flatten.struct.delimiter": "."}, False),
        ({"delete.tombstone.handling.mode": "rewrite-with-tombstone"}, False),
    ],
)
def test_a_table_that_goes_on_as_it_was_laid_out_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, option: dict[str, Any], is_told: bool
) -> None:
    """Warns once per start, with the command that applies the settings. Options that change no existing column give no warning."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, NESTED))
        hop.silver()
        hop.settings = layers.pipeline(tmp_path, **option)
        for key in (2, 3):
            hop.append((key, bson.encode({"_id": key, "n": {"y": key}})))
        with caplog.at_level(logging.WARNING):
            hop.silver()
        assert columns(hop) == ["_id", "n"]
        told = [each.getMessage() for each in caplog.records]
        assert ["medallion rebuild --collection cases.t" in each for each in told] == [True] * is_told


def test_a_document_that_grows_like_a_map_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a stream, keys come a few at a time, and each becomes a column. Told once, with what makes a map of them."""
    with without_spark.running(), caplog.at_level(logging.WARNING):
        hop = Hop(tmp_path)
        told = []
        for batch in range(5):
            by = {f"user {batch * 30 + number}": number for number in range(30)}
            hop.append((batch, bson.encode({"_id": batch, "votes": [{"by": by}]})))
            caplog.clear()
            hop.silver()
            told.append([each.getMessage() for each in caplog.records])
        assert [len(messages) for messages in told] == [0, 0, 0, 1, 0]
        assert "map.fields: [votes.by] and run medallion rebuild --collection cases.t" in told[3][0]
        hop.settings = layers.pipeline(tmp_path, **{"map.fields": ["votes.by"]})
        caplog.clear()
        hop.append((9, bson.encode({"_id": 9})))
        hop.silver()
        assert ["map.fields pins other types of votes.by" in each.getMessage() for each in caplog.records] == [True]


def test_a_delete_mode_that_was_taken_back_costs_no_query(tmp_path: Path) -> None:
    """The mode's column stays, and is false for every new document."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
        hop.append((1, bson.encode({"_id": 1})), (2, bson.encode({"_id": 2})))
        hop.run()
        hop.settings = layers.pipeline(tmp_path)
        hop.append((2, None), (3, bson.encode({"_id": 3})))
        hop.run()
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
        assert rows.select(["__key", "__deleted"]).to_pydict() == {"__key": ["1", "3"], "__deleted": [False, False]}
        assert sorted(oracle.read(hop.gold_table.path or "")["__key"].to_pylist()) == ["1", "3"]


def test_updates_from_before_a_switch_to_whole_documents_are_folded(tmp_path: Path) -> None:
    """Silver is behind when `capture.mode` changes: it still applies events without documents, and only then stops keeping documents."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append((1, bson.encode({"_id": 1, "v": 1})), (2, bson.encode({"_id": 2, "v": 1})))
        hop.run()
        hop.append((1, {"updatedFields": '{"v":2}', "removedFields": []}))
        hop.settings = layers.pipeline(tmp_path)
        hop.append((2, bson.encode({"_id": 2, "v": 3})))
        hop.run()
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
        assert rows.select(["v", "__incomplete"]).to_pydict() == {"v": [2, 3], "__incomplete": [False, False]}
        hop.append((2, bson.encode({"_id": 2, "v": 4})))
        hop.run()
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
        assert rows["v"].to_pylist() == [2, 4] and rows["__document"].is_valid().to_pylist() == [True, False]


def test_updates_of_the_old_mode_that_come_late_are_folded(tmp_path: Path) -> None:
    """Silver has the new settings before the capture: after a range of whole documents come updates without one."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append((1, bson.encode({"_id": 1, "v": 1, "w": 1})), (2, bson.encode({"_id": 2, "v": 1})))
        hop.run()
        hop.settings = layers.pipeline(tmp_path)
        for late in (2, 3):
            hop.append((2, bson.encode({"_id": 2, "v": late})))
            hop.run()
            hop.append((1, {"updatedFields": f'{{"v":{late}}}', "removedFields": []}))
            hop.run()
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key").select(["v", "w", "__incomplete"])
        assert rows.to_pydict() == {"v": [3, 3], "w": [1, None], "__incomplete": [False, False]}


@pytest.mark.parametrize("is_back", [False, True])
def test_a_row_that_stayed_while_the_mode_was_another_stays_in_gold(tmp_path: Path, is_back: bool) -> None:
    """Silver is killed after it has remembered a delete, and applies the batch in a mode in which the row stays, before gold runs."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append(*((key, bson.encode({"_id": key})) for key in (1, 2)))
        hop.run()
        tombstone, both = hop.settings, (hop.silver_table, hop.gold_table)
        hop.append((1, None), (2, bson.encode({"_id": 2, "v": 3})))
        layers.killed_at(hop.silver, Writer, "replace_arrow", after=False)
        hop.settings = layers.pipeline(tmp_path, **{"delete.tombstone.handling.mode": "drop"})
        hop.silver()
        hop.settings = tombstone if is_back else hop.settings
        hop.gold()
        for _ in range(2):
            assert [sorted(oracle.read(each.path or "")["__key"].to_pylist()) for each in both] == [["1", "2"]] * 2
            hop.append((2, bson.encode({"_id": 2, "v": 4})))
            hop.run()
