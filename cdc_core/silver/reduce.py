"""The events of a range as one row per key: the input of the MERGE into a collection's table.

An event is *decisive* (a full document, or a delete) or *partial* (an update without its document). A key's last
decisive event wins, by `sequence` and then by `offset`, so order of arrival and repetition do not matter. Later partial
updates are folded if the stored document is kept; otherwise they only mark the row incomplete.

A reduced row:

    __key STRING, __action STRING (`Action`)
    __sequence STRING   the last event that the row knows of
    __guard STRING      the sequence of the event whose document it has; it only replaces rows with an older document
    __known STRING      null: the document is as of `__sequence`. A sequence: later events came without their document (the row
                        is incomplete, or was deleted without a pre-image), and the document is as of this one. Empty: no
                        document is known
    __incomplete, __deleted BOOLEAN
    after STRING        the document as type-exact Extended JSON, null if the action needs none
    and the bronze columns of `needed`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import names as column_names
from cdc_core.silver import fold
from cdc_core.sql import arrow

DELETED = ("before", "documentKey")
"""The bronze columns that a delete's row is made of, if the delete mode keeps one."""


class Action(StrEnum):
    """What the MERGE does with a reduced row."""

    DOCUMENT = "document"
    REMOVE = "remove"
    MARK = "mark"


def is_partial() -> Column:
    """Whether an event is an update without its document."""
    return (F.col("op") == bronze.Op.UPDATE.value) & F.col("after").isNull()


def are_partial(events: pa.Table) -> pa.ChunkedArray:
    """`is_partial` for each event of an Arrow table."""
    return pc.and_(pc.equal(events["op"], bronze.Op.UPDATE.value), pc.is_null(events["after"]))


def latest(
    events: DataFrame, *, has_partial: bool = True, columns: Sequence[str] = ("op",), keeps_last: bool = False
) -> DataFrame:
    """The last decisive event of each key, with the sequence of later partial updates.

    `events` are bronze rows with kinds of `bronze.DOCUMENT_KINDS`. Result: key, sequence and offset of the decisive
    event (null if the key has none), `after`, `columns` (of the last event if there is no decisive one), and
    `partial_sequence`: the last partial update's sequence if it is later, else null. `keeps_last` adds `last`, the last
    full document with its sequence, which a delete may need. `has_partial=False` promises that there are no partial
    updates, and is faster.
    """
    order = F.struct("sequence", "offset")
    # The offset decides between rows with one sequence: a replayed event, or a chunk that was read again.
    payload = F.struct("sequence", "offset", "after", *columns)
    last_document = [_last_document(order)] if keeps_last else []
    names = ["last"] if keeps_last else []
    if not has_partial:
        reduced = events.groupBy("key").agg(F.max_by(payload, order).alias("event"), *last_document)
        return reduced.select("key", "event.*", F.lit(None).cast("string").alias("partial_sequence"), *names)
    partial = is_partial()
    reduced = events.groupBy("key").agg(
        F.max_by(F.when(~partial, payload), F.when(~partial, order)).alias("event"),
        F.max(F.when(partial, F.col("sequence"))).alias("partial"),
        F.max_by(F.struct(*columns), order).alias("envelope"),
        *last_document,
    )
    is_decided = F.col("event").isNotNull()
    is_later = F.col("partial") > F.coalesce(F.col("event.sequence"), F.lit(""))
    return reduced.select(
        "key",
        "event.sequence",
        "event.offset",
        "event.after",
        *(F.when(is_decided, F.col(f"event.{name}")).otherwise(F.col(f"envelope.{name}")).alias(name) for name in columns),
        F.when(is_later, F.col("partial")).alias("partial_sequence"),
        *names,
    )


def latest_of_many(events: DataFrame, *, columns: Sequence[str] = ("op",), bare: DataFrame | None = None) -> DataFrame:
    """`latest` for many events without partial updates.

    `bare` are the same events without columns that are expensive to compute. The winners are found by key and order
    alone, and only they go on: documents are neither shuffled nor sorted.
    """
    order = F.struct("sequence", "offset")
    narrow = events if bare is None else bare
    winners = narrow.groupBy("key").agg(F.max_by("offset", order).alias("winner")).select("winner")
    # An offset identifies one bronze row, so the join needs neither key nor order.
    rows = events.join(F.broadcast(winners), F.col("offset") == F.col("winner"), "left_semi")
    return rows.select("key", "sequence", "offset", "after", *columns, F.lit(None).cast("string").alias("partial_sequence"))


def histories(events: DataFrame, *, columns: Sequence[str] = ("op",), keeps_last: bool = False) -> DataFrame:
    """The last decisive event of each key as in `latest`, with the partial updates after it, for a fold.

    `updates` ARRAY<STRUCT<sequence, updateDescription>> is unordered; if there are any, `columns` are the last
    update's. `is_delete`: the decisive event is a delete, null if there is none.
    """
    partial = is_partial()
    order = F.struct("sequence", "offset")
    decisive, decisive_order = F.when(~partial, F.struct("sequence", "offset", "after", *columns)), F.when(~partial, order)
    update, update_order = F.when(partial, F.struct("sequence", *columns)), F.when(partial, order)
    by_key = events.groupBy("key").agg(
        F.max_by(decisive, decisive_order).alias("event"),
        F.max_by(update, update_order).alias("update"),
        F.collect_list(F.when(partial, F.struct("sequence", "updateDescription"))).alias("all_updates"),
        *([_last_document(order)] if keeps_last else []),
    )
    decisive_sequence = F.coalesce("event.sequence", F.lit(""))
    with_updates = by_key.withColumn("updates", F.filter("all_updates", lambda each: each["sequence"] > decisive_sequence))
    is_updated = F.size("updates") > 0
    return with_updates.select(
        "key",
        "event.sequence",
        "event.offset",
        "event.after",
        (F.col("event.op") == bronze.Op.DELETE.value).alias("is_delete"),
        F.when(is_updated, F.col("updates")).alias("updates"),
        F.when(is_updated, F.col("update.sequence")).alias("partial_sequence"),
        *(F.when(is_updated, F.col(f"update.{name}")).otherwise(F.col(f"event.{name}")).alias(name) for name in columns),
        *(["last"] if keeps_last else []),
    )


def _last_document(order: Column) -> Column:
    """The last full document with its sequence."""
    is_full = F.col("after").isNotNull()
    return F.max_by(F.when(is_full, F.struct("sequence", "after")), F.when(is_full, order)).alias("last")


FOLDED_DDL = "`document` STRING, `incomplete` BOOLEAN"


def fold_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: replaces `__key, base, updates` with `document, incomplete`, and keeps all other columns.

    Both are null for rows without updates, whose `base` must be null.
    """
    for batch in batches:
        other_columns = [name for name in batch.schema.names if name not in ("base", "updates")]
        start = 0
        for result in fold.fold_batch(batch.select(["__key", "base", "updates"])):
            part = batch.slice(start, result.num_rows)
            start += result.num_rows
            is_incomplete = pc.if_else(part.column("updates").is_valid(), result.column("incomplete"), None)
            yield pa.RecordBatch.from_arrays(
                [*part.select(other_columns).columns, result.column("document"), is_incomplete],
                names=[*other_columns, "document", "incomplete"],
            )


def decided(latest_events: DataFrame, *, mode: unwrap_options.DeleteMode, columns: Sequence[str] = ("op",)) -> DataFrame:
    """The rows of `latest` as reduced rows under a delete mode.

    If the mode keeps rows, `latest` must be without deletes. If it marks them, a delete's row is its pre-image, else
    the last document of the range (`last`, if `latest` kept it), else its key. `columns` are kept.
    """
    is_decisive = F.col("sequence").isNotNull()
    is_delete = is_decisive & (F.col("op") == bronze.Op.DELETE.value)
    guard = F.coalesce("sequence", F.lit(""))
    # An update after a delete belongs to another document of this key, of which nothing is known.
    is_updated = F.col("partial_sequence").isNotNull()
    is_other, is_delete = is_delete & is_updated, is_delete & ~is_updated
    lacks_update = is_incomplete = is_updated
    if mode.marks_deleted:
        action = F.when(is_decisive, Action.DOCUMENT.value).otherwise(Action.MARK.value)
        is_bare = is_delete & F.col("before").isNull()
        lacks_update = lacks_update | is_bare
        no_document = F.lit(None).cast("STRUCT<sequence: STRING, after: STRING>")
        last = F.col("last") if "last" in latest_events.columns else no_document
        document = F.when(is_bare, F.coalesce(last["after"], deleted_document())).when(is_delete, F.col("before"))
        document, guard = (
            document.when(is_other, last["after"]).otherwise(F.col("after")),
            F.when(is_bare, F.coalesce(last["sequence"], F.lit(""))).otherwise(guard),
        )
    else:
        action = F.when(is_delete, Action.REMOVE.value).when(is_decisive, Action.DOCUMENT.value).otherwise(Action.MARK.value)
        document = F.when(~is_delete, F.col("after"))
    return latest_events.select(
        F.col("key").alias("__key"),
        action.alias("__action"),
        F.coalesce("partial_sequence", "sequence").alias("__sequence"),
        guard.alias("__guard"),
        F.when(is_other, "").when(lacks_update, guard).alias("__known"),
        is_incomplete.alias("__incomplete"),
        is_delete.alias("__deleted"),
        document.alias("after"),
        *columns,
    )


def deleted_document() -> Column:
    """What is known of a deleted document: its pre-image, else the fields of its key."""
    return F.coalesce("before", "documentKey", F.concat(F.lit('{"_id":'), F.col("key"), F.lit("}")))


def swept(mark: str, *, keys: DataFrame, columns: Sequence[str] = ("op",)) -> DataFrame:
    """Delete events like rows of `latest`, at sequence `mark`, for the column `__key` of `keys`."""
    values = {"op": F.lit(bronze.Op.DELETE.value), "key": F.col("__key"), "sequence": F.lit(mark)}
    names = ("key", "sequence", "offset", "after", *columns)
    return keys.select(
        *(
            values.get(name, F.lit(None)).cast(arrow.spark_type(bronze.SCHEMA.field(name).type)).alias(name)
            for name in names
        ),
        F.lit(None).cast("string").alias("partial_sequence"),
    )


def needed(options: unwrap_options.UnwrapOptions) -> tuple[str, ...]:
    """The bronze columns that reduced rows need besides key, order and document; no others, because they are shuffled."""
    names = ["op"]
    if options.delete_tombstone_handling_mode.marks_deleted:
        names += DELETED
    for field in (*options.add_fields, *options.add_headers):
        names += [name for name in (field.struct, field.field) if name in _BARE and name != "after"]
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class AddedColumn:
    """A column of `add.fields` or `add.headers`: its name, Spark type and value over bronze columns.

    `path` is where bronze has exactly this value, or the struct of which it is the JSON: a column, or a field of one; empty
    for a column that is always null, None for a computed value.
    """

    name: str
    type: str
    value: Column
    path: tuple[str, ...] | None = None


def added(
    options: unwrap_options.UnwrapOptions, *, documents: Iterable[str] = (), earlier: Iterable[str] = ()
) -> tuple[AddedColumn, ...]:
    """The columns of `add.fields` and then `add.headers`, each name once.

    A field that neither its struct nor the envelope has is a null STRING, as is one of an unknown struct; one that only
    the envelope has is null where the struct is null. A whole struct is its JSON text. A name that
    is used by a document's column (`documents`) or the engine gets `_2`, `_3`, …; a name that differs only in case from
    a column of `earlier` settings is spelled like it.
    """
    by_name: dict[str, AddedColumn] = {}
    for field in (*options.add_fields, *options.add_headers):
        by_name.setdefault(column_names.without_case(field.name), _added(field))
    if not by_name:
        return ()
    used_names = column_names.UsedNames((*column_names.ENGINE, *column_names.RESERVED, *documents))
    names = (used_names.unique(column_names.fit(column.name)) for column in by_name.values())
    earlier_spellings = {column_names.without_case(name): name for name in earlier}
    final_names = (earlier_spellings.get(column_names.without_case(name), name) for name in names)
    return tuple(replace(column, name=name) for column, name in zip(by_name.values(), final_names))


_STRUCTS = {name: bronze.SCHEMA.field(name).type for name in ("source", "transaction", "updateDescription")}
_NULLABLE = ("transaction", "updateDescription")
"""The structs that an event may lack."""

_BARE = ("op", "ts_ms", "before", "after", "source", "transaction", "updateDescription")


def _added(field: unwrap_options.AddedField) -> AddedColumn:
    struct = _STRUCTS.get(field.struct)
    if struct is not None and struct.get_field_index(field.field) >= 0:
        type_ = arrow.spark_type(struct.field(field.field).type)
        return _rendered(field.name, type_, (field.struct, field.field))
    if field.field in _BARE and (struct is not None or not field.struct):
        column = _rendered(field.name, arrow.spark_type(bronze.SCHEMA.field(field.field).type), (field.field,))
        if field.struct in _NULLABLE and field.struct != field.field:
            value = F.when(F.col(field.struct).isNotNull(), column.value)
            return replace(column, value=value, path=None)
        return column
    return AddedColumn(field.name, "STRING", F.lit(None).cast("string"), ())


def _rendered(name: str, type_: str, path: tuple[str, ...]) -> AddedColumn:
    value = F.col(".".join(path))
    is_struct = type_.startswith(("STRUCT", "ARRAY<STRUCT"))
    return AddedColumn(name, "STRING", F.to_json(value), path) if is_struct else AddedColumn(name, type_, value, path)
