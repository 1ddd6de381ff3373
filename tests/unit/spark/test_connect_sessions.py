"""Sessions of Spark Connect, without a server."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pipelines.spark import session as sparks


def test_a_session_is_closed_while_the_threads_of_its_process_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to the collection of its object, a process that has done its work may never end."""
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
