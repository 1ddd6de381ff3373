"""Applies a batch of plain events in this process, without a Spark query.

Its `STEPS` do what `ranges.STEPS` do, for whole documents, partial updates (`pipelines.silver.in_process_fold`) and deletes that are newer
than anything in the table, and for late documents and deletes (`_superseded`). Where one of them raises `Unreadable`, the batch is split
first (`pipelines.silver.in_process_quarantine`). For any other batch one raises `NeedsSteps`, nothing was committed, and the batch goes
through `ranges.STEPS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.settings.parse import CollectionSettings
from cdc_core.silver import quarantine as quarantine_rules
from cdc_core.silver import reduce
from cdc_core.sql import table_columns
from cdc_core.tables import layout as tables
from pipelines import helper_processes
from pipelines.bronze import collection_events, quarantine_table, registry, survey
from pipelines.delta import file_statistics, live_files, table_schema, upsert
from pipelines.delta import tables as delta
from pipelines.schema import batch_evolution, document_typer
from pipelines.silver import batch as batches
from pipelines.silver import deletes, evolve, in_process_fold, in_process_quarantine, reduction, write
from pipelines.silver.collection import CollectionWork, SilverCollection
from pipelines.silver.read_ahead import Read, ReadAhead

MANY_EVENTS = 2_000
"""A work with at least so many events is cut into ranges, and the first of them is read ahead."""


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
        columns = _bronze_columns(settings.unwrap, keeps_document=keeps_document)
        reader = _reader(spark, bronze_table, work.namespace)
        ahead.begin(first_range, columns, reader)
    return ahead


def ranges(collection: SilverCollection, work: CollectionWork) -> Sequence[BatchRange] | None:
    """The work's span, cut into ranges that this process applies one after the other; None if it is one range, or for Spark."""
    counts = collection.ahead.counts or _by_batch(collection.spark, collection.bronze, work)
    live = None if counts is None else _live(collection)
    if counts is None or live is None:
        return None
    searched_rows = file_statistics.count_between(live.files(), upsert.KEY, work.counts.first_key, work.counts.last_key)
    # A partial update counts with the size of the document that it is folded onto, a short document with all of the table's columns.
    folded_bytes = _row_bytes(live) if collection.keeps_document else 0
    row_bytes = max(folded_bytes, document_typer.row_bytes(collection.schema.schema))
    most = collection.options.max_batch_events
    return collection_events.portions(counts, work.span, most=most, row_bytes=row_bytes, looked_through=searched_rows)


def _by_batch(spark: SparkSession, bronze_table: tables.TableRef, work: CollectionWork) -> survey.EventsByBatch | None:
    return collection_events.by_batch(
        spark, bronze_table, work.namespace, work.span, events=work.counts.events, many=MANY_EVENTS
    )


@dataclass(frozen=True)
class LocalBatch:
    """A range of the collection's events, as the steps of this process pass it on to rows and their commit.

    `events` are in order. After `_reduced` they are without partial updates, and their rows' `__sequence`, `__known`, `__incomplete` and
    `__deleted` are beside them.
    """

    range_: BatchRange
    counts: survey.EventCounts
    next_position: registry.SilverPosition
    live: live_files.LiveFiles
    """The table's files."""
    is_late: bool
    """Whether some events may be older than what the table has seen."""
    events: pa.Table = None
    documents: Sequence[pa.Table] = ()
    """The texts, with sequences, that the schema must hold, as `DocumentTyper.typed` needs them; if updates are folded, with the results."""
    winners: Sequence[int] = ()
    """The indexes of the events that become rows: each key's last one."""
    keys: Sequence[str] = ()
    """The keys whose rows are replaced."""
    deleted_at: Mapping[str, str] = field(default_factory=dict)
    """The sequence of each key's last delete, if it has one."""
    typed: pa.StructArray = None
    """The documents of `events` as the table's columns, and what was rescued."""
    evolutions: Sequence[batch_evolution.Evolution] = ()
    """The changes of the schema that the documents need."""
    rows: Sequence[pa.Table] = ()
    """The rows to write, in parts; after `_reduced` the table's rows that are only marked."""
    facts: pa.Table | None = None
    """What goes to quarantine, if anything."""


def applied(
    collection: SilverCollection,
    range_: BatchRange,
    counts: survey.EventCounts,
    next_position: registry.SilverPosition,
    *,
    is_late: bool,
) -> bool:
    """Apply the range, with `next_position`; False if it has to go through `ranges.STEPS`, with nothing committed.

    `is_late`: some events may be older than what the table has seen.
    """
    # Late updates are folded in their place, also onto a late document; a deleted document that stays may become another's.
    if is_late and (collection.keeps_document or collection.mode.marks_deleted):
        return False
    live = _live(collection) if counts.events <= collection_events.LOCAL_EVENTS else None
    if live is None:
        return False
    # A late event beside one in quarantine is left to the steps.
    for read in (_read,) if is_late else (_read, _split):
        batch = LocalBatch(range_, counts, next_position, live, is_late)
        try:
            for step in (read, *STEPS):  # the batch is rebound, which frees the texts after they are typed
                batch = step(collection, batch)
        except batches.Unreadable:
            continue
        except batches.NeedsSteps:
            return False
        return True
    return False


def _live(collection: SilverCollection) -> live_files.LiveFiles | None:
    """The table's files as they are now; None if this process cannot write the table."""
    return None if None in collection.added_paths else collection.writer.replaceable()


def _read(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: the range's events, without deletes if the mode keeps rows. Raises `NeedsSteps` if this process cannot read them, `Unreadable`
    if one belongs to quarantine or has to wait for an event there."""
    columns = _bronze_columns(collection.options.unwrap, keeps_document=collection.keeps_document)
    reader = _reader(collection.spark, collection.bronze, collection.namespace)
    events = _wanted(collection, collection.ahead.events(batch.range_, columns, reader), batch.counts)
    if not collection_events.are_readable(events):
        raise batches.Unreadable
    waiting_keys = _quarantined_keys(collection, before=batch.range_.after)
    if waiting_keys and not waiting_keys.isdisjoint(events["key"].to_pylist()):
        raise batches.Unreadable
    document_bytes = events["after"].nbytes
    if collection.keeps_document:  # and those that updates are folded onto
        document_bytes += _row_bytes(batch.live) * events["after"].null_count
    if document_bytes >= helper_processes.MANY_BYTES:
        helper_processes.DOCUMENTS.start()
    return replace(batch, events=events)


def _split(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: `_read` where an event cannot be read or has to wait: the events without these, and what goes to quarantine."""
    reader = _reader(collection.spark, collection.bronze, collection.namespace)
    split = in_process_quarantine.split(
        collection,
        batch.live,
        _wanted(collection, reader(batch.range_, bronze.SCHEMA.names), batch.counts),
        batch.range_,
        waiting_keys=_quarantined_keys(collection, before=batch.range_.after),
    )
    return replace(batch, events=split.events, facts=split.facts)


def _wanted(collection: SilverCollection, events: pa.Table | None, counts: survey.EventCounts) -> pa.Table:
    """The events, without deletes if the mode keeps rows. Raises `NeedsSteps` if they were not read."""
    if events is None or events.num_rows != counts.events:
        raise batches.NeedsSteps
    if not collection.mode.keeps_row:
        return events
    return events.filter(pc.fill_null(pc.not_equal(events["op"], bronze.Op.DELETE.value), True))


def _quarantined_keys(collection: SilverCollection, *, before: int) -> frozenset[str]:
    """The keys with an event in quarantine from before the range after batch `before`, whose events must wait."""
    if collection.lacks_quarantine or delta.found(collection.spark, collection.quarantine) is None:
        collection.lacks_quarantine = True
        return frozenset()
    collection.quarantined = collection.quarantined or quarantine_table.HeldEvents.of(
        collection.spark, collection.quarantine
    )
    keys = None if collection.quarantined is None else collection.quarantined.keys(before=before)
    if keys is None:  # this process cannot read them
        raise batches.NeedsSteps
    return keys


def _reader(spark: SparkSession, bronze_table: tables.TableRef, namespace: registry.Namespace) -> Read:
    """A function that reads a collection's events of a range in order, or returns None if this process cannot."""
    # Other collections' events are in the same files.
    limit, size_bytes = 2 * collection_events.LOCAL_EVENTS, collection_events.MANY_BYTES
    return functools.partial(collection_events.in_order, spark, bronze_table, namespace, limit=limit, size_bytes=size_bytes)


def _bronze_columns(options: unwrap_options.UnwrapOptions, *, keeps_document: bool) -> tuple[str, ...]:
    """The columns of bronze, beside the document, that rows are made from."""
    updates = ("updateDescription",) if keeps_document else ()
    return (*updates, *reduce.needed(options))


def _row_bytes(live: live_files.LiveFiles) -> int:
    """The average size of a row in the table's files, in bytes."""
    return sum(file["size"] for file in live.files()) // max(1, live.row_count())


def _with_deleted(events: pa.Table) -> pa.Table:
    """The events, with what is known of a deleted document in `after`, as `evolve.looked_at` returns them."""
    key = pc.binary_join_element_wise('{"_id":', events["key"], "}", "")
    deleted = pc.coalesce(events["before"], events["documentKey"], key)
    after = pc.if_else(pc.equal(events["op"], bronze.Op.DELETE.value), deleted, events["after"])
    return table_schema.with_column(events, "after", after)


def _reduced(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: folds partial updates, or marks their rows, and finds each key's last event."""
    live, shows_deleted = batch.live, collection.shows_deleted(batch.counts)
    events = _with_deleted(batch.events) if shows_deleted else batch.events
    is_partial = reduce.are_partial(events).combine_chunks()
    has_partial, documents = is_partial.true_count > 0, [events.select(["after", "sequence"])]
    if has_partial and batch.is_late:  # as in `applied`
        raise batches.NeedsSteps
    if has_partial and collection.keeps_document:
        # The first schema comes from whole documents, before updates are folded.
        if not collection.schema.schema.fields:
            raise batches.NeedsSteps
        whole = in_process_fold.folded(events, is_partial, live)
        documents.append(pa.concat_tables([*documents, whole.events.select(["after", "sequence"])]))  # as the steps do
    else:
        whole = in_process_fold.noted(events, is_partial)
    if shows_deleted:
        whole = in_process_fold.shown(whole)
    keys = list(dict.fromkeys((*whole.events["key"].to_pylist(), *whole.marks)))
    # Before the documents are typed, which is most of the work and would be done again by the steps.
    if live.is_many(upsert.KEY, keys):
        raise batches.NeedsSteps
    rows = []
    if whole.marks:
        added, adds_deleted = collection.added(collection.schema.schema), collection.mode.adds_deleted
        whole, marked_rows = in_process_fold.marked(live, whole, batch.range_.to, added=added, adds_deleted=adds_deleted)
        rows.append(marked_rows)
    winners, deleted_at = _winners(whole)
    if batch.is_late:
        event_keys, sequences = (whole.events[name].to_pylist() for name in ("key", "sequence"))
        superseded = _superseded(collection, live, dict(zip(event_keys, sequences)))
        keys = [key for key in keys if key not in superseded]
        winners = [number for number in winners if event_keys[number] not in superseded]
    return replace(
        batch,
        events=whole.events,
        documents=documents,
        winners=winners,
        keys=keys,
        deleted_at=deleted_at,
        rows=rows,
    )


def _superseded(collection: SilverCollection, live: live_files.LiveFiles, last: Mapping[str, str]) -> set[str]:
    """The keys whose `last` event, given by its sequence, is not newer than the key's row or its remembered delete.

    Their documents still count for the schema, and their deletes are remembered. Raises `NeedsSteps` if one of their rows may lack a
    document or its delete, or what is stored is too much for this process.
    """
    columns = ("__key", "__sequence", "__incomplete", "__known", "__deleted")
    rows = in_process_fold.rows_of(live, list(last), [name for name in columns if name in live.schema.names])
    states = (rows[name].to_pylist() for name in rows.column_names if name not in ("__key", "__sequence"))
    if any(map(any, states)):
        raise batches.NeedsSteps
    stored = dict(zip(rows["__key"].to_pylist(), rows["__sequence"].to_pylist()))
    remembered = _remembered(collection, list(last))
    # Remembered and not applied: the process was killed in between, or an older copy of the table was restored.
    if any(sequence <= remembered.get(key, "") for key, sequence in stored.items()):
        raise batches.NeedsSteps
    return {key for key in last if last[key] <= max(stored.get(key, ""), remembered.get(key, ""))}


def _remembered(collection: SilverCollection, keys: Sequence[str]) -> dict[str, str]:
    """The sequence of the last remembered delete of each key that has one. Raises `NeedsSteps` if this process cannot read them."""
    if not delta.exists(collection.spark, collection.deletes):
        return {}
    facts = live_files.of(collection.spark, collection.deletes)
    if facts is None or not facts.move_to_newest():
        raise batches.NeedsSteps
    rows = in_process_fold.rows_of(facts, keys, ("__key", "__sequence")).sort_by("__sequence")
    return dict(zip(rows["__key"].to_pylist(), rows["__sequence"].to_pylist()))


def _winners(whole: in_process_fold.WholeEvents) -> tuple[list[int], dict[str, str]]:
    """The indexes of each key's last event if it has a row, and the sequence of each key's last delete."""
    events = whole.events
    last_numbers = dict(zip(events["key"].to_pylist(), range(events.num_rows)))
    is_delete = pc.equal(events["op"], bronze.Op.DELETE.value)
    deletes = events.select(["key", "sequence"]).filter(is_delete)
    has_row = pc.fill_null(pc.or_kleene(pc.invert(is_delete), events["__deleted"]), False).to_pylist()
    winners = [number for number in sorted(last_numbers.values()) if has_row[number]]
    return winners, dict(zip(deletes["key"].to_pylist(), deletes["sequence"].to_pylist()))


def _typed(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: types the documents by a schema that holds all of them, while the deletes are remembered."""
    events, current = batch.events, collection.schema.schema
    # `at_once` records the schema of the first documents as a version of its own: the schema history must not depend on the way.
    keeps_first = not (current.fields or batch.is_late) and reduction.is_at_once(collection, batch.counts)
    if keeps_first and batch.facts is not None:  # quarantined documents are among those
        raise batches.NeedsSteps
    with deletes.remembering(collection, batch.deleted_at, batch.range_.to):  # meanwhile the JVM is idle
        result = collection.typer.typed(
            table_schema.as_array(events["after"]),
            batch.documents,
            current=current,
            reserved=collection.reserved,
            keeps_first=keeps_first,
        )
    if result is None:
        raise batches.Unreadable
    evolutions, typed = result
    if len(batch.documents) > 1:  # as `reduction` does where it folds
        evolutions[-1] = replace(evolutions[-1], seen_at=batch.counts.low)
    if not collection.keeps_document and ("after",) not in collection.added_paths:
        events = events.drop_columns("after")  # most of the memory, and typed by now
    return replace(batch, events=events, documents=(), typed=typed, evolutions=evolutions)


def _table_rows(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: the rows of the last events, with the columns of `write.table_rows`, in its order."""
    events, typed = batch.events, batch.typed
    if len(batch.winners) < events.num_rows:  # copying documents is expensive
        indexes = pa.array(batch.winners, pa.int64())  # a list of none would have no type
        events, typed = events.take(indexes), typed.take(indexes)
    document, rescued, _ = typed.flatten()
    columns: dict[str, pa.Array | pa.ChunkedArray] = {each.name: document.field(at) for at, each in enumerate(document.type)}
    added_columns = collection.added(batch.evolutions[-1].schema)
    columns |= {column.name: collection_events.value(events, column.path or ()) for column in added_columns}
    # If the mode was changed, the column stays, and is false.
    has_marks = collection.mode.adds_deleted or "__deleted" in batch.live.schema.names
    columns |= {"__deleted": events["__deleted"]} if has_marks else {}
    columns |= {name: events[name] for name in ("__incomplete", "__known")} | {"__rescued": rescued}
    columns |= {"__document": events["after"]} if collection.keeps_document else {}
    columns |= {
        "__key": events["key"],
        "__sequence": events["__sequence"],
        "__batch": pa.array([batch.range_.to] * events.num_rows, pa.int64()),
    }
    return replace(batch, rows=(pa.table(columns), *batch.rows))


def _committed(collection: SilverCollection, batch: LocalBatch) -> LocalBatch:
    """Step: records the schema, adds the columns that the table lacks, widens types, and commits the rows with the position."""
    writer, live, row_schema = collection.writer, batch.live, batch.rows[0].schema
    changes = table_columns.Alteration()
    if not {*row_schema}.issubset(live.schema):  # rarely: to compare hundreds of columns as Spark's types takes milliseconds
        changes = table_columns.alterations(live.spark_schema(), from_arrow_schema(row_schema))
    if changes.impossible:
        raise batches.NeedsSteps
    if batch.facts is not None and batch.facts.num_rows:
        # Before the commit: after a crash in between the range is repeated, and no event is lost.
        collection.lacks_quarantine = False
        quarantine_table.append(collection.spark, collection.quarantine, batch.facts)
        if not {*batch.facts["reason"].to_pylist()} <= {quarantine_rules.Reason.FOLLOWS, *quarantine_rules.ENDINGS}:
            evolve.tell_of_quarantine(collection)
    for evolution in batch.evolutions:
        evolve.record(collection, evolution, batch.range_.to)  # before the table holds it
    if changes.added and not writer.define(table_columns.with_added(live.spark_schema(), from_arrow_schema(row_schema))):
        raise batches.NeedsSteps
    if changes.widened:
        write.widen(collection, changes)
    if not live.move_to(writer.version):
        raise batches.NeedsSteps
    rows = (table_schema.conformed(part, live.schema) for part in batch.rows)
    to, extra = batch.next_position.to, collection.metadata(batch.next_position)
    version = writer.replace_arrow(rows, schema=live.schema, keys=batch.keys, to=to, extra=extra)
    if version is None:
        raise batches.NeedsSteps
    return batch


STEPS = (_reduced, _typed, _table_rows, _committed)
"""The steps of a range's events, after `_read` or `_split`, to rows and their commit."""


def swept(collection: SilverCollection, sweep: Sweep, next_position: registry.SilverPosition, *, number: int) -> bool:
    """Delete the rows that are older than a sweep, with `next_position`; False if a query has to, with nothing committed.

    A dropped database leads to one sweep for each of its collections.
    """
    live = _live(collection) if collection.mode.removes_row else None
    if live is None:
        return False
    # Events in quarantine may keep a row.
    if live.row_count() > collection_events.LOCAL_EVENTS or delta.exists(collection.spark, collection.quarantine):
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
    to, extra = next_position.to, collection.metadata(next_position)
    version = collection.writer.replace_arrow([], schema=live.schema, keys=keys, to=to, extra=extra)
    return version is not None
