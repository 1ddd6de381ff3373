"""The cluster time of a resume token, comparisons with bronze's position, and the error for a lost position."""

from __future__ import annotations

import time

from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.stream import resume_token
from pipelines.bronze import log as bronze_log
from pipelines.mongodb import change_stream
from pipelines.mongodb import failures as mongodb_failures


def cluster_time(token: str) -> Timestamp:
    """The cluster time of a resume token."""
    position = resume_token.position(token)
    return Timestamp(position.seconds, position.increment)


def utc(token: str) -> str:
    """The cluster time of a resume token, as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(cluster_time(token).time))


def token_of(log: bronze_log.BronzeLog) -> str:
    """The resume token up to which bronze is complete; an empty string, which sorts before every token, for an empty table."""
    return log.position.token if log.position is not None else ""


def is_at_or_before(raw: bytes, token: str) -> bool:
    """Whether a raw event stands at or before a resume token."""
    return resume_token.compare(change_stream.event_token(raw), token) <= 0


def lost(position: bronze_log.BronzePosition | None, error: mongodb_failures.HistoryLost | None) -> errors.PositionLost:
    """The error for a position that the oplog does not hold; `position` None means `capture.start.op.time`."""
    code = error.code if error else mongodb_failures.CHANGE_STREAM_HISTORY_LOST
    if position is None:
        return errors.PositionLost(
            f"source.capture.start.op.time: the oplog no longer reaches back to it (error {code}). Nothing was "
            "changed. To start now, with a snapshot, remove the setting, or set snapshot.mode: when_needed"
        )
    return errors.PositionLost(
        f"source: the oplog no longer holds the position of {utc(position.token)} (error {code}), so later changes "
        "cannot be read. Nothing was changed. To continue, set snapshot.mode: when_needed and start again: the "
        "gap is recorded, and a new snapshot brings the tables up to date. Make the oplog larger if the capture "
        "may be down for longer than the oplog reaches back"
    )
