"""Models that are views, which exist only in a catalog."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta
from pipelines.gold import model_table, models
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
    """A view may become a table; a table that became a view is reported, because it stays behind."""
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


def test_a_service_leaves_a_view_as_it_is(shop: gold_shop.Shop) -> None:
    """Until its query, a type or the catalog's entry changes: a catalog notes each time that the view is another one."""
    shop.change("orders", {"_id": 1})
    judged: dict[str, models.ModelVerdict] = {}

    def made_at(text: str = VIEW) -> str:
        (shop.folder / "number.sql").write_text(text)
        assert shop.run(judged=judged) == {"number": "view"}
        described = shop.spark.sql("DESCRIBE TABLE EXTENDED views_gold.number").collect()
        (made,) = [row.data_type for row in described if row.col_name == "Created Time"]
        time.sleep(1.1)  # the time is in seconds
        return str(made)

    first = made_at()
    shop.change("orders", {"_id": 2})
    assert made_at() == first and shop.spark.table("views_gold.number").collect()[0].n == 2
    second = made_at(VIEW.replace("AS n", "AS m"))
    assert second != first and made_at(VIEW.replace("AS n", "AS m")) == second
    shop.spark.sql("ALTER VIEW views_gold.number AS SELECT 7L AS m")
    third = made_at(VIEW.replace("AS n", "AS m"))
    assert third != second and shop.spark.table("views_gold.number").collect()[0].m == 2
    shop.spark.sql("DROP VIEW views_gold.number")
    assert made_at(VIEW.replace("AS n", "AS m")) != third


def test_a_view_of_somebody_else_stays(shop: gold_shop.Shop) -> None:
    """No model replaces or drops one that was made by hand or by another pipeline, and a table of others is no former table of a model."""
    shop.change("orders", {"_id": 1})
    shop.spark.sql("CREATE VIEW views_gold.number AS SELECT 7L AS n")
    for text in (VIEW, COUNT):
        (shop.folder / "number.sql").write_text(text)
        for act in (shop.run, lambda: models.check(shop.spark, shop.settings)):
            with pytest.raises(errors.TableNotOurs, match=r"views_gold\.number: .* that no model of the pipeline hand made"):
                act()
    assert shop.spark.table("views_gold.number").collect()[0].n == 7
    shop.spark.sql("DROP VIEW views_gold.number")
    (shop.folder / "number.sql").write_text(VIEW.replace("SELECT", "-- how many\nSELECT /* all */") + " -- of them")
    assert shop.run() == {"number": "view"}
    # As an earlier version made it. The catalog has it without the comments around it.
    shop.spark.sql(f"ALTER VIEW views_gold.number UNSET TBLPROPERTIES ('{model_table.view_owner('hand')}')")
    for _ in range(2):
        assert models.check(shop.spark, shop.settings)[0].would == "be a view"
        assert shop.run() == {"number": "view"}
    shop.settings = dataclasses.replace(shop.settings, name="second")
    with pytest.raises(errors.TableNotOurs, match="that no model of the pipeline second made"):
        shop.run()
    shop.spark.sql("DROP VIEW views_gold.number")
    shop.spark.sql("CREATE TABLE views_gold.number (n BIGINT) USING DELTA")
    with pytest.raises(errors.TableNotOurs, match="that mongo-medallion did not create"):
        shop.run()
