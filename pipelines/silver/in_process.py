"""Applies a batch of plain events in this process, without a Spark query.

It does what `ranges.STEPS` do, for whole documents, partial updates (`pipelines.silver.in_process_fold`) and deletes that can all be read
and are newer than anything in the table. For any other batch `applied` is False, nothing was committed, and the batch goes through the
steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.schema import document_schema
from cdc_core.silver import reduce
from cdc_core.sql import table_columns
from pipelines import helper_processes
from pipelines.bronze import batch_rows, collection_events, quarantine_table, survey
from pipelines.delta import file_statistics, live_files, table_schema, upsert
from pipelines.delta import tables as delta
from pipelines.schema import log as schemas
from pipelines.silver import deletes, evolve, in_process_fold, reduction
from pipelines.silver.collection import CollectionWork, SilverCollection
from pipelines.silver.read_ahead import Read, ReadAhead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from cdc_core.properties import unwrap as unwrap_options
    from cdc_core.settings.parse import CollectionSettings
    from cdc_core.tables import layout as tables
    from pipelines.bronze import registry

SERVICE_EVENTS = 2_000
"""The most events that a service applies here: its Spark uses all cores, and the capture beside it needs this process."""

STATISTICS = ("__key", "__sequence", "__batch")
"""The columns with statistics for data skipping, as in the table's properties."""


def reading(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    work: CollectionWork,
    settings: CollectionSettings,
    *,
    keeps_document: bool,
) -> ReadAhead:
    """A reader of the work's events for this process. If they may be many, it starts with the first range now, while the table is being
    claimed, which takes a second."""
    ahead = ReadAhead(_by_batch(spark, bronze_table, work))
    if ahead.counts is not None:
        first_range, *_ = collection_events.portions(ahead.counts, work.span, most=settings.max_batch_events) or (work.span,)
        columns = _bronze_columns(settings.unwrap, reduce.added(settings.unwrap), keeps_document=keeps_document)
        reader = _reader(spark, bronze_table, work.namespace, max_local_events=collection_events.ONE_RUN_EVENTS)
        ahead.begin(first_range, columns, reader, size_bytes=collection_events.MANY_BYTES)
    return ahead


def ranges(collection: SilverCollection, work: CollectionWork) -> Sequence[BatchRange] | None:
    """The work's span, cut into ranges that this process applies one after the other; None if it is one range, or for Spark."""
    live = _live(collection) if collection.max_local_events > SERVICE_EVENTS else None
    if live is None:
        return None
    counts = collection.ahead.counts or _by_batch(collection.spark, collection.bronze, work)
    if counts is None:
        return None
    searched_rows = file_statistics.count_between(live.files(), upsert.KEY, work.counts.first_key, work.counts.last_key)
    # A partial update counts with the size of the document that it is folded onto.
    row_bytes = _row_bytes(live) if collection.keeps_document else 0
    most = collection.options.max_batch_events
    return collection_events.portions(counts, work.span, most=most, row_bytes=row_bytes, looked_through=searched_rows)


def _by_batch(spark: SparkSession, bronze_table: tables.TableRef, work: CollectionWork) -> survey.EventsByBatch | None:
    """The number of the work's events per batch, if there are so many that this process applies them range by range."""
    is_long = SERVICE_EVENTS < work.counts.events <= collection_events.SPAN_EVENTS
    return survey.by_batch(spark, bronze_table, work.namespace, work.span) if is_long else None


def applied(
    collection: SilverCollection,
    range_: BatchRange,
    counts: survey.EventCounts,
    next_position: registry.SilverPosition,
) -> bool:
    """Apply the range, with `next_position`; False if it has to go through the steps, with nothing committed.

    Only for events that are newer than what the table has seen.
    """
    # Deleted documents whose rows stay, together with kept documents, are left to SQL.
    shows_deleted = collection.shows_deleted(counts)
    is_for_sql = (collection.keeps_document and shows_deleted) or counts.events > collection.max_local_events
    live = None if is_for_sql else _live(collection)
    events = None if live is None else _events(collection, range_, counts)
    if live is None or events is None:
        return False
    _prepare_helpers(collection, events)
    folds = collection.keeps_document and pc.any(collection_events.are_partial(events)).as_py()
    # The first schema comes from whole documents, before updates are folded.
    if folds and not collection.schema.schema.fields:
        return False
    source_events = _with_deleted(events) if shows_deleted else events
    reduced_events = _reduced(collection, live, source_events, range_.to, folds=folds, shows_deleted=shows_deleted)
    first_evolution = None if reduced_events is None else _begun(collection, source_events, counts, range_.to, folds=folds)
    if reduced_events is None or first_evolution is None:
        return False
    events, winners, keys, last_deletes, marked_rows = reduced_events
    with deletes.remembering(collection, last_deletes, range_.to):  # meanwhile the JVM is idle
        batches = [source_events.select(["after", "sequence"])]
        if folds:  # again with the folded documents, as the steps do
            batches.append(pa.concat_tables([*batches, events.select(["after", "sequence"])]))
        result = collection.typer.typed(
            table_schema.as_array(events["after"]),
            first_evolution,
            batches=batches,
            current=collection.schema.schema,
            reserved=collection.reserved,
        )
        del source_events, batches, reduced_events  # frees the texts
        if result is None:
            return False
        evolutions, typed_rows = result
        schema = evolutions[-1].schema
        if not collection.keeps_document and "after" not in _of_bronze(collection.added(collection.schema.schema)):
            events = events.drop_columns("after")  # most of the memory, and typed by now
        if len(winners) < events.num_rows:  # copying documents is expensive
            indexes = pa.array(winners, pa.int64())  # a list of none would have no type
            events, typed_rows = events.take(indexes), typed_rows.take(indexes)
        rows = _columns(collection, schema, events, typed_rows, range_.to)
        columns = _table_columns(collection, rows)
        if columns is None:
            return False
        for evolution in evolutions:
            evolve.record(collection, evolution, range_.to)  # before the table holds it
    return _committed(collection, (rows, marked_rows), columns, keys, next_position)


def swept(collection: SilverCollection, sweep: Sweep, next_position: registry.SilverPosition, *, number: int) -> bool:
    """Delete the rows that are older than a sweep, with `next_position`; False if a query has to, with nothing committed.

    A dropped database leads to one sweep for each of its collections.
    """
    live = _live(collection) if collection.mode.removes_row else None
    if live is None:
        return False
    # Events in quarantine may keep a row.
    if live.row_count() > collection_events.ONE_RUN_EVENTS or delta.exists(collection.spark, collection.quarantine):
        return False
    try:
        rows = live.rows(live.files(), ("__key", "__sequence"))
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return False
    keys = rows.filter(pc.less(rows["__sequence"], sweep.first))["__key"].to_pylist()
    if not keys:
        collection.move(next_position)
        return True
    deletes.remember_rows(collection, dict.fromkeys(keys, sweep.first), number)
    version = collection.writer.replace_arrow(
        [],
        schema=live.schema,
        keys=keys,
        to=next_position.to,
        extra=collection.metadata(next_position),
        statistics=STATISTICS,
    )
    return version is not None


def _committed(
    collection: SilverCollection,
    parts: Sequence[pa.Table],
    columns: StructType,
    keys: Sequence[str],
    next_position: registry.SilverPosition,
) -> bool:
    writer, live = collection.writer, collection.writer.live
    assert live is not None
    if columns != live.spark_schema() and not writer.define(columns):
        return False
    try:
        if not live.at(writer.version):
            return False
        conformed_parts = [table_schema.conformed(rows, live.schema) for rows in parts]
    except table_schema.NotReadable:
        return False
    version = writer.replace_arrow(
        conformed_parts,
        schema=conformed_parts[0].schema,
        keys=keys,
        to=next_position.to,
        extra=collection.metadata(next_position),
        statistics=STATISTICS,
    )
    return version is not None


def _live(collection: SilverCollection) -> live_files.LiveFiles | None:
    """The table's files as they are now; None if this process cannot write the table."""
    if any(each.path is None for each in collection.added(collection.schema.schema)):
        return None
    return collection.writer.replaceable()


def _events(collection: SilverCollection, range_: BatchRange, counts: survey.EventCounts) -> pa.Table | None:
    """The collection's events of the range in order, without deletes if the mode keeps rows; None if this process cannot read them, or one
    belongs to quarantine or has to wait for an event there."""
    reader = _reader(collection.spark, collection.bronze, collection.namespace, max_local_events=collection.max_local_events)
    columns = _bronze_columns(
        collection.options.unwrap, collection.added(collection.schema.schema), keeps_document=collection.keeps_document
    )
    ahead_bytes = 2 * collection_events.PORTION_BYTES
    events = collection.ahead.events(range_, columns, reader, size_bytes=_many_bytes(collection), ahead_bytes=ahead_bytes)
    if events is None or events.num_rows != counts.events or not collection_events.are_readable(events):
        return None
    if collection.mode.keeps_row:
        events = events.filter(pc.not_equal(events["op"], bronze.Op.DELETE.value))
    waiting_keys = _quarantined_keys(collection, before=range_.after)
    is_free = waiting_keys is not None and (not waiting_keys or waiting_keys.isdisjoint(events["key"].to_pylist()))
    return events if is_free else None


def _quarantined_keys(collection: SilverCollection, *, before: int) -> frozenset[str] | None:
    """The keys with an event in quarantine from before the range after batch `before`, whose events must wait; None if this process cannot
    read them."""
    if collection.lacks_quarantine or not delta.exists(collection.spark, collection.quarantine):
        collection.lacks_quarantine = True
        return frozenset()
    collection.quarantined = collection.quarantined or quarantine_table.HeldEvents.of(
        collection.spark, collection.quarantine
    )
    return None if collection.quarantined is None else collection.quarantined.keys(before=before)


def _reader(
    spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace, *, max_local_events: int
) -> Read:
    """A function that reads a collection's events of a range in order, or returns None if this process cannot."""
    # Other collections' events are in the same files.
    limit = max(survey.MAX_DRIVER_ROWS, 2 * max_local_events)
    return functools.partial(collection_events.in_order, spark, bronze_table, namespace, limit=limit)


def _bronze_columns(
    options: unwrap_options.UnwrapOptions, added: Iterable[reduce.AddedColumn], *, keeps_document: bool
) -> tuple[str, ...]:
    """The columns of bronze, beside the document, that rows are made from."""
    updates = ("updateDescription",) if keeps_document else ()
    return (*updates, *reduce.needed(options), *_of_bronze(added))


def _many_bytes(collection: SilverCollection) -> int:
    """The most bytes of documents that are held here."""
    return collection_events.MANY_BYTES if collection.max_local_events > SERVICE_EVENTS else batch_rows.MANY_BYTES


def _prepare_helpers(collection: SilverCollection, events: pa.Table) -> None:
    """Start the helper processes if there is much to parse: the events' documents, and those that updates are folded onto."""
    live = collection.writer.live
    size_bytes = events["after"].nbytes
    if collection.keeps_document and live is not None:
        size_bytes += _row_bytes(live) * events["after"].null_count
    if size_bytes >= helper_processes.MANY_BYTES:
        helper_processes.DOCUMENTS.start()


def _row_bytes(live: live_files.LiveFiles) -> int:
    """The average size of a row in the table's files, in bytes."""
    return sum(file["size"] for file in live.files()) // max(1, live.row_count())


def _of_bronze(added: Iterable[reduce.AddedColumn]) -> list[str]:
    """The bronze columns that `add.fields` and `add.headers` read."""
    return [each.path[0] for each in added if each.path]


def _with_deleted(events: pa.Table) -> pa.Table:
    """The events, with what is known of a deleted document in `after`, as `evolve.looked_at` returns them."""
    key = pc.binary_join_element_wise('{"_id":', events["key"], "}", "")
    deleted = pc.coalesce(events["before"], events["documentKey"], key)
    after = pc.if_else(pc.equal(events["op"], bronze.Op.DELETE.value), deleted, events["after"])
    return events.set_column(events.column_names.index("after"), "after", after)


class _ReducedEvents(NamedTuple):
    """A reduced range: `events` without partial updates, the indexes (`winners`) of those that become rows, the keys whose rows are
    replaced, the sequence of each key's last delete, and the table's rows that are only `marked`."""

    events: pa.Table
    winners: list[int]
    keys: list[str]
    last_deletes: dict[str, str]
    marked: pa.Table


def _reduced(
    collection: SilverCollection,
    live: live_files.LiveFiles,
    given: pa.Table,
    number: int,
    *,
    folds: bool,
    shows_deleted: bool,
) -> _ReducedEvents | None:
    """The events reduced, with partial updates folded or marked; None if this process cannot."""
    size_bytes = _many_bytes(collection)
    whole_events = (
        in_process_fold.folded(given, live, size_bytes=size_bytes)
        if folds
        else in_process_fold.noted(given, shows_deleted=shows_deleted)
    )
    if whole_events is None:
        return None
    winners, changed_keys, last_deletes = _winners(whole_events.events)
    keys = list(dict.fromkeys((*changed_keys, *whole_events.marks)))  # a delete that marks a row is among the events, too
    # Before the documents are typed, which is most of the work and would be done again by the steps.
    if live.is_many(upsert.KEY, keys):
        return None
    added_paths = {each.name: each.path or () for each in collection.added(collection.schema.schema)}
    marked_rows = in_process_fold.marked(live, whole_events, number, added=added_paths, size_bytes=size_bytes)
    return None if marked_rows is None else _ReducedEvents(whole_events.events, winners, keys, last_deletes, marked_rows)


def _winners(events: pa.Table) -> tuple[list[int], list[str], dict[str, str]]:
    """For events in order: the indexes of each key's last event if it has a row, all keys, and the sequence of each key's last delete."""
    last_numbers = dict(zip(events["key"].to_pylist(), range(events.num_rows)))
    is_delete = pc.equal(events["op"], bronze.Op.DELETE.value)
    deletes = events.select(["key", "sequence"]).filter(is_delete)
    has_row = pc.fill_null(pc.or_kleene(pc.invert(is_delete), events["__deleted"]), False).to_pylist()
    winners = [number for number in sorted(last_numbers.values()) if has_row[number]]
    return winners, list(last_numbers), dict(zip(deletes["key"].to_pylist(), deletes["sequence"].to_pylist()))


def _begun(
    collection: SilverCollection, given: pa.Table, counts: survey.EventCounts, number: int, *, folds: bool
) -> schemas.Evolution | None:
    """The schema by which the events' documents are typed; None if the first documents do not give one."""
    current = collection.schema.schema
    if folds:  # folded documents are read for the schema after the others
        return schemas.unchanged(current, collection.options.pins)
    texts, places = map(table_schema.as_array, (given["after"], given["sequence"]))
    evolution = collection.typer.begun(texts, places, current=current, reserved=collection.reserved)
    # `at_once` would record it as a version of its own: the schema history must not depend on the way.
    if evolution is None or current.fields or not reduction.is_at_once(collection, counts):
        return evolution
    evolve.record(collection, evolution, number)
    return replace(evolution, changes=())


def _columns(
    collection: SilverCollection,
    schema: document_schema.DocumentSchema,
    events: pa.Table,
    typed: pa.StructArray,
    number: int,
) -> pa.Table:
    """The rows with the columns of `write.table_rows`, in its order."""
    count, document = events.num_rows, typed.field("document")
    columns: dict[str, pa.Array | pa.ChunkedArray] = {each.name: document.field(at) for at, each in enumerate(document.type)}
    columns |= {column.name: collection_events.value(events, column.path or ()) for column in collection.added(schema)}
    # If the mode was changed, the column stays, and is false.
    live = collection.writer.live
    has_marks = collection.mode.adds_deleted or (live is not None and "__deleted" in live.schema.names)
    columns |= {"__deleted": events["__deleted"]} if has_marks else {}
    columns |= {name: events[name] for name in ("__incomplete", "__known")} | {"__rescued": typed.field("rescued")}
    columns |= {"__document": events["after"]} if collection.keeps_document else {}
    columns |= {
        "__key": events["key"],
        "__sequence": events["__sequence"],
        "__batch": pa.array([number] * count, pa.int64()),
    }
    return pa.table(columns)


def _table_columns(collection: SilverCollection, rows: pa.Table) -> StructType | None:
    """The table's columns with those that it lacks; None if one must change its type."""
    live = collection.writer.live
    assert live is not None
    return table_columns.grown(live.spark_schema(), from_arrow_schema(rows.schema))
