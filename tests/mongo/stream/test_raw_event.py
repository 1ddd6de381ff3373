"""Events in the form in which a server sends them."""

from __future__ import annotations

import contextlib
from typing import Any

from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS

from cdc_core.bronze import raw_event


def test_documents_of_real_events_stay_bytes(database: Any) -> None:
    """Documents are not decoded with their events, in a transaction and outside of one, for each operation with a document."""
    database.create_collection("orders")
    raw = database.with_options(codec_options=DEFAULT_RAW_BSON_OPTIONS)
    with contextlib.closing(raw.watch(full_document="updateLookup", show_expanded_events=True)) as stream:
        database.orders.insert_one({"_id": 1, "a": 1})
        database.orders.update_one({"_id": 1}, {"$set": {"a": 2}})
        database.orders.replace_one({"_id": 1}, {"a": 3})
        with database.client.start_session() as session, session.start_transaction():
            database.orders.insert_one({"_id": 2}, session=session)
        found = [raw_event.envelope(bytes(next(stream).raw), is_used=lambda event: False) for _ in range(4)]
    assert [each.event["operationType"] for each in found] == ["insert", "update", "replace", "insert"]
    assert all(each.document is not None and "fullDocument" not in each.event for each in found)
    assert all(raw_event.decoded(each.document.raw)[0]["_id"] for each in found if each.document is not None)
