"""Restored copies of some layers' files: the later layers miss nothing that is read again or added."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from pipelines.bronze import log as bronze
from pipelines.operations import maintain
from pipelines.spark import jvm, parallel
from tests.harness import bronze_rows
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def bring_back(hop: Hop, copy: Path, layers: tuple[str, ...]) -> None:
    """Replace these layers by their copies, as a process that starts afterwards finds them; the capture continues from its own position."""
    root = Path(hop.settings.lakehouse.root or "")
    for layer in layers:
        shutil.rmtree(root / layer)
        shutil.copytree(copy / layer, root / layer)
    jvm.java_class(hop.spark, "org.apache.spark.sql.delta.DeltaLog").clearCache()
    position = bronze.read_position(hop.spark, hop.bronze.table)
    assert position is not None
    hop.bronze.batch, hop.bronze.offset = position.batch, position.offset


def keys(hop: Hop, collection: str) -> list[list[int]]:
    """The `_id` values in silver, gold and the history."""
    place = (bronze_rows.DB, collection)
    layers = (hop.layout.silver(*place), hop.layout.gold(*place), hop.layout.history(*place))
    return [sorted(row["_id"] for row in hop.spark.table(str(table)).select("_id").collect()) for table in layers]


@pytest.mark.journey
@pytest.mark.parametrize("layers", [("bronze",), ("bronze", "silver", "ops"), ("silver", "ops")], ids=" ".join)
def test_no_event_is_left_out(spark: SparkSession, lakehouse: Path, tmp_path: Path, layers: tuple[str, ...]) -> None:
    """The oplog's events since the copy are captured again in other batches, together with new ones. Gold runs after silver has passed
    them.
    """
    hop, copy = Hop(spark, pipeline(lakehouse, history=True), log="one"), tmp_path / "copy"
    hop.bronze.append({name: [document(1, 11, "c")] for name in "ab"})
    hop.run()
    shutil.copytree(lakehouse, copy)
    since = [document(key, 10 + key, "c") for key in (2, 3)]
    for event in since:
        hop.bronze.append({"a": [event]})
        hop.run()
    bring_back(hop, copy, layers)
    again = since if "bronze" in layers else []
    hop.bronze.append({"a": [*again, document(4, 14, "c")], "b": [document(4, 14, "c")]})
    hop.silver()
    hop.bronze.append({"new": [document(1, 15, "c")]})
    hop.silver()
    hop.bronze.append({"a": [document(6, 16, "c")]})
    hop.run()
    assert keys(hop, "a") == [[1, 2, 3, 4, 6]] * 3
    assert keys(hop, "b") == [[1, 4]] * 3
    assert keys(hop, "new") == [[1]] * 3


@pytest.mark.journey
def test_what_was_deleted_since_stays_so(spark: SparkSession, lakehouse: Path, tmp_path: Path) -> None:
    """Gold and the remembered deletes are older copies, and silver has already applied the deletes: its rows do not show them."""
    hop, copy = Hop(spark, pipeline(lakehouse, history=True), log="one"), tmp_path / "copy"
    hop.bronze.append({"a": [document(key, 10 + key, "c") for key in (1, 2, 3)]})
    hop.bronze.append({"a": [{"op": "d", "key": 1, "at": 21}]})
    hop.run()
    shutil.copytree(lakehouse, copy)
    hop.bronze.append({"a": [{"op": "d", "key": 2, "at": 22}]})
    hop.run()
    bring_back(hop, copy, ("gold", "ops"))
    hop.gold()
    assert hop.documents("a") == [{"_id": 2, "__key": "2"}, {"_id": 3, "__key": "3"}]
    hop.bronze.append({"a": [{"op": "d", "key": 3, "at": 23}, document(4, 24, "c")]})
    for _ in range(2):
        hop.run()
        assert keys(hop, "a")[:2] == [[4]] * 2
    late = document(2, 9, "r")
    hop.bronze.append({"a": [late]})
    hop.run()
    assert keys(hop, "a")[:2] == [[4]] * 2


def trimmed(hop: Hop) -> None:
    """Run maintenance; all of these events are old."""
    kept = dataclasses.replace(hop.settings.maintenance, bronze_retention_days=1)
    maintain.run(hop.spark, dataclasses.replace(hop.settings, maintenance=kept), failures=parallel.Failures())


@pytest.mark.journey
@pytest.mark.parametrize("layers", [("gold",), ("silver", "gold", "ops")], ids=" ".join)
def test_events_that_were_trimmed_since_need_a_snapshot(
    spark: SparkSession, lakehouse: Path, tmp_path: Path, layers: tuple[str, ...]
) -> None:
    """A copy from before the trim lacks events that every layer had applied, and asks for a snapshot. A collection that has applied
    everything continues, however long it was idle.
    """
    hop, copy = Hop(spark, pipeline(lakehouse, history=True), log="one"), tmp_path / "copy"
    hop.bronze.append({name: [document(1, 11, "c")] for name in "ab"})
    hop.bronze.append({"b": [document(2, 11, "c")]})
    hop.run()
    shutil.copytree(lakehouse, copy)
    for key in (2, 3):
        hop.bronze.append({"a": [document(key, 10 + key, "c")]})
        hop.run()
    trimmed(hop)
    assert {row.batch for row in spark.table(str(hop.bronze.table)).select("batch").collect()} == {2, 4}
    bring_back(hop, copy, layers)
    hop.bronze.append({name: [document(4, 14, "c")] for name in "ab"})
    with pytest.raises(errors.DecisionNeeded, match="cases.a.*execute-snapshot"):
        hop.silver()
        hop.gold()
    if "silver" in layers:
        hop.gold()
    assert keys(hop, "b") == [[1, 2, 4]] * 3


@pytest.mark.journey
def test_what_is_left_of_a_removed_table_is_not_taken_for_all(spark: SparkSession, lakehouse: Path) -> None:
    """This also holds if bronze's search started long after the collection's first events, as after every first snapshot."""
    hop = Hop(spark, pipeline(lakehouse), log="one")
    for key in (1, 2, 3):
        hop.bronze.append({name: [document(key, 10 + key, "c")] for name in "ab"})
    hop.run()
    trimmed(hop)
    shutil.rmtree(hop.silver_table("a").path or "")
    hop.bronze.append({name: [document(4, 14, "c")] for name in ("a", "b", "new")})
    with pytest.raises(errors.DecisionNeeded, match="cases.a.*execute-snapshot"):
        hop.silver()
    assert [len(hop.rows(name)) for name in ("b", "new")] == [4, 1]
