"""Commands that only read, except for `verify --repair`."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.commands import application, interrupts, options


@click.command()
@options.with_settings()
def check(file: options.SettingsFile) -> None:
    """Check that everything the pipeline needs is there.

    Validates the settings, then tests the source: connection, replica set, version, privileges, oplog window, pre-images, and
    whether a capture can go on from bronze's position. If the tables are in an object store, writes an object twice, lists it
    and removes it. Says what to fix. Changes nothing else.
    """
    from pipelines.operations import check
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    application.quiet_log()
    settings = file.load()
    with live_lines.waiting("checking the settings, the lakehouse and the source"):
        findings = check.run(settings, lambda: application.session(file, settings, "check"))
    report.findings(findings)
    # After the report, because this raises for the exit code.
    check.refuse(findings)


@click.command("cut")
@click.argument("action", type=click.Choice(["show", "list"]))
@options.with_settings(
    click.option("--cut", "name", metavar="NAME", help="show: this cut instead of the newest."),
    click.option(
        "--as-of", metavar="TIME", help="show: instead of a cut, read the tables with history: true at this past time."
    ),
    options.as_json,
)
def show_cut(file: options.SettingsFile, action: str, name: str | None, as_of: str | None, as_json: bool) -> None:
    """Show the cuts made by medallion gold --as-of: versions of all tables at the same time of the source.

    `show` prints the newest cut, with a query that reads all of its tables; `list` prints all cuts. `show --as-of` needs
    no cut: it prints a query over the history tables (history: true) for any past time.

    \b
    Examples:
      medallion gold --config conf/shop.yml --as-of now
      medallion cut show --config conf/shop.yml
      medallion cut show --config conf/shop.yml --as-of 2026-05-01T08:00:00Z
    """
    import dataclasses
    import json

    from cdc_core.gold import cut as times
    from pipelines.operations import cut
    from pipelines.terminal import tables as report

    if action == "list" and (name is not None or as_of is not None):
        raise click.UsageError("--cut and --as-of are options of show")
    if name is not None and as_of is not None:
        raise click.UsageError("use --cut or --as-of, not both")
    if as_of is not None:
        times.parsed(as_of)
    settings, spark = application.opened(file, "cut", quiet=True, lazily=True)
    cuts = cut.read(spark, settings) if as_of is None else []
    if action == "list":
        click.echo(json.dumps([dataclasses.asdict(each) for each in cuts])) if as_json else report.cuts(cuts)
        return
    chosen_cut = cut.named(cuts, name) if as_of is None else cut.past(spark, settings, as_of=as_of)
    click.echo(json.dumps({**dataclasses.asdict(chosen_cut), "sql": chosen_cut.sql})) if as_json else report.cut(chosen_cut)


@click.command("models")
@click.argument("action", type=click.Choice(["check"]))
@options.with_settings(options.as_json)
def check_models(file: options.SettingsFile, action: str, as_json: bool) -> None:
    """Validate the SQL models and their expectations, and show what a run would do.

    Parses and analyses every query against the current gold tables, and reports all mistakes at once. Writes nothing.

    \b
    Example:
      medallion models check --config conf/shop.yml
    """
    import dataclasses
    import json

    from pipelines.gold import publish
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "models", quiet=True)
    checks = publish.checked(spark, settings)
    click.echo(json.dumps([dataclasses.asdict(each) for each in checks])) if as_json else report.models(checks)


@click.command()
@options.with_settings(
    options.as_json,
    click.option(
        "--html",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write a self-contained HTML page, with the recent history.",
    ),
)
def status(file: options.SettingsFile, as_json: bool, html: Path | None) -> None:
    """Show position, lag, rows, throughput, rescued values and writer of each layer.

    Reads the tables and the source's oplog. Claims nothing and changes nothing.
    """
    from pipelines.delta import tables as delta
    from pipelines.operations import status as pipeline_status
    from pipelines.terminal import tables as report

    if as_json and html is not None:
        raise click.UsageError("use --json or --html, not both")
    settings, spark = application.opened(file, "status", quiet=True, lazily=True)
    if html is not None:
        from pipelines.page import page as pages

        content = pages.read(spark, settings)
        pages.write(html, pages.rendered(content))
        click.echo(f"wrote {html}")
        return pipeline_status.refuse(content.status)
    state = pipeline_status.read(spark, settings)
    bronze = delta.layout(settings.lakehouse).bronze(settings.name)
    click.echo(pipeline_status.to_json(state)) if as_json else report.status(state, bronze=bronze.label)
    pipeline_status.refuse(state)


@click.command()
@options.with_settings(
    options.collection,
    click.option(
        "--layer",
        default="gold",
        show_default=True,
        type=click.Choice(["gold", "silver", "bronze"]),
        help="The layer to compare with the source; for bronze, the result of its events.",
    ),
    click.option("--sample", metavar="N", type=click.IntRange(1, 20_000), help="Compare only N documents and N rows."),
    click.option(
        "--as-of",
        default="now",
        show_default=True,
        metavar="TIME",
        help="Read the source at this cluster time: seconds, seconds:increment, or 2026-05-01T08:00:00Z. Only the last minutes.",
    ),
    click.option(
        "--max-docs-per-second",
        metavar="N",
        type=click.IntRange(1),
        help="Limit the documents per second read from the source, in total.",
    ),
    click.option("--repair", is_flag=True, help="Read what differs again, through bronze, and compare once more."),
    options.as_json,
    options.take_over,
)
def verify(
    file: options.SettingsFile,
    collection: str | None,
    layer: str,
    sample: int | None,
    as_of: str,
    max_docs_per_second: int | None,
    repair: bool,
    as_json: bool,
    take_over: bool,
) -> None:
    """Compare gold (or silver, or bronze) with MongoDB, document by document.

    Lists by key and path what is missing, extra or different; then the exit code is 3. Works while the source is written to.
    Changes nothing, except with --repair: this asks the running capture to read what differs again, or runs all layers once if no
    capture is running.

    \b
    Examples:
      medallion verify --config conf/shop.yml
      medallion verify --config conf/shop.yml --collection shop.orders --max-docs-per-second 2000
      medallion verify --config conf/shop.yml --sample 1000 --json
      medallion verify --config conf/shop.yml --repair
    """
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report
    from pipelines.verify import run as verify

    # Refuse an invalid time before Spark starts.
    if verify.as_of(as_of) is not None and sample is not None:
        raise click.UsageError("--sample compares current documents: leave out --as-of")
    if take_over and not repair:
        raise click.UsageError("--take-over is an option of --repair: a comparison claims no table")
    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "verify", quiet=True)
        verify_options = verify.VerifyOptions(
            collection=collection,
            layer=verify.Layer(layer),
            sample=sample,
            as_of=as_of,
            documents_per_second=max_docs_per_second,
            repair=repair,
            take_over=take_over,
        )
        with live_lines.waiting("verify"):
            result = verify.run(spark, settings, verify_options, stop=stop, progress=live_lines.work_progress())
    click.echo(verify.to_json(result)) if as_json else report.verified(result)
    verify.refuse(result)


@click.command()
@options.with_settings(options.collection, options.as_json)
def schema(file: options.SettingsFile, collection: str | None, as_json: bool) -> None:
    """Show the columns of each collection, and when and why they changed.

    Columns are inferred from the documents and are only ever widened. A change shows the batch that caused it, with the time
    and sequence of the batch's first event. `rebuilt` lines come from medallion rebuild.

    \b
    Example:
      medallion schema --config conf/shop.yml --collection shop.orders
    """
    from pipelines.operations import schema as evolution
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "schema", quiet=True, lazily=True)
    schemas = evolution.read(spark, settings, collection=collection)
    click.echo(application.json_text({"collections": schemas})) if as_json else report.schemas(schemas)
