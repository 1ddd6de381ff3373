"""Where signals come from, beside the source's own collection: a file, a Kafka topic, and a Delta table that
`medallion signal` writes.

A channel gives each signal once, and forgets it when its row is in bronze: a capture that is killed in between reads it
again. The table is append-only and shared by the pipelines of a lakehouse; which of its rows are done stands in bronze.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.properties.source import SignalChannel
from cdc_core.signals import signal as signals
from cdc_core.tables import layout as tables
from pipelines.channels import kafka
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("row", pa.string()),
        ("name", pa.string()),
        ("id", pa.string()),
        ("type", pa.string()),
        ("data", pa.string()),
        ("ts_ms", pa.int64()),
    ]
)
"""`row` is unique, `name` the pipeline that is meant, `ts_ms` when it was sent; the others are the signal's."""


class Channel(Protocol):
    """Something that is asked for signals now and then."""

    def poll(self) -> list[signals.Received]:
        """What came since the last time, in its order."""

    def handled(self, received: signals.Received) -> None:
        """Its row is in bronze."""

    def close(self) -> None:
        """No more is asked."""


def channels(spark: SparkSession, settings: Settings, *, done: Collection[str]) -> list[Channel]:
    """The channels that the settings name; `done` are the marks of signals that bronze holds."""
    found: list[Channel] = []
    for channel in settings.source.signal_enabled_channels:
        match channel:
            case SignalChannel.FILE:
                found.append(File(Path(settings.source.signal_file)))
            case SignalChannel.TABLE:
                table = delta.layout(settings.lakehouse).ops("signals")
                found.append(Table(spark, table, settings.name, set(done)))
            case SignalChannel.KAFKA:
                found.append(kafka.Topic(settings, set(done)))
            case SignalChannel.SOURCE:
                pass
    return found


@dataclass
class File:
    """A file with one JSON signal a line; a line that was handled is taken out, as the connector empties the file."""

    path: Path
    _waiting: list[str] = field(default_factory=list)
    _is_refused: bool = False

    def poll(self) -> list[signals.Received]:
        """The whole lines that are new; none of a file that cannot be emptied, for they would come again at each start."""
        if self.path.exists() and not os.access(self.path, os.W_OK):
            if not self._is_refused:
                log.warning(
                    "%s: its signals are not heeded, because it cannot be written, and handled ones stay in it", self.path
                )
            self._is_refused = True
            return []
        self._is_refused = False
        found = []
        waiting = list(self._waiting)
        for line in self._lines():
            if line in waiting:
                waiting.remove(line)
                continue
            try:
                found.append(signals.Received(signals.from_json(line, channel="file"), line))
                self._waiting.append(line)
            except signals.Refused as error:
                log.warning("%s: a signal that cannot be read is left out (%s): %s", self.path, error, line[:200])
                self._take_out(line)
        return found

    def handled(self, received: signals.Received) -> None:
        """Take its line out of the file; while that fails, the line waits there and is not heeded again."""
        if self._take_out(received.mark) and received.mark in self._waiting:
            self._waiting.remove(received.mark)

    def close(self) -> None:
        """Nothing is open."""

    def _lines(self) -> list[str]:
        """The lines, without one that is still being written."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = text.split("\n")
        if lines[-1].strip() and not lines[-1].rstrip().endswith("}"):
            lines.pop()
        return [line.strip() for line in lines if line.strip()]

    def _take_out(self, line: str) -> bool:
        """Whether the line is in the file no more."""
        try:
            with self.path.open("r+", encoding="utf-8", errors="replace") as file:
                lines = file.readlines()
                taken = next((number for number, each in enumerate(lines) if each.strip() == line), None)
                if taken is not None:
                    del lines[taken]
                left = "".join(each for each in lines if each.strip()) + file.read()  # what came meanwhile
                file.seek(0)
                file.truncate()
                file.write(left)
        except FileNotFoundError:
            return True
        except OSError as error:
            log.warning("%s: a handled signal cannot be taken out of it (%s)", self.path, error)
            return False
        return True


@dataclass
class Table:
    """`ops/signals`: the rows for one pipeline that bronze does not hold yet."""

    spark: SparkSession
    table: tables.TableRef
    name: str
    done: set[str]
    _version: int = -1

    def poll(self) -> list[signals.Received]:
        """The rows that are new; without a commit since the last time nothing is read."""
        if not delta.exists(self.spark, self.table):
            return []
        version = delta.version(self.spark, self.table)
        if version == self._version:
            return []
        rows = self.spark.table(str(self.table)).where(F.col("name") == self.name).orderBy("ts_ms", "row")
        found = []
        for row in rows.toArrow().to_pylist():
            if row["row"] in self.done:
                continue
            self.done.add(row["row"])
            try:
                text = json.dumps({"id": row["id"], "type": row["type"], "data": row["data"]})
                found.append(signals.Received(signals.from_json(text, channel="table"), row["row"]))
            except signals.Refused as error:
                log.warning("%s: a signal that cannot be read is left out (%s): %s", self.table.label, error, row["id"])
        self._version = version
        return found

    def handled(self, received: signals.Received) -> None:
        """Bronze knows."""

    def close(self) -> None:
        """Nothing is open."""


def send(
    spark: SparkSession, settings: Settings, *, type_: str, data: Mapping[str, Any], id_: str | None, ts_ms: int
) -> signals.Signal:
    """Put a signal into `ops/signals`, where the capture of this pipeline finds it; the signal, with its identifier.

    Raises `SettingsError` for a signal that would be refused, and where the capture does not listen to the table.
    """
    if SignalChannel.TABLE not in settings.source.signal_enabled_channels:
        raise errors.SettingsError(
            errors.Problem("source.signal.enabled.channels", "the capture does not listen to table", "add table to it")
        )
    signal = signals.Signal(id_ or f"signal-{uuid.uuid4().hex[:8]}", type_, data, "table")
    try:
        signals.request(signal)
    except signals.Refused as error:
        raise errors.SettingsError(errors.Problem("signal", str(error))) from error
    table = delta.layout(settings.lakehouse).ops("signals")
    row = {
        "row": uuid.uuid4().hex,
        "name": settings.name,
        "id": signal.id,
        "type": signal.type,
        "data": json.dumps(data),
        "ts_ms": ts_ms,
    }
    delta.note(spark, table, [row], SCHEMA, properties=delta.FACTS)
    return signal
