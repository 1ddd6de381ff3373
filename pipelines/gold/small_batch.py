"""A few changed documents, published by this process: what `current.GoldTable.merged` does, without a query.

For a collection without expectations whose silver and gold tables this process sees, where silver's changes are
documents with the columns that gold has. Everything else goes through `GoldTable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField, StructType

from cdc_core.silver import merge
from pipelines.bronze import survey
from pipelines.delta import live_files, local_log, upsert
from pipelines.delta import tables as delta
from pipelines.delta.live_files import LiveFiles, NotReadable
from pipelines.gold import current

if TYPE_CHECKING:
    from cdc_core.tables import layout as tables
    from pipelines.delta.writer import Writer

_STATE = ("__deleted", "__incomplete", "__known")
"""Silver's columns that say whether a row is a current document."""


@dataclass
class SourceFiles:
    """A collection's silver table and its remembered deletes, as this process follows them from version to version."""

    silver: LiveFiles
    deletes: LiveFiles

    @staticmethod
    def of(silver: tables.TableRef, deletes: tables.TableRef) -> SourceFiles | None:
        """None where this process does not see the tables."""
        places = local_log.folder(silver), local_log.folder(deletes)
        return None if None in places else SourceFiles(*(LiveFiles(place) for place in places if place is not None))


def merged(table: current.GoldTable, sources: SourceFiles, writer: Writer) -> int | None:
    """Publish the rows of the changed keys; how many keys. None where `GoldTable.merged` has to; then nothing was
    committed."""
    live = writer.live
    if live is None or writer.direct is None:
        return None
    try:
        changes = _changes(table, sources)
        if changes is None or not live.at(writer.version) or not live.is_unchecked() or not live.has_vectors():
            return None
        if live.is_many(upsert.KEY, changes.keys):
            return None
        columns = _columns(changes.current, sources.silver, live)
        if columns is None:
            return None
        if columns != live.spark_schema() and not (writer.define(columns) and live.at(writer.version)):
            return None
        rows = live_files.conformed(changes.current, live.schema)
    except (OSError, pa.ArrowException, NotReadable):
        return None
    if not changes.keys:
        table.said[:] = [current.judgement(writer)]
        writer.mark(to=table.work.silver.to, extra=table.extra())
        return 0
    listed = live.configuration.get(current.STATISTICS, "`__key`").split(",")
    statistics = [name for name in (each.strip("`") for each in listed) if name in rows.column_names]
    done = writer.replace_arrow(rows, keys=changes.keys, to=table.work.silver.to, extra=table.extra(), statistics=statistics)
    return None if done is None else len(changes.keys)


@dataclass(frozen=True)
class FirstLoad:
    """The current documents of a table that is to be made, and its columns."""

    rows: pa.Table
    columns: StructType


def first_load(table: current.GoldTable, sources: SourceFiles) -> FirstLoad | None:
    """What a new table is made of; None where this process cannot tell, or where it is much."""
    silver = sources.silver
    try:
        if not silver.at(table.work.silver.version):
            return None
        rows = silver.rows_above("__batch", -1, columns=silver.schema.names, limit=survey.MAX_DRIVER_ROWS)
    except (OSError, pa.ArrowException, NotReadable):
        return None
    rows = rows.filter(pc.invert(_is_gone(rows)))
    return FirstLoad(rows, _wanted(silver.spark_schema(), has_rescued=rows["__rescued"].null_count < len(rows)))


def loaded(first: FirstLoad, table: current.GoldTable, writer: Writer) -> int | None:
    """Put the first documents into a table that was made for them; their number. None as in `merged`."""
    live = writer.live
    if live is None or not live.at(writer.version) or live.files():
        return None
    try:
        rows = live_files.conformed(first.rows, live.schema)
    except NotReadable:
        return None
    done = writer.replace_arrow(
        rows, keys=(), to=table.work.silver.to, extra=table.extra(), statistics=_statistics(live, rows)
    )
    return None if done is None else rows.num_rows


def _statistics(live: LiveFiles, rows: pa.Table) -> list[str]:
    """The columns of which the table keeps statistics."""
    listed = live.configuration.get(current.STATISTICS, "`__key`").split(",")
    return [name for name in (each.strip("`") for each in listed) if name in rows.column_names]


@dataclass(frozen=True)
class _Changes:
    """The keys that changed, and those of their rows in silver that are current documents."""

    keys: list[str]
    current: pa.Table


def _changes(table: current.GoldTable, sources: SourceFiles) -> _Changes | None:
    """What `GoldTable` finds out by queries; None where that needs all of silver's rows."""
    work, silver = table.work, sources.silver
    assert work.gold.to is not None
    if not silver.at(work.silver.version):
        return None
    above = {"columns": silver.schema.names, "limit": survey.MAX_DRIVER_ROWS}
    rows = silver.rows_above("__batch", work.gold.to, **above)
    keys = rows["__key"].to_pylist()
    removed = _removed(table, sources.deletes)
    # A delete that may be older than what silver held already has to be compared with all of it.
    if removed and (work.gold.high is None or min(removed.values()) <= work.gold.high):
        return None
    gone = sorted(removed.keys() - set(keys))
    return _Changes([*keys, *gone], rows.filter(pc.invert(_is_gone(rows))))


def _removed(table: current.GoldTable, deletes: LiveFiles) -> dict[str, str]:
    """The keys whose deletes were remembered since gold's position, with the greatest sequence of each. Raises
    `NotReadable`."""
    if not delta.exists(table.spark, table.deletes):
        return {}
    newest = local_log.newest_version(deletes.folder)
    if newest is None or not deletes.at(newest):
        raise NotReadable
    assert table.work.gold.to is not None
    found = deletes.rows_above("__batch", table.work.gold.to, columns=deletes.schema.names, limit=survey.MAX_DRIVER_ROWS)
    removed: dict[str, str] = {}
    for key, sequence, batch in zip(*(found[name].to_pylist() for name in ("__key", "__sequence", "__batch"))):
        if batch <= table.work.silver.to:
            removed[key] = max(sequence, removed.get(key, ""))
    return removed


def _is_gone(rows: pa.Table) -> pa.Array:
    """Which rows are no current documents, as `GoldTable` says it in SQL."""
    state = {name: rows[name] if name in rows.column_names else pa.nulls(len(rows), pa.bool_()) for name in _STATE[:2]}
    is_incomplete = pc.fill_null(state["__incomplete"], False)
    has_no_base = pc.and_(is_incomplete, pc.equal(pc.fill_null(rows["__known"], ""), ""))
    return pc.or_(has_no_base, pc.fill_null(state["__deleted"], False))


def _columns(rows: pa.Table, silver: LiveFiles, gold: LiveFiles) -> StructType | None:
    """Gold's columns with those that it lacks; None where one has to change its type."""
    held = gold.spark_schema()
    has_rescued = "__rescued" in held.names or rows["__rescued"].null_count < len(rows)
    wanted = _wanted(silver.spark_schema(), has_rescued=has_rescued)
    change = merge.alterations(held, wanted)
    if change.widened or change.impossible:
        return None
    columns = merge.with_added(held, wanted) if change.added else held
    return columns if merge.is_same(columns, wanted) else None


def _wanted(silver: StructType, *, has_rescued: bool) -> StructType:
    """The columns that gold is to have, as `GoldTable.wanted` says it."""
    names = [name for name in silver.names if name not in current.HIDDEN]
    names += ["__rescued", "__key"] if has_rescued else ["__key"]
    return StructType([StructField(name, silver[name].dataType) for name in names])
