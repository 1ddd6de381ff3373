"""The channels of signals beside the source's own collection: a file, a Kafka topic, and a Delta table that `medallion signal`
writes.

A channel returns each signal once. Bronze records the marks of the handled ones, by which a restarted capture knows them: the table
is append-only and shared by the pipelines of a lakehouse, and a capture may be killed before it has removed a handled line of a file. Any
change of a file ends the marks of its lines: those that a kill left between two removals are returned again, which only repeats snapshots.
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from pipelines.channels.trouble import Trouble
from pipelines.delta import ops_tables, table_history
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings
    from pipelines.delta.local_log import Commit

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
        """Note that the signal's row is in bronze; called by another thread than `poll`. By default nothing is to be noted."""
        return

    def close(self) -> None:
        """Release the channel after the last poll. By default nothing is open."""
        return


def channels(spark: SparkSession, settings: Settings, *, done: Collection[str]) -> list[Channel]:
    """The channels that the settings enable; `done` are the marks of the signals in bronze."""
    open_channels: list[Channel] = []
    for channel in settings.source.signal_enabled_channels:
        match channel:
            case SignalChannel.FILE:
                open_channels.append(FileChannel(Path(settings.source.signal_file), set(done)))
            case SignalChannel.TABLE:
                table = delta.layout(settings.lakehouse).ops("signals")
                open_channels.append(TableChannel(spark, table, settings.name, set(done)))
            case SignalChannel.KAFKA:
                open_channels.append(kafka.KafkaTopic(settings, set(done)))
            case SignalChannel.SOURCE:
                pass
    return open_channels


@dataclass
class FileChannel(Channel):
    """A file with one JSON signal per line; handled lines are removed, as Debezium empties the file.

    Other processes append to it at any time, without a lock. So a line is first overwritten with blanks, which moves no other line;
    the blanks are removed when no other process has the file open (`_close_up`).
    """

    path: Path
    done: Collection[str] = ()
    _waiting: dict[str, str] = field(default_factory=dict)
    """The lines of the signals that are returned and not handled, by their marks."""
    _trouble: Trouble = field(init=False)

    def __post_init__(self) -> None:
        self._trouble = Trouble(f"{self.path}: signals are not read")

    def poll(self) -> list[signals.ReceivedSignal]:
        """The signals of new, whole lines; none of a file that is not writable, because they would come again at each start."""
        waiting_lines = list(self._waiting.values())  # Before the file is read: `handled` first removes a line there.
        try:
            file = SignalFile.read(self.path)
        except FileNotFoundError:
            return []
        if self._is_refused(file):
            return []
        new_signals, new_lines = [], {}
        for mark, line in file.lines():
            if line in waiting_lines:
                waiting_lines.remove(line)
                continue
            if mark in self.done:
                self._take_out(line)
                continue
            try:
                new_signals.append(signals.ReceivedSignal(signals.from_json(line, channel="file"), mark))
                new_lines[mark] = line
            except signals.SignalRefused as error:
                log.warning("%s: skipping a signal that cannot be read: %s", self.path, error)
                self._take_out(line)
        self._waiting |= new_lines  # Only when all are read: a failure would lose the first ones.
        return new_signals

    def handled(self, received: signals.ReceivedSignal) -> None:
        """Remove its line from the file; where that fails, the line is not returned again by this process."""
        line = self._waiting.get(received.mark)
        if line is not None and self._take_out(line):
            del self._waiting[received.mark]

    def _is_refused(self, file: SignalFile) -> bool:
        """Whether the file cannot be used."""
        refusal = file.refusal() if os.access(self.path, os.W_OK) else _NOT_WRITABLE
        if refusal:
            self._trouble.say(refusal)
        else:
            self._trouble.is_over()
        return bool(refusal)

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


def has_lines(path: Path) -> bool:
    """Whether a signal file has lines that are not removed; False where it cannot be read."""
    try:
        return any(SignalFile.read(path).lines())
    except OSError:
        return False


_NOT_WRITABLE = "the file is not writable and handled signals could not be removed"
_UTF_16 = "it is encoded in UTF-16: save it in UTF-8 (in PowerShell, write it with Out-File -Encoding utf8)"


@dataclass(frozen=True)
class SignalFile:
    """The content of a signal file, and what identifies this state of the file: any change of the file changes it too."""

    content: bytes
    state: str

    @staticmethod
    def read(path: Path) -> SignalFile:
        with path.open("rb") as file:
            # Before reading: of a line that is appended in between, the state is then one that no later reading finds.
            status = os.fstat(file.fileno())
            # Not the time of modification, which a copy may preserve: the same signal may be sent again in this way.
            return SignalFile(file.read(), f"{status.st_ino}:{status.st_ctime_ns}")

    def refusal(self) -> str:
        """Why the file cannot be read; empty if it can."""
        is_utf_16 = self.content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or re.search(
            rb'"\0|\0"', self.content
        )
        return _UTF_16 if is_utf_16 else ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each line with its mark, without a last one that is not JSON and has no line end: it is still being written."""
        offset = 0
        *whole_lines, last_line = self.content.split(b"\n")
        for line in [*whole_lines, last_line] if _is_json(_text(last_line)) else whole_lines:
            if text := _text(line):
                yield hashlib.sha256(f"{self.state}:{offset}:{text}".encode()).hexdigest()[:32], text
            offset += len(line) + 1


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
class TableChannel(Channel):
    """The table `ops/signals`, which is append-only: returns the rows of one pipeline whose marks bronze does not hold."""

    spark: SparkSession
    table: tables.TableRef
    name: str
    done: set[str]
    _newest: Sequence[Commit] = ()
    """The newest commit that was read, in a list."""

    def poll(self) -> list[signals.ReceivedSignal]:
        """The signals of new rows; the table is read only after a new commit."""
        if not delta.exists(self.spark, self.table):
            return []
        # Cheaper than a query, and the table hardly ever changes. Not by the version: a table that was removed begins again at 0.
        newest = table_history.commits(self.spark, self.table, limit=1)
        if newest == self._newest:
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
        self._newest = newest
        return new_signals


def check_table_channel(settings: Settings) -> None:
    """Raise `SettingsError` where the capture does not read `ops/signals`."""
    if SignalChannel.TABLE not in settings.source.signal_enabled_channels:
        problem, remedy = "the capture does not listen to table", "add table to signal.enabled.channels"
        raise errors.SettingsError(errors.Problem("source.signal.enabled.channels", problem, remedy))


def send(
    spark: SparkSession, settings: Settings, *, type_: str, data: Mapping[str, Any], id_: str | None, ts_ms: int
) -> signals.Signal:
    """Append a signal to `ops/signals`, for the capture of this pipeline; returns the signal with its identifier.

    Raises `SettingsError` for a signal that would be refused, and where the channel `table` is not enabled.
    """
    check_table_channel(settings)
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
