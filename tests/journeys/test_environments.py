"""The layers as commands in each environment: rounds of changes, with history tables, a kill of each layer, a second writer, a
restore of silver and of gold, a rebuild, and maintenance."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import polars
import pytest
from deltalake.exceptions import TableNotFoundError

from cdc_core import errors
from tests.harness import connect_server, object_store, processes

LAYERS = ("capture", "silver", "gold")


@dataclass(frozen=True)
class Place:
    """An environment for the commands, and where other readers find its tables."""

    tables: str
    """The path of a table, with the placeholders `{layer}` and `{name}`."""
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, str] = field(default_factory=dict)
    is_shared: bool = True
    """Whether two processes can use it at the same time."""

    def table(self, layer: str, name: str) -> str:
        return self.tables.format(layer=layer, name=name)

    def version(self, layer: str, name: str) -> int:
        """The newest version of a table, -1 if there is no table."""
        # Not by `is_deltatable`, which does not release Python's lock: an emulated store in this process could not answer.
        try:
            return deltalake.DeltaTable(self.table(layer, name), storage_options=dict(self.readers) or None).version()
        except TableNotFoundError:
            return -1


def _conf(**values: str) -> list[str]:
    return [text for name, value in values.items() for text in ("--conf", f"{name.replace('__', '.')}={value}")]


def disk(folder: Path, stack: ExitStack) -> Place:
    return Place(f"{folder}/lakehouse/{{layer}}/{{name}}")


def s3(folder: Path, stack: ExitStack) -> Place:
    store = stack.enter_context(object_store.running("lake"))
    options = ("--root", "s3a://lake/house", *store.options)
    return Place("s3://lake/house/{layer}/{name}", options, object_store.KEYS, store.readers)


def hive(folder: Path, stack: ExitStack) -> Place:
    """A catalog with its own metastore, which Derby allows only one process to use at a time."""
    conf = _conf(
        spark__sql__catalogImplementation="hive",
        spark__sql__warehouse__dir=f"{folder}/warehouse",
        spark__hadoop__javax__jdo__option__ConnectionURL=f"jdbc:derby:;databaseName={folder}/metastore;create=true",
    )
    options = ("--catalog", "spark_catalog", "--schema-prefix", "shop_", *conf)
    return Place(f"{folder}/warehouse/shop_{{layer}}.db/{{name}}", options, is_shared=False)


def cluster(folder: Path, stack: ExitStack) -> Place:
    """A Spark cluster: executors are separate processes."""
    return Place(f"{folder}/lakehouse/{{layer}}/{{name}}", _conf(spark__master="local-cluster[2,1,1024]"))


def connect(folder: Path, stack: ExitStack) -> Place:
    url = stack.enter_context(connect_server.running(folder / "server.log"))
    return Place(f"{folder}/lakehouse/{{layer}}/{{name}}", (), connect_server.client(url))


def refusing(folder: Path, stack: ExitStack) -> Place:
    """Spark Connect with a session that accepts no settings and keeps no rows, as on serverless compute."""
    url = stack.enter_context(connect_server.running(folder / "server.log"))
    return Place(f"{folder}/lakehouse/{{layer}}/{{name}}", (), connect_server.refusing_client(url, folder))


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

    def killed(self, verb: str, *, delay: float) -> bool:
        """Start the command, and kill it so many seconds after its first commit; whether it was still running then."""
        table = ("bronze", self.pipeline.name) if verb == "capture" else (verb, self.orders)
        before = self.place.version(*table)
        with self.command(verb, "--once") as command:
            command.start()
            processes.until(
                lambda: not command.is_running or self.place.version(*table) > before, seconds=300, what="a commit"
            )
            time.sleep(delay)
            return command.is_running

    @property
    def orders(self) -> str:
        """The name of the collection's tables."""
        return f"{self.pipeline.database}{'__' if '--catalog' in self.place.options else '/'}orders"

    def gold(self) -> dict[Any, Any]:
        path = self.place.table("gold", self.orders)
        frame = polars.read_delta(path, storage_options=dict(self.place.readers) or None)
        return dict(zip(frame["_id"].to_list(), frame["v"].to_list(), strict=True))

    def versions(self) -> dict[str, int]:
        """The newest versions of silver and gold."""
        return {layer: self.place.version(layer, self.orders) for layer in ("silver", "gold")}

    def restored(self, layer: str, version: int) -> None:
        made = self.command(layer)  # for its settings and options
        arguments = ["-m", "tests.harness.restoring", layer, f"{self.pipeline.database}.orders", str(version)]
        command = processes.Command([*arguments, *made.arguments[3:]], made.log, made.environment)
        assert command.run(300) == 0, command.said[-3000:]

    def is_refused_beside_a_service(self) -> bool:
        """Whether a second capture is refused while the first one runs; the first one must then end without an error."""
        with self.command("capture") as service:
            before = self.place.version("bronze", self.pipeline.name)
            service.start()
            processes.until(
                lambda: self.place.version("bronze", self.pipeline.name) > before,
                seconds=120,
                what="its claim",
                alive=[service],
            )
            second = self.command("capture", "--once")
            code = second.run(300)
            service.terminate()
            assert service.wait(120) == 0, service.said[-3000:]
        return code == errors.TableOwned.exit_code and "on this host writes it" in second.said


@pytest.fixture(params=[disk, s3, hive, cluster, connect, refusing], ids=lambda each: each.__name__)
def trial(request: pytest.FixtureRequest, tmp_path: Path, mongodb_uri: str, database: Any) -> Iterator[Trial]:
    if request.param in (connect, refusing):
        pytest.importorskip("grpc_status", reason="pip install grpcio-status googleapis-common-protos zstandard")
    with ExitStack() as stack:
        pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings(
            silver="{defaults: {history: true}}"
        )
        yield Trial(request.param(tmp_path, stack), pipeline)


def _source(database: Any) -> dict[Any, Any]:
    return {each["_id"]: each["v"] for each in database.orders.find()}


@pytest.mark.timeout(2400)
def test_rounds_kills_restores_and_maintenance(trial: Trial, database: Any) -> None:
    """Gold equals the source after each round, a kill of each layer, a restore, a rebuild and maintenance."""
    orders, first = database.orders, {"silver": 0, "gold": 0}
    rng, kills = random.Random("kills"), 0
    orders.insert_many([{"_id": number, "v": 0, "inner": {"a": number}} for number in range(300)])
    for number in range(1, 4):
        for verb in LAYERS:
            if number == 2:
                kills += trial.killed(verb, delay=rng.uniform(0, 1))
            trial.ran(verb, "--once")
        assert trial.gold() == _source(database)
        orders.update_many({"_id": {"$lt": 20 * number}}, {"$inc": {"v": 1}, "$set": {"inner.b": "new"}})
        orders.delete_one({"_id": 200 + number})
        orders.insert_one({"_id": 1000 + number, "v": number})
        first = trial.versions() if number == 1 else first
    assert kills, "no command was killed while it ran"
    assert not trial.place.is_shared or trial.is_refused_beside_a_service()
    for layer, version in first.items():
        trial.restored(layer, version)
    for verb in LAYERS:
        trial.ran(verb, "--once")
    assert trial.gold() == _source(database)
    trial.ran("rebuild", "--collection", f"{database.name}.orders")
    trial.ran("maintain")
    for verb in LAYERS:
        trial.ran(verb, "--once")
    assert trial.gold() == _source(database)
