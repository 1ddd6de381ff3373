"""What a round does for many collections."""

from __future__ import annotations

from pathlib import Path

import bson
import pytest

from pipelines.bronze import registry
from pipelines.silver import due
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


def test_few_idle_collections_move_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle collections fall behind together: a round that moved all of them would keep collections with events waiting for their
    commits."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 2)
    monkeypatch.setattr(due, "IDLE_AT_A_TIME", 2)
    with without_spark.running():
        hop = Hop(tmp_path)
        for name in ("a", "b", "c", "t"):
            hop.append((1, bson.encode({"_id": 1})), collection=name)
        hop.silver()
        places = [hop.layout.silver("cases", name) for name in "abc"]
        service = hop.silver_run()
        moved = []
        for number in range(4):
            hop.append((number, bson.encode({"_id": number})))
            service.run_round()
            moved.append([registry.silver_position(SPARK, place).to for place in places])
        service.close()
        hop.append((9, bson.encode({"_id": 9})))
        hop.append((9, bson.encode({"_id": 9})))
        hop.silver()
        moved.append([registry.silver_position(SPARK, place).to for place in places])
    assert moved == [[4, 4, 4], [6, 6, 4], [6, 6, 7], [8, 8, 7], [10, 10, 10]], "a run that ends moves all"
