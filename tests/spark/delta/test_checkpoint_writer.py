"""Checkpoints written by this process, compared with Delta's checkpoints of the same versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import checkpoint, checkpoint_writer, direct_log, local_log
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from tests.harness import sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STATEMENTS = (
    "INSERT INTO {t} SELECT id, 'ü %20', named_struct('a', id) FROM range(0, 50, 1, 2)",
    "DELETE FROM {t} WHERE id % 7 = 3",
    "ALTER TABLE {t} ADD COLUMNS (late DATE COMMENT 'of later')",
    "ALTER TABLE {t} CLUSTER BY (name)",
    "DELETE FROM {t} WHERE id % 7 = 4",
    "ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
    "INSERT INTO {t} (id, name) VALUES (1, 'last')",
)


def content(folder: Path, version: int) -> set[str]:
    """The actions of a checkpoint, without the columns that Delta parsed again."""
    found = set()
    for row in pq.read_table(folder / "_delta_log" / checkpoint.name(version)).to_pylist():
        ((kind, action),) = ((kind, action) for kind, action in row.items() if action is not None)
        said = {
            name: sorted(value) if name == "configuration" and kind == "metaData" else value
            for name, value in action.items()
        }
        found.add(
            json.dumps(
                {kind: {name: said[name] for name in said if not name.endswith("_parsed")}}, sort_keys=True, default=str
            )
        )
    return found


def test_checkpoints_equal_those_of_delta(spark: SparkSession, tmp_path: Path) -> None:
    """Deletion vectors, columns, clustering and row tracking are the same, and Spark reads the table from such a checkpoint alone."""
    table, ours = tables.TableRef.at(str(tmp_path / "table")), tmp_path / "ours"
    properties = {
        "delta.enableDeletionVectors": "true",
        "delta.enableTypeWidening": "true",
        "delta.checkpointInterval": "500",
    }
    delta.create(
        spark, table, columns="id BIGINT, name STRING, s STRUCT<a: BIGINT>", properties=properties, cluster_by=["id"]
    )
    folder = local_log.folder(table)
    assert folder is not None
    log = direct_log.of(spark, table)
    assert log is not None
    for number, statement in enumerate(STATEMENTS):
        spark.sql(statement.format(t=table)).collect()
        version = local_log.newest_version(folder)
        assert version is not None
        shutil.copytree(
            folder, ours, ignore=lambda _, names: [name for name in names if "heckpoint" in name], dirs_exist_ok=True
        )
        if number in (3, 6):
            assert checkpoint_writer.write(ours, version), statement
            log.checkpoint()
            assert content(ours, version) == content(folder, version), statement
    assert len(list((ours / "_delta_log").glob("*.checkpoint.parquet"))) == 2
    for commit in (ours / "_delta_log").glob("*.json"):
        if int(commit.name[:20]) < version:
            commit.unlink()
    read, expected = (spark.read.format("delta").load(str(each)).orderBy("id").collect() for each in (ours, folder))
    assert read == expected and len(expected) > 30


def test_a_writer_makes_checkpoints_without_a_job(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process writes one every tenth of Delta's interval. Delta reads them, and its own checkpoints are not overwritten."""
    monkeypatch.setattr(checkpoint_writer, "LEAST_INTERVAL", 20)
    monkeypatch.setattr(direct_log, "LISTING_SECONDS", 600)  # a short log, however slow the machine
    table = tables.TableRef.at(str(tmp_path / "table"))
    delta.create(spark, table, columns="n BIGINT")
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '30')").collect()
    writer = Writer.claim(spark, table)
    before = writer.version
    spark.sparkContext.setJobGroup(str(tmp_path), "appends")
    while writer.version < 29:
        writer.append_arrow(pa.table({"n": [writer.version]}), to=writer.version)
    assert not sessions.jobs(spark, str(tmp_path))
    logs = tmp_path / "table" / "_delta_log"
    made = [int(each.name[:20]) for each in sorted(logs.glob("*.checkpoint.parquet"))]
    assert made == [3 * each for each in range(1, 10)] and checkpoint.noted(logs) == 27
    log = direct_log.of(spark, table)
    assert log is not None
    assert begins_at(log) == 27
    writer.append_arrow(pa.table({"n": [writer.version]}), to=writer.version)
    assert begins_at(log) == 30
    by_delta = pq.ParquetFile(logs / checkpoint.name(30)).metadata
    assert "parquet-mr" in by_delta.created_by
    assert sorted(row[0] for row in spark.table(str(table)).collect()) == list(range(before, 30))
    writer.release()
    assert log.checkpoint() and begins_at(log) == 31


def begins_at(log: direct_log.DirectLog) -> int:
    """The checkpoint from which Delta reads the newest version: files that it cleans up before it must not be needed any more."""
    return int(log._log.unsafeVolatileSnapshot().logSegment().checkpointProvider().version())
