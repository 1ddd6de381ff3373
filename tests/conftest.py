"""What the tests stand on: one Spark and one MongoDB a run, and names that no two tests or runs share."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pymongo.common
import pytest

from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from tests.harness import sessions

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.database import Database
    from pyspark.sql import SparkSession

UNITS = Path(__file__).with_name("unit")
NAMED_SERVER = "MEDALLION_TEST_MONGODB_URI"

# How long an example takes says how busy the machine is, and nothing about the code.
hypothesis.settings.register_profile(
    "medallion",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("medallion")

# The driver looks at a server that it lost twice a second at most, and a test that takes connections away would wait for that.
pymongo.common.MIN_HEARTBEAT_INTERVAL = 0.05  # type: ignore[misc]

TALKATIVE = embedded_mongodb.ServerOptions(parameters={"periodicNoopIntervalSecs": 1})
"""A server that nobody writes to says how late it is each second: some streams wait for that word, which comes each ten otherwise."""

StartServer = Callable[[embedded_mongodb.ServerOptions], embedded_mongodb.EmbeddedMongoDB]

IN_MEMORY = Path("/dev/shm")
ROOM = 12 * 2**30
"""Bytes of memory that nothing uses: the tests' folders come to a small part of that, two JVMs and as many MongoDBs to half."""


def pytest_configure(config: pytest.Config) -> None:
    """Folders of tests lie in memory where there is plenty: each commit to a table, and each write to MongoDB, waits for a disk.

    Those of journeys, which may be large, do not.
    """
    if config.option.basetemp is None and config.option.markexpr == "not journey" and _has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def _has_room() -> bool:
    try:
        available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        found = [0 if available is None else int(available[1]) * 1024, shutil.disk_usage(IN_MEMORY).free]
        with contextlib.suppress(OSError, ValueError):  # a container's may be less than the machine's; "max" is all of that
            found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return min(found) > ROOM
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes take files in this order: the long file of the units before their short ones, so that both end together."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        is_unit = item.path.is_relative_to(UNITS)
        return is_unit, is_unit and item.path.parent.name != "unwrap"

    items.sort(key=place)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A command that a test runs in this process configures the log, which would hold for all tests after it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The run's Spark session, started by the first test that asks."""
    from pipelines.delta import tables as delta
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import jvm
    from pipelines.spark import session as sparks
    from tests.harness import made_tables

    delta.create = made_tables.create  # hundreds of lakehouses have the same tables
    jvm.END_SECONDS = 0.1  # each error that a test raises would be waited with, whether the JVM has gone
    session = sparks.session(
        "mongo-medallion tests",
        master="local[2]",
        conf={**spark_conf.SHORT_RUN, **sessions.SMALL, **sessions.INTERPRETED, **sessions.ROOMY},
    )
    yield session
    sparks.stop()


@pytest.fixture(scope="module")
def compiled(spark: SparkSession) -> Iterator[None]:
    """For a file whose expressions are to run as they do in production: as Java that Spark writes and compiles."""
    with sessions.compiled(spark):
        yield


@pytest.fixture(scope="session")
def mongodb_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The run's MongoDB: the server that MEDALLION_TEST_MONGODB_URI names, else an embedded one."""
    named = os.environ.get(NAMED_SERVER)
    if named:
        with contextlib.closing(mongodb.client(named)) as client:
            mongodb_server.check_suitable(mongodb_server.server_info(client))
        yield named
        return
    with embedded_mongodb.EmbeddedMongoDB(tmp_path_factory.mktemp("mongodb"), TALKATIVE) as server:
        yield server.uri


@pytest.fixture(scope="session")
def mongo(mongodb_uri: str) -> Iterator[MongoClient[dict[str, Any]]]:
    """A client of the run's MongoDB."""
    with contextlib.closing(mongodb.client(mongodb_uri)) as client:
        yield client


@pytest.fixture
def database(mongo: MongoClient[dict[str, Any]]) -> Iterator[Database[dict[str, Any]]]:
    """A database of the test's own, dropped after it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield mongo[name]
    mongo.drop_database(name)


@pytest.fixture
def start_mongodb(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers of the test's own, with the options it asks for, and stops them after it."""
    with contextlib.ExitStack() as stack:

        def start(options: embedded_mongodb.ServerOptions) -> embedded_mongodb.EmbeddedMongoDB:
            folder = tmp_path / f"mongodb-{uuid.uuid4().hex[:8]}"
            return stack.enter_context(embedded_mongodb.EmbeddedMongoDB(folder, options))

        yield start


@pytest.fixture
def lakehouse(tmp_path: Path) -> Path:
    """The root of a lakehouse of the test's own."""
    return tmp_path / "lakehouse"
