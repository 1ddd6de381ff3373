"""A history follows the schema that its table was written with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze.registry import Namespace
from pipelines.delta import tables as delta
from pipelines.gold import history
from tests.harness import layers

OWN = ["__rescued", "__key", "__sequence", "__until", "valid_from", "valid_to", "__document", "__deleted", "__as_captured"]


@pytest.mark.parametrize(("columns", "is_known"), [(OWN, True), ([*OWN, "was_added"], True), ([*OWN, "A_2"], False)])
def test_a_history_whose_schema_is_gone_takes_no_field_for_another(
    columns: list[str], is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns may have other names than the fields would get now. A table without documents' columns starts with its first event."""
    monkeypatch.setattr(history.schemas, "latest", lambda *_, **__: {})
    monkeypatch.setattr(history.History, "_stored", lambda self: SimpleNamespace(columns=columns))
    chosen = layers.pipeline(tmp_path)
    writer: Any = SimpleNamespace(
        metadata={"added": ["was_added"]}, live=None, table=tables.TableRef.at("/lake/gold/shop/orders_history")
    )
    args: Any = (None, chosen, delta.layout(chosen.lakehouse), Namespace("shop", "orders"), writer, None)
    if is_known:
        history.History(*args)
    else:
        with pytest.raises(errors.DecisionNeeded, match="orders_history: ops/schemas no longer describes"):
            history.History(*args)
