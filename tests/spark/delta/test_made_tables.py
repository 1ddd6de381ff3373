from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import current
from pipelines.silver import tables as silver_tables
from tests.harness import made_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_table_that_tests_copy_is_as_delta_makes_it(spark: SparkSession, tmp_path: Path) -> None:
    """Tables that tests copy equal those of production, and each has its own ID."""
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


def test_a_table_of_other_columns_is_as_delta_makes_it(spark: SparkSession, tmp_path: Path) -> None:
    """A gold table has its own columns and its own choice of columns with statistics; everything else is copied from another table."""
    columns = '`_id` INT, `ü."x` STRUCT<`a.b`: ARRAY<DECIMAL(10,2)>>, `__key` STRING, m MAP<STRING, TIMESTAMP>'
    given = {"columns": columns, "properties": current.PROPERTIES | {current.STATISTICS: "`_id`,`__key`"}}
    first = {"columns": "`_id` STRING", "properties": current.PROPERTIES | {current.STATISTICS: "`_id`"}}
    told = []
    for make, name, definition_ in (
        (delta.create, "first", first),
        (delta.create, "copied", given),
        (made_tables.by_statement, "stated", given),
    ):
        table = tables.TableRef.at(str(tmp_path / name))
        assert make(spark, table, **definition_)
        Writer.claim(spark, table).release()
        assert spark.table(str(table)).where("`_id` = '1'").count() == 0
        told.append(_said(tmp_path / name, table))
    assert not (tmp_path / "copied" / "_delta_log" / "_staged_commits").exists(), "Delta made it"
    assert told[1] == told[2] != told[0]


def _said(folder: Path, table: tables.TableRef) -> list[dict[str, Any]]:
    """A table's first commit, without the properties that depend on its name."""
    lines = (folder / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    _, metadata, protocol = sorted(map(json.loads, lines), key=str)
    own = definition.checkpoints(table, current.PROPERTIES)
    held = metadata["metaData"]
    assert {each: held["configuration"].pop(each) for each in own} == own
    return [{name: held[name] for name in held if name not in ("id", "createdTime")}, protocol]
