"""How the rows of a batch are committed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from pipelines.silver import write
from pipelines.silver.batch import RowBatch


def test_where_only_a_merge_is_left_no_table_is_looked_at_for_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a catalog, every look at the columns of a table or a batch makes Spark plan a query, here for nothing."""
    collection: Any = Mock(is_empty=lambda: False, writer=Mock(is_direct=False), rows=Mock(side_effect=AssertionError))
    merged: list[Any] = []
    monkeypatch.setattr(write, "_merge", lambda *given: merged.append(given))
    batch: Any = Mock(spec=RowBatch, is_late=False, has_incomplete=False, deletes=None, unless=None)
    assert write.committed(collection, batch) is batch and merged == [(collection, batch)]
