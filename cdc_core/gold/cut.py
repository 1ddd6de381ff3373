"""Where the log may be cut, so that everything before shows the source at one cluster time, transactions whole.

The log is in stream order, and the events of a transaction share one cluster time. So the end of a batch is a clean cut
where the next change is of a later time than the last one: no transaction, and nothing else that happened at one time,
lies on both sides. Before it lies all that the source committed before that next change; rows of snapshots must not be
newer, for they hold all changes up to the time at which they were read.

Cluster times are 16 hex digits here: seconds and increment, as in `sequence`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from cdc_core import errors

LAST = (1 << 32) - 1
"""The greatest second, and the greatest increment, of a cluster time."""
_PRESENT = re.compile(r"(?i:now)")
_TIMESTAMP = re.compile(r"([0-9]{1,10})(?:[:,.]([0-9]{1,10}))?")


@dataclass(frozen=True)
class BatchTimes:
    """The cluster times in one batch: of its first and last change, and of its newest snapshot row; None where it has
    none."""

    number: int
    first: str | None = None
    last: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class CutBoundary:
    """The end of `batch`: everything in the log up to there shows the source at every cluster time from `time` to
    before `until`."""

    batch: int
    time: str
    until: str


def boundaries(batches: Iterable[BatchTimes], *, reached: str | None) -> list[CutBoundary]:
    """The batches after which the log may be cut, in order.

    `reached` is a cluster time before which the log is known to be complete, though no later change says so.
    """
    ordered = sorted(batches, key=lambda each: each.number)
    following = [reached or ""] * len(ordered)
    later: str | None = None
    for place in range(len(ordered) - 1, -1, -1):
        following[place] = later if later is not None else (reached or "")
        first = ordered[place].first
        if first is not None:
            later = first if later is None else min(later, first)
    found: list[CutBoundary] = []
    time = ""
    for each, until in zip(ordered, following):
        time = max(time, each.last or "", each.snapshot or "")
        if time and until > time:
            found.append(CutBoundary(each.number, time, until))
    return found


def chosen(found: Sequence[CutBoundary], *, at_least: int, latest: str | None) -> CutBoundary | None:
    """The newest boundary that the tables can still reach, at a time that is not after `latest`.

    `at_least` is the batch that some table is at already. None where there is none.
    """
    fit = [each for each in found if each.batch >= at_least and (latest is None or each.time <= latest)]
    return fit[-1] if fit else None


def parsed(text: str) -> str | None:
    """A cluster time as a person writes it: `seconds`, `seconds:increment`, or a time such as 2026-01-31T12:00:00Z;
    None for `now`.

    Seconds alone, and a time, stand for their end. Raises `SettingsError`, for times that no server has, too.
    """
    asked = text.strip()
    if _PRESENT.fullmatch(asked):
        return None
    found = _TIMESTAMP.fullmatch(asked)
    try:
        seconds = int(found[1]) if found is not None else math.floor(_moment(asked).timestamp())
    except (ValueError, OverflowError):
        message = "now, a cluster time as seconds or seconds:increment, or a time such as 2026-01-31T12:00:00Z is expected"
        raise errors.SettingsError(errors.Problem("--as-of", message)) from None
    increment = LAST if found is None or found[2] is None else int(found[2])
    if not (0 <= seconds <= LAST and increment <= LAST):
        raise errors.SettingsError(errors.Problem("--as-of", f"{asked} is no cluster time: they end in 2106", "ask for now"))
    return f"{seconds:08x}{increment:08x}"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def shown(time: str) -> str:
    """A cluster time for people: `seconds:increment` and the time of day."""
    if len(time) != 16:
        return "the beginning"
    seconds = int(time[:8], 16)
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{seconds}:{int(time[8:], 16)} ({moment:%Y-%m-%d %H:%M:%S} UTC)"
