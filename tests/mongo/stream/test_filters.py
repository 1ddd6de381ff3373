"""The server's part of the filters: it agrees with the predicate and removes no event that a stream needs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from cdc_core.stream import filters
from tests.harness.sources import source

CASES = Path(__file__).resolve().parents[2] / "cases" / "filters" / "namespaces.json"


def event(operation: str, **fields: str) -> dict[str, Any]:
    return {"operationType": operation, **{name: _namespace(value) for name, value in fields.items()}}


def _namespace(text: str) -> dict[str, str]:
    db, dot, collection = text.partition(".")
    return {"db": db, "coll": collection} if dot else {"db": db}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["about"]) for case in json.loads(CASES.read_text())])
def test_the_server_agrees(case: dict[str, Any], database: Database[dict[str, Any]]) -> None:
    """The server sends every captured event and those that a stream needs, and no others if it can decide."""
    settings = source(case["source"])
    foreign = "elsewhere.nowhere" if not filters.of(settings).includes("elsewhere", "nowhere") else "admin.x"
    needed = [event("invalidate"), event("dropDatabase", ns="shop")]
    captured = [event(operation, ns=name) for name in case["in"] for operation in ("insert", "drop", "modify")]
    captured += [event("rename", ns=foreign, to=name) for name in case["in"]]
    captured += [event("rename", ns=name, to=foreign) for name in case["in"]]
    built_in = ("admin.", "config.", "local.", "shop.system.")  # no stream has events of these
    others = [event("insert", ns=name) for name in case["out"] if not name.startswith(built_in)]
    events = [{"_id": number, **each} for number, each in enumerate([*needed, *captured, *others])]
    database["events"].insert_many(events)

    sent = {each["_id"] for each in database["events"].aggregate(filters.pipeline(settings))}

    expected = set(range(len(needed) + len(captured)))
    assert expected <= sent
    if not case.get("left_to_client"):
        assert sent == expected


def test_a_stream_with_these_stages(mongo: MongoClient[dict[str, Any]], database: Database[dict[str, Any]]) -> None:
    """A real stream contains writes, drops, and renames to a captured collection."""
    name = database.name
    settings = source({"collection.include.list": rf"{name}\.orders, {name}\.cust.*"})
    scope = filters.stream_scope(settings, databases=[name])
    assert scope.db == name
    with mongo[name].watch(filters.pipeline(settings), max_await_time_ms=200, show_expanded_events=True) as stream:
        database["orders"].insert_one({"_id": 1})
        database["Customers"].insert_one({"_id": 2})
        database["other"].insert_one({"_id": 3})
        database["orders_old"].insert_one({"_id": 4})
        database["other"].aggregate([{"$out": "orders"}])
        database["orders_old"].rename("orders", dropTarget=True)
        database["Customers"].drop()
        mongo.drop_database(name)
        seen = _until_invalidated(stream)
    assert [each for each in seen if each[0] not in ("create", "modify")] == [
        ("insert", "orders"),
        ("insert", "Customers"),
        ("rename", "orders"),
        ("rename", "orders"),
        ("drop", "Customers"),
        ("drop", "orders"),
        ("dropDatabase", None),
        ("invalidate", None),
    ]


def test_names_are_looked_for_in_events_alone(database: Database[dict[str, Any]]) -> None:
    """If they were also applied to the oplog, their expressions would be compiled for each entry: with 2,000 names 400 entries per
    second.
    """
    stages = filters.pipeline(source({"collection.include.list": [f"{database.name}.orders", f"{database.name}.customers"]}))
    stream = {"aggregate": 1, "pipeline": [{"$changeStream": {}}, *stages], "cursor": {}}
    explained = database.command("explain", stream, verbosity="queryPlanner")
    in_oplog = explained["stages"][0]["$cursor"]["queryPlanner"]["parsedQuery"]
    assert "customers" in str(explained["stages"]) and "customers" not in str(in_oplog)


def _until_invalidated(stream: Any) -> list[tuple[str, str | None]]:
    """Operation types with the affected collection, which for a rename is its target."""
    seen: list[tuple[str, str | None]] = []
    end = time.monotonic() + 20
    while stream.alive and time.monotonic() < end and (not seen or seen[-1][0] != "invalidate"):
        change = stream.try_next()
        if change is not None:
            namespace = change.get("to", change.get("ns", {}))
            seen.append((change["operationType"], namespace.get("coll")))
    return seen
