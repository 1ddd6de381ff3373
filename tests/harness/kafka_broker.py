"""A Kafka 4.1 broker in one process; its jars come from Maven Central, through the Ivy that Spark contains."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka.admin
import pyspark

from tests.harness import processes

VERSION = "4.1.1"

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={folder}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
auto.create.topics.enable=false
"""


def jars() -> Path:
    """The folder of the broker's jars; the first call downloads them. Raises CalledProcessError if that fails."""
    folder = Path(sys.prefix) / f"kafka-{VERSION}"
    if folder.exists():
        return folder
    ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    what = ["-dependency", "org.apache.kafka", "kafka_2.13", VERSION, "-confs", "default", "-types", "jar", "bundle"]
    where = ["-cache", str(fresh / "cache"), "-retrieve", f"{fresh}/[artifact]-[revision].[ext]"]
    subprocess.run(["java", "-jar", str(ivy), *where, *what], check=True, capture_output=True)
    shutil.rmtree(fresh / "cache")
    fresh.rename(folder)
    return folder


@contextlib.contextmanager
def running(folder: Path, *, port: int | None = None) -> Iterator[str]:
    """``host:port`` of a broker with its data in the folder, which may have data already; it stops at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or processes.free_port()
    file = folder / "broker.properties"
    file.write_text(PROPERTIES.format(port=port, controller=processes.free_port(), folder=folder / "data"))
    java = ["java", "-Xmx512m", "-cp", f"{jars()}/*"]
    if not (folder / "data").exists():
        storage = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(file)]
        subprocess.run([*java, *storage], check=True, capture_output=True)
    with (folder / "broker.log").open("a") as log:
        process = subprocess.Popen([*java, "kafka.Kafka", str(file)], stdout=log, stderr=log)
    try:
        _until_it_answers(f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def make_topic(brokers: str, name: str) -> None:
    """Create a topic with one partition, as the connector requires."""
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([confluent_kafka.admin.NewTopic(name, 1, 1)])[name].result(30)


def send(brokers: str, topic: str, *messages: tuple[str, str]) -> None:
    """Send messages, each a key and a value; returns when the broker has them."""
    producer = confluent_kafka.Producer({"bootstrap.servers": brokers})
    for key, value in messages:
        producer.produce(topic, key=key, value=value)
    assert producer.flush(30) == 0


def received(brokers: str, topic: str, count: int) -> list[tuple[str, str]]:
    """Wait for the first `count` messages of a topic, and return their keys and values."""
    options = {"bootstrap.servers": brokers, "group.id": "reader", "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer(options)
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        found = consumer.consume(count, timeout=60)
        return [(each.key().decode(), each.value().decode()) for each in found]
    finally:
        consumer.close()


def _until_it_answers(brokers: str, *, seconds: float = 60) -> None:
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    deadline = time.monotonic() + seconds
    while True:
        try:
            if admin.list_topics(timeout=1).brokers:
                return
        except confluent_kafka.KafkaException:
            if time.monotonic() > deadline:
                raise
