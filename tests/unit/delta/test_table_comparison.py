"""Comparing two tables: what executors keep of rows that differ."""

from __future__ import annotations

import pyarrow as pa

from pipelines.delta import table_comparison


def test_differences_are_counted_with_a_few_example_keys() -> None:
    """After a change of a type all documents may differ."""
    batches = [
        pa.record_batch({"key": [f"{number}-{at}" for number in range(1000)], "column": ["a", "b"] * 500}) for at in range(3)
    ]
    found = [each.to_pylist() for each in table_comparison._counted(iter([*batches, batches[0].slice(0, 0)]))]
    assert [[(row["column"], row["documents"]) for row in rows] for rows in found] == [[("a", 500), ("b", 500)]] * 3 + [[]]
    assert found[1][1]["keys"] == [f"{number}-1" for number in (1, 101, 103, 105, 107)]
    assert all(len(row["keys"]) == table_comparison.EXAMPLES for rows in found for row in rows)
