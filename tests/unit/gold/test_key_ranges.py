"""Ranges of keys: `cdc_core.gold.key_ranges`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc_core.gold import key_ranges


@given(st.lists(st.text(), max_size=40), st.integers(1, 8))
def test_every_key_lies_in_one_range(keys: list[str], limit: int) -> None:
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
    assert key_ranges.covering([]) == ()
