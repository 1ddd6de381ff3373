"""Thousands of histories, cut into any batches, give the table of a model in plain Python.

`python -m tests.harness.model` generates more.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core.properties.unwrap import DeleteMode
from tests.harness import histories, model
from tests.harness.histories import Mode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW = (
    model.Case(Mode.LOOKED_UP, DeleteMode.REWRITE, has_pre_images=True),
    model.Case(Mode.DESCRIBED, DeleteMode.TOMBSTONE),
)


def test_any_histories(spark: SparkSession, lakehouse: Path) -> None:
    """Five hundred histories with looked-up documents, and five hundred with partial updates."""
    assert model.faults(spark, lakehouse, histories.drawn(500), cases=FEW, rebuilds=False) == []


@pytest.mark.journey
@pytest.mark.timeout(2400)
def test_any_histories_in_every_mode_and_rebuilt(spark: SparkSession, lakehouse: Path) -> None:
    """Every capture mode and every delete mode, and again after a rebuild of each table."""
    assert model.faults(spark, lakehouse, histories.drawn(300, seed=1)) == []
