"""Mutual exclusion: whether a store refuses the second of two commits of the same version of a table.

Delta's log store decides it. The default one for S3 is for a single driver: it silently overwrites the commit of another one. A table in
such a store is not written unless the setting `lakehouse.single_driver` guarantees a single driver.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, table_errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm, log_store, stores
from pipelines.spark import session as sparks

BY_RENAME = frozenset({"abfs", "abfss", "adl", "wasb", "wasbs", "hdfs", "viewfs"})
"""Schemes of stores whose rename fails if the name exists; Delta's default log stores rely on it."""

EXCLUSIVE_STORES = frozenset(
    {
        log_store.LOCAL,
        log_store.CONDITIONAL_PUT,
        "io.delta.storage.AzureLogStore",
        "io.delta.storage.HDFSLogStore",
        "io.delta.storage.S3DynamoDBLogStore",
    }
)
"""Log stores whose commits are a compare-and-set."""

_UNABLE = (
    "AWSBadRequestException",  # 400
    "AWSUnsupportedFeatureException",  # 501
    "IllegalArgumentException",  # an option that the file system does not know
    "UnsupportedOperationException",
)

_PROVEN: set[tuple[int, str]] = set()
"""The process and store of each proof: a forked process proves it again."""


def check(spark: SparkSession, location: str) -> None:
    """Raise `ConcurrentWritesUnsafe` unless commits to tables below `location`, a path or URL, exclude each other.

    Where the log stores of this project are in use, a probe beside the table proves it once per store and process: an object that is
    written twice, where the second write must be refused, or a hard link on a disk.
    """
    scheme = stores.scheme(location)
    place = (os.getpid(), _store_of(location))
    if place in _PROVEN or sparks.is_databricks():
        return
    if scheme != "file":
        prove(spark, location)
    elif sparks.is_classic(spark) and _log_store(spark, scheme) == log_store.LOCAL:
        folder = local_log.folder(tables.TableRef.at(location))
        if folder is not None:
            _prove_links(folder)
    # Only a success is cached: a refused store is probed again, because its settings may have changed.
    _PROVEN.add(place)


def _prove_links(folder: Path) -> None:
    """Raise `ConcurrentWritesUnsafe` where a folder's file system has no hard links, with which `HardLinkLogStore` commits."""
    parent = next(path for path in folder.parents if path.is_dir())
    probe = parent / f".medallion_probe_{uuid.uuid4().hex}"
    link = probe.with_suffix(".link")
    try:
        probe.touch()
        os.link(probe, link)
    except OSError as error:
        # The next write there reports any other error of the folder or the disk.
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise errors.ConcurrentWritesUnsafe(
                f"{parent}: this file system has no hard links (a mounted bucket, for example), so it cannot exclude "
                "concurrent commits. Nothing was written. Use a folder on another disk as lakehouse.root, or the store's "
                "URL (s3a://…)"
            ) from error
    finally:
        for path in (link, probe):
            with contextlib.suppress(OSError):
                path.unlink()


def prove(spark: SparkSession, location: str) -> str:
    """A sentence on how commits to tables below `location` exclude each other. Raises as `check`, and `StoreUnreachable`."""
    scheme = stores.scheme(location)
    if sparks.is_databricks():
        return "Databricks commits to it"
    reason = _why_not(spark, scheme, location)
    if reason is None:
        if sparks.is_classic(spark) and _log_store(spark, scheme) == log_store.CONDITIONAL_PUT:
            return "it was written and listed, and refused the second of two commits of one version"
        return "its log store lets one of two commits win; the store was not tried from here"
    if spark.conf.get(spark_conf.SINGLE_DRIVER, "false") == "true":
        return f"lakehouse.single_driver vouches for one driver ({reason})"
    mend = (
        "Give this Spark the log store of mongo-medallion "
        f"({stores.log_store_of(scheme)}={log_store.CONDITIONAL_PUT}), or, if a single driver ever writes "
        "this lakehouse, set lakehouse.single_driver: true"
    )
    if scheme in ("s3", "s3n"):
        mend = (
            "Write s3a:// in lakehouse.root; only on EMR, and only if a single driver ever writes this lakehouse, keep "
            f"{scheme}:// and set lakehouse.single_driver: true"
        )
    raise errors.ConcurrentWritesUnsafe(
        f"{_store_of(location)}: {reason}, so two drivers that commit at the same time would overwrite each other's "
        f"commits. Nothing was written. {mend}"
    )


def _why_not(spark: SparkSession, scheme: str, location: str) -> str | None:
    """Why commits do not exclude each other in a store; None where they do."""
    name = _log_store(spark, scheme)
    if not name and scheme in BY_RENAME:
        return None
    if name == "io.delta.storage.GCSLogStore" and scheme == "gs":
        return None  # the connector creates objects with a generation match of 0
    if name not in EXCLUSIVE_STORES:
        return f"Delta's log store there ({name or 'the default one'}) has no compare-and-set"
    return _probed(spark, location) if name == log_store.CONDITIONAL_PUT and sparks.is_classic(spark) else None


def _log_store(spark: SparkSession, scheme: str) -> str:
    """The class of the log store of a scheme; empty for Delta's default."""
    # Delta reads the application's settings. A session has a copy from before `session` added the log stores.
    conf: Any = spark.sparkContext.getConf() if sparks.is_classic(spark) else spark.conf
    return conf.get(stores.log_store_of(scheme), "") or conf.get(stores.LOG_STORE_OF_ALL, "") or ""


def _probed(spark: SparkSession, location: str) -> str | None:
    """Write an object to the store twice: None where the store refused the second write, else why it is not safe."""
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    # Beside the table's folder: Delta creates no table in a folder that is not empty.
    path = jvm.java_class(spark, "org.apache.hadoop.fs.Path")(
        f"{location.rstrip('/').rpartition('/')[0]}/_medallion_probe/{uuid.uuid4().hex}.json"
    )
    try:
        store = jvm.java_class(spark, log_store.CONDITIONAL_PUT)(conf)
    except TypeError:
        return f"the class {log_store.CONDITIONAL_PUT} is not there (add the jar {log_store.JAR.name} to spark.jars)"

    def write(content: str, overwrite: bool) -> None:
        lines = jvm.java_class(spark, "java.util.ArrayList")()
        lines.add(content)
        store.write(path, lines.iterator(), overwrite, conf)

    file_system = None
    try:
        file_system = path.getFileSystem(conf)
        refusal = _refusal(write)
        names = [each.getPath().getName() for each in file_system.listStatus(path.getParent())]
        return refusal if path.getName() in names else "it does not list what was just written to it"
    except table_errors.SPARK_ERRORS as error:
        if (failure := spark_failures.no_file_system(error, location)) is not None:
            raise failure from error
        raise errors.StoreUnreachable(
            f"{location}: the store cannot be written, read and listed ({spark_failures.class_name(error)}); "
            f"{spark_failures.STORE_ADVICE}"
        ) from error
    finally:
        with contextlib.suppress(*table_errors.SPARK_ERRORS):
            if file_system is not None:
                file_system.delete(path, False)


def _refusal(write: Callable[[str, bool], None]) -> str | None:
    try:
        write("first", False)
    except table_errors.SPARK_ERRORS as error:
        if not spark_failures.is_caused_by(error, _UNABLE):
            raise
        write("first", True)  # raises where the store refuses writes without the condition, too
        return "it takes no conditional PUT (the store has to know If-None-Match, and S3A is able to from Hadoop 3.4.2 on)"
    try:
        write("second", False)
    except table_errors.SPARK_ERRORS as error:
        if spark_failures.is_caused_by(error, ("FileAlreadyExistsException",)):
            return None
        raise
    return "the store takes no notice of If-None-Match"


def _store_of(location: str) -> str:
    """The scheme of a location and its bucket, container or host."""
    _, _, rest = location.partition("://")
    return f"{stores.scheme(location)}://{rest.partition('/')[0]}"
