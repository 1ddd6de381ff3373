"""Debezium's `source` block as a column of bronze.

Source: Debezium "MongoDB connector", section "Change events" (source).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze

VERSION = "0.1.0"
"""`source.version`: this project's version, where Debezium writes its own."""


CONNECTOR = "mongodb"


def source_column(
    *,
    name: str,
    dbs: pa.Array,
    collections: pa.Array,
    seconds: pa.Array,
    ords: pa.Array,
    lsids: pa.Array | None = None,
    txn_numbers: pa.Array | None = None,
    wall_times: pa.Array | None = None,
    snapshot: str | None = None,
    last_snapshot: str | None = None,
) -> pa.Array:
    """The `source` block as a struct column; null for rows without a cluster time.

    `ts_ms`, `ts_us` and `ts_ns` are the cluster time in whole seconds, as in the connector; `wallTime` has
    milliseconds. `snapshot` is the same in all rows, except for `last_snapshot` in the last one.
    """
    rows = len(dbs)

    def constant(value: str | None) -> pa.Array:
        return pa.repeat(pa.scalar(value, pa.string()), rows)

    columns = [
        constant(VERSION),
        constant(CONNECTOR),
        constant(name),
        pc.multiply(seconds, 1_000),
        pc.multiply(seconds, 1_000_000),
        pc.multiply(seconds, 1_000_000_000),
        snapshot_marks(snapshot, last_snapshot, rows),
        dbs,
        collections,
        ords,
        lsids if lsids is not None else pa.nulls(rows, pa.string()),
        txn_numbers if txn_numbers is not None else pa.nulls(rows, pa.int64()),
        wall_times if wall_times is not None else pa.nulls(rows, pa.int64()),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(bronze.SOURCE), mask=pc.is_null(seconds))


def snapshot_marks(snapshot: str | None, last: str | None, rows: int) -> pa.Array:
    marks = pa.repeat(pa.scalar(snapshot, pa.string()), rows)
    if last is None or rows == 0:
        return marks
    return pa.concat_arrays([marks.slice(0, rows - 1), pa.array([last], pa.string())])
