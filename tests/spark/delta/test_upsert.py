"""Rows that are newer than all stored ones are written to silver without MERGE: deletion vectors and new files in one commit."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JError

from cdc_core import errors
from pipelines.bronze import collection_events, survey
from pipelines.delta import direct_log, maintenance
from pipelines.delta.writer import Writer
from pipelines.silver import evolve
from tests.harness import bronze_rows, processes
from tests.harness.layers import Hop, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches with few changes also use Spark."""
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", -1)


@contextlib.contextmanager
def by_this_process() -> Iterator[None]:
    """Apply a test's first events without Spark, with the usual files and without a query."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection_events, "LOCAL_EVENTS", FEW)
        yield


FEW = collection_events.LOCAL_EVENTS


def doc(key: int, n: object, *, at: int, op: str = "u") -> dict[str, Any]:
    return {"op": op, "key": key, "at": at, "after": {"_id": key, "n": n}}


def gone(key: int, *, at: int) -> dict[str, Any]:
    return {"op": "d", "key": key, "at": at}


def changed(key: int, n: object, *, at: int) -> dict[str, Any]:
    """An update that only contains the changed fields."""
    return {"op": "u", "key": key, "at": at, "update": {"n": n}}


@pytest.fixture(scope="module")
def begun(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """A table of five documents."""
    found = Hop(spark, pipeline(tmp_path_factory.mktemp("begun")))
    found.bronze.append({"t": [doc(key, 0, at=10 + key, op="c") for key in range(5)]})
    with by_this_process():
        found.silver()
    return found


@pytest.fixture
def hop(begun: Hop, tmp_path: Path) -> Hop:
    """The same table in a lakehouse for one test."""
    return begun.copied(tmp_path)


def numbers(hop: Hop) -> dict[int, Any]:
    return {row["_id"]: row.get("n") for row in hop.rows("t")}


def operations(hop: Hop) -> list[str]:
    """The operation of each commit that added files, newest first."""
    log = Path(hop.layout.root or "") / "silver" / bronze_rows.DB / "t" / "_delta_log"
    found = []
    for file in sorted(log.glob("*.json"), reverse=True):
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        if any("add" in action for action in actions):
            found += [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action]
    return found


def test_newer_rows_replace_and_remove_by_deletion_vectors(hop: Hop) -> None:
    """Two batches touch the same files, so that their deletion vectors grow. A batch with a late event uses MERGE."""
    hop.bronze.append(
        {"t": [doc(0, 1, at=20), doc(1, 1, at=21), doc(1, 2, at=22), gone(2, at=23), doc(7, 1, at=24, op="c")]}
    )
    hop.silver()
    assert numbers(hop) == {0: 1, 1: 2, 3: 0, 4: 0, 7: 1}
    hop.bronze.append({"t": [doc(3, 1, at=30), doc(0, 3, at=31), gone(7, at=32), gone(99, at=33)]})
    hop.silver()
    assert numbers(hop) == {0: 3, 1: 2, 3: 1, 4: 0}
    assert operations(hop) == ["WRITE", "WRITE", "WRITE"]
    hop.bronze.append({"t": [doc(4, 9, at=5), doc(2, 9, at=6), doc(1, 5, at=40)]})
    hop.silver()
    assert numbers(hop) == {0: 3, 1: 5, 3: 1, 4: 0}
    assert operations(hop)[0] == "MERGE"


def test_what_is_older_than_a_sweep_is_late(spark: SparkSession, tmp_path: Path) -> None:
    """A sweep marked the row as deleted; an event from before the sweep does not restore it."""
    hop = Hop(spark, pipeline(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"}))
    hop.bronze.append({"t": [doc(1, 0, at=10, op="c")]})
    with by_this_process():
        hop.silver()
    hop.bronze.append({"t": [{"sweep": 30}]})
    hop.silver()
    hop.bronze.append({"t": [doc(1, 1, at=20)]})
    hop.silver()
    assert [(row["_id"], row["__deleted"]) for row in hop.rows("t")] == [(1, True)]


def test_a_commit_in_between_is_seen(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is compacted while the rows are written: they are written again, for its new version."""
    deleting, calls = direct_log.DeletionVectors.actions_of_few, []

    def late(self: Any, *arguments: Any) -> Any:
        found = deleting(self, *arguments)
        if not calls:
            maintenance.optimize(hop.spark, hop.silver_table("t"))
        calls.append(1)
        return found

    hop.bronze.append({"t": [doc(9, 9, at=19, op="c")]})
    hop.silver()
    monkeypatch.setattr(direct_log.DeletionVectors, "actions_of_few", late)
    hop.bronze.append({"t": [doc(0, 1, at=20), gone(9, at=21)]})
    hop.silver()
    assert len(calls) == 2
    assert numbers(hop) == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that searched for rows to replace; every batch counts as large, and its rows are searched for early."""
    deleting, found = direct_log.DeletionVectors.actions, []

    def noted(self: Any, *arguments: Any) -> Any:
        found.append(threading.current_thread().name.partition("_")[0])
        return deleting(self, *arguments)

    monkeypatch.setattr(direct_log.DeletionVectors, "actions", noted)
    monkeypatch.setattr(survey, "MAX_DRIVER_ROWS", 0)
    return found


def test_rows_are_looked_for_beside_the_reading(hop: Hop, searches: list[str]) -> None:
    """The early result is used. If the table has a new version, here with a new column, the search is repeated."""
    hop.bronze.append({"t": [doc(0, 1, at=20), doc(0, 2, at=21), gone(1, at=22), doc(7, 1, at=23, op="c")]})
    hop.silver()
    assert numbers(hop) == {0: 2, 2: 0, 3: 0, 4: 0, 7: 1}
    assert searches == ["medallion-seek"]
    hop.bronze.append({"t": [{"op": "u", "key": 2, "at": 30, "after": {"_id": 2, "n": 5, "new": True}}]})
    hop.silver()
    assert numbers(hop) == {0: 2, 2: 5, 3: 0, 4: 0, 7: 1}
    assert searches == ["medallion-seek", "medallion-seek", "medallion-upsert"]
    assert operations(hop)[0] == "WRITE"


@pytest.mark.parametrize("few", [0, 2_000], ids=["many", "few"])
def test_files_of_other_keys_are_not_read(hop: Hop, monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """New documents usually have greater keys than all others: the search for them does not read existing files."""
    monkeypatch.setattr(survey, "MAX_DRIVER_ROWS", few)
    folder = Path(hop.layout.root or "") / "silver" / bronze_rows.DB / "t"
    (before,) = folder.glob("*.parquet")
    taken = before.rename(folder / "_taken")
    hop.bronze.append({"t": [doc(8, 1, at=20, op="c"), doc(9, 1, at=21, op="c"), doc(9, 2, at=22)]})
    hop.silver()
    taken.rename(before)
    assert numbers(hop) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 8: 1, 9: 2}


def test_folded_rows_are_replaced_where_they_were_read(
    spark: SparkSession, tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of the rows are known from reading the stored documents. If the table was compacted meanwhile, the rows are searched for
    by key.
    """
    hop = Hop(spark, pipeline(tmp_path, **{"keep.document": True}))
    hop.bronze.append({"t": [doc(key, 0, at=10 + key, op="c") for key in range(5)]})
    with by_this_process():
        hop.silver()
    hop.bronze.append({"t": [changed(1, 1, at=20), changed(1, 2, at=21), gone(2, at=22), doc(9, 9, at=23, op="c")]})
    hop.silver()
    assert numbers(hop) == {0: 0, 1: 2, 3: 0, 4: 0, 9: 9}
    assert (searches, operations(hop)[0]) == (["medallion-seek"], "WRITE")
    evolve_once, looks = evolve.evolve, itertools.count(1)

    def compacted(*arguments: Any, **named: Any) -> Any:
        found = evolve_once(*arguments, **named)
        if next(looks) == 2:  # after the fold, during which the rows are searched for
            processes.until(lambda: len(searches) > 1, seconds=60, what="the search for rows")
            maintenance.optimize(spark, hop.silver_table("t"))
        return found

    monkeypatch.setattr(evolve, "evolve", compacted)
    hop.bronze.append({"t": [changed(3, 5, at=30), changed(9, 8, at=31)]})
    hop.silver()
    assert numbers(hop) == {0: 0, 1: 2, 3: 5, 4: 0, 9: 8}
    assert (searches[1:], operations(hop)[0]) == (["medallion-seek", "medallion-upsert"], "WRITE")


def test_the_row_of_an_unreadable_event_stays(hop: Hop, searches: list[str]) -> None:
    """The search for its key began before the event was known to be unreadable: its result is discarded."""
    hop.bronze.append({"t": [doc(0, 1, at=20), {"op": "u", "key": 3, "at": 21, "text": '{"_id": 3, "n": '}]})
    hop.silver()
    assert numbers(hop) == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}
    assert searches == ["medallion-seek"]
    assert operations(hop)[0] == "MERGE"


def test_another_writer_is_not_overwritten(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is claimed by another writer while the rows are written: the first writer stops and changes nothing."""
    deleting = direct_log.DeletionVectors.actions_of_few

    def late(self: Any, *arguments: Any) -> Any:
        found = deleting(self, *arguments)
        Writer.claim(hop.spark, hop.silver_table("t"), take_over=True)
        return found

    monkeypatch.setattr(direct_log.DeletionVectors, "actions_of_few", late)
    hop.bronze.append({"t": [doc(0, 1, at=20)]})
    with pytest.raises(errors.OwnershipLost):
        hop.silver()
    assert numbers(hop) == dict.fromkeys(range(5), 0)


def test_another_delta_gets_a_merge(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes may have other methods."""

    def missing(*_: Any) -> Any:
        raise Py4JError("Method filterFiles([]) does not exist")

    monkeypatch.setattr(direct_log.DeletionVectors, "actions_of_few", missing)
    hop.bronze.append({"t": [doc(0, 1, at=20), gone(1, at=21)]})
    hop.silver()
    assert numbers(hop) == {0: 1, 2: 0, 3: 0, 4: 0}
    assert operations(hop)[0] == "MERGE"


@pytest.mark.journey
def test_a_change_feed_gets_its_updates_from_merge(hop: Hop) -> None:
    """Readers of the change feed see updates instead of deletes and inserts."""
    hop.spark.sql(f"ALTER TABLE {hop.silver_table('t')} SET TBLPROPERTIES (delta.enableChangeDataFeed = true)").collect()
    hop.bronze.append({"t": [doc(0, 1, at=20)]})
    hop.silver()
    assert numbers(hop)[0] == 1
    assert operations(hop)[0] == "MERGE"


def test_rows_that_are_tracked_stay_the_same_rows(hop: Hop) -> None:
    """Their row IDs survive an update; a row that is deleted and inserted again would get a new one."""
    table = hop.silver_table("t")
    hop.spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES (delta.enableRowTracking = true)").collect()
    found = hop.spark.table(str(table)).selectExpr("__key", "_metadata.row_id AS id")
    before = {row["__key"]: row["id"] for row in found.collect()}
    hop.bronze.append({"t": [doc(0, 1, at=20)]})
    hop.silver()
    assert numbers(hop)[0] == 1 and operations(hop)[0] == "MERGE"
    after = hop.spark.table(str(table)).selectExpr("__key", "_metadata.row_id AS id").collect()
    assert {row["__key"]: row["id"] for row in after} == before
