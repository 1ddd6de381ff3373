"""Commands that look and write nothing, but for `verify --repair`."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.commands import application, interrupts, options


@click.command()
@options.with_settings()
def check(file: options.SettingsFile) -> None:
    """Is everything there that the pipeline needs?

    Reads the settings, then asks the source: reachable, a replica set, new enough, rights, oplog window, pre-images.
    A store that is no folder is tried: an object is written twice, listed and removed. Says what to mend. Changes
    nothing else.
    """
    from pipelines.operations import check
    from pipelines.terminal import tables as report

    application.quiet_log()
    settings = file.load()
    findings = check.run(settings, lambda: application.session(file, settings, "check"))
    report.findings(findings)
    # After the report: the exit code is for scripts, the findings for people.
    check.refuse(findings)


@click.command("cut")
@click.argument("action", type=click.Choice(["show", "list"]))
@options.with_settings(
    click.option("--cut", "name", metavar="NAME", help="show: this cut, and not the newest."),
    click.option(
        "--as-of", metavar="TIME", help="show: no cut that was made, but the tables with history: true at any past time."
    ),
    options.as_json,
)
def show_cut(file: options.SettingsFile, action: str, name: str | None, as_of: str | None, as_json: bool) -> None:
    """The cuts that medallion gold --as-of made: which version of each table shows the source at one time.

    `show` tells the newest, with a query that reads all tables there; `list` tells all. For a time
    that nobody made a cut of, --as-of tells how the tables of versions (history: true) are read.

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
        raise click.UsageError("--cut and --as-of belong to show")
    if name is not None and as_of is not None:
        raise click.UsageError("--cut or --as-of, not both")
    if as_of is not None:
        times.parsed(as_of)
    settings, spark = application.opened(file, "cut", quiet=True, lazily=True)
    found = cut.read(spark, settings) if as_of is None else []
    if action == "list":
        click.echo(json.dumps([dataclasses.asdict(each) for each in found])) if as_json else report.cuts(found)
        return
    one = cut.named(found, name) if as_of is None else cut.past(spark, settings, as_of=as_of)
    click.echo(json.dumps({**dataclasses.asdict(one), "sql": one.sql})) if as_json else report.cut(one)


@click.command("models")
@click.argument("action", type=click.Choice(["check"]))
@options.with_settings(options.as_json)
def check_models(file: options.SettingsFile, action: str, as_json: bool) -> None:
    """Read the SQL models and their expectations, and show what a run would do.

    Every query is parsed and analysed over gold as it is; all mistakes come at once. Writes nothing.

    \b
    Example:
      medallion models check --config conf/shop.yml
    """
    import dataclasses
    import json

    from pipelines.gold import publish
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "models", quiet=True)
    found = publish.checked(spark, settings)
    click.echo(json.dumps([dataclasses.asdict(each) for each in found])) if as_json else report.models(found)


@click.command()
@options.with_settings(
    options.as_json,
    click.option(
        "--html",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write it as one page that needs no network, with how it went lately.",
    ),
)
def status(file: options.SettingsFile, as_json: bool, html: Path | None) -> None:
    """Where each layer stands: position, lag, rows, rates, what was rescued, who writes.

    Reads tables and asks the source for its oplog; claims nothing, changes nothing.
    """
    from pipelines.operations import status as pipeline_status
    from pipelines.terminal import tables as report

    if as_json and html is not None:
        raise click.UsageError("--json or --html, not both")
    settings, spark = application.opened(file, "status", quiet=True, lazily=True)
    if html is not None:
        from pipelines.page import page as pages

        pages.write(html, pages.text(spark, settings))
        click.echo(f"the page is in {html}")
        return
    found = pipeline_status.read(spark, settings)
    click.echo(pipeline_status.to_json(found)) if as_json else report.status(found)
    pipeline_status.refuse(found)


@click.command()
@options.with_settings(
    options.collection,
    click.option(
        "--layer",
        default="gold",
        show_default=True,
        type=click.Choice(["gold", "silver", "bronze"]),
        help="What is compared with the source; bronze: what its events come to.",
    ),
    click.option("--sample", metavar="N", type=click.IntRange(1, 20_000), help="Look at N documents and N rows only."),
    click.option(
        "--as-of",
        default="now",
        show_default=True,
        metavar="TIME",
        help="Read the source at this cluster time: seconds, seconds:increment, or 2026-05-01T08:00:00Z; within minutes.",
    ),
    click.option(
        "--max-docs-per-second",
        metavar="N",
        type=click.IntRange(1),
        help="Read no more documents a second from the source, all readers together.",
    ),
    click.option("--repair", is_flag=True, help="Read what differs again, through bronze, and look once more."),
    options.as_json,
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
) -> None:
    """Is gold (or silver, or bronze) what MongoDB holds?

    Compares every document with its row, where both lie, at cluster times that are known, also while the source is written
    to, and names by key and path what is missing, extra or different. Exit code 3 where something is. Changes nothing, but
    with --repair, which asks the capture for what differs, and runs the layers once where no capture runs.

    \b
    Examples:
      medallion verify --config conf/shop.yml
      medallion verify --config conf/shop.yml --collection shop.orders --max-docs-per-second 2000
      medallion verify --config conf/shop.yml --sample 1000 --json
      medallion verify --config conf/shop.yml --repair
    """
    from pipelines.terminal import tables as report
    from pipelines.verify import run as verify

    # What cannot be read is refused before Spark is started.
    if verify.as_of(as_of) is not None and sample is not None:
        raise click.UsageError("--sample looks at documents as they are now: leave --as-of out")
    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "verify", quiet=True)
        wanted = verify.VerifyOptions(
            collection=collection,
            layer=verify.Layer(layer),
            sample=sample,
            as_of=as_of,
            documents_per_second=max_docs_per_second,
            repair=repair,
        )
        result = verify.run(spark, settings, wanted, stop=stop)
    click.echo(verify.to_json(result)) if as_json else report.verified(result)
    verify.refuse(result)


@click.command()
@options.with_settings(options.collection, options.as_json)
def schema(file: options.SettingsFile, collection: str | None, as_json: bool) -> None:
    """Which columns each collection has, and what changed them when.

    Columns come from the documents and are only ever widened. A change shows the batch that brought it, with the time
    and the sequence of the first event there; `rebuilt` lines come from medallion rebuild.

    \b
    Example:
      medallion schema --config conf/shop.yml --collection shop.orders
    """
    from pipelines.operations import schema as evolution
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "schema", quiet=True, lazily=True)
    found = evolution.read(spark, settings, collection=collection)
    click.echo(evolution.to_json(found)) if as_json else report.schemas(found)
