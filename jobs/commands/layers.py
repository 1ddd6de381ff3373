"""Commands that move data: capture, silver, gold, and run for all of them."""

from __future__ import annotations

import functools

import click

from jobs.commands import application, interrupts, options


@click.command()
@options.with_settings(options.once(default=False), options.take_over)
def capture(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Append every change event to the bronze table.

    The first start also takes a snapshot of the collections. On SIGTERM the capture commits what it has read and exits within
    seconds. A table has one capture; a second one stops and changes nothing.
    """
    from pipelines.capture import service as capture
    from pipelines.capture.progress import refuse_unread
    from pipelines.page import page as pages
    from pipelines.spark import session as sparks
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop, live_lines.capture_progress() as progress:
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
        # A snapshot's threads may wait for a server that does not answer, and the process would wait for them.
        interrupts.abandon()
    report.result("capture", result)
    if once or not stop.is_set():  # it also ends by itself where `snapshot.mode` follows no stream
        refuse_unread(result, is_stopped=stop.is_set())


@click.command()
@options.with_settings(options.once(default=True), options.take_over)
def silver(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Apply captured events to the silver tables, one per collection."""
    from pipelines.delta import tables as delta
    from pipelines.silver import run as silver
    from pipelines.spark import session as sparks
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop:
        # A run without new events ends without starting Spark, which takes seconds.
        settings, spark = application.opened(file, "silver", lazily=True, is_service=not once)
        # Stays None if the stop cancelled the run.
        result = None
        with sparks.cancelling(spark, stop), live_lines.waiting("silver"):
            result = silver.run(
                spark,
                settings,
                once=once,
                take_over=take_over,
                sessions=sparks.sessions(spark),
                stop=stop,
                progress=live_lines.work_progress(),
            )
    if result is not None:
        if once and not result.batch:
            bronze = delta.layout(settings.lakehouse).bronze(settings.name)
            report.nothing_yet("silver", f"{bronze.label}: bronze is empty", "capture")
        report.result("silver", result)


@click.command()
@options.with_settings(
    options.once(default=True),
    options.take_over,
    click.option("--models", "only_models", is_flag=True, help="Run only the SQL models, on the current gold tables."),
    click.option("--full-refresh", is_flag=True, help="Compute every model in full, including incremental ones."),
    click.option(
        "--as-of",
        metavar="TIME",
        help="Make a cut: bring silver and gold to one cluster time, without splitting transactions. now, SECONDS:INCREMENT, or a time.",
    ),
)
def gold(
    file: options.SettingsFile, once: bool, take_over: bool, only_models: bool, full_refresh: bool, as_of: str | None
) -> None:
    """Bring the gold tables up to date: current documents, then SQL models.

    A version that does not meet its expectations is not published: the last good version stays, and the exit code is 3.
    --as-of brings silver and all gold tables to the same time of the source, and records their versions in ops/cuts.
    """
    if as_of is not None:
        if not once or only_models or full_refresh:
            raise click.UsageError("--as-of runs everything once: leave out --continuous, --models and --full-refresh")
        # A cut runs another pipeline, but for users it is gold at a given time.
        return _cut(file, as_of, take_over)
    from pipelines.bronze import registry
    from pipelines.gold import publish
    from pipelines.spark import session as sparks
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "gold", lazily=True, is_service=not once)
        results: dict[str, object] = {}
        with sparks.cancelling(spark, stop), live_lines.waiting("gold"):
            results = publish.run(
                spark,
                settings,
                once=once,
                take_over=take_over,
                only_models=only_models,
                is_anew=full_refresh,
                sessions=sparks.sessions(spark),
                stop=stop,
                progress=live_lines.work_progress(),
            )
            if once and "gold" in results and not registry.read(spark, settings).namespaces:
                report.nothing_yet("gold", "silver has no collections", "silver")
    for name, result in results.items():
        report.result(name, result)


def _cut(file: options.SettingsFile, as_of: str, take_over: bool) -> None:
    from cdc_core.gold import cut as times
    from pipelines.operations import cut_requests
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    # Refuse an invalid time before Spark starts.
    times.parsed(as_of)
    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "gold")
        run = functools.partial(
            cut_requests.run, spark, settings, as_of=as_of, take_over=take_over, sessions=sparks.sessions(spark), stop=stop
        )
        cut = interrupts.finished(spark, stop, run)
    report.cut(cut)


@click.command()
@options.with_settings(options.once(default=False), options.take_over)
def run(file: options.SettingsFile, once: bool, take_over: bool) -> None:
    """Run capture, silver and gold in one Spark application, until stopped.

    With --once: runs each layer once, up to what is there at the start.
    """
    from pipelines import run as layers
    from pipelines.capture.progress import CaptureResult, refuse_unread
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop, live_lines.capture_progress() as progress:
        settings, spark = application.opened(file, "run", captures=True, is_service=not once, stop=stop)
        results = layers.run_again(
            spark, settings, again=functools.partial(application.session, file, settings, "run", is_service=not once), once=once, take_over=take_over, stop=stop,
            progress=progress, turn=live_lines.waiting, work=live_lines.work_progress(is_service=not once),
        )  # fmt: skip
    for layer, result in results.items():
        report.result(layer, result)
    if once and isinstance(captured := results.get("capture"), CaptureResult):
        refuse_unread(captured, is_stopped=stop.is_set())
