"""Ranges that cover a set of keys and little else, for skipping a table's files where keys are close together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cdc_core.sql.names import literal

KeyRange = tuple[str, str]
"""The first and the last key of a range."""

DIGITS = 12

_Key = TypeVar("_Key", str, int)


def covering(keys: Sequence[_Key], *, limit: int = 16) -> tuple[tuple[_Key, _Key], ...]:
    """At most `limit` ranges, in order, that contain all keys; they are split at the largest gaps."""
    sorted_keys = sorted(set(keys))
    if not sorted_keys:
        return ()
    places = _places(sorted_keys)
    gaps = sorted(range(1, len(sorted_keys)), key=lambda each: places[each] - places[each - 1], reverse=True)
    cuts: list[int] = sorted(gaps[: limit - 1])
    return tuple((sorted_keys[first], sorted_keys[last - 1]) for first, last in zip([0, *cuts], [*cuts, len(sorted_keys)]))


def condition(column: str, ranges: Sequence[tuple[_Key, _Key]], *, or_null: bool = False) -> str:
    """SQL that is true if a column's value is in one of the ranges, or null. It has literals, so that Delta skips files."""
    bounds = (" AND ".join(literal(key) if isinstance(key, str) else str(key) for key in each) for each in ranges)
    parts = [f"{column} BETWEEN {each}" for each in bounds] + [f"{column} IS NULL"] * or_null
    return " OR ".join(parts) or "false"


def _places(keys: Sequence[str | int]) -> list[int]:
    """Positions of sorted keys on a line: a number itself; for texts, as a number, the first bytes after their common prefix."""
    if numbers := [key for key in keys if isinstance(key, int)]:
        return numbers
    texts = [str(key).encode("utf-8", "surrogatepass") for key in keys]
    alike = (first == last for first, last in zip(texts[0], texts[-1]))
    prefix_length = next((index for index, is_same in enumerate(alike) if not is_same), min(len(texts[0]), len(texts[-1])))
    return [int.from_bytes(text[prefix_length : prefix_length + DIGITS].ljust(DIGITS, b"\0"), "big") for text in texts]
