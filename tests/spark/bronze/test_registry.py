"""The list of known collections, where an earlier version wrote some of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc_core.settings import parse
from pipelines.bronze import registry
from pipelines.delta import maintenance, ops_tables
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EARLIER = pa.schema([("db", pa.string()), ("collection", pa.string()), ("batch", pa.int64())])


def test_what_is_noted_in_a_table_of_an_earlier_version_outlives_its_compaction(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of that version have no columns for the pipeline and for bronze's log. Without these columns gold would find no collection
    after a compaction.
    """
    source = {"mongodb.connection.string": "mongodb://localhost"}
    settings = parse.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source})
    table = delta.layout(settings.lakehouse).ops("collections")
    ops_tables.note(spark, table, [{"db": "shop", "collection": "orders", "batch": 3}], EARLIER)

    registry.note(spark, settings, new=[registry.Namespace("shop", "orders")], discovered=7, log="a")
    maintenance.optimize(spark, table)

    assert registry.read(spark, settings, log="a") == registry.KnownCollections(7, (registry.Namespace("shop", "orders"),))
