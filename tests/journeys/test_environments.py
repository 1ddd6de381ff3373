"""The layers as commands in each environment: rounds of changes, a kill in each layer, a second writer, a restore, maintenance."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars
import pytest

from tests.harness import connect_server, object_store, processes

LAYERS = ("capture", "silver", "gold")


@dataclass(frozen=True)
class Place:
    """An environment for the commands, and where another reader finds gold."""

    gold: str
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, str] = field(default_factory=dict)


def _conf(**values: str) -> list[str]:
    return [text for name, value in values.items() for text in ("--conf", f"{name.replace('__', '.')}={value}")]


def disk(folder: Path, database: str, stack: ExitStack) -> Place:
    return Place(f"{folder}/lakehouse/gold/{database}/orders")


def s3(folder: Path, database: str, stack: ExitStack) -> Place:
    store = stack.enter_context(object_store.running("lake"))
    options = ("--root", "s3a://lake/house", *store.options)
    return Place(f"s3://lake/house/gold/{database}/orders", options, object_store.KEYS, store.readers)


def hive(folder: Path, database: str, stack: ExitStack) -> Place:
    """A catalog with a metastore of its own."""
    conf = _conf(
        spark__sql__catalogImplementation="hive",
        spark__sql__warehouse__dir=f"{folder}/warehouse",
        spark__hadoop__javax__jdo__option__ConnectionURL=f"jdbc:derby:;databaseName={folder}/metastore;create=true",
    )
    options = ("--catalog", "spark_catalog", "--schema-prefix", "shop_", *conf)
    return Place(f"{folder}/warehouse/shop_gold.db/{database}__orders", options)


def cluster(folder: Path, database: str, stack: ExitStack) -> Place:
    """Executors that are processes of their own."""
    return Place(f"{folder}/lakehouse/gold/{database}/orders", _conf(spark__master="local-cluster[2,1,1024]"))


def connect(folder: Path, database: str, stack: ExitStack) -> Place:
    url = stack.enter_context(connect_server.running(folder / "server.log"))
    return Place(f"{folder}/lakehouse/gold/{database}/orders", (), connect_server.client(url))


def refusing(folder: Path, database: str, stack: ExitStack) -> Place:
    """Spark Connect with a session that takes no settings and keeps no rows, as on serverless compute."""
    url = stack.enter_context(connect_server.running(folder / "server.log"))
    return Place(f"{folder}/lakehouse/gold/{database}/orders", (), connect_server.refusing_client(url, folder))


@dataclass(frozen=True)
class Trial:
    """A pipeline in one of the environments."""

    place: Place
    pipeline: processes.Pipeline

    def command(self, verb: str, *options: str) -> processes.Command:
        made = self.pipeline.command(verb, *options, *self.place.options)
        return processes.Command(made.arguments, made.log, self.place.environment)

    def ran(self, verb: str, *options: str) -> str:
        command = self.command(verb, *options)
        assert command.run(500) == 0, command.said[-3000:]
        return command.said

    def killed(self, verb: str, *, after: float) -> None:
        """The command, killed so many seconds after its start, wherever it is then."""
        with self.command(verb, "--once") as command, contextlib.suppress(AssertionError):
            command.start().wait(after)

    def gold(self) -> dict[Any, Any]:
        frame = polars.read_delta(self.place.gold, storage_options=dict(self.place.readers) or None)
        return dict(zip(frame["_id"].to_list(), frame["v"].to_list(), strict=True))


@pytest.fixture(params=[disk, s3, hive, cluster, connect, refusing], ids=lambda each: each.__name__)
def trial(request: pytest.FixtureRequest, tmp_path: Path, mongodb_uri: str, database: Any) -> Iterator[Trial]:
    if request.param in (connect, refusing):
        pytest.importorskip("grpc_status", reason="pip install grpcio-status googleapis-common-protos zstandard")
    with ExitStack() as stack:
        pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings(
            silver="{defaults: {history: true}}"
        )
        yield Trial(request.param(tmp_path, database.name, stack), pipeline)


def _source(database: Any) -> dict[Any, Any]:
    return {each["_id"]: each["v"] for each in database.orders.find()}


@pytest.mark.timeout(2400)
def test_rounds_kills_and_maintenance(trial: Trial, database: Any) -> None:
    """Gold is what MongoDB holds after each round, after a kill of each layer, and after maintenance."""
    orders = database.orders
    orders.insert_many([{"_id": number, "v": 0, "inner": {"a": number}} for number in range(300)])
    for number in range(1, 4):
        for verb in LAYERS:
            if number == 2:
                trial.killed(verb, after=random.uniform(6, 20))
            trial.ran(verb, "--once")
        assert trial.gold() == _source(database)
        orders.update_many({"_id": {"$lt": 20 * number}}, {"$inc": {"v": 1}, "$set": {"inner.b": "new"}})
        orders.delete_one({"_id": 200 + number})
        orders.insert_one({"_id": 1000 + number, "v": number})
    trial.ran("maintain")
    for verb in LAYERS:
        trial.ran(verb, "--once")
    assert trial.gold() == _source(database)
