"""What a resume token says of a place in the stream, and the error of a place that the oplog no longer holds.

How the stream is opened behind bronze's position is in `stream_opener`.
"""

from __future__ import annotations

import time

from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.stream import resume_token
from pipelines.bronze import log as bronze_log
from pipelines.mongodb import change_stream
from pipelines.mongodb import failures as mongodb_failures


def cluster_time(token: str) -> Timestamp:
    """The cluster time of the token's place."""
    found = resume_token.position(token)
    return Timestamp(found.seconds, found.increment)


def utc(token: str) -> str:
    """The time of the token's place, for a person."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(cluster_time(token).time))


def token_of(log: bronze_log.BronzeLog) -> str:
    """The token up to which bronze is complete; the empty text, which sorts before every token, while it is empty."""
    return log.position.token if log.position is not None else ""


def is_at_or_before(raw: bytes, token: str) -> bool:
    """Whether the token's place is not before this event."""
    return resume_token.compare(change_stream.event_token(raw), token) <= 0


def lost(position: bronze_log.BronzePosition | None, error: mongodb_failures.HistoryLost | None) -> errors.PositionLost:
    """The error that tells a person that the oplog no longer holds a position (None: `capture.start.op.time`)."""
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
