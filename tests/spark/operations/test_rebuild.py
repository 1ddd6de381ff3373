"""Rebuild: the table as bronze's events make it, whatever the live one holds, swapped in one commit or not at all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.delta import table_comparison, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import models
from pipelines.operations import maintain, rebuild, repair
from pipelines.operations import quarantine as quarantines
from pipelines.operations import schema as evolution
from pipelines.silver import ranges
from pipelines.silver import rebuild as silver_rebuild
from pipelines.silver import tables as silver_tables
from pipelines.spark import parallel
from tests.harness import bronze_rows
from tests.harness.layers import CASES, Hop, Killed, document, forget_claims, killing, lose, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = "orders"
LONG, EXACT, INEXACT = {"$numberLong": "5"}, {"$numberLong": "9007199254740992"}, {"$numberLong": "9007199254740993"}


@pytest.fixture
def hop(spark: SparkSession, lakehouse: Path) -> Hop:
    return Hop(spark, pipeline(lakehouse))


Row = dict[str, Any]


def rebuilt(hop: Hop, collection: str = ORDERS, **named: Any) -> silver_rebuild.RebuildResult:
    return rebuild.run(hop.spark, hop.settings, collection=f"{bronze_rows.DB}.{collection}", **named)


def shadow(hop: Hop, collection: str = ORDERS) -> Path:
    return Path(str(hop.layout.shadow(bronze_rows.DB, collection).root))


def position(hop: Hop) -> registry.SilverPosition:
    return registry.silver_position(hop.spark, hop.silver_table(ORDERS))


@pytest.mark.journey
def test_rebuilt_tables_are_those_that_silver_made(spark: SparkSession, tmp_path: Path) -> None:
    """A rebuild of tables that silver made batch by batch finds no difference, with deletes, sweeps, folds and quarantine; gold follows."""
    names = ("sweep_rewrite", "fold", "unreadable")
    hop = Hop(spark, pipeline(tmp_path, {name: CASES[name].get("options", {}) for name in names}))
    for step in range(max(len(CASES[name]["batches"]) for name in names)):
        hop.bronze.append({name: (CASES[name]["batches"][step : step + 1] or [[]])[0] for name in names})
        hop.silver()
    hop.gold()
    before = {name: (hop.rows(name), hop.documents(name)) for name in names}
    for name in names:
        result = rebuilt(hop, name)
        found = result.comparison
        assert (found.gone, found.new, found.differing, result.changes) == (0, 0, 0, ()), name
        assert found.rows == found.rebuilt_rows == len(before[name][0])
    assert (hop.silver().events, hop.gold().changed > 0) == (0, True)
    assert {name: (hop.rows(name), hop.documents(name)) for name in names} == before


@pytest.mark.journey
def test_what_was_rescued_comes_into_columns(hop: Hop) -> None:
    """Columns with conflicting types are retyped to a common type. The swap is one commit and keeps position and layout."""
    documents = [
        {"exact": LONG, "inexact": INEXACT, "text": 1, "list": [1], "pinned": 1},
        {"exact": 0.5, "inexact": 0.5, "text": "x", "list": ["y"], "pinned": 2},
    ]
    hop.bronze.append({ORDERS: [document(key, 10 + key, "c", **fields) for key, fields in enumerate(documents)]})
    hop.run()
    assert [len(row.get("__rescued", {})) for row in hop.rows(ORDERS)] == [0, 4]
    before = position(hop)
    made = {name: delta.properties(hop.spark, hop.silver_table(ORDERS))[name] for name in silver_tables.PROPERTIES}
    result = rebuilt(hop)
    assert {(c.path, c.from_type, c.to_type) for c in result.changes} == {
        ("exact", "BIGINT", "DOUBLE"),
        ("inexact", "BIGINT", "STRING"),
        ("text", "INT", "STRING"),
        ("list", "ARRAY<INT>", "ARRAY<STRING>"),
    }
    found = {each.column: (each.documents, each.why) for each in result.comparison.differences}
    assert found["exact"] == (2, "type bigint → double")
    assert found["__rescued"] == (1, "what fits no column")
    assert (result.comparison.rescued, result.comparison.rebuilt_rescued) == (4, 0)
    after = position(hop)
    assert (after.to, after.high, after.swept) == (before.to, before.high, before.swept)
    assert after.generation and not before.generation
    commits = [c for c in table_history.newest_first(hop.spark, hop.silver_table(ORDERS)) if c.version > before.version]
    assert [bool((c.metadata or {}).get("generation")) for c in commits] == [True, True, False]  # release, swap, claim
    detail = hop.spark.sql(f"DESCRIBE DETAIL {hop.silver_table(ORDERS)}").first()
    assert detail.clusteringColumns == ["__key"]
    assert {name: detail.properties[name] for name in silver_tables.PROPERTIES} == made
    hop.bronze.append({ORDERS: [document(2, 30, "c", exact=LONG, inexact=7, text="z", list=[2])]})
    hop.run()
    rows = [
        {**fields, "_id": key, "__key": str(key)}
        for key, fields in enumerate(
            (
                {"exact": 5.0, "inexact": '{"$numberLong":"9007199254740993"}', "text": "1", "list": ["1"], "pinned": 1},
                {"exact": 0.5, "inexact": "0.5", "text": "x", "list": ["y"], "pinned": 2},
                {"exact": 5.0, "inexact": "7", "text": "z", "list": ["2"]},
            )
        )
    ]
    assert hop.documents(ORDERS) == rows
    [told] = evolution.read(hop.spark, hop.settings)
    assert {each.name: each.type for each in told.columns}["exact"] == "DOUBLE"
    assert [c.what for c in told.changes if c.version == 2] == ["rebuilt", *["retyped"] * 4]


@pytest.mark.journey
def test_deletes_stay_remembered(hop: Hop) -> None:
    """After a rebuild an event from before a delete does not restore the document, even if the deletes were lost."""
    hop.bronze.append({ORDERS: [document(1, 10, "c"), document(2, 11, "c"), {"op": "d", "key": 1, "at": 20}]})
    hop.run()
    deletes = hop.layout.deletes(bronze_rows.DB, ORDERS)
    rebuilt(hop)
    assert [(row["__key"], row["__batch"]) for row in hop.spark.table(str(deletes)).collect()] == [("1", 1)]
    assert position(hop).deletes == registry.deletes_version(
        hop.spark, deletes
    )  # shows whether the deletes are an older copy
    hop.spark.sql(f"DELETE FROM {deletes}")
    rebuilt(hop)
    hop.bronze.append({ORDERS: [document(1, 15, v="late")]})
    hop.run()
    assert [row["_id"] for row in hop.documents(ORDERS)] == [2]


@pytest.mark.journey
def test_events_of_a_bronze_that_was_made_anew_are_held(spark: SparkSession, tmp_path: Path) -> None:
    """After the rebuild the unreadable events of the new bronze are held once, and those of the old bronze are not."""

    def written(log: str, *broken: int) -> Hop:
        hop = Hop(spark, pipeline(tmp_path), log=log)
        hop.bronze.append(
            {ORDERS: [document(1, 10, "c"), *({"op": "c", "key": key, "at": key, "text": "{"} for key in broken)]}
        )
        return hop

    def held(hop: Hop) -> list[str | None]:
        table = hop.layout.quarantine(bronze_rows.DB, ORDERS)
        return sorted(each.key for each in quarantines.listed(spark, table))

    hop = written("first", 7, 8)
    hop.silver()
    shutil.rmtree(hop.bronze.table.path or "")
    hop = written("second", 9)
    for _ in range(2):
        assert rebuilt(hop, drops_lost=True).version is not None
    assert held(hop) == ["9"]
    assert spark.table(str(hop.layout.quarantine(bronze_rows.DB, ORDERS))).count() == 1


@pytest.mark.journey
def test_a_damaged_table_is_mended(hop: Hop, tmp_path: Path) -> None:
    """Rows that others changed or removed are restored from bronze and reported, and so are models over them."""
    hop.bronze.append({ORDERS: [document(key, 10 + key, "c", v=key) for key in range(4)]})
    hop.run()
    hop.spark.sql(f"DELETE FROM {hop.silver_table(ORDERS)} WHERE _id = 3")
    hop.spark.sql(f"UPDATE {hop.silver_table(ORDERS)} SET v = 99 WHERE _id = 2")
    found = rebuilt(hop, is_trial=True)
    assert (found.version, found.comparison.new, found.comparison.differing) == (None, 1, 1)
    assert found.comparison.differences == (table_comparison.ColumnDifference("v", 1, "the value", ("2",)),)
    assert [row["v"] for row in hop.rows(ORDERS)] == [0, 1, 99]
    assert rebuilt(hop).version is not None
    hop.gold()
    assert [row["v"] for row in hop.documents(ORDERS)] == [0, 1, 2, 3]
    hop.spark.sql(f"UPDATE {hop.gold_table(ORDERS)} SET v = 99 WHERE _id = 2")
    (folder := tmp_path / "models").mkdir()
    (folder / "most.sql").write_text(f"SELECT max(v) AS v FROM {{{{ ref('{bronze_rows.DB}.{ORDERS}') }}}}")
    modelled = replace(hop.settings, gold=replace(hop.settings.gold, models=str(folder)))
    assert models.run(hop.spark, modelled).made == 1
    found = rebuilt(hop, layer=rebuild.Layer.GOLD)
    assert [models.run(hop.spark, modelled).made for _ in range(2)] == [1, 0]
    assert [(each.column, each.keys) for each in found.comparison.differences] == [("v", ("2",))]
    assert [row["v"] for row in hop.documents(ORDERS)] == [0, 1, 2, 3]
    assert hop.gold().changed == 0


def test_a_repaired_table_is_rebuilt_whole_and_gold_waits_for_it(spark: SparkSession, tmp_path: Path) -> None:
    """A repair sets the position to the beginning, which says nothing about bronze's content: no document is lost in either layer."""
    hop = Hop(spark, pipeline(tmp_path))
    for key in (1, 2):
        hop.bronze.append({ORDERS: [document(key, 10 * key, "c")]})
        hop.run()
    wanted = hop.documents(ORDERS)
    lose(spark, hop.silver_table(ORDERS))
    repair.run(spark, hop.settings, failures=parallel.Failures())
    with pytest.raises(errors.DecisionNeeded, match="nothing has been applied yet"):
        rebuilt(hop, layer=rebuild.Layer.GOLD)
    assert hop.documents(ORDERS) == wanted
    found = rebuilt(hop)
    assert (found.to, found.comparison.lost, len(hop.rows(ORDERS))) == (2, 0, 2)
    assert (hop.silver().events, hop.gold().changed, hop.documents(ORDERS)) == (0, 2, wanted)
    shutil.rmtree(tmp_path / "bronze")
    with pytest.raises(errors.DecisionNeeded, match="there is no bronze"):
        rebuilt(hop)


@pytest.mark.journey
def test_documents_that_bronze_does_not_hold_are_not_lost(hop: Hop) -> None:
    """A row without an event or a delete in bronze stops the swap with exit code 3; only an explicit option removes it."""
    hop.bronze.append({ORDERS: [document(1, 10, "c")]})
    hop.silver()
    hop.spark.sql(
        f"INSERT INTO {hop.silver_table(ORDERS)} SELECT 7, false, null, null, '7', __sequence, 1 FROM {hop.silver_table(ORDERS)}"
    )
    result = rebuilt(hop)
    assert (result.version, result.comparison.lost, result.comparison.lost_keys) == (None, 1, ("7",))
    with pytest.raises(errors.DecisionNeeded, match="not swapped"):
        silver_rebuild.refuse(result)
    assert len(hop.rows(ORDERS)) == 2
    silver_rebuild.refuse(rebuilt(hop, drops_lost=True))
    assert [row["_id"] for row in hop.rows(ORDERS)] == [1]


def test_documents_that_would_be_incomplete_are_not_lost(spark: SparkSession, lakehouse: Path) -> None:
    """Without `keep.document` a rebuild folds no updates: documents would get an old state."""
    hop = Hop(spark, pipeline(lakehouse, **{"keep.document": True}))
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1), document(2, 10, "c", v=1)]})
    hop.bronze.append({ORDERS: [{"op": "u", "key": 1, "at": 20, "update": {"v": 2}}]})
    hop.silver()
    hop.settings = pipeline(lakehouse, **{"keep.document": False})
    result = rebuilt(hop)
    assert (result.version, result.comparison.lost, result.comparison.lost_keys) == (None, 1, ("1",))
    assert [row["v"] for row in hop.rows(ORDERS)] == [2, 1]
    with pytest.raises(errors.DecisionNeeded, match=r"without keep\.document no partial update is applied"):
        silver_rebuild.refuse(result)


def test_a_trimmed_bronze_is_refused(hop: Hop) -> None:
    """If bronze no longer begins with its first batch, nothing is changed."""
    hop.bronze.append({ORDERS: [document(1, 10, "c")]})
    hop.bronze.append({ORDERS: [document(2, 20, "c")]})
    hop.silver()
    hop.spark.sql(f"DELETE FROM {hop.bronze.table} WHERE batch = 1")
    with pytest.raises(errors.DecisionNeeded, match="has batches 2 to 2"):
        rebuilt(hop)
    assert len(hop.rows(ORDERS)) == 2


@pytest.mark.journey
def test_a_bronze_that_is_trimmed_meanwhile_is_refused(
    spark: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are removed that the rebuild has not read yet: it would restore a deleted document, and an old state of another one."""
    hop = Hop(spark, pipeline(lakehouse, **{"max.batch.events": 2}))
    hop.bronze.append({ORDERS: [document(key, 10, "c", v=1) for key in (1, 2)]})
    hop.bronze.append({ORDERS: [document(1, 20, v=2), {"op": "d", "key": 2, "at": 20}]})
    hop.bronze.append({ORDERS: [document(3, 30, "c", v=1)]})
    hop.run()
    before = hop.rows(ORDERS)
    kept = replace(hop.settings, maintenance=replace(hop.settings.maintenance, bronze_retention_days=1))
    applied = ranges.apply

    def trimmed(*given: Any, **named: Any) -> ranges.Progress:
        monkeypatch.setattr(ranges, "apply", applied)
        reached = applied(*given, **named)
        maintain.run(spark, kept, failures=parallel.Failures())
        return reached

    monkeypatch.setattr(ranges, "apply", trimmed)
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
        rebuilt(hop)
    assert hop.rows(ORDERS) == before
    assert {row.batch for row in spark.table(str(hop.bronze.table)).collect()} == {3}


@pytest.mark.journey
def test_a_trimmed_bronze_that_was_read_again_is_enough(hop: Hop) -> None:
    """A rebuild begins with a snapshot of the whole collection that bronze holds."""
    hop.bronze.append({ORDERS: [document(1, 10, "c"), document(2, 20, "c")]})
    hop.silver()
    hop.spark.sql(f"DELETE FROM {hop.bronze.table} WHERE batch = 1")
    hop.bronze.append({ORDERS: [*(document(key, 30, "r") for key in (1, 2)), {"sweep": 30}]})
    hop.silver()
    found = rebuilt(hop)
    assert found.version is not None and (found.comparison.lost, found.comparison.rebuilt_rows) == (0, 2)


def test_a_held_table_is_not_rebuilt(hop: Hop) -> None:
    """While another process owns the table a rebuild stops with TableOwned and changes nothing."""
    hop.bronze.append({ORDERS: [document(1, 10, "c")]})
    hop.run()
    for layer, table in ((rebuild.Layer.SILVER, hop.silver_table(ORDERS)), (rebuild.Layer.GOLD, hop.gold_table(ORDERS))):
        owner = Writer.claim(hop.spark, table)
        before = table_history.version(hop.spark, table)
        with pytest.raises(errors.TableOwned):
            rebuilt(hop, layer=layer)
        assert table_history.version(hop.spark, table) == before
        owner.release()


@pytest.mark.journey
def test_a_writer_that_was_taken_over_swaps_nothing(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes the table over while the shadow is built wins: the rebuild ends with OwnershipLost."""
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1)]})
    hop.silver()
    compared: Callable[..., Any] = table_comparison.compared

    def taken_over(*tables: Any, **named: Any) -> Any:
        Writer.claim(hop.spark, hop.silver_table(ORDERS), take_over=True).release()
        return compared(*tables, **named)

    monkeypatch.setattr(table_comparison, "compared", taken_over)
    with pytest.raises(errors.OwnershipLost):
        rebuilt(hop)
    assert not position(hop).generation
    assert not shadow(hop).exists()


KILLS = [
    (ranges, "apply"),
    (silver_rebuild.SilverRebuild, "_remember"),
    (Writer, "replace"),
]


@pytest.mark.journey
def test_killed_anywhere(hop: Hop) -> None:
    """After a kill at any step silver and gold continue with the old or the new table, and another rebuild succeeds."""
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1), document(9, 11, "c"), {"op": "d", "key": 9, "at": 12}]})
    wanted: dict[int, Row] = {}
    for number, (owner, name) in enumerate(KILLS, start=2):
        wanted[number], wanted[10 * number] = {f"f{number}": "1"}, {f"f{number}": "x"}
        both = [
            document(number, 20 * number, "c", **{f"f{number}": 1}),
            document(10 * number, 20 * number, "c", **wanted[10 * number]),
        ]
        hop.bronze.append({ORDERS: both})
        hop.silver()
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, owner, name, after=True)
            patch.setattr(delta, "remove", lambda *given: None)  # a killed process does not clean up
            with pytest.raises(Killed):
                rebuilt(hop)
        assert shadow(hop).exists()
        forget_claims(hop)
        hop.bronze.append({ORDERS: [document(1, 20 * number + 1, v=-number), document(9, 11, v="late")]})
        hop.run()
        assert [row["v"] for row in hop.documents(ORDERS) if "v" in row] == [-number], name
        found = rebuilt(hop).comparison
        assert (found.gone, found.new, found.rebuilt_rescued) == (0, 0, 0), name
        assert not shadow(hop).exists()
    hop.gold()
    rows = {row["_id"]: {field: row[field] for field in row if field[0] == "f"} for row in hop.documents(ORDERS)}
    assert rows == {1: {}, **wanted}
    assert not any("__rescued" in row for row in hop.documents(ORDERS))
    [told] = evolution.read(hop.spark, hop.settings)
    assert len({change.version for change in told.changes if change.what == "rebuilt"}) == len(KILLS) + 1


@pytest.mark.journey
def test_a_rebuild_that_is_stopped_swaps_nothing(hop: Hop) -> None:
    """A rebuild that is told to stop ends as temporary; it releases its claim and removes the shadow."""
    hop.bronze.append({ORDERS: [document(1, 10, "c")]})
    hop.silver()
    stop = threading.Event()
    stop.set()
    with pytest.raises(errors.Temporary):
        rebuilt(hop, stop=stop)
    assert not position(hop).generation and not shadow(hop).exists()
    last = table_history.last_commit(hop.spark, hop.silver_table(ORDERS))
    assert last is not None and last.metadata is not None and last.metadata["released"]


@pytest.mark.journey
def test_silver_retypes_by_itself_where_the_settings_say_so(spark: SparkSession, lakehouse: Path) -> None:
    """With `schema.on.conflict: retype` a value that fits no column makes silver rebuild the table once and continue.

    This also works if somebody removed the list of collections, and if the table's log was cleaned up after commits of others, and contains
    no position any more.
    """
    hop = Hop(spark, pipeline(lakehouse, **{"schema.on.conflict": "retype"}))
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1, day={"$date": {"$numberLong": "99999999999999999"}})]})
    hop.run()
    hop.bronze.append({ORDERS: [document(2, 20, "c", v="x")], "calm": [document(1, 21, "c", v=1)]})
    hop.run()
    generation = position(hop).generation
    assert generation and not registry.silver_position(spark, hop.silver_table("calm")).generation
    hop.bronze.append({ORDERS: [document(3, 30, "c", v=2.5)]})
    hop.run()
    assert [row["v"] for row in hop.documents(ORDERS)] == ["1", "x", "2.5"]
    assert position(hop).generation == generation
    assert [len(row.get("__rescued", {})) for row in hop.documents(ORDERS)] == [1, 0, 0]
    shutil.rmtree(hop.layout.ops("collections").path or "")
    hop.bronze.append({ORDERS: [document(3, 35, v=3.5)]})
    hop.run()
    table = hop.silver_table(ORDERS)
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '1')").collect()
    newest = table_history.version(spark, table)
    for number in range(newest):
        (Path(table.path or "") / "_delta_log" / f"{number:020}.json").unlink()
    assert table_history.standing(spark, table).position is None
    hop.bronze.append({ORDERS: [document(4, 40, "c", v=True)]})
    hop.run()
    assert [row["v"] for row in hop.documents(ORDERS)] == ["1", "x", "3.5", "true"]
    assert position(hop).generation == generation


@pytest.mark.journey
def test_silver_goes_on_where_it_cannot_retype(
    spark: SparkSession, lakehouse: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If bronze was trimmed, rescued values stay rescued, with a warning, and the events are applied."""
    hop = Hop(spark, pipeline(lakehouse, **{"schema.on.conflict": "retype"}))
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1)]})
    hop.silver()
    spark.sql(f"DELETE FROM {hop.bronze.table} WHERE batch = 1")
    hop.bronze.append({ORDERS: [document(2, 20, "c", v="x")]})
    hop.silver()
    assert hop.rows(ORDERS)[1]["__rescued"] == {"v": '"x"'}
    assert "stay rescued" in caplog.text


def test_updates_of_another_capture_mode_are_folded(spark: SparkSession, lakehouse: Path) -> None:
    """Whole documents are stored as long as `capture.mode` needs them. Bronze still contains updates without documents."""
    hop = Hop(spark, pipeline(lakehouse, **{"keep.document": True}))
    hop.bronze.append({ORDERS: [document(1, 10, "c", v=1), document(2, 10, "c", v=1)]})
    hop.bronze.append({ORDERS: [{"op": "u", "key": 1, "at": 20, "update": {"v": 2}}]})
    hop.silver()
    hop.settings = pipeline(lakehouse, **{"flatten.struct": True})
    result = rebuilt(hop)
    assert result.version is not None and (result.comparison.lost, result.comparison.differing) == (0, 0)
    hop.bronze.append({ORDERS: [{"op": "u", "key": 2, "at": 30, "update": {"v": 3}}, document(1, 31, v=4)]})
    hop.run()
    assert [(row["_id"], row["v"], "__incomplete" in row) for row in hop.rows(ORDERS)] == [(1, 4, False), (2, 3, False)]
    hop.bronze.append({ORDERS: [document(1, 40, v=5)]})
    hop.silver()
    assert position(hop).documents is None  # only of some rows: more updates of the other mode may come


@pytest.mark.journey
@pytest.mark.parametrize("change", ["DROP COLUMN v", "RENAME COLUMN v TO w"])
def test_a_column_that_somebody_took_from_silver_comes_back_by_a_rebuild(hop: Hop, change: str) -> None:
    """If the next batch added it again, it would silently be null in all existing rows."""
    hop.bronze.append({ORDERS: [{"op": "c", "key": key, "at": key, "after": {"_id": key, "v": key}} for key in (1, 2)]})
    hop.run()
    silver = hop.silver_table(ORDERS)
    hop.spark.sql(f"ALTER TABLE {silver} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    hop.spark.sql(f"ALTER TABLE {silver} {change}")
    hop.bronze.append({ORDERS: [{"op": "c", "key": 3, "at": 3, "after": {"_id": 3, "v": 3, "more": 1}}]})
    with pytest.raises(errors.DecisionNeeded, match=rf"\(v\), dropped .*rebuild --collection {bronze_rows.DB}.{ORDERS}"):
        hop.run()
    assert hop.spark.table(str(silver)).count() == 2
    rebuilt(hop)
    hop.run()
    for table in (silver, hop.gold_table(ORDERS)):
        assert sorted(hop.spark.table(str(table)).select("v", "more").collect()) == [(1, None), (2, None), (3, 1)]
