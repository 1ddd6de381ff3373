"""Verify against a real server: what is no difference of the tables, and how a comparison that is impossible ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.verify import run as verify
from tests.harness.captures import pipeline
from tests.harness.verifications import only, play

pytestmark = pytest.mark.journey  # minutes on a slow machine


def test_a_time_that_the_server_does_not_hold_is_a_decision(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """The executors that read at it say so as themselves: it is no bug."""
    database.orders.insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    with pytest.raises(errors.DecisionNeeded, match="leave --as-of out"):
        verify.refuse(verify.run(spark, found, verify.VerifyOptions(as_of="1000000000")))
    assert only(verify.run(spark, found, verify.VerifyOptions())).is_equal
