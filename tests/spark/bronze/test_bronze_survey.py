"""Surveys of bronze by Spark."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.tables import layout
from pipelines.bronze import batch_rows, survey
from pipelines.bronze.registry import Namespace

NAMES = [Namespace(f"d{number % 20}", f"c'{number}") for number in range(2000)]


@pytest.mark.journey
def test_thousands_of_starts_are_looked_up(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection's events count from its own start on, as in a survey by this process. One query per collection took minutes for a
    hundred thousand rows. A drop counts wherever it is.
    """
    rows = [
        {
            "offset": number,
            "batch": number // 100,
            "kind": "schema_change" if number == 7 else "change",
            "db": NAMES[number % 2000].db,
            "collection": NAMES[number % 2000].collection,
            "sequence": f"{number:024x}",
            "key": str(number),
            "op": None if number == 7 else "d" if number % 3 else "c",
            "payload": '{"operation":"drop"}' if number == 7 else None,
        }
        for number in range(100_000)
    ]
    found = pa.Table.from_pylist(rows, schema=pa.schema([bronze.SCHEMA.field(name) for name in survey.SURVEYED]))
    starts = {namespace: number // 2 for number, namespace in enumerate(NAMES) if number % 5}
    read = spark.createDataFrame(found)
    monkeypatch.setattr(batch_rows, "few_rows", lambda *_, **__: None)
    monkeypatch.setattr(batch_rows, "rows", lambda *_, **__: read)
    began = time.monotonic()
    table, span = layout.TableRef("bronze"), BatchRange(-1, 1000)
    counts, sweeps = survey.surveyed(spark, table, span, starts=starts)
    assert [survey.sweeps(spark, table, span, among=each) for each in (NAMES, NAMES[8:])] == [sweeps, ()]
    assert time.monotonic() - began < 60
    assert (counts, sweeps) == survey._surveyed_here(found, None, starts) and len(sweeps) == 1
