from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import agreement, processes


@pytest.mark.timeout(900)
def test_gold_equals_the_source_after_a_random_workload(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """Five collections of every BSON type, written while snapshot and stream run: each token once, each document right."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    outcome = agreement.run(pipeline, operations=800, rate=200, say=print)
    assert outcome.faults == {}
    assert outcome.events > 300
