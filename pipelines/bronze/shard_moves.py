"""The state of `ShardMoves` from bronze's last rows: of a document that moves to another shard, one event may be in bronze and the
other still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.stream import transactions
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows
from pipelines.bronze import log as bronze_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 128
"""The number of last batches that are read: two minutes of a stream that is committed each second. A snapshot's chunks are batches, too."""

ROWS = 200_000
"""The rows above which Spark reads them."""

_COLUMNS = ("offset", "op", "db", "collection", "key", "documentKey", "sequence", "source")


def remembered(
    spark: SparkSession, table: tables.TableRef, position: bronze_log.BronzePosition | None
) -> transactions.ShardMoves:
    """The moves known at this position, as a capture that runs without interruption would know them."""
    moves = transactions.ShardMoves()
    if position is None:
        return moves
    span = BatchRange(max(0, position.batch - BATCHES), position.batch)
    rows = batch_rows.few_rows(spark, table, span, _COLUMNS, limit=ROWS)
    if rows is None:
        events = batch_rows.rows(spark, table, span).where("kind = 'change' AND source.lsid IS NOT NULL")
        rows = events.select(*_COLUMNS).orderBy("offset", ascending=False).limit(ROWS).toArrow()
    rows = rows.filter(pc.is_valid(pc.struct_field(rows["source"], "lsid"))).sort_by("offset")
    for row in rows.to_pylist():
        transaction = transactions.identifier(row["source"]["lsid"], row["source"]["txnNumber"])
        if transaction is not None:
            document = transactions.document({"db": row["db"], "coll": row["collection"]}, row["key"])
            key = row["documentKey"].encode()
            moves.remember(transactions.ShardWrite(transaction, document, key, row["op"], row["sequence"]))
    return moves
