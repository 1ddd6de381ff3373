"""What silver says of events that go to quarantine while documents are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipelines.silver import evolve
from tests.harness import without_spark
from tests.harness.without_spark import Hop, Log


@pytest.mark.parametrize(("suspects", "warnings"), [(2, 1), (0, 0)])
def test_the_log_says_once_that_events_wait_in_quarantine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, suspects: int, warnings: int
) -> None:
    """Nobody looks for them otherwise: the rows of their documents only stay as they were. With 0 they wait behind earlier ones."""
    found = MagicMock(refused=0, also={"suspect": suspects, "partial": 0})
    monkeypatch.setattr(evolve, "evolve", lambda *_, **__: found)
    monkeypatch.setattr(evolve, "record", lambda *_: None)
    monkeypatch.setattr(evolve, "replace", lambda batch, **_: batch)
    monkeypatch.setattr(evolve.quarantine_rules, "is_suspect", lambda: None)
    monkeypatch.setattr(evolve.batches, "applicable", lambda *_, **__: MagicMock())
    collection: Any = MagicMock(namespace="shop.orders", keeps_document=False, has_told_of_quarantine=False)
    collection.shows_deleted.return_value = False
    batch: Any = MagicMock()
    batch.rows.where.return_value.isEmpty.return_value = False
    for _ in range(3):
        evolve.evolved(collection, batch)
    assert len([each for each in caplog.records if "quarantine" in each.getMessage()]) == warnings


def test_the_log_says_so_also_where_this_process_splits_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a run of a service; not for a pre-image, without which the event was applied."""
    events: list[dict[str, Any]] = [
        {"op": "c", "key": 1, "at": 11, "after": {"_id": 1}},
        {"op": "u", "key": 1, "at": 12, "after": {"_id": 1}, "before": "{"},
        {"op": "u", "key": 1, "at": 13, "text": "{"},
        {"op": "u", "key": 2, "at": 14, "text": "{"},
    ]
    with without_spark.running():
        hop = Hop(tmp_path)
        bronze, run, counts = Log(hop), hop.silver_run(), []
        for event in events:
            bronze.append({"t": [event]})
            assert run.run_round().events == 1
            counts.append([each.getMessage().split(" ")[0] for each in caplog.records if "quarantine" in each.getMessage()])
        run.close()
    assert counts == [[], [], ["cases.t:"], ["cases.t:"]]
