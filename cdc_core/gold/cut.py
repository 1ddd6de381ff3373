"""Consistent cuts of the log: batches up to which it shows the source at one cluster time, with transactions whole.

The log is in stream order, and all events of a transaction have one cluster time. So a batch's end is a clean cut if
the next change has a later cluster time than the last one: nothing that happened at one time is split. Everything
before the cut is what the source committed before that next change. Snapshot rows before the cut must be older than it
too, because they contain all changes up to the time at which they were read.

Cluster times are 16 hex digits here: seconds and increment, as in `sequence`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cdc_core import errors

LAST = (1 << 32) - 1
"""The largest second, and the largest increment, of a cluster time."""
_PRESENT = re.compile(r"(?i:now)")
_TIMESTAMP = re.compile(r"([0-9]{1,10})(?:[:,.]([0-9]{1,10}))?")


@dataclass(frozen=True)
class BatchTimes:
    """The cluster times of a batch's first and last change and of its newest snapshot row; None where it has none."""

    number: int
    first: str | None = None
    last: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class CutBoundary:
    """The end of `batch`, where the log shows the source at every cluster time from `time` until just before `until`."""

    batch: int
    time: str
    until: str


def boundaries(batches: Iterable[BatchTimes], *, complete_time: str | None) -> list[CutBoundary]:
    """The batches after which the log can be cut, in order.

    `complete_time` is a cluster time before which the log is complete although no later change proves it.
    """
    sorted_batches = sorted(batches, key=lambda each: each.number)
    next_times = [""] * len(sorted_batches)
    next_time: str | None = None
    for index in range(len(sorted_batches) - 1, -1, -1):
        next_times[index] = next_time if next_time is not None else (complete_time or "")
        first = sorted_batches[index].first
        if first is not None:
            next_time = first if next_time is None else min(next_time, first)
    cuts: list[CutBoundary] = []
    time = ""
    for batch, until in zip(sorted_batches, next_times):
        time = max(time, batch.last or "", batch.snapshot or "")
        if time and until > time:
            cuts.append(CutBoundary(batch.number, time, until))
    return cuts


def chosen(boundaries: Sequence[CutBoundary], *, at_least: int, latest: str | None) -> CutBoundary | None:
    """The newest boundary at or after batch `at_least` whose time is at most `latest`; None if there is none.

    `at_least` is the highest batch that any of the tables has already applied.
    """
    candidates = [cut for cut in boundaries if cut.batch >= at_least and (latest is None or cut.time <= latest)]
    return candidates[-1] if candidates else None


def parsed(text: str) -> str | None:
    """A cluster time from user input: `seconds`, `seconds:increment`, or a time such as 2026-01-31T12:00:00Z; None for
    `now`.

    Seconds alone, and a time of day, mean the end of that second. Raises `SettingsError`, also for times outside the
    range of cluster times.
    """
    stripped = text.strip()
    if _PRESENT.fullmatch(stripped):
        return None
    match = _TIMESTAMP.fullmatch(stripped)
    try:
        seconds = int(match[1]) if match is not None else math.floor(_moment(stripped).timestamp())
    except (ValueError, OverflowError):
        message = "now, a cluster time as seconds or seconds:increment, or a time such as 2026-01-31T12:00:00Z is expected"
        raise errors.SettingsError(errors.Problem("--as-of", message)) from None
    increment = LAST if match is None or match[2] is None else int(match[2])
    if not (0 <= seconds <= LAST and increment <= LAST):
        raise errors.SettingsError(
            errors.Problem("--as-of", f"{stripped} is no cluster time: they end in 2106", "ask for now")
        )
    return f"{seconds:08x}{increment:08x}"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def shown(time: str) -> str:
    """A cluster time as text: `seconds:increment` and the date."""
    if len(time) != 16:
        return "the beginning"
    seconds = int(time[:8], 16)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{seconds}:{int(time[8:], 16)} ({moment:%Y-%m-%d %H:%M:%S} UTC)"
