"""How an executor encodes a chunk's documents, with a faked source."""

from __future__ import annotations

from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.datetime_ms import DatetimeMS
from bson.timestamp import Timestamp

from cdc_core.extended_json import batch_encoder
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import connection as connections
from pipelines.snapshot import chunks


def test_a_chunk_is_no_larger_than_the_memory_that_is_there_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON of dates is four times as large as their BSON.

    A chunk is limited by its texts, and packed they are smaller than the BSON.
    """
    replies = [
        snapshot_read.Chunk(
            [
                bson.encode({"_id": reply, **{f"d{each}": DatetimeMS(reply * each) for each in range(100)}})
                for _ in range(10)
            ],
            Timestamp(1, 1),
        )
        for reply in range(100)
    ]
    monkeypatch.setattr(batch_encoder, "GROUP_BYTES", 1000)
    monkeypatch.setattr(connections, "worker_client", lambda _: None)
    monkeypatch.setattr(snapshot_read, "read_chunk", lambda *_, **__: iter(replies))
    given: Any = None, catalog.SourceCollection("db", "a", None), snapshot_read.IdRange(), (1, 1), 0
    pieces = [*chunks.encoded_chunk(chunks.ChunkSpec(*given, max_bytes=500_000))]
    meta, packed = pieces[-1][0], [each for _, rows in pieces if rows is not None for each in chunks._packed(rows)]
    chunk = chunks.chunk_rows(meta or {}, chunks.unpacked(pa.chunked_array([packed], pa.binary())))
    assert 400_000 < chunk.rows["after"].nbytes < 600_000
    assert chunk.cut is not None
    assert sum(map(len, packed)) < sum(map(len, replies[0].documents)) * chunk.rows.num_rows / 10
