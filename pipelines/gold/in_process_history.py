"""Applies events to a history in this process, without the queries of `history.History`.

For events and files that this process can read. Everything else goes through the queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep, SweepCause
from cdc_core.gold import versions
from cdc_core.gold.versions import DocumentVersion
from cdc_core.properties.source import FullUpdateType
from cdc_core.silver import fold, quarantine_split, reduce
from cdc_core.sql import table_columns
from cdc_core.typed.decoding import without_collector
from pipelines.bronze import collection_events, survey
from pipelines.delta import live_files, table_schema, upsert
from pipelines.delta.key_search import Places
from pipelines.delta.live_files import LiveFiles
from pipelines.gold.history import History
from pipelines.gold.history_position import HistoryPosition
from pipelines.schema import batch_evolution

READ_BYTES = 4 * 2**30
"""For a few versions, the most bytes of files that are searched for them and copied from: two seconds' work."""

VERSION_READ_BYTES = 32 * 2**10
"""How many bytes more for each version. For more, Spark is faster."""

_STORED = ("__key", "__sequence", "__until", "__incomplete")


class _VersionId(NamedTuple):
    """The identity of a version: its document's key, and its own sequence."""

    key: str
    sequence: str


class _RowPlace(NamedTuple):
    """The location of a version: the index of its file in `_StoredVersions.files`, its row in that file, and its index in
    `_StoredVersions.rows`."""

    file: int
    row: int
    number: int


@dataclass
class _StoredVersions:
    """Stored versions of some keys: as whole `rows`, with their locations in `files`, and by key."""

    rows: pa.Table
    files: list[dict[str, Any]]
    places: dict[_VersionId, _RowPlace]
    versions: dict[str, list[DocumentVersion]]

    def rows_of(self, wanted: Iterable[_VersionId]) -> list[tuple[dict[str, Any], list[int]]]:
        """The rows, by file, of those of these versions that are stored."""
        rows: dict[int, list[int]] = defaultdict(list)
        for version_id in wanted:
            if version_id in self.places:
                rows[self.places[version_id].file].append(self.places[version_id].row)
        return [(self.files[file], sorted(numbers)) for file, numbers in sorted(rows.items())]


@dataclass
class _VersionChanges:
    """The changes of versions by some events: the `new` ones with their `keys` and the `rows` of their events, and stored ones that
    ended."""

    keys: list[str]
    new: list[DocumentVersion]
    rows: list[int]
    ended: dict[_VersionId, DocumentVersion]


@dataclass
class InProcess:
    """Implements `history.LocalHistory`, for at most `limit` events at a time."""

    limit: int

    def ranges(self, history: History, span: BatchRange, events: int) -> Sequence[BatchRange] | None:
        """The span, cut into ranges that are applied one after the other; None if it is one range, or for Spark."""
        many = min(self.limit, collection_events.PORTION_EVENTS)
        live = _live(history)
        if live is None:
            return None
        counts = collection_events.by_batch(history.spark, history.bronze, history.namespace, span, events=events, many=many)
        if counts is None:
            return None
        max_events = history.options.max_batch_events
        return collection_events.portions(counts, span, most=max_events, looked_through=live.row_count())

    def is_applied(self, history: History, range_: BatchRange, position: HistoryPosition) -> bool:
        """Apply the range's events, with this position; False if queries have to, with nothing committed."""
        live = _live(history)
        events = None if live is None else _events(history, range_, limit=self.limit)
        if live is None or events is None:
            return False
        try:
            return any(_is_written(history, live, each, range_.to, position) for each in _readable(events))
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return False

    def is_swept(self, history: History, sweep: Sweep, position: HistoryPosition) -> bool:
        """Move the position to `position` if the sweep ends no version, as after a first snapshot; False if queries have to apply it."""
        live = _live(history)
        if live is None:
            return False
        try:
            rows = live.rows(live.files(), ("__sequence", "__until"))
        except (OSError, pa.ArrowException, table_schema.NotReadable):
            return False
        is_open = pc.is_null(rows["__until"])
        if sweep.cause is not SweepCause.SNAPSHOT:
            is_open = pc.or_(is_open, pc.fill_null(pc.greater(rows["__until"], sweep.first), False))
        if pc.any(pc.and_(is_open, pc.less(rows["__sequence"], sweep.first))).as_py():
            return False
        history.writer.mark(to=position.to, extra=position.of_the_same_rows(history.writer.metadata))
        return True


def _live(history: History) -> LiveFiles | None:
    """The table's files as they are now; None if this process cannot write the table."""
    return None if any(each.path is None for each in history.added()) else history.writer.replaceable()


def _events(history: History, range_: BatchRange, *, limit: int) -> pa.Table | None:
    """The events of the range, in order; None if they are too many or too large, or this process cannot read them."""
    added = [each.path[0] for each in history.added() if each.path]
    columns = ("updateDescription", "before", *added)
    # Other collections' events are in the same files.
    row_limit, size_bytes = max(survey.MAX_DRIVER_ROWS, 2 * limit), collection_events.MANY_BYTES
    events = collection_events.in_order(
        history.spark, history.bronze, history.namespace, range_, columns, limit=row_limit, size_bytes=size_bytes
    )
    return None if events is None or events.num_rows > limit else events


def _readable(events: pa.Table) -> Iterator[pa.Table]:
    """The events, and then, for which they could not be applied, with an unknown update for each that cannot be read."""
    is_partial = reduce.are_partial(events).combine_chunks()
    descriptions = table_schema.as_array(events["updateDescription"])
    if collection_events.are_readable(events) and fold.are_readable(descriptions.filter(pc.fill_null(is_partial, False))):
        yield events
    events_with_holes = quarantine_split.with_holes(events)
    if events_with_holes is not None:
        yield events_with_holes


def _wanted(history: History, events: pa.Table, position: HistoryPosition) -> pa.Table:
    """The events that make versions."""
    if position.floor:  # after a drop the key belongs to another document
        events = events.filter(pc.greater_equal(events["sequence"], position.floor))
    if history.mode.keeps_row:
        events = events.filter(pc.not_equal(events["op"], bronze.Op.DELETE.value))
    return events


def _is_written(history: History, live: LiveFiles, all_events: pa.Table, number: int, position: HistoryPosition) -> bool:
    """Write the versions that the events make; False, or `NotReadable` raised, if queries have to, with nothing committed."""
    events = _wanted(history, all_events, position)
    if not events.num_rows:
        history.writer.mark(to=position.to, extra=position.of_the_same_rows(history.writer.metadata))
        return True
    stored_versions = _stored(live, events, folds=history.folds)
    if history.folds and _waits(events, stored_versions):
        return False
    with without_collector():
        changes = _laid_out(events, stored_versions, folds=history.folds)
    typed_versions = _made(history, events, changes, position)
    if typed_versions is None:
        return False
    evolution, new_rows = typed_versions
    history.record(evolution, number)  # before the table holds it
    held_columns, row_columns = live.spark_schema(), from_arrow_schema(new_rows.schema)
    alterations = table_columns.alterations(held_columns, row_columns)
    new_ids = [_VersionId(key, each.sequence) for key, each in zip(changes.keys, changes.new)]
    # A replaced version keeps its values in columns of removed settings, which only a MERGE preserves.
    if not stored_versions.places.keys().isdisjoint(new_ids) and not {*live.schema.names} <= {*new_rows.column_names}:
        return False
    if alterations.impossible:
        return False
    if alterations.widened:
        new_columns = table_columns.replacing(held_columns, row_columns)
        return _is_rewritten(history, live, new_columns, new_rows, new_ids, stored_versions, changes, position)
    if alterations.added and not history.writer.define(table_columns.with_added(held_columns, row_columns)):
        return False
    if not live.move_to(history.writer.version):
        return False
    parts = [table_schema.conformed(new_rows, live.schema), _ended(history, live.schema, stored_versions, changes)]
    version = history.writer.replace_arrow(
        parts,
        schema=live.schema,
        places=stored_versions.rows_of([*new_ids, *changes.ended]),
        to=position.to,
        extra=position.extra,
    )
    return version is not None


def _is_rewritten(
    history: History,
    live: LiveFiles,
    columns: StructType,
    new_rows: pa.Table,
    new_ids: Sequence[_VersionId],
    stored: _StoredVersions,
    changes: _VersionChanges,
    position: HistoryPosition,
) -> bool:
    """Write all versions again with these columns, for a type that gets wider; False or `NotReadable` as in `_is_written`."""
    if live.row_count() > collection_events.LOCAL_EVENTS:
        return False
    schema = table_schema.arrow_schema(columns.jsonValue())
    rows = live.rows(live.files())
    ids = zip(rows["__key"].to_pylist(), rows["__sequence"].to_pylist())
    replaced = {*new_ids, *changes.ended}
    kept = rows.filter(pa.array([_VersionId(*each) not in replaced for each in ids], pa.bool_()))
    version = history.writer.overwrite_arrow(
        [kept, new_rows, _ended(history, schema, stored, changes)],
        columns=columns,
        to=position.to,
        extra=position.extra,
    )
    return version is not None


# --- stored versions


def _stored(live: LiveFiles, events: pa.Table, *, folds: bool) -> _StoredVersions:
    """The versions of the events' keys that end at the first event or later. Raises `NotReadable` if they are too large, or if their files
    would have to be rewritten and are too large for that."""
    places = live_files.present(live, live.places(upsert.KEY, events["key"].to_pylist()))
    places = _ending_later(live, places, pc.min(events["sequence"]).as_py())
    if live_files.rewrites_many(live, [file for file, _ in places]):
        raise table_schema.NotReadable
    # All columns: nearly all of these versions end now and are written again.
    rows = _rows(live, places, live.schema.names)
    columns = [*_STORED, "__deleted", *(("__document",) if folds else ())]
    row_places = ((file, row) for file, (_, numbers) in enumerate(places) for row in numbers)
    stored = _StoredVersions(rows, [file for file, _ in places], {}, defaultdict(list))
    for number, (place, row) in enumerate(
        zip(row_places, rows.select([name for name in columns if name in rows.column_names]).to_pylist())
    ):
        stored.places[_VersionId(row["__key"], row["__sequence"])] = _RowPlace(*place, number)
        stored.versions[row["__key"]].append(
            DocumentVersion(
                row["__sequence"],
                row["__until"],
                bool(row["__incomplete"]),
                bool(row.get("__deleted")),
                row.get("__document"),
            )
        )
    return stored


def _ending_later(live: LiveFiles, places: Places, low: str) -> Places:
    """The versions that end at the sequence `low` or later: of a document that changes often, nearly all ended long before."""
    ends = _rows(live, places, ["__until"])["__until"]
    is_later = iter(pc.fill_null(pc.greater_equal(ends, low), True).to_pylist())
    later = [(file, [row for row in rows if next(is_later)]) for file, rows in places]
    return [(file, rows) for file, rows in later if rows]


def _rows(live: LiveFiles, places: Places, columns: Sequence[str]) -> pa.Table:
    count = sum(len(numbers) for _, numbers in places)
    read_bytes = READ_BYTES + VERSION_READ_BYTES * count
    return live_files.rows_at(live, places, columns=columns, size_bytes=collection_events.MANY_BYTES, read_bytes=read_bytes)


def _waits(events: pa.Table, stored: _StoredVersions) -> bool:
    """Whether a document is older than updates of it that were applied already, which must then be read again from other batches."""
    documents = events.filter(pc.is_valid(events["after"]))
    newest: dict[str, str] = {}
    newest_incomplete: dict[str, str] = {}
    for key, stored_versions in stored.versions.items():
        newest[key] = max((version.sequence for version in stored_versions), default="")
        newest_incomplete[key] = max((version.sequence for version in stored_versions if version.is_incomplete), default="")
    # Versions after a document that a snapshot has read may lack changes that were lost before it.
    return any(
        sequence < (newest if op == bronze.Op.READ.value else newest_incomplete).get(key, "")
        for key, sequence, op in zip(*(documents[name].to_pylist() for name in ("key", "sequence", "op")))
    )


# --- new and changed versions


def _laid_out(events: pa.Table, stored: _StoredVersions, *, folds: bool) -> _VersionChanges:
    """Each key's versions that are new or have another end. Raises `NotReadable` if their documents are too large."""
    # Large columns only where a fold reads them.
    envelopes = events.select(["sequence", "offset", "op", "before", "updateDescription"])
    is_whole, is_partial = pc.is_valid(events["after"]).to_pylist(), reduce.are_partial(events).to_pylist()
    texts = events["after"].to_pylist() if folds else [None] * events.num_rows
    by_key: dict[str, list[versions.DocumentEvent]] = defaultdict(list)
    row_of: dict[int, int] = {}
    for number, (key, row) in enumerate(zip(events["key"].to_pylist(), envelopes.to_pylist())):
        row_of[row["offset"]] = number
        before = row["before"] if is_partial[number] else None
        by_key[key].append(versions.event({**row, "before": before, "is_whole": is_whole[number], "after": texts[number]}))
    changes, size = _VersionChanges([], [], [], {}), 0
    for key, key_events in by_key.items():
        for version in versions.changed(stored.versions.get(key, ()), key_events, folds=folds):
            if version.offset is None:
                changes.ended[_VersionId(key, version.sequence)] = version
                continue
            changes.keys.append(key)
            changes.new.append(version)
            changes.rows.append(row_of[version.offset])
            # Each event makes a version as large as the document.
            size += len(version.document or "")
            if size > collection_events.MANY_BYTES:
                raise table_schema.NotReadable
    return changes


def _made(
    history: History, events: pa.Table, laid_out: _VersionChanges, position: HistoryPosition
) -> tuple[batch_evolution.Evolution, pa.Table] | None:
    """The schema changed by the new versions' documents, and these versions with the table's columns; None if one cannot be read."""
    rows = events.take(pa.array(laid_out.rows, pa.int64()))
    is_folded, texts = pc.is_null(rows["after"]), table_schema.as_array(rows["after"])
    texts = pc.coalesce(pa.array([each.document for each in laid_out.new], pa.string()), texts)
    rows = table_schema.with_column(rows, "after", texts)  # `add.fields` may read it, too
    typed_documents = _typed(history, texts, table_schema.as_array(rows["sequence"]), position)
    if typed_documents is None:
        return None
    evolution, typed = typed_documents
    document, rescued, _ = typed.flatten()
    is_update = pc.and_(pc.equal(rows["op"], bronze.Op.UPDATE.value), pc.is_valid(rows["updateDescription"]))
    is_looked_up = history.settings.source.capture_mode_full_update_type is FullUpdateType.LOOKUP
    columns: dict[str, Any] = {each.name: document.field(at) for at, each in enumerate(document.type)}
    columns |= {each.name: collection_events.value(rows, each.path or ()) for each in history.added(evolution.schema)}
    columns |= {
        "__rescued": rescued,
        "__incomplete": pa.array([each.is_incomplete for each in laid_out.new], pa.bool_()),
        "__as_captured": pc.and_(pc.and_(is_update, pc.invert(is_folded)), is_looked_up),
    }
    columns |= {"__document": texts} if history.folds else {}
    sequences = [each.sequence for each in laid_out.new]
    columns |= {"__key": pa.array(laid_out.keys, pa.string()), "__sequence": pa.array(sequences, pa.string())}
    return evolution, pa.table(columns | _ends(history, laid_out.new) | {"valid_from": _times(sequences)})


def _typed(
    history: History, texts: pa.Array, sequences: pa.Array, position: HistoryPosition
) -> tuple[batch_evolution.Evolution, pa.StructArray] | None:
    """The schema changed by the documents, and the typed documents; None if this process cannot type them all."""
    current, reserved = history.schema.schema, history.reserved(position)
    batch = pa.table([texts, sequences], names=["after", "sequence"])
    typed_documents = history.typer.typed(texts, [batch], current=current, reserved=reserved)
    return None if typed_documents is None else (typed_documents[0][-1], typed_documents[1])


def _ended(history: History, schema: pa.Schema, stored: _StoredVersions, laid_out: _VersionChanges) -> pa.Table:
    """The stored versions with another end: whole rows, with the table's present columns."""
    numbers = [stored.places[each].number for each in laid_out.ended]
    rows = table_schema.conformed(stored.rows.take(pa.array(numbers, pa.int64())), schema)
    for name, values in _ends(history, [*laid_out.ended.values()]).items():
        rows = rows.set_column(rows.column_names.index(name), schema.field(name), values)
    return rows


def _ends(history: History, ended: Sequence[DocumentVersion]) -> dict[str, pa.Array]:
    """The columns with the end of each version, in the order in which they are added to a table."""
    until = [each.until for each in ended]
    deleted = pa.array([each.is_deleted for each in ended], pa.bool_())
    marks = {"__deleted": deleted} if history.marks_deleted else {}
    return {"__until": pa.array(until, pa.string()), **marks, "valid_to": _times(until)}


def _times(sequences: Sequence[str | None]) -> pa.Array:
    """The cluster times of sequences, whose first 8 hexadecimal digits are seconds."""
    micros = [None if each is None else int(each[:8], 16) * 1_000_000 for each in sequences]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
