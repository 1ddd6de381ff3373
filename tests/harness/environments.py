"""Simulated environments: how a process reaches its tables, and which settings its session accepts."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.sql.conf import RuntimeConfig

from pipelines.delta import direct_log, local_log
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TAKEN = ("spark.sql.session.timeZone", "spark.sql.shuffle.partitions", "spark.sql.ansi.enabled")
"""The settings that serverless compute accepts, as far as the project or its tests set them."""


class Environment(enum.Enum):
    """How tables are reached.

    `DISK`: this process sees their files, and commits directly to Delta's log. `STORE`: it sees no files, and reaches the tables through
    the JVM. `STATEMENTS`: all commits are Spark statements, as in a catalog and over Spark Connect. `REFUSING`: as `STATEMENTS`, with a
    session that accepts no settings and keeps no rows, as on serverless compute.
    """

    DISK = "disk"
    STORE = "store"
    STATEMENTS = "statements"
    REFUSING = "refusing"


@contextlib.contextmanager
def session(spark: SparkSession, environment: Environment) -> Iterator[SparkSession]:
    """A new session in the environment, until the block ends."""
    own = sparks.sessions(spark)()
    with pytest.MonkeyPatch.context() as patch:
        if environment is not Environment.DISK:
            patch.setattr(local_log, "folder", lambda table: None)
        if environment in (Environment.STATEMENTS, Environment.REFUSING):
            patch.setattr(direct_log, "_reached", lambda *_: "this test has none")
        if environment is Environment.REFUSING:
            _refuse(patch)
        yield own


def _refuse(patch: pytest.MonkeyPatch) -> None:
    accepted = RuntimeConfig.set

    def set_(self: Any, key: str, value: Any) -> None:
        if key not in TAKEN:
            raise AnalysisException(f"Configuration {key} is not available.", errorClass="CONFIG_NOT_AVAILABLE")
        accepted(self, key, value)

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise AnalysisException("not supported on serverless compute", errorClass="NOT_SUPPORTED_WITH_SERVERLESS")

    patch.setattr(RuntimeConfig, "set", set_)
    for name in ("localCheckpoint", "checkpoint", "cache", "persist"):
        patch.setattr(DataFrame, name, refused)
