"""The output of the commands: tables on a terminal, log lines elsewhere."""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from cdc_core import errors
from pipelines import signs
from pipelines.operations import units

if TYPE_CHECKING:
    from pipelines.gold.models import ModelPlan
    from pipelines.operations.cut import Cut
    from pipelines.operations.findings import Finding
    from pipelines.operations.maintain import MaintenanceResult as Maintenance
    from pipelines.operations.quarantine import QuarantinedEvent, ReplayResult
    from pipelines.operations.repair import RepairResult
    from pipelines.operations.schema import SchemaHistory
    from pipelines.operations.status import CollectionStatus, PipelineStatus, TableStatus, WriterStatus
    from pipelines.silver.rebuild import RebuildResult
    from pipelines.verify.result import Verification

_LOGGERS = {
    "capture": "pipelines.capture.service",
    "silver": "pipelines.silver.run",
    "gold": "pipelines.gold.run",
    "models": "pipelines.gold.models",
}
"""The logger of each layer's result: users search the log by these names, whichever module writes the line."""


WIDEST = 1000
"""The most characters of a line of a table."""


def console(*, markup: bool = False) -> Console:
    """The console for results on stdout: as wide as the terminal, or 120 columns without one.

    Names from the source may look like Rich markup: use `markup` only for output without such names.
    """
    width = None if sys.stdout.isatty() else 120
    return Console(highlight=False, markup=markup, emoji=False, width=width)


def _show_whole(table: Table) -> None:
    """Show a table wider than a narrow terminal, which wraps its lines, instead of with names and numbers cut off."""
    screen = console()
    screen.width = max(screen.width, Measurement.get(screen, screen.options.update(width=WIDEST), table).maximum)
    screen.print(table)


def _text(content: str, style: str = "") -> Text:
    return Text(signs.escaped(content), style)


def findings(results: Sequence[Finding]) -> None:
    """Show the findings of `medallion check`, one per line, with what to fix below."""
    marks = {"fine": Text("ok", "green"), "warning": Text("warning", "yellow"), "wrong": Text("error", "red")}
    table = Table(*(Column(overflow="fold") for _ in range(3)), box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in results:
        text = _text(finding.found)
        if finding.mend:
            text.append("\n→ ", style="dim").append(_text(finding.mend, style="dim"))
        table.add_row(marks[finding.verdict.value], _text(finding.about), text)
    console().print(table)


def models(plans: Sequence[ModelPlan]) -> None:
    """Show the result of `medallion models check`: each model in order of execution, what it reads, and what a run would do."""
    screen = console()
    if not plans:
        screen.print("There are no models: gold.models is not set, or the folder has no .sql files.")
        return
    table = _plain_table("model", "type", "reads", "a run would", "expectations")
    for model in plans:
        reads = "\n".join(map(signs.escaped, model.reads))
        table.add_row(_text(model.name), model.materialized, reads, _text(model.would), str(model.expectations or ""))
    screen.print(table)


def cuts(recorded_cuts: Sequence[Cut]) -> None:
    """Show one line per cut, newest first."""
    from cdc_core.gold import cut as times

    screen = console()
    if not recorded_cuts:
        screen.print("There are no cuts yet. Make one with: medallion gold --as-of now")
        return
    table = _plain_table("cut", "source at", "bronze batch", "tables", "documents", "incomplete")
    for each in recorded_cuts:
        missing = _text(", ".join(each.missing))
        table.add_row(each.name, times.shown(each.time), str(each.batch), str(len(each.tables)), each.documents, missing)
    screen.print(table)


def cut(made_cut: Cut) -> None:
    """Show a cut: its time, the version of each table, and a query that reads all of them."""
    from cdc_core.gold import cut as times

    screen = console()
    screen.print(f"Cut {made_cut.name}: source at {times.shown(made_cut.time)}, bronze up to batch {made_cut.batch}")
    if made_cut.documents != "exact":
        screen.print(
            "Documents as captured: they are looked up, and may be newer than the cut. They are exact with capture.mode: change_streams "
            "or capture.mode.full.update.type: post_image."
        )
    if made_cut.missing:
        screen.print(_text(f"Incomplete, for example because of an unfinished snapshot: {', '.join(made_cut.missing)}"))
    table = _plain_table("table", "version", "location")
    for entry in made_cut.tables:
        table.add_row(_text(entry.name), "–" if entry.version is None else str(entry.version), _text(entry.identifier))
    screen.print(table)
    screen.print(Text(made_cut.sql), soft_wrap=True)


def result(layer: str, outcome: object) -> None:
    """Log one line with a layer's result at the end of a run."""
    _log(layer).info("%s done", layer, extra=_pairs(outcome))


def nothing_yet(layer: str, what: str, command: str) -> None:
    """Log that a run had no input, and the command that provides it."""
    _log(layer).info("%s: run medallion %s first", what, command)


def _log(layer: str) -> logging.Logger:
    return logging.getLogger(_LOGGERS.get(layer, f"pipelines.{layer}"))


def _pairs(outcome: object) -> dict[str, object]:
    """The scalar fields of a result dataclass, for a log line."""
    if not dataclasses.is_dataclass(outcome):
        return {}
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    plain_types = (int, float, str, bool)
    reserved_names = {"name", "module", "args", "msg", "message", "created", "process", "thread"}
    return {
        (f"{name}_" if name in reserved_names else name): _plain_value(value)
        for name, value in fields.items()
        if isinstance(value, (*plain_types, enum.Enum))
    }


def _plain_value(value: object) -> object:
    """A field's value as in a log line: floats to three digits."""
    if isinstance(value, enum.Enum):
        return value.value
    return round(value, 3) if isinstance(value, float) else value


def status(pipeline: PipelineStatus, *, bronze: str = "the lakehouse") -> None:
    """Show the result of `medallion status`: the source, bronze (whose table is at `bronze`), and a line for each collection."""
    screen = console()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("pipeline", pipeline.name)
    grid.add_row("source", _source_line(pipeline))
    grid.add_row("bronze", _bronze_line(pipeline, bronze))
    screen.print(grid)
    if pipeline.collections:
        _show_whole(_collections_table(pipeline))
    for line in _problem_lines(pipeline):
        screen.print(_text(line, style="yellow"))


def verified(verification: Verification) -> None:
    """Show the result of `medallion verify`: a line for each collection, then the keys that differ, with their paths."""
    screen = console()
    table = _plain_table("collection", "documents", "equal", "missing", "extra", "different", "other", "seconds")
    for collection in verification.collections:
        other_counts = {name: getattr(collection, name) for name in VERDICTS_BESIDE if getattr(collection, name)}
        parts = ", ".join(f"{count:,} {name}" for name, count in other_counts.items())
        counts = (collection.documents, collection.equal, collection.missing, collection.extra, collection.different)
        table.add_row(
            _text(collection.collection), *(f"{count:,}" for count in counts), parts or "–", f"{collection.seconds:.1f}"
        )
    screen.print(table)
    for collection in verification.collections:
        for difference in collection.differences[:SHOWN_DIFFERENCES]:
            paths = "; ".join(f"{path.path}: {path.what}" if path.path else path.what for path in difference.paths)
            line = f"{collection.collection} {difference.key}: {difference.kind.value}{f' ({paths})' if paths else ''}"
            screen.print(_text(line))
        if len(collection.differences) > SHOWN_DIFFERENCES:
            more = len(collection.differences) - SHOWN_DIFFERENCES
            screen.print(_text(f"… and {more:,} more in {collection.collection}; --json lists all"))
    compared_names = {collection.collection for collection in verification.collections}
    for name, error in verification.failures.items():
        what = "compared, and then" if name in compared_names else "not compared"
        screen.print(_text(f"{name}: {what}: ").append(errors.message_of(error)))


VERDICTS_BESIDE = ("incomplete", "quarantined", "kept", "waiting", "changing", "unsettled", "repaired")
SHOWN_DIFFERENCES = 20


def maintained(result: Maintenance, *, is_whole: bool = True) -> None:
    """Show the result of `medallion maintain`: a line for each table."""
    if not result.tables:
        console().print("there are no tables yet: start the pipeline first" if is_whole else "no table could be maintained")
        return
    table = _plain_table("table", "files", "MB", "what was done")
    for outcome in result.tables:
        files = f"{outcome.before.files:,} → {outcome.after.files:,}"
        size = f"{outcome.before.bytes / 1e6:,.1f} → {outcome.after.bytes / 1e6:,.1f}"
        table.add_row(_text(outcome.table), files, size, _text("; ".join((*outcome.done, *outcome.left)) or "nothing to do"))
    console().print(table)


def schemas(histories: Sequence[SchemaHistory]) -> None:
    """Show the result of `medallion schema`: for each collection its columns, and the changes with their times."""
    screen = console()
    for schema in histories:
        screen.print(_text(f"{schema.collection}: version {schema.version} of its schema", style="bold"))
        columns = _plain_table("column", "type")
        for column in schema.columns:
            columns.add_row(_text(column.name), _text(column.type))
        changes = _plain_table("version", "when", "batch", "change", "field", "type", "event")
        for change in schema.changes:
            changes.add_row(
                str(change.version),
                "" if change.at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(change.at)),
                str(change.batch),
                change.what,
                _text(change.path),
                _text(" → ".join(filter(None, (change.from_type, change.to_type)))),
                change.event or "",
            )
        screen.print(columns, changes, sep="\n")
    if not histories:
        screen.print("silver has no collections yet: run medallion silver first")


SHOWN_EVENTS = 1000


def quarantined(events: Sequence[QuarantinedEvent], *, is_whole: bool = True) -> None:
    """Show the result of `medallion quarantine list`: a line for each of the first `SHOWN_EVENTS` events, with its `texts` below."""
    screen = console()
    if not events:
        screen.print("the quarantine is empty" if is_whole else "the quarantine is empty, as far as it can be read")
        return
    table = _plain_table("collection", "key", "op", "batch", "sequence", "token", "reason")
    for event in events[:SHOWN_EVENTS]:
        cells = (event.key or "–", event.op or "–", str(event.batch), event.sequence or "–", event.resume_token)
        table.add_row(*map(_text, (event.collection, *cells, event.reason)))
        for name, text in (event.texts or {}).items():
            table.add_row("", "", "", "", "", _text(name, style="dim"), _text(text))
    screen.print(table)
    if len(events) > SHOWN_EVENTS:
        screen.print(
            f"and more than these {SHOWN_EVENTS:,}: --json lists all of them, and medallion status says how many there are"
        )


def replayed(replays: Mapping[str, ReplayResult], *, is_whole: bool = True) -> None:
    """Show the result of `medallion quarantine replay`: a line for each collection."""
    screen = console()
    for name, replay in replays.items():
        parts = [f"{name}: nothing to replay"]
        if replay.batch is not None:
            parts = [
                f"{name}: {replay.events:,} replayed, up to bronze batch {replay.batch}; run medallion silver to apply them"
            ]
        if replay.held:
            parts.append(f"{replay.held:,} still in quarantine, because they cannot be read or follow one that cannot")
        screen.print(_text("; ".join(parts)))
    if not replays and is_whole:
        screen.print("silver has no collections yet")


def repaired(repairs: Sequence[RepairResult], *, is_whole: bool = True) -> None:
    """Show the result of `medallion repair`: tables with missing files, and what restores their rows; `is_whole`: all were checked."""
    screen = console()
    if not repairs and is_whole:
        # Of a table whose whole folder is gone no log tells.
        screen.print("no files are missing in the tables that are there")
    for repair in repairs:
        removed, done = f"files removed from the table: {repair.taken_out:,}.", repair.version is not None
        change = removed if done else "nothing was changed. After a repair:"
        screen.print(_text(f"{repair.table}: missing files: {len(repair.missing):,}; {change} {repair.next}"))


def rebuilt(result: RebuildResult) -> None:
    """Show the result of `medallion rebuild`: both tables' counts, where and why documents differ, and whether it was swapped."""
    screen, comparison = console(), result.comparison
    counts = _plain_table("", "live", "rebuilt")
    counts.add_row("rows", f"{comparison.rows:,}", f"{comparison.rebuilt_rows:,}")
    counts.add_row("rescued values", f"{comparison.rescued:,}", f"{comparison.rebuilt_rescued:,}")
    counts.add_row("only in this table", f"{comparison.gone:,}", f"{comparison.new:,}")
    screen.print(_text(f"{result.table}, bronze batches 1 to {result.to}"), counts)
    if comparison.lost:
        keys = ", ".join(key or "no key" for key in comparison.lost_keys)
        screen.print(_text(f"{comparison.lost:,} would be lost without a delete in bronze: {keys}"), style="yellow")
    for change in result.changes:
        types = " → ".join(filter(None, (change.from_type, change.to_type)))
        screen.print(_text(f"column {change.path} {change.what.value}: {types}"))
    screen.print(f"{comparison.differing:,} documents differ")
    if comparison.differences:
        table = _plain_table("column", "documents", "why", "example keys")
        for difference in comparison.differences:
            table.add_row(
                *map(_text, (difference.column, f"{difference.documents:,}", difference.why, ", ".join(difference.keys)))
            )
        screen.print(table)
    swap = f"swapped: version {result.version}" if result.version is not None else "not swapped"
    screen.print(f"{swap} ({units.duration(result.seconds)})")


def _plain_table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _source_line(pipeline: PipelineStatus) -> Text:
    server = pipeline.source
    if server.problem is not None:
        return _text(server.problem, style="yellow")
    if server.now is None or server.oplog_first is None:
        return _text(f"{server.server}, oplog window unknown (no clusterMonitor role, or a mongos)")
    return _text(f"{server.server}, oplog reaches back {units.duration(server.now - server.oplog_first)}")


def _bronze_line(pipeline: PipelineStatus, table: str) -> Text:
    log = pipeline.bronze
    if log is None:
        return _text(f"nothing captured yet in {table}: run medallion capture first", style="yellow")
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(log.position))
    parts = [f"{log.events:,} rows in {log.batch:,} batches, complete up to {at}"]
    if log.lag_seconds is not None:
        parts.append(f"{units.duration(log.lag_seconds)} behind")
    if log.headroom_seconds is not None:
        warning = " (the position is lost)" if log.headroom_seconds < 0 else ""
        parts.append(f"headroom {units.duration(max(0, log.headroom_seconds))}{warning}")
    if log.rate is not None:
        parts.append(f"{log.rate:,.0f} events/s")
    parts.append(_writer(log.writer))
    if log.slow_commits is not None:
        parts.append(f"commits go through Spark: {log.slow_commits}")
    return _text(", ".join(filter(None, parts)))


def _writer(writer: WriterStatus | None) -> str:
    if writer is None or writer.has_left:
        return "no writer"
    lease = f"lease {writer.lease_seconds} s" if writer.lease_seconds else "lease expired"
    return f"written by process {writer.process} on {writer.host} ({lease})"


TROUBLES = ("rescued", "incomplete", "quarantined", "incomplete since")


def _collections_table(pipeline: PipelineStatus) -> Table:
    """A line for each collection, without columns that are empty for all of them."""
    is_snapshot = any(each.snapshot is not None and not each.snapshot.is_done for each in pipeline.collections)
    is_history = any(each.history is not None for each in pipeline.collections)
    layers = ("silver", "gold", "history") if is_history else ("silver", "gold")
    troubles = [name for name in TROUBLES if any(_trouble(each, name) for each in pipeline.collections)]
    table = _plain_table("collection")
    cells = [name for layer in layers for name in (layer, "backlog", "/s")]
    for name in (*(["snapshot"] if is_snapshot else []), *cells, *troubles):
        table.add_column(name, justify="right", no_wrap=True)
    for each in pipeline.collections:
        table.add_row(
            _text(each.collection),
            *([_snapshot_cell(each)] if is_snapshot else []),
            *_layer_cells(each.silver, each.waiting_events),
            *_layer_cells(each.gold),
            *(_layer_cells(each.history) if is_history else ()),
            *(_trouble_cell(each, name) for name in troubles),
        )
    return table


def _problem_lines(pipeline: PipelineStatus) -> Iterator[str]:
    """A line for each problem of a collection that needs action, and for each model that is not current."""
    from cdc_core.signals import signal as signals

    for each in pipeline.collections:
        if each.problem is not None:
            yield f"{each.collection}: {each.problem}"
        if each.snapshot is not None and each.snapshot.failed is not None:
            yield f"{each.collection}: snapshot failed: {each.snapshot.failed}"
        if each.is_unpublished:
            yield f"{each.collection}: not in gold yet; run medallion gold, which publishes it or says why it cannot"
        if each.incomplete_since is not None:
            command = signals.snapshot_command(each.collection)
            yield f"{each.collection}: incomplete since {each.incomplete_since}: {each.incomplete_because}; {command}"
    yield from filter(None, (each.problem for each in pipeline.models))


def _trouble_cell(each: CollectionStatus, name: str) -> str:
    if name == "incomplete since":
        return each.incomplete_since or ""
    return f"{_trouble(each, name):,}" if each.problem is None else "–"  # of tables that cannot be read nothing was counted


def _trouble(each: CollectionStatus, name: str) -> int:
    if name == "quarantined":
        return each.quarantined
    if name == "incomplete since":
        return int(each.incomplete_since is not None)
    return int(getattr(each.silver, name)) if each.silver is not None else 0


def _snapshot_cell(each: CollectionStatus) -> str:
    if each.snapshot is None:
        return ""
    if each.snapshot.failed is not None:
        return "failed"
    return "done" if each.snapshot.is_done else f"{each.snapshot.documents:,} so far{', paused' * each.snapshot.is_paused}"


def _layer_cells(layer: TableStatus | None, waiting: int = 0) -> tuple[str, str, str]:
    """The layer's rows, its backlog with the age of the oldest event (without a table: `waiting` events), and events per second."""
    if layer is None:
        return "–", f"{waiting:,}" if waiting else "", ""
    backlog = f"{layer.lag_events:,} ({units.duration(layer.lag_seconds)})" if layer.lag_events else "0"
    return f"{layer.rows:,}", backlog, "" if layer.rate is None else f"{layer.rate:,.0f}"
