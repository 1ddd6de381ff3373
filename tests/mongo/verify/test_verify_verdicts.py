"""Verify with a real server: which differences do not count, and how an impossible comparison ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse
from cdc_core.settings.parse import Settings
from cdc_core.tables.layout import Layer
from pipelines.bronze.registry import Namespace
from pipelines.delta import owners
from pipelines.delta import tables as delta
from pipelines.silver import run as silver
from pipelines.verify import comparison, repair
from pipelines.verify import run as verify
from tests.harness import sessions
from tests.harness.captures import QUICK, Running, once, pipeline, table, until
from tests.harness.verifications import kinds, only, play

pytestmark = pytest.mark.journey  # minutes on a slow machine


def test_a_time_that_the_server_does_not_hold_is_a_decision(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """The executors' error for a time outside the server's snapshot window is reported as such, not as a bug."""
    database.orders.insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    with pytest.raises(errors.DecisionNeeded, match="leave out --as-of"):
        verify.refuse(verify.run(spark, found, verify.VerifyOptions(as_of="1000000000")))
    assert only(verify.run(spark, found, verify.VerifyOptions())).is_equal


def test_columns_that_settings_made_are_nothing_of_a_document(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Columns of an earlier `add.fields`, and a column whose field got another name, are not compared as fields. Names may contain dots."""
    database.orders.insert_many([{"_id": n, "op": n, "a.b": n} for n in range(3)])
    found = pipeline(mongodb_uri, lakehouse, database.name)
    before = with_silver(found, {"add.fields": "op,ts_ms", "add.fields.prefix": ""})
    play(spark, before)
    after = with_silver(found, {})
    for settings in (before, after):
        database.orders.update_one({"_id": 1}, {"$inc": {"op": 1}})
        play(spark, settings)
        for layer in Layer:
            result = only(verify.run(spark, settings, verify.VerifyOptions(layer=layer)))
            assert (result.is_equal, result.equal) == (True, 3), result.differences
    assert "op_2" in spark.table(str(delta.layout(found.lakehouse).gold(database.name, "orders"))).columns


def test_however_many_differ_at_first_sight_those_that_are_wrong_are_named(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that changed before the second comparison are equal, and rows that the settings keep hide no difference."""
    monkeypatch.setattr(comparison, "MOST_WRONG", 5)
    monkeypatch.setattr(comparison, "SLICE", 3)
    database.orders.insert_many([{"_id": n, "n": n} for n in range(30)])
    found = with_silver(pipeline(mongodb_uri, lakehouse, database.name), {"delete.tombstone.handling.mode": "drop"})
    play(spark, found)
    database.orders.update_many({"_id": {"$lt": 10}}, {"$inc": {"n": 1}})
    settled = comparison.CollectionComparison._settled

    def behind_a_run(self: Any, keys: Any) -> Any:
        play(spark, found)
        return settled(self, keys)

    with monkeypatch.context() as patched:
        patched.setattr(comparison.CollectionComparison, "_settled", behind_a_run)
        result = only(verify.run(spark, found, verify.VerifyOptions()))
    assert (result.is_equal, result.equal) == (True, 30), result.differences
    database.orders.delete_many({"_id": {"$lt": 10}})
    play(spark, found)
    gold = delta.layout(found.lakehouse).gold(database.name, "orders")
    spark.sql(f"UPDATE {gold} SET n = -1 WHERE _id = 20")
    differing = only(verify.run(spark, found, verify.VerifyOptions()))
    assert (kinds(differing), differing.kept, differing.unsettled) == ({"different": ["20"]}, 10, 0)
    spark.sql(f"UPDATE {gold} SET n = -1 WHERE _id >= 10")
    many = only(verify.run(spark, found, verify.VerifyOptions()))
    assert (many.different, many.unsettled, many.is_wrong) == (6, 14, True)
    monkeypatch.setattr(comparison, "LOOK_SECONDS", 0.0)
    with pytest.raises(errors.Temporary, match="20 documents differ at first sight"):
        verify.refuse(verify.run(spark, found, verify.VerifyOptions()))


def test_a_collection_that_is_not_captured_any_more_is_not_compared(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Its rows stay in the tables, and are not updated."""
    database.orders.insert_one({"_id": 1})
    database.people.insert_one({"_id": 1})
    play(spark, pipeline(mongodb_uri, lakehouse, database.name))
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"collection.include.list": f"{database.name}.orders"})
    database.people.update_one({"_id": 1}, {"$set": {"n": 1}})
    (result,) = verify.run(spark, found, verify.VerifyOptions()).collections
    assert (result.collection, result.is_equal) == (f"{database.name}.orders", True)
    with pytest.raises(errors.SettingsError, match="is not a captured collection"):
        verify.run(spark, found, verify.VerifyOptions(collection=f"{database.name}.people"))


def test_what_a_rotation_leaves_is_kept(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """If the settings keep the rows, this also holds beside a new collection with the same name; a repair does not remove them."""
    kept = {"collection.drop.handling.mode": "keep", "collection.rename.handling.mode": "keep"}
    found = with_silver(pipeline(mongodb_uri, lakehouse, database.name), kept)
    for year, end in enumerate((lambda: database.orders.rename("of_last_year"), database.orders.drop, lambda: None)):
        database.orders.insert_many([{"_id": f"{year}-{n}"} for n in range(3)])
        play(spark, found)
        end()
    gold = delta.layout(found.lakehouse).gold(database.name, "orders")
    spark.sql(f"INSERT INTO {gold} (`__key`) VALUES ('7')").collect()
    result = only(verify.run(spark, found, verify.VerifyOptions(repair=True)))
    assert (result.is_equal, result.equal, result.kept, result.repaired) == (True, 3, 6, 1), result.differences
    assert spark.table(str(gold)).count() == 9


def test_a_repair_does_not_wait_for_what_the_capture_does_not_read(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection does not exist any more: the capture reports this, and no row arrives."""
    monkeypatch.setattr(repair, "SIGNAL_SECONDS", 30.0)
    database.orders.insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name, **QUICK)
    play(spark, found)
    gone = Namespace(database.name, "gone")
    with Running(spark, found):
        until(lambda: owners.is_held(spark, table(found)))
        repair.through_bronze(spark, found, gone, ["1"], layer=Layer.GOLD, stop=threading.Event())


def test_a_sample_holds_what_the_snapshot_lets_through(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """A repair does not add documents to bronze that the snapshot's filter excludes; changed documents are there whatever the filter."""
    name = f"{database.name}.orders"
    filters = {
        "snapshot.collection.filter.overrides": name,
        f"snapshot.collection.filter.overrides.{name}": '{"n": {"$gte": 5}}',
    }
    database.orders.insert_many([{"_id": n, "n": n} for n in range(10)])
    found = pipeline(mongodb_uri, lakehouse, database.name, **filters)
    play(spark, found)
    database.orders.update_one({"_id": 0}, {"$set": {"m": 1}})
    play(spark, found)
    before = spark.table(str(table(found))).count()
    result = only(verify.run(spark, found, verify.VerifyOptions(sample=50, repair=True)))
    assert (result.is_equal, result.equal) == (True, 6), result.differences
    assert spark.table(str(table(found))).count() == before


def test_rows_that_the_snapshots_filter_excludes_are_compared_where_deletes_are_kept(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """A changed document that the filter excludes has a row, which is no row that a delete has left."""
    name = f"{database.name}.orders"
    filters = {
        "snapshot.collection.filter.overrides": name,
        f"snapshot.collection.filter.overrides.{name}": '{"n": {"$gte": 5}}',
    }
    database.orders.insert_many([{"_id": n, "n": n} for n in range(7)])
    found = with_silver(
        pipeline(mongodb_uri, lakehouse, database.name, **filters), {"delete.tombstone.handling.mode": "drop"}
    )
    play(spark, found)
    database.orders.update_many({"_id": {"$lt": 2}}, {"$set": {"m": 1}})
    database.orders.delete_one({"_id": 6})
    play(spark, found)
    gold = delta.layout(found.lakehouse).gold(database.name, "orders")
    spark.sql(f"UPDATE {gold} SET m = 2 WHERE `__key` = '0'").collect()
    result = only(verify.run(spark, found, verify.VerifyOptions()))
    assert (kinds(result)["different"], result.kept, result.equal) == (["0"], 1, 2), result.differences


def test_gold_is_judged_by_the_columns_that_it_has(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """If silver has widened a column and gold has not yet, other rows do not differ."""
    database.orders.insert_many([{"_id": n, "n": n} for n in range(3)])
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    database.orders.insert_one({"_id": 3, "n": 1.5})
    once(spark, found)
    silver.run(spark, found, once=True, sessions=sessions.kept(spark))
    result = only(verify.run(spark, found, verify.VerifyOptions()))
    assert (kinds(result), result.equal) == ({"waiting": ["3"]}, 3)
    assert only(verify.run(spark, found, verify.VerifyOptions(layer=Layer.SILVER))).equal == 4


def test_rows_of_a_drop_that_silver_has_not_applied_wait(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Silver's next run removes them, and until then they are no difference."""
    database.orders.insert_many([{"_id": n} for n in range(3)])
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    database.orders.drop()
    once(spark, found)
    behind = verify.run(spark, found, verify.VerifyOptions())
    assert kinds(only(behind)) == {"waiting": ["0", "1", "2"]}
    with pytest.raises(errors.Temporary, match="3 documents"):
        verify.refuse(behind)
    play(spark, found)
    assert verify.run(spark, found, verify.VerifyOptions()).is_equal


def test_bronze_is_compared_by_what_its_events_come_to(spark: Any, mongodb_uri: str, database: Any, lakehouse: Path) -> None:
    """Updates are folded, and deletes and drops are applied. A value of another type with the same text is found, whatever silver
    stored, and without a run of silver, too.
    """
    database.people.insert_many([{"_id": n} for n in range(3)])
    database.orders.insert_many(
        [{"_id": n, "n": n, "null": None, "deep": {"list": [1, {"a": n}], "gone": 1}} for n in range(10)]
    )
    found = pipeline(mongodb_uri, lakehouse, database.name, **{"capture.mode": "change_streams"})
    once(spark, found)
    database.people.drop()
    database.people.insert_one({"_id": 2, "again": True})
    database.orders.delete_one({"_id": 0})
    database.orders.update_many({}, {"$set": {"deep.list.1.a": 1.5}, "$unset": {"deep.gone": 1}, "$push": {"tags": "x"}})
    late = verify.VerifyOptions(layer=Layer.BRONZE)
    behind = verify.run(spark, found, late)
    assert (only(behind).waiting, only(behind).is_wrong) == (10, False), only(behind).differences
    once(spark, found)
    clean = verify.run(spark, found, late)
    assert clean.is_equal and clean.is_judged, clean
    assert (only(clean).equal, only(clean, "people").equal) == (9, 1)

    bronze = table(found)
    spark.sql(f"ALTER TABLE {bronze} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    of_orders = "collection = 'orders'"
    spark.sql(f"DELETE FROM {bronze} WHERE {of_orders} AND key = '1'")  # its first event and its update
    spark.sql(f"DELETE FROM {bronze} WHERE {of_orders} AND key = '2' AND op = 'u'")
    spark.sql(f"DELETE FROM {bronze} WHERE {of_orders} AND key = '3' AND op = 'r'")
    plants = {"4": ('"n":4', '"n":4.0'), "5": ('"null":null,', ""), "6": ('"n":6', '"n":{"$numberLong":"6"}')}
    for key, (old, new) in plants.items():
        spark.sql(f"UPDATE {bronze} SET after = replace(after, '{old}', '{new}') WHERE {of_orders} AND key = '{key}'")
    spark.sql(f"DELETE FROM {bronze} WHERE {of_orders} AND key = '0' AND op = 'd'")
    wrong = only(verify.run(spark, found, late))
    assert kinds(wrong) == {"extra": ["0"], "missing": ["1"], "different": ["2", "4", "5", "6"], "incomplete": ["3"]}
    told = {each.key: {(path.path, path.what) for path in each.paths} for each in wrong.differences}
    assert {path for path, _ in told["2"]} == {"deep.gone", "deep.list.1.a", "tags"}
    assert told["4"] == {("n", "int32 in the source, double in the table")}
    assert told["5"] == {("null", "in the source, not in the table")}
    assert told["6"] == {("n", "int32 in the source, int64 in the table")}
    mended = only(verify.run(spark, found, replace(late, repair=True)))
    assert (mended.is_equal, mended.repaired, mended.equal) == (True, 7, 9), mended.differences
    assert only(verify.run(spark, found, replace(late, sample=50))).equal == 9
    play(spark, found)
    assert verify.run(spark, found, verify.VerifyOptions()).is_equal


def with_silver(found: Settings, options: dict[str, Any]) -> Settings:
    """The pipeline with other options of silver."""
    return replace(found, silver=parse.parse({**BARE, "silver": {"defaults": options}}).silver)


BARE = {"name": "shop", "lakehouse": {"root": "unused"}, "source": {"mongodb.connection.string": "mongodb://unused"}}
