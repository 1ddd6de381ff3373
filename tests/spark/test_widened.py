"""Types that get wider: no table is written again by Spark for it, and the result is what Spark's way gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipelines.bronze import collection_events
from pipelines.delta import live_files
from pipelines.delta.writer import Writer
from pipelines.gold import in_process as gold_in_process
from pipelines.gold.current import GoldTable
from pipelines.gold.history import History
from pipelines.silver import ranges
from tests.harness import bronze_rows
from tests.harness.layers import Hop, Row, killed_at, pipeline, table_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = {"$numberLong": str(2**40)}
BATCHES: list[list[dict[str, Any]]] = [
    [{"op": "c", "key": key, "at": 10, "after": {"_id": key, "a": key, "b": {"c": [key]}, "d": key}} for key in range(4)],
    [
        {"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "a": 1.5, "b": {"c": [1]}, "d": 1, "new": "x"}},
        {"op": "d", "key": 2, "at": 21},
    ],
    [
        {"op": "u", "key": 1, "at": 30, "after": {"_id": 1, "a": 2, "b": {"c": [1, 2.5], "e": 1}, "d": LONG}},
        {"op": "c", "key": 7, "at": 31, "after": {"_id": 7, "d": "no number"}},
    ],
]


def pair(spark: SparkSession, root: Path) -> Hop:
    return Hop(spark, pipeline(root, history=True))


def content(hop: Hop) -> dict[str, tuple[list[tuple[str, str]], list[Row]]]:
    """Types and rows of the collection's tables."""
    tables = {
        "silver": hop.silver_table("t"),
        "gold": hop.gold_table("t"),
        "history": hop.layout.history(bronze_rows.DB, "t"),
    }
    found = {}
    for name, table in tables.items():
        rows = sorted(table_rows(hop.spark, table), key=lambda row: (row["__key"], row.get("__sequence", "")))
        found[name] = hop.spark.table(str(table)).dtypes, rows
    return found


@pytest.fixture
def no_spark_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Refuse the queries that would apply a batch, or write a table again."""

    def refuse() -> None:
        def refused(*given: Any, **named: Any) -> Any:
            raise AssertionError("a query")

        monkeypatch.setattr(ranges, "STEPS", (refused,))
        monkeypatch.setattr(GoldTable, "rewritten", refused)
        monkeypatch.setattr(GoldTable, "merged", refused)
        monkeypatch.setattr(History, "_write", refused)

    return refuse


def test_a_wider_type_needs_no_query(spark: SparkSession, tmp_path: Path, no_spark_way: Callable[[], None]) -> None:
    """At the top, in a nested document and in an array, together with new columns, deletes and values that still do not fit."""
    hop = pair(spark, tmp_path)
    no_spark_way()
    for batch in BATCHES:
        hop.bronze.append({"t": batch})
        hop.run()
    found = content(hop)
    for types, _ in found.values():
        columns = dict(types)
        assert (columns["a"], columns["b"], columns["d"]) == ("double", "struct<c:array<double>,e:int>", "bigint")
    shown = ("_id", "a", "b", "d", "new")
    assert [[row[name] for name in shown] for row in found["gold"][1]] == [
        [0, 0.0, {"c": [0.0], "e": None}, 0, None],
        [1, 2.0, {"c": [1.0, 2.5], "e": 1}, 2**40, None],
        [3, 3.0, {"c": [3.0], "e": None}, 3, None],
        [7, None, None, None, None],
    ]
    versions = [(row["_id"], row["a"], row["d"], row["new"], row["__until"] is None) for row in found["history"][1]]
    assert versions == [
        (0, 0.0, 0, None, True),
        (1, 1.0, 1, None, False),
        (1, 1.5, 1, "x", False),
        (1, 2.0, 2**40, None, True),
        (2, 2.0, 2, None, False),
        (3, 3.0, 3, None, True),
        (7, None, None, None, True),
    ]


@pytest.mark.journey
def test_a_wider_type_gives_what_queries_give(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hops = [pair(spark, tmp_path / way) for way in ("here", "by_spark")]
    for batch in BATCHES:
        for hop in hops:
            hop.bronze.append({"t": batch})
        hops[0].run()
        with monkeypatch.context() as patch:
            patch.setattr(collection_events, "LOCAL_EVENTS", -1)
            patch.setattr(gold_in_process.SourceFiles, "of", lambda *tables: None)
            hops[1].run()
    found, expected = map(content, hops)
    assert found == expected


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_the_commit_of_a_wider_type_it_goes_on(spark: SparkSession, tmp_path: Path, after: bool) -> None:
    hops = [pair(spark, tmp_path / way) for way in ("killed", "whole")]
    for hop in hops:
        for batch in BATCHES[:2]:
            hop.bronze.append({"t": batch})
            hop.silver()
            if hop is hops[0] and batch is BATCHES[1]:
                killed_at(hop.gold, Writer, "overwrite_arrow", after=after)
            hop.gold()
    found, expected = map(content, hops)
    assert found == expected


def test_what_another_writer_deletes_meanwhile_does_not_come_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions were read before a DELETE: all of them are read again."""
    hop = pair(spark, tmp_path)
    hop.bronze.append({"t": BATCHES[0]})
    hop.run()
    table = hop.layout.history(bronze_rows.DB, "t")
    rows, calls = live_files.LiveFiles.rows, []

    def late(self: live_files.LiveFiles, *given: Any) -> Any:
        found = rows(self, *given)
        if self.folder == Path(table.path or "") and not calls:
            calls.append(len(found))
            spark.sql(f"DELETE FROM {table} WHERE _id = 0").collect()
        return found

    monkeypatch.setattr(live_files.LiveFiles, "rows", late)
    hop.bronze.append({"t": BATCHES[1]})
    hop.run()
    monkeypatch.undo()
    hop.run()
    assert calls and {row["_id"] for row in table_rows(spark, table)} == {1, 2, 3}
