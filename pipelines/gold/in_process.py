"""Publishes changed documents in this process: what `current.GoldTable.merged` does, without a query.

If this process can read the files of its silver and gold tables. Everything else goes through `GoldTable`. Great Expectations checks rows
in Spark; up to `JUDGED_BYTES` of them are sent there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from cdc_core.sql import table_columns
from cdc_core.tables import layout as tables
from pipelines.bronze import collection_events
from pipelines.delta import live_files, query_execution, table_schema, upsert
from pipelines.delta import tables as delta
from pipelines.delta.live_files import LiveFiles
from pipelines.delta.table_schema import NotReadable
from pipelines.delta.writer import Writer
from pipelines.gold import current

_STATE = ("__deleted", "__incomplete", "__known")
"""Silver's columns that say whether a row is a current document."""

LOCAL_ROWS = 1_000_000
"""The most changed rows that are published here at a time, and rows of a new table with many cores: beyond that, Spark is faster."""

FILE_BYTES = 2**30
"""The bytes of silver's files up to which a new table with more rows is written here with few cores: it is one file."""

JUDGED_BYTES = 32 * 2**20
"""The most bytes of rows that are sent to Spark for their expectations; more of them it reads itself."""

_BY_TASKS = {"spark.sql.execution.arrow.localRelationThreshold": str(64 * 2**10)}
"""The bytes of sent rows above which Spark's tasks check them: its driver evaluates each condition row by row. Three expectations about
300,000 rows of forty columns, 9 MB, took it a minute, and take tasks six seconds."""


@dataclass
class SourceFiles:
    """The files of a collection's silver table and of its remembered deletes."""

    silver: LiveFiles
    deletes: LiveFiles

    @staticmethod
    def of(spark: SparkSession, silver: tables.TableRef, deletes: tables.TableRef) -> SourceFiles | None:
        """The files of these tables; None if this process cannot read them."""
        files = live_files.of(spark, silver), live_files.of(spark, deletes)
        return None if files[0] is None or files[1] is None else SourceFiles(files[0], files[1])

    def states(self, above: int) -> pa.Table | None:
        """`__key`, the state columns and `is_rescued` of silver's rows of batches after `above`; None if they may be more than `LOCAL_ROWS`.

        Raises `NotReadable`.
        """
        if self.silver.count_above("__batch", above) > LOCAL_ROWS:
            return None
        names = [name for name in ("__key", "__rescued", *_STATE) if name in self.silver.schema.names]
        empty = pa.schema([self.silver.schema.field(name) for name in names]).empty_table()
        return pa.concat_tables([_state(empty), *self.state_parts(above, names)])

    def state_parts(self, above: int, names: Sequence[str]) -> Iterator[pa.Table]:
        """The states part by part, with these columns: rescued values may be large, and are reduced to `is_rescued`."""
        return map(_state, self.silver.parts_above("__batch", above, columns=names))

    def documents(self, above: int, schema: pa.Schema) -> Iterator[pa.Table]:
        """The current documents among the rows of batches after `above`, part by part, with gold's columns (`schema`)."""
        columns = {*schema.names, *_STATE}
        names = [name for name in self.silver.schema.names if name in columns]
        for part in self.silver.parts_above("__batch", above, columns=names):
            yield table_schema.conformed(table_schema.chosen(part, pc.invert(_is_gone(part))), schema)


def _state(rows: pa.Table) -> pa.Table:
    return rows.drop_columns("__rescued").append_column("is_rescued", pc.is_valid(rows["__rescued"]))


def merged(table: current.GoldTable, sources: SourceFiles, writer: Writer) -> int | None:
    """Publish the rows of the changed keys, and return the number of keys; None if `GoldTable.merged` has to, with nothing committed."""
    live = writer.replaceable()
    if live is None:
        return None
    try:
        changes = _changes(table, sources)
        if changes is None or live.is_many(upsert.KEY, changes.keys):
            return None
        held_columns = live.spark_schema()
        has_rescued = changes.has_rescued or "__rescued" in held_columns.names
        columns = _wanted(sources.silver.spark_schema(), has_rescued=has_rescued)
        alterations = table_columns.alterations(held_columns, columns)
        new_columns = table_columns.replacing(held_columns, columns)
        if alterations.impossible or not table_columns.is_same(new_columns, columns):
            return None
        if table.audit.judges(str(table.work.namespace)):
            # Rows that are written again for a wider type are all checked again, also if no document has changed.
            if alterations.widened or (changes.keys and not _is_judged(table, sources, writer, columns)):
                return None
        if alterations.added and not alterations.widened:
            if not (writer.define(table_columns.with_added(held_columns, columns)) and live.move_to(writer.version)):
                return None
    except (OSError, pa.ArrowException, NotReadable):
        return None
    if alterations.widened:
        return _rewritten(table, sources, writer, new_columns)
    if not changes.keys:
        table.audited[:] = [current.unmoved(writer)]
        writer.mark(to=table.work.silver.to, extra=table.extra())
        return 0
    assert table.work.gold.to is not None
    return len(changes.keys) if _replaced(table, sources, writer, table.work.gold.to, changes.keys) else None


def _is_judged(table: current.GoldTable, sources: SourceFiles, writer: Writer, columns: StructType) -> bool:
    """Check the changed documents' expectations; False if they are too large. Raises what the audit raises."""
    assert table.work.gold.to is not None
    changed = _sent(table, sources, table.work.gold.to, columns)
    if changed is None:
        return False

    def read(names: Collection[str]) -> DataFrame | None:
        return _sent(table, sources, -1, StructType([each for each in columns if each.name in names]))

    table.judge(writer.table, changed, writer.metadata, read=read)
    return True


def _sent(table: current.GoldTable, sources: SourceFiles, above: int, columns: StructType) -> DataFrame | None:
    """Columns of the documents of batches after `above` as Spark's rows; None if they have more than `JUDGED_BYTES`."""
    schema = table_schema.arrow_schema(columns.jsonValue())
    parts, size_bytes = [schema.empty_table()], 0
    for part in sources.documents(above, schema):
        size_bytes += part.nbytes
        if size_bytes > JUDGED_BYTES:
            return None
        parts.append(part)
    with query_execution.session_confs(table.spark, _BY_TASKS):
        return table.spark.createDataFrame(pa.concat_tables(parts), columns)


def _replaced(table: current.GoldTable, sources: SourceFiles, writer: Writer, above: int, keys: Sequence[str]) -> bool:
    """Replace the rows of the keys by the current documents of batches after `above`; False if nothing was committed."""
    live = writer.live
    assert live is not None
    version = writer.replace_arrow(
        sources.documents(above, live.schema),
        schema=live.schema,
        keys=keys,
        to=table.work.silver.to,
        extra=table.extra(),
    )
    return version is not None


def _rewritten(table: current.GoldTable, sources: SourceFiles, writer: Writer, columns: StructType) -> int | None:
    """Write all current documents again, for a type that gets wider, and return their number; None as in `merged`."""
    whole, live = first_load(table, sources), writer.live
    if whole is None or live is None:
        return None
    schema = table_schema.arrow_schema(columns.jsonValue())
    version = writer.overwrite_arrow(
        sources.documents(-1, schema),
        columns=columns,
        to=table.work.silver.to,
        extra=table.extra(),
    )
    return None if version is None else whole.count


@dataclass(frozen=True)
class FirstLoad:
    """The number of current documents for a new table, and its columns."""

    count: int
    columns: StructType


def first_load(table: current.GoldTable, sources: SourceFiles) -> FirstLoad | None:
    """What a new table will contain; None if this process cannot read it, or Spark is faster."""
    silver = sources.silver
    try:
        if not silver.move_to(table.work.silver.version):
            return None
        size_bytes = sum(file["size"] for file in silver.files())
        many = max(LOCAL_ROWS, collection_events.span_events(table.spark)) if size_bytes <= FILE_BYTES else LOCAL_ROWS
        if silver.row_count() > many:
            return None
        count, has_rescued = 0, False
        for part in sources.state_parts(-1, [name for name in ("__rescued", *_STATE) if name in silver.schema.names]):
            documents = part.filter(pc.invert(_is_gone(part)))
            count += documents.num_rows
            has_rescued = has_rescued or pc.any(documents["is_rescued"]).as_py() or False
    except NotReadable:
        return None
    return FirstLoad(count, _wanted(silver.spark_schema(), has_rescued=has_rescued))


def loaded(first: FirstLoad, table: current.GoldTable, sources: SourceFiles, writer: Writer) -> int | None:
    """Write the first documents into the new table, and return their number; None as in `merged`."""
    live = writer.live
    if live is None or not live.move_to(writer.version) or live.files():
        return None
    return first.count if _replaced(table, sources, writer, -1, ()) else None


@dataclass(frozen=True)
class _GoldChanges:
    """The changed keys, and whether a current document of them has rescued values."""

    keys: list[str]
    has_rescued: bool


def _changes(table: current.GoldTable, sources: SourceFiles) -> _GoldChanges | None:
    """The changes since gold's position; None if they are too many. Raises `NotReadable`."""
    work, silver = table.work, sources.silver
    assert work.gold.to is not None
    states = sources.states(work.gold.to) if silver.move_to(work.silver.version) else None
    if states is None:
        return None
    keys = states["__key"].to_pylist()
    deletes = _removed(table, sources)
    gone_keys = sorted(deletes.keys() - set(keys))
    if gone_keys and (work.gold.high is None or min(deletes.values()) <= work.gold.high):
        # A delete may be older than silver's row of its key, which gold then has already.
        places = silver.places(upsert.KEY, gone_keys)
        limits = {"size_bytes": live_files.MANY_BYTES, "read_bytes": live_files.MANY_BYTES}
        kept_rows = live_files.rows_at(silver, places, columns=(upsert.KEY,), **limits)
        gone_keys = sorted({*gone_keys}.difference(kept_rows[upsert.KEY].to_pylist()))
    documents = states.filter(pc.invert(_is_gone(states)))
    return _GoldChanges([*keys, *gone_keys], pc.any(documents["is_rescued"]).as_py() or False)


def _removed(table: current.GoldTable, sources: SourceFiles) -> dict[str, str]:
    """The keys with deletes remembered since gold's position, each with the last sequence. Raises `NotReadable`."""
    deletes = sources.deletes
    if not delta.exists(table.spark, table.deletes):
        return {}
    if not deletes.move_to_newest():
        raise NotReadable
    assert table.work.gold.to is not None
    rows = deletes.rows_above("__batch", table.work.gold.to, columns=deletes.schema.names, limit=LOCAL_ROWS)
    sequences: dict[str, str] = {}
    for key, sequence, batch in zip(*(rows[name].to_pylist() for name in ("__key", "__sequence", "__batch"))):
        if batch <= table.work.silver.to:
            sequences[key] = max(sequence, sequences.get(key, ""))
    return sequences


def _is_gone(rows: pa.Table) -> pa.Array:
    """Which rows are not current documents, as `GoldTable._is_gone` in SQL."""
    state = {name: rows[name] if name in rows.column_names else pa.nulls(len(rows), pa.bool_()) for name in _STATE[:2]}
    is_incomplete = pc.fill_null(state["__incomplete"], False)
    has_no_base = pc.and_(is_incomplete, pc.equal(pc.fill_null(rows["__known"], ""), ""))
    return pc.or_(has_no_base, pc.fill_null(state["__deleted"], False))


def _wanted(silver: StructType, *, has_rescued: bool) -> StructType:
    """The columns that gold should have, as `GoldTable.wanted`."""
    names = [name for name in silver.names if name not in current.HIDDEN]
    names += ["__rescued", "__key"] if has_rescued else ["__key"]
    fields = table_columns.fields_by_name(silver)
    return StructType([StructField(name, fields[name].dataType) for name in names])
