"""The rows of a commit: skipped events, sizes, and filters."""

from __future__ import annotations

import json
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from cdc_core.bronze import event_rows as events
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import filters, transactions
from pipelines.capture.encoder import Encoder
from pipelines.capture.selection import Selection
from tests.harness.sources import source


def event(second: int, *, operation: str = "update", collection: str = "a", is_large: bool = True) -> bytes:
    fields = {
        "_id": {"_data": f"82{second:08X}000000012B022C0100296E04"},
        "operationType": operation,
        "clusterTime": Timestamp(second, 1),
        "ns": {"db": "shop", "coll": collection},
        "documentKey": {"_id": second},
    }
    return bson.encode({**fields, **({events.SKIPPED: 17_000_000} if is_large else {"fullDocument": {"_id": second}})})


@pytest.fixture
def encoder() -> Encoder:
    return Encoder("shop", Selection(None, None, None), max_rows=10, max_bytes=10_000)


def gaps(rows: events.EventRows) -> list[tuple[str, str]]:
    """Each gap in a commit: the collection, and its start."""
    payloads = [json.loads(each.as_py() or "{}") for each in rows.table(batch=1, first_offset=0, ts_ms=0)["payload"]]
    found = [each["gap"] for each in payloads if "gap" in each]
    return [(name, each["since"]) for each in found for name in each["collections"]]


def test_a_skipped_event_leaves_its_collection_incomplete(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    """Recorded once, and again after an action that may have planned a snapshot, which ends earlier gaps."""
    since = "1970-01-01 00:0{}:00 UTC"
    for each in (event(60), event(61), event(120, collection="b"), event(121, collection="c", is_large=False)):
        encoder.add(each)
    first = encoder.take()
    assert gaps(first) == [("shop.a", since.format(1)), ("shop.b", since.format(2))]
    assert (first.skipped, first.changes, first.token) == (3, 1, f"82{121:08X}000000012B022C0100296E04")
    encoder.add(event(180))
    assert not gaps(encoder.take())
    encoder.rows.then.append(lambda: None)
    encoder.add(event(240))
    assert gaps(encoder.take()) == [("shop.a", since.format(4))]
    encoder.add(event(300))
    assert gaps(encoder.take()) == [("shop.a", since.format(5))]
    assert [each.getMessage().split(":")[0] for each in caplog.records] == ["shop.a", "shop.b", "shop.a", "shop.a"]


def test_a_collection_that_was_dropped_and_lacks_an_event_again_is_incomplete(encoder: Encoder) -> None:
    """The drop ends the first gap, because nothing is left that could lack anything."""
    encoder.add(event(60))
    drop = {**bson.decode(event(61, operation="drop", is_large=False)), "documentKey": None}
    encoder.add(bson.encode(drop))
    encoder.add(event(120))
    assert gaps(encoder.take()) == [("shop.a", "1970-01-01 00:01:00 UTC"), ("shop.a", "1970-01-01 00:02:00 UTC")]


def test_a_snapshot_ends_the_gap_of_a_skipped_event(encoder: Encoder) -> None:
    """Like the gap of lost changes, which `medallion status` reports until then."""
    encoder.add(event(60))
    payloads = [json.loads(each.as_py()) for each in encoder.take().table(batch=1, first_offset=0, ts_ms=0)["payload"]]
    assert "too large" in snapshot_state.unrepaired(payloads)["shop.a"].why
    state = snapshot_state.SnapshotState("s1", ("shop.a",), kind=snapshot_state.SnapshotKind.INCREMENTAL)
    whole = state.advanced("shop.a", snapshot_state.CollectionState(completed=True))
    assert not snapshot_state.unrepaired([*payloads, state.begun(), whole.progress("shop.a")])


def test_a_delete_needs_no_document(encoder: Encoder) -> None:
    """Only its pre-image can be too large: the document is deleted without it."""
    encoder.add(event(60, operation="delete"))
    rows = encoder.take()
    assert (rows.skipped, rows.changes) == (0, 1) and not gaps(rows)
    (row,) = rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    assert (row["kind"], row["op"], row["key"], row["before"]) == ("change", "d", "60", None)


@pytest.mark.parametrize(
    "description",
    [
        {"updatedFields": {"a": "x" * 10_000}},
        {"removedFields": ["x" * 10_000]},
        {"removedFields": ["a"] * 100},
        {"disambiguatedPaths": {"a.0": ["x" * 10_000, 0]}},
        {"truncatedArrays": [{"field": "x" * 10_000, "newSize": 1}]},
        {"truncatedArrays": [{"field": "a", "newSize": 1}] * 100},
    ],
)
def test_all_of_an_update_counts_for_the_size_of_its_commit(encoder: Encoder, description: dict[str, Any]) -> None:
    """Names are data, too: an update that removes 300 fields with names of 50,000 characters has 15 MB, and 100,000 such events must not be
    one commit."""
    bare = {**bson.decode(event(60, is_large=False)), "updateDescription": {"updatedFields": {}}}
    encoder.add(bson.encode(bare))
    assert not encoder.is_full
    encoder.add(bson.encode(bare | {"updateDescription": {"updatedFields": {}, **description}}))
    assert encoder.is_full


@pytest.mark.parametrize(("order", "changes"), [("user_only", 1), ("user_first", 0)])
def test_stages_instead_of_the_filters_skip_no_operation(order: str, changes: int) -> None:
    """As in Debezium, also with a signal collection. Operations skipped only here would later be missing silently."""
    given = {"skipped.operations": "u", "signal.data.collection": "shop.signals", "cursor.pipeline.order": order}
    settings = source({**given, "cursor.pipeline": '[{"$match": {"fullDocument.x": 1}}]'})
    encoder = Encoder("shop", Selection.of(settings, filters.of(settings)), max_rows=10, max_bytes=10_000)
    encoder.add(event(60, is_large=False))
    assert encoder.take().changes == changes
    assert ("update" in filters.left_out(filters.fingerprint(settings))) is not bool(changes)


@pytest.mark.parametrize("collections", [1, 6_000])
def test_lists_are_asked_once_a_collection(collections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a capture with a signal collection must not search the whole list each time, however many collections there are."""
    settings = source({"signal.data.collection": "shop.signals", "collection.include.list": "shop.a.*"})
    includes = Selection.of(settings, filters.of(settings)).includes
    assert includes is not None
    for number in range(collections):
        assert includes("shop", f"a{number}") and not includes("shop", f"b{number}")
    monkeypatch.setattr(filters.NameFilter, "includes", None)
    for number in range(collections):
        assert includes("shop", f"a{number}") and not includes("shop", f"b{number}")


@pytest.mark.parametrize(
    ("moves", "expected"),
    [(None, ["BEGIN", "END", "BEGIN", "END"]), (transactions.ShardMoves(), ["BEGIN", "END"])],
    ids=["a replica set", "shards"],
)
def test_the_parts_of_a_transaction_on_two_shards_are_one(
    moves: transactions.ShardMoves | None, expected: list[str]
) -> None:
    """Each shard commits its part at a time of its own: the stream may stand between the two. On a replica set all is of one time."""
    fields = {
        "operationType": "insert",
        "ns": {"db": "shop", "coll": "a"},
        "lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)},
        "txnNumber": Int64(1),
    }
    encoder = Encoder("shop", Selection(None, None, None), 10, 10_000, transactions.TransactionTracker(), moves)
    for second in (60, 62):
        token = f"82{second:08X}000000012B022C0100296E04"
        documents = {"documentKey": {"_id": second}, "fullDocument": {"_id": second}}
        encoder.add(bson.encode({"_id": {"_data": token}, "clusterTime": Timestamp(second, 1), **fields, **documents}))
        encoder.end_transaction(f"82{second:08X}000000092B0429296E1404")
    encoder.end_transaction(f"82{200:08X}000000012B0429296E1404")
    rows = encoder.take().table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    payloads = [json.loads(each["payload"]) for each in rows if each["kind"] == "transaction"]
    assert [each["status"] for each in payloads] == expected
    assert payloads[-1]["event_count"] == 4 // len(expected)
