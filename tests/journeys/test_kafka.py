"""Signals and notifications through a real Kafka broker."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.channels import kafka
from tests.harness import kafka_broker
from tests.harness.captures import QUICK, Running, check_numbers, done, once, pipeline, rows, signals, snapshots, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kafka_broker.running(tmp_path_factory.mktemp("kafka")) as address:
        yield address


def asked(database: Any, id_: str) -> str:
    return json.dumps({"id": id_, "type": "execute-snapshot", "data": {"data-collections": [f"{database.name}.orders"]}})


def test_a_message_asks_for_a_snapshot(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, brokers: str) -> None:
    """A message asks for one snapshot, also if it comes while no capture runs. Messages with other keys, old messages and messages that are
    no signals do nothing."""
    topic, told = f"{database.name}-signal", f"{database.name}-told"
    for name in (topic, told):
        kafka_broker.make_topic(brokers, name)
    kafka_broker.send(brokers, topic, ("shop", asked(database, "old")))
    database.orders.insert_many([{"_id": number} for number in range(3)])
    more = {
        "collection.include.list": f"{database.name}.orders",
        "snapshot.mode": "no_data",
        "signal.enabled.channels": "kafka",
        "signal.kafka.topic": topic,
        "signal.kafka.bootstrap.servers": brokers,
        "signal.kafka.groupId": f"{database.name}-group",
        "signal.consumer.fetch.wait.max.ms": 100,
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": told,
    }
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    assert kafka.troubles(found) == {topic: None, told: None}
    assert once(spark, found).snapshot_documents == 0
    kafka_broker.send(
        brokers, topic, ("other", asked(database, "other")), ("shop", "no json"), ("shop", asked(database, "away"))
    )
    assert once(spark, found).snapshot_documents == 3
    assert once(spark, found).snapshot_documents == 0
    with Running(spark, found):
        kafka_broker.send(brokers, topic, ("shop", asked(database, "running")))
        until(lambda: done(spark, found, "running"))
    landed = rows(spark, found)
    check_numbers(landed)
    assert [(each["id"], each["channel"]) for each in signals(landed)] == [("away", "kafka"), ("running", "kafka")]
    assert snapshots(landed) == [("incremental", str(number)) for _ in range(2) for number in range(3)]
    away = [json.loads(value) for key, value in kafka_broker.received(brokers, told, 10) if json.loads(key)["id"] == "away"]
    assert [each["type"] for each in away] == ["STARTED", "IN_PROGRESS", "TABLE_SCAN_COMPLETED", "COMPLETED"]
    first = away[0]
    assert set(first) == {"id", "aggregate_type", "type", "additional_data", "timestamp"}
    assert (first["aggregate_type"], first["additional_data"]["connector_name"]) == ("Incremental Snapshot", "shop")


def test_a_signal_that_was_taken_and_not_yet_committed_is_done_once(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, brokers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the group's offset is lost after the commit to bronze, bronze still knows the message."""
    kafka_broker.make_topic(brokers, database.name)
    more = {
        "signal.enabled.channels": "kafka",
        "signal.kafka.topic": database.name,
        "signal.kafka.bootstrap.servers": brokers,
    }
    database.orders.insert_one({"_id": 1})
    group = {"signal.kafka.groupId": f"{database.name}-group", "snapshot.mode": "no_data"}
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more, **group)
    once(spark, found)
    kafka_broker.send(brokers, database.name, ("shop", asked(database, "one")))
    monkeypatch.setattr("pipelines.channels.kafka.KafkaTopic._commit", lambda _: None)
    assert once(spark, found).snapshot_documents == 1
    monkeypatch.undo()
    assert once(spark, found).snapshot_documents == 0
    assert [each["id"] for each in signals(rows(spark, found))] == ["one"]


def test_a_broker_that_is_away_stops_nothing(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it once per cause. When the broker is back, its signals are handled. A topic that is created later is read from its
    beginning."""
    with kafka_broker.running(tmp_path / "kafka") as address:
        pass
    port = int(address.rpartition(":")[2])
    more = {
        "signal.enabled.channels": "kafka",
        "signal.kafka.bootstrap.servers": address,
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": "told",
    }
    database.orders.insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK, **more)
    assert "no broker answers" in (kafka.troubles(found)["told"] or "")
    with caplog.at_level(logging.WARNING), Running(spark, found):
        until(lambda: "signals of the topic shop-signal cannot be read now" in caplog.text)
        database.orders.insert_one({"_id": 2})
        until(lambda: any(row.kind == "change" for row in rows(spark, found)))
        with kafka_broker.running(tmp_path / "kafka", port=port) as again:
            kafka_broker.make_topic(again, "told")
            kafka_broker.make_topic(again, "shop-signal")
            kafka_broker.send(again, "shop-signal", ("shop", asked(database, "back")))
            until(lambda: done(spark, found, "back"))
            types = [json.loads(value)["type"] for _, value in kafka_broker.received(again, "told", 1)]
    assert types == ["STARTED"]
    assert caplog.text.count("cannot be read now: ") <= 3


@pytest.mark.parametrize(
    ("channel", "prefix"),
    (
        ({"signal.enabled.channels": "kafka"}, "signal.consumer."),
        ({"notification.enabled.channels": "sink", "notification.sink.topic.name": "t"}, "producer.override."),
    ),
    ids=("signal", "sink"),
)
def test_an_option_that_the_client_does_not_know_is_refused(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, channel: dict[str, str], prefix: str
) -> None:
    more = {"signal.kafka.bootstrap.servers": "127.0.0.1:1", f"{prefix}no.such.option": "1", **channel}
    found = pipeline(mongodb_uri, lakehouse, database.name, **more)
    with pytest.raises(errors.SettingsError, match=rf"source\.{re.escape(prefix)}\*.*no\.such\.option"):
        once(spark, found)
