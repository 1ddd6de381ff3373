"""Makes a consistent cut: all gold tables at one cluster time of the source, without splitting transactions.

    chosen      the newest clean end of a batch in bronze (`cdc_core.gold.cut`) that all tables can reach
    applied     silver, up to exactly that batch
    published   gold, and the models over exactly these versions
    recorded    `ops/cuts`: the version of each table that shows the cut, all in one commit

Readers use time travel to these versions, as long as the tables' retention keeps them. Running it again over the same log gives the
same cut. A run that is killed has recorded nothing, and its tables have their own positions.

History tables (`history: true`) need no cut: `past` says how to read them at any time that they cover.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.gold import cut as times
from cdc_core.properties.source import FullUpdateType
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import state as snapshot_state
from cdc_core.sql.names import identifier, literal
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry, survey
from pipelines.delta import ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.gold import history_position, models, publish
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import parallel

SCHEMA = pa.schema(
    [
        ("cut", pa.string()),
        ("made_ms", pa.int64()),
        ("time", pa.string()),
        ("until", pa.string()),
        ("batch", pa.int64()),
        ("table", pa.string()),
        ("identifier", pa.string()),
        ("version", pa.int64()),
        ("documents", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("name", pa.string()),
    ]
)
"""`name` is the pipeline's (pipelines may share a lakehouse); null in rows of earlier versions. `time` and `until` are cluster times as 16
hex digits: the tables show the source at every time from `time` to before `until`. `documents` is `exact`, or `as captured` if updates
are looked up. `missing` names collections that are incomplete or not captured, and models that wait for a table and were not updated."""

_OF_ALL_ROWS = ("made_ms", "time", "until", "batch", "documents")
"""The columns with the fields of a cut of these names."""

EXACT, AS_CAPTURED = "exact", "as captured"

PATIENCE_SECONDS = 90.0
"""Long enough for a capture to commit its position: within seconds when requested, once a minute without events otherwise."""
PAUSE = 0.5


@dataclass(frozen=True)
class CutTable:
    """A table of a cut, with the version that shows it, or for a history table the SQL condition that selects the rows."""

    name: str
    identifier: str
    version: int | None
    where: str | None = None

    @property
    def relation(self) -> str:
        """The query that reads the table at the cut."""
        version_clause = "" if self.version is None else f" VERSION AS OF {self.version}"
        return f"SELECT * FROM {self.identifier}{version_clause}" + (f" WHERE {self.where}" if self.where else "")


@dataclass(frozen=True)
class Cut:
    """The gold tables at one cluster time; the fields are described at `SCHEMA`."""

    name: str
    made_ms: int
    time: str
    until: str
    batch: int
    documents: str
    missing: tuple[str, ...]
    tables: tuple[CutTable, ...]

    @property
    def sql(self) -> str:
        """A query over all tables at the cut, to copy and change."""
        if not self.tables:
            return ""
        query_names = dict(zip(self.tables, _query_names([each.name for each in self.tables])))
        parts = ",\n     ".join(f"{name} AS ({each.relation})" for each, name in query_names.items())
        counts = "\nUNION ALL ".join(
            f"SELECT {literal(each.name)} AS `table`, count(*) AS `rows` FROM {name}" for each, name in query_names.items()
        )
        return f"WITH {parts}\n{counts}"


def _query_names(names: Sequence[str]) -> list[str]:
    """Quoted names for the parts of a query: easy to type, and unique without regard to case, as Spark compares them."""
    used_names: dict[str, str] = {}
    for name in names:
        plain = "".join(c if c.isalnum() else "_" for c in name)
        choices = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
        unique_name = next(choice for choice in choices if choice.lower() not in used_names)
        used_names[unique_name.lower()] = identifier(unique_name)
    return list(used_names.values())


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    as_of: str,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
    patience: float = 0.0,
    ask: Callable[[], None] = lambda: None,
) -> Cut:
    """Bring silver and gold to the newest cut at `as_of` or before, and record it.

    If silver is already past the newest clean cut, waits up to `patience` seconds for the capture; `ask` requests that the capture
    commits its position. Raises `SettingsError` for an invalid time, `Temporary` if bronze has not reached it or ends inside a cluster
    time, `DecisionNeeded` if tables are past it, `GateFailed` if a version does not meet its expectations (then there is no cut), and
    what silver and gold raise.
    """
    requested = times.parsed(as_of)
    audit = publish.gate(spark, settings)
    boundary = _awaited(
        spark, settings, requested, until=time.monotonic() + patience, stop=stop or threading.Event(), ask=ask
    )
    # Only silver needs the limit: gold never goes further than silver.
    silver.run(spark, settings, take_over=take_over, sessions=sessions, stop=stop, to=boundary.batch)
    # After silver, not at the same time: no table may be published from a silver table that is still before the batch.
    gold.run(spark, settings, take_over=take_over, sessions=sessions, stop=stop, audit=audit)
    cut_tables = [*_collections(spark, settings, boundary)]
    waiting_models: list[str] = []
    if settings.gold.models is not None:
        pinned = {each.name: each.version for each in cut_tables if each.version is not None}
        results = models.run(spark, settings, audit=audit, take_over=take_over, pinned=pinned, stop=stop)
        layout = delta.layout(settings.lakehouse)
        waiting_models += [each.name for each in results.models if each.did == "waits"]
        for model in results.models:
            table = layout.model(model.name)
            # A view has no versions to travel to, and a model that waits is not at the cut.
            if model.did not in ("view", "waits") and delta.exists(spark, table):
                version = model.version if model.version is not None else table_history.version(spark, table)
                cut_tables.append(CutTable(model.name, str(table), version))
    # A run that was stopped ends without an error, and its tables may be anywhere before the cut.
    if stop is not None and stop.is_set():
        raise errors.Temporary("stopped before all tables had reached the cut; nothing was recorded")
    if not cut_tables:
        raise errors.Temporary("gold has no tables yet that a cut could show; nothing was recorded")
    new_cut = Cut(
        name=_name(boundary.time),
        made_ms=clock.now_ms(),
        time=boundary.time,
        until=boundary.until,
        batch=boundary.batch,
        documents=_documents(settings),
        missing=(*_missing(spark, settings, boundary), *waiting_models),
        tables=tuple(sorted(cut_tables, key=lambda each: each.name)),
    )
    _note(spark, settings, new_cut)
    return new_cut


def _name(time_: str) -> str:
    return f"{int(time_[:8], 16)}-{int(time_[8:], 16)}"


def _documents(settings: Settings) -> str:
    """`EXACT` or `AS_CAPTURED`: a document that is looked up after its event may be newer than the event."""
    source = settings.source
    is_looked_up = source.capture_mode.has_full_updates and source.capture_mode_full_update_type is FullUpdateType.LOOKUP
    return AS_CAPTURED if is_looked_up else EXACT


def past(spark: SparkSession, settings: Settings, *, as_of: str) -> Cut:
    """How to read the history tables at a cluster time, without splitting transactions. Writes nothing.

    Raises `SettingsError` for an invalid time or if no collection has `history: true`, `Temporary` if bronze or a history table has not
    reached the time, and `DecisionNeeded` for a time before bronze begins.
    """
    requested = times.parsed(as_of)
    histories = _histories(spark, settings)
    last_batch = _applied(spark, settings, histories)
    near_batch = _near_batch(spark, settings, requested, last_batch)
    # Read all batches (tens of millions in a year) only if the near ones are not enough.
    for first_batch in dict.fromkeys((near_batch, 0)):
        boundaries = _boundaries(spark, settings, at=first_batch)
        usable = [each for each in boundaries if each.batch <= last_batch]
        time_ = requested if requested is not None else usable[-1].time if usable else ""
        earlier = [each for each in usable if each.time <= time_]
        if earlier and not (_are_behind(boundaries, requested) or _are_behind(usable, requested)):
            break
    _check_reached(settings, boundaries, requested)
    if _are_behind(usable, requested):
        raise errors.Temporary("a table of versions is behind: run medallion gold, and ask again")
    if not earlier:
        raise errors.DecisionNeeded(
            f"bronze begins after {times.shown(time_)}: its first cut is at {times.shown(boundaries[0].time)}. If old "
            "events were removed, query the history tables yourself, by valid_from and valid_to"
        )
    # The greatest sequence of a cluster time: that of a snapshot's rows.
    last_sequence = literal(f"{time_}ffffffff")
    where = f"`__sequence` <= {last_sequence} AND (`__until` IS NULL OR `__until` > {last_sequence})"
    return Cut(
        name=_name(time_),
        made_ms=clock.now_ms(),
        time=time_,
        until=f"{int(time_, 16) + 1:016x}",
        batch=last_batch,
        documents=_documents(settings),
        missing=_missing(spark, settings, earlier[-1], at=time_),
        tables=tuple(CutTable(name, str(table), None, where) for (name, table), _ in histories),
    )


NEAR = 1000
"""Among so many batches before a time there is nearly always a clean cut: about every other batch is one while the capture keeps up."""


def _near_batch(spark: SparkSession, settings: Settings, requested: str | None, batch: int) -> int:
    """The batch `NEAR` before the last one with a change up to the time, or before `batch`, whichever is first."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    if requested is None or not delta.exists(spark, table):
        return max(0, batch - NEAR)
    until = f"kind <> 'snapshot' AND sequence < {literal(requested + 'g')}"  # sorts after every sequence of that time
    last = spark.sql(f"SELECT max(batch) AS batch FROM {table} WHERE {until}").collect()[0].batch or 0
    return max(0, min(last, batch) - NEAR)


def _are_behind(boundaries: Sequence[times.CutBoundary], requested: str | None) -> bool:
    """Whether there is no boundary, or the last one is before the time."""
    return not boundaries or (requested is not None and boundaries[-1].until <= requested)


def _histories(
    spark: SparkSession, settings: Settings
) -> list[tuple[tuple[str, tables.TableRef], history_position.HistoryPosition]]:
    """The existing history tables with their collections' names and their positions."""
    layout = delta.layout(settings.lakehouse)
    histories = []
    for namespace in registry.read(spark, settings).namespaces:
        table = layout.history(*namespace)
        if settings.silver.for_collection(str(namespace)).history and delta.exists(spark, table):
            histories.append(((str(namespace), table), history_position.position(spark, table)))
    if not histories:
        message = "no collection has a history table"
        raise errors.SettingsError(errors.Problem("silver", message, "set history: true; medallion gold then creates it"))
    return histories


def _applied(
    spark: SparkSession,
    settings: Settings,
    table_positions: Sequence[tuple[tuple[str, tables.TableRef], history_position.HistoryPosition]],
) -> int:
    """The bronze batch up to which all history tables are complete.

    A collection's position stays at its last event: what counts is whether bronze has more events of it.
    """
    layout = delta.layout(settings.lakehouse)
    table = layout.bronze(settings.name)
    if not delta.exists(spark, table):
        return 0
    _, newest = _reached(spark, table)
    histories = {registry.Namespace.parse(name): position.to for (name, _), position in table_positions}
    silver_positions = {each: registry.silver_position(spark, layout.silver(*each)) for each in histories}
    log = bronze_log.newest(spark, table).log
    # From another bronze log, none of this one's events are applied.
    applied_logs = [*(each.log for each in silver_positions.values()), *(position.log for _, position in table_positions)]
    if any(registry.is_other_log(each, log) for each in applied_logs):
        return 0
    starts = {namespace: each.to for namespace, each in silver_positions.items()}
    counts, sweeps = survey.surveyed(spark, table, BatchRange(min(starts.values()), newest), starts=starts)

    def lacks(namespace: registry.Namespace) -> bool:
        options, position = settings.silver.for_collection(str(namespace)), silver_positions[namespace]
        return (
            histories[namespace] < position.to
            or counts.get(namespace, survey.EventCounts()).events > 0
            or any(
                sweep.db_collection == str(namespace) and sweep.is_due(after=position.to, swept=position.swept)
                for sweep in survey.sweeps_to_apply(sweeps, options)
            )
        )

    positions = [to for namespace, to in histories.items() if lacks(namespace)]
    return min(positions, default=newest)


def _boundaries(spark: SparkSession, settings: Settings, *, at: int = 0) -> list[times.CutBoundary]:
    """The batches at which bronze may be cut, from batch `at` on; raises `Temporary` if there is no bronze."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    if not delta.exists(spark, table):
        raise errors.Temporary(f"{table.label}: there is no bronze yet; run medallion capture first")
    complete_time, newest = _reached(spark, table)
    return times.boundaries(_batches(spark, table, newest, at=at), complete_time=complete_time)


def _check_reached(settings: Settings, boundaries: Sequence[times.CutBoundary], requested: str | None) -> None:
    """Raise `Temporary` if bronze does not have all changes up to a time."""
    if requested is not None and _are_behind(boundaries, requested):
        end = times.shown(boundaries[-1].time) if boundaries else "nothing"
        table = delta.layout(settings.lakehouse).bronze(settings.name)
        raise errors.Temporary(
            f"{table.label}: bronze has reached {end}, which is before {times.shown(requested)}; try again later, or use now"
        )


def _awaited(
    spark: SparkSession,
    settings: Settings,
    requested: str | None,
    *,
    until: float,
    stop: threading.Event,
    ask: Callable[[], None],
) -> times.CutBoundary:
    """The result of `_chosen`; without an `requested` time it retries until the deadline `until`."""
    while True:
        try:
            return _chosen(spark, settings, requested)
        except errors.Temporary:
            if requested is not None or time.monotonic() >= until:
                raise
            ask()
            if stop.wait(PAUSE):
                raise


def _chosen(spark: SparkSession, settings: Settings, requested: str | None) -> times.CutBoundary:
    # Tables cannot go back: the cut must not be before the furthest one.
    namespaces, layout = registry.read(spark, settings).namespaces, delta.layout(settings.lakehouse)
    positions: list[registry.SilverPosition | history_position.HistoryPosition] = [
        *(registry.silver_position(spark, layout.silver(*each)) for each in namespaces),
        # Where silver was restored, a history stays where it is until silver has passed it.
        *(
            history_position.position(spark, layout.history(*each))
            for each in namespaces
            if settings.silver.for_collection(str(each)).history
        ),
    ]
    table = layout.bronze(settings.name)
    log = bronze_log.newest(spark, table).log if delta.exists(spark, table) else None
    # Silver itself refuses tables that were made from another bronze log, and says what to do.
    at_least = max((each.to for each in positions if not registry.is_other_log(each.log, log)), default=0)
    boundaries = _boundaries(spark, settings, at=at_least)
    _check_reached(settings, boundaries, requested)
    boundary = times.chosen(boundaries, at_least=at_least, latest=requested)
    if boundary is not None:
        return boundary
    if times.chosen(boundaries, at_least=at_least, latest=None) is not None and requested is not None:
        raise errors.DecisionNeeded(
            f"silver or a history is already past {times.shown(requested)} and cannot go back. medallion cut list shows existing cuts; "
            "medallion cut show --as-of reads tables with history: true at any time"
        )
    raise errors.Temporary(
        f"bronze of {settings.name} may not have all events of its newest cluster time yet, or a snapshot is ahead "
        "of the stream; try again when the capture has committed more, or has ended"
    )


def _reached(spark: SparkSession, table: tables.TableRef) -> tuple[str | None, int]:
    """The cluster time before which bronze is complete, None if its newest batch does not say; and the newest batch."""
    # Later commits may be of others, such as an OPTIMIZE, which adds no events.
    standing = table_history.standing(spark, table)
    metadata = {} if standing.is_restored else standing.metadata
    batch = spark.sql(f"SELECT max(batch) AS batch FROM {table}").collect()[0].batch or 0
    complete = metadata.get("complete")
    # A statement from before the newest batch says nothing about the events in it.
    is_of_newest = isinstance(complete, str) and metadata.get("batch") == batch
    return (complete[2:18].lower() if is_of_newest and isinstance(complete, str) else None), batch


def _batches(spark: SparkSession, table: tables.TableRef, newest: int, *, at: int) -> list[times.BatchTimes]:
    """The cluster times of each batch, from narrow columns; all batches before `at`, which cannot be a cut, are combined into one.

    A heartbeat's token says how far the stream was. An event without a place in the order has no time: it would bar all later cuts.
    """
    time = f"CASE WHEN sequence RLIKE {literal(bronze.SEQUENCE)} THEN left(sequence, 16) END"
    rows = spark.sql(
        f"SELECT greatest(batch, {at - 1}) AS number, min(time) FILTER (WHERE kind <> 'snapshot') AS first, "
        "max(time) FILTER (WHERE kind <> 'snapshot') AS last, max(time) FILTER (WHERE kind = 'snapshot') AS snapshot "
        f"FROM (SELECT batch, kind, {time} AS time FROM {table} WHERE batch <= {newest}) GROUP BY greatest(batch, {at - 1})"
    ).toArrow()
    return [times.BatchTimes(*row) for row in zip(*(column.to_pylist() for column in rows.columns))]


def _collections(spark: SparkSession, settings: Settings, boundary: times.CutBoundary) -> list[CutTable]:
    """The collections' tables with the versions that show the cut; raises `CommitConflict` if another run has advanced one."""
    layout = delta.layout(settings.lakehouse)
    cut_tables = []
    for namespace in registry.read(spark, settings).namespaces:
        silver_position = registry.silver_position(spark, layout.silver(*namespace))
        locations = {str(namespace): layout.gold}
        if settings.silver.for_collection(str(namespace)).history:
            locations[f"{namespace}_history"] = layout.history
        for name, locate in locations.items():
            table = locate(*namespace)
            standing = table_history.standing(spark, table)
            if standing.version < 0:
                continue
            to = standing.metadata.get("to")
            # Silver may be before the batch: the position of a collection without events does not advance with every batch.
            if silver_position.to > boundary.batch or to != silver_position.to:
                raise errors.CommitConflict(
                    f"{table.label}: another run advanced silver or gold while the cut was made; nothing was recorded. Stop "
                    "that run, or try again"
                )
            cut_tables.append(CutTable(name, str(table), standing.version))
    return cut_tables


def _missing(
    spark: SparkSession, settings: Settings, boundary: times.CutBoundary, *, at: str | None = None
) -> tuple[str, ...]:
    """The collections that are incomplete up to the cut's batch, or at a later time (a snapshot is unfinished, or changes were lost), or left out."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    names = {*snapshot_state.incomplete(bronze_log.gap_and_snapshot_heartbeats(spark, table, to=boundary.batch))}
    if at is not None:  # the capture notes a gap at its end: in a later batch than that of a time within it
        names |= snapshot_state.lost_at(bronze_log.gap_and_snapshot_heartbeats(spark, table), at)
    else:  # what is left out now may have been captured at an earlier time
        source_filter = filters.of(settings.source)
        names |= {str(each) for each in registry.read(spark, settings).namespaces if not source_filter.includes(*each)}
    return tuple(sorted(names))


def _note(spark: SparkSession, settings: Settings, cut: Cut) -> None:
    table = delta.layout(settings.lakehouse).ops("cuts")
    common = {"name": settings.name, "cut": cut.name, "missing": list(cut.missing)}
    common |= {name: getattr(cut, name) for name in _OF_ALL_ROWS}
    rows = [{**common, "table": each.name, "identifier": each.identifier, "version": each.version} for each in cut.tables]
    ops_tables.note(spark, table, rows, SCHEMA)


def read(spark: SparkSession, settings: Settings) -> list[Cut]:
    """The pipeline's cuts, newest first; a cut that was made again is listed once, as it was made last."""
    layout = delta.layout(settings.lakehouse)
    table = layout.ops("cuts")
    if delta.found(spark, table) is None:
        return []
    # A cut that was made again has the same name: `made_ms` distinguishes the rows.
    by_cut: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in ops_tables.rows(spark, table, SCHEMA).to_pylist():
        if row["name"] in (None, settings.name):
            by_cut.setdefault((row["made_ms"], row["cut"]), []).append(row)
    cuts: dict[str, Cut] = {}
    for _, rows in sorted(by_cut.items(), reverse=True):
        cut = _cut_of_rows(rows, layout)
        cuts.setdefault(cut.name, cut)
    return list(cuts.values())


def _cut_of_rows(rows: Sequence[Mapping[str, Any]], layout: tables.Layout) -> Cut:
    first, cut_tables = rows[0], []
    for name, version in sorted((row["table"], row["version"]) for row in rows):
        # Not the identifier of the row: the lakehouse may have been moved. Only names of models have no dot.
        place = layout.gold(*registry.Namespace.parse(name)) if "." in name else layout.model(name)
        cut_tables.append(CutTable(name, str(place), version))
    return Cut(
        name=first["cut"],
        **{name: first[name] for name in _OF_ALL_ROWS},
        missing=tuple(first["missing"] or ()),
        tables=tuple(cut_tables),
    )


def named(cuts: Sequence[Cut], name: str | None) -> Cut:
    """The cut of this name, or the newest for None. Raises `SettingsError` if there is none."""
    for each in cuts:
        if name is None or each.name == name:
            return each
    if not cuts:
        raise errors.SettingsError(
            errors.Problem("--cut", "there is no cut yet", "make one with medallion gold --as-of now")
        )
    names = ", ".join(each.name for each in cuts[:10])
    raise errors.SettingsError(errors.Problem("--cut", f"there is no cut {name}", f"known are {names}"))
