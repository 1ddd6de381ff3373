"""Renders an HTML page about a pipeline: its state, its last day, and the results of its checks. Only reads tables.

The page is self-contained: styles and plots (SVG) are inline, and it has no scripts and no links.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.settings.parse import Settings
from pipelines import output_file, signs
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.operations import schema as evolution
from pipelines.operations import status as pipeline_status
from pipelines.operations import units
from pipelines.page import audits

HOURS = 24
POINTS = 96
"""Points in `HOURS`: one every 15 minutes."""
SHOWN = 20


@dataclass(frozen=True)
class Card:
    """A key figure; `mood` is `fine`, `look`, `wrong` or empty."""

    name: str
    value: str
    about: str = ""
    mood: str = ""


@dataclass(frozen=True)
class Plot:
    """A plot with its title."""

    title: str
    svg: str


@dataclass(frozen=True)
class Point:
    """The events captured in one interval, and their average lag behind the source."""

    begin_ms: int
    events: int
    lag_seconds: float | None


@dataclass(frozen=True)
class SchemaChangeRow:
    """Changes of one kind in one version of a collection's schema; `at` is in seconds since 1970."""

    collection: str
    what: str
    fields: str
    batch: int
    at: int | None


@dataclass(frozen=True)
class TableSummary:
    """A table's size and its last writer."""

    name: str
    version: int
    files: int
    bytes: int
    writer: str


@dataclass(frozen=True)
class PageContent:
    """Everything that the page shows."""

    status: pipeline_status.PipelineStatus
    points: tuple[Point, ...] = ()
    changes: tuple[SchemaChangeRow, ...] = ()
    verifications: tuple[Mapping[str, Any], ...] = ()
    audits: tuple[audits.TableAudit, ...] = ()
    tables: tuple[TableSummary, ...] = ()


def write(path: Path, text: str) -> None:
    """Write the page, atomically where possible; raises the error of `errors.of_file` if it cannot be written."""
    try:
        with output_file.replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise errors.of_file(error, errors.Problem("--html", f"cannot write {path}: {error.strerror}")) from None


def text(spark: SparkSession, settings: Settings) -> str:
    """The current page as HTML."""
    return rendered(read(spark, settings))


def read(spark: SparkSession, settings: Settings) -> PageContent:
    """The content of the page, also of a pipeline that has never run."""
    status = pipeline_status.read(spark, settings)
    if status.bronze is None:
        return PageContent(status)
    reader = _PageReader(spark, settings, status)
    return PageContent(
        status,
        reader.points(),
        reader.changes(),
        reader.verifications(),
        audits.read(spark, settings),
        reader.tables(),
    )


def rendered(content: PageContent) -> str:
    """The page as HTML. Raises `SettingsError` if the extra `page` is not installed."""
    try:
        import jinja2

        from pipelines.page import plots
    except ImportError as error:
        raise errors.SettingsError(
            errors.Problem("--html", f"the page needs {error.name}", "pip install 'mongo-medallion[page]'")
        ) from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"time": _time, "number": _number, "behind": _behind}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    latest: dict[str, Mapping[str, Any]] = {}
    # For each collection the worst of the newest results of its layers.
    for verification in sorted(_newest(content.verifications), key=lambda each: _STATES.index(_state(each)), reverse=True):
        latest[verification["collection"]] = {
            "at_ms": verification["at_ms"],
            "state": _state(verification),
            "style": _STYLES[_state(verification)],
        }
    return template.render(
        status=content.status,
        cards=_cards(content),
        plots=_plots(content, plots),
        verified=latest,
        verifications=content.verifications[:SHOWN],
        audits=content.audits,
        changes=content.changes[:SHOWN],
        tables=content.tables,
    )


def _shown(value: Any) -> Any:
    """A value of the template: text without control characters or marks that reorder it, as on a terminal; plots are HTML."""
    return signs.escaped(value) if type(value) is str else value


# --- reading


@dataclass(frozen=True)
class _PageReader:
    spark: SparkSession
    settings: Settings
    status: pipeline_status.PipelineStatus

    @property
    def _layout(self) -> Any:
        return delta.layout(self.settings.lakehouse)

    def points(self) -> tuple[Point, ...]:
        """The events of the last day, by interval."""
        interval_ms = HOURS * 3_600_000 // POINTS
        begin_ms = (self.status.at_ms // interval_ms - POINTS + 1) * interval_ms
        bronze = self._layout.bronze(self.settings.name)
        # Files are skipped by batch: by time alone all of bronze would be read for its last day.
        earlier_commit = table_history.last_before(self.spark, bronze, begin_ms, matching=_has_batch)
        earlier_batch = 0 if earlier_commit is None else (earlier_commit.metadata or {})["batch"]
        rows = self.spark.sql(
            f"""SELECT ts_ms DIV {interval_ms} AS slot, count(*) AS events,
                       avg(IF(kind = 'change', ts_ms - source.ts_ms, NULL)) / 1000 AS lag
                FROM {bronze} WHERE batch > {earlier_batch}
                  AND kind IN ('change', 'snapshot') AND ts_ms >= {begin_ms} GROUP BY ts_ms DIV {interval_ms}"""
        ).collect()
        by_slot = {row.slot: row for row in rows}
        points = []
        for slot in range(begin_ms // interval_ms, begin_ms // interval_ms + POINTS):
            row = by_slot.get(slot)
            lag = None if row is None or row.lag is None else max(0.0, float(row.lag))
            points.append(Point(slot * interval_ms, row.events if row else 0, lag))
        return tuple(points)

    def changes(self) -> tuple[SchemaChangeRow, ...]:
        """Schema changes, grouped by version and kind, newest first."""
        rows = []
        for history in evolution.read(self.spark, self.settings):
            by_version: dict[tuple[int, str], list[evolution.SchemaLogEntry]] = {}
            for change in history.changes:
                by_version.setdefault((change.version, change.what), []).append(change)
            for (_, what), entries in by_version.items():
                fields = ", ".join(_changed(change) for change in entries[:6]) + (" …" if len(entries) > 6 else "")
                rows.append(SchemaChangeRow(history.collection, what, fields, entries[0].batch, entries[0].at))
        return tuple(sorted(rows, key=lambda each: (each.at or 0, each.batch), reverse=True))

    def verifications(self) -> tuple[Mapping[str, Any], ...]:
        """The newest results of verify, and the newest of each collection and layer."""
        table = self._layout.ops("verifications")
        if not delta.exists(self.spark, table):
            return ()
        rows = self.spark.table(str(table)).where(F.col("name") == self.settings.name).drop("differences")
        newest = (
            rows.groupBy("collection", "layer").agg(F.max_by(F.struct(*rows.columns), "at_ms").alias("row")).select("row.*")
        )
        results = rows.orderBy("at_ms", ascending=False).limit(SHOWN).union(newest).distinct()
        return tuple(row.asDict() for row in results.orderBy("at_ms", ascending=False).collect())

    def tables(self) -> tuple[TableSummary, ...]:
        """Bronze, and the tables of each collection."""
        assert self.status.bronze is not None
        bronze = self._layout.bronze(self.settings.name)
        entries = [("bronze", bronze, table_history.version(self.spark, bronze), self.status.bronze.writer)]
        for collection in self.status.collections:
            db, _, name = collection.collection.partition(".")
            for layer, table, layer_status in (
                ("silver", self._layout.silver(db, name), collection.silver),
                ("gold", self._layout.gold(db, name), collection.gold),
            ):
                if layer_status is not None:
                    entries.append((f"{layer} {collection.collection}", table, layer_status.version, layer_status.writer))
        summaries = []
        for name, table, version, writer in entries:
            size = delta.size(self.spark, table)
            summaries.append(TableSummary(name, version, size.files, size.bytes, _writer(writer)))
        return tuple(summaries)


def _has_batch(metadata: Mapping[str, Any]) -> bool:
    return isinstance(metadata.get("batch"), int)


def _changed(change: evolution.SchemaLogEntry) -> str:
    types = " → ".join(filter(None, (change.from_type, change.to_type)))
    if len(types) > 40:
        types = f"{types[:40]}…"
    return f"{change.path} {types}".strip()


def _writer(writer: pipeline_status.WriterStatus | None) -> str:
    if writer is None:
        return "–"
    state = (
        "stopped"
        if writer.has_left
        else f"lease for {writer.lease_seconds} s more"
        if writer.lease_seconds
        else "lease expired"
    )
    return f"process {writer.process} on {writer.host}, {state}"


# --- showing


def _cards(content: PageContent) -> Sequence[Card]:
    bronze = content.status.bronze
    if bronze is None:
        return [Card("bronze", "nothing yet", "start with medallion run")]
    lag, headroom = bronze.lag_seconds, bronze.headroom_seconds
    collections = content.status.collections
    lags = [layer.lag_seconds for each in collections if (layer := each.gold or each.silver) is not None]
    not_in_gold = [
        each.collection for each in collections if each.gold is None and (each.is_unpublished or each.waiting_events)
    ]
    unreadable = [each.collection for each in collections if each.problem is not None]
    quarantined = sum(each.quarantined for each in collections)
    rescued = sum(each.silver.rescued for each in collections if each.silver)
    # Of tables that cannot be read nothing is counted.
    counted, fine = (f" without {signs.some(unreadable, 2)}", "look") if unreadable else ("", "fine")
    states = [(_STATES.index(_state(each)), each["collection"]) for each in _newest(content.verifications)]
    worst = min(states)[0] if states else None
    state = "never" if worst is None else _STATES[worst]
    names = sorted({name for index, name in states if index == worst and state != "equal"})
    return [
        Card("events in bronze", _number(bronze.events), f"batch {_number(bronze.batch)}"),
        Card("bronze behind", _length(lag), "the source", "" if lag is None else "look" if lag > 120 else "fine"),
        Card(
            "gold behind",
            _length(max(lags, default=None)),
            f"{signs.some(not_in_gold, 2)} not in gold yet" if not_in_gold else f"the oldest event that waits{counted}",
            "look" if not_in_gold or unreadable else "",
        ),
        Card(
            "oplog headroom",
            _length(headroom),
            "from bronze's position to the oplog's end",
            "look" if headroom is not None and headroom < 3600 else "",
        ),
        Card("rescued", _number(rescued), f"rows with rescued values{counted}", "look" if rescued else fine),
        Card("quarantined", _number(quarantined), f"events{counted}", "wrong" if quarantined else fine),
        _audited(content.audits),
        Card("verified", state, signs.some(names, 2), _STYLES.get(state, "")),
    ]


def _audited(table_audits: Sequence[audits.TableAudit]) -> Card:
    unpublished = [each.table for each in table_audits if not each.is_published]
    unmet_count = sum(not verdict.is_met for audit in table_audits for verdict in audit.verdicts)
    value = "none yet" if not table_audits else f"{unmet_count} not met" if unmet_count else "all met"
    mood = "wrong" if unpublished else "look" if unmet_count else "fine" if table_audits else ""
    return Card("expectations", value, f"{signs.some(unpublished, 2)} not published" if unpublished else "", mood)


_STYLES = {"differs": "wrong", "not checked": "look", "sample equal": "fine", "equal": "fine"}
_STATES = tuple(_STYLES)
_WRONG = ("missing", "extra", "different", "incomplete", "quarantined")


def _state(verification: Mapping[str, Any]) -> str:
    """The result of verify for a collection; not `equal` if any document could not be judged."""
    if any(verification[name] for name in _WRONG):
        return "differs"
    if verification["waiting"] or verification["unsettled"]:
        return "not checked"
    # Results of an earlier version do not say whether they are of a sample.
    return "sample equal" if verification.get("is_sample") else "equal"


def _newest(verifications: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for verification in verifications:
        newest.setdefault((verification["collection"], verification["layer"]), verification)
    return list(newest.values())


def _plots(content: PageContent, plots: Any) -> list[Plot]:
    if not content.points:
        return []
    labels = [time.strftime("%H:%M", time.gmtime(each.begin_ms / 1000)) for each in content.points]
    seconds = HOURS * 3600 / POINTS
    rates = plots.Series("events a second", [each.events / seconds for each in content.points])
    lags = plots.Series("seconds behind", [each.lag_seconds for each in content.points])
    page_plots = [
        Plot("Events a second, in the last day", plots.columns(labels, [rates], unit="/s")),
        Plot("Seconds from the source to bronze, in the last day", plots.lines(labels, [lags], unit="s")),
    ]
    collections = [each for each in content.status.collections if each.gold is not None][:SHOWN]
    if collections:
        rows = plots.Series("rows in gold", [each.gold.rows for each in collections if each.gold])
        page_plots.append(Plot("Rows by collection", plots.bars([each.collection for each in collections], [rows], unit="")))
    if content.tables:
        sizes = plots.Series("MB", [each.bytes / 1e6 for each in content.tables[:SHOWN]])
        page_plots.append(
            Plot("Size by table", plots.bars([each.name for each in content.tables[:SHOWN]], [sizes], unit="MB"))
        )
    return page_plots


def _time(at_ms: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at_ms / 1000))


def _number(value: float) -> str:
    return f"{value:,}"


def _length(seconds: float | None) -> str:
    return "unknown" if seconds is None else units.duration(max(0, seconds))


def _behind(layer: pipeline_status.TableStatus | None) -> str:
    if layer is None:
        return "–"
    return "–" if not layer.lag_events else f"{layer.lag_events:,} events, {_length(layer.lag_seconds)}"
