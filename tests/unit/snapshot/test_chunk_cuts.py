"""Where a chunk that is too large is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import connection as connections
from pipelines.snapshot import chunks


def test_documents_of_one_id_are_in_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards may each have a document of an `_id`. A cut between the two would make the next chunk begin with the first one again, and
    the snapshot would read it for ever."""
    batches = [[{"_id": 5, "shard": "a"}], [{"_id": 5.0, "shard": "b"}], [{"_id": 6}]]

    def read_chunk(*_: Any, **__: Any) -> Iterator[snapshot_read.Chunk]:
        for batch in batches:
            yield snapshot_read.Chunk([bson.encode(document) for document in batch], Timestamp(9, 1))

    monkeypatch.setattr(connections, "worker_client", lambda _: None)
    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    nothing: Any = None
    collection = catalog.SourceCollection("shop", "orders", None)
    bounds = snapshot_read.IdRange(lo=bson.encode({"lo": 5}))
    *_, (meta, rows) = chunks.encoded_chunk(chunks.ChunkSpec(nothing, collection, bounds, (9, 1), 0, max_bytes=1))
    assert meta is not None and rows is not None
    assert (rows["key"].to_pylist(), meta["cut"]) == (["5", "5"], bson.encode({"hi": 6}).hex())


def test_a_range_ends_behind_the_documents_of_its_first_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk size that is smaller than their number, each range would be empty and begin at the same `_id`."""
    ids = [4, 5, 5.0, 5, 6, 7]

    def first(_: Any, __: Any, options: dict[str, Any]) -> bytes | None:
        place = 1 + options["skip"]
        return bson.encode({"_id": ids[place]}) if place < len(ids) else None

    monkeypatch.setattr(snapshot_read, "_first", first)
    nothing: Any = None
    collection = catalog.SourceCollection("shop", "orders", None)
    found = snapshot_read.boundary(nothing, collection, lo=bson.encode({"lo": 5}), documents=1)
    assert found == bson.encode({"hi": 7})
