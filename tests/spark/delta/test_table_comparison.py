"""The comparison of a table with the rebuilt one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.delta import table_comparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_second_row_of_a_document_is_a_difference(spark: SparkSession) -> None:
    """A dry run would call a table with doubled rows equal; but no document is lost with such a row, so it does not stop the swap."""
    columns = "__key STRING, v INT"
    live = spark.createDataFrame([("1", 1), ("1", 1), ("2", 2), ("2", 3), ("3", 3)], columns).coalesce(1)
    rebuilt = spark.createDataFrame([("1", 1), ("2", 2), ("4", 4)], columns).coalesce(1)
    found = table_comparison.compared(live, rebuilt)
    assert (found.rows, found.rebuilt_rows, found.gone, found.new, found.differing) == (5, 3, 3, 1, 0)
    assert (found.lost, found.lost_keys) == (1, ("3",))


def test_columns_in_another_order_are_no_difference(spark: SparkSession) -> None:
    """A column comes with its first document, which may have been replaced or deleted before a rebuild."""
    live = spark.createDataFrame([("1", 1, "a")], "__key STRING, v INT, w STRING").coalesce(1)
    found = table_comparison.compared(live, live.select("__key", "w", "v"))
    assert (found.rows, found.differing, found.differences) == (1, 0, ())


def test_a_row_without_a_key_is_lost_like_another(spark: SparkSession) -> None:
    """Only another program writes one: a rebuild removes it, and then says which rows are gone."""
    columns = "__key STRING, v INT"
    live = spark.createDataFrame([("1", 1), (None, 2), (None, 3)], columns).coalesce(1)
    found = table_comparison.compared(live, live.where("__key IS NOT NULL"))
    assert (found.rows, found.rebuilt_rows, found.gone, found.differing) == (3, 1, 2, 0)
    assert (found.lost, found.lost_keys) == (1, ("",))


def test_a_number_that_became_a_text_is_a_difference_of_its_column(spark: SparkSession) -> None:
    """A column whose values have two kinds becomes STRING: all documents differ, and the report says by which column."""
    live = spark.createDataFrame([("1", 5, 1), ("2", None, 2), ("3", 7, 3)], "__key STRING, v INT, w INT").coalesce(1)
    rebuilt = live.selectExpr("__key", "CAST(v AS STRING) AS v", "if(w = 2, 0, w) AS w")
    found = table_comparison.compared(live, rebuilt)
    assert (found.differing, found.lost) == (3, 0)
    assert [(each.column, each.documents, each.why, each.keys) for each in found.differences] == [
        ("v", 2, "type int → string", ("1", "3")),
        ("w", 1, "the value", ("2",)),
    ]
