"""Drops, renames and `$out` on a real server: bronze notes them, and gold is what the source is afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cdc_core import settings
from pipelines import capture, delta, gold, silver
from pipelines import spark as sparks


class Journey:
    """One pipeline over one database, run layer by layer."""

    def __init__(self, spark: Any, uri: str, db: str, root: Path, **options: Any) -> None:
        self.spark, self.db = spark, db
        self.settings = settings.parse(
            {
                "name": "shop",
                "lakehouse": {"root": str(root)},
                "source": {"mongodb.connection.string": uri, "database.include.list": db},
                "silver": {"defaults": options},
            }
        )

    def run(self) -> None:
        capture.run(self.spark, self.settings, once=True, sessions=sparks.sessions(self.spark))
        silver.run(self.spark, self.settings)
        gold.run(self.spark, self.settings)

    def gold(self, collection: str) -> dict[int, Any]:
        """The rows of a gold table, `_id` to `v`."""
        table = delta.layout(self.settings.lakehouse).gold(self.db, collection)
        return {row["_id"]: row["v"] for row in self.spark.table(str(table)).collect()}

    def operations(self) -> list[str]:
        """The operations of bronze's schema changes, in order."""
        table = delta.layout(self.settings.lakehouse).bronze("shop")
        found = self.spark.sql(
            f"SELECT get_json_object(payload, '$.operation') AS operation FROM {table} "
            "WHERE kind = 'schema_change' ORDER BY `offset`"
        )
        return [row.operation for row in found.collect() if row.operation in ("drop", "rename", "dropDatabase", "invalidate")]


def documents(count: int, value: str) -> list[dict[str, Any]]:
    return [{"_id": number, "v": value} for number in range(count)]


def test_a_dropped_collection_loses_its_rows_and_can_come_again(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Dropped, and dropped and made again between two runs; what was inserted after the drop stays."""
    journey = Journey(spark, mongodb_uri, database.name, lakehouse)
    database.a.insert_many(documents(5, "old"))
    database.b.insert_many(documents(3, "old"))
    journey.run()
    database.a.insert_one({"_id": 77, "v": "lost"})
    database.a.drop()
    database.b.drop()
    database.b.insert_many(documents(2, "new"))
    journey.run()
    assert journey.operations() == ["drop", "drop"]
    assert journey.gold("a") == {}
    assert journey.gold("b") == {0: "new", 1: "new"}
    database.a.insert_one({"_id": 1, "v": "again"})
    journey.run()
    assert journey.gold("a") == {1: "again"}


@pytest.mark.parametrize("way", ["rename", "out"])
def test_a_replaced_collection_is_read_again(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, way: str
) -> None:
    """A rename with dropTarget, or `$out`, onto a captured collection gives no events: a snapshot brings what is there."""
    journey = Journey(spark, mongodb_uri, database.name, lakehouse)
    database.target.insert_many(documents(5, "old"))
    database.other.insert_many([{"_id": number, "v": "new"} for number in range(3, 8)])
    journey.run()
    if way == "rename":
        database.other.rename("target", dropTarget=True)
    else:
        list(database.other.aggregate([{"$out": "target"}]))
    database.target.insert_one({"_id": 100, "v": "later"})
    journey.run()
    expected = {**{number: "new" for number in range(3, 8)}, 100: "later"}
    assert journey.gold("target") == expected
    assert journey.gold("other") == ({} if way == "rename" else {number: "new" for number in range(3, 8)})


def test_a_dropped_database_and_modes_that_keep(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, mongo: Any
) -> None:
    """`keep` keeps the rows; otherwise a dropped database is each of its collections dropped, and the stream goes on."""
    kept = Journey(spark, mongodb_uri, database.name, lakehouse / "kept", **{"collection.drop.handling.mode": "keep"})
    deleted = Journey(spark, mongodb_uri, database.name, lakehouse / "deleted")
    database.a.insert_many(documents(2, "old"))
    kept.run()
    deleted.run()
    mongo.drop_database(database.name)
    time.sleep(0.1)
    database.a.insert_one({"_id": 9, "v": "new"})
    kept.run()
    deleted.run()
    assert kept.gold("a") == {0: "old", 1: "old", 9: "new"}
    assert deleted.gold("a") == {9: "new"}
