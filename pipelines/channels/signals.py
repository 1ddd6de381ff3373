"""The channels of signals beside the source's own collection: a file, a Kafka topic, and a Delta table that `medallion signal`
writes.

A channel returns each signal once, and drops it when its row is in bronze: a capture that is killed in between reads it again.
The table is append-only and shared by the pipelines of a lakehouse; bronze records which of its rows are handled.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from signal import SIGURG
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.properties.source import SignalChannel
from cdc_core.signals import signal as signals
from cdc_core.tables import layout as tables
from pipelines.channels import kafka
from pipelines.delta import ops_tables, table_history
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
"""`row` is unique, `name` is the pipeline, `ts_ms` the time of sending in ms since 1970; the others are the signal's."""


class Channel(Protocol):
    """A source of signals that the capture polls every `signal.poll.interval.ms`."""

    def poll(self) -> list[signals.ReceivedSignal]:
        """The signals that are new since the last poll, in order."""

    def handled(self, received: signals.ReceivedSignal) -> None:
        """Note that the signal's row is in bronze; called by another thread than `poll`."""

    def close(self) -> None:
        """Release the channel after the last poll."""


def channels(spark: SparkSession, settings: Settings, *, done: Collection[str]) -> list[Channel]:
    """The channels that the settings enable; `done` are the marks of the signals in bronze."""
    open_channels: list[Channel] = []
    for channel in settings.source.signal_enabled_channels:
        match channel:
            case SignalChannel.FILE:
                open_channels.append(FileChannel(Path(settings.source.signal_file)))
            case SignalChannel.TABLE:
                table = delta.layout(settings.lakehouse).ops("signals")
                open_channels.append(TableChannel(spark, table, settings.name, set(done)))
            case SignalChannel.KAFKA:
                open_channels.append(kafka.KafkaTopic(settings, set(done)))
            case SignalChannel.SOURCE:
                pass
    return open_channels


@dataclass
class FileChannel:
    """A file with one JSON signal per line; handled lines are removed, as Debezium empties the file.

    Other processes append to it at any time, without a lock. So a line is first overwritten with blanks, which moves no other line;
    the blanks are removed when no other process has the file open (`_close_up`).
    """

    path: Path
    _waiting: list[str] = field(default_factory=list)
    _is_refused: bool = False

    def poll(self) -> list[signals.ReceivedSignal]:
        """The signals of new, whole lines; none of a file that is not writable, because they would come again at each start."""
        if self.path.exists() and not os.access(self.path, os.W_OK):
            if not self._is_refused:
                log.warning(
                    "%s: signals are not read, because the file is not writable and handled signals could not be removed",
                    self.path,
                )
            self._is_refused = True
            return []
        self._is_refused = False
        new_signals = []
        waiting_lines = list(self._waiting)
        for line in self._lines():
            if line in waiting_lines:
                waiting_lines.remove(line)
                continue
            try:
                new_signals.append(signals.ReceivedSignal(signals.from_json(line, channel="file"), line))
            except signals.SignalRefused as error:
                log.warning("%s: skipping a signal that cannot be read: %s", self.path, error)
                self._take_out(line)
        self._waiting += [each.mark for each in new_signals]  # Only when all are read: a failure would lose the first ones.
        return new_signals

    def handled(self, received: signals.ReceivedSignal) -> None:
        """Remove its line from the file; where that fails, the line is not returned again by this process."""
        if self._take_out(received.mark) and received.mark in self._waiting:
            self._waiting.remove(received.mark)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _lines(self) -> list[str]:
        """The lines, without a last one that is not JSON and has no line end: it is still being written."""
        try:
            lines = [_text(line) for line in self.path.read_bytes().split(b"\n")]
        except OSError:
            return []
        if lines[-1] and not _is_json(lines[-1]):
            lines.pop()
        return [line for line in lines if line]

    def _take_out(self, line: str) -> bool:
        """Remove a line from the file; returns False where that fails."""
        try:
            with self.path.open("r+b", buffering=0) as file:
                offset = 0
                for file_line in file.read().split(b"\n"):
                    if _text(file_line) == line:
                        os.pwrite(file.fileno(), b" " * len(file_line), offset)
                        break
                    offset += len(file_line) + 1
                _close_up(file)
        except FileNotFoundError:
            return True
        except OSError as error:
            log.warning("%s: a handled signal cannot be removed (%s)", self.path, error.strerror)
            return False
        return True


def _text(line: bytes) -> str:
    # Without the zeros that a truncation may leave, and without a byte order mark.
    return line.decode("utf-8", errors="replace").strip().strip("\0\ufeff")


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _close_up(file: FileIO) -> None:
    """Remove blank lines from a file, unless another process has it open, whose concurrent write would be lost.

    Linux grants a write lease only where nobody else has the file open, and blocks other processes that open it until the lease is
    released. Without leases (on other systems, or for another owner's file) the blanks stay.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, SIGURG)  # The default, SIGIO, ends this process when another one opens the file.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except (OSError, AttributeError):
        return
    try:
        file.seek(0)
        text = file.read()
        remaining = b"".join(line for line in text.splitlines(keepends=True) if line.strip())
        os.pwrite(
            file.fileno(), remaining.ljust(len(text)), 0
        )  # One write: after a kill here the file has lines and blanks only.
        file.truncate(len(remaining))
    finally:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@dataclass
class TableChannel:
    """The table `ops/signals`: returns the rows of one pipeline that are not in bronze yet."""

    spark: SparkSession
    table: tables.TableRef
    name: str
    done: set[str]
    _version: int = -1

    def poll(self) -> list[signals.ReceivedSignal]:
        """The signals of new rows; the table is read only after a new commit."""
        if not delta.exists(self.spark, self.table):
            return []
        # Reading the version is cheaper than a query, and the table hardly ever changes.
        version = table_history.version(self.spark, self.table)
        if version == self._version:
            return []
        rows = self.spark.table(str(self.table)).where(F.col("name") == self.name).orderBy("ts_ms", "row")
        new_signals, row_ids = [], set()
        for row in rows.toArrow().to_pylist():
            if row["row"] in self.done:
                continue
            row_ids.add(row["row"])
            try:
                text = json.dumps({"id": row["id"], "type": row["type"], "data": row["data"]})
                new_signals.append(signals.ReceivedSignal(signals.from_json(text, channel="table"), row["row"]))
            except signals.SignalRefused as error:
                log.warning("%s: skipping the signal %s, which cannot be read: %s", self.table.label, row["id"], error)
        self.done |= row_ids  # Only when all are read: a failure would lose the first ones.
        self._version = version
        return new_signals

    def handled(self, received: signals.ReceivedSignal) -> None:
        """Do nothing: bronze holds the mark, and the table is append-only."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def send(
    spark: SparkSession, settings: Settings, *, type_: str, data: Mapping[str, Any], id_: str | None, ts_ms: int
) -> signals.Signal:
    """Append a signal to `ops/signals`, for the capture of this pipeline; returns the signal with its identifier.

    Raises `SettingsError` for a signal that would be refused, and where the channel `table` is not enabled.
    """
    if SignalChannel.TABLE not in settings.source.signal_enabled_channels:
        raise errors.SettingsError(
            errors.Problem(
                "source.signal.enabled.channels",
                "the capture does not listen to table",
                "add table to signal.enabled.channels",
            )
        )
    signal = signals.Signal(id_ or f"signal-{uuid.uuid4().hex[:8]}", type_, data, "table")
    try:
        signals.request(signal)
    except signals.SignalRefused as error:
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
    ops_tables.note(spark, table, [row], SCHEMA)
    return signal
