"""How the table of an incremental model takes in changed keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from pipelines.delta import maintenance
from tests.harness import gold_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.journey  # minutes on a slow machine

TOTALS = """\
{{ config(materialized='incremental', unique_key='customer') }}
SELECT customer, sum(amount) AS total FROM {{ ref('cases.orders', key='customer') }} GROUP BY customer
"""
ALL = "SELECT sum(total) AS total FROM {{ ref('totals') }}"


def _made(spark: SparkSession, root: Path, files: Mapping[str, str]) -> gold_shop.Shop:
    made = gold_shop.made(spark, root, files)
    made.change("orders", *({"_id": n, "customer": n % 4 or None, "amount": n} for n in range(12)))
    assert set(made.run().values()) == {"whole"}
    return made


def test_a_version_whose_files_cannot_be_compacted_is_published(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run failed with "Nothing was published", and models over this one were not made."""
    made = _made(spark, tmp_path, {"totals": TOTALS, "all": ALL})
    made.change("orders", {"_id": 5, "customer": 2, "amount": 50})
    monkeypatch.setattr(maintenance, "compact", Mock(side_effect=PySparkException("Job aborted: a task was lost")))
    assert made.run() == {"totals": "changed", "all": "whole"}
    assert made.rows("all") == {(111,)}
