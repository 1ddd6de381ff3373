"""Transaction metadata, fragments of split events, and moves between shards, with events as the server sends them."""

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
from tests.harness import pace

TOKEN = "82{:08X}{:08X}2B022C0100296E5A1004421E9C2BE69342E885031C52C7B7562746645F696400646B0136FAF9C3DA20B05111340004"

TOKENS = json.loads((Path(__file__).parents[2] / "cases" / "resume_token" / "tokens.json").read_text())


def event(number: int, *, collection: str = "a", txn: int | None = None, **more: Any) -> bytes:
    """An insert, in transaction number `txn` if given."""
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
    """BEGIN comes before the first event; END, with the counts, before the first event outside the transaction."""
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
    """The END of one comes before the BEGIN of the next."""
    found = landed(event(1, txn=1), event(2, txn=2), tracker=transactions.TransactionTracker())
    assert [json.loads(row["payload"])["status"] for row in found if row["kind"] == "transaction"] == [
        "BEGIN", "END", "BEGIN",
    ]  # fmt: skip


def test_a_transaction_over_many_collections_costs_no_more_per_event() -> None:
    tracker = transactions.TransactionTracker()
    with pace.within(2):
        steps = [tracker.see("1", f"db.c{number % 30_000}") for number in range(60_000)]
        assert steps[-1].block == {"id": "1", "total_order": 60_000, "data_collection_order": 2}


def test_counting_goes_on_after_a_restart() -> None:
    """A tracker that starts with the state in bronze continues counting, and does not begin the transaction again."""
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
    """After a lost connection the stream sends all fragments again."""
    parts = [bson.encode({"_id": {"_data": "x"}, "splitEvent": {"fragment": number, "of": 2}}) for number in (1, 2)]
    fragments = split_events.Fragments()
    assert [fragments.whole(part) for part in (parts[0], parts[0])] == [None, None]
    assert fragments.whole(parts[1]) is not None
    assert [split_events.is_unfinished(part) for part in (*parts, event(1))] == [True, False, False]


def test_a_split_event_may_come_again_in_one_piece() -> None:
    """Its document was looked up again and is smaller by then: the event replaces its fragments. Another event does not."""
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
    """Events after the transaction that are already committed must not be repeated after a restart."""
    rows, tracker = events.EventRows("test"), transactions.TransactionTracker()
    rows.add(event(1, txn=1), tracker=tracker)
    rows.end_transaction(tracker, token="82ff", ts_ms=1)
    rows.end_transaction(tracker, token="82ff", ts_ms=1)
    assert [(row["kind"], row["resume_token"]) for row in rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()[-1:]] == [
        ("transaction", "82ff")
    ]
    assert rows.token == "82ff" and rows.ended_transactions == 1


def test_a_missing_fragment_is_noticed() -> None:
    """An event between fragments means that one was lost; the capture restarts after the last whole event."""
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
    """An event whose documents were removed for their size is counted and reported, not applied."""
    rows = events.EventRows("test")
    rows.add(event(1, **{events.SKIPPED: 17_000_000}))
    found = rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist()
    assert rows.skipped == 1
    assert found[0]["kind"] == "notification" and json.loads(found[0]["payload"])["additional_data"]["size"] == 17_000_000


def half_of_a_move(operation: str, region: int, *, at: int, txn: int | None = 1) -> bytes:
    """One of the two events of an update of the shard key `region`, with its own shard's time."""
    more: dict[str, Any] = {"operationType": operation, "documentKey": {"region": region, "_id": 7}}
    return event(at, txn=txn, **more, **({"fullDocument": {"_id": 7, "region": region}} if operation == "insert" else {}))


@pytest.mark.parametrize(("deleted_at", "inserted_at"), [(1, 2), (2, 2), (2, 1)])
def test_the_document_that_moved_to_another_shard_stays(deleted_at: int, inserted_at: int) -> None:
    """Whichever of the transaction's two events comes first, in any number of commits, and with other events between them."""
    delete, insert = half_of_a_move("delete", 900, at=deleted_at), half_of_a_move("insert", 1, at=inserted_at)
    orders = [(delete, insert)] * (deleted_at <= inserted_at) + [(insert, delete)] * (deleted_at >= inserted_at)
    for halves in orders:
        moves = transactions.ShardMoves()
        found = [landed(half, event(inserted_at), moves=moves)[0] for half in halves]
        assert [row["op"] for row in sorted(found, key=lambda row: row["sequence"])] == ["d", "c"]
        assert found[0]["sequence"] != found[1]["sequence"]
        # Earlier and later events of the document keep their order.
        (before,), (after,) = landed(event(0), moves=moves), landed(event(3), moves=moves)
        assert (
            before["sequence"]
            < min(row["sequence"] for row in found)
            < max(row["sequence"] for row in found)
            < after["sequence"]
        )


def test_only_the_delete_on_the_other_shard_gives_way() -> None:
    """A document that is inserted and deleted with the same key, or in two transactions, is deleted."""
    inserts = half_of_a_move("insert", 1, at=1)
    for insert, delete in [
        (inserts, half_of_a_move("delete", 1, at=2)),
        (inserts, half_of_a_move("delete", 900, at=2, txn=2)),
        (half_of_a_move("insert", 1, at=1, txn=None), half_of_a_move("delete", 900, at=2, txn=None)),
    ]:
        found = landed(insert, delete, moves=transactions.ShardMoves())
        assert [row["op"] for row in sorted(found, key=lambda row: row["sequence"])] == ["c", "d"]


def in_order(found: list[dict[str, Any]]) -> list[str]:
    """The operations in the order in which they apply."""
    return [row["op"] for row in sorted(found, key=lambda row: row["sequence"])]


def move(
    document: int, operation: str, region: int, *, seconds: int = 0, at: int = 1, index: int = 0, txn: int = 1
) -> bytes:
    """An event of a transaction that changes a document's shard key `region`."""
    time = 1_700_000_000 + seconds
    token = (
        TOKEN.format(time, at).replace("2B022C0100296E", f"2B022C01002B{index * 2:02X}6E")
        if index
        else TOKEN.format(time, at)
    )
    more: dict[str, Any] = {} if operation == "delete" else {"fullDocument": {"_id": document, "region": region}}
    key = {"region": region, "_id": document}
    fields = {"_id": {"_data": token}, "clusterTime": Timestamp(time, at), "operationType": operation, "documentKey": key}
    raw = bson.decode(event(at, txn=txn)) | fields
    del raw["fullDocument"]
    return bson.encode(raw | more)


def test_a_transaction_that_moves_many_documents_keeps_them_all() -> None:
    """One shard may send all its inserts before the other sends a delete."""
    moves = transactions.ShardMoves()
    documents = range(12_000)
    inserts = landed(*(move(each, "insert", 1, at=1) for each in documents), moves=moves)
    deletes = landed(*(move(each, "delete", 900, at=2) for each in documents), moves=moves)
    assert all(delete["sequence"] < insert["sequence"] for insert, delete in zip(inserts, deletes, strict=True))


def test_what_is_long_ago_is_forgotten() -> None:
    """By cluster time, and the oldest if there are too many."""
    moves = transactions.ShardMoves(seconds=60, most_documents=3)
    landed(move(7, "insert", 1), move(8, "insert", 1, seconds=50, txn=2), moves=moves)
    assert len(moves) == 2
    landed(move(9, "insert", 1, seconds=70, txn=3), moves=moves)
    assert len(moves) == 2
    # Only the oldest one is forgotten.
    (late,) = landed(move(8, "delete", 900, seconds=71, txn=2), moves=moves)
    assert late["sequence"] < f"{1_700_000_050:08x}{1:08x}{0:08x}"
    (*_, last) = landed(*(move(each, "insert", 1, seconds=72, txn=4) for each in range(10)), moves=moves)
    assert 0 < len(moves) <= 3
    (late,) = landed(move(9, "delete", 900, seconds=73, txn=4), moves=moves)
    assert late["sequence"] < last["sequence"]


@pytest.mark.parametrize(
    "steps",
    [
        # From 1 to 2 and to 3: the shards' events in several orders.
        [("insert", 3), ("delete", 1), ("insert", 2), ("delete", 2)],
        [("insert", 2), ("delete", 2), ("insert", 3), ("delete", 1)],
        [("insert", 2), ("insert", 3), ("delete", 2), ("delete", 1)],
        [("delete", 1), ("insert", 3), ("insert", 2), ("delete", 2)],
        # To 2 and back.
        [("insert", 2), ("delete", 1), ("insert", 1), ("delete", 2)],
        [("delete", 1), ("insert", 1), ("insert", 2), ("delete", 2)],
        [("insert", 2), ("delete", 2), ("delete", 1), ("insert", 1)],
        # Inserted by the transaction, and moved.
        [("insert", 2), ("insert", 1), ("delete", 1)],
        [("insert", 1), ("insert", 2), ("delete", 1)],
    ],
)
def test_a_document_that_moves_several_times_stays(steps: list[tuple[str, int]]) -> None:
    """No order of the shards ends with a delete, even at the same cluster time."""
    for times in (range(1, len(steps) + 1), [1] * len(steps)):
        events_ = [move(7, operation, region, at=at) for at, (operation, region) in zip(times, steps, strict=True)]
        assert in_order(landed(*events_, moves=transactions.ShardMoves()))[-1] == "c"


def test_a_document_that_moves_and_is_deleted_is_gone() -> None:
    """The last delete comes after the last insert, which may have been moved after the first delete."""
    parts = [move(7, "delete", 1, index=3), move(7, "insert", 2), move(7, "delete", 2, index=1)]
    for order in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
        found = landed(*(parts[each] for each in order), moves=transactions.ShardMoves())
        assert in_order(found)[-1] == "d"


def test_an_update_of_a_document_that_moved_counts() -> None:
    """If its insert was moved after a delete of the same time, later events of the transaction come after it."""
    moves = transactions.ShardMoves()
    steps = [
        move(7, "delete", 1, index=3),
        move(7, "insert", 2),
        move(7, "update", 2, index=1),
        move(7, "update", 2, index=2),
    ]
    found = landed(*steps, moves=moves)
    assert in_order(found) == ["d", "c", "u", "u"]
    assert len({row["sequence"] for row in found}) == 4
    assert found[2]["sequence"] < found[3]["sequence"]
    # An update before the move keeps its position, and is not remembered.
    (other,) = landed(move(7, "update", 1, index=2), moves=moves)
    assert other["sequence"] < found[1]["sequence"] and len(moves) == 1
    # The delete comes before the insert, and not between the insert and its update.
    steps = [move(7, "insert", 2), move(7, "update", 2, index=1), move(7, "delete", 1, at=2)]
    assert in_order(landed(*steps, moves=transactions.ShardMoves())) == ["d", "c", "u"]
    # The update comes after everything before it, including what another shard's delete has removed since.
    parts = [
        move(7, "insert", 3),
        move(7, "insert", 2, index=3),
        move(7, "delete", 2, index=4),
        move(7, "update", 3, index=1),
    ]
    assert in_order(landed(*parts, moves=transactions.ShardMoves()))[-1] == "u"
