"""A session that starts when it is first used."""

from __future__ import annotations

import types
from typing import Any

from pipelines.spark import session as sparks


def test_a_session_starts_once_and_not_before_it_is_needed() -> None:
    started: list[Any] = []

    def start() -> Any:
        started.append(types.SimpleNamespace(version="4"))
        return started[-1]

    spark = sparks.lazily(start)
    sessions = sparks.sessions(spark)
    assert not started and not sparks.is_started(spark) and callable(sessions)
    assert spark.version == "4" and spark.version == "4"
    assert len(started) == 1 and sparks.is_started(spark)
