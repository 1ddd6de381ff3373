from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.silver import tables as silver_tables
from tests.harness import made_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_table_that_tests_copy_is_as_delta_makes_it(spark: SparkSession, tmp_path: Path) -> None:
    """The tests' tables are those of production, each with an identity of its own."""
    assert delta.create is made_tables.create
    found = []
    for name in ("first", "second"):
        table = tables.TableRef.at(str(tmp_path / name))
        silver_tables.create(spark, table)
        Writer.claim(spark, table).release()
        assert spark.table(str(table)).where("`__key` = 'x'").count() == 0
        found.append(spark.sql(f"DESCRIBE DETAIL {table}").collect()[0].asDict())
        own = definition.checkpoints(table, silver_tables.PROPERTIES)
        assert {each: found[-1]["properties"].pop(each) for each in own} == own, "by its name"
    assert not (tmp_path / "second" / "_delta_log" / "_staged_commits").exists(), "Delta made it"
    assert found[0].pop("id") != found[1].pop("id")
    first, second = (
        {name: each[name] for name in each.keys() - {"location", "createdAt", "lastModified"}} for each in found
    )
    assert first == second
