"""What a command starts with: its log, its settings, and a Spark session."""

from __future__ import annotations

import functools
import threading
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
    stop: threading.Event | None = None,
) -> tuple[Settings, SparkSession]:
    """The settings and a session for one command, with the log configured; `lazily`, Spark starts when it is needed.

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
    start = functools.partial(session, file, settings, verb)
    if lazily:
        from pipelines.spark import session as sparks

        return settings, sparks.lazily(start)
    return settings, start()


def session(file: options.SettingsFile, settings: Settings, verb: str) -> SparkSession:
    from pipelines.settings import secrets
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import session as sparks

    conf, profile = dict(file.conf), spark_conf.CAPTURE if verb == "capture" else None
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


def quiet_log() -> None:
    import logging

    from jobs import log_lines

    log_lines.configure(level=logging.ERROR)
