"""A lakehouse of the first version goes on, through Spark's steps; `tests/unit/bronze/test_earlier_versions.py` is about later versions."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.bronze import registry
from pipelines.delta import ops_tables
from tests.harness import bronze_rows
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAKEHOUSE = Path(__file__).parents[1] / "cases" / "first_version.tar.xz"
"""What the first commit, of 21 November 2026, made of a snapshot of five collections of the database `v21`, all 82 rows in seven batches.

Positions name no bronze, `ops/collections` no pipeline, `ops/schemas` no generations, and there is no table of histories.
"""

LATER = 0x6B0BDC00
"""A second after the snapshot's."""


def test_a_lakehouse_of_the_first_version_goes_on(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the new batch is applied, the tables of facts get their columns, and the history starts at bronze's first batch."""
    with tarfile.open(LAKEHOUSE) as archive:
        archive.extractall(lakehouse, filter="data")
    monkeypatch.setattr(bronze_rows, "DB", "v21")
    collections = {
        "orders": {"history": True, "schema": {"total": "decimal(18,2)"}},
        "events": {"delete.tombstone.handling.mode": "rewrite", "keep.document": True, "flatten.struct": True},
    }
    hop = Hop(spark, pipeline(lakehouse, collections, name="shop", **{"add.fields": "op,source.ts_ms"}), log="one")
    hop.bronze.batch, hop.bronze.offset = 7, 82
    before = {name: {row["_id"]: row for row in hop.documents(name)} for name in ("orders", "events", "odd")}
    hop.bronze.append(
        {
            "orders": [document(1, LATER, n=2**40), {"op": "d", "key": 2, "at": LATER}, document(100, LATER, "c", n=7)],
            "events": [{"op": "d", "key": 3, "at": LATER}],
            "gone": [{"drop": LATER}],
            "new": [document(1, LATER, "c", v=1)],
        }
    )
    hop.run()
    orders, events, odd = ({row["_id"]: row for row in hop.documents(name)} for name in before)
    assert orders.keys() == before["orders"].keys() - {2} | {100}
    assert (orders[1]["n"], orders[100]["n"]) == (2**40, 7)
    assert events == {key: row for key, row in before["events"].items() if key != 3}
    assert odd == before["odd"]
    assert (hop.documents("gone"), [row["v"] for row in hop.documents("new")]) == ([], [1])
    position = registry.silver_position(spark, hop.silver_table("orders"))
    assert (position.to, position.log, position.floor) == (8, "one", "")
    history = f"SELECT count(*), count_if(valid_to IS NULL) FROM {hop.layout.history('v21', 'orders')}"
    assert tuple(spark.sql(history).collect()[0]) == (42, 40)
    facts = ops_tables.rows(spark, hop.layout.ops("collections"), registry.SCHEMA).to_pylist()
    assert {row["collection"] for row in facts if row["pipeline"] == "shop"} >= {"orders", "events", "odd", "new"}
    assert "generation" in spark.table(str(hop.layout.ops("schemas"))).columns
