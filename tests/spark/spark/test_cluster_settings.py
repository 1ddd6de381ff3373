"""Settings that a cluster has for other work change nothing in the tables."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from cdc_core import errors
from cdc_core.silver import reduce
from cdc_core.sql.names import literal
from cdc_core.tables import layout as tables
from pipelines.delta import direct_log, maintenance, ops_tables, table_errors
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import model_changes
from pipelines.spark import session as sparks
from tests.harness import made_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SET = {
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
    "spark.sql.parser.quotedRegexColumnNames": "true",
    "spark.sql.parser.escapedStringLiterals": "true",
    "spark.sql.ansi.enforceReservedKeywords": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "true",
    "spark.sql.groupByOrdinal": "false",
    "spark.sql.files.ignoreMissingFiles": "true",
    "spark.sql.runSQLOnFiles": "false",
    "spark.sql.defaultCatalog": "another",
    "spark.sql.retainGroupColumns": "false",
    "spark.databricks.delta.stalenessLimit": "1h",
    "spark.databricks.delta.replaceWhere.dataColumns.enabled": "false",
    "spark.databricks.delta.vacuum.lite.enabled": "true",
    "spark.databricks.delta.write.txnAppId": "nightly",
    "spark.databricks.delta.write.txnVersion": "7",
    "spark.databricks.delta.commitInfo.userMetadata": '{"writer": "nightly", "to": 99}',
    "spark.databricks.delta.properties.defaults.columnMapping.mode": "name",
    "spark.databricks.delta.properties.defaults.appendOnly": "true",
    "spark.databricks.delta.properties.defaults.enableIcebergCompatV2": "true",
    "spark.databricks.delta.properties.defaults.universalFormat.enabledFormats": "iceberg",
    "spark.databricks.delta.properties.defaults.compatibility.symlinkFormatManifest.enabled": "true",
}
SCHEMA = pa.schema([("n", pa.int64()), ("offset", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
LONG_AGO = datetime.datetime(1500, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def cluster(spark: SparkSession) -> Iterator[SparkSession]:
    """A cluster's session with other settings, as this project takes it over."""
    own = spark.newSession()
    for name, value in SET.items():
        own.conf.set(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparks, "_active", lambda: own)
        patch.setattr(sparks, "_CHOSEN", {})
        sparks.session("a job", root="/lakehouse")
    yield own


@pytest.fixture
def writer(cluster: SparkSession, tmp_path: Path) -> Writer:
    table = tables.TableRef.at(str(tmp_path / "t"))
    columns = "n BIGINT, `offset` BIGINT, at TIMESTAMP"
    made_tables.by_statement(cluster, table, columns=columns, properties={"delta.enableDeletionVectors": "true"})
    return Writer.claim(cluster, table)


def test_rows_are_what_was_written_whoever_writes_and_reads_them(writer: Writer, tmp_path: Path) -> None:
    """Spark and this process write columns of the same names and types, and times before 1582 are equal in both."""
    one = {"n": 1, "offset": 1, "at": LONG_AGO}
    writer.append_arrow(pa.Table.from_pylist([one], schema=SCHEMA), to=1, statistics=("n", "offset"))
    writer.append(writer.spark.sql("SELECT 2L AS n, 2L AS `offset`, timestamp '1500-01-01' AS at"), to=2)
    found = writer.spark.table(str(writer.table)).where("`offset` < 3").orderBy("n")
    assert [(row.n, row.at) for row in found.selectExpr("n", "string(at) AS at").collect()] == [
        (1, "1500-01-01 00:00:00"),
        (2, "1500-01-01 00:00:00"),
    ]
    for file in tmp_path.glob("t/*.parquet"):
        assert pq.read_table(file).to_pylist()[0]["at"] == LONG_AGO
    writer.remove("n = 1", to=3)
    assert [row.n for row in found.collect()] == [2]


def test_a_file_that_is_missing_is_no_file_without_rows(writer: Writer, tmp_path: Path) -> None:
    """Otherwise its events would be skipped, and the position would move past them."""
    writer.append(writer.spark.sql("SELECT 1L AS n, 1L AS `offset`, timestamp '2020-01-01' AS at"), to=1)
    for file in tmp_path.glob("t/*.parquet"):
        file.unlink()
    with pytest.raises(errors.FilesMissing), table_errors.translating(writer.table):
        writer.spark.table(str(writer.table)).collect()


def test_what_another_process_commits_is_read_at_once(writer: Writer, tmp_path: Path) -> None:
    """Silver reads the rows of a batch that the table's history names; from a stale version it would read none, and its position would
    move past them.
    """
    assert not writer.spark.table(str(writer.table)).collect()
    row = {"n": 1, "offset": 1, "at": LONG_AGO}
    write_deltalake(tmp_path / "t", pa.Table.from_pylist([row], schema=SCHEMA), mode="append")
    assert [each.n for each in writer.spark.table(str(writer.table)).collect()] == [1]


def test_a_literal_is_its_text(cluster: SparkSession) -> None:
    """Keys are JSON with quotes and `$`: a MERGE that compares with another text would insert the document twice."""
    text = '{"$oid": "a\\b\'c"}'
    assert cluster.sql(f"SELECT {literal(text)} AS text").first()["text"] == text


def test_what_changed_between_two_versions_is_found(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would make every change recompute each model completely, without any message."""
    monkeypatch.setattr(model_changes, "_seen", lambda *_: None)  # as for a table whose files this process does not see
    before, after = (
        writer.append(writer.spark.sql(f"SELECT {n}L AS n, {n}L AS `offset`, timestamp '2020-01-01' AS at"), to=n)
        for n in (1, 2)
    )
    changed = model_changes.changed_keys(writer.spark, writer.table, before, after, ("n",))
    assert [tuple(row) for row in changed.rows.collect()] == [(2,)]


def test_each_fact_that_is_noted_is_kept(cluster: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered deletes are facts: without them a late event would restore a deleted document."""
    monkeypatch.setattr(direct_log, "of", lambda *_: None)
    facts = tables.TableRef.at(str(tmp_path / "facts"))
    delta.create(cluster, facts, columns="n BIGINT")
    for n in range(2):
        ops_tables.append_rows(cluster, facts, pa.table({"n": [n]}))
    assert sorted(row.n for row in cluster.table(str(facts)).collect()) == [0, 1]


def test_events_of_a_key_are_told_by_their_key(cluster: SparkSession) -> None:
    events = cluster.sql("SELECT 'k' AS key, '1' AS sequence, 1L AS offset, 'c' AS op, '{}' AS after")
    assert [row.key for row in reduce.latest(events).collect()] == ["k"]


def test_vacuum_takes_the_files_of_killed_commits(writer: Writer, tmp_path: Path) -> None:
    """No commit names these files, and only maintenance removes them."""
    orphan = tmp_path / "t" / "part-00000-killed.parquet"
    orphan.write_bytes(b"rows")
    os.utime(orphan, (0, 0))
    maintenance.vacuum(writer.spark, writer.table)
    assert not orphan.exists()
