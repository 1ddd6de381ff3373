"""What documents look like, and how they came to, as `medallion schema` reads it."""

from __future__ import annotations

from pathlib import Path

import bson

from pipelines.operations import schema
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


def test_the_columns_and_their_changes_are_told_without_a_query(tmp_path: Path) -> None:
    """Of the collections that are asked for, in the order in which they came."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "other": True})), collection="u")
        for batch in ({"_id": 1, "n": 1}, {"_id": 2, "n": 2, "s": {"a": "x"}}):
            hop.append((batch["_id"], bson.encode(batch)))
            hop.run()
        first, second = schema.read(SPARK, hop.settings)
        (alone,) = schema.read(SPARK, hop.settings, collection=second.collection)
    assert [(each.name, each.type) for each in first.columns] == [("_id", "INT"), ("n", "INT"), ("s", "STRUCT<`a`: STRING>")]
    assert [(each.version, each.path, each.what) for each in first.changes] == [
        (1, "_id", "added"),
        (1, "n", "added"),
        (2, "s", "added"),
    ]
    assert alone == second and [each.name for each in second.columns] == ["_id", "other"]
