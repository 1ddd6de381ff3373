"""Commands that a person gives to a pipeline that exists: maintenance, signals, quarantine, rebuilds, repairs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from jobs.commands import application, interrupts, options
from pipelines import clock


@click.command()
@options.with_settings(
    options.collection,
    click.option(
        "--beside-writers",
        is_flag=True,
        help="Compact tables that somebody writes, too. Safe, but a merge beside it may have to start over.",
    ),
    options.as_json,
)
def maintain(file: options.SettingsFile, collection: str | None, beside_writers: bool, as_json: bool) -> None:
    """Compact the tables, and take away what nobody needs any more.

    OPTIMIZE with clustering, purge of deletion vectors, VACUUM within each table's retention, checkpoints, and the expiry
    that the settings under maintenance ask for. Nothing that silver, gold or a rebuild still needs is taken, and no table
    loses its position. Says what it did, with files and bytes before and after.
    """
    from pipelines.operations import maintain
    from pipelines.spark import parallel
    from pipelines.terminal import tables as report

    failures = parallel.Failures()
    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "maintain", quiet=True)
        run = functools.partial(
            maintain.run,
            spark,
            settings,
            collection=collection,
            beside_writers=beside_writers,
            stop=stop,
            failures=failures,
        )
        result = interrupts.finished(spark, stop, run)
    click.echo(maintain.to_json(result)) if as_json else report.maintained(result, is_whole=not failures.found)
    failures.raised()
    maintain.refuse(result)


_TAKEN_BY = {
    "--data-collections": ("execute-snapshot", "stop-snapshot"),
    "--type": ("execute-snapshot", "stop-snapshot", "pause-snapshot", "resume-snapshot"),
    "--filter": ("execute-snapshot",),
    "--message": ("log",),
}


@click.command("signal")
@click.argument(
    "type_",
    metavar="TYPE",
    type=click.Choice(["execute-snapshot", "stop-snapshot", "pause-snapshot", "resume-snapshot", "log"]),
)
@options.with_settings(
    click.option(
        "--data-collections",
        "--collection",
        "collections",
        multiple=True,
        metavar="REGEX",
        help="Which collections, as regular expressions over database.collection, with commas (repeatable).",
    ),
    click.option(
        "--type",
        "snapshot_type",
        type=click.Choice(["incremental", "blocking"]),
        help="execute-snapshot: does the stream go on beside it (the default), or wait for its end?",
    ),
    click.option(
        "--filter",
        "--additional-condition",
        "filter_",
        metavar="JSON",
        help="execute-snapshot: read only the documents that this find filter matches.",
    ),
    click.option("--message", metavar="TEXT", help="log: what to log; {} stands for the position."),
    click.option("--data", metavar="JSON", help="The signal's data as Debezium has it, instead of the options above."),
    click.option("--id", "id_", metavar="ID", help="What the signal is called in bronze and in notifications."),
    options.as_json,
)
def send_signal(
    file: options.SettingsFile,
    type_: str,
    collections: tuple[str, ...],
    snapshot_type: str | None,
    filter_: str | None,
    message: str | None,
    data: str | None,
    id_: str | None,
    as_json: bool,
) -> None:
    """Ask something of a capture while it runs, or of its next start.

    TYPE is execute-snapshot, stop-snapshot, pause-snapshot, resume-snapshot or log. The signal waits in the table
    ops/signals; the capture looks there every signal.poll.interval.ms.

    \b
    Examples:
      medallion signal execute-snapshot --config conf/shop.yml --data-collections shop.orders
      medallion signal execute-snapshot --config conf/shop.yml --data-collections 'shop\\..*' --type blocking
      medallion signal execute-snapshot --config conf/shop.yml --data-collections shop.orders --filter '{"state": "new"}'
      medallion signal stop-snapshot    --config conf/shop.yml
    """
    import json

    from cdc_core.properties import types as values
    from pipelines.channels import signals as channels

    content: dict[str, Any] = {}
    given = {"--data-collections": collections or None, "--type": snapshot_type, "--filter": filter_, "--message": message}
    written = {option for option, value in given.items() if value is not None}
    if data is not None:
        if written:
            raise click.UsageError("--data says everything; leave the other options out")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"--data is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise click.UsageError("--data must be a JSON object")
    for option in sorted(written):
        if type_ not in _TAKEN_BY[option]:
            raise click.UsageError(f"{type_} takes no {option}: leave it out")
    if snapshot_type == "blocking" and type_ != "execute-snapshot":
        raise click.UsageError(f"{type_} takes no --type but incremental: only such a snapshot can be stopped or paused")
    # Commas within a regular expression's braces or classes do not separate.
    named = [name.strip() for each in collections for name in values.split_top_level(each, ",") if name.strip()]
    if collections and not named:
        # Of an empty variable: a stop without names ends every snapshot.
        raise click.UsageError("--data-collections, where it is given, names collections")
    if named:
        content["data-collections"] = named
    if snapshot_type:
        content["type"] = snapshot_type
    if filter_ is not None:
        # Debezium's form has a filter for each collection; the option is one for all that are named.
        content["additional-conditions"] = [{"data-collection": each, "filter": filter_} for each in named]
    if message is not None:
        content["message"] = message
    settings, spark = application.opened(file, "signal", quiet=True, lazily=True)
    # One commit of a table: interrupted half way, nobody would know whether the signal was sent.
    with interrupts.undisturbed():
        sent = channels.send(spark, settings, type_=type_, data=content, id_=id_, ts_ms=clock.now_ms())
    said = f"signal {sent.id} ({sent.type}) is sent; the capture of {settings.name} does it at its next look"
    click.echo(json.dumps({"id": sent.id, "type": sent.type, "data": content}) if as_json else said)


@click.command()
@click.argument("action", type=click.Choice(["list", "replay"]))
@options.with_settings(
    options.collection,
    click.option("--all", "all_states", is_flag=True, help="list: those too whose stay has ended."),
    click.option("--documents", is_flag=True, help="list: show what the events hold, too. It is data of documents."),
    click.option("--token", "tokens", multiple=True, metavar="TOKEN", help="replay: only this event (repeatable)."),
    click.option(
        "--corrections",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='replay: new texts for events, as {"TOKEN": {"after": "{…}"}}.',
    ),
    options.as_json,
    options.take_over,
)
def quarantine(
    file: options.SettingsFile,
    action: str,
    collection: str | None,
    all_states: bool,
    documents: bool,
    tokens: tuple[str, ...],
    corrections: Path | None,
    as_json: bool,
    take_over: bool,
) -> None:
    """List events that could not be applied, or bring them back.

    An event that cannot be read waits in quarantine, and later updates of the same document wait with it; the row is
    marked incomplete meanwhile. `list` says which and why. `replay` appends those that can be read now, or are
    corrected, to bronze again, with their own place in the order; medallion silver then applies them. It writes bronze:
    stop the capture first.

    \b
    Examples:
      medallion quarantine list   --config conf/shop.yml
      medallion quarantine list   --config conf/shop.yml --collection shop.orders --documents --json
      medallion quarantine replay --config conf/shop.yml --collection shop.orders --corrections mended.json
    """
    from pipelines.operations import quarantine
    from pipelines.settings import file as settings_file
    from pipelines.spark import parallel
    from pipelines.terminal import tables as report

    failures = parallel.Failures()
    if (tokens or corrections) and not collection:
        raise click.UsageError("--token and --corrections are of one collection: name it with --collection")
    if action == "list":
        if tokens or corrections or take_over:
            raise click.UsageError("--token, --corrections and --take-over belong to replay")
        settings, spark = application.opened(file, "quarantine", quiet=True, lazily=True)
        events = quarantine.of_pipeline(
            spark,
            settings,
            collection=collection,
            all_states=all_states,
            with_texts=documents,
            most=None if as_json else report.SHOWN_EVENTS + 1,
            failures=failures,
        )
        click.echo(quarantine.to_json(events)) if as_json else report.quarantined(events, is_whole=not failures.found)
        return failures.raised()
    if all_states or documents:
        raise click.UsageError("--all and --documents belong to list")
    mended = None
    if corrections is not None:
        mended = quarantine.read_corrections(settings_file.content(corrections), where=str(corrections))
    settings, spark = application.opened(file, "quarantine", quiet=True)
    with interrupts.undisturbed():
        done = quarantine.replay_pipeline(
            spark,
            settings,
            collection=collection,
            tokens=tokens or None,
            corrections=mended,
            now_ms=clock.now_ms(),
            take_over=take_over,
            failures=failures,
        )
    click.echo(quarantine.to_json(done)) if as_json else report.replayed(done, is_whole=not failures.found)
    failures.raised()


@click.command()
@options.with_settings(
    click.option("--collection", required=True, metavar="DB.COLL", help="Whose table, as database.collection."),
    click.option(
        "--layer",
        default="silver",
        show_default=True,
        type=click.Choice(["silver", "gold"]),
        help="silver is rebuilt from bronze, gold from silver.",
    ),
    click.option("--dry-run", is_flag=True, help="Build and compare, and swap nothing."),
    click.option("--drop-missing", is_flag=True, help="Swap even where documents go that bronze does not explain."),
    options.as_json,
    options.take_over,
)
def rebuild(
    file: options.SettingsFile,
    collection: str,
    layer: str,
    dry_run: bool,
    drop_missing: bool,
    as_json: bool,
    take_over: bool,
) -> None:
    """Rebuild a silver or gold table, compare it with the live one, and swap.

    Reads all of bronze into a shadow table beside the live one. Columns whose values were rescued are retyped to what holds
    them all: int64 and double to DOUBLE where every value is exact, else STRING. The swap is one commit that carries the
    position; readers see the old table or the new one. Stop the layer's own job first. Killed at any moment, run it again.

    \b
    Examples:
      medallion rebuild --config conf/shop.yml --collection shop.orders --dry-run
      medallion rebuild --config conf/shop.yml --collection shop.orders
      medallion rebuild --config conf/shop.yml --collection shop.orders --layer gold
    """
    from pipelines.operations import rebuild
    from pipelines.silver import rebuild as silver_rebuild
    from pipelines.terminal import tables as report

    with interrupts.stopping() as stop:
        settings, spark = application.opened(file, "rebuild", quiet=True, lazily=True)
        run = functools.partial(
            rebuild.run,
            spark,
            settings,
            collection=collection,
            layer=rebuild.Layer(layer),
            take_over=take_over,
            is_trial=dry_run,
            drops_lost=drop_missing,
            stop=stop,
        )
        result = interrupts.finished(spark, stop, run)
    click.echo(rebuild.to_json(result)) if as_json else report.rebuilt(result)
    # A dry run has done its work, whatever it shows.
    if not dry_run:
        silver_rebuild.refuse(result)


@click.command()
@options.with_settings(
    click.option("--dry-run", is_flag=True, help="Tell what is missing, and change nothing."),
    options.as_json,
    options.take_over,
)
def repair(file: options.SettingsFile, dry_run: bool, as_json: bool, take_over: bool) -> None:
    """Mend tables whose log names data files that are not there.

    Files go missing by hand, by a VACUUM that did not wait, or with a disk; every reader of the table then ends with an
    error. This takes them out of the table by a commit that puts its position back, so that the next capture, silver
    and gold bring the rows back. Stop the pipeline first.

    \b
    Examples:
      medallion repair --config conf/shop.yml --dry-run
      medallion repair --config conf/shop.yml
    """
    from pipelines.operations import repair
    from pipelines.spark import parallel
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "repair", quiet=True)
    failures = parallel.Failures()
    found = repair.run(spark, settings, is_trial=dry_run, take_over=take_over, failures=failures)
    click.echo(repair.to_json(found)) if as_json else report.repaired(found, is_whole=not failures.found)
    failures.raised()
