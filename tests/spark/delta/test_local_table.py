"""Rows of a table that are read without Spark are those that Spark reads; otherwise the table is left to Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import data_file, live_files, local_log
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("name", pa.string()), ("n", pa.int64()), ("later", pa.string())])


def made(
    spark: SparkSession, folder: Path, *, clauses: str = "", properties: str = "'delta.enableDeletionVectors' = 'false'"
) -> str:
    table = f"delta.`{folder}`"
    spark.sql(f"CREATE TABLE {table} (name STRING, n BIGINT) USING DELTA {clauses} TBLPROPERTIES ({properties})")
    return table


def inserted(spark: SparkSession, table: str, count: int) -> None:
    rows = ", ".join(f"('é{number}', {number}), (NULL, {number})" for number in range(count))
    spark.sql(f"INSERT INTO {table} VALUES {rows}")


def test_rows_are_those_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    """Rows are read from commits only, from a checkpoint and later commits, and after files were removed."""
    table = made(
        spark, tmp_path / "a b", properties="'delta.enableDeletionVectors' = 'false', 'delta.checkpointInterval' = '3'"
    )
    assert local_log.rows(tmp_path / "a b", SCHEMA) == SCHEMA.empty_table()
    for statement in (
        "",
        f"DELETE FROM {table} WHERE n = 1",
        f"OPTIMIZE {table}",
        f"ALTER TABLE {table} ADD COLUMNS (later STRING)",
    ):
        if statement:
            spark.sql(statement).collect()
        inserted(spark, f"{table} (name, n)", 2)
        read = local_log.rows(tmp_path / "a b", SCHEMA)
        assert read is not None
        wanted = [(row.name, row.n) for row in spark.sql(f"SELECT name, n FROM {table}").collect()]
        assert sorted(map(repr, zip(read["name"].to_pylist(), read["n"].to_pylist()))) == sorted(map(repr, wanted))
        assert read["later"].null_count == len(read) == len(wanted) > 2
    assert list((tmp_path / "a b" / "_delta_log").glob("*.checkpoint.parquet"))


@pytest.mark.parametrize(
    ("clauses", "properties"),
    [
        ("", "'delta.enableDeletionVectors' = 'true'"),
        ("PARTITIONED BY (n)", "'delta.enableDeletionVectors' = 'false'"),
        ("", "'delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'false'"),
    ],
    ids=["deletion vectors", "partitions", "column mapping"],
)
def test_what_only_delta_can_tell_is_left_to_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clauses: str, properties: str
) -> None:
    """Rows are left to Delta, and data files and their deletion vectors are those that Delta names."""
    table = made(spark, tmp_path / "t", clauses=clauses, properties=properties)
    spark.sql(f"INSERT INTO {table} SELECT 'x', id % 2 FROM range(10)")
    spark.sql(f"DELETE FROM {table} WHERE name = 'x' AND n = 1")
    assert local_log.rows(tmp_path / "t", SCHEMA) is None

    def files() -> list[data_file.DataFile]:
        """In one order: Delta gives them in another one."""
        return sorted(delta.data_files(spark, tables.TableRef.at(str(tmp_path / "t"))) or (), key=lambda file: file.name)

    files_here = files()
    monkeypatch.setattr(live_files.LiveFiles, "move_to", lambda *_: False)
    assert files_here and files_here == files()


def test_a_log_that_was_cut_is_left_to_delta(spark: SparkSession, tmp_path: Path) -> None:
    table = made(spark, tmp_path / "t")
    inserted(spark, table, 1)
    (tmp_path / "t" / "_delta_log" / f"{0:020}.json").unlink()
    assert local_log.rows(tmp_path / "t", SCHEMA) is None


def test_a_compacted_file_stands_for_those_that_it_replaced(tmp_path: Path) -> None:
    """The log is written directly, because Delta chooses by size which files it compacts."""
    log = tmp_path / "_delta_log"
    log.mkdir()

    def commit(version: int, operation: str, *, added: str, removed: str = "") -> None:
        metadata = json.dumps({"writer": "w", "to": version, "batch": version})
        actions = [{"commitInfo": {"operation": operation, "userMetadata": metadata}}]
        actions += [{"remove": {"path": name}} for name in removed] + [{"add": {"path": added, "stats": "{}"}}]
        (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")

    for version, name in enumerate("abc"):
        commit(version, "WRITE", added=name)
    commit(3, "OPTIMIZE", added="bc", removed="bc")
    commit(4, "WRITE", added="d")
    found = local_log.appended(tmp_path, lambda commit: commit.version <= 0)
    assert found is not None
    assert [file.path.name for file in found] == ["d", "bc"]
