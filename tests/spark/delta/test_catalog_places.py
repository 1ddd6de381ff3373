"""Tables of Spark's own catalog, whose logs this process reads and commits to itself."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import catalog_places, local_log, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from tests.harness import layers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE = tables.TableRef.named("spark_catalog", "places", "t")


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """The folder of the schema `places`."""
    spark.sql(f"CREATE SCHEMA places LOCATION 'file:{tmp_path}/a schema'")
    yield tmp_path / "a schema"
    spark.sql("DROP SCHEMA places CASCADE")


def statements(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that Spark gets from here on."""
    run: list[str] = []
    sql = type(spark).sql
    monkeypatch.setattr(type(spark), "sql", lambda self, query, *rest: run.append(query) or sql(self, query, *rest))
    return run


def test_its_commits_take_no_statement(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the log that the catalog's name leads to, and the table has all properties, deletion vectors among them."""
    delta.create(spark, TABLE, columns="__key STRING, v INT", properties={"delta.enableDeletionVectors": "true"})
    run = statements(spark, monkeypatch)
    writer = Writer.claim(spark, TABLE)
    rows = pa.table({"__key": ["a", "b"], "v": pa.array([1, 2], pa.int32())})
    writer.append_arrow(rows, to=1)
    assert writer.replace_arrow([rows.slice(1)], schema=rows.schema, keys=["a"], to=2) is not None
    newest = table_history.commits(spark, TABLE, limit=3)
    assert [commit.metadata and commit.metadata["to"] for commit in newest] == [2, 1, None]
    assert run == [] and writer.is_direct
    assert sorted(row.v for row in spark.table(str(TABLE)).collect()) == [2, 2]
    assert spark.sql(f"DESCRIBE HISTORY {TABLE} LIMIT 1").collect()[0].version == writer.version
    assert local_log.folder(TABLE) == folder / "t"


def test_a_table_that_was_dropped_is_asked_for_again(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    """A table in the same place, or in another one, is a new table: the writer of the old one commits nothing to it."""
    delta.create(spark, TABLE, columns="v INT")
    writer = Writer.claim(spark, TABLE)
    rows = pa.table({"v": pa.array([1], pa.int32())})
    writer.append_arrow(rows, to=1)
    shutil.copytree(folder / "t", tmp_path / "elsewhere")
    spark.sql("DROP TABLE places.t")
    assert not delta.exists(spark, TABLE)
    delta.create(spark, TABLE, columns="v INT")
    with pytest.raises((errors.OwnershipLost, errors.CommitConflict)):
        writer.append_arrow(rows, to=2)
    assert spark.table(str(TABLE)).count() == 0
    spark.sql("DROP TABLE places.t")
    spark.sql(f"CREATE TABLE places.t USING DELTA LOCATION 'file:{tmp_path}/elsewhere'")
    assert delta.exists(spark, TABLE) and local_log.folder(TABLE) == tmp_path / "elsewhere"
    assert Writer.claim(spark, TABLE, take_over=True).metadata["to"] == 1


def test_what_is_no_table_of_delta_has_no_place(spark: SparkSession, folder: Path) -> None:
    """A missing table has the place where it would be created."""
    spark.sql("CREATE TABLE places.other USING PARQUET AS SELECT 1 AS v")
    spark.sql("CREATE VIEW places.view AS SELECT 1 AS v")
    for name in ("other", "view"):
        table = tables.TableRef.named("spark_catalog", "places", name)
        assert not delta.exists(spark, table) and catalog_places.locate(spark, table) is None
    assert not delta.exists(spark, TABLE) and catalog_places.locate(spark, TABLE) == f"file:{folder}/t"
    assert catalog_places.locate(spark, tables.TableRef.named("spark_catalog", "no such", "t")) is None


def test_catalogs_that_take_part_in_commits_are_left_to_them(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unity Catalog may have the name of Spark's own."""
    assert catalog_places.is_open(spark, TABLE)
    assert not catalog_places.is_open(spark, tables.TableRef.named("main", "places", "t"))
    unity = SimpleNamespace(
        _jsparkSession=None, conf={"spark.sql.catalog.spark_catalog": "io.unitycatalog.spark.UCSingleCatalog"}
    )
    other: Any = unity
    assert not catalog_places.is_open(other, TABLE)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert not catalog_places.is_open(spark, TABLE)


def test_silver_and_gold_of_a_catalog(spark: SparkSession, tmp_path: Path) -> None:
    """Batches give the same rows as in folders, and take no MERGE."""
    chosen = layers.pipeline(tmp_path, {"orders": {}})
    lakehouse = dataclasses.replace(chosen.lakehouse, root=None, catalog="spark_catalog", schema_prefix="places_")
    schemas = [f"places_{layer}" for layer in ("bronze", "silver", "gold", "quarantine", "ops")]
    for schema in schemas:
        spark.sql(f"CREATE SCHEMA {schema} LOCATION 'file:{tmp_path}/{schema}'")
    try:
        hop = layers.Hop(spark, dataclasses.replace(chosen, lakehouse=lakehouse))
        for at in (10, 20):
            hop.bronze.append(
                {"orders": [layers.document(key, at + key, "c" if at == 10 else "u", v=at) for key in range(3)]}
            )
            hop.run()
        assert [(row["_id"], row["v"]) for row in hop.rows("orders")] == [(0, 20), (1, 20), (2, 20)]
        assert [(row["_id"], row["v"]) for row in hop.documents("orders")] == [(0, 20), (1, 20), (2, 20)]
        for table in (hop.silver_table("orders"), hop.gold_table("orders")):
            operations = {row.operation for row in spark.sql(f"DESCRIBE HISTORY {table}").collect()}
            assert operations == {"CREATE TABLE", "WRITE"}
    finally:
        for schema in schemas:
            spark.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
