"""Notifications: a capture's reports about its snapshots, in Debezium's format.

Source: Debezium "Receiving notifications" (initial and incremental snapshot).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

INITIAL = "Initial Snapshot"
INCREMENTAL = "Incremental Snapshot"


class NotificationType(StrEnum):
    """What happened to a snapshot."""

    STARTED = "STARTED"
    IN_PROGRESS = "IN_PROGRESS"
    TABLE_SCAN_COMPLETED = "TABLE_SCAN_COMPLETED"
    PAUSED = "PAUSED"
    RESUMED = "RESUMED"
    ABORTED = "ABORTED"
    SKIPPED = "SKIPPED"
    COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class Notification:
    """`id` is the signal's, or the snapshot's own; `timestamp` is in milliseconds since 1970."""

    id: str
    aggregate_type: str
    type: NotificationType
    timestamp: int
    additional_data: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The notification as plain JSON values, with Debezium's names."""
        return {
            "id": self.id,
            "aggregate_type": self.aggregate_type,
            "type": self.type.value,
            "additional_data": dict(self.additional_data),
            "timestamp": self.timestamp,
        }

    def __str__(self) -> str:
        data = "".join(f", {name}={value}" for name, value in self.additional_data.items())
        return f"{self.aggregate_type} {self.id} {self.type.value}{data}"
