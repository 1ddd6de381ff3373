"""The command `medallion`: arguments, then settings, then one pipeline, then an exit code.

    0   done
    2   settings or arguments are wrong
    3   a person must decide
    75  temporary, try again
    1   a bug

What a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdc_core import errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

BUG, WRONG, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is its exit code. Raises nothing."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return medallion.main(given, prog_name="medallion", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return WRONG
    except errors.MedallionError as error:
        _say(str(error))
        return _debugged(given, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except Exception as error:
        if _is_of_interrupt(error):
            return _interrupted()
        known = _translated(error)
        if known is not None:
            _say(str(known))
            return _debugged(given, known.exit_code)
        _say(f"this is a bug: {type(error).__name__} {_place(error)}; --debug shows the traceback")
        return _debugged(given, BUG)


def _interrupted() -> int:
    _say("stopped at once; what was committed stays, the rest is read again at the next start")
    return INTERRUPTED


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Whether the error came while an interrupt ended the command: Spark is gone by then, and says so."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _translated(error: Exception) -> errors.MedallionError | None:
    """What Spark raised, in our words; only where Spark was started."""
    if "pyspark" not in sys.modules:
        return None
    from pipelines.spark import failures

    return failures.translated(error)


def job(verb: str, *options: str) -> None:
    """What a file under `jobs/` does: the command `verb` with the file's own arguments, and its exit code."""
    code = main([verb, *options, *sys.argv[1:]])
    if code:
        sys.exit(code)


EXAMPLES = """\b
Examples:
  medallion demo                                see it work, with a MongoDB of its own
  medallion check   --config conf/shop.yml      is everything there that the pipeline needs?
  medallion run     --config conf/shop.yml      capture, silver and gold, until Ctrl-C
  medallion status  --config conf/shop.yml      where each layer stands, and how far behind
  medallion import-debezium connector.json      a settings file from a Debezium connector

\b
Exit codes: 0 done, 2 settings or arguments are wrong, 3 a person must decide,
75 temporary (try again), 1 a bug.
"""


class _InOrder(click.Group):
    """Commands in the order in which a person meets them, with their first sentence whole."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        told = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(told)


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    from importlib import metadata

    if wanted:
        try:
            click.echo(f"mongo-medallion {metadata.version('mongo-medallion')}")
        except metadata.PackageNotFoundError:
            click.echo("mongo-medallion, from a checkout that is not installed")
        ctx.exit()


@click.group(
    cls=_InOrder,
    help="MongoDB change data capture into a Delta Lake medallion.\n\n"
    "A capture service lands every change event in one bronze table; silver applies them to one table a collection; "
    "gold holds the current documents for analysts. Each table carries its own position: every command may be killed "
    "and started again.",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def medallion() -> None:
    pass


_config = click.option(
    "--config",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The pipeline's settings, for example conf/shop.yml.",
)
_debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks. They may hold data of documents.")
_take_over = click.option(
    "--take-over", is_flag=True, help="Claim a table whose owner you know to be gone (or stopped for good)."
)
_catalog = click.option("--catalog", metavar="NAME", help="Keep the tables in this catalog, whatever the file says.")
_schema_prefix = click.option("--schema-prefix", metavar="TEXT", help="What the names of its schemas begin with.")
_collection = click.option("--collection", metavar="DB.COLL", help="Only this collection, as database.collection.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for machines.")
_root = click.option("--root", metavar="FOLDER", help="Keep the tables below this folder or URL, whatever the file says.")


_conf = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the Spark that is started here, as spark-submit takes it.",
)
_packages = click.option(
    "--packages", metavar="GROUP:NAME:VERSION,…", help="Maven packages for it, as spark-submit takes them."
)


def _spark_conf(pairs: Sequence[str], packages: str | None) -> dict[str, str]:
    wrong = [pair.partition("=")[0] for pair in pairs if "=" not in pair]
    if wrong:
        raise click.UsageError(f"--conf {wrong[0]}: KEY=VALUE is expected")
    conf = {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}
    return {**conf, "spark.jars.packages": packages} if packages else conf


@dataclass(frozen=True)
class _File:
    """A settings file, and where the deployment keeps its tables, which wins over what the file says."""

    path: Path
    catalog: str | None
    schema_prefix: str | None
    root: str | None
    conf: Mapping[str, str]

    def load(self) -> Settings:
        from pipelines.settings import file as settings_file

        if self.root and self.catalog or self.schema_prefix and not self.catalog:
            raise click.UsageError("the tables lie below --root, or in --catalog with --schema-prefix")
        settings = settings_file.load(self.path)
        if self.catalog:
            return replace(
                settings,
                lakehouse=replace(
                    settings.lakehouse, root=None, catalog=self.catalog, schema_prefix=self.schema_prefix or ""
                ),
            )
        return (
            replace(settings, lakehouse=replace(settings.lakehouse, root=self.root, catalog=None, schema_prefix=""))
            if self.root
            else settings
        )


def _settings(*own: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a command that reads a settings file, given to it as one `_File`, with its `own` among them."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_file(
            *,
            config: Path,
            catalog: str | None,
            schema_prefix: str | None,
            root: str | None,
            conf: tuple[str, ...],
            packages: str | None,
            **given: Any,
        ) -> Any:
            return command(_File(config, catalog, schema_prefix, root, _spark_conf(conf, packages)), **given)

        options = (_config, *own, _catalog, _schema_prefix, _root, _conf, _packages, _debug)
        return functools.reduce(lambda command, option: option(command), reversed(options), with_file)

    return decorated


def _once(*, default: bool) -> Callable[[Any], Any]:
    usual = "--once" if default else "--continuous"
    return click.option(
        "--once/--continuous",
        default=default,
        help=f"Stop when all that was there at the start is done, or go on until stopped. [default: {usual}]",
    )


@medallion.command()
@click.option(
    "--directory",
    default="demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the demo keeps its MongoDB and its lakehouse. Run again, it goes on from there.",
)
@click.option("--mongodb-uri", metavar="URI", help="Use this server instead of the embedded one (a replica set).")
@click.option(
    "--seconds",
    default=5,
    show_default=True,
    type=click.IntRange(1, 3600),
    help="How long the shop is open.",
)
@_debug
def demo(directory: Path, mongodb_uri: str | None, seconds: int) -> None:
    """Watch a shop's changes go from MongoDB to gold tables.

    Starts an embedded MongoDB, plays a shop's life against it while the pipeline runs, and shows the tables, what
    changed, how far behind each layer was, and how to query the result.
    """
    from pipelines.demo import run as pipeline

    _quiet_log()
    with _stopping() as stop:
        pipeline.run(directory, mongodb_uri=mongodb_uri, seconds=seconds, stop=stop)


@medallion.command()
@_settings()
def check(file: _File) -> None:
    """Is everything there that the pipeline needs?

    Reads the settings, then asks the source: reachable, a replica set, new enough, rights, oplog window, pre-images.
    Says what to mend. Changes nothing.
    """
    from pipelines.operations import check as pipeline
    from pipelines.terminal import tables as report

    _quiet_log()
    findings = pipeline.run(file.load())
    report.findings(findings)
    pipeline.refuse(findings)


@medallion.command()
@_settings(_once(default=False), _take_over)
def capture(file: _File, once: bool, take_over: bool) -> None:
    """Land every change event in the bronze table.

    The first start takes a snapshot of the collections while the stream is already open. SIGTERM commits what was read
    and ends within seconds. There can be one capture a table; a second one stops and has changed nothing.
    """
    from pipelines.capture import service as pipeline
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with _stopping() as stop, report.progress() as progress:
        settings, spark = _opened(file, "capture", captures=True, stop=stop)
        result = pipeline.run(
            spark,
            settings,
            once=once,
            take_over=take_over,
            stop=stop,
            progress=progress,
            sessions=sparks.sessions(spark),
        )
    report.result("capture", result)


@medallion.command()
@_settings(_once(default=True), _take_over)
def silver(file: _File, once: bool, take_over: bool) -> None:
    """Apply captured events to the silver tables, one a collection."""
    from pipelines.silver import run as pipeline
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with _stopping() as stop:
        settings, spark = _opened(file, "silver", lazily=True)
        result = None
        with sparks.cancelling(spark, stop):
            result = pipeline.run(
                spark, settings, once=once, take_over=take_over, sessions=sparks.sessions(spark), stop=stop
            )
    if result is not None:
        report.result("silver", result)


@medallion.command()
@_settings(
    _once(default=True),
    _take_over,
    click.option("--models", "only_models", is_flag=True, help="Only the SQL models, over gold as it is."),
    click.option("--full-refresh", is_flag=True, help="Make every model whole once more, the incremental ones too."),
    click.option(
        "--as-of",
        metavar="TIME",
        help="Bring silver and gold to one cluster time, transactions whole: now, SECONDS:INCREMENT, or a time.",
    ),
)
def gold(file: _File, once: bool, take_over: bool, only_models: bool, full_refresh: bool, as_of: str | None) -> None:
    """Bring the gold tables up to date: current documents, then SQL models, for analysts.

    What expectations refuse is not published: the last good version stays, and the exit code is 3. With --as-of all tables show
    the source at the same time, and ops/cuts names their versions; silver is brought up to there, too.
    """
    if as_of is not None:
        if not once or only_models or full_refresh:
            raise click.UsageError("--as-of is one run of everything: leave --continuous, --models and --full-refresh out")
        return _cut(file, as_of, take_over)
    from pipelines.gold import publish as pipeline
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    with _stopping() as stop:
        settings, spark = _opened(file, "gold", lazily=True)
        results: dict[str, object] = {}
        with sparks.cancelling(spark, stop):
            results = pipeline.run(
                spark,
                settings,
                once=once,
                take_over=take_over,
                only_models=only_models,
                is_anew=full_refresh,
                sessions=sparks.sessions(spark),
                stop=stop,
            )
    for name, result in results.items():
        report.result(name, result)


def _cut(file: _File, as_of: str, take_over: bool) -> None:
    from pipelines.gold import cut as pipeline
    from pipelines.spark import session as sparks
    from pipelines.terminal import tables as report

    pipeline.parsed(as_of)
    with _stopping() as stop:
        settings, spark = _opened(file, "gold")
        made = None
        with sparks.cancelling(spark, stop):
            made = pipeline.run(
                spark, settings, as_of=as_of, take_over=take_over, sessions=sparks.sessions(spark), stop=stop
            )
    if made is not None:
        report.cut(made)


@medallion.command("cut")
@click.argument("action", type=click.Choice(["show", "list"]))
@_settings(click.option("--cut", "name", metavar="NAME", help="show: this cut, and not the newest."), _json)
def show_cut(file: _File, action: str, name: str | None, as_json: bool) -> None:
    """The cuts that medallion gold --as-of made: which version of each table shows the source at one time.

    `show` tells the newest, with a query that reads all tables there; `list` tells all.

    \b
    Examples:
      medallion gold --config conf/shop.yml --as-of now
      medallion cut show --config conf/shop.yml
    """
    import dataclasses
    import json

    from pipelines.gold import cut as pipeline
    from pipelines.terminal import tables as report

    settings, spark = _opened(file, "cut", quiet=True)
    found = pipeline.read(spark, settings)
    if action == "list":
        if name is not None:
            raise click.UsageError("--cut belongs to show")
        click.echo(json.dumps([dataclasses.asdict(each) for each in found])) if as_json else report.cuts(found)
        return
    one = pipeline.named(found, name)
    click.echo(json.dumps({**dataclasses.asdict(one), "sql": one.sql})) if as_json else report.cut(one)


@medallion.command("models")
@click.argument("action", type=click.Choice(["check"]))
@_settings(_json)
def check_models(file: _File, action: str, as_json: bool) -> None:
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

    settings, spark = _opened(file, "models", quiet=True)
    found = publish.checked(spark, settings)
    click.echo(json.dumps([dataclasses.asdict(each) for each in found])) if as_json else report.models(found)


@medallion.command()
@_settings(_once(default=False), _take_over)
def run(file: _File, once: bool, take_over: bool) -> None:
    """Capture, silver and gold in one Spark application, until stopped.

    With --once: each layer in turn, up to what was there at the start.
    """
    from pipelines import run as pipeline
    from pipelines.terminal import tables as report

    with _stopping() as stop, report.progress() as progress:
        settings, spark = _opened(file, "run", captures=True, stop=stop)
        results = pipeline.run_again(
            spark, settings, again=functools.partial(_session, file, settings, "run"), once=once, take_over=take_over, stop=stop,
            progress=progress,
        )  # fmt: skip
    for layer, result in results.items():
        report.result(layer, result)


@medallion.command()
@_settings(
    _json,
    click.option(
        "--html",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write it, with how it went lately, as one page that needs no network.",
    ),
)
def status(file: _File, as_json: bool, html: Path | None) -> None:
    """Where each layer stands: position, lag, rows, rates, what was rescued, who writes.

    Reads tables and asks the source for its oplog; claims nothing, changes nothing.
    """
    from pipelines.operations import status as pipeline
    from pipelines.terminal import tables as report

    if as_json and html is not None:
        raise click.UsageError("--json or --html, not both")
    settings, spark = _opened(file, "status", quiet=True)
    if html is not None:
        from pipelines.page import page

        page.write(html, page.rendered(page.read(spark, settings)))
        click.echo(f"the page is in {html}")
        return
    found = pipeline.read(spark, settings)
    click.echo(pipeline.to_json(found)) if as_json else report.status(found)


@medallion.command()
@_settings(
    _collection,
    click.option(
        "--layer",
        default="gold",
        show_default=True,
        type=click.Choice(["gold", "silver"]),
        help="Which tables are compared with the source.",
    ),
    click.option("--sample", metavar="N", type=click.IntRange(1, 20_000), help="Look at N documents and N rows only."),
    click.option(
        "--as-of",
        default="now",
        show_default=True,
        metavar="TIME",
        help="Read the source at this cluster time: seconds, seconds.increment, or 2026-05-01T08:00:00Z; within minutes.",
    ),
    click.option(
        "--max-docs-per-second",
        metavar="N",
        type=click.FloatRange(1),
        help="Read no more documents a second from the source, all readers together.",
    ),
    click.option("--repair", is_flag=True, help="Read what differs again, through bronze, and look once more."),
    _json,
)
def verify(
    file: _File,
    collection: str | None,
    layer: str,
    sample: int | None,
    as_of: str,
    max_docs_per_second: float | None,
    repair: bool,
    as_json: bool,
) -> None:
    """Is gold (or silver) what MongoDB holds?

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
    from pipelines.verify import run as pipeline

    with _stopping() as stop:
        settings, spark = _opened(file, "verify", quiet=True)
        asked = pipeline.Asked(
            collection=collection,
            layer=pipeline.Layer(layer),
            sample=sample,
            as_of=as_of,
            documents_per_second=max_docs_per_second,
            repair=repair,
        )
        result = pipeline.run(spark, settings, asked, stop=stop)
    click.echo(pipeline.to_json(result)) if as_json else report.verified(result)
    pipeline.refuse(result)


@medallion.command()
@_settings(
    _collection,
    click.option(
        "--beside-writers",
        is_flag=True,
        help="Compact tables that somebody writes, too. Safe, but a merge beside it may have to start over.",
    ),
    _json,
)
def maintain(file: _File, collection: str | None, beside_writers: bool, as_json: bool) -> None:
    """Compact the tables, and take away what nobody needs any more.

    OPTIMIZE with clustering, purge of deletion vectors, VACUUM within each table's retention, checkpoints, and the expiry
    that the settings under maintenance ask for. Nothing that silver, gold or a rebuild still needs is taken, and no table
    loses its position. Says what it did, with files and bytes before and after.
    """
    from pipelines.operations import maintain as pipeline
    from pipelines.terminal import tables as report

    with _stopping() as stop:
        settings, spark = _opened(file, "maintain", quiet=True)
        result = pipeline.run(spark, settings, collection=collection, beside_writers=beside_writers, stop=stop)
    click.echo(pipeline.to_json(result)) if as_json else report.maintained(result)


@medallion.command()
@_settings(_collection, _json)
def schema(file: _File, collection: str | None, as_json: bool) -> None:
    """Which columns each collection has, and what changed them when.

    Columns come from the documents and are only ever widened. A change shows the batch that brought it, with the time
    and the sequence of the first event there; `rebuilt` lines come from medallion rebuild.

    \b
    Example:
      medallion schema --config conf/shop.yml --collection shop.orders
    """
    from pipelines.operations import schema as evolution
    from pipelines.terminal import tables as report

    settings, spark = _opened(file, "schema", quiet=True)
    found = evolution.read(spark, settings, collection=collection)
    click.echo(evolution.to_json(found)) if as_json else report.schemas(found)


@medallion.command("signal")
@click.argument(
    "type_",
    metavar="TYPE",
    type=click.Choice(["execute-snapshot", "stop-snapshot", "pause-snapshot", "resume-snapshot", "log"]),
)
@_settings(
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
    _json,
)
def send_signal(
    file: _File,
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
    import time

    from cdc_core.properties import types as values
    from pipelines.channels import signals

    asked: dict[str, Any] = {}
    if data is not None:
        if collections or snapshot_type or filter_ or message:
            raise click.UsageError("--data says everything; leave the other options out")
        try:
            asked = json.loads(data)
        except ValueError as error:
            raise click.UsageError(f"--data is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise click.UsageError("--data must be a JSON object")
    named = [name.strip() for each in collections for name in values.split_top_level(each, ",") if name.strip()]
    if named:
        asked["data-collections"] = named
    if snapshot_type:
        asked["type"] = snapshot_type
    if filter_:
        asked["additional-conditions"] = [{"data-collection": each, "filter": filter_} for each in named]
    if message is not None:
        asked["message"] = message
    settings, spark = _opened(file, "signal", quiet=True)
    with _undisturbed():
        sent = signals.send(spark, settings, type_=type_, data=asked, id_=id_, ts_ms=int(time.time() * 1000))
    said = f"signal {sent.id} ({sent.type}) is sent; the capture of {settings.name} does it at its next look"
    click.echo(json.dumps({"id": sent.id, "type": sent.type, "data": asked}) if as_json else said)


@medallion.command()
@click.argument("action", type=click.Choice(["list", "replay"]))
@_settings(
    _collection,
    click.option("--all", "all_states", is_flag=True, help="list: those too whose stay has ended."),
    click.option("--documents", is_flag=True, help="list: show what the events hold, too. It is data of documents."),
    click.option("--token", "tokens", multiple=True, metavar="TOKEN", help="replay: only this event (repeatable)."),
    click.option(
        "--corrections",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='replay: new texts for events, as {"TOKEN": {"after": "{…}"}}.',
    ),
    _json,
    _take_over,
)
def quarantine(
    file: _File,
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
    import time

    from pipelines.operations import quarantine as pipeline
    from pipelines.terminal import tables as report

    if (tokens or corrections) and not collection:
        raise click.UsageError("--token and --corrections are of one collection: name it with --collection")
    if action == "list":
        if tokens or corrections or take_over:
            raise click.UsageError("--token, --corrections and --take-over belong to replay")
        settings, spark = _opened(file, "quarantine", quiet=True)
        events = pipeline.of_pipeline(spark, settings, collection=collection, all_states=all_states, with_texts=documents)
        click.echo(pipeline.to_json(events)) if as_json else report.quarantined(events)
        return
    if all_states or documents:
        raise click.UsageError("--all and --documents belong to list")
    text = None if corrections is None else corrections.read_text("utf-8")
    mended = None if text is None else pipeline.read_corrections(text, where=str(corrections))
    settings, spark = _opened(file, "quarantine", quiet=True)
    with _undisturbed():
        done = pipeline.replay_pipeline(
            spark,
            settings,
            collection=collection,
            tokens=tokens or None,
            corrections=mended,
            now_ms=int(time.time() * 1000),
            take_over=take_over,
        )
    click.echo(pipeline.to_json(done)) if as_json else report.replayed(done)


@medallion.command()
@_settings(
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
    _json,
    _take_over,
)
def rebuild(
    file: _File, collection: str, layer: str, dry_run: bool, drop_missing: bool, as_json: bool, take_over: bool
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
    from pipelines.operations import rebuild as pipeline
    from pipelines.terminal import tables as report

    with _stopping() as stop:
        settings, spark = _opened(file, "rebuild", quiet=True)
        result = pipeline.run(
            spark,
            settings,
            collection=collection,
            layer=pipeline.Layer(layer),
            take_over=take_over,
            is_trial=dry_run,
            drops_lost=drop_missing,
            stop=stop,
        )
    click.echo(pipeline.to_json(result)) if as_json else report.rebuilt(result)
    if not dry_run:
        pipeline.refuse(result)


@medallion.command()
@_settings(click.option("--dry-run", is_flag=True, help="Tell what is missing, and change nothing."), _json, _take_over)
def repair(file: _File, dry_run: bool, as_json: bool, take_over: bool) -> None:
    """Mend tables whose log names data files that are not there.

    Files go missing by hand, by a VACUUM that did not wait, or with a disk; every reader of the table then ends with an error. This
    takes them out of the table by a commit that puts its position back, so that the next capture, silver and gold bring
    the rows back. Stop the pipeline first.

    \b
    Examples:
      medallion repair --config conf/shop.yml --dry-run
      medallion repair --config conf/shop.yml
    """
    from pipelines.operations import repair as pipeline
    from pipelines.terminal import tables as report

    settings, spark = _opened(file, "repair", quiet=True)
    found = pipeline.run(spark, settings, is_trial=dry_run, take_over=take_over)
    click.echo(pipeline.to_json(found)) if as_json else report.repaired(found)


@medallion.command()
@click.option(
    "--options",
    required=True,
    metavar="FILE",
    help="A JSON object of ExtractNewDocumentState's options, or a connector's whole JSON.",
)
@click.option("--in", "source", required=True, metavar="FILE", help="Debezium change events, one a line; - for stdin.")
@click.option("--out", "target", required=True, metavar="FILE", help="The rows, one a line; - for stdout.")
@_debug
def unwrap(options: str, source: str, target: str) -> None:
    """Try unwrap options on Debezium change events in a file, before a deployment.

    \b
    In:  {"key": …, "value": …}
    Out: {"key": …, "value": …, "headers": …}  or  {"dropped": true}
    """
    from pipelines.operations import unwrap as unwrap_files

    click.echo(str(unwrap_files.run(options, source, target)), err=True)


@medallion.command("import-debezium")
@click.argument("connector", metavar="CONNECTOR.JSON", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The settings file, new; stdout when left out.",
)
@click.option("--root", metavar="FOLDER", default="./lakehouse", show_default=True, help="Below what the tables will lie.")
@_debug
def import_debezium(connector: Path, out: Path | None, root: str) -> None:
    """Turn a Debezium connector's JSON into a settings file.

    Takes the flat map of properties, or the document that Kafka Connect's REST interface holds. Names of older versions
    are translated, passwords become variables of the environment, and each property that is left out is named with the
    reason, in the file and on stderr.
    """
    from pipelines.settings import connector as debezium_connector
    from pipelines.settings import file as settings_file

    found = debezium_connector.read(connector, root=root)
    click.echo(found.text, nl=False) if out is None else settings_file.write(out, found.text)
    for line in found.notes:
        click.echo(line, err=True)
    for line in found.variables:
        click.echo(f"set {line}", err=True)


def _opened(
    file: _File,
    verb: str,
    *,
    quiet: bool = False,
    captures: bool = False,
    lazily: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Settings, SparkSession]:
    """The settings and a session for one command, with the log configured; `lazily`, Spark starts when it is needed.

    One that `captures` looks at the source first: a wrong password is told without waiting for Spark. It need not answer
    when `stop` is set.
    """
    import logging

    from jobs import log_lines

    _quiet_log() if quiet else log_lines.configure()
    settings = file.load()
    for warning in settings.warnings:
        logging.getLogger(__name__).warning(warning)
    if captures:
        from pipelines.capture import service as capture

        try:
            capture.check_source(settings, stop)
        except capture.Stopped:
            raise click.exceptions.Exit(0) from None
    start = functools.partial(_session, file, settings, verb)
    if lazily:
        from pipelines.spark import session as sparks

        return settings, sparks.lazily(start)
    return settings, start()


def _session(file: _File, settings: Settings, verb: str) -> SparkSession:
    from pipelines.spark import conf as spark_conf
    from pipelines.spark import session as sparks

    conf = {**(spark_conf.CAPTURE if verb == "capture" else {}), **file.conf}
    if settings.lakehouse.single_driver:
        conf[spark_conf.SINGLE_DRIVER] = "true"
    return sparks.session(f"medallion {verb} {settings.name}", conf=conf, root=settings.lakehouse.root)


def _quiet_log() -> None:
    import logging

    from jobs import log_lines

    log_lines.configure(level=logging.ERROR)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; a second one interrupts at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            _abandon()
            raise KeyboardInterrupt
        stop.set()

    with _handling(ask):
        yield stop


PATIENCE = 2
"""So many times Ctrl-C or SIGTERM wait for the end of what is written; the next one interrupts."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block of seconds that writes one thing: Ctrl-C and SIGTERM wait for its end, and it is done then."""
    asked = itertools.count(1)

    def ask(number: int, frame: object) -> None:
        if next(asked) > PATIENCE:
            raise KeyboardInterrupt

    with _handling(ask):
        yield


@contextmanager
def _handling(ask: Callable[[int, object], None]) -> Iterator[None]:
    """Handles SIGTERM and Ctrl-C in a block; in another thread than the main one the block is as it is without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _abandon() -> None:
    """No call of ours waits for Spark any more."""
    if "pyspark" in sys.modules:
        from pipelines.spark import jvm

        jvm.abandon()


def _say(message: str) -> None:
    click.echo(f"medallion: {message}", err=True)


def _place(error: BaseException) -> str:
    """Where the project's own code raised, as `at silver.py:123`. The message stays out: it may hold a document."""
    packages = [Path(__file__).resolve().parents[1] / name for name in ("cdc_core", "pipelines", "jobs")]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(Path(frame.filename).resolve().is_relative_to(each) for each in packages)]
    last = (ours or frames)[-1]
    return f"at {Path(last.filename).name}:{last.lineno}"


def _debugged(arguments: Sequence[str], code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    return code


if __name__ == "__main__":
    sys.exit(main())
