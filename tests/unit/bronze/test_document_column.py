"""Events whose documents stay bytes until the commit give the same rows as events that are decoded as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.bronze import document_column, event_rows, raw_event
from cdc_core.stream import cursor_pipeline
from cdc_core.stream import fields as field_filters
from tests.harness import pace

TOKEN = "8265F0C0FF{:08X}2B022C0100296E5A1004"
TOKENS = json.loads((Path(__file__).parents[2] / "cases" / "resume_token" / "tokens.json").read_text())


UUID = bson.Binary(b"x" * 16, 4)


def event(number: int, op: str = "insert", *, collection: str = "orders", **more: Any) -> dict[str, Any]:
    """An event as a server writes it."""
    document = {"_id": number, "text": f"number {number}", "list": [{"a": number}]}
    made = {
        "_id": {"_data": TOKEN.format(number)},
        "operationType": op,
        "clusterTime": Timestamp(1_700_000_000, number + 1),
        "collectionUUID": UUID,
        "wallTime": bson.DatetimeMS(1_700_000_000_000),
        "fullDocument": document,
        "ns": {"db": "shop", "coll": collection},
        "documentKey": {"_id": number},
    }
    if op == "update":
        made["updateDescription"] = {"updatedFields": {"text": "x"}, "removedFields": [], "truncatedArrays": []}
    return {**made, **more}


def rows(events: list[bytes], **given: Any) -> tuple[list[dict[str, Any]], int, list[Any], set[str]]:
    """The rows, how many of them are lossy, the control events, and the names that documents had already."""
    made = event_rows.EventRows("shop")
    control = [found for each in events if (found := made.add(each, **given)) is not None]
    table = made.table(batch=1, first_offset=0, ts_ms=5)
    assert made.table(batch=1, first_offset=0, ts_ms=5) == table, "a commit that came second is tried again"
    return table.to_pylist(), made.lossy, control, made.name_conflicts


NOT_TEXT = bson.encode(event(5)).replace(b"number 5", b"number \xff")
LOOKS_LIKE = b"\x03fullDocument\0" + bson.encode({"a": 1})
EVENTS = {
    "ordinary": [event(number, op) for number, op in enumerate(("insert", "update", "replace") * 60)],
    "many collections": [event(number, collection=f"c{number % 3}") for number in range(10)],
    "a delete, no document, one before": [
        {key: value for key, value in event(1, "delete").items() if key != "fullDocument"},
        event(2, "update", fullDocument=None),
        event(3, fullDocumentBeforeChange={"_id": 3, "was": 1}),
    ],
    "in a transaction": [{"txnNumber": bson.Int64(4), "lsid": {"id": UUID, "uid": b"x" * 32}, **event(1)}],
    "in another order": [{"fullDocument": {"_id": 1}, **event(1)}],
    "what only looks like a document": [
        {key: value for key, value in event(1, "delete", documentKey={"_id": LOOKS_LIKE}).items() if key != "fullDocument"},
        event(2, "update", updateDescription={"updatedFields": {"a": LOOKS_LIKE}, "removedFields": []}),
    ],
    "nothing": [],
}


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of events that are each decoded as a whole."""

    def envelope(raw: bytes, *, is_used: object) -> raw_event.Envelope:
        return raw_event.Envelope(raw_event.decoded(raw)[0], raw, raw_event.decoded(raw)[1])

    def made(events: list[bytes], **given: Any) -> tuple[list[dict[str, Any]], int, list[Any], set[str]]:
        with monkeypatch.context() as patched:
            patched.setattr(raw_event, "envelope", envelope)
            return rows(events, **given)

    return made


@pytest.mark.parametrize("name", EVENTS)
def test_rows_are_those_of_whole_events(name: str, whole: Any) -> None:
    """For any operation, and any order of an event's fields."""
    events = [bson.encode(each) for each in EVENTS[name]]
    assert rows(events) == whole(events)


@pytest.mark.parametrize(
    ("name", "stay"), [("ordinary", 180), ("in a transaction", 1), ("what only looks like a document", 1)]
)
def test_documents_stay_bytes(name: str, stay: int) -> None:
    """Where the event starts as servers let it start."""
    found = [raw_event.envelope(bson.encode(each), is_used=lambda event: False).document for each in EVENTS[name]]
    assert sum(each is not None for each in found) == stay


RULES = field_filters.FieldRules((("list", "a"),), (field_filters.Rename(("text",), "said"),))


@pytest.mark.parametrize("rules", [None, RULES], ids=["all fields", "rules"])
def test_what_is_not_text_keeps_its_bytes(rules: field_filters.FieldRules | None, whole: Any) -> None:
    """Among other events, and more than once: the payload of the row has the original event, but not with fields that are removed."""
    events = [NOT_TEXT if number % 50 == 5 else bson.encode(event(number)) for number in range(150)]
    given: dict[str, Any] = {} if rules is None else {"fields": lambda db, name: rules}
    found = rows(events, **given)
    assert found == whole(events, **given)
    assert found[1] == 3


def test_a_signal_is_decoded(whole: Any) -> None:
    """Beside other documents that stay bytes."""
    events = [bson.encode(event(number, collection=name)) for number, name in enumerate(("orders", "others") * 3)]
    given = {"is_signal_collection": lambda db, name: name == "orders"}
    assert rows(events, **given) == whole(events, **given)


def test_fields_are_removed_and_renamed_in_documents_that_stay_bytes(whole: Any) -> None:
    """In one of two collections; a name that a document has already is reported once its text is made."""
    events = [bson.encode(event(number, collection=name)) for number, name in enumerate(("orders", "others") * 80)]
    events.append(bson.encode(event(200, fullDocument={"_id": 200, "said": 1, "text": "x"})))
    given = {"fields": lambda db, name: RULES if name == "orders" else None}
    found = rows(events, **given)
    assert found == whole(events, **given)
    texts = [row["after"] for row in found[0]]
    assert texts[0] == '{"_id":0,"list":[{}],"said":"number 0"}' and '"text":"number 1"' in texts[1]
    assert texts[-1] == '{"_id":200,"said":1,"text":"x"}' and found[3] == {"said"}


def test_a_pipelines_copy_is_compared(whole: Any) -> None:
    """If `cursor.pipeline` has stages that may change an event, the event is compared with its original copy, even if it lost its
    namespace."""
    made = event(1)
    copy = {cursor_pipeline.GUARD: {name: made[name] for name in cursor_pipeline.PROTECTED}}
    given = [bson.encode({**made, **copy})]
    assert rows(given) == whole(given)
    del made["ns"]
    with pytest.raises(errors.SettingsError, match="ns"):
        rows([bson.encode({**made, **copy})])


def test_a_pipelines_copy_has_the_token_of_a_large_event_from_before_it_was_split() -> None:
    """The server splits events behind all stages, and gives each fragment a token of its own."""
    made = event(1)
    copy = {cursor_pipeline.GUARD: {name: made[name] for name in cursor_pipeline.PROTECTED}}
    tokens = {case["name"]: case["data"] for case in TOKENS}
    copy[cursor_pipeline.GUARD]["_id"] = {"_data": tokens["whole event, version 2"]}
    (landed,), *_ = rows([bson.encode({**made, **copy, "_id": {"_data": tokens["first fragment"]}})])
    assert landed["resume_token"] == tokens["first fragment"]
    with pytest.raises(errors.SettingsError, match="_id"):
        rows([bson.encode({**made, **copy})])


@pytest.mark.parametrize(
    "changed",
    [
        {"fullDocument": "text"},
        {"fullDocument": [1]},
        {"fullDocumentBeforeChange": 5},
        {"updateDescription": "text"},
        {"updateDescription": {"updatedFields": 1}},
        {"updateDescription": {"removedFields": "a"}},
        {"updateDescription": {"removedFields": [1]}},
        {"updateDescription": {"truncatedArrays": 1}},
        {"updateDescription": {"truncatedArrays": [{"field": "a"}]}},
        {"updateDescription": {"disambiguatedPaths": "a"}},
        {"wallTime": "yesterday"},
        {"txnNumber": "first"},
        {"lsid": 1},
    ],
    ids=str,
)
def test_what_a_stage_gave_another_type_is_named(changed: dict[str, Any]) -> None:
    """This is a mistake in the settings and no bug: the error names the field, and says that nothing of the event was captured."""
    made = event(1)
    copy = {cursor_pipeline.GUARD: {name: made[name] for name in cursor_pipeline.PROTECTED}}
    with pytest.raises(errors.SettingsError, match=f"{next(iter(changed))}.*position did not move"):
        rows([bson.encode({**made, **copy, **changed})])


def test_what_was_learned_of_a_collection_is_forgotten_after_many_others() -> None:
    """A source with very many collections does not fill the memory."""
    columns = document_column.DocumentColumns()
    for number in range(2 * document_column.MAX_COLLECTIONS):
        raw = bson.encode({"_id": number})
        (text,) = columns.texts(
            [raw_event.FullDocument(raw, 0, len(raw))], [("shop", f"c{number}")], name_conflicts=set()
        ).texts
        assert text.as_py() == f'{{"_id":{number}}}'
    assert len(columns._encoders) == document_column.MAX_COLLECTIONS


def test_a_commit_of_very_many_collections_takes_no_longer_than_its_documents() -> None:
    """Quadratic time would be half a minute of processor time for thirty thousand collections, instead of half a second."""
    raw = bson.encode({"_id": 1})
    documents = [raw_event.FullDocument(raw, 0, len(raw))] * 30_000
    with pace.within(5):
        found = document_column.DocumentColumns().texts(
            documents, [("shop", f"c{number}") for number in range(len(documents))], name_conflicts=set()
        )
    assert set(found.texts.to_pylist()) == {'{"_id":1}'}
