"""The settings of the tests' Spark: small, and without the compiler of a session that lives for days."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipelines.spark import conf as spark_conf
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: Mapping[str, str] = {"spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"}
"""Two of everything: enough for rows of one table to lie apart."""

INTERPRETED: Mapping[str, str] = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Spark evaluates its expressions as they are, and each plan as it was made. By default it writes Java for each plan, also where it has
compiled the same before, and plans the rest of a query anew after each of its stages: a third of the time of tests of a few rows, and a
tenth."""

ROOMY: Mapping[str, str] = {
    "spark.driver.extraJavaOptions": (
        f"{spark_conf.SHORT_RUN['spark.driver.extraJavaOptions']} -Xms1g -XX:MetaspaceSize=256m"
    ),
}
"""The memory that a run of a quarter of an hour comes to, from its start: the JVM collects each few hundred megabytes otherwise, and
looks through all that lives whenever it has loaded more classes."""


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


def jobs(spark: SparkSession, group: str | None = None) -> set[int]:
    """The numbers of all jobs that were begun in a group, or in none: the tracker alone hears of them a moment later."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    return set(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


_KEPT: dict[tuple[SparkSession, str | None], list[SparkSession]] = {}
_making = threading.Lock()


def kept(spark: SparkSession) -> Callable[[], SparkSession]:
    """As `sparks.sessions`, for runs one after the other: each gets the sessions that those before it had, because a new one costs
    its first statement."""
    places, fresh = itertools.count(), sparks.sessions(spark)

    def session() -> SparkSession:
        if not sparks.is_classic(spark):
            return fresh()
        with _making:
            # Sessions that were made within `compiled` stay so.
            made, place = _KEPT.setdefault((spark, spark.conf.get("spark.sql.codegen.wholeStage", None)), []), next(places)
            if place == len(made):
                made.append(fresh())
            return made[place]

    return session
