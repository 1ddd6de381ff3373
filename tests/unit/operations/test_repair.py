from __future__ import annotations

import pytest

from cdc_core.bronze import repair


@pytest.mark.parametrize(
    ("files", "missing", "gone"),
    [
        ({"a": (1, 1), "b": (2, 2), "c": (3, 3)}, ["b"], ("b", "c")),
        ({"a": (1, 1), "b": (2, 2)}, [], ()),
        ({"a": (1, 1), "b": (2, 2)}, ["b"], ("b",)),
        ({"a": (1, 4), "b": (5, 9), "c": (8, 8)}, ["c"], ("b", "c")),  # the compacted one begins before, and goes as a whole
        ({"a": (1, 1), "b": None}, ["a"], ("a", "b")),
        ({"a": (1, 1), "b": None}, ["b"], ("a", "b")),
    ],
)
def test_bronze_ends_before_the_first_missing_batch(
    files: dict[str, tuple[int, int] | None], missing: list[str], gone: tuple[str, ...]
) -> None:
    """All files from there on go, and what is not known goes, too."""
    assert repair.rewound(files, missing) == gone
