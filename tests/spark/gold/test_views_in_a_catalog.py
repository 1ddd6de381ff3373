"""Models that are views, which exist only in a catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta
from tests.harness import gold_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = "SELECT count(*) AS n FROM {{ ref('cases.orders') }}"
VIEW = "{{ config(materialized='view') }} " + COUNT


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Iterator[gold_shop.Shop]:
    """A view of a catalog over a collection's gold table."""
    schemas = ("views_gold", "views_ops")
    for schema in schemas:
        spark.sql(f"CREATE SCHEMA {schema} LOCATION 'file:{tmp_path}/{schema}'")
    made = gold_shop.made(spark, tmp_path, {"number": VIEW})
    lakehouse = dataclasses.replace(made.settings.lakehouse, root=None, catalog="spark_catalog", schema_prefix="views_")
    made.settings = dataclasses.replace(made.settings, lakehouse=lakehouse)
    yield made
    for schema in schemas:
        spark.sql(f"DROP SCHEMA {schema} CASCADE")


def test_a_view_is_no_table(shop: gold_shop.Shop) -> None:
    """Each run replaces the view. A view may become a table; a table that became a view is reported, because it stays behind."""
    model = shop.folder / "number.sql"
    shop.change("orders", {"_id": 1})
    for _ in range(2):
        assert shop.run() == {"number": "view"}
    place = delta.layout(shop.settings.lakehouse).model("number")
    assert not delta.exists(shop.spark, place)
    with pytest.raises(errors.TableNotOurs, match="there is a table or view"):
        delta.create(shop.spark, tables.TableRef.named("views_gold", "number"), columns="n BIGINT")
    model.write_text(COUNT)
    assert shop.run() == {"number": "whole"} and delta.exists(shop.spark, place)
    model.write_text(VIEW)
    with pytest.raises(errors.SettingsError, match="its former table still exists"):
        shop.run()
