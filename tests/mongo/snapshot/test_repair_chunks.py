"""A repair reads the requested documents in as many chunks as their size requires, and reports no existing document as deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from bson.raw_bson import RawBSONDocument

from cdc_core.extended_json import json_to_bson
from cdc_core.extended_json import keys as canonical_keys
from cdc_core.snapshot import key_filter
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import connection as connections
from pipelines.mongodb import server as mongodb_server
from pipelines.snapshot import chunks
from tests.harness import captured

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def workers(mongodb_uri: str) -> Iterator[None]:
    """Chunks are read in this process, with the client that an executor's process would use."""
    yield
    captured.close_worker_clients(connections.Connection(mongodb_uri))


def read(
    uri: str, mongo: Any, collection: catalog.SourceCollection, wanted: list[str], *, max_bytes: int
) -> dict[str, list[bool]]:
    """Whether each row of a key has a document, by key."""
    at = mongodb_server.operation_time(mongo)
    found: dict[str, list[bool]] = {}
    lo: bytes | None = None
    while True:
        bounds = snapshot_read.IdRange(lo, None)
        spec = chunks.ChunkSpec(
            connections.Connection(uri), collection, bounds, (at.time, at.inc), 1, max_bytes, key_filter.filter_of(wanted)
        )
        *pieces, last = chunks.encoded_chunk(spec)
        meta = last[0]
        assert meta is not None
        tables = [piece for _, piece in (*pieces, last) if piece is not None]
        rows = chunks.chunk_rows(meta, chunks.pa.concat_tables(tables))
        for key, text in zip(rows.rows["key"].to_pylist(), rows.rows["after"].to_pylist()):
            found.setdefault(key, []).append(text is not None)
        if rows.cut is None:
            return found
        lo = snapshot_read.hi_as_lo(rows.cut)


@pytest.mark.parametrize("max_bytes", [100, 2_000, 10**9])
def test_large_documents_are_read_in_several_chunks(mongodb_uri: str, mongo: Any, database: Any, max_bytes: int) -> None:
    database.a.insert_many([{"_id": number, "text": "x" * 500} for number in range(0, 20, 2)])
    (collection,) = catalog.collections(mongo, [database.name])
    found = read(mongodb_uri, mongo, collection, [str(number) for number in range(20)], max_bytes=max_bytes)
    assert found == {str(number): [number % 2 == 0] for number in range(20)}


def test_documents_whose_id_python_does_not_know_are_found(mongodb_uri: str, mongo: Any, database: Any) -> None:
    ids = [
        '{"a":1,"a":2}',
        '{"$minKey":1}',
        '{"b":{"$undefined":true}}',
        '{"$date":{"$numberLong":"99999999999999"}}',
        "5",
        "null",
    ]
    documents = [RawBSONDocument(json_to_bson.loads(f'{{"_id":{each}}}')) for each in ids]
    database.a.insert_many(documents)
    (collection,) = catalog.collections(mongo, [database.name])
    wanted = [*(canonical_keys.canonical_raw(each.raw) for each in documents), '{"$undefined":true}', "6"]
    found = read(mongodb_uri, mongo, collection, wanted, max_bytes=10**9)
    assert found == {**{key: [True] for key in wanted[:-2]}, "6": [False]}
