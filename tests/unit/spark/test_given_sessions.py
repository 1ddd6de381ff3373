"""Sessions that a platform provides, without a platform."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from pipelines.spark import conf as spark_conf
from pipelines.spark import parallel
from pipelines.spark import session as sparks


class Given:
    """A session with its own settings."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.conf = GivenConf(
            settings=self.settings,
            get=self.settings.get,
            set=self.settings.__setitem__,
            unset=self.settings.pop,
            isModifiable=lambda name: name != "spark.driver.memory",
        )

    def newSession(self) -> Given:
        return Given()


class GivenConf(SimpleNamespace):
    """The settings of such a session, with the interface of PySpark."""

    settings: dict[str, str]

    @property
    def getAll(self) -> dict[str, str]:
        return dict(self.settings)


def test_what_was_asked_of_a_given_session_holds_in_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own session, which starts with the application's settings only."""
    given: Any = Given()
    monkeypatch.setattr(sparks, "_active", lambda: given)
    monkeypatch.setattr(sparks, "is_classic", lambda _: True)
    monkeypatch.setattr(sparks, "_CHOSEN", {})
    sparks.session("shop", conf={"spark.sql.shuffle.partitions": "64", "spark.driver.memory": "9g"})
    beside: Any = sparks.sessions(given)()
    assert beside is not given and beside.settings == given.settings
    assert beside.settings["spark.sql.shuffle.partitions"] == "64" and "spark.driver.memory" not in beside.settings


def test_what_delta_is_told_is_told_before_spark_knows_of_it() -> None:
    """Delta's settings are unknown to a session until it has used something of Delta."""
    given: Any = Given()
    given.conf.isModifiable = lambda name: not name.startswith("spark.databricks.")
    sparks._apply(given, {**spark_conf.REQUIRED, "spark.databricks.others": "1"})
    assert given.settings == spark_conf.REQUIRED


def test_what_somebody_s_commits_left_in_a_session_is_in_none_of_ours() -> None:
    """Another writer's settings for idempotent writes would let only one commit of the session to each table through, without an error."""
    given: Any = Given()
    others = ("write.txnAppId", "write.txnVersion", "commitInfo.userMetadata", "properties.defaults.enableIcebergCompatV2")
    given.settings |= {f"spark.databricks.delta.{name}": "5" for name in (*others, "stats.collect")}
    sparks._apply(given, spark_conf.REQUIRED)
    assert given.settings == {**spark_conf.REQUIRED, "spark.databricks.delta.stats.collect": "5"}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Ends a session of Spark Connect, as its server does after an hour without use; new ones can be created."""
    monkeypatch.setattr(sparks, "is_classic", lambda _: False)
    monkeypatch.setattr(sparks, "_ship_packages", lambda _: None)
    monkeypatch.setattr(sparks, "_connect_session", Given)
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere.example")
    monkeypatch.setattr(sparks, "_CHOSEN", {})

    def end(session: Any) -> None:
        session.conf.get = Mock(side_effect=SparkConnectGrpcException("ended", errorClass="INVALID_HANDLE.SESSION_CLOSED"))

    return end


def test_a_session_beside_one_that_has_ended_has_its_settings(ended: Callable[[Any], None]) -> None:
    """Otherwise a session that a service creates after an hour would read times in the server's time zone."""
    given: Any = Given()
    sparks._apply(given, spark_conf.REQUIRED)
    sessions = sparks.sessions(given)
    assert sessions().conf.get("spark.sql.session.timeZone") == "UTC"
    ended(given)
    assert sessions().conf.get("spark.sql.session.timeZone") == "UTC"


def test_a_session_that_was_idle_for_too_long_is_made_anew(ended: Callable[[Any], None]) -> None:
    """A service continues after a night in which no two collections were due at once."""
    given: Any = Given()
    sparks._apply(given, spark_conf.REQUIRED)
    pool, used = parallel.Pool(given, sparks.sessions(given)), []

    def act(session: Any, item: int) -> str:
        used.append(session)
        return str(session.conf.get("spark.sql.session.timeZone"))

    for _ in range(2):
        assert pool.each([1, 2], act, stop=threading.Event()) == ["UTC", "UTC"]
        for each in used:
            ended(each)


def test_a_session_is_closed_while_the_threads_of_its_process_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is left to garbage collection, a process may never end."""
    made = SimpleNamespace(client=Mock())
    builder = SimpleNamespace(remote=lambda _: SimpleNamespace(create=lambda: made))
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", builder)
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere.example")
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    assert sparks._connect_session() is made
    made.client.close.assert_not_called()
    made.client.close.side_effect = ConnectionError  # the server ended before
    (close,) = at_exit
    close()
    made.client.close.assert_called_once_with()
