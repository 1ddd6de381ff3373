"""Compaction by the writers of silver and gold, in this process."""

from __future__ import annotations

from pathlib import Path

import bson
import pytest

from pipelines.delta import live_files, local_log, maintenance
from tests.harness import without_spark
from tests.harness.without_spark import Hop


def test_a_table_without_checksum_files_is_compacted(tmp_path: Path) -> None:
    """Delta's `spark.databricks.delta.writeChecksumFile.enabled` may be off: the size is then that of the live files."""
    with without_spark.running():
        hop = Hop(tmp_path)
        silver, gold = hop.silver_run(), hop.gold_run()
        for number in range(2 * maintenance.MANY_FILES):
            hop.append((number, bson.encode({"_id": number, "v": 1})))
            silver.run_round()
            gold.published()
        for table in (hop.silver_table, hop.gold_table):
            folder = local_log.folder(table)
            assert folder is not None and local_log.size(folder) is None
            live = live_files.LiveFiles(folder)
            assert live.move_to_newest()
            assert len(live.files()) <= maintenance.MANY_FILES
            assert live.row_count() == 2 * maintenance.MANY_FILES


def test_the_files_of_a_first_load_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have few bytes and many rows: to write each of them twice would double the time of the load."""
    monkeypatch.setattr(maintenance, "SMALL_FILE_ROWS", 3)
    with without_spark.running():
        hop = Hop(tmp_path)
        for start in range(0, 6 * maintenance.MANY_FILES, 3):
            hop.append(*((number, bson.encode({"_id": number})) for number in range(start, start + 3)))
            hop.silver()
        folder = local_log.folder(hop.silver_table)
        assert folder is not None
        live = live_files.LiveFiles(folder)
        assert live.move_to_newest() and len(live.files()) == 2 * maintenance.MANY_FILES
