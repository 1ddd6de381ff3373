"""The thread that reads signals from the channels beside the source, and writes the notifications that wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.properties.source import SignalChannel
from cdc_core.settings.parse import Settings
from cdc_core.signals import signal as signals
from pipelines.bronze import log as bronze_log
from pipelines.capture.logger import log
from pipelines.channels import notifier
from pipelines.channels import signals as channels
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Inbox:
    """Signals that wait for their place in the stream: put in by this thread, taken out by the main thread."""

    _received: queue.SimpleQueue[tuple[channels.Channel, signals.ReceivedSignal]] = field(default_factory=queue.SimpleQueue)
    _has_polled: threading.Event = field(default_factory=threading.Event)

    def put(self, channel: channels.Channel, received: signals.ReceivedSignal) -> None:
        """Add a signal of a channel."""
        self._received.put((channel, received))

    def polled(self) -> None:
        """Every channel has been read once."""
        self._has_polled.set()

    def take(self) -> Iterator[tuple[channels.Channel, signals.ReceivedSignal]]:
        """The signals that wait, in their order, each with its channel."""
        while not self._received.empty():
            yield self._received.get()

    @property
    def is_read(self) -> bool:
        """Whether the signals that were there at the start have been received, and none waits."""
        return self._has_polled.is_set() and self._received.empty()


@dataclass
class SignalReader:
    """Polls the channels every `signal.poll.interval.ms`, into the inbox."""

    settings: Settings
    session: Callable[[], SparkSession]
    log: bronze_log.BronzeLog
    notifier: notifier.Notifier
    halt: threading.Event
    inbox: Inbox
    _mute: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Read signals and write notifications until the run ends."""
        session, source = self.session(), self.settings.source
        # Only these two channels ask bronze for what was done: a line of a file is taken out when it is done.
        is_noted = delta.exists(session, delta.layout(self.settings.lakehouse).ops("signals"))
        is_noted = is_noted or SignalChannel.KAFKA in source.signal_enabled_channels
        # Read once: only this capture adds rows to bronze, and each channel knows what it gave since then.
        done = bronze_log.handled_signals(session, self.log.table) if is_noted else set()
        opened = channels.channels(session, self.settings, done=done)
        try:
            while True:
                for channel in opened:
                    for received in self._poll(channel):
                        self.inbox.put(channel, received)
                # `--once` must not end before a signal that was there at its start has been seen.
                self.inbox.polled()
                self._notify()
                if self.halt.wait(source.signal_poll_interval_ms / 1000):
                    return
        finally:
            for channel in opened:
                channel.close()

    def _poll(self, channel: channels.Channel) -> list[signals.ReceivedSignal]:
        """What a channel has; one that cannot be read is read again later, and the stream goes on."""
        try:
            found = channel.poll()
        except Exception as error:
            self._warn_once(type(channel).__name__, "signals cannot be read from %s (%s)", error)
            return []
        self._mute.discard(type(channel).__name__)
        return found

    def _notify(self) -> None:
        """Write the notifications that wait; where that fails they wait on, and the stream goes on."""
        try:
            self.notifier.flush()
        except Exception as error:
            self._warn_once("ops/notifications", "notifications cannot be written to %s (%s)", error)
        else:
            self._mute.discard("ops/notifications")

    def _warn_once(self, what: str, message: str, error: Exception) -> None:
        """Warn when a failure begins, and not at each poll; a foreign error's text may hold data, so that its class is
        named."""
        if what not in self._mute:
            log.warning(message, what, error if isinstance(error, errors.MedallionError) else type(error).__name__)
        self._mute.add(what)
