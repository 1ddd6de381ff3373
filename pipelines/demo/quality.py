"""The demo's SQL models: one that meets its expectations, and one that does not and is not published."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pyspark.sql import SparkSession
from rich import box
from rich.console import Console
from rich.table import Table

from cdc_core import errors
from cdc_core.settings.parse import GoldSettings, Settings
from pipelines.delta import tables as delta
from pipelines.gold import expectations, models

FILES = {
    "models/customer_totals.sql": """\
{{ config(materialized='incremental', unique_key='customer') }}
SELECT o.customer, count(*) AS orders, sum(o.total) AS total
FROM {{ ref('shop.orders', key='customer') }} AS o
GROUP BY o.customer
""",
    "models/free_orders.sql": """\
-- Its gate expects that nobody ordered twice: it fails, on purpose.
SELECT customer, orders, CAST(0 AS DECIMAL(18, 2)) AS total FROM {{ ref('customer_totals') }}
""",
    "expectations/customer_totals.yml": """\
expectations:
  - type: expect_column_values_to_be_unique
    kwargs: {column: customer}
  - type: expect_column_values_to_be_between
    kwargs: {column: total, min_value: 0}
""",
    "expectations/free_orders.yml": """\
expectations:
  - type: expect_column_values_to_be_between
    kwargs: {column: orders, max_value: 1}
""",
}


def show(spark: SparkSession, settings: Settings, folder: Path, *, screen: Console) -> None:
    """Run the models, and show the result and why one of them was not published."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    gold = GoldSettings(models=str(folder / "models"), expectations=str(folder / "expectations"))
    demo_settings = dataclasses.replace(settings, gold=gold)
    refusal = ""
    try:
        models.run(spark, demo_settings, audit=expectations.Gate.of(demo_settings))
    except errors.GateFailed as error:
        refusal = str(error)
    screen.print(_best(spark, demo_settings))
    screen.print("[bold]quality gate[/]: this model does not meet its expectations (on purpose), so it was not published:")
    screen.print(refusal, style="dim", markup=False)


def _best(spark: SparkSession, settings: Settings) -> Table:
    table = Table(
        title="SQL model customer_totals: highest totals",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("customer", "orders", "total"):
        table.add_column(name)
    model = delta.layout(settings.lakehouse).model("customer_totals")
    for row in spark.sql(f"SELECT * FROM {model} ORDER BY total DESC LIMIT 3").collect():
        table.add_row(str(row.customer), str(row.orders), str(row.total))
    return table
