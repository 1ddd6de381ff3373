from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pipelines import run as layers
from pipelines.settings import file
from tests.harness import agreement, processes


@pytest.mark.timeout(900)
def test_gold_equals_the_source_after_a_random_workload(
    spark: Any, tmp_path: Path, mongodb_uri: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five collections with every BSON type are written while snapshot and stream run: each token is captured once, and each document
    is correct.
    """
    monkeypatch.setattr(
        layers, "STOP_SECONDS", 120.0
    )  # a layer that takes longer than a command waits would end the tests' JVM
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()

    def here(stop: threading.Event, once: bool) -> None:
        """Run in this process, which already has a Spark session."""
        layers.run(spark, file.load(pipeline.settings), once=once, stop=stop)

    outcome = agreement.run(pipeline, operations=800, rate=200, here=here, say=print)
    assert outcome.faults == {}
    assert outcome.events > 300
