"""Rows with a table's schema (`pipelines.delta.table_schema`)."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipelines.delta import table_schema

ROWS = pa.table({"n": [1, 2, 3], "text": ["a", "b", None]})


@pytest.mark.parametrize(
    "is_chosen, numbers", [([True, False, True], [1, 3]), ([True, None, False], [1]), ([False] * 3, [])]
)
def test_chosen_rows(is_chosen: list[bool | None], numbers: list[int]) -> None:
    for mask in (pa.array(is_chosen), pa.chunked_array([is_chosen[:1], is_chosen[1:]])):
        assert table_schema.chosen(ROWS, mask)["n"].to_pylist() == numbers


def test_rows_that_are_all_chosen_are_not_copied() -> None:
    assert table_schema.chosen(ROWS, pa.array([True] * 3)) is ROWS
