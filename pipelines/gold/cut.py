"""A consistent cut: all gold tables at one cluster time of the source, with transactions whole.

    chosen      the newest end of a batch in bronze that is clean (`cdc_core.gold.cut`), and to which all tables can come
    applied     silver, up to that batch and no further
    published   gold, and the models over these very versions
    noted       `ops/cuts`: for each table the version that shows the cut, all in one commit

Readers go back to these versions by time travel, as long as the tables' retention keeps them. Running it again over the same
log gives the same cut; one that is killed has noted nothing, and its tables stand at positions of their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc_core import errors
from cdc_core.gold import cut
from cdc_core.properties.source import FullUpdateType
from cdc_core.snapshot import state as snapshot_state
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.bronze import collections as registry
from pipelines.delta import ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.gold import models, publish
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

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
    ]
)
"""`time` and `until` are cluster times as 16 hex digits: the tables show the source from the one to before the other. `documents`
is `exact`, or `as captured` where updates are looked up; `missing` names collections whose snapshot was not whole."""

PROPERTIES = {"delta.enableDeletionVectors": "false", "delta.checkpointInterval": "50"}
EXACT, AS_CAPTURED = "exact", "as captured"


@dataclass(frozen=True)
class CutTable:
    """A table of a cut, and the version that shows it."""

    name: str
    identifier: str
    version: int


@dataclass(frozen=True)
class Cut:
    """The gold tables at one cluster time; see `SCHEMA`."""

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
        """A query over all tables at the cut, to go on from."""
        named = {each: identifier("".join(c if c.isalnum() else "_" for c in each.name)) for each in self.tables}
        read = ",\n     ".join(
            f"{name} AS (SELECT * FROM {each.identifier} VERSION AS OF {each.version})" for each, name in named.items()
        )
        counted = "\nUNION ALL ".join(
            f"SELECT '{each.name}' AS `table`, count(*) AS `rows` FROM {name}" for each, name in named.items()
        )
        return f"WITH {read}\n{counted}"


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    as_of: str,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
) -> Cut:
    """Bring silver and gold to the newest cut at `as_of` or before, and note it.

    Raises `SettingsError` for a time that is none, `Temporary` where bronze is not that far or ends inside a cluster time,
    `DecisionNeeded` where tables are past that time, `GateFailed` where expectations refuse a version (then there is no cut), and
    what silver and gold raise.
    """
    asked = parsed(as_of)
    audit = publish.gate(spark, settings)
    chosen = _chosen(spark, settings, asked)
    # Only silver has to be held at the batch: gold goes no further than silver.
    silver.run(spark, settings, take_over=take_over, sessions=sessions, stop=stop, to=chosen.batch)
    # After silver and not beside it: a table must not be published from a silver that is still below the batch.
    gold.run(spark, settings, take_over=take_over, sessions=sessions, stop=stop, audit=audit)
    found = [*_collections(spark, settings, chosen)]
    if settings.gold.models is not None:
        pinned = {each.name: each.version for each in found}
        made = models.run(spark, settings, audit=audit, take_over=take_over, pinned=pinned, stop=stop)
        layout = delta.layout(settings.lakehouse)
        for each in made.models:
            table = layout.model(each.name)
            # A view has no versions that readers could go back to.
            if each.did != "view" and delta.exists(spark, table):
                version = each.version if each.version is not None else table_history.version(spark, table)
                found.append(CutTable(each.name, str(table), version))
    # A run that is stopped ends without an error, and its tables may be anywhere before the cut.
    if stop is not None and stop.is_set():
        raise errors.Temporary("stopped before all tables were at the cut; nothing was noted")
    is_looked_up = settings.source.capture_mode.has_full_updates and (
        settings.source.capture_mode_full_update_type is FullUpdateType.LOOKUP
    )
    noted = Cut(
        name=f"{int(chosen.time[:8], 16)}-{int(chosen.time[8:], 16)}",
        made_ms=clock.now_ms(),
        time=chosen.time,
        until=chosen.until,
        batch=chosen.batch,
        documents=AS_CAPTURED if is_looked_up else EXACT,
        missing=_missing(spark, settings, chosen),
        tables=tuple(sorted(found, key=lambda each: each.name)),
    )
    _note(spark, settings, noted)
    return noted


def parsed(as_of: str) -> str | None:
    """The cluster time of `--as-of`; None for now. Raises `SettingsError`."""
    return None if as_of.strip().lower() == "now" else cut.parsed(as_of)


def _chosen(spark: SparkSession, settings: Settings, asked: str | None) -> cut.Boundary:
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    if not delta.exists(spark, table):
        raise errors.Temporary(f"{table.label}: there is no bronze yet; run medallion capture first")
    reached, newest = _reached(spark, table)
    found = cut.boundaries(_batches(spark, table, newest), reached=reached)
    if asked is not None and (not found or found[-1].until <= asked):
        to = cut.shown(found[-1].time) if found else "nothing"
        raise errors.Temporary(
            f"{table.label}: bronze shows {to}, which is not yet {cut.shown(asked)}; try again when the capture is further, or ask for now"
        )
    # No table goes back: the cut has to lie at or after the one that is furthest.
    at = max((_silver(spark, settings, each).to for each in registry.read(spark, settings).namespaces), default=0)
    boundary = cut.chosen(found, at_least=at, asked=asked)
    if boundary is not None:
        return boundary
    if cut.chosen(found, at_least=at, asked=None) is not None and asked is not None:
        raise errors.DecisionNeeded(
            f"silver is past {cut.shown(asked)} already, and does not go back. medallion cut list names the cuts that were made; "
            "tables with history: true can be asked for any time"
        )
    raise errors.Temporary(
        f"{table.label}: bronze ends at a cluster time of which more may come, or a snapshot is ahead of the stream; try again "
        "when the capture has committed more, or has ended"
    )


def _reached(spark: SparkSession, table: tables.TableRef) -> tuple[str | None, int]:
    """The cluster time before which bronze is complete, where its owner said so after its newest batch; and that batch."""
    newest = table_history.commits(spark, table, limit=1)[0]
    said = (newest.metadata or {}) if newest.restored is None else {}
    batch = spark.sql(f"SELECT max(batch) AS batch FROM {table}").collect()[0].batch or 0
    complete = said.get("complete")
    # What was said before the newest batch is no promise about the events in it.
    is_of_newest = isinstance(complete, str) and said.get("batch") == batch
    return (complete[2:18].lower() if is_of_newest and isinstance(complete, str) else None), batch


def _batches(spark: SparkSession, table: tables.TableRef, newest: int) -> list[cut.Batch]:
    """The cluster times in each batch, from narrow columns. Heartbeats tell by their token how far the stream was when they came."""
    rows = spark.sql(
        "SELECT batch, min(CASE WHEN kind <> 'snapshot' THEN left(sequence, 16) END) AS first, "
        "max(CASE WHEN kind <> 'snapshot' THEN left(sequence, 16) END) AS last, "
        "max(CASE WHEN kind = 'snapshot' THEN left(sequence, 16) END) AS snapshot "
        f"FROM {table} WHERE batch <= {newest} GROUP BY batch"
    ).collect()
    return [cut.Batch(row.batch, row.first, row.last, row.snapshot) for row in rows]


def _silver(spark: SparkSession, settings: Settings, namespace: registry.Namespace) -> registry.SilverPosition:
    layout = delta.layout(settings.lakehouse)
    return registry.silver_position(spark, layout.silver(namespace.db, namespace.collection))


def _collections(spark: SparkSession, settings: Settings, chosen: cut.Boundary) -> list[CutTable]:
    """The collections' tables with the versions that show the cut; raises `CommitConflict` where another run moved one on."""
    layout = delta.layout(settings.lakehouse)
    found = []
    for namespace in registry.read(spark, settings).namespaces:
        silver_at = _silver(spark, settings, namespace)
        makes = {str(namespace): layout.gold}
        if settings.silver.for_collection(str(namespace)).history:
            makes[f"{namespace}_history"] = layout.history
        for name, make in makes.items():
            table = make(namespace.db, namespace.collection)
            if not delta.exists(spark, table):
                continue
            version = table_history.version(
                spark, table
            )  # read before the position: what is not past the cut then was not before
            commit = table_history.position(spark, table)
            to = (commit.metadata or {}).get("to") if commit is not None else None
            # Below the batch silver may stay: a collection without events does not move its position with each batch.
            if silver_at.to > chosen.batch or to != silver_at.to:
                raise errors.CommitConflict(
                    f"{table.label}: another run moved silver or gold on while the cut was made; nothing was noted. Stop it, or try again"
                )
            found.append(CutTable(name, str(table), version))
    return found


def _missing(spark: SparkSession, settings: Settings, chosen: cut.Boundary) -> tuple[str, ...]:
    """The collections whose snapshot is not whole in the batches of the cut."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    rows = spark.sql(
        f"SELECT payload FROM {table} WHERE kind = 'heartbeat' AND payload LIKE '{{\"snapshot\"%' AND batch <= {chosen.batch} "
        "ORDER BY `offset`"
    ).collect()
    states = snapshot_state.states(json.loads(row.payload) for row in rows)
    return tuple(sorted({name for state in states if not state.is_done for name in state.missing}))


def _note(spark: SparkSession, settings: Settings, made: Cut) -> None:
    shared = {
        "cut": made.name,
        "made_ms": made.made_ms,
        "time": made.time,
        "until": made.until,
        "batch": made.batch,
        "documents": made.documents,
        "missing": list(made.missing),
    }
    rows = [{**shared, "table": each.name, "identifier": each.identifier, "version": each.version} for each in made.tables]
    ops_tables.note(spark, delta.layout(settings.lakehouse).ops("cuts"), rows, SCHEMA, properties=PROPERTIES)


def read(spark: SparkSession, settings: Settings) -> list[Cut]:
    """The cuts that were made, newest first; one that was made again is there once, as it was made last."""
    table = delta.layout(settings.lakehouse).ops("cuts")
    if not delta.exists(spark, table):
        return []
    # A cut that was made again has the same name: the time of making tells the rows of one from those of the other.
    by_cut: dict[tuple[int, str], list[dict[str, object]]] = {}
    for row in ops_tables.rows(spark, table, SCHEMA).to_pylist():
        by_cut.setdefault((row["made_ms"], row["cut"]), []).append(row)
    found: dict[str, Cut] = {}
    for _, rows in sorted(by_cut.items(), reverse=True):
        each = _of_rows(rows)
        found.setdefault(each.name, each)
    return list(found.values())


def _of_rows(rows: Sequence[dict[str, object]]) -> Cut:
    first = rows[0]
    listed = sorted((str(row["table"]), str(row["identifier"]), int(str(row["version"]))) for row in rows)
    missing = first["missing"]
    return Cut(
        name=str(first["cut"]),
        made_ms=int(str(first["made_ms"])),
        time=str(first["time"]),
        until=str(first["until"]),
        batch=int(str(first["batch"])),
        documents=str(first["documents"]),
        missing=tuple(missing) if isinstance(missing, list) else (),
        tables=tuple(CutTable(*each) for each in listed),
    )


def named(found: Sequence[Cut], name: str | None) -> Cut:
    """The cut of this name, or the newest. Raises `SettingsError` where there is none."""
    for each in found:
        if name is None or each.name == name:
            return each
    known = ", ".join(each.name for each in found[:10]) or "none yet: medallion gold --as-of now makes one"
    raise errors.SettingsError(
        errors.Problem("--cut", f"there is no cut {name}" if name else "there is no cut", f"known are {known}")
    )
