"""What a user's `cursor.pipeline` may change in events, and what it may not."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse
from pipelines.mongodb import server as mongodb_server
from tests.harness.captured import Stream


def settings(db: str, stages: list[Any], **source: Any) -> parse.Settings:
    given = {"mongodb.connection.string": "mongodb://localhost", "database.include.list": db, **source}
    document = {"name": "shop", "lakehouse": {"root": "lake"}, "source": {**given, "cursor.pipeline": json.dumps(stages)}}
    return parse.parse(document)


@contextlib.contextmanager
def stream(mongo: Any, found: parse.Settings) -> Any:
    opened = Stream(found, mongo, mongodb_server.operation_time(mongo))
    with contextlib.closing(opened):
        yield opened


ONLY_DOCUMENTS = {"$match": {"operationType": {"$in": ["insert", "update", "replace", "delete"]}}}
KEPT = {"operationType": 1, "clusterTime": 1, "ns": 1, "documentKey": 1, "fullDocument": 1}
SIZE = {"$size": "$fullDocument.tags"}


@pytest.mark.parametrize("order", ["internal_first", "user_first", "user_only"])
@pytest.mark.parametrize(
    "stages",
    [
        [ONLY_DOCUMENTS],
        [{"$match": {"$expr": {"$gt": [SIZE, 0]}}}],
        [ONLY_DOCUMENTS, {"$project": KEPT}],
        [{"$project": {**KEPT, "tags": SIZE}}, {"$match": {"tags": {"$gt": 0}}}],
        [{"$set": {"fullDocument.size": SIZE, "fullDocument.more": {"of": [SIZE]}}}, {"$unset": "to"}],
        [{"$replaceWith": {"$mergeObjects": ["$$ROOT", {"fullDocument": {"n": SIZE}}]}}, ONLY_DOCUMENTS],
        [{"$replaceRoot": {"newRoot": {"$cond": [{"$gt": [SIZE, 0]}, "$$ROOT", "$fullDocument"]}}}],
        [{"$redact": {"$cond": [{"$eq": ["$isSecret", True]}, "$$PRUNE", "$$DESCEND"]}}, {"$project": {"to": 0}}],
    ],
    ids=lambda stages: "-".join(next(iter(stage)) for stage in stages),
)
def test_what_is_not_a_documents_event_passes_every_stage(mongo: Any, database: Any, stages: list[Any], order: str) -> None:
    """Whatever the stages do with documents, a rename, a drop and the end of the database are captured completely."""
    found = settings(database.name, stages, **{"cursor.pipeline.order": order})
    with stream(mongo, found) as opened:
        database.orders.insert_one({"_id": 1, "tags": ["a"]})
        database.orders.rename("sold")
        database.sold.drop()
        mongo.drop_database(database.name)
        opened.read(mongodb_server.operation_time(mongo))
        rows = opened.table
    assert [row["key"] for row in rows if row["kind"] == "change"] == ["1"]
    changes = {
        row["payload"]["operation"]: row
        for row in ({**row, "payload": json.loads(row["payload"] or "{}")} for row in rows)
        if row["kind"] == "schema_change"
    }
    assert {"rename", "drop", "dropDatabase"} <= set(changes)
    assert changes["rename"]["collection"] == "orders"
    assert changes["rename"]["payload"]["to"] == {"db": database.name, "collection": "sold"}
    assert changes["drop"]["collection"] == "sold" and changes["drop"]["source"]["ts_ms"]


def test_a_stage_that_the_server_refuses_ends_a_start_with_the_reason(mongo: Any, database: Any) -> None:
    """It was called a bug."""
    stages = [{"$set": {"fullDocument.size": {"$sise": "$fullDocument.tags"}}}]
    with pytest.raises(errors.SourceUnsuitable, match=r"'\$sise'; check source.cursor.pipeline"):
        with stream(mongo, settings(database.name, stages)):
            pass


def test_the_stages_still_do_what_they_say(mongo: Any, database: Any) -> None:
    """Documents are matched, reduced and changed as configured."""
    stages = [
        {"$match": {"fullDocument.test": {"$ne": True}}},
        {"$set": {"fullDocument.size": {"$size": {"$ifNull": ["$fullDocument.tags", []]}}}},
        {"$project": {"fullDocument.secret": 0}},
        {"$redact": {"$cond": [{"$eq": ["$isSecret", True]}, "$$PRUNE", "$$DESCEND"]}},
    ]
    with stream(mongo, settings(database.name, stages)) as opened:
        database.orders.insert_many([{"_id": 1, "test": True}, {"_id": float("nan"), "tags": [1, 2], "secret": 5}])
        database.orders.insert_one({"_id": 3, "part": {"isSecret": True, "isGuard": True, "n": 1}})
        opened.read(mongodb_server.operation_time(mongo))
        rows = opened.table
    changes = [json.loads(row["after"]) for row in rows if row["kind"] == "change"]
    assert [{name: value for name, value in each.items() if name != "_id"} for each in changes] == [
        {"tags": [1, 2], "size": 2},
        {"size": 0},
    ]


@pytest.mark.parametrize("mode", ["change_streams", "change_streams_update_full_with_pre_image"])
def test_a_stage_makes_no_document_where_there_is_none(mongo: Any, database: Any, mode: str) -> None:
    """A stage sets a field of every `fullDocument` to hide it. An update without a look-up, or a delete, must not get a document by it:
    it would be mistaken for the whole document. A signal whose document a stage removes is ignored, and does not end the stream.
    """
    hidden = {"fullDocument.ssn": "*", "fullDocumentBeforeChange.ssn": "*", "updateDescription.updatedFields.ssn": "*"}
    stages = [{"$set": {name: value for name, value in hidden.items() if mode != "change_streams" or "update" not in name}}]
    signals = {"signal.data.collection": f"{database.name}.signals"}
    if mode != "change_streams":
        database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    with stream(mongo, settings(database.name, stages, **{"capture.mode": mode}, **signals)) as opened:
        database.orders.insert_one({"_id": 1, "ssn": "123", "n": 1})
        database.orders.update_one({"_id": 1}, {"$set": {"n": 2}})
        database.orders.delete_one({"_id": 1})
        opened.read(mongodb_server.operation_time(mongo))
        rows = [row for row in opened.table if row["kind"] == "change"]
    assert [row["op"] for row in rows] == ["c", "u", "d"]
    assert json.loads(rows[0]["after"]) == {"_id": 1, "ssn": "*", "n": 1}
    assert [row["after"] for row in rows[1:]] == [None, None]
    assert [row["updateDescription"] is None for row in rows] == [True, False, True]
    assert rows[0]["before"] is None
    if mode != "change_streams":
        assert [json.loads(row["before"]) for row in rows[1:]] == [{"_id": 1, "ssn": "*", "n": n} for n in (1, 2)]
    with stream(mongo, settings(database.name, [{"$unset": "fullDocument"}], **signals)) as opened:
        database.signals.insert_one({"_id": "s", "type": "log", "data": {"message": "x"}})
        opened.read(mongodb_server.operation_time(mongo))
        assert [row["key"] for row in opened.table if row["kind"] == "change"][-1] == '"s"'


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ({"$replaceWith": {"$cond": [True, "$fullDocument", "$$ROOT"]}}, "operationType, clusterTime, ns, documentKey"),
        ({"$replaceWith": {"$setField": {"field": "clusterTime", "input": "$$ROOT", "value": 5}}}, "clusterTime"),
        ({"$redact": {"$cond": [{"$ifNull": ["$coll", False]}, "$$PRUNE", "$$DESCEND"]}}, "ns"),
    ],
)
def test_a_stage_that_spoils_events_is_named_at_the_first_one(mongo: Any, database: Any, stage: Any, named: str) -> None:
    """Mistakes that the settings do not show are reported at the first event, with the names of the fields, and not as a lost position."""
    with stream(mongo, settings(database.name, [stage])) as opened:
        database.orders.insert_one({"_id": 1, "a": 1})
        with pytest.raises(errors.SettingsError, match=f"remove or change {named} of an event .insert"):
            opened.read(mongodb_server.operation_time(mongo))
