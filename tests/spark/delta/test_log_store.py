"""A commit on a local disk is a compare-and-set: of two writers of one version, one succeeds."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from cdc_core import errors
from pipelines.delta import store_exclusion
from pipelines.spark import jvm, log_store, stores
from pipelines.spark import session as sparks
from tests.harness import processes


def _store(spark: SparkSession, name: str) -> Any:
    return jvm.java_class(spark, name)(spark._jsc.hadoopConfiguration())


def _write(spark: SparkSession, store: Any, path: Path, line: str, *, overwrite: bool = False) -> bool:
    array_list, hadoop_path = (jvm.java_class(spark, name) for name in ("java.util.ArrayList", "org.apache.hadoop.fs.Path"))
    lines = array_list()
    lines.add(line)
    try:
        store.write(hadoop_path(f"file:{path}"), lines.iterator(), overwrite, spark._jsc.hadoopConfiguration())
    except Py4JJavaError as error:
        assert error.java_exception.getClass().getName() == "java.nio.file.FileAlreadyExistsException"
        return False
    return True


def test_sessions_commit_through_the_store_that_links(spark: SparkSession) -> None:
    """A local session uses the log store that excludes concurrent writers in other processes."""
    assert spark.conf.get("spark.delta.logStore.file.impl") == log_store.LOCAL


def test_one_of_two_stores_wins_each_version(spark: SparkSession, tmp_path: Path) -> None:
    """Two stores race for the same names. Each name has one winner and holds its line, and no other file remains."""
    won: dict[str, list[int]] = {"a": [], "b": []}

    def race(name: str) -> None:
        store = _store(spark, log_store.LOCAL)
        won[name] = [number for number in range(200) if _write(spark, store, tmp_path / f"{number}.json", name)]

    threads = [threading.Thread(target=race, args=(name,)) for name in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won["a"] + won["b"]) == list(range(200))
    assert all(
        (tmp_path / f"{number}.json").read_text() == f"{name}\n" for name, numbers in won.items() for number in numbers
    )
    assert len(list(tmp_path.iterdir())) == 200


def test_an_overwritten_file_drops_the_checksum_of_the_one_before(spark: SparkSession, tmp_path: Path) -> None:
    """Delta's overwritten files can be read, even if a writer with another log store left a checksum next to them."""
    (tmp_path / "._last_checkpoint.crc").write_bytes(b"crc\0stale")
    assert _write(spark, _store(spark, log_store.LOCAL), tmp_path / "_last_checkpoint", "{}", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["_last_checkpoint"]


def _used_bytes(spark: SparkSession) -> int:
    jvm.java_class(spark, "java.lang.System").gc()
    runtime = jvm.java_class(spark, "java.lang.Runtime").getRuntime()
    return int(runtime.totalMemory() - runtime.freeMemory())


def test_a_long_log_is_listed_in_order_and_little_of_it_is_held(spark: SparkSession, tmp_path: Path) -> None:
    """With one commit per second, the log of a month has millions of files. Hadoop's file statuses of them took gigabytes at each
    checkpoint.
    """
    names = [f"{version:020}.json" for version in range(60_000)]
    (tmp_path / names[0]).touch()
    for name in names[1:]:
        os.link(tmp_path / names[0], tmp_path / name)
    store, iterators = _store(spark, log_store.LOCAL), "org.apache.commons.collections4.IteratorUtils"

    def listed(version: int) -> Any:
        path = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(f"file:{tmp_path}/{version:020}.")
        return store.listFrom(path, spark._jsc.hadoopConfiguration())

    def named(found: Any) -> list[str]:
        return re.findall(r"([0-9]{20}\.json);", jvm.java_class(spark, iterators).toList(found).toString())

    before = _used_bytes(spark)
    whole = listed(0)
    assert whole.hasNext()
    # Other threads of the JVM release their memory after a while.
    processes.until(lambda: _used_bytes(spark) - before < 16 * 2**20, seconds=20, what="little is held")
    assert named(whole) == names
    assert named(listed(59_990)) == names[-10:]
    assert not listed(60_000).hasNext()


def test_a_store_without_a_compare_and_set_is_refused(spark: SparkSession) -> None:
    """Delta's default log store for S3 serves only one driver. Nothing is written there unless the settings declare a single driver."""
    with pytest.raises(errors.ConcurrentWritesUnsafe, match="single_driver"):
        store_exclusion.check(spark, "s3a://nowhere/lake/bronze/shop")
    store_exclusion.check(spark, "abfss://container@account.dfs.core.windows.net/lake")


@pytest.fixture
def application(spark: SparkSession) -> Iterator[Any]:
    """The application's settings, restored after the test."""
    context: Any = spark.sparkContext._jsc
    conf = context.sc().conf()
    names = (stores.log_store_of("file"), stores.log_store_of("s3a"), stores.LOG_STORE_OF_ALL, *log_store.CHECKSUMS)
    held = {name: conf.get(name, "") for name in names}
    yield conf
    for name, value in held.items():
        conf.set(name, value) if value else conf.remove(name)
    for name in log_store.CHECKSUMS:
        spark.conf.unset(name)


def test_a_log_store_that_is_added_to_a_driver_counts(spark: SparkSession, application: Any, tmp_path: Path) -> None:
    """The session already exists: the lookup must find what Delta finds, the settings of the application.

    A writer with its own checksums in a store leaves the checksums on a disk to Spark.
    """
    assert spark.conf.get("spark.sql.extensions")
    sparks._add_log_store(spark, stores.of("s3a://x"))
    assert store_exclusion._log_store(spark, "s3a") == log_store.CONDITIONAL_PUT
    assert {name: spark.conf.get(name) for name in log_store.CHECKSUMS} == log_store.CHECKSUMS
    spark.range(1).write.format("delta").save(f"{tmp_path}/table")
    assert (tmp_path / "table/_delta_log" / f"{0:020}.crc").is_file()


def test_no_log_store_is_added_beside_one_for_all(spark: SparkSession, application: Any) -> None:
    """Delta refuses the combination."""
    application.set(stores.LOG_STORE_OF_ALL, "io.delta.storage.S3SingleDriverLogStore")
    sparks._add_log_store(spark, stores.of("s3a://x"))
    assert not application.contains(stores.log_store_of("s3a"))
    assert store_exclusion._log_store(spark, "s3a") == "io.delta.storage.S3SingleDriverLogStore"


def test_a_file_system_that_knows_no_condition_is_refused(spark: SparkSession, application: Any, tmp_path: Path) -> None:
    """For example S3A before Hadoop 3.4.2. This is not an outage, which would pass."""
    application.set(stores.log_store_of("file"), log_store.CONDITIONAL_PUT)
    with pytest.raises(errors.ConcurrentWritesUnsafe, match=r"no conditional PUT.*single_driver"):
        store_exclusion.prove(spark, f"file:{tmp_path}/lake/t")
    assert not list(tmp_path.rglob("*.json"))


def test_a_spark_without_the_file_system_is_told_the_package(spark: SparkSession, application: Any) -> None:
    """Credentials do not help in this case."""
    application.set(stores.log_store_of("s3a"), log_store.CONDITIONAL_PUT)
    with pytest.raises(errors.DecisionNeeded, match="--packages org.apache.hadoop:hadoop-aws:"):
        store_exclusion.prove(spark, "s3a://nowhere/lake/t")
