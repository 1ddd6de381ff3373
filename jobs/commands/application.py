"""What a command starts with: its log, its settings, and a Spark session."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    """The settings and a session for one command, with the log configured; `lazily`, Spark starts when it is needed.

    A JVM of one run is started otherwise than that of a service (`is_service`).

    One that `captures` looks at the source first: a wrong password is reported without waiting for Spark. The source need
    not answer when `stop` is set.
    """
    import logging

    from jobs import log_lines

    quiet_log() if quiet else log_lines.configure()
    settings = file.load()
    for warning in settings.warnings:
        # Lines of the log are searched by this name, which must not depend on how the command line is cut into modules.
        logging.getLogger("jobs.command_line").warning(warning)
    if captures:
        from pipelines.capture import service as capture

        # Before Spark is started, which takes seconds.
        try:
            capture.check_source(settings, stop)
        except capture.StoppedBeforeStart:
            raise click.exceptions.Exit(0) from None
    start = functools.partial(session, file, settings, verb, is_service=is_service)
    if lazily:
        from pipelines.spark import session as sparks

        return settings, sparks.lazily(start)
    return settings, start()


def session(file: options.SettingsFile, settings: Settings, verb: str, *, is_service: bool = False) -> SparkSession:
    """A session for one command, on a JVM that is started for what it has to do."""
    from pipelines.settings import secrets
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import session as sparks

    conf, profile = dict(file.conf), spark_conf.CAPTURE if verb == "capture" else _profile(settings, is_service=is_service)
    if settings.lakehouse.single_driver:
        conf[spark_conf.SINGLE_DRIVER] = "true"
    store = {f"spark.hadoop.{name}": secrets.resolve(each) for name, each in settings.lakehouse.store.items()}
    return sparks.session(
        f"medallion {verb} {settings.name}",
        conf=conf,
        root=settings.lakehouse.root,
        hadoop=store,
        profile=profile,
        catalog=settings.lakehouse.catalog,
    )


SHORT_RUN_BYTES = 1 << 30
"""Of a bronze of at most so many bytes one run is short: about two million documents of 1 KB, as Parquet holds them."""


def _profile(settings: Settings, *, is_service: bool) -> Mapping[str, str]:
    """How the JVM of a command compiles: a run over little has ended before the optimizing compiler has paid for itself."""
    from pipelines.delta import local_log
    from pipelines.delta import tables as delta
    from pipelines.spark import conf as spark_conf

    if is_service:
        return {}
    bronze = local_log.folder(delta.layout(settings.lakehouse).bronze(settings.name))
    # What lies elsewhere cannot be measured without the session that is to be started: most runs go on from the one before.
    is_short = bronze is None or local_log.is_smaller(bronze, SHORT_RUN_BYTES)
    return spark_conf.SHORT_RUN if is_short else {}


def quiet_log() -> None:
    import logging

    from jobs import log_lines

    log_lines.configure(level=logging.ERROR)
