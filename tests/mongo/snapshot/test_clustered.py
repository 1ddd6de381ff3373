"""Collections that are clustered by `_id`: each chunk reads its own documents, for any type of `_id`."""

from __future__ import annotations

import datetime
from typing import Any

import bson
import pytest
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS

from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import server as mongodb_server

MIXED = [
    bson.MinKey(), bson.MaxKey(), float("nan"), float("-inf"), float("inf"), None, "", "a", "B", "é", {}, {"a": 1}, b"x",
    bson.Binary(b"y", 4), bson.ObjectId(), True, False, datetime.datetime(2020, 1, 1), bson.Timestamp(1, 2), 5,
    bson.Int64(2**60), bson.Decimal128("1.5"), bson.Code("x"),
]  # fmt: skip


def test_the_ends_of_ranges_are_found_in_the_index_alone(mongo: Any, database: Any) -> None:
    """This holds for collections that are not clustered: snapshots and verifications read each document once. `_id` may have any type."""

    database.plain.insert_many([{"_id": each} for each in (*range(200), *MIXED[:19], *MIXED[20:])])
    (collection,) = catalog.collections(mongo, [database.name])
    assert not collection.is_clustered
    found, lo = [], None
    database.command("profile", 2)
    while (hi := snapshot_read.boundary(mongo, collection, lo=lo, documents=20)) is not None:
        lo = snapshot_read.hi_as_lo(hi)
        found.append(bson.decode(hi)["hi"])
    database.command("profile", 0)
    asked = [*database.system.profile.find({"op": "query", "ns": collection.namespace})]
    # With `$expr` every document after the first range would be examined.
    assert len(asked) == len(found) + 1 and {each["docsExamined"] for each in asked} == {0}
    ordered = [each["_id"] for each in database.plain.find(sort=[("_id", 1)])]
    assert [repr(each) for each in found] == [repr(each) for each in ordered[20::20]]
    assert [raw for chunk in chunks(mongo, collection, 20) for raw in chunk] == [
        each.raw for each in database.get_collection("plain", codec_options=DEFAULT_RAW_BSON_OPTIONS).find(sort=[("_id", 1)])
    ]


def test_nothing_is_looked_for_behind_the_greatest_id(mongo: Any, database: Any) -> None:
    """The first range ends at a document with the `_id` MaxKey: the server refuses a query for greater ones."""
    database.plain.insert_many([{"_id": each} for each in (1, "a", bson.MaxKey())])
    (collection,) = catalog.collections(mongo, [database.name])
    assert [len(chunk) for chunk in chunks(mongo, collection, 2)] == [2, 1]


def made(database: Any, ids: list[Any], **options: Any) -> catalog.SourceCollection:
    clustered = {"key": {"_id": 1}, "unique": True}
    database.command({"create": "a", "clusteredIndex": clustered, **options})
    database.a.insert_many([{"_id": each, "odd": bool(number % 2)} for number, each in enumerate(ids)])
    (found,) = catalog.collections(database.client, [database.name])
    assert found.is_clustered
    return found


def chunks(mongo: Any, collection: catalog.SourceCollection, step: int, condition: Any = None) -> list[list[bytes]]:
    """The whole collection in chunks of `step` documents."""
    after, found = mongodb_server.operation_time(mongo), []
    lo: bytes | None = None
    while True:
        hi = snapshot_read.boundary(mongo, collection, lo=lo, documents=step)
        read = snapshot_read.read_chunk(mongo, collection, snapshot_read.IdRange(lo, hi), after=after, condition=condition)
        found.append([raw for chunk in read for raw in chunk.documents])
        if hi is None:
            return found
        lo = snapshot_read.hi_as_lo(hi)


@pytest.mark.parametrize("options", [{}, {"collation": {"locale": "en", "strength": 2}}], ids=["plain", "collation"])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_every_document_is_in_one_chunk(mongo: Any, database: Any, options: dict[str, Any], step: int) -> None:
    """This holds for every type, including MinKey and MaxKey; with a condition, for the documents that match it."""
    collection = made(database, MIXED, **options)
    for condition, count in ((None, len(MIXED)), ({"odd": True}, len(MIXED) // 2)):
        found = [raw for chunk in chunks(mongo, collection, step, condition) for raw in chunk]
        assert len(found) == len(set(found)) == count


def test_a_chunk_reads_no_more_than_its_documents(mongo: Any, database: Any) -> None:
    """If a chunk scanned the whole collection, it would exceed the server's snapshot window for a large one."""
    collection = made(database, [*range(2000), *(f"s{number}" for number in range(2000))])
    lo = snapshot_read.hi_as_lo(bson.encode({"hi": 1000}))
    bounds = snapshot_read.IdRange(lo, snapshot_read.boundary(mongo, collection, lo=lo, documents=20))
    find = snapshot_read._find(
        collection, bounds, after=mongodb_server.operation_time(mongo), fetch_size=0, condition={"odd": True}
    )
    for name in ("readConcern", "noCursorTimeout"):
        del find[name]
    stats = database.command({"explain": find, "verbosity": "executionStats"})["executionStats"]
    assert stats["nReturned"] == 10 and stats["totalDocsExamined"] <= 22
    assert "SORT" not in str(stats["executionStages"])
