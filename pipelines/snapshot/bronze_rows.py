"""The bronze rows of a chunk."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import source_block
from cdc_core.stream import resume_token
from pipelines.mongodb import catalog


def snapshot_rows(
    chunk: pa.Table,
    *,
    name: str,
    collection: catalog.SourceCollection,
    at: tuple[int, int],
    label: str,
    batch: int,
    first_offset: int,
    ts_ms: int,
    is_last: bool = False,
    snapshot: str = "true",
) -> pa.Table:
    """A chunk's keys and documents as rows of `bronze.SCHEMA`; `at` is the cluster time of its read (seconds, increment).

    A key without a document, which only a repair has, is a delete at that time.
    """
    rows = chunk.num_rows

    def constant(value: object, type_: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, type_), rows)

    dbs, names = constant(collection.db, pa.string()), constant(collection.name, pa.string())
    marks = source_block.source_column(
        name=name,
        dbs=dbs,
        collections=names,
        seconds=constant(at[0], pa.int64()),
        ords=constant(_signed32(at[1]), pa.int32()),
        snapshot=snapshot,
        last_snapshot="last" if is_last and snapshot == "true" else None,
    )
    # Only in a repair, which asks for keys; a range holds existing documents.
    is_gone = chunk.column("after").is_null()
    ops = pc.if_else(is_gone, bronze.Op.DELETE.value, bronze.Op.READ.value)
    return bronze.table(
        rows,
        resume_token=label,
        offset=pa.array(range(first_offset, first_offset + rows), pa.int64()),
        batch=batch,
        kind=bronze.RowKind.SNAPSHOT.value,
        op=ops,
        db=dbs,
        collection=names,
        key=chunk.column("key"),
        sequence=resume_token.snapshot_sequence(*at),
        after=chunk.column("after"),
        source=marks,
        payload=chunk.column("payload"),
        ts_ms=ts_ms,
    )


def _signed32(value: int) -> int:
    return value if value < 2**31 else value - 2**32
