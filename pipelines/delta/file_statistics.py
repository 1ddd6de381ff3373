"""What the statistics in a table's log say of its data files, most of which are given by their `add` actions.

Source: Delta's protocol, "Per-file Statistics".
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN_ROWS = 10**9
"""A file whose statistics do not say how many rows it has may have very many."""


class AddAction(dict[str, Any]):
    """An `add` action that keeps what its statistics say: each batch asks it of each file, and of a wide table it is kilobytes of JSON."""

    __slots__ = ("said",)

    def __init__(self, action: Mapping[str, Any]) -> None:
        super().__init__(action)
        self.said: dict[str, tuple[int | None, Any, Any]] = {}


def said(file: Mapping[str, Any], column: str) -> tuple[int | None, Any, Any]:
    """How many rows a file has, and the least and the greatest value of a column."""
    kept = file.said if isinstance(file, AddAction) else {}
    if column not in kept:
        held = json.loads(file.get("stats") or "{}")
        kept[column] = held.get("numRecords"), *_bounds(held, column)
    return kept[column]


def _bounds(stats: Mapping[str, Any], column: str) -> tuple[Any, Any]:
    return (stats.get("minValues") or {}).get(column), (stats.get("maxValues") or {}).get(column)


def between(stats: Mapping[str, Any], column: str) -> tuple[Any, Any] | None:
    """The least and the greatest value of a column, by a file's statistics; None where one of them is not known."""
    low, high = _bounds(stats, column)
    return None if low is None or high is None else (low, high)


def row_count(file: Mapping[str, Any]) -> int:
    """How many rows a file has, deleted ones too."""
    kept = file.said if isinstance(file, AddAction) else {}
    found, _, _ = next(iter(kept.values()), None) or said(file, "")
    return UNKNOWN_ROWS if found is None else int(found)


def count_between(files: Sequence[Mapping[str, Any]], column: str, low: str, high: str) -> int:
    """How many rows those of the files have whose bounds leave room for a value from `low` to `high`."""
    bounds = ((each, *said(each, column)[1:]) for each in files)
    return sum(
        row_count(each)
        for each, least, greatest in bounds
        if least is None or greatest is None or (least <= high and low <= greatest)
    )


def present_count(file: Mapping[str, Any]) -> int:
    """How many rows a file has without those that are deleted."""
    return row_count(file) - deleted_count(file)


def share_deleted(file: Mapping[str, Any]) -> float:
    """How much of a file's rows is deleted, from 0 to 1."""
    return deleted_count(file) / max(1, row_count(file))


def deleted_count(file: Mapping[str, Any]) -> int:
    """How many of a file's rows are deleted."""
    return int((file.get("deletionVector") or {}).get("cardinality", 0))


def may_hold(file: Mapping[str, Any], column: str, values: Sequence[str]) -> bool:
    """Whether a file's bounds leave room for one of the sorted values."""
    _, low, high = said(file, column)
    if low is None or high is None:
        return True
    at = bisect.bisect_left(values, low)
    return at < len(values) and bool(values[at] <= high)
