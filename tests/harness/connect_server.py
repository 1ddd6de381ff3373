"""A Spark Connect server with Delta, and the environments of its clients, also of one whose session accepts no settings."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark

from pipelines.spark import conf as spark_conf
from pipelines.spark import delta_jars, log_store, stores
from tests.harness import processes

HOOK = '''\
"""Stands for a platform that decides on settings itself, and keeps no rows for a session."""

import builtins
import sys

TAKEN = ("spark.sql.session.timeZone", "spark.sql.shuffle.partitions", "spark.sql.ansi.enabled")
OF_PYSPARK = ("spark.sql.execution.pyspark.binaryAsBytes", "spark.python.sql.dataFrameDebugging.enabled")  # its own code asks
_import = builtins.__import__


def hooked(name, *given, **named):
    module = _import(name, *given, **named)
    conf, frames = (sys.modules.get(f"pyspark.sql.connect.{each}") for each in ("conf", "dataframe"))
    if getattr(conf, "RuntimeConf", None) and getattr(frames, "DataFrame", None):
        builtins.__import__ = _import
        refuse(conf.RuntimeConf, frames.DataFrame)
    return module


def refuse(conf, frame):
    from pyspark.errors.exceptions.connect import AnalysisException

    def refused(condition):
        def body(self, *given, **named):
            raise AnalysisException(condition, errorClass=condition)

        return body

    def only_taken(does, taken):
        def body(self, key, *given):
            if key not in taken:
                raise AnalysisException(f"Configuration {key} is not available.", errorClass="CONFIG_NOT_AVAILABLE")
            return does(self, key, *given)

        return body

    for name in ("set", "get", "unset", "isModifiable"):
        setattr(conf, name, only_taken(getattr(conf, name), TAKEN + OF_PYSPARK if name == "get" else TAKEN))
    for name in ("localCheckpoint", "checkpoint", "cache", "persist"):
        setattr(frame, name, refused("NOT_SUPPORTED_WITH_SERVERLESS"))


builtins.__import__ = hooked
'''


def client(url: str) -> dict[str, str]:
    """The environment of a command that uses the server."""
    return {"SPARK_REMOTE": url}


def refusing_client(url: str, folder: Path) -> dict[str, str]:
    """The same, with a session that accepts no settings and keeps no rows; `folder` gets the code that ensures it."""
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**client(url), "PYTHONPATH": path}


@contextlib.contextmanager
def running(log: Path, *conf: tuple[str, str]) -> Iterator[str]:
    """The URL of a server with two cores, which stops at the end of the block."""
    port = processes.free_port()
    settings = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.extensions": spark_conf.EXTENSION,
        "spark.sql.catalog.spark_catalog": spark_conf.CATALOG,
        "spark.jars": ",".join([str(log_store.JAR), *delta_jars.resolved_jars()]),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",  # otherwise 50 tasks read the log of a small table
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "32",  # otherwise VACUUM has 10,000 tasks: 80 s
        **stores.LOCAL.conf,
        **dict(conf),
    }
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    options = [text for name, value in settings.items() for text in ("--conf", f"{name}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [submit, "--class", server, *options, "spark-internal"],
            stdout=said,
            stderr=said,
            env={**os.environ, **processes.QUICK_JVM, "PYSPARK_PYTHON": sys.executable},
            start_new_session=True,
        )
    try:
        _until_it_listens(process, port, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.3)
    raise AssertionError(f"the server does not listen:\n{log.read_text(errors='replace')[-3000:]}")
