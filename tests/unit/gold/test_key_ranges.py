"""Ranges of keys: `cdc_core.gold.key_ranges`."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdc_core.gold import key_ranges


@given(st.lists(st.text(), max_size=40) | st.lists(st.integers(), max_size=40), st.integers(1, 8))
def test_every_key_lies_in_one_range(keys: list[Any], limit: int) -> None:
    """The ranges are sorted and disjoint, no more than requested, start and end with a key, and contain every key."""
    found = key_ranges.covering(keys, limit=limit)
    assert len(found) == min(limit, len(set(keys)))
    assert [key for span in found for key in span] == sorted(key for span in found for key in span)
    assert {key for span in found for key in span} <= set(keys)
    assert all(any(low <= key <= high for low, high in found) for key in keys)


def test_ranges_are_cut_where_keys_are_far_apart() -> None:
    """Neighbours share a range, whatever prefix all keys have."""
    keys = [f'{{"$oid":"65f0{number:08x}"}}' for number in (1, 2, 3, 5000, 5001, 900000)]
    assert key_ranges.covering(keys, limit=3) == ((keys[0], keys[2]), (keys[3], keys[4]), (keys[5], keys[5]))
    assert key_ranges.covering([9, -5, 10, 1]) == ((-5, -5), (1, 1), (9, 9), (10, 10))
    assert key_ranges.covering([9, -5, 10, 1], limit=2) == ((-5, 1), (9, 10))
    assert key_ranges.covering([]) == ()


def test_a_condition_has_the_ranges_as_literals() -> None:
    assert key_ranges.condition("k", [("a'", "b"), ("c", "c")]) == "k BETWEEN 'a\\u0027' AND 'b' OR k BETWEEN 'c' AND 'c'"
    assert key_ranges.condition("k", [(-1, 2)], or_null=True) == "k BETWEEN -1 AND 2 OR k IS NULL"
    assert key_ranges.condition("k", []) == "false"
