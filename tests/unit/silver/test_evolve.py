"""What silver says of events that go to quarantine while documents are looked at."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from pipelines.silver import evolve


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
    monkeypatch.setattr(evolve.batches, "keys", lambda *_: None)
    monkeypatch.setattr(evolve.quarantine_table, "applicable", lambda *_, **__: MagicMock())
    collection: Any = MagicMock(namespace="shop.orders", keeps_document=False, has_told_of_quarantine=False)
    collection.shows_deleted.return_value = False
    batch: Any = MagicMock()
    batch.rows.where.return_value.isEmpty.return_value = False
    for _ in range(3):
        evolve.evolved(collection, batch)
    assert len([each for each in caplog.records if "quarantine" in each.getMessage()]) == warnings
