"""Prepares a command: its log, its settings, and a Spark session."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings
from jobs.commands import options


def opened(
    file: options.SettingsFile,
    verb: str,
    *,
    quiet: bool = False,
    captures: bool = False,
    lazily: bool = False,
    is_service: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Settings, SparkSession]:
    """Configure the log, and return the settings and a session for one command.

    With `lazily` Spark starts when it is first needed. `is_service` chooses the JVM's options for long runs. With `captures` the source
    is checked first, until `stop` is set: a wrong password is reported without waiting for Spark.
    """
    import logging

    from jobs import log_lines

    quiet_log() if quiet else log_lines.configure()
    settings = file.load()
    for warning in settings.warnings:
        # Users search the log by this name, whichever module logs the line.
        logging.getLogger("jobs.command_line").warning(warning)
    if captures:
        from pipelines.capture import service as capture
        from pipelines.terminal import live_lines

        # Before the start of Spark, which takes seconds.
        try:
            with live_lines.waiting("connecting to MongoDB"):
                capture.check_source(settings, stop)
        except capture.StoppedBeforeStart:
            raise click.exceptions.Exit(0) from None
    start = functools.partial(session, file, settings, verb, is_service=is_service)
    if lazily:
        from pipelines.spark import session as sparks

        return settings, sparks.lazily(start)
    return settings, start()


def session(file: options.SettingsFile, settings: Settings, verb: str, *, is_service: bool = False) -> SparkSession:
    """A session for one command, with JVM options for that command."""
    from pipelines.settings import secrets
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import session as sparks
    from pipelines.terminal import live_lines

    conf, profile = dict(file.conf), spark_conf.CAPTURE if verb == "capture" else _profile(settings, is_service=is_service)
    if settings.lakehouse.single_driver:
        conf[spark_conf.SINGLE_DRIVER] = "true"
    store = {f"spark.hadoop.{name}": secrets.resolve(value) for name, value in settings.lakehouse.store.items()}
    with live_lines.waiting("starting Spark"):
        return sparks.session(
            f"medallion {verb} {settings.name}",
            conf=conf,
            root=settings.lakehouse.root,
            hadoop=store,
            profile=profile,
            catalog=settings.lakehouse.catalog,
        )


SHORT_RUN_BYTES = 1 << 30
"""A run is short if bronze is smaller: about two million documents of 1 KB in Parquet."""


def _profile(settings: Settings, *, is_service: bool) -> Mapping[str, str]:
    """JVM options for a command: a short run ends before the optimizing compiler pays off."""
    from pipelines.delta import local_log
    from pipelines.delta import tables as delta
    from pipelines.spark import conf as spark_conf

    if is_service:
        return {}
    bronze = local_log.folder(delta.layout(settings.lakehouse).bronze(settings.name))
    # The size in a store is unknown without a session: assume a short run, because most only continue the one before.
    is_short = bronze is None or local_log.is_smaller(bronze, SHORT_RUN_BYTES)
    return spark_conf.SHORT_RUN if is_short else {}


def quiet_log() -> None:
    import logging

    from jobs import log_lines

    log_lines.configure(level=logging.ERROR)


def json_text(result: object) -> str:
    """A result as JSON, with the names of the dataclasses' fields."""

    def plain(value: Any) -> object:
        return value.value if isinstance(value, enum.Enum) else dataclasses.asdict(value)

    return json.dumps(result, indent=2, default=plain)
