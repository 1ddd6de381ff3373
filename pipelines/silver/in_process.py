"""A batch of plain events, applied by this process: nothing is planned, listed or compiled for it.

What `ranges.STEPS` do, for a batch in which most of them have nothing to decide: whole documents, partial updates
(`pipelines.silver.in_process_fold`) and deletes, all of which can be read and are newer than anything in the table. Any other batch goes
through the steps: then `applied` is False, and nothing was committed.
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
"""In a service Spark types on all cores, and the capture beside it needs this process."""

STATISTICS = ("__key", "__sequence", "__batch")
"""The columns by which silver's files are skipped, as its table says it, too."""


def reading(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    work: CollectionWork,
    settings: CollectionSettings,
    *,
    keeps_document: bool,
) -> ReadAhead:
    """What reads the work's events for this process, beginning now with those of the first range where they may be many: the claim on
    the table takes a second in which nothing else is done here."""
    ahead = ReadAhead(_by_batch(spark, bronze_table, work))
    if ahead.counts is not None:
        first, *_ = collection_events.portions(ahead.counts, work.span, most=settings.max_batch_events) or (work.span,)
        columns = _bronze_columns(settings.unwrap, reduce.added(settings.unwrap), keeps_document=keeps_document)
        read = _reader(spark, bronze_table, work.namespace, max_local_events=collection_events.ONE_RUN_EVENTS)
        ahead.begin(first, columns, read, size_bytes=collection_events.MANY_BYTES)
    return ahead


def ranges(collection: SilverCollection, work: CollectionWork) -> Sequence[BatchRange] | None:
    """The work's span in ranges that this process applies one after the other; None where they are for Spark to find, or it is one."""
    live = _live(collection) if collection.max_local_events > SERVICE_EVENTS else None
    if live is None:
        return None
    counts = collection.ahead.counts or _by_batch(collection.spark, collection.bronze, work)
    if counts is None:
        return None
    looked_through = file_statistics.count_between(live.files(), upsert.KEY, work.counts.first_key, work.counts.last_key)
    # A partial update is as large as the document that it is folded onto.
    row_bytes = _row_bytes(live) if collection.keeps_document else 0
    most = collection.options.max_batch_events
    return collection_events.portions(counts, work.span, most=most, row_bytes=row_bytes, looked_through=looked_through)


def _by_batch(spark: SparkSession, bronze_table: tables.TableRef, work: CollectionWork) -> survey.EventsByBatch | None:
    """How the work's events lie in its batches, where they are so many that this process applies them range by range."""
    is_long = SERVICE_EVENTS < work.counts.events <= collection_events.SPAN_EVENTS
    return survey.by_batch(spark, bronze_table, work.namespace, work.span) if is_long else None


def applied(
    collection: SilverCollection,
    range_: BatchRange,
    counts: survey.EventCounts,
    next_position: registry.SilverPosition,
) -> bool:
    """Whether the range is in the table, with `next_position`; where not, nothing was committed.

    Only for events that are newer than what the table has seen.
    """
    # What a kept document becomes when it is deleted and its row stays is SQL's to say.
    shows_deleted = collection.shows_deleted(counts)
    is_for_sql = (collection.keeps_document and shows_deleted) or counts.events > collection.max_local_events
    live = None if is_for_sql else _live(collection)
    events = None if live is None else _events(collection, range_, counts)
    if live is None or events is None:
        return False
    _prepare_helpers(collection, events)
    folds = collection.keeps_document and pc.any(collection_events.are_partial(events)).as_py()
    # Without a schema the documents' own give one, before any update has its say.
    if folds and not collection.schema.schema.fields:
        return False
    given = _with_deleted(events) if shows_deleted else events
    reduced = _reduced(collection, live, given, range_.to, folds=folds, shows_deleted=shows_deleted)
    begun = None if reduced is None else _begun(collection, given, counts, range_.to, folds=folds)
    if reduced is None or begun is None:
        return False
    events, winners, keys, last_deletes, marked = reduced
    with deletes.remembering(collection, last_deletes, range_.to):  # the JVM has nothing else to do
        batches = [given.select(["after", "sequence"])]
        if folds:  # once more, as the steps do, at what became of the others
            batches.append(pa.concat_tables([*batches, events.select(["after", "sequence"])]))
        found = collection.typer.typed(
            table_schema.as_array(events["after"]),
            begun,
            batches=batches,
            current=collection.schema.schema,
            reserved=collection.reserved,
        )
        del given, batches, reduced  # they hold the texts
        if found is None:
            return False
        evolutions, typed = found
        schema = evolutions[-1].schema
        if not collection.keeps_document and "after" not in _of_bronze(collection.added(collection.schema.schema)):
            events = events.drop_columns("after")  # the texts are in `typed` by now, and most of the memory
        if len(winners) < events.num_rows:  # documents are dear to copy
            places = pa.array(winners, pa.int64())  # a list of none would have no type
            events, typed = events.take(places), typed.take(places)
        rows = _columns(collection, schema, events, typed, range_.to)
        columns = _table_columns(collection, rows)
        if columns is None:
            return False
        for evolution in evolutions:
            evolve.record(collection, evolution, range_.to)  # before the table holds it
    return _committed(collection, (rows, marked), columns, keys, next_position)


def swept(collection: SilverCollection, sweep: Sweep, next_position: registry.SilverPosition, *, number: int) -> bool:
    """Whether the rows that are older than a sweep are gone, with `next_position`; where not, nothing was committed.

    A database that is dropped calls for one of each of its collections.
    """
    live = _live(collection) if collection.mode.removes_row else None
    if live is None:
        return False
    # What quarantine holds may spare a row.
    if live.row_count() > collection_events.ONE_RUN_EVENTS or delta.exists(collection.spark, collection.quarantine):
        return False
    try:
        held = live.rows(live.files(), ("__key", "__sequence"))
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return False
    keys = held.filter(pc.less(held["__sequence"], sweep.first))["__key"].to_pylist()
    if not keys:
        collection.move(next_position)
        return True
    deletes.remember_rows(collection, dict.fromkeys(keys, sweep.first), number)
    version = collection.writer.replace_arrow(
        [], schema=live.schema, keys=keys, to=next_position.to, extra=collection.said(next_position), statistics=STATISTICS
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
        conformed = [table_schema.conformed(rows, live.schema) for rows in parts]
    except table_schema.NotReadable:
        return False
    version = writer.replace_arrow(
        conformed,
        schema=conformed[0].schema,
        keys=keys,
        to=next_position.to,
        extra=collection.said(next_position),
        statistics=STATISTICS,
    )
    return version is not None


def _live(collection: SilverCollection) -> live_files.LiveFiles | None:
    """The table as it is now, where this process can apply anything to it."""
    if any(each.path is None for each in collection.added(collection.schema.schema)):
        return None
    return collection.writer.replaceable()


def _events(collection: SilverCollection, range_: BatchRange, counts: survey.EventCounts) -> pa.Table | None:
    """The collection's events of the range, in their order, without deletes that do nothing; None where this process cannot read them, or
    where one belongs to quarantine, or has to wait for one that is there."""
    read = _reader(collection.spark, collection.bronze, collection.namespace, max_local_events=collection.max_local_events)
    columns = _bronze_columns(
        collection.options.unwrap, collection.added(collection.schema.schema), keeps_document=collection.keeps_document
    )
    ahead_bytes = 2 * collection_events.PORTION_BYTES
    events = collection.ahead.events(range_, columns, read, size_bytes=_many_bytes(collection), ahead_bytes=ahead_bytes)
    if events is None or events.num_rows != counts.events or not collection_events.are_readable(events):
        return None
    if collection.mode.keeps_row:
        events = events.filter(pc.not_equal(events["op"], bronze.Op.DELETE.value))
    waiting = _quarantined_keys(collection, before=range_.after)
    is_free = waiting is not None and (not waiting or waiting.isdisjoint(events["key"].to_pylist()))
    return events if is_free else None


def _quarantined_keys(collection: SilverCollection, *, before: int) -> frozenset[str] | None:
    """The keys of which the quarantine holds an event, so that those of a range behind the batch `before` must wait. None where this process
    cannot tell."""
    if not delta.exists(collection.spark, collection.quarantine):
        return frozenset()
    collection.quarantined = collection.quarantined or quarantine_table.HeldEvents.of(
        collection.spark, collection.quarantine
    )
    return None if collection.quarantined is None else collection.quarantined.keys(before=before)


def _reader(
    spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace, *, max_local_events: int
) -> Read:
    """What reads a collection's events of a range, in their order; it gives None where this process cannot."""
    # Other collections' events stand in the same files.
    limit = max(survey.MAX_DRIVER_ROWS, 2 * max_local_events)
    return functools.partial(collection_events.in_order, spark, bronze_table, namespace, limit=limit)


def _bronze_columns(
    options: unwrap_options.UnwrapOptions, added: Iterable[reduce.AddedColumn], *, keeps_document: bool
) -> tuple[str, ...]:
    """The columns of bronze that rows are made of, beside their documents."""
    updates = ("updateDescription",) if keeps_document else ()
    return (*updates, *reduce.needed(options), *_of_bronze(added))


def _many_bytes(collection: SilverCollection) -> int:
    """So many bytes of documents are held here."""
    return collection_events.MANY_BYTES if collection.max_local_events > SERVICE_EVENTS else batch_rows.MANY_BYTES


def _prepare_helpers(collection: SilverCollection, events: pa.Table) -> None:
    """Start the helpers where there will be much for them: the events' documents, and those that updates are folded onto."""
    live = collection.writer.live
    size_bytes = events["after"].nbytes
    if collection.keeps_document and live is not None:
        size_bytes += _row_bytes(live) * events["after"].null_count
    if size_bytes >= helper_processes.MANY_BYTES:
        helper_processes.DOCUMENTS.start()


def _row_bytes(live: live_files.LiveFiles) -> int:
    """How many bytes of the table's files a row takes."""
    return sum(file["size"] for file in live.files()) // max(1, live.row_count())


def _of_bronze(added: Iterable[reduce.AddedColumn]) -> list[str]:
    """The bronze columns that `add.fields` asks for."""
    return [each.path[0] for each in added if each.path]


def _with_deleted(events: pa.Table) -> pa.Table:
    """The events with what is known of deleted documents in `after`, as `evolve.looked_at` has them."""
    key = pc.binary_join_element_wise('{"_id":', events["key"], "}", "")
    told = pc.coalesce(events["before"], events["documentKey"], key)
    after = pc.if_else(pc.equal(events["op"], bronze.Op.DELETE.value), told, events["after"])
    return events.set_column(events.column_names.index("after"), "after", after)


class _ReducedEvents(NamedTuple):
    """What a range comes to: whole `events`, the places among them of those that rows are made of, the keys whose rows are replaced, each
    key's last delete, and rows of the table that are only `marked`."""

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
    """The events reduced, partial updates among them; None where this process cannot."""
    size_bytes = _many_bytes(collection)
    whole = (
        in_process_fold.folded(given, live, size_bytes=size_bytes)
        if folds
        else in_process_fold.noted(given, shows_deleted=shows_deleted)
    )
    if whole is None:
        return None
    winners, changed, last_deletes = _winners(whole.events)
    keys = list(dict.fromkeys((*changed, *whole.marks)))  # a delete that marks a row is among the events, too
    # Before the documents are typed, which is most of the work: whoever has to look for the keys types them again.
    if live.is_many(upsert.KEY, keys):
        return None
    added = {each.name: each.path or () for each in collection.added(collection.schema.schema)}
    marked = in_process_fold.marked(live, whole, number, added=added, size_bytes=size_bytes)
    return None if marked is None else _ReducedEvents(whole.events, winners, keys, last_deletes, marked)


def _winners(events: pa.Table) -> tuple[list[int], list[str], dict[str, str]]:
    """Of events in their order: the last one of each key that has a row, all keys, and each key's last delete."""
    last = dict(zip(events["key"].to_pylist(), range(events.num_rows)))
    is_delete = pc.equal(events["op"], bronze.Op.DELETE.value)
    deletes = events.select(["key", "sequence"]).filter(is_delete)
    has_row = pc.fill_null(pc.or_kleene(pc.invert(is_delete), events["__deleted"]), False).to_pylist()
    winners = [number for number in sorted(last.values()) if has_row[number]]
    return winners, list(last), dict(zip(deletes["key"].to_pylist(), deletes["sequence"].to_pylist()))


def _begun(
    collection: SilverCollection, given: pa.Table, counts: survey.EventCounts, number: int, *, folds: bool
) -> schemas.Evolution | None:
    """The schema to type the events' documents by; None where their first ones cannot give one."""
    current = collection.schema.schema
    if folds:  # what became of the updates is looked at when the other documents were
        return schemas.unchanged(current, collection.options.pins)
    texts, places = map(table_schema.as_array, (given["after"], given["sequence"]))
    begun = collection.typer.begun(texts, places, current=current, reserved=collection.reserved)
    # Which records it, too: a schema must not depend on who looked.
    if begun is None or current.fields or not reduction.is_at_once(collection, counts):
        return begun
    evolve.record(collection, begun, number)
    return replace(begun, changes=())


def _columns(
    collection: SilverCollection,
    schema: document_schema.DocumentSchema,
    events: pa.Table,
    typed: pa.StructArray,
    number: int,
) -> pa.Table:
    """The rows with the columns that `write.table_rows` gives them, in its order."""
    count, document = events.num_rows, typed.field("document")
    columns: dict[str, pa.Array | pa.ChunkedArray] = {each.name: document.field(at) for at, each in enumerate(document.type)}
    columns |= {added.name: collection_events.value(events, added.path or ()) for added in collection.added(schema)}
    # Of a setting that was taken back the column stays, and says that no document is deleted.
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
    """The table's columns with those that it lacks; None where one has to change."""
    live = collection.writer.live
    assert live is not None
    return table_columns.grown(live.spark_schema(), from_arrow_schema(rows.schema))
