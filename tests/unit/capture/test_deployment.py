"""What a capture refuses before its first start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from pipelines.capture.deployment import Deployment
from pipelines.mongodb import catalog
from tests.harness import layers


@pytest.mark.parametrize("has_history", [True, False])
def test_a_history_in_the_place_of_a_collection_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_history: bool
) -> None:
    """As by `medallion check`: gold would refuse the history in each run."""
    there = [catalog.SourceCollection("shop", name, None) for name in ("orders", "orders_history")]
    monkeypatch.setattr(Deployment, "collections", lambda _: there)
    nothing: Any = SimpleNamespace()
    deployment = Deployment(nothing, nothing, nothing, nothing)
    chosen = layers.pipeline(tmp_path, history=has_history)
    if not has_history:
        deployment.check_tables(chosen)
        return
    with pytest.raises(
        errors.SourceUnsuitable, match="the history of shop.orders .* collection shop.orders_history; remove"
    ):
        deployment.check_tables(chosen)
