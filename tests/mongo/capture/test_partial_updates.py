"""Updates without documents, from a real server to gold: they are folded onto stored documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.capture import service as capture
from pipelines.gold import run as gold
from pipelines.operations import status
from pipelines.silver import run as silver
from tests.harness import captures, layers, oracle

if TYPE_CHECKING:
    from pymongo.collection import Collection
    from pymongo.database import Database
    from pyspark.sql import SparkSession

PADDING = "p" * 3000
"""An update by a pipeline of a smaller document is sent as a replacement, so that no array would be truncated."""


def inserted(orders: Collection[Any], first: int) -> None:
    orders.insert_many(
        {"_id": number, "n": number, "to": {"name": f"n{number}", "zip": 1}, "lines": [1, 2, 3], "pad": PADDING}
        for number in range(first, first + 10)
    )


def changed(orders: Collection[Any], first: int, value: int) -> None:
    """Every kind of partial update, a replacement, a delete, and a delete with another insert."""
    orders.update_one({"_id": first}, {"$set": {"to.name": f"v{value}", "lines.1": value}, "$inc": {"n": 1}})
    orders.update_one({"_id": first}, {"$set": {"to.zip": value}})
    orders.update_one({"_id": first + 1}, {"$unset": {"to.zip": "", "n": ""}, "$set": {"new": {"deep": [value]}}})
    orders.update_one({"_id": first + 2}, {"$push": {"lines": value}})
    orders.update_one({"_id": first + 3}, [{"$set": {"lines": [value]}}])
    orders.update_one({"_id": first + 4}, {"$pop": {"lines": -1}})
    orders.replace_one({"_id": first + 5}, {"_id": first + 5, "n": value})
    orders.update_one({"_id": first + 5}, {"$set": {"to.name": "again"}})
    orders.delete_one({"_id": first + 6})
    orders.delete_one({"_id": first + 7})
    orders.insert_one({"_id": first + 7, "n": value})
    orders.update_one({"_id": first + 7}, {"$inc": {"n": 1}})


@pytest.mark.parametrize(
    "mode", [pytest.param("change_streams", marks=pytest.mark.journey), "change_streams_with_pre_image"]
)
def test_partial_updates_reach_gold(
    spark: SparkSession, mongodb_uri: str, database: Database[Any], lakehouse: Path, mode: str
) -> None:
    """Without look-up gold equals the source after each run: updates are folded onto silver's stored documents, across batches."""
    database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    chosen = settings.parse(
        {
            "name": "partial",
            "lakehouse": {"root": str(lakehouse)},
            "source": {
                "mongodb.connection.string": mongodb_uri,
                "collection.include.list": f"{database.name}.orders",
                "capture.mode": mode,
            },
        }
    )
    inserted(database.orders, 0)
    for step in range(2):
        if step:
            inserted(database.orders, 10)
            changed(database.orders, 0, 50)
            changed(database.orders, 10, 60)
            database.orders.update_many({"_id": {"$gt": 12}}, {"$set": {"many": True}})
        capture.run(spark, chosen, once=True)
        silver.run(spark, chosen)
        gold.run(spark, chosen)
        found = oracle.compare(database.orders, lakehouse / "gold" / database.name / "orders")
        assert found == []
    held = layers.table_rows(spark, tables.TableRef.at(f"{lakehouse}/silver/{database.name}/orders"))
    assert not any(row["__incomplete"] for row in held)
    updates = [row for row in captures.rows(spark, chosen) if row.op == "u"]
    assert sum(row.after is None for row in updates) == sum(row.updateDescription is not None for row in updates) > 20
    assert any(row.before is not None for row in updates) == (mode == "change_streams_with_pre_image")


def test_fields_that_are_renamed_later_are_told(
    spark: SparkSession, mongodb_uri: str, database: Database[Any], lakehouse: Path
) -> None:
    """Changes are folded onto documents with the old names: status lists the collection as incomplete until a snapshot has read it
    again.
    """
    name = f"{database.name}.orders"
    more = {"capture.mode": "change_streams", "signal.enabled.channels": "file", "signal.file": str(lakehouse / "signals")}
    before = captures.pipeline(mongodb_uri, lakehouse, database.name, **more)
    now = captures.pipeline(mongodb_uri, lakehouse, database.name, **more, **{"field.renames": f"{name}.n:m"})
    inserted(database.orders, 0)
    captures.once(spark, before)
    database.orders.update_one({"_id": 1}, {"$set": {"n": 50}})

    def told() -> tuple[Any, ...]:
        held = layers.table_rows(spark, tables.TableRef.at(f"{lakehouse}/silver/{database.name}/orders"))
        (row,) = (each for each in held if each["_id"] == 1)
        (found,) = status.read(spark, now).collections
        return row["n"], row["m"], found.incomplete_because, found.incomplete_since is not None

    captures.once(spark, now)
    silver.run(spark, now)
    assert told() == (1, 50, "field.exclude.list or field.renames was changed, and no snapshot has read it again", True)
    signal = {"id": "again", "type": "execute-snapshot", "data": {"data-collections": [name]}}
    (lakehouse / "signals").write_text(json.dumps(signal) + "\n")
    captures.once(spark, now)
    silver.run(spark, now)
    assert told() == (None, 50, None, False)
