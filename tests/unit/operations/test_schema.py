"""A collection's columns and their changes, as `medallion schema` reads them."""

from __future__ import annotations

from pathlib import Path

import bson
import pyarrow.parquet as pq

from pipelines.delta import local_log
from pipelines.delta import tables as delta
from pipelines.operations import schema
from pipelines.schema import log as schemas
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


def test_the_columns_and_their_changes_are_told_without_a_query(tmp_path: Path) -> None:
    """Either of all collections, in the order of their first events, or of one."""
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


def test_a_collections_schema_is_found_without_the_files_of_others(tmp_path: Path) -> None:
    """With thousands of collections, each start of a history and each check after an error would otherwise read all of them."""
    with without_spark.running():
        hop = Hop(tmp_path)
        for collection, number in (("t", 1), ("u", 2)):
            hop.append((number, bson.encode({"_id": number, collection: 1})), collection=collection)
        hop.run()
        table = delta.layout(hop.settings.lakehouse).ops("schemas")
        names = [each.collection for each in schema.read(SPARK, hop.settings)]
        for file in local_log.files(Path(table.path or "")) or ():
            if names[0] in pq.read_table(file.path)["collection"].to_pylist():
                file.path.unlink()
        (found,) = schemas.latest(SPARK, table, generations={names[1]: ""}).values()
        assert schemas.latest(SPARK, table, generations={names[1]: "history"}) == {}
    assert [name for name, _ in found.schema.table()] == ["_id", "u"]
