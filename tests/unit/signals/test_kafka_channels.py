"""The Kafka channels with a faked client: how they handle failures of a broker."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.signals import notification as notifications
from pipelines.channels import kafka
from pipelines.channels.trouble import Trouble

SETTINGS = settings.parse(
    {
        "name": "shop",
        "lakehouse": {"root": "lake"},
        "source": {
            "mongodb.connection.string": "mongodb://localhost",
            "signal.enabled.channels": "kafka",
            "signal.kafka.bootstrap.servers": "h:9092",
            "notification.enabled.channels": "sink",
            "notification.sink.topic.name": "told",
        },
    }
)


@pytest.mark.parametrize("option", ["error_cb", "throttle_cb", "default.topic.config", "delivery.report.only.error"])
def test_an_option_that_is_no_text_in_python_is_refused(option: str) -> None:
    """The client raises Python's errors for it, which were called a bug."""
    source = {f"producer.override.{option}": "true", "notification.enabled.channels": "sink"}
    given = {"mongodb.connection.string": "mongodb://localhost", "notification.sink.topic.name": "told", **source}
    given["signal.kafka.bootstrap.servers"] = "h:9092"
    found = settings.parse({"name": "shop", "lakehouse": {"root": "lake"}, "source": given})
    with pytest.raises(errors.SettingsError, match=r"source\.producer\.override\.\*: "):
        kafka.troubles(found)


class Consumer:
    """A consumer of a topic with two partitions, of which the second does not answer the first time."""

    def __init__(self) -> None:
        self.assigned: list[int] = []
        self.begins: list[int] = []
        self.commits: list[list[int]] = []
        self.failures = self.unanswered = 1

    def list_topics(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(topics={name: SimpleNamespace(error=None, partitions={0: None, 1: None})})

    def committed(self, partitions: list[Any], **_: Any) -> list[Any]:
        return partitions

    def get_watermark_offsets(self, partition: Any, **_: Any) -> tuple[int, int]:
        if partition.partition == 1 and self.failures:
            self.failures -= 1
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))
        return 0, 7

    def offsets_for_times(self, partitions: list[Any], **_: Any) -> list[Any]:
        """In the first partition two messages came meanwhile, in the second none.

        The leader of the second does not answer the first time.
        """
        (asked,) = partitions
        if asked.partition == 1 and self.unanswered:
            self.unanswered -= 1
            return [SimpleNamespace(offset=-1001, error=confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))]
        return [confluent_kafka.TopicPartition("t", asked.partition, (5, confluent_kafka.OFFSET_END)[asked.partition])]

    def assign(self, partitions: list[Any]) -> None:
        self.assigned, self.begins = ([getattr(each, name) for each in partitions] for name in ("partition", "offset"))

    def poll(self, _: float) -> None:
        return None

    def close(self) -> None:
        return None

    def commit(self, *, offsets: list[Any], **_: Any) -> None:
        self.commits.append([each.offset for each in offsets])


def test_a_topic_is_read_behind_a_broker_that_failed_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a partition does not answer, the next poll asks for all of them again.

    Reading begins with the messages since the start; older ones are ignored.
    """
    consumer = Consumer()
    monkeypatch.setattr(kafka, "_client", lambda *_: consumer)
    topic = kafka.KafkaTopic(SETTINGS, set())
    for _ in range(2):
        assert topic.poll() == [] and consumer.assigned == []
    assert topic.poll() == [] and (consumer.assigned, consumer.begins) == ([0, 1], [5, 7])


def test_the_position_in_a_quiet_topic_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker keeps a committed position for seven days: without a new commit, signals that come during a restart would be lost."""
    consumer, days = Consumer(), iter((0.0, 0.1, 0.2, 1.3, 1.4))
    consumer.failures = 0
    at = [next(days)]
    monkeypatch.setattr(
        consumer, "committed", lambda given, **_: [confluent_kafka.TopicPartition(e.topic, e.partition, 7) for e in given]
    )
    monkeypatch.setattr(kafka, "_client", lambda *_: consumer)
    monkeypatch.setattr(kafka.time, "monotonic", lambda: at[0] * 86_400)
    topic = kafka.KafkaTopic(SETTINGS, set())
    topic.close()  # before the topic was found
    found = []
    for at[0] in days:
        topic.poll()
        found.append(len(consumer.commits))
    assert found == [1, 1, 2, 2] and consumer.commits[0] == [7, 7]


def test_a_group_that_was_forgotten_goes_on_behind_what_bronze_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that were sent while no capture ran for a week are handled, like those of a day."""
    consumer = Consumer()
    consumer.failures = 0
    monkeypatch.setattr(kafka, "_client", lambda *_: consumer)
    kafka.KafkaTopic(SETTINGS, {"shop-signal/0/2/5", "shop-signal/0/4/5", "other/1/6/5"}).poll()
    assert consumer.begins == [5, 7]
    kafka.KafkaTopic(SETTINGS, {"shop-signal/0/9/5"}).poll()  # of a topic that was recreated since
    assert consumer.begins == [7, 7]


def test_a_look_at_a_topic_that_never_ends_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If others write to the topic faster than it is read, the signals between their messages are still returned."""
    passed = iter(range(10**6))

    def message(_: float) -> Any:
        offset = next(passed)
        said = [b"shop", b'{"type": "log"}'] if offset == 1 else [b"other", b""]
        values = dict(zip(("key", "value"), said, strict=True), error=None, partition=0, offset=offset, timestamp=(1, 1))
        assert offset < 1000, "no end"
        return SimpleNamespace(**{name: (lambda value=value: value) for name, value in values.items()})

    consumer = Consumer()
    consumer.unanswered = 0
    monkeypatch.setattr(kafka, "_client", lambda *_: consumer)
    topic = kafka.KafkaTopic(SETTINGS, set())
    assert [topic.poll(), topic.poll()] == [[], []]
    monkeypatch.setattr(consumer, "poll", message)
    monkeypatch.setattr(kafka.time, "monotonic", itertools.count().__next__)  # a message takes a second
    assert [each.signal.type for each in topic.poll()] == ["log"]


def test_a_notification_that_cannot_be_sent_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client refuses a message that is too large: that is logged, and the snapshot continues."""

    def produce(*_: Any, **__: Any) -> None:
        raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE))

    monkeypatch.setattr(kafka, "_client", lambda *_: SimpleNamespace(produce=produce))
    told = notifications.Notification("1", notifications.INITIAL, notifications.NotificationType.STARTED, 0, {})
    kafka.KafkaSink(SETTINGS).send(told)
    assert "not sent to the topic told" in caplog.text


def test_an_error_is_told_once_however_often_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Its text contains the elapsed milliseconds: an unreachable broker would otherwise fill the log."""
    trouble = Trouble("signals cannot be read now")
    for milliseconds in range(50):
        resolving = f"broker:9092/bootstrap: Failed to resolve 'broker:9092' (after {milliseconds}ms in state CONNECT)"
        kafka._say(trouble, confluent_kafka.KafkaError(confluent_kafka.KafkaError._RESOLVE, resolving))
        kafka._say(
            trouble,
            confluent_kafka.KafkaError(confluent_kafka.KafkaError._ALL_BROKERS_DOWN, f"{milliseconds}/50 brokers are down"),
        )
        kafka._say(trouble, confluent_kafka.KafkaError(confluent_kafka.KafkaError._TRANSPORT, "Connection refused"))
    assert caplog.messages == [
        "signals cannot be read now: broker:9092/bootstrap: Failed to resolve 'broker:9092' (after 0ms in state CONNECT)",
        "signals cannot be read now: no broker answers",
    ]
    trouble.is_over()
    trouble.say("the topic does not exist")
    kafka._say(trouble, confluent_kafka.KafkaError(confluent_kafka.KafkaError._RESOLVE, "Failed to resolve"))
    assert len(caplog.messages) == 4
