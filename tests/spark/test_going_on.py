"""Silver and gold continue correctly after a collection failed, or was restored, repaired or dropped."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta.writer import Writer
from pipelines.gold import history
from pipelines.gold import run as gold
from pipelines.operations import rebuild
from pipelines.silver import ranges
from pipelines.silver import run as silver
from pipelines.silver.collection import SilverCollection
from pipelines.spark import parallel
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture
def hop(spark: SparkSession, lakehouse: Path) -> Hop:
    return Hop(spark, pipeline(lakehouse))


def running(hop: Hop) -> silver._SilverRun:
    """A running service of silver."""
    return silver._SilverRun(hop.spark, hop.settings, False, parallel.Pool(hop.spark, None), threading.Event())


def keys(hop: Hop, collection: str) -> dict[int, Any]:
    return {row["_id"]: row.get("v") for row in hop.rows(collection)}


def test_what_came_while_a_collection_failed_is_not_forgotten(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other collections continue and the run ends normally; the next run applies the events of the failed collection."""
    hop.bronze.append({"a": [document(1, 10, "c", v=1)], "b": [document(1, 11, "c", v=1)]})
    hop.silver()
    service, apply = running(hop), ranges.apply

    def failing(collection: SilverCollection, *given: Any, **named: Any) -> Any:
        if collection.namespace.collection == "a":
            raise errors.DecisionNeeded("a pin that cannot be")
        return apply(collection, *given, **named)

    with monkeypatch.context() as broken:
        broken.setattr(ranges, "apply", failing)
        for at in (20, 30, 40):
            hop.bronze.append(
                {"b": [document(at, at, "c", v=1)], **({"a": [document(2, 20, "c", v=2)]} if at == 20 else {})}
            )
            service.run_round()
        service.close()
    hop.bronze.append({"a": [document(3, 50, "c", v=3)]})
    hop.silver()
    assert keys(hop, "a") == {1: 1, 2: 2, 3: 3}


def test_a_restore_under_a_service_is_gone_on_from(hop: Hop) -> None:
    """The table is read again, and the events after the restored version are applied again, however long the collection was idle."""
    service = running(hop)
    hop.bronze.append({"a": [document(1, 10, "c", v=1)], "b": [document(1, 11, "c", v=1)]})
    service.run_round()
    table = hop.silver_table("a")
    version = table_history.version(hop.spark, table)
    hop.bronze.append({"a": [document(1, 20, v=2), document(2, 21, "c", v=1)]})
    service.run_round()
    hop.bronze.append({"b": [document(2, 30, "c", v=1)]})
    service.run_round()
    hop.spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {version}").collect()
    hop.bronze.append({"a": [document(3, 40, "c", v=1)]})
    for _ in range(3):
        service.run_round()
    assert not service.failures.by_name
    service.close()
    assert keys(hop, "a") == {1: 2, 2: 1, 3: 1}


def test_a_table_that_could_not_be_read_at_the_start_is_tried_again(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the store passes: the service brings the collection up to date without a restart.

    Meanwhile other collections keep the schemas of their tables, one of which a rebuild created.
    """
    monkeypatch.setattr(parallel, "RETRY_SECONDS", 0.0)
    hop.bronze.append({"a": [document(1, 10, "c", v=1)], "b": [document(1, 11, "c", v=1)], "c": [document(1, 12, v=1)]})
    hop.bronze.append({"c": [document(1, 13, v="x")]})
    hop.silver()
    rebuild.run(hop.spark, hop.settings, collection="cases.c")
    hop.bronze.append({name: [document(1, 20, v=2)] for name in "ab"})
    service, position = running(hop), registry.silver_position

    def failing(spark: SparkSession, table: tables.TableRef) -> registry.SilverPosition:
        if table == hop.silver_table("a"):
            raise errors.StoreUnreachable("the store does not answer")
        return position(spark, table)

    with monkeypatch.context() as broken:
        broken.setattr(registry, "silver_position", failing)
        service.run_round()
    assert keys(hop, "a") == {1: 1} and keys(hop, "b") == {1: 2}
    service.run_round()
    hop.bronze.append({"c": [document(1, 30, v=3)]})
    service.run_round()
    assert not service.failures.by_name
    service.close()
    assert keys(hop, "a") == {1: 2} and keys(hop, "c") == {1: "3"}


def test_gold_is_written_anew_from_a_table_that_was_restored(hop: Hop) -> None:
    """If the batches are applied again with other settings, their rows differ although gold is at the same batch. It does not follow the
    table back, before its events are applied again."""
    collection = {"delete.tombstone.handling.mode": "drop"}
    kept = Hop(hop.spark, pipeline(hop.settings.lakehouse.root, {"a": collection}))
    kept.bronze.append({"a": [document(1, 10, "c", v=1), document(2, 11, "c", v=1)]})
    kept.run()
    table = kept.silver_table("a")
    version = table_history.version(hop.spark, table)
    kept.bronze.append({"a": [{"op": "d", "key": 2, "at": 20}]})
    kept.run()
    assert [row["_id"] for row in kept.documents("a")] == [1, 2]
    hop.spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {version}").collect()
    assert hop.gold().collections == ()
    hop.run()
    assert list(keys(hop, "a")) == [row["_id"] for row in hop.documents("a")] == [1]
    before = table_history.version(hop.spark, hop.gold_table("a"))
    hop.run()
    assert table_history.version(hop.spark, hop.gold_table("a")) == before


def test_a_replay_over_a_repaired_table_goes_by_the_sequence(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is 0 and the rows exist. After a stop behind any range no row is older than before, and no deleted row returns."""
    hop = Hop(hop.spark, pipeline(hop.settings.lakehouse.root, **{"max.batch.events": 2}))
    hop.bronze.append({"a": [document(1, 10, "c", v=1), document(2, 11, "c", v=1)]})
    hop.bronze.append({"a": [document(1, 20, v=2), {"op": "d", "key": 2, "at": 21}]})
    hop.silver()
    writer = Writer.claim(hop.spark, hop.silver_table("a"))
    writer.mark(to=0)  # as after `medallion repair`
    writer.release()
    service, range_of = running(hop), ranges._range

    def first_only(*given: Any, **named: Any) -> Any:
        service.stop.set()
        return range_of(*given, **named)

    with monkeypatch.context() as stopped:
        stopped.setattr(ranges, "_range", first_only)
        service.run_round()
        service.close()
    assert keys(hop, "a") == {1: 2}
    hop.run()
    assert keys(hop, "a") == {1: 2} and {row["_id"] for row in hop.documents("a")} == {1}


def test_a_history_that_fails_hinders_no_documents(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported separately, and the collection's current documents continue in every round."""
    hop = Hop(spark, pipeline(lakehouse, history=True))

    def refused(*_: Any, **__: Any) -> int:
        raise errors.DecisionNeeded("columns cannot change in place")

    monkeypatch.setattr(history.History, "brought_up", refused)
    service = gold._GoldRun(spark, hop.settings, False, parallel.Pool(spark, None), threading.Event())
    for v in (1, 2):
        hop.bronze.append({"a": [document(1, 10 * v, v=v)]})
        hop.silver()
        service.published()
    assert list(service.failures.by_name) == ["cases.a (history)"]
    service.close()
    assert [row["v"] for row in hop.documents("a")] == [2]


def test_a_long_backlog_lets_the_others_have_their_turn(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a service a round ends after the range in which its time ran out; the next round continues there, so that each makes progress."""
    monkeypatch.setattr(parallel, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(parallel, "TURN_SHARE", 0)
    hop = Hop(spark, pipeline(lakehouse, {"a": {"max.batch.events": 1, "history": True}}))
    for at in (10, 20, 30):
        hop.bronze.append({"a": [document(1, at, v=at)], **({"b": [document(2, at, v=at)]} if at == 30 else {})})
    service, rounds = running(hop), []
    for _ in range(4):
        found = {each.namespace: (each.to, each.events) for each in service.run_round().collections}
        rounds.append([found.get(f"cases.{name}") for name in ("a", "b")])
    service.close()
    assert rounds == [[(1, 1), (3, 1)], [(2, 1), None], [(3, 1), None], [None, None]]
    versions = gold._GoldRun(spark, hop.settings, False, parallel.Pool(spark, None), threading.Event(), turn_seconds=0.0)
    table, ends = hop.layout.history("cases", "a"), []
    for _ in range(4):
        versions.published()
        ends.append(table_history.standing(spark, table).metadata["to"])
    versions.close()
    assert ends == [1, 2, 3, 3] and keys(hop, "a") == {1: 30}
    assert spark.table(str(table)).count() == 3
