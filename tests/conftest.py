"""Fixtures for all tests: one Spark session and one MongoDB server per run, and databases and folders that no two tests or runs share."""

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
from tests.harness.protected_mongodb import ProtectedMongoDB

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.database import Database
    from pyspark.sql import SparkSession

UNITS = Path(__file__).with_name("unit")
NAMED_SERVER = "MEDALLION_TEST_MONGODB_URI"

# The duration of an example depends on the load of the machine, not on the code.
hypothesis.settings.register_profile(
    "medallion",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("medallion")

# By default the driver checks a server that it lost at most twice a second; tests that cut connections would wait for that.
pymongo.common.MIN_HEARTBEAT_INTERVAL = 0.05  # type: ignore[misc]

TALKATIVE = embedded_mongodb.ServerOptions(parameters={"periodicNoopIntervalSecs": 1})
"""An idle server writes a no-op to its oplog every second. Some streams wait for the server's time to move; the default is every ten
seconds.
"""

StartServer = Callable[[embedded_mongodb.ServerOptions], embedded_mongodb.EmbeddedMongoDB]

IN_MEMORY = Path("/dev/shm")
ROOM = 12 * 2**30
"""Bytes of unused memory. The tests' folders need a small part of it, two JVMs and two MongoDB servers about half."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the tests' temporary folders in memory if there is enough: every commit to a table and every write to MongoDB waits for the
    disk.

    Journeys keep theirs on disk, because their folders may be large.
    """
    if config.option.basetemp is None and config.option.markexpr == "not journey" and _has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def _has_room() -> bool:
    try:
        available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        found = [0 if available is None else int(available[1]) * 1024, shutil.disk_usage(IN_MEMORY).free]
        with contextlib.suppress(OSError, ValueError):  # a container's limit; "max" means none
            found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return min(found) > ROOM
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for two processes: the long file of unit tests before the short ones, so that both processes end at about the same
    time.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        is_unit = item.path.is_relative_to(UNITS)
        return is_unit, is_unit and item.path.parent.name != "unwrap"

    items.sort(key=place)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """Restore the logging configuration: a command that a test runs in this process changes it for all later tests."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The run's Spark session, started by the first test that uses it."""
    from pipelines.delta import tables as delta
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import jvm
    from pipelines.spark import session as sparks
    from tests.harness import made_tables

    delta.create = made_tables.create  # hundreds of lakehouses have the same tables
    jvm.END_SECONDS = 0.1  # otherwise every error in a test waits to see whether the JVM has ended
    session = sparks.session(
        "mongo-medallion tests",
        master="local[2]",
        conf={**spark_conf.SHORT_RUN, **sessions.SMALL, **sessions.INTERPRETED, **sessions.ROOMY},
    )
    yield session
    sparks.stop()


@pytest.fixture(scope="module")
def compiled(spark: SparkSession) -> Iterator[None]:
    """Compile expressions to Java as in production, for all tests of a file."""
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
    """A client for the run's MongoDB."""
    with contextlib.closing(mongodb.client(mongodb_uri)) as client:
        yield client


@pytest.fixture
def database(mongo: MongoClient[dict[str, Any]]) -> Iterator[Database[dict[str, Any]]]:
    """A database for one test, dropped after it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield mongo[name]
    mongo.drop_database(name)


@pytest.fixture
def start_mongodb(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers with given options for one test; they are stopped after it."""
    with contextlib.ExitStack() as stack:

        def start(options: embedded_mongodb.ServerOptions) -> embedded_mongodb.EmbeddedMongoDB:
            folder = tmp_path / f"mongodb-{uuid.uuid4().hex[:8]}"
            return stack.enter_context(embedded_mongodb.EmbeddedMongoDB(folder, options))

        yield start


@pytest.fixture
def protected_mongodb(tmp_path: Path) -> Iterator[embedded_mongodb.EmbeddedMongoDB]:
    """A MongoDB with users, for one test."""
    with ProtectedMongoDB(tmp_path / "mongodb-protected") as server:
        yield server


@pytest.fixture
def lakehouse(tmp_path: Path) -> Path:
    """The root of a lakehouse for one test."""
    return tmp_path / "lakehouse"
