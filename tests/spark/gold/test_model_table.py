"""What an incremental model reads of its tables: the rows of some keys."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core.models import sql_model
from pipelines.gold import current, model_table
from pipelines.gold.candidate import no_audit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS: dict[str, tuple[str, list[tuple[object, ...]], int]] = {
    "texts": ("text", [("k'0001",), ("k'0002",), ("k'0025",)], 2),
    "numbers": ("number", [(1,), (25,)], 2),
    "null": ("number", [(None,)], 1),
    "null and a number": ("number", [(None,), (1,)], 2),
    "several columns": ("number, text", [(1, "k'0001"), (25, "k'0025"), (1, "k'0025")], 2),
    "many": ("text", [(f"k'00{number}",) for number in range(21, 27)], 1),
    "many numbers": ("number", [(number,) for number in range(21, 27)], 2),
    "days": ("day", [(date(1970, 1, 2),)], 3),
}
"""Columns, keys, and how many files are read of three. Each has ten rows; the second has a null instead of the number 13."""


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of three files."""
    path = str(tmp_path_factory.mktemp("rows"))
    spark.range(0, 30, 1, 3).selectExpr(
        "id", "nullif(id, 13) AS number", "concat(\"k'\", lpad(id, 4, '0')) AS text", "date_from_unix_date(id) AS day"
    ).write.format("delta").save(path)
    return f"delta.`{path}`"


@pytest.mark.parametrize("named", KEYS)
def test_only_files_that_may_have_the_keys_are_read(
    spark: SparkSession, table: str, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The rows are all that have one of the keys. Delta skips files by literals only, and read the whole table for one key."""
    monkeypatch.setattr(current, "FEW_KEYS", 4)
    rows, (names, values, files) = spark.table(table), KEYS[named]
    columns = names.split(", ")
    model = sql_model.parse(
        "m",
        f"{{{{ config(materialized='incremental', unique_key={columns}) }}}} SELECT id, {names} FROM {{{{ ref('a.t', key={columns}) }}}}",
        where="m.sql",
    )
    inputs: Any = SimpleNamespace(relation=lambda _: table)
    of_model = model_table.ModelTable(spark, model, inputs, no_audit)
    keys = spark.createDataFrame(values, rows.select(columns).schema)
    with of_model._of_keys(keys, model_table._spans(keys)) as found:
        assert len(found.inputFiles()) == files
        kept = [row for row in rows.select("id", *columns).collect() if row[1:] in values]
        assert sorted(found.collect()) == sorted(kept) != []
