"""Sweeps of dropped collections by this process, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bson
import pytest

from cdc_core.tables import layout as tables
from pipelines.bronze import registry, survey
from pipelines.delta import live_files, local_log, table_definition
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop, NeedsSpark


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        yield Hop(tmp_path)


def keys(table: tables.TableRef) -> list[str]:
    """The keys of a table's rows."""
    folder = local_log.folder(table)
    assert folder is not None
    live = live_files.LiveFiles(folder)
    assert live.move_to_newest()
    return sorted(live.rows(live.files(), ["__key"])["__key"].to_pylist())


def document(number: int) -> tuple[int, bytes]:
    return number, bson.encode({"_id": number, "v": 1})


def test_the_collections_of_a_database_that_is_dropped_are_empty(hop: Hop) -> None:
    """A database may have hundreds of collections, so a sweep needs no queries. Gold follows, and later documents under the same names
    stay."""
    names = [f"c{number}" for number in range(5)]
    for name in names:
        hop.append(document(1), document(2), collection=name)
    hop.run()
    for name in names:
        hop.drop(name)
    hop.append(document(3), collection="c4")
    hop.run()
    for name in names:
        left = ["3"] if name == "c4" else []
        assert keys(hop.layout.silver("cases", name)) == left
        assert keys(hop.layout.gold("cases", name)) == left
        assert registry.silver_position(SPARK, hop.layout.silver("cases", name)).to == 11
        assert set(keys(hop.layout.deletes("cases", name))) == {"1", "2"}


def test_a_collection_is_made_and_dropped_again_and_again(hop: Hop) -> None:
    """Within one run, and across runs: dropped documents do not come back."""
    for number in range(20):
        hop.append(document(number), document(-number))
        hop.drop()
        if number % 7 == 3:
            hop.run()
    hop.append(document(100))
    hop.run()
    assert keys(hop.silver_table) == keys(hop.gold_table) == ["100"]


def test_a_large_collection_that_is_dropped_is_swept_without_a_query(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MERGE of 60,000 documents takes half a minute in silver, and again in gold."""
    monkeypatch.setattr(survey, "MAX_DRIVER_ROWS", 1)
    hop.append(*(document(number) for number in range(5)))
    hop.run()
    hop.drop()
    hop.run()
    assert keys(hop.silver_table) == keys(hop.gold_table) == []


def test_a_large_sweep_of_a_table_without_deletion_vectors_is_for_spark(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the swept documents would be written again, as one file."""
    hop.append(document(1), document(2))
    hop.silver()
    folder = Path(hop.silver_table.path or "")
    held = table_definition.newest_action(folder, "metaData") or {}
    changed = {**held, "configuration": {**held["configuration"], "delta.enableDeletionVectors": "false"}}
    without_spark.write(folder, (local_log.newest_version(folder) or 0) + 1, [{"metaData": changed}], "SET TBLPROPERTIES")
    hop.drop()
    monkeypatch.setattr(live_files, "MANY_REWRITTEN_BYTES", 1)
    with pytest.raises(NeedsSpark):
        hop.silver()
    assert keys(hop.silver_table) == ["1", "2"]
    monkeypatch.undo()
    hop.silver()
    assert keys(hop.silver_table) == []
