"""Drops, renames and `$out` on a real server: bronze records them, and gold equals the source afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdc_core.settings import parse as settings
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from tests.harness import captures, oracle, sessions


class Journey:
    """A pipeline over one database, run layer by layer."""

    def __init__(self, spark: Any, uri: str, db: str, root: Path, **collections: Any) -> None:
        self.spark, self.db = spark, db
        self.settings = settings.parse(
            {
                "name": "shop",
                "lakehouse": {"root": str(root)},
                "source": {"mongodb.connection.string": uri, "database.include.list": db},
                "silver": {"collections": {f"{db}.{name}": options for name, options in collections.items()}},
            }
        )

    def run(self) -> None:
        capture.run(self.spark, self.settings, once=True, sessions=sessions.kept(self.spark))
        silver.run(self.spark, self.settings, sessions=sessions.kept(self.spark))
        gold.run(self.spark, self.settings, sessions=sessions.kept(self.spark))

    def gold(self, collection: str) -> dict[int, Any]:
        """A gold table's `v` by `_id`."""
        table = delta.layout(self.settings.lakehouse).gold(self.db, collection)
        return {row["_id"]: row["v"] for row in oracle.read(table.path or "", columns=["_id", "v"]).to_pylist()}

    def operations(self) -> list[str]:
        """The operations of bronze's schema changes, in order."""
        noted = [row for row in captures.rows(self.spark, self.settings) if row.kind == "schema_change"]
        found = [json.loads(row.payload).get("operation") for row in noted]
        return [each for each in found if each in ("drop", "rename", "dropDatabase", "invalidate")]


def documents(count: int, value: str) -> list[dict[str, Any]]:
    return [{"_id": number, "v": value} for number in range(count)]


def test_what_was_dropped_renamed_or_replaced_is_so_in_gold(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, mongo: Any
) -> None:
    """Rows are removed with their collection. A collection that replaces another is read by a snapshot, because the server sends no
    events.

    Documents that are inserted after a drop stay; with `keep` the old rows stay, too. Dropping a database first drops its collections.
    """
    kept = {"collection.drop.handling.mode": "keep"}
    journey = Journey(spark, mongodb_uri, database.name, lakehouse, kept=kept)
    for name in ("dropped", "again", "kept", "target", "outed"):
        database[name].insert_many(documents(4, "old"))
    for name in ("moved", "source"):
        database[name].insert_many([{"_id": number, "v": "new"} for number in range(2, 6)])
    journey.run()

    database.dropped.insert_one({"_id": 77, "v": "lost"})
    database.dropped.drop()
    database.again.drop()
    database.again.insert_many(documents(2, "new"))
    database.kept.drop()
    database.moved.rename("target", dropTarget=True)
    list(database.source.aggregate([{"$out": "outed"}]))
    database.target.insert_one({"_id": 100, "v": "later"})
    journey.run()
    new = dict.fromkeys(range(2, 6), "new")
    assert journey.gold("dropped") == {}
    assert journey.gold("again") == {0: "new", 1: "new"}
    assert journey.gold("kept") == dict.fromkeys(range(4), "old")
    assert (journey.gold("moved"), journey.gold("target")) == ({}, {**new, 100: "later"})
    assert (journey.gold("source"), journey.gold("outed")) == (new, new)
    assert journey.operations().count("drop") >= 3

    mongo.drop_database(database.name)
    capture.run(spark, journey.settings, once=True, sessions=sessions.kept(spark))
    assert "dropDatabase" in journey.operations()
    assert journey.operations().count("drop") >= 7
