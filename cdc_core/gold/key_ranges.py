"""Ranges that cover a set of keys and little else, for skipping a table's files where keys are close together."""

from __future__ import annotations

from collections.abc import Sequence

KeyRange = tuple[str, str]
"""The first and the last key of a range."""

DIGITS = 12


def covering(keys: Sequence[str], *, limit: int = 16) -> tuple[KeyRange, ...]:
    """At most `limit` ranges, in order, that contain all keys; they are split at the largest gaps."""
    sorted_keys = sorted(set(keys))
    if not sorted_keys:
        return ()
    places = _places(sorted_keys)
    gaps = sorted(range(1, len(sorted_keys)), key=lambda each: places[each] - places[each - 1], reverse=True)
    cuts = sorted(gaps[: limit - 1])
    return tuple((sorted_keys[first], sorted_keys[last - 1]) for first, last in zip([0, *cuts], [*cuts, len(sorted_keys)]))


def _places(keys: Sequence[str]) -> list[int]:
    """Positions of sorted keys on a line: as a number, the first bytes after their common prefix."""
    texts = [key.encode("utf-8", "surrogatepass") for key in keys]
    alike = (first == last for first, last in zip(texts[0], texts[-1]))
    prefix_length = next((index for index, is_same in enumerate(alike) if not is_same), min(len(texts[0]), len(texts[-1])))
    return [int.from_bytes(text[prefix_length : prefix_length + DIGITS].ljust(DIGITS, b"\0"), "big") for text in texts]
