"""Sends notifications: to the log, to the Delta table `ops/notifications`, and to a Kafka topic.

Table and topic are written in the background, so that no snapshot waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc_core.properties.source import NotificationChannel
from cdc_core.signals import notification as notifications
from pipelines import clock
from pipelines.channels import kafka
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("id", pa.string()),
        ("aggregate_type", pa.string()),
        ("type", pa.string()),
        ("additional_data", pa.map_(pa.string(), pa.string())),
        ("timestamp", pa.int64()),
    ]
)
"""Debezium's notification, with the pipeline's `name`; `timestamp` in milliseconds since 1970."""


MAX_WAITING = 10_000
"""The number of notifications that wait for a table that cannot be written; older ones are dropped."""


@dataclass
class Notifier:
    """The channels of one pipeline, as `notification.enabled.channels` names them."""

    spark: SparkSession
    settings: Settings
    _waiting: list[notifications.Notification] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sink: kafka.KafkaSink | None = None

    def __post_init__(self) -> None:
        if NotificationChannel.SINK in self.settings.source.notification_enabled_channels:
            self._sink = kafka.KafkaSink(self.settings)

    def notify(
        self, aggregate_type: str, type_: notifications.NotificationType, *, id_: str, data: Mapping[str, str] | None = None
    ) -> None:
        """Send a notification to every channel; `connector_name` is added to its data."""
        additional_data = {"connector_name": self.settings.name, **(data or {})}
        notification = notifications.Notification(id_, aggregate_type, type_, clock.now_ms(), additional_data)
        for channel in self.settings.source.notification_enabled_channels:
            match channel:
                case NotificationChannel.LOG:
                    log.info("%s", notification)
                case NotificationChannel.TABLE:
                    with self._lock:
                        self._waiting.append(notification)
                case NotificationChannel.SINK:
                    assert self._sink is not None
                    self._sink.send(notification)

    def flush(self) -> None:
        """Write the waiting notifications to the table; after a failed write they keep waiting."""
        if self._sink is not None:
            self._sink.serve()
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        rows = [{"name": self.settings.name, **notification.to_json()} for notification in waiting]
        table = delta.layout(self.settings.lakehouse).ops("notifications")
        try:
            ops_tables.note(self.spark, table, rows, SCHEMA)
        except Exception:
            with self._lock:
                self._waiting = [*waiting, *self._waiting][-MAX_WAITING:]
            raise

    def close(self) -> None:
        """Write the waiting notifications, and close the sink; an error of the table is ignored."""
        with contextlib.suppress(Exception):
            self.flush()
        if self._sink is not None:
            self._sink.close()
