"""Commands that move data: capture, silver, gold, and all of them at once."""

from __future__ import annotations

import functools

import click

from jobs.commands import application, interrupts, options


@click.command()
@options.with_settings(options.once(default=False), options.take_over)
def capture(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Land every change event in the bronze table.

    The first start takes a snapshot of the collections while the stream is already open. SIGTERM commits what was read
    and ends within seconds. There can be one capture a table; a second one stops and has changed nothing.
    """
    from pipelines.capture import service as capture
    from pipelines.page import page as pages
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop, report.progress() as progress:
        settings, spark = application.opened(file, "capture", captures=True, stop=stop)
        result = capture.run(
            spark,
            settings,
            once=once,
            take_over=take_over,
            stop=stop,
            progress=progress,
            sessions=sparks.sessions(spark),
            page=pages.text,
        )
    if stop.is_set():
        # A snapshot's reads wait for a server that is silent, and the process would wait for their threads.
        interrupts.abandon()
    report.result("capture", result)


@click.command()
@options.with_settings(options.once(default=True), options.take_over)
def silver(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Apply captured events to the silver tables, one a collection."""
    from pipelines.silver import run as silver
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop:
        # A run that finds nothing new ends without the seconds that a start of Spark costs.
        settings, spark = application.opened(file, "silver", lazily=True, is_service=not once)
        # Stays None where the stop cancelled what was running: then there is no result to show.
        result = None
        with sparks.cancelling(spark, stop):
            result = silver.run(spark, settings, once=once, take_over=take_over, sessions=sparks.sessions(spark), stop=stop)
    if result is not None:
        if once and not result.batch:
            report.nothing_yet("silver", "bronze holds nothing", "capture")
        report.result("silver", result)


@click.command()
@options.with_settings(
    options.once(default=True),
    options.take_over,
    click.option("--models", "only_models", is_flag=True, help="Only the SQL models, over gold as it is."),
    click.option("--full-refresh", is_flag=True, help="Make every model whole once more, the incremental ones too."),
    click.option(
        "--as-of",
        metavar="TIME",
        help="Bring silver and gold to one cluster time, transactions whole: now, SECONDS:INCREMENT, or a time.",
    ),
)
def gold(
    file: options.SettingsFile, once: bool, take_over: bool, only_models: bool, full_refresh: bool, as_of: str | None
) -> None:
    """Bring the gold tables up to date: current documents, then SQL models, for analysts.

    What expectations refuse is not published: the last good version stays, and the exit code is 3. With --as-of all
    tables show the source at the same time, and ops/cuts names their versions; silver is brought up to there, too.
    """
    if as_of is not None:
        if not once or only_models or full_refresh:
            raise click.UsageError("--as-of is one run of everything: leave --continuous, --models and --full-refresh out")
        # A cut is another pipeline behind the same verb: for a person it is gold, at a time that they name.
        return _cut(file, as_of, take_over)
    from pipelines.bronze import registry
    from pipelines.gold import publish
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "gold", lazily=True, is_service=not once)
        results: dict[str, object] = {}
        with sparks.cancelling(spark, stop):
            results = publish.run(
                spark,
                settings,
                once=once,
                take_over=take_over,
                only_models=only_models,
                is_anew=full_refresh,
                sessions=sparks.sessions(spark),
                stop=stop,
            )
            if once and "gold" in results and not registry.read(spark, settings).namespaces:
                report.nothing_yet("gold", "silver holds no collection", "silver")
    for name, result in results.items():
        report.result(name, result)


def _cut(file: options.SettingsFile, as_of: str, take_over: bool) -> None:
    from cdc_core.gold import cut as times
    from pipelines.operations import cut_requests
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    # A time that cannot be read is refused before Spark is started.
    times.parsed(as_of)
    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "gold")
        run = functools.partial(
            cut_requests.run, spark, settings, as_of=as_of, take_over=take_over, sessions=sparks.sessions(spark), stop=stop
        )
        made = interrupts.finished(spark, stop, run)
    report.cut(made)


@click.command()
@options.with_settings(options.once(default=False), options.take_over)
def run(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Capture, silver and gold in one Spark application, until stopped.

    With --once: each layer in turn, up to what was there at the start.
    """
    from pipelines import run as layers
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop, report.progress() as progress:
        settings, spark = application.opened(file, "run", captures=True, is_service=not once, stop=stop)
        results = layers.run_again(
            spark, settings, again=functools.partial(application.session, file, settings, "run", is_service=not once), once=once, take_over=take_over, stop=stop,
            progress=progress,
        )  # fmt: skip
    for layer, result in results.items():
        report.result(layer, result)
