"""The Kafka channels: signals from a topic, notifications to another, as Debezium's channels `kafka` and `sink`.

A signal is a message whose key is the pipeline's name and whose value is ``{"id", "type", "data"}``. The consumer group has
the position after the last signal that is in bronze; without a position it begins at the topic's end. A broker that does not
answer does not stop the capture: it is logged once, and the next poll tries again.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.signals import notification as notifications
from cdc_core.signals import signal as signals
from pipelines import clock
from pipelines.channels.trouble import Trouble
from pipelines.settings import secrets

if TYPE_CHECKING:
    import confluent_kafka

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""The timeout of a request to a broker."""
FIRST_SECONDS = 10.0
"""The timeout of the first poll for each message, until the topic's end is reached."""
COMMIT_SECONDS = 86_400.0
"""The longest time without a commit of the position: a broker forgets it after seven days, and signals that are sent while no capture
runs would be lost."""
LAST_SECONDS = 10.0
"""The time for which an ending capture waits for the delivery of its last notifications."""


_QUIET = {"log_level": 0, "reconnect.backoff.ms": 1_000}
"""The client would print its errors, twenty times a second; `Trouble` logs each once."""


def library() -> Any:
    """The module `confluent_kafka`; raises `SettingsError` where it is not installed."""
    try:
        import confluent_kafka
    except ImportError as error:
        message = "the channels kafka and sink need the package confluent-kafka"
        raise errors.SettingsError(errors.Problem("source", message, "pip install 'mongo-medallion[kafka]'")) from error
    return confluent_kafka


def consumer_options(settings: Settings) -> dict[str, Any]:
    """librdkafka's options for signals: `signal.consumer.*`, and those that the channel sets itself."""
    source = settings.source
    return {
        **{name: secrets.resolve(value) for name, value in source.signal_consumer.items()},
        "bootstrap.servers": source.signal_kafka_bootstrap_servers,
        "group.id": source.signal_kafka_groupid,
        "client.id": f"{settings.name}-signals",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",  # For a topic that was created again; `_beginning` says where the first poll begins.
        "allow.auto.create.topics": False,
        **_QUIET,
    }


def producer_options(settings: Settings) -> dict[str, Any]:
    """librdkafka's options for notifications: `producer.override.*`; by default with the brokers of the signals."""
    source = settings.source
    return {
        "bootstrap.servers": source.signal_kafka_bootstrap_servers,
        "client.id": f"{settings.name}-notifications",
        **{name: secrets.resolve(value) for name, value in source.producer_override.items()},
        **_QUIET,
    }


def signal_topic(settings: Settings) -> str:
    """`signal.kafka.topic`, or ``<name>-signal``."""
    return settings.source.signal_kafka_topic or f"{settings.name}-signal"


def troubles(settings: Settings) -> dict[str, str | None]:
    """The topics in the settings, each with its current problem or None; changes nothing."""
    source = settings.source
    topics = []
    if properties.SignalChannel.KAFKA in source.signal_enabled_channels:
        consumer = _client(library().Consumer, consumer_options(settings), "signal.consumer.")
        topics.append((signal_topic(settings), consumer))
    if properties.NotificationChannel.SINK in source.notification_enabled_channels:
        producer = _client(library().Producer, producer_options(settings), "producer.override.")
        topics.append((str(source.notification_sink_topic_name), producer))
    return {topic: _trouble(client, topic) for topic, client in topics}


def _trouble(client: Any, topic: str) -> str | None:
    try:
        topic_metadata = client.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
    except library().KafkaException as error:
        return _text(error.args[0])
    return "the topic does not exist" if topic_metadata.error is not None or not topic_metadata.partitions else None


def _text(error: confluent_kafka.KafkaError) -> str:
    kinds = library().KafkaError
    is_away = error.code() in (kinds._TRANSPORT, kinds._ALL_BROKERS_DOWN, kinds._TIMED_OUT)
    return _AWAY if is_away else str(error.str())


_AWAY = "no broker answers"


def _say(trouble: Trouble, error: confluent_kafka.KafkaError) -> None:
    text = _text(error)
    # By its code: the text holds milliseconds, and is different each time.
    trouble.say(text, kind=text if text == _AWAY else str(error.code()))


@dataclass
class KafkaTopic:
    """The channel `kafka`; `done` are the marks of the signals in bronze.

    Raises `SettingsError` for options that the client refuses.
    """

    settings: Settings
    done: Collection[str]
    _consumer: confluent_kafka.Consumer = field(init=False)
    _open: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Marks of returned signals that are not in bronze yet, in order, with partition and offset."""
    _handled: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    _next: dict[int, int] = field(default_factory=dict)
    _committed: dict[int, int] = field(default_factory=dict)
    _committed_at: float | None = None
    _waits_for: set[int] = field(default_factory=set)
    """Partitions whose end the first poll has not reached."""
    _has_polled: bool = False
    """Whether a poll has succeeded, also one that found no topic."""
    _has_failed: bool = False
    """Whether a poll has failed."""
    _opened_ms: int = field(default_factory=clock.now_ms)

    def __post_init__(self) -> None:
        self.name = signal_topic(self.settings)
        self._trouble = Trouble(f"signals of the topic {self.name} cannot be read now")
        options = {**consumer_options(self.settings), "error_cb": functools.partial(_say, self._trouble)}
        self._consumer = _client(library().Consumer, options, "signal.consumer.")

    def poll(self) -> list[signals.ReceivedSignal]:
        """The new signals for this pipeline."""
        kafka = library()
        new_signals: list[signals.ReceivedSignal] = []
        try:
            if self._next or self._assign():
                self._drain(new_signals)
                self._commit()
            self._has_polled = True
        except kafka.KafkaException as error:
            self._has_failed = True
            _say(self._trouble, error.args[0])
        return new_signals

    def handled(self, received: signals.ReceivedSignal) -> None:
        """Note that its row is in bronze, so that the next commit of the group's position may pass it."""
        self._handled.put(received.mark)

    def close(self) -> None:
        """Commit the position after the handled signals, and close the consumer."""
        kafka = library()
        try:
            self._commit()
        except kafka.KafkaException as error:
            _say(self._trouble, error.args[0])
        self._consumer.close()

    def _assign(self) -> bool:
        """Assign all partitions of the topic, each from where to begin; False where the topic does not exist."""
        kafka = library()
        topic = self._consumer.list_topics(self.name, timeout=ANSWER_SECONDS).topics[self.name]
        if topic.error is not None or not topic.partitions:
            self._trouble.say("the topic does not exist; make it, with one partition")
            return False
        partitions = [kafka.TopicPartition(self.name, number) for number in sorted(topic.partitions)]
        offsets: dict[int, int] = {}
        for partition in self._consumer.committed(partitions, timeout=ANSWER_SECONDS):
            if partition.offset >= 0:
                self._committed[partition.partition] = offsets[partition.partition] = partition.offset
            else:
                offsets[partition.partition] = self._beginning(partition)
        self._consumer.assign([kafka.TopicPartition(self.name, *each) for each in offsets.items()])
        # Only when all are known: after a failure the next poll starts over.
        self._next, self._waits_for = offsets, set(offsets)
        return True

    def _beginning(self, partition: confluent_kafka.TopicPartition) -> int:
        """The offset from which a partition without a committed position is read.

        After the last signal that bronze has of it, where the broker has forgotten the group (after seven days). Else its beginning,
        where `signal.consumer.auto.offset.reset` says so or the topic was created after an earlier poll. Else its end; after failed
        polls, the end at the time when the capture began.
        """
        low, high = self._consumer.get_watermark_offsets(partition, timeout=ANSWER_SECONDS)
        reset = self.settings.source.signal_consumer.get("auto.offset.reset")
        from_beginning = reset is not None and secrets.resolve(reset) in ("earliest", "smallest", "beginning")
        handled_offsets = [
            int(mark.split("/")[2]) for mark in self.done if mark.startswith(f"{self.name}/{partition.partition}/")
        ]
        if handled_offsets and max(handled_offsets) < high:
            return max(int(low), max(handled_offsets) + 1)
        if from_beginning or self._has_polled:
            return int(low)
        if not self._has_failed:
            return int(high)
        start = library().TopicPartition(self.name, partition.partition, self._opened_ms)
        (since,) = self._consumer.offsets_for_times([start], timeout=ANSWER_SECONDS)
        if since.error is not None:  # The client does not raise the error of a partition.
            raise library().KafkaException(since.error)
        return int(since.offset if since.offset >= 0 else high)

    def _drain(self, arrivals: list[signals.ReceivedSignal]) -> None:
        """Add the signals that have arrived; in the first poll, all up to the end of each partition.

        A poll ends after `ANSWER_SECONDS`, so that a topic with a constant load does not hold back its signals.
        """
        kafka, deadline = library(), time.monotonic() + ANSWER_SECONDS
        while self._waits_for or time.monotonic() < deadline:
            message = self._consumer.poll(FIRST_SECONDS if self._waits_for else 0.1)
            if message is None:
                self._waits_for = set()
                return
            error = message.error()
            if error is not None:
                if error.code() != kafka.KafkaError._PARTITION_EOF:
                    raise kafka.KafkaException(error)
                self._waits_for.discard(message.partition())
                self._trouble.is_over()
                continue
            self._take(message, arrivals)

    def _take(self, message: confluent_kafka.Message, arrivals: list[signals.ReceivedSignal]) -> None:
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None  # Set in every message from a broker.
        self._next[partition] = offset + 1
        key = (message.key() or b"").decode(errors="replace")
        if key != self.settings.name:
            log.debug("%s: a message with the key %s is another pipeline's", self.name, key)
            return
        mark = f"{self.name}/{partition}/{offset}/{message.timestamp()[1]}"
        # The group's position may be before it, after a capture that was killed between bronze's commit and the group's.
        if mark in self.done:
            return
        try:
            signal = signals.from_json((message.value() or b"").decode(), channel="kafka")
        except (signals.SignalRefused, UnicodeDecodeError) as error:
            log.warning("%s: skipping a signal that cannot be read (%s): offset %d", self.name, error, offset)
            return
        self._open[mark] = (partition, offset)
        arrivals.append(signals.ReceivedSignal(signal, mark))

    def _commit(self) -> None:
        """Commit the group's position in each partition: the first signal that is not in bronze yet, or the end."""
        kafka = library()
        while not self._handled.empty():
            self._open.pop(self._handled.get(), None)
        positions = dict(self._next)
        # After a crash, signals that are not in bronze must be read again.
        for partition, offset in self._open.values():
            positions[partition] = min(positions[partition], offset)
        is_old = self._committed_at is None or time.monotonic() - self._committed_at > COMMIT_SECONDS
        if positions and (positions != self._committed or is_old):
            offsets = [kafka.TopicPartition(self.name, *each) for each in positions.items()]
            self._consumer.commit(offsets=offsets, asynchronous=False)
            self._committed, self._committed_at = positions, time.monotonic()


class KafkaSink:
    """The channel `sink`: each notification is a message of `notification.sink.topic.name`, sent in the background.

    Key ``{"id"}``, value ``{"id", "aggregate_type", "type", "additional_data", "timestamp"}``, as Kafka's JsonConverter
    prints Debezium's records without their schemas. Raises `SettingsError` for options that the client refuses.
    """

    def __init__(self, settings: Settings) -> None:
        self.topic = settings.source.notification_sink_topic_name
        self._trouble = Trouble(f"notifications cannot be sent to the topic {self.topic} now")
        options = {**producer_options(settings), "error_cb": functools.partial(_say, self._trouble)}
        self._producer = _client(library().Producer, options, "producer.override.")

    def send(self, notification: notifications.Notification) -> None:
        """Pass it to the client, which sends it as soon as the broker answers."""
        key, value = json.dumps({"id": notification.id}), json.dumps(notification.to_json())
        try:
            self._producer.produce(self.topic, key=key, value=value, on_delivery=self._delivered)
        except BufferError:
            log.warning("notification lost, because too many are waiting for the topic %s: %s", self.topic, notification)
        # For example a message that is too large, because of many collections or a large key.
        except library().KafkaException as error:
            log.warning("notification not sent to the topic %s: %s", self.topic, _text(error.args[0]))

    def serve(self) -> None:
        """Handle the delivery reports that have arrived."""
        self._producer.poll(0)

    def close(self) -> None:
        """Wait up to `LAST_SECONDS` for the delivery of what is not sent yet."""
        remaining = self._producer.flush(LAST_SECONDS)
        if remaining:
            log.warning("%d notifications did not reach the topic %s", remaining, self.topic)

    def _delivered(self, error: object, message: object) -> None:
        if error is None:
            self._trouble.is_over()
        else:
            log.warning("notification did not reach the topic %s: %s", self.topic, error)


def _client(make: Callable[[Mapping[str, Any]], Any], options: Mapping[str, Any], prefix: str) -> Any:
    try:
        return make(options)
    # Python's errors are about options of Python's client.
    except (library().KafkaException, AttributeError, TypeError, ValueError) as error:
        message = error.args[0].str() if isinstance(error, library().KafkaException) else str(error)
        raise errors.SettingsError(
            errors.Problem(f"source.{prefix}*", message, "see librdkafka's CONFIGURATION.md for the options")
        ) from error
