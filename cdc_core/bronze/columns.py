"""The bronze table's columns: one row per event, in stream order by `offset`, in Debezium's envelope.

resume_token STRING   the change stream's `_id._data`; `snapshot:<id>:<chunk>` for snapshot rows
offset BIGINT         unique and increasing in commit order
batch BIGINT          the number of the commit, dense and increasing; the table is clustered by it
kind STRING           one of `RowKind`
op STRING             one of `Op`; null for kinds without an operation
db, collection STRING the namespace
key STRING            canonical JSON of `_id` (`cdc_core.extended_json.keys`)
documentKey STRING    `_id` with the shard key's fields, if there are any
sequence STRING       24 hex digits that sort in the order in which events apply (`cdc_core.stream.resume_token`)
before, after STRING  the document as type-exact Extended JSON v2 (`cdc_core.extended_json.bson_to_json`)
updateDescription     updatedFields STRING, removedFields, truncatedArrays, disambiguatedPaths STRING
source                Debezium's source block
transaction           id STRING, total_order BIGINT, data_collection_order BIGINT
payload STRING        JSON of kinds that are not about a document; the BSON of a document with invalid UTF-8
ts_ms BIGINT          the capture service's clock, milliseconds since 1970
"""

from __future__ import annotations

from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.sql import arrow


class RowKind(StrEnum):
    """What a row is about."""

    CHANGE = "change"
    SNAPSHOT = "snapshot"
    HEARTBEAT = "heartbeat"
    TRANSACTION = "transaction"
    SCHEMA_CHANGE = "schema_change"
    SIGNAL = "signal"
    NOTIFICATION = "notification"


DOCUMENT_KINDS = (RowKind.CHANGE.value, RowKind.SNAPSHOT.value)
"""The kinds of rows that are about one document."""


SEQUENCE = "^[0-9a-f]{24}$"
"""A regular expression for `sequence`."""


class Op(StrEnum):
    """Debezium's `op`."""

    CREATE = "c"
    UPDATE = "u"
    DELETE = "d"
    READ = "r"


UPDATE_DESCRIPTION = pa.struct(
    [
        ("updatedFields", pa.string()),
        ("removedFields", pa.list_(pa.string())),
        ("truncatedArrays", pa.list_(pa.struct([("field", pa.string()), ("size", pa.int32())]))),
        ("disambiguatedPaths", pa.string()),
    ]
)

SOURCE = pa.struct(
    [
        ("version", pa.string()),
        ("connector", pa.string()),
        ("name", pa.string()),
        ("ts_ms", pa.int64()),
        ("ts_us", pa.int64()),
        ("ts_ns", pa.int64()),
        ("snapshot", pa.string()),
        ("db", pa.string()),
        ("collection", pa.string()),
        ("ord", pa.int32()),
        ("lsid", pa.string()),
        ("txnNumber", pa.int64()),
        ("wallTime", pa.int64()),
    ]
)

TRANSACTION = pa.struct([("id", pa.string()), ("total_order", pa.int64()), ("data_collection_order", pa.int64())])

SCHEMA = pa.schema(
    [
        ("resume_token", pa.string()),
        ("offset", pa.int64()),
        ("batch", pa.int64()),
        ("kind", pa.string()),
        ("op", pa.string()),
        ("db", pa.string()),
        ("collection", pa.string()),
        ("key", pa.string()),
        ("documentKey", pa.string()),
        ("sequence", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("updateDescription", UPDATE_DESCRIPTION),
        ("source", SOURCE),
        ("transaction", TRANSACTION),
        ("payload", pa.string()),
        ("ts_ms", pa.int64()),
    ]
)

STATISTICS = ("offset", "batch", "kind", "db", "collection", "sequence")
"""The columns with minimum and maximum in Delta's statistics; documents are too large for them."""

GROUP_ROWS = 4096
"""The rows of a row group in a large commit of several collections."""

COLUMNS_DDL = arrow.columns_ddl(SCHEMA)
"""The columns in the syntax of Spark SQL's CREATE TABLE."""


def table(rows: int, **columns: object) -> pa.Table:
    """A table of `SCHEMA`: arrays are used as they are, any other value is repeated in every row, missing columns are null."""
    unknown = columns.keys() - set(SCHEMA.names)
    if unknown:
        raise ValueError(f"bronze has no columns {', '.join(sorted(unknown))}")
    return pa.table({field.name: _column(columns.get(field.name), field.type, rows) for field in SCHEMA}, schema=SCHEMA)


def row_groups(rows: pa.Table) -> list[pa.Table]:
    """A commit's rows as row groups of its file.

    In a large commit the rows of each collection are adjacent, in their order: silver and histories read one collection
    at a time, and would otherwise read the documents of all others too.
    """
    if rows.num_rows <= GROUP_ROWS or pc.count_distinct(rows["collection"]).as_py() < 2:
        return [rows]
    names = pc.binary_join_element_wise(rows["db"], rows["collection"], "\0").combine_chunks().dictionary_encode()
    ranks = pc.sort_indices(pc.sort_indices(names.dictionary))
    sorted_rows = rows.take(pc.sort_indices(ranks.take(names.indices)))
    return [sorted_rows.slice(at, GROUP_ROWS) for at in range(0, rows.num_rows, GROUP_ROWS)]


def _column(value: object, type_: pa.DataType, rows: int) -> pa.Array | pa.ChunkedArray:
    if value is None:
        return pa.nulls(rows, type_)
    return value if isinstance(value, pa.Array | pa.ChunkedArray) else pa.repeat(pa.scalar(value, type_), rows)
