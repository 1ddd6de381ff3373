"""Columns that someone dropped from a table by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from pyspark.sql import types as T

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import local_log, table_definition
from pipelines.schema import dropped
from pipelines.schema import log as schemas
from tests.harness import bronze_rows, without_spark
from tests.harness.without_spark import SPARK, Hop

NAMESPACE = registry.Namespace(bronze_rows.DB, "t")


def altered(hop: Hop, mode: str, change: Callable[[T.StructType], T.StructType]) -> T.StructType:
    """Commits a change of the table's columns by another writer; returns the new columns."""
    folder = Path(hop.silver_table.path or "")
    before, newest = table_definition.newest_action(folder, "metaData"), local_log.newest_version(folder)
    assert before is not None and newest is not None
    held = change(T.StructType.fromJson(json.loads(before["schemaString"])))
    configuration = {**before["configuration"], "delta.columnMapping.mode": mode}
    metadata = {**before, "schemaString": held.json(), "configuration": configuration}
    without_spark.write(folder, newest + 1, [{"metaData": metadata}], "DROP COLUMNS")
    return held


def without_v(held: T.StructType) -> T.StructType:
    return T.StructType([each for each in held if each.name != "v"])


def without_field(held: T.StructType) -> T.StructType:
    """The columns without the field `b` in the documents of the array `s`."""
    array = T.ArrayType(T.StructType([T.StructField("a", T.IntegerType())]))
    return T.StructType([T.StructField("s", array) if each.name == "s" else each for each in held])


@pytest.mark.parametrize(
    ("mode", "change", "said"),
    [
        ("name", without_v, r"\(v\), dropped or renamed"),
        ("id", without_field, r"\(s\.b\), dropped"),
        ("none", without_v, ""),
    ],
)
def test_what_a_table_had_is_not_added_to_it_again(
    tmp_path: Path, mode: str, change: Callable[[T.StructType], T.StructType], said: str
) -> None:
    """The column would be null in every existing row.

    A column that was recorded by a batch which was killed before the table had it may be added.
    """
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "v": 2, "s": [{"a": 1, "b": 2}]})))
        hop.silver()
        hop.append((2, bson.encode({"_id": 2, "late": 3})))
        hop.silver()
        ops, name = hop.layout.ops("schemas"), str(NAMESPACE)
        writer: Any = SimpleNamespace(spark=SPARK, table=hop.silver_table)
        kept = writer, ops, schemas.latest(SPARK, ops)[name]
        whole = altered(hop, mode, lambda held: held)
        not_yet = T.StructType([each for each in whole if each.name != "late"])
        dropped.check(*kept, not_yet, collection=name, before=1, remedy="")
        held = altered(hop, mode, change)
        dropped.check(*kept, held, collection=name, before=0, remedy="")
        if not said:
            dropped.check(*kept, held, collection=name, before=2, remedy="")
            return
        with pytest.raises(errors.DecisionNeeded, match=f"{said}.*; medallion rebuild"):
            dropped.check(*kept, held, collection=name, before=2, remedy="medallion rebuild")
