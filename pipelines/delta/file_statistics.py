"""Statistics of data files in a table's log; most functions take `add` actions. Source: Delta's protocol, "Per-file Statistics"."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN_ROWS = 10**9
"""The assumed number of rows of a file whose statistics do not have it."""


class AddAction(dict[str, Any]):
    """An `add` action that caches its parsed statistics: each batch needs them, and those of a wide table are kilobytes of JSON."""

    __slots__ = ("columns",)

    def __init__(self, action: Mapping[str, Any]) -> None:
        super().__init__(action)
        self.columns: dict[str, tuple[int | None, Any, Any]] = {}


def column_statistics(file: Mapping[str, Any], column: str) -> tuple[int | None, Any, Any]:
    """The number of rows of a file, and the minimum and maximum of a column; None for what is unknown."""
    cache = file.columns if isinstance(file, AddAction) else {}
    if column not in cache:
        stats = parsed(file)
        cache[column] = stats.get("numRecords"), *_bounds(stats, column)
    return cache[column]


def parsed(file: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics of a file; none where they have another form: they only help a reader, and Delta reads such a table, too."""
    try:
        stats = json.loads(file.get("stats") or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(stats, dict) or not isinstance(stats.get("numRecords") or 0, int):
        return {}
    return stats if all(isinstance(stats.get(each) or {}, dict) for each in ("minValues", "maxValues")) else {}


def _bounds(stats: Mapping[str, Any], column: str) -> tuple[Any, Any]:
    return (stats.get("minValues") or {}).get(column), (stats.get("maxValues") or {}).get(column)


def between(stats: Mapping[str, Any], column: str) -> tuple[Any, Any] | None:
    """The minimum and maximum of a column, from a file's statistics; None where one of them is unknown."""
    low, high = _bounds(stats, column)
    return None if low is None or high is None else (low, high)


def row_count(file: Mapping[str, Any]) -> int:
    """The number of a file's rows, deleted ones included; `UNKNOWN_ROWS` where it is unknown."""
    cache = file.columns if isinstance(file, AddAction) else {}
    count, _, _ = next(iter(cache.values()), None) or column_statistics(file, "")
    return UNKNOWN_ROWS if count is None else int(count)


def count_between(files: Sequence[Mapping[str, Any]], column: str, low: str, high: str) -> int:
    """The number of rows of the files whose bounds overlap the range from `low` to `high`."""
    bounds = ((file, *column_statistics(file, column)[1:]) for file in files)
    return sum(
        row_count(file)
        for file, least, greatest in bounds
        if least is None or greatest is None or (least <= high and low <= greatest)
    )


def share_deleted(file: Mapping[str, Any]) -> float:
    """The share of a file's rows that are deleted, from 0 to 1."""
    return deleted_count(file) / max(1, row_count(file))


def deleted_count(file: Mapping[str, Any]) -> int:
    """The number of a file's rows that are deleted."""
    return int((file.get("deletionVector") or {}).get("cardinality", 0))


def may_hold(file: Mapping[str, Any], column: str, values: Sequence[str]) -> bool:
    """Whether one of the sorted values is within the file's bounds of a column; true where these are unknown."""
    _, low, high = column_statistics(file, column)
    if low is None or high is None:
        return True
    at = bisect.bisect_left(values, low)
    return at < len(values) and bool(values[at] <= high)
