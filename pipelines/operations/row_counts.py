"""Counts a table's rows: in this process from its log and three narrow columns if it can, else by a query."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from cdc_core.tables import layout as tables
from pipelines.delta import file_statistics, live_files, local_log, table_schema
from pipelines.operations import backlog

_COUNTED = {"deleted": "__deleted", "incomplete": "__incomplete", "rescued": "__rescued"}
NOTHING = dict.fromkeys(("rows", *_COUNTED), 0)
"""The counts of a table that does not exist."""


def of(spark: SparkSession, table: tables.TableRef) -> dict[str, int]:
    """The number of rows, and how many of them are deleted, incomplete or have rescued values."""
    counts = _counts_here(table)
    if counts is not None:
        return counts
    # Gold has some of these columns only if the settings ask for them.
    columns = spark.table(str(table)).columns
    expressions = ["count(*) AS rows"]
    for name, column in _COUNTED.items():
        is_one = f"size(`{column}`) > 0" if name == "rescued" else f"coalesce(`{column}`, false)"
        expressions.append(f"{f'count_if({is_one})' if column in columns else '0'} AS {name}")
    return spark.sql(f"SELECT {', '.join(expressions)} FROM {table}").collect()[0].asDict()


def _counts_here(table: tables.TableRef) -> dict[str, int] | None:
    """A table's number of rows, and how many of them have each of `_COUNTED`, without a query.

    None if the files are in a store, from which they would be copied whole, if only Spark can read them, or if Spark is faster.
    """
    folder = local_log.folder(table)
    live = None if folder is None else live_files.LiveFiles(folder)
    try:
        if live is None or not live.move_to_newest() or live.row_count() > backlog.MANY_ROWS:
            return None
        columns = {name: column for name, column in _COUNTED.items() if column in live.schema.names}
        rows = live.rows(live.files(), list(columns.values()))
        deleted_count = sum(map(file_statistics.deleted_count, live.files()))
        counts = {name: _true_or_filled(rows[column]) for name, column in columns.items()}
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return None
    return {"rows": live.row_count() - deleted_count, **dict.fromkeys(_COUNTED, 0), **counts}


def _true_or_filled(column: pa.ChunkedArray) -> int:
    """The number of values that are true, or maps that are not empty."""
    values = column.combine_chunks()
    if pa.types.is_map(column.type):
        values = pc.greater(pc.pairwise_diff(values.offsets), 0) if len(values) else values.is_valid()
    return int(pc.sum(values).as_py() or 0)
