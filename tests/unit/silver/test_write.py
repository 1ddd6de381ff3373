"""How the rows of a batch are committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import types as T

from cdc_core import errors
from pipelines.silver import write
from pipelines.silver.batch import RowBatch


def test_where_only_a_merge_is_left_no_table_is_looked_at_for_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a catalog, every look at the columns of a table or a batch makes Spark plan a query, here for nothing."""
    collection: Any = Mock(is_empty=lambda: False, writer=Mock(is_direct=False), rows=Mock(side_effect=AssertionError))
    merged: list[Any] = []
    monkeypatch.setattr(write, "_merge", lambda *given: merged.append(given))
    batch: Any = Mock(spec=RowBatch, is_late=False, has_incomplete=False, deletes=None, unless=None)
    assert write.committed(collection, batch) is batch and merged == [(collection, batch)]


def _altered(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, str], held: T.StructType, wanted: T.StructType
) -> list[str]:
    statements: list[str] = []
    writer = Mock(table=SimpleNamespace(label="silver/shop/orders"), alter=statements.append)
    collection: Any = Mock(writer=writer, namespace="shop.orders")
    monkeypatch.setattr(write.delta, "properties", lambda *_: properties)
    monkeypatch.setattr(write.dropped, "check", lambda *_, **__: None)
    source: Any = SimpleNamespace(drop=lambda *_: SimpleNamespace(schema=wanted))
    write._make_room(collection, source, held, before=1)
    return statements


def test_a_table_that_was_filled_from_a_copy_is_widened_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has the properties of whoever made it; Delta refuses another type then, and the collection would stand still."""
    int_, long = (T.StructType().add("n", each) for each in ("integer", "long"))
    allow, widen = "SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')", "ALTER COLUMN `n` TYPE BIGINT"
    assert _altered(monkeypatch, {}, int_, long) == [allow, widen]
    assert _altered(monkeypatch, {"delta.enableTypeWidening": "True"}, int_, long) == [widen]
    assert _altered(monkeypatch, {}, int_, T.StructType().add("n", "integer").add("m", "integer")) == [
        "ADD COLUMNS (`m` INT AFTER `n`)"
    ]


def test_what_is_in_the_way_of_a_column_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may have changed a setting: an older copy of ops/schemas knows less than the table."""
    for held, wanted in (
        ("`n`: double to string", ("n", "double", "string")),
        ("`n` beside `N`", ("N", "integer", "integer")),
    ):
        name, before, after = wanted
        with pytest.raises(
            errors.DecisionNeeded, match="ops/schemas is an older copy.*rebuild --collection shop.orders"
        ) as told:
            _altered(monkeypatch, {}, T.StructType().add(name, before), T.StructType().add("n", after))
        assert held in str(told.value)
