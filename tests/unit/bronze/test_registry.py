"""The record of captured collections, for readers that ask every second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_core.settings import parse as settings
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import local_log
from tests.harness import without_spark

NO_SPARK: Any = None


def _noted(folder: Path, version: int, collection: str) -> None:
    """Records a collection of the database shop, as a file and the commit that adds it."""
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    row = {"db": "shop", "collection": collection, "batch": version, "pipeline": "hand", "log": "l"}
    pq.write_table(pa.Table.from_pylist([row], schema=registry.SCHEMA), folder / f"{version}.parquet")
    metadata = {"configuration": {definition.FORMAT_PROPERTY: definition.FORMAT}, "partitionColumns": []}
    actions = [
        {"commitInfo": {"timestamp": version, "operation": "WRITE"}},
        *([{"metaData": metadata}] if version == 0 else []),
        {"add": {"path": f"{version}.parquet"}},
    ]
    (folder / "_delta_log" / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def test_the_noted_rows_are_read_once_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record may be a file, and a service asks every second: after a year it would read thousands of files each time."""
    chosen = settings.parse(
        {
            "name": "hand",
            "lakehouse": {"root": str(tmp_path)},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
        }
    )
    reads: list[Path] = []
    rows = local_log.rows
    monkeypatch.setattr(local_log, "rows", lambda folder, schema: reads.append(folder) or rows(folder, schema))

    def names() -> list[str]:
        return [each.collection for each in registry.read(NO_SPARK, chosen).namespaces]

    folder = tmp_path / "ops" / "collections"
    _noted(folder, 0, "orders")
    assert [names(), names(), names()] == [["orders"]] * 3
    _noted(folder, 1, "customers")
    assert [names(), names()] == [["customers", "orders"]] * 2
    assert reads == [folder, folder]


def test_a_silver_table_without_rows_needs_no_query(tmp_path: Path) -> None:
    """Gold looks at tables that silver is making: with many new collections it would wait for a query over each."""
    table = tables.TableRef.at(str(tmp_path / "orders"))
    (tmp_path / "orders" / "_delta_log").mkdir(parents=True)
    configuration = {definition.FORMAT_PROPERTY: definition.FORMAT, registry.GENERATION: "g"}
    without_spark.write(tmp_path / "orders", 0, [{"metaData": {"configuration": configuration, "partitionColumns": []}}])
    assert registry.silver_position(without_spark.SPARK, table) == registry.SilverPosition(generation="g", version=0)
