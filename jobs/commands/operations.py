"""Commands that operate an existing pipeline: maintain, signal, quarantine, rebuild, repair."""

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
        help="Also compact tables with a live writer. Safe, but a concurrent merge may have to start over.",
    ),
    options.as_json,
    options.take_over,
)
def maintain(
    file: options.SettingsFile, collection: str | None, beside_writers: bool, as_json: bool, take_over: bool
) -> None:
    """Compact the tables, and remove data past its retention.

    OPTIMIZE with clustering, purge of deletion vectors, VACUUM with each table's retention, checkpoints, and the expiry
    configured under maintenance. Removes nothing that silver or gold still has to read, and no table loses its position.
    Shows what was done, with files and bytes before and after.
    """
    from pipelines.operations import maintain
    from pipelines.spark import parallel
    from pipelines.terminal import live_lines
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
            take_over=take_over,
            stop=stop,
            failures=failures,
            progress=live_lines.work_progress(),
        )
        with live_lines.waiting("maintain"):
            result = interrupts.finished(spark, stop, run)
    click.echo(application.json_text(result)) if as_json else report.maintained(result, is_whole=not failures.by_name)
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
        help="Collections, as regular expressions for database.collection, separated by commas (repeatable).",
    ),
    click.option(
        "--type",
        "snapshot_type",
        type=click.Choice(["incremental", "blocking"]),
        help="execute-snapshot: run beside the stream (incremental, the default), or pause it (blocking).",
    ),
    click.option(
        "--filter",
        "--additional-condition",
        "filter_",
        metavar="JSON",
        help="execute-snapshot: read only documents that match this find filter.",
    ),
    click.option("--message", metavar="TEXT", help="log: the text to log; {} is replaced by the position."),
    click.option("--data", metavar="JSON", help="The signal's data in Debezium's format, instead of the options above."),
    click.option("--id", "id_", metavar="ID", help="The signal's identifier in bronze and in notifications."),
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
    """Send a signal to the capture: it handles it while it runs, or at its next start.

    TYPE is execute-snapshot, stop-snapshot, pause-snapshot, resume-snapshot or log. The signal is stored in the table
    ops/signals, which the capture polls every signal.poll.interval.ms.

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
    from pipelines.delta import tables as delta

    content: dict[str, Any] = {}
    inputs = {"--data-collections": collections or None, "--type": snapshot_type, "--filter": filter_, "--message": message}
    used_options = {option for option, value in inputs.items() if value is not None}
    if data is not None:
        if used_options:
            raise click.UsageError("--data contains the whole signal: leave out the other options")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"--data is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise click.UsageError("--data must be a JSON object")
    for option in sorted(used_options):
        if type_ not in _TAKEN_BY[option]:
            raise click.UsageError(f"{type_} does not take {option}: leave it out")
    if snapshot_type == "blocking" and type_ != "execute-snapshot":
        raise click.UsageError(f"{type_} only takes --type incremental: other snapshots cannot be stopped or paused")
    # Commas inside a regular expression's braces or classes are no separators.
    patterns = [name.strip() for each in collections for name in values.split_top_level(each, ",") if name.strip()]
    if collections and not patterns:
        # Probably an empty shell variable: a stop without names would end every snapshot.
        raise click.UsageError("--data-collections must not be empty")
    if patterns:
        content["data-collections"] = patterns
    if snapshot_type:
        content["type"] = snapshot_type
    if filter_ is not None:
        # Debezium's signal has one filter per collection; the option applies to all named ones.
        content["additional-conditions"] = [{"data-collection": each, "filter": filter_} for each in patterns]
    if message is not None:
        content["message"] = message
    settings, spark = application.opened(file, "signal", quiet=True, lazily=True)
    # One commit: after an interrupt nobody would know whether the signal was sent.
    with interrupts.undisturbed():
        signal = channels.send(spark, settings, type_=type_, data=content, id_=id_, ts_ms=clock.now_ms())
    bronze = delta.layout(settings.lakehouse).bronze(settings.name)
    # A relative root is that of another lakehouse in another working directory, where no capture finds the signal.
    when = "next poll, or when it starts" if delta.exists(spark, bronze) else f"first start: there is no {bronze.label} yet"
    message = f"signal {signal.id} ({signal.type}) sent; the capture of {settings.name} handles it at its {when}"
    click.echo(json.dumps({"id": signal.id, "type": signal.type, "data": content}) if as_json else message)


@click.command()
@click.argument("action", type=click.Choice(["list", "replay"]))
@options.with_settings(
    options.collection,
    click.option("--all", "all_states", is_flag=True, help="list: include events that are no longer held."),
    click.option("--documents", is_flag=True, help="list: also show the contents of the events (document data)."),
    click.option("--token", "tokens", multiple=True, metavar="TOKEN", help="replay: only this event (repeatable)."),
    click.option(
        "--corrections",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='replay: corrected contents of events, as {"TOKEN": {"after": "{…}"}}.',
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
    """List events that could not be applied, or replay them.

    An event that cannot be read is quarantined, and so are later partial updates of the same document; its row is marked
    incomplete. `list` shows the events and the reasons. `replay` appends events that can now be read, or that you corrected, to
    bronze again, at their original place in the order; then run medallion silver. Stop the capture before a replay, because it
    writes to bronze.

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
        raise click.UsageError("--token and --corrections also need --collection")
    if action == "list":
        if tokens or corrections or take_over:
            raise click.UsageError("--token, --corrections and --take-over are options of replay")
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
        if as_json:
            for part in quarantine.json_parts(events):
                click.echo(part, nl=False)
            click.echo()
        else:
            listed = [*events]
            report.quarantined(listed, is_whole=not failures.by_name)
        return failures.raised()
    if all_states or documents:
        raise click.UsageError("--all and --documents are options of list")
    texts_by_token = None
    if corrections is not None:
        texts_by_token = quarantine.read_corrections(settings_file.content(corrections), where=str(corrections))
    settings, spark = application.opened(file, "quarantine", quiet=True)
    with interrupts.undisturbed():
        replays = quarantine.replay_pipeline(
            spark,
            settings,
            collection=collection,
            tokens=tokens or None,
            corrections=texts_by_token,
            now_ms=clock.now_ms(),
            take_over=take_over,
            failures=failures,
        )
    click.echo(quarantine.to_json(replays)) if as_json else report.replayed(replays, is_whole=not failures.by_name)
    failures.raised()


@click.command()
@options.with_settings(
    click.option("--collection", required=True, metavar="DB.COLL", help="The collection, as database.collection."),
    click.option(
        "--layer",
        default="silver",
        show_default=True,
        type=click.Choice(["silver", "gold"]),
        help="The table to rebuild: silver from bronze, or gold from silver.",
    ),
    click.option("--dry-run", is_flag=True, help="Build and compare, but do not swap."),
    click.option("--drop-missing", is_flag=True, help="Swap even if documents are lost that bronze does not explain."),
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
    """Rebuild a silver or gold table, compare it with the live one, and swap them.

    Reads all of bronze into a shadow table. Columns with rescued values get a type that fits all values: int64 and double become
    DOUBLE if every value is exact, otherwise STRING. The swap is one commit that carries the position; readers see the old table
    or the new one. Stop the layer's job first. If it is killed, run it again.

    \b
    Examples:
      medallion rebuild --config conf/shop.yml --collection shop.orders --dry-run
      medallion rebuild --config conf/shop.yml --collection shop.orders
      medallion rebuild --config conf/shop.yml --collection shop.orders --layer gold
    """
    from pipelines.operations import rebuild
    from pipelines.silver import rebuild as silver_rebuild
    from pipelines.terminal import live_lines
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
        with live_lines.waiting("rebuild", is_logged=True):
            result = interrupts.finished(spark, stop, run)
    click.echo(application.json_text(result)) if as_json else report.rebuilt(result)
    # A dry run succeeds whatever it shows.
    if not dry_run:
        silver_rebuild.refuse(result)


@click.command()
@options.with_settings(
    click.option("--dry-run", is_flag=True, help="Show what is missing, and change nothing."),
    options.as_json,
    options.take_over,
)
def repair(file: options.SettingsFile, dry_run: bool, as_json: bool, take_over: bool) -> None:
    """Repair tables whose log names data files that are missing or damaged.

    Files get lost when someone deletes them, through a VACUUM without retention, or with a disk; then every read of the table
    fails. This command removes them from the table in a commit that also moves its position back, so that the next run of capture,
    silver and gold restores the rows. It says what to do where that is not enough, and which rows are lost. Stop the pipeline first.

    \b
    Examples:
      medallion repair --config conf/shop.yml --dry-run
      medallion repair --config conf/shop.yml
    """
    from pipelines.operations import repair
    from pipelines.spark import parallel
    from pipelines.terminal import live_lines
    from pipelines.terminal import tables as report

    settings, spark = application.opened(file, "repair", quiet=True)
    failures = parallel.Failures()
    with live_lines.waiting("repair", is_logged=True):
        results = repair.run(spark, settings, is_trial=dry_run, take_over=take_over, failures=failures)
    is_whole = not failures.by_name
    click.echo(application.json_text({"tables": results})) if as_json else report.repaired(results, is_whole=is_whole)
    failures.raised()
