"""How a span of batches is cut into ranges."""

from __future__ import annotations

import pytest

from cdc_core.bronze import batch_range
from cdc_core.bronze.batch_range import BatchRange

RANGES = [
    ([], (0, 0), 10, []),
    ([], (3, 9), 10, [(3, 9)]),
    ([(4, 5), (6, 5)], (3, 9), 10, [(3, 9)]),
    ([(4, 5), (6, 6)], (3, 9), 10, [(3, 4), (4, 9)]),
    ([(4, 50), (5, 50), (8, 1)], (3, 9), 10, [(3, 4), (4, 5), (5, 9)]),
    ([(4, 4), (5, 4), (6, 4), (7, 4)], (3, 7), 8, [(3, 5), (5, 7)]),
]


@pytest.mark.parametrize(("batches", "span", "limit", "wanted"), RANGES)
def test_ranges(batches: list[tuple[int, int]], span: tuple[int, int], limit: int, wanted: list[tuple[int, int]]) -> None:
    """A span is cut between batches: each piece has at most the limit, or one batch, and no batch is left out."""
    found = batch_range.ranges(batches, span=BatchRange(*span), limit=limit)
    assert [(each.after, each.to) for each in found] == wanted
