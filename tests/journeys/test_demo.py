"""The demo, and what reads its tables: the queries that it shows, the status, the notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core.tables import layout as tables
from pipelines.demo import run as demo
from pipelines.demo import shop
from pipelines.demo import tables as demo_report
from pipelines.operations import status
from pipelines.settings import file as settings_file
from tests.harness import notebooks

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def folder(
    spark: SparkSession,
    mongo: MongoClient[dict[str, Any]],
    mongodb_uri: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """The folder of a demo that has run once."""
    path = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONGODB_URI", mongodb_uri)
        demo.run(path, mongodb_uri=mongodb_uri, seconds=6, stop=threading.Event())
        yield path
    for name in (shop.DATABASE, shop.DIARY[0]):
        mongo.drop_database(name)


def test_every_document_of_the_shop_is_a_gold_row(
    folder: Path, spark: SparkSession, mongo: MongoClient[dict[str, Any]]
) -> None:
    """After the demo, gold has as many rows as MongoDB has documents, in every collection."""
    documents = {name: mongo[shop.DATABASE][name].count_documents({}) for name in shop.COLLECTIONS}
    rows = {name: spark.table(f"delta.`{folder}/lakehouse/gold/shop/{name}`").count() for name in shop.COLLECTIONS}
    assert rows == documents and min(rows.values()) > 0


def test_status_says_that_nothing_waits(folder: Path, spark: SparkSession) -> None:
    """After the demo every collection is applied, every snapshot is done, and every writer has left."""
    found = status.read(spark, settings_file.load(folder / "shop.yml"))
    assert found.source.problem is None and found.bronze is not None
    assert [each.collection for each in found.collections] == sorted(f"shop.{name}" for name in shop.COLLECTIONS)
    for each in found.collections:
        assert each.snapshot is not None and each.snapshot.is_done
        for layer in (each.silver, each.gold):
            assert layer is not None and (layer.lag_events, layer.lag_seconds) == (0, 0)
            assert layer.writer is not None and layer.writer.has_left
        assert each.silver is not None and each.gold is not None and each.silver.rows == each.gold.rows
    assert json.loads(status.to_json(found))["bronze"]["events"] == found.bronze.events


@pytest.mark.parametrize("reader", ("Polars", "DuckDB"))
def test_the_queries_that_are_shown_work_when_pasted(folder: Path, reader: str) -> None:
    """Each query without Spark prints the orders by status."""
    line = demo_report.queries(tables.TableRef.at(str(folder / "lakehouse" / "gold" / "shop" / "orders")))[reader]
    shown = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "new" in shown.stdout and "status" in shown.stdout


def test_the_spark_query_that_is_shown_works(
    folder: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The query with Spark prints the same table, also if it runs in the folder above the demo's."""
    monkeypatch.chdir(folder.parent)
    exec(demo_report.queries(tables.TableRef.at(str(folder / "lakehouse" / "gold" / "shop" / "orders")))["Spark SQL"], {})
    assert "status" in capsys.readouterr().out


SHOWN = {"analyst_tour.ipynb": "ask us", "quality.ipynb": "expect_"}
"""A text in the tables that each notebook prints."""


@pytest.mark.parametrize("path", notebooks.PATHS, ids=lambda path: path.name)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every code cell runs in order, and tables are printed; the file contains no output of an earlier run."""
    monkeypatch.setenv("MEDALLION_LAKEHOUSE", str(folder / "lakehouse"))
    assert all(cell["outputs"] == [] for cell in notebooks.run(path))
    shown = capsys.readouterr().out
    assert shown.count("+--") >= 5 and SHOWN[path.name] in shown


def test_played_again_the_shop_goes_on(
    folder: Path, spark: SparkSession, mongo: MongoClient[dict[str, Any]], mongodb_uri: str
) -> None:
    """A second run of the demo in the same folder continues the shop and the tables, and takes no second snapshot."""
    before = mongo[shop.DIARY[0]][shop.DIARY[1]].find_one({"_id": shop.DATABASE})
    snapshot = f"SELECT count(*) AS n FROM delta.`{folder}/lakehouse/bronze/shop` WHERE kind = 'snapshot'"
    read_then = spark.sql(snapshot).collect()[0].n
    demo.run(folder, mongodb_uri=mongodb_uri, seconds=3, stop=threading.Event())
    after = mongo[shop.DIARY[0]][shop.DIARY[1]].find_one({"_id": shop.DATABASE})
    assert before is not None and after is not None and after["step"] > before["step"]
    assert spark.sql(snapshot).collect()[0].n == read_then
