"""Transaction metadata and fragments, over events as the server sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import event_rows as events
from cdc_core.stream import split_events, transactions
from pipelines.capture.intake import Intake
from pipelines.mongodb.change_stream import EventBatch

TOKEN = "82{:08X}{:08X}2B022C0100296E5A1004421E9C2BE69342E885031C52C7B7562746645F696400646B0136FAF9C3DA20B05111340004"

TOKENS = json.loads((Path(__file__).parents[2] / "cases" / "resume_token" / "tokens.json").read_text())


def event(number: int, *, collection: str = "a", txn: int | None = None, **more: Any) -> bytes:
    """One insert, inside transaction number `txn` where there is one."""
    inside = {} if txn is None else {"lsid": {"id": Binary(b"s" * 16, 4)}, "txnNumber": Int64(txn)}
    fields = {
        "_id": {"_data": TOKEN.format(1_700_000_000, number)},
        "operationType": "insert",
        "clusterTime": Timestamp(1_700_000_000, number),
        "fullDocument": {"_id": number},
        "ns": {"db": "db", "coll": collection},
        "documentKey": {"_id": number},
    }
    return bson.encode({**inside, **fields, **more})


def landed(
    *raw: bytes,
    tracker: transactions.TransactionTracker | None = None,
    moves: transactions.ShardMoves | None = None,
) -> list[dict[str, Any]]:
    rows = events.EventRows("test")
    for each in raw:
        rows.add(each, tracker=tracker, moves=moves, ts_ms=7)
    return rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()


def test_a_transaction_begins_counts_and_ends_once() -> None:
    """BEGIN comes before the first event, END with the counts before the first event that is not the transaction's."""
    found = landed(
        event(1, txn=5),
        event(1, txn=5, collection="b"),
        event(1, txn=5),
        event(2),
        event(3),
        tracker=transactions.TransactionTracker(),
    )
    assert [row["kind"] for row in found] == ["transaction", "change", "change", "change", "transaction", "change", "change"]
    places = [row["transaction"] for row in found if row["kind"] == "change"]
    assert [place and (place["total_order"], place["data_collection_order"]) for place in places] == [
        (1, 1), (2, 1), (3, 2), None, None,
    ]  # fmt: skip
    end = json.loads(found[4]["payload"])
    assert end["status"] == "END" and end["event_count"] == 3 and end["ts_ms"] == 7
    assert {each["data_collection"]: each["event_count"] for each in end["data_collections"]} == {"db.a": 2, "db.b": 1}
    assert end["id"].endswith(":5") and '"$type": "04"' in end["id"]


def test_one_transaction_follows_another() -> None:
    """The END of one stands before the BEGIN of the next."""
    found = landed(event(1, txn=1), event(2, txn=2), tracker=transactions.TransactionTracker())
    assert [json.loads(row["payload"])["status"] for row in found if row["kind"] == "transaction"] == [
        "BEGIN", "END", "BEGIN",
    ]  # fmt: skip


def test_counting_goes_on_after_a_restart() -> None:
    """A tracker that is given what bronze holds goes on counting, and begins nothing again."""
    tracker = transactions.TransactionTracker()
    landed(event(1, txn=1), tracker=tracker)
    found = landed(event(1, txn=1), tracker=transactions.TransactionTracker(tracker.current, token="x"))
    assert [row["kind"] for row in found] == ["change"]
    assert found[0]["transaction"]["total_order"] == 2


def test_fragments_become_one_event() -> None:
    """A split event has the fields of all fragments and the token of the last one."""
    whole = bson.decode(event(3))
    first = bson.encode({k: v for k, v in whole.items() if k != "fullDocument"} | {"splitEvent": {"fragment": 1, "of": 2}})
    token = {"_data": TOKEN.format(1_700_000_000, 4)}
    last = bson.encode({"_id": token, "splitEvent": {"fragment": 2, "of": 2}, "fullDocument": whole["fullDocument"]})
    fragments = split_events.Fragments()
    assert fragments.whole(first) is None
    joined = fragments.whole(last)
    assert joined is not None
    assert bson.decode(joined) == whole | {"_id": token}
    assert fragments.whole(event(5)) == event(5)


def test_a_split_event_may_begin_again() -> None:
    """After a lost connection the stream gives all fragments once more."""
    parts = [bson.encode({"_id": {"_data": "x"}, "splitEvent": {"fragment": number, "of": 2}}) for number in (1, 2)]
    fragments = split_events.Fragments()
    assert [fragments.whole(part) for part in (parts[0], parts[0])] == [None, None]
    assert fragments.whole(parts[1]) is not None
    assert [split_events.is_unfinished(part) for part in (*parts, event(1))] == [True, False, False]


def test_a_split_event_may_come_again_in_one_piece() -> None:
    """Its document was looked up anew, and is smaller by then: the event replaces its fragments. Another event does not."""
    tokens = {case["name"]: case["data"] for case in TOKENS}
    first = bson.encode({"_id": {"_data": tokens["first fragment"]}, "splitEvent": {"fragment": 1, "of": 2}})
    whole = bson.encode({"_id": {"_data": tokens["whole event, version 2"]}, "operationType": "update"})
    fragments = split_events.Fragments()
    assert fragments.whole(first) is None
    assert fragments.whole(whole) == whole and not fragments.is_open
    assert fragments.whole(event(5)) == event(5)
    fragments.whole(first)
    with pytest.raises(split_events.MissingFragment):
        fragments.whole(event(5))


def test_an_end_carries_the_place_up_to_which_the_stream_is_read() -> None:
    """What came after the transaction's events, and is committed, must not come again after a restart."""
    rows, tracker = events.EventRows("test"), transactions.TransactionTracker()
    rows.add(event(1, txn=1), tracker=tracker)
    rows.end_transaction(tracker, token="82ff", ts_ms=1)
    rows.end_transaction(tracker, token="82ff", ts_ms=1)
    assert [(row["kind"], row["resume_token"]) for row in rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()[-1:]] == [
        ("transaction", "82ff")
    ]
    assert rows.token == "82ff" and rows.ended_transactions == 1


def test_a_missing_fragment_is_noticed() -> None:
    """An event between fragments means that one was lost; the capture starts over behind the last whole event."""
    fragments = split_events.Fragments()
    first = bson.encode({"_id": {"_data": "x"}, "splitEvent": {"fragment": 1, "of": 2}})
    fragments.whole(first)
    with pytest.raises(split_events.MissingFragment):
        fragments.whole(event(1))
    read = Intake(None, split_events.Fragments())
    assert list(read.events(EventBatch([event(1), first], "x", 1, is_drained=False))) == [event(1)]
    with pytest.raises(errors.SourceUnreachable):
        list(read.events(EventBatch([event(2)], "y", 1, is_drained=False)))


def test_a_skipped_event_leaves_a_notification() -> None:
    """An event whose documents were taken out for their size is counted and reported, not applied."""
    rows = events.EventRows("test")
    rows.add(event(1, **{events.SKIPPED: 17_000_000}))
    found = rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    assert rows.skipped == 1
    assert found[0]["kind"] == "notification" and json.loads(found[0]["payload"])["additional_data"]["size"] == 17_000_000


def half_of_a_move(operation: str, region: int, *, at: int, txn: int | None = 1) -> bytes:
    """One of the two events of an update of the shard key `region`, at a time of its own shard."""
    more: dict[str, Any] = {"operationType": operation, "documentKey": {"region": region, "_id": 7}}
    return event(at, txn=txn, **more, **({"fullDocument": {"_id": 7, "region": region}} if operation == "insert" else {}))


@pytest.mark.parametrize(("deleted_at", "inserted_at"), [(1, 2), (2, 2), (2, 1)])
def test_the_document_that_moved_to_another_shard_stays(deleted_at: int, inserted_at: int) -> None:
    """Whichever of a transaction's two events comes first, over any number of commits, and with any other event between them."""
    delete, insert = half_of_a_move("delete", 900, at=deleted_at), half_of_a_move("insert", 1, at=inserted_at)
    orders = [(delete, insert)] * (deleted_at <= inserted_at) + [(insert, delete)] * (deleted_at >= inserted_at)
    for halves in orders:
        moves = transactions.ShardMoves()
        found = [landed(half, event(inserted_at), moves=moves)[0] for half in halves]
        assert [row["op"] for row in sorted(found, key=lambda row: row["sequence"])] == ["d", "c"]
        assert found[0]["sequence"] != found[1]["sequence"]
        # What the row was before, and what becomes of it, keep their places.
        (before,), (after,) = landed(event(0), moves=moves), landed(event(3), moves=moves)
        assert (
            before["sequence"]
            < min(row["sequence"] for row in found)
            < max(row["sequence"] for row in found)
            < after["sequence"]
        )


def test_only_the_delete_on_the_other_shard_gives_way() -> None:
    """A document that is inserted and deleted under one key, or in two transactions, is deleted; what is long ago is forgotten."""
    inserts = half_of_a_move("insert", 1, at=1)
    for insert, delete in [
        (inserts, half_of_a_move("delete", 1, at=2)),
        (inserts, half_of_a_move("delete", 900, at=2, txn=2)),
        (half_of_a_move("insert", 1, at=1, txn=None), half_of_a_move("delete", 900, at=2, txn=None)),
    ]:
        found = landed(insert, delete, moves=transactions.ShardMoves())
        assert [row["op"] for row in sorted(found, key=lambda row: row["sequence"])] == ["c", "d"]
    found = landed(inserts, event(2, txn=3), half_of_a_move("delete", 900, at=3), moves=transactions.ShardMoves(held=1))
    assert found[2]["sequence"] > found[0]["sequence"]
