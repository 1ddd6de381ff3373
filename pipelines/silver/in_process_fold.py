"""Folds partial updates, in this process, onto documents from the table's files.

The counterpart of `partial_updates`, which uses SQL and handles any events; this is for events newer than all that the table has seen.
If whole documents are not kept, an update only marks the document of the same batch, or the table's row, as incomplete.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze
from cdc_core.silver import fold, reduce
from cdc_core.typed.decoding import without_collector
from pipelines import helper_processes
from pipelines.bronze import collection_events
from pipelines.delta import live_files, table_schema, upsert
from pipelines.silver.batch import NeedsSteps, Unreadable

PART_ROWS = 4096
"""How many documents are folded at a time."""

READ_BYTES = 4 * 2**30
"""For a few updates, the most bytes of files that are searched for their documents: two seconds' work."""

UPDATE_READ_BYTES = 32 * 2**10
"""How many bytes more for each update: reading them costs as much as folding it. For more, Spark is faster."""

_DOCUMENT = "__document"
_STORED = (upsert.KEY, "__sequence", "__known", "__deleted", "__incomplete", _DOCUMENT)


class _History(NamedTuple):
    """A key's updates, and the document or delete before them (`decisive`), each as an index into the events."""

    decisive: int | None
    updates: list[int]


class _Base(NamedTuple):
    """The base of a key's updates. `place` is the index of its document, first among the stored ones, then among the events'; None for
    none.

    The base contains all updates up to `since`; `known` is the sequence up to which it is whole, `is_doubtful` whether it was incomplete.
    """

    place: int | None
    known: str = ""
    since: str = ""
    is_doubtful: bool = False


class Mark(NamedTuple):
    """The last event of a key whose document is not among the events: an update, or the delete at the index `delete` of
    `WholeEvents.events`."""

    sequence: str
    delete: int | None = None


class WholeEvents(NamedTuple):
    """Events without partial updates, with their rows' `__incomplete`, `__known`, `__sequence` and `__deleted`, and the marks by key.

    A delete that is not `__deleted` leaves no row.
    """

    events: pa.Table
    marks: Mapping[str, Mark] = MappingProxyType({})
    updates: pa.Table | None = None
    """The events of the marks that are of updates."""


def folded(events: pa.Table, is_partial: pa.BooleanArray, live: live_files.LiveFiles) -> WholeEvents:
    """The events, in order, with each key's partial updates (`is_partial`) replaced by one document at the last of them.

    Raises `Unreadable` if an update cannot be read, `NeedsSteps` if others cannot be folded here: a stored document was not kept, the
    documents or their files are too large.
    """
    if _DOCUMENT not in live.schema.names:
        raise NeedsSteps
    with without_collector():
        histories = {key: history for key, history in _histories(events, is_partial).items() if history.updates}
        stored_keys = [key for key, history in histories.items() if history.decisive is None]
        stored_rows = rows_of(live, stored_keys, [name for name in _STORED if name in live.schema.names])
        pending = _pending(events, histories, stored_rows)
        results = _results(events, pending, table_schema.as_array(stored_rows[_DOCUMENT]))
        # Updates are checked only if one may be unreadable: it leaves its document incomplete, or was not folded because a document or a
        # delete follows. No text is parsed for this alone otherwise.
        is_read = is_partial.true_count == sum(len(each.updates) for each in pending)
        if not is_read or pc.any(results["incomplete"]).as_py():
            descriptions = table_schema.as_array(events["updateDescription"])
            if not fold.are_readable(descriptions.filter(is_partial)):
                raise Unreadable
        return _with_documents(events, is_partial, pending, results)


def noted(events: pa.Table, is_partial: pa.BooleanArray) -> WholeEvents:
    """The events without partial updates: each of those marks the document before it, or, if that is not among the events, the table's row
    (`marked`). Raises `NeedsSteps` if one follows a delete."""
    if not is_partial.true_count:
        return _marked(events, is_partial, pa.nulls(events.num_rows, pa.string()))
    ops, sequences = events["op"].to_pylist(), events["sequence"].to_pylist()
    known_sequences: dict[int, str] = {}
    last_sequences: dict[int, str] = {}
    marks: dict[str, Mark] = {}
    last_updates: list[int] = []
    for key, (decisive, updates) in _histories(events, is_partial).items():
        if not updates:
            continue
        if decisive is None:
            marks[key] = Mark(sequences[updates[-1]])
            last_updates.append(updates[-1])
        elif ops[decisive] == bronze.Op.DELETE.value:
            raise NeedsSteps
        else:
            known_sequences[decisive], last_sequences[decisive] = sequences[decisive], sequences[updates[-1]]
    whole_indexes = pc.indices_nonzero(pc.invert(is_partial))
    places = whole_indexes.to_pylist()
    return _marked(
        events.take(whole_indexes),
        pa.array([number in last_sequences for number in places], pa.bool_()),
        pa.array(map(known_sequences.get, places), pa.string()),
        last=pa.array([last_sequences.get(number, sequences[number]) for number in places], pa.string()),
    )._replace(marks=marks, updates=events.take(_places(last_updates)))


def shown(whole: WholeEvents) -> WholeEvents:
    """The events where rows of deleted documents stay: each delete gets its pre-image as its document, or else the last document of its key
    among these events. One with neither becomes a mark, which changes the table's row."""
    events = whole.events
    keys, ops, sequences = (events[name].to_pylist() for name in ("key", "op", "sequence"))
    has_before = events["before"].is_valid().to_pylist()
    documents: dict[str, int] = {}
    deletes: dict[str, int] = {}
    for number, (key, op) in enumerate(zip(keys, ops)):
        if op == bronze.Op.DELETE.value:
            deletes[key] = number
        else:
            documents[key] = number
            deletes.pop(key, None)
    marks = {**whole.marks}
    of_pre_images: set[int] = set()
    of_documents: dict[int, int] = {}
    for key, number in deletes.items():
        if has_before[number]:
            of_pre_images.add(number)
        elif key in documents:
            of_documents[number] = documents[key]
        else:
            marks[key] = Mark(sequences[number], number)
    numbers = range(events.num_rows)
    if of_documents:
        after = events["after"].take(_places(of_documents.get(number, number) for number in numbers))
        known = [sequences[of_documents[number]] if number in of_documents else None for number in numbers]
        events = table_schema.with_column(events, "after", after)
        events = table_schema.with_column(events, "__known", pc.coalesce(pa.array(known, pa.string()), events["__known"]))
    is_deleted = pa.array([number in of_pre_images or number in of_documents for number in numbers], pa.bool_())
    return WholeEvents(table_schema.with_column(events, "__deleted", is_deleted), marks, whole.updates)


def marked(
    live: live_files.LiveFiles,
    whole: WholeEvents,
    number: int,
    *,
    added: Iterable[reduce.AddedColumn],
    adds_deleted: bool,
) -> tuple[WholeEvents, pa.Table]:
    """The table's rows of the marks: set incomplete or deleted, with the last event's sequence and `number` as `__batch`; deletes also set
    the columns `added`. With `adds_deleted` the rows have `__deleted` also where the table lacks it. A mark whose key has no row gets
    one, in the events: of a delete it shows the key. Raises `NeedsSteps` if the rows are too large for this process or unreadable."""
    rows = rows_of(live, list(whole.marks), live.schema.names)
    if rows.num_rows != len(whole.marks):
        whole = _with_unknown(whole, whole.marks.keys() - {*rows[upsert.KEY].to_pylist()})
    marks = whole.marks
    if adds_deleted and "__deleted" not in rows.column_names:  # the mode is newer than the table
        rows = rows.append_column("__deleted", pa.nulls(rows.num_rows, pa.bool_()))
    row_marks = [marks[key] for key in rows[upsert.KEY].to_pylist()]
    is_delete = pa.array([mark.delete is not None for mark in row_marks], pa.bool_())
    known, deleted_values = pc.coalesce(rows["__known"], rows["__sequence"]), {}
    if "__deleted" in rows.column_names:
        # An update after a delete belongs to another document of this key.
        is_other = pc.and_(pc.invert(is_delete), pc.fill_null(rows["__deleted"], False))
        known = pc.if_else(is_other, "", known)
        deleted_values = {"__deleted": pc.if_else(is_delete, rows["__deleted"], False)}
    values = {
        **deleted_values,
        "__known": known,
        "__incomplete": pc.invert(is_delete),
        "__batch": pa.array([number] * rows.num_rows, pa.int64()),
        "__sequence": pa.array([mark.sequence for mark in row_marks], pa.string()),
    }
    if is_delete.true_count:
        deletes = whole.events.take(pa.array([mark.delete for mark in row_marks], pa.int64()))
        delete_values = {each.name: collection_events.value(deletes, each.path or ()) for each in added}
        delete_values["__deleted"] = pa.array([True] * rows.num_rows, pa.bool_())
        if not delete_values.keys() <= set(rows.column_names):
            raise NeedsSteps
        try:
            delete_rows = table_schema.conformed(
                pa.table(delete_values), pa.schema([rows.schema.field(name) for name in delete_values])
            )
        except table_schema.NotReadable as error:
            raise NeedsSteps from error
        values |= {name: pc.if_else(is_delete, delete_rows[name], values.get(name, rows[name])) for name in delete_values}
    # A repeated event changes nothing.
    is_newer = pc.greater(values["__sequence"], rows["__sequence"])
    for name, column in values.items():
        column = pc.if_else(is_newer, column, rows[name])
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return whole, rows


def _with_unknown(whole: WholeEvents, keys: Collection[str]) -> WholeEvents:
    """The events with rows for the marks of these keys, of which no document is known."""
    deletes = {whole.marks[key].delete for key in keys}
    is_unknown = pa.array([number in deletes for number in range(whole.events.num_rows)], pa.bool_())
    events = table_schema.with_column(whole.events, "__deleted", pc.or_(whole.events["__deleted"], is_unknown))
    events = table_schema.with_column(events, "__known", pc.if_else(is_unknown, "", events["__known"]))
    if whole.updates is not None:
        updates = whole.updates.filter(pc.is_in(whole.updates["key"], value_set=pa.array([*keys], pa.string())))
        count = updates.num_rows
        rows = _marked(updates, pa.array([True] * count, pa.bool_()), pa.array([""] * count, pa.string())).events
        events = pa.concat_tables([events, rows]).combine_chunks()
    return WholeEvents(events, {key: mark for key, mark in whole.marks.items() if key not in keys})


def rows_of(live: live_files.LiveFiles, keys: Sequence[str], columns: Sequence[str]) -> pa.Table:
    """The table's rows of the keys. Raises `NeedsSteps` if they are too large for this process, or unreadable."""
    read_bytes = READ_BYTES + UPDATE_READ_BYTES * len(keys)
    try:
        places = live.places(upsert.KEY, keys)
        size_bytes = collection_events.MANY_BYTES
        return live_files.rows_at(live, places, columns=columns, size_bytes=size_bytes, read_bytes=read_bytes)
    except (OSError, pa.ArrowException, table_schema.NotReadable) as error:
        raise NeedsSteps from error


def _histories(events: pa.Table, is_partial: pa.BooleanArray) -> dict[str, _History]:
    """Each key's updates after its last document or delete."""
    keys, sequences = events["key"].to_pylist(), events["sequence"].to_pylist()
    histories: dict[str, _History] = {}
    for number, (key, is_update) in enumerate(zip(keys, is_partial.to_pylist())):
        if not is_update:
            histories[key] = _History(number, [])
            continue
        history = histories.setdefault(key, _History(None, []))
        if history.decisive is None or sequences[number] > sequences[history.decisive]:
            history.updates.append(number)
    return histories


class _Pending(NamedTuple):
    """A document to be folded: its updates, as indexes into the events, and their base."""

    updates: list[int]
    base: _Base


def _pending(events: pa.Table, histories: Mapping[str, _History], stored: pa.Table) -> list[_Pending]:
    """The documents to be folded, in the order of their last updates. Raises `NeedsSteps` if a stored document was not kept."""
    bases = _stored_bases(stored)
    ops, sequences = events["op"].to_pylist(), events["sequence"].to_pylist()
    pending = []
    for key, (decisive, key_updates) in histories.items():
        if decisive is None:
            base = bases.get(key, _NOTHING)
        elif ops[decisive] == bronze.Op.DELETE.value:
            base = _Base(None, since=sequences[decisive])
        else:
            base = _Base(stored.num_rows + decisive, sequences[decisive], sequences[decisive])
        if base is None:
            raise NeedsSteps
        updates = [number for number in key_updates if sequences[number] > base.since]
        if updates:
            pending.append(_Pending(updates, base))
    return sorted(pending, key=_last)


def _last(pending: _Pending) -> int:
    return pending.updates[-1]


_NOTHING = _Base(None)


def _stored_bases(stored: pa.Table) -> dict[str, _Base | None]:
    """The bases in the table, by key; None for a row whose document was not kept."""
    nulls = itertools.repeat(None)
    names = (upsert.KEY, "__sequence", "__known", "__incomplete", "__deleted")
    columns = (stored[name].to_pylist() if name in stored.column_names else nulls for name in names)
    has_text = stored[_DOCUMENT].is_valid().to_pylist()
    bases: dict[str, _Base | None] = {}
    for place, (key, since, stored_known, is_incomplete, is_deleted, is_kept) in enumerate(zip(*columns, has_text)):
        known = since if stored_known is None else stored_known
        # An update after a delete belongs to another document of the key.
        base = _Base(None, "", since, bool(is_incomplete)) if is_deleted else _Base(place, known, since, bool(is_incomplete))
        bases[key] = base if is_deleted or is_kept or known == "" else None
    return bases


def _with_documents(
    events: pa.Table, is_partial: pa.BooleanArray, pending: Sequence[_Pending], results: pa.Table
) -> WholeEvents:
    """The events, with each folded document in place of its last update."""
    is_doubtful = pa.array([each.base.is_doubtful for each in pending], pa.bool_())
    is_incomplete = pc.or_(results["incomplete"].combine_chunks(), is_doubtful)
    known = pc.if_else(is_incomplete, pa.array([each.base.known for each in pending], pa.string()), None)

    whole_indexes, last_indexes = pc.indices_nonzero(pc.invert(is_partial)).to_pylist(), map(_last, pending)
    places = _places(sorted((*whole_indexes, *last_indexes)))
    is_folded, whole_events = is_partial.take(places), events.take(places)

    def with_made(column: pa.Array, made: pa.Array) -> pa.Array:
        return made if len(made) == len(column) else pc.replace_with_mask(column, is_folded, made)

    documents = with_made(table_schema.as_array(whole_events["after"]), table_schema.as_array(results["document"]))
    return _marked(
        table_schema.with_column(whole_events, "after", documents),
        with_made(pa.array([False] * len(places), pa.bool_()), is_incomplete),
        with_made(pa.nulls(len(places), pa.string()), known),
    )


def _results(events: pa.Table, pending: Sequence[_Pending], stored: pa.StringArray) -> pa.Table:
    """The results of `fold.fold_batch`, one for each pending document; helper processes share a large number."""
    keys, after = table_schema.as_array(events["key"]), table_schema.as_array(events["after"])
    columns = ("sequence", "updateDescription")
    updates = pa.StructArray.from_arrays([table_schema.as_array(events[name]) for name in columns], names=columns)
    # Without a copy where possible: touching new memory costs as much as parsing it.
    texts = stored if after.null_count == len(after) else pa.concat_arrays([stored, after])

    def part_of(some: Sequence[_Pending]) -> pa.RecordBatch:
        """These documents' keys, bases and updates."""
        lists = pa.ListArray.from_arrays(
            _offsets([len(document.updates) for document in some]),
            updates.take(_places(number for document in some for number in document.updates)),
        )
        bases = texts.take(_places(document.base.place for document in some))
        return pa.RecordBatch.from_arrays(
            [keys.take(_places(map(_last, some))), bases, lists], names=["__key", "base", "updates"]
        )

    size_bytes = updates.nbytes + stored.nbytes
    rows = max(1, min(PART_ROWS, helper_processes.PART_BYTES * len(pending) // max(1, size_bytes)))
    parts = [pending[start : start + rows] for start in range(0, max(1, len(pending)), rows)]
    if size_bytes < helper_processes.MANY_BYTES:
        return pa.Table.from_batches(itertools.chain.from_iterable(fold.fold_batch(part_of(some)) for some in parts))
    with helper_processes.DOCUMENTS.borrowed(helper_processes.cores()) as helpers:
        results = helper_processes.shared(
            helper_processes.ListedTasks(parts),
            lambda some: list(fold.fold_batch(part_of(some))),
            lambda helper, some: _by_helper(helper, part_of(some)),
            helpers,
        )
    return pa.Table.from_batches(list(itertools.chain.from_iterable(batches for _, batches in results)))


def _by_helper(helper: helper_processes.HelperProcess, part: pa.RecordBatch) -> list[pa.RecordBatch]:
    _, batch = helper.call(_answer, None, part, seconds=helper_processes.PART_SECONDS)
    return list(fold.fold_batch(part)) if batch is None else [batch]


def _answer(_: None, part: pa.RecordBatch | None) -> tuple[None, pa.RecordBatch | None]:
    """Runs in a helper process; None if the documents have become too large for one batch."""
    assert part is not None
    with without_collector():
        batches = list(fold.fold_batch(part))
    return None, batches[0] if len(batches) == 1 else None


def _places(numbers: Iterable[int | None]) -> pa.Array:
    return pa.array(numbers, pa.int64())


def _offsets(counts: Sequence[int]) -> pa.Array:
    return pa.array(itertools.accumulate(counts, initial=0), pa.int32())


def _marked(
    events: pa.Table,
    is_incomplete: pa.BooleanArray,
    known: pa.StringArray,
    *,
    last: pa.StringArray | None = None,
) -> WholeEvents:
    values = {
        "__incomplete": is_incomplete,
        "__known": known,
        "__sequence": events["sequence"] if last is None else last,
        "__deleted": pa.array([False] * events.num_rows, pa.bool_()),
    }
    for name, column in values.items():
        events = events.append_column(name, column)
    return WholeEvents(events)
