"""The runs of verify and of expectations that the page reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.gold import expectations
from pipelines.page import audits, page
from pipelines.verify import run as verify
from tests.harness import damaged_files
from tests.harness.captures import pipeline


def test_the_newest_run_of_each_collection_and_layer_is_read(spark: Any, lakehouse: Path) -> None:
    """This holds for any number of later runs of other collections."""
    settings = pipeline("mongodb://127.0.0.1", lakehouse, "shop")
    row = dict.fromkeys(verify.SCHEMA.names) | {"name": settings.name, "is_equal": True}
    runs = [("shop.orders", "silver"), ("shop.orders", "gold"), *[("shop.people", "gold")] * (10 * page.SHOWN)]
    rows = [row | {"collection": name, "layer": layer, "at_ms": n} for n, (name, layer) in enumerate(runs)]
    table = delta.layout(settings.lakehouse).ops("verifications")
    ops_tables.note(spark, table, rows, verify.SCHEMA)
    unused: Any = None
    found = page._PageReader(spark, settings, unused).verifications()
    assert len(found) == page.SHOWN + 2
    assert [(each["collection"], each["layer"]) for each in found[-2:]] == runs[1::-1]


def test_expectations_of_another_pipeline_are_not_this_ones(spark: Any, lakehouse: Path) -> None:
    """Pipelines may share a lakehouse. Results of an earlier version do not name their pipeline, and are shown for each."""
    settings = pipeline("mongodb://127.0.0.1", lakehouse, "shop")
    table = delta.layout(settings.lakehouse).ops("expectations")
    row = {"run": "r", "at_ms": 1, "is_met": True, "is_published": True, "expectation": "expect_x", "columns": ["a"]}
    row |= {"severity": "critical", "judged": "whole"}
    earlier = pa.schema([each for each in expectations.SCHEMA if each.name != "name"])
    ops_tables.note(spark, table, [row | {"table": "old"}], earlier)
    assert [each.table for each in audits.read(spark, settings)] == ["old"]
    rows = [row | {"table": "own", "name": settings.name}, row | {"table": "strange", "name": "other"}]
    ops_tables.note(spark, table, rows, expectations.SCHEMA)
    assert [each.table for each in audits.read(spark, settings)] == ["old", "own"]


def test_of_the_runs_that_are_not_shown_no_result_is_read(spark: Any, lakehouse: Path) -> None:
    """A table that is validated with each change has a million results in a month, kilobytes each: reading them would take minutes."""
    settings = pipeline("mongodb://127.0.0.1", lakehouse, "shop")
    table = delta.layout(settings.lakehouse).ops("expectations")
    row = {"table": "own", "is_published": True, "expectation": "expect_x", "columns": ["a"], "severity": "critical"}
    row |= {"judged": "whole", "name": settings.name, "result": "{}"}
    ops_tables.note(spark, table, [row | {"run": "0", "at_ms": 0, "is_met": False}], expectations.SCHEMA)
    (old,) = Path(table.path or "").glob("*.parquet")
    rows = [row | {"run": str(at), "at_ms": at, "is_met": at != 3} for at in range(1, audits.RUNS + 1)]
    ops_tables.note(spark, table, rows, expectations.SCHEMA)
    damaged_files.damage(old, lambda _, column: column in ("result", "is_met"))
    (found,) = audits.read(spark, settings)
    assert found.at_ms == audits.RUNS
    assert [verdict.past for verdict in found.verdicts] == [(True, True, False, *[True] * (audits.RUNS - 3))]
