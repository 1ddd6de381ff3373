"""The thread that reads signals from the channels other than the source, and writes waiting notifications."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.properties.source import SignalChannel
from cdc_core.settings.parse import Settings
from cdc_core.signals import signal as signals
from pipelines.bronze import log as bronze_log
from pipelines.channels import notifier
from pipelines.channels import signals as channels
from pipelines.channels.trouble import Trouble
from pipelines.delta import tables as delta


@dataclass(frozen=True)
class Inbox:
    """Signals that wait for the main thread, which gives them their place in the stream."""

    _received: queue.SimpleQueue[tuple[channels.Channel, signals.ReceivedSignal]] = field(default_factory=queue.SimpleQueue)
    _has_polled: threading.Event = field(default_factory=threading.Event)

    def put(self, channel: channels.Channel, received: signals.ReceivedSignal) -> None:
        """Add a signal of a channel."""
        self._received.put((channel, received))

    def polled(self) -> None:
        """Note that every channel has been polled."""
        self._has_polled.set()

    def take(self) -> Iterator[tuple[channels.Channel, signals.ReceivedSignal]]:
        """Remove and return the waiting signals in order, each with its channel."""
        while not self._received.empty():
            yield self._received.get()

    @property
    def is_read(self) -> bool:
        """Whether every channel has been polled once, and no signal waits."""
        return self._has_polled.is_set() and self._received.empty()


@dataclass
class SignalReader:
    """Polls the channels every `signal.poll.interval.ms` and puts their signals into the inbox."""

    settings: Settings
    session: Callable[[], SparkSession]
    log: bronze_log.BronzeLog
    notifier: notifier.Notifier
    halt: threading.Event
    inbox: Inbox
    _troubles: dict[str, Trouble] = field(default_factory=dict)

    def run(self) -> None:
        """Read signals and write notifications until the run ends."""
        session, source = self.session(), self.settings.source
        # Read once: only this capture adds rows to bronze, and each channel remembers the signals that it returned.
        handled_marks = bronze_log.handled_signals(session, self.log.table) if self._may_be_handled(session) else set()
        open_channels = channels.channels(session, self.settings, done=handled_marks)
        try:
            while True:
                for channel in open_channels:
                    for received_signal in self._poll(channel):
                        self.inbox.put(channel, received_signal)
                # `--once` must not end before it has read the signals that were there at its start.
                self.inbox.polled()
                self._notify()
                if self.halt.wait(source.signal_poll_interval_ms / 1000):
                    return
        finally:
            for channel in open_channels:
                channel.close()

    def _may_be_handled(self, session: SparkSession) -> bool:
        """Whether a channel may have signals that an earlier run has handled."""
        source = self.settings.source
        return (
            delta.exists(session, delta.layout(self.settings.lakehouse).ops("signals"))
            or SignalChannel.KAFKA in source.signal_enabled_channels
            # Handled lines of a file are removed: usually there are none at a start.
            or (SignalChannel.FILE in source.signal_enabled_channels and channels.has_lines(Path(source.signal_file)))
        )

    def _poll(self, channel: channels.Channel) -> list[signals.ReceivedSignal]:
        """The new signals of a channel; none where it cannot be read, which the next poll tries again."""
        what = f"signals cannot be read from {type(channel).__name__}"
        with self._logged(what):
            return channel.poll()
        return []

    def _notify(self) -> None:
        """Write the waiting notifications; where that fails, the next poll tries again."""
        with self._logged("notifications cannot be written to ops/notifications"):
            self.notifier.flush()

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log a failure when it begins, not at each poll. A foreign error is named by its class: its text may hold data."""
        trouble = self._troubles.setdefault(what, Trouble(what))
        try:
            yield
        except Exception as error:
            trouble.say(str(error) if isinstance(error, errors.MedallionError) else type(error).__name__)
        else:
            trouble.is_over()
