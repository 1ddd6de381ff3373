"""The settings of the tests' Spark: small, and without the compiler of a session that lives for days."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: Mapping[str, str] = {"spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"}
"""Two of everything: enough for rows of one table to lie apart."""

INTERPRETED: Mapping[str, str] = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Spark evaluates its expressions as they are. By default it writes Java for each plan, also where it has compiled the same
before, and tests of a few rows spent a third of their time on that."""


@contextlib.contextmanager
def compiled(spark: SparkSession) -> Iterator[None]:
    """Until the block ends this session, and each that is made meanwhile, compiles its plans as Spark does by default."""
    # Where a new session has its settings from.
    shared = (spark._jsparkSession.sharedState().conf(), spark._jsc.sc().conf())
    for name in INTERPRETED:
        spark.conf.unset(name)
        for conf in shared:
            conf.remove(name)
    try:
        yield
    finally:
        for name, value in INTERPRETED.items():
            spark.conf.set(name, value)
            for conf in shared:
                conf.set(name, value)
