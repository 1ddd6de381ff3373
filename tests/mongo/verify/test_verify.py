"""Verify with a real server and real tables: planted differences are found and repaired, and nothing else is reported."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bson import Decimal128, Int64, ObjectId

from cdc_core import errors
from cdc_core.tables.layout import Layer
from pipelines import run as layers
from pipelines.delta import table_errors
from pipelines.delta import tables as delta
from pipelines.verify import run as verify
from tests.harness.captures import pipeline, until
from tests.harness.verifications import kinds, only, play

pytestmark = pytest.mark.journey  # minutes on a slow machine

PER_KIND = 5


def document(number: int) -> dict[str, Any]:
    return {
        "_id": number,
        "text": f"text {number}",
        "count": number,
        "amount": Decimal128(f"{number}.50"),
        "ratio": number / 7,
        "at": datetime.datetime(2024, 5, 6, 7, 8, number % 60),
        "tags": ["a", {"deep": number}],
        "nested": {"inner": {"n": Int64(2**40 + number)}, "note": "here"},
        "odd": "text" if number % 10 == 3 else number,
        "late": [] if number < 50 else [number],
    }


CHANGED: dict[str, tuple[int, str]] = {
    "text": (110, "concat(text, '!')"),
    "gone": (120, "'a lost $unset'"),
    "count": (130, "count - 1"),
    "ratio": (140, "CAST('NaN' AS DOUBLE)"),
    "at": (150, "at + INTERVAL 1 MILLISECOND"),
    "late": (160, "CAST(NULL AS ARRAY<INT>)"),
    "amount": (170, "concat(amount, '0')"),
    "__rescued": (3, "map('odd', text)"),
}
"""Columns, the first `_id` at which each is changed, and the new value; five rows per column."""


def plant(spark: Any, table: Any) -> dict[str, list[str]]:
    """Plant fifty differences of every kind; returns their keys by the expected kind."""
    step = {name: 10 if name == "__rescued" else 1 for name in CHANGED}
    ids = {name: [first + step[name] * n for n in range(PER_KIND)] for name, (first, _) in CHANGED.items()}
    changes = ", ".join(
        f"`{name}` = CASE WHEN _id IN ({', '.join(map(str, ids[name]))}) THEN {value} ELSE `{name}` END"
        for name, (_, value) in CHANGED.items()
    )
    spark.sql(f"UPDATE {table} SET {changes} WHERE _id IN ({', '.join(str(n) for some in ids.values() for n in some)})")
    spark.sql(f"DELETE FROM {table} WHERE _id BETWEEN 100 AND {100 + PER_KIND - 1}")
    moved = {"_id": "CAST(_id + 800 AS INT)", "__key": "CAST(_id + 800 AS STRING)"}
    columns = ", ".join(f"{moved.get(name, f'`{name}`')} AS `{name}`" for name in spark.table(str(table)).columns)
    spark.sql(f"INSERT INTO {table} SELECT {columns} FROM {table} WHERE _id BETWEEN 200 AND {200 + PER_KIND - 1}")
    return {
        "missing": sorted(str(100 + n) for n in range(PER_KIND)),
        "different": sorted(str(n) for some in ids.values() for n in some),
        "extra": sorted(str(1000 + n) for n in range(PER_KIND)),
    }


def test_fifty_planted_differences_are_found_and_repaired(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Every planted difference is named by key and path, and no other; after a repair through bronze a second run finds all equal."""
    database.orders.insert_many([document(number) | {"gone": "x"} for number in range(300)])
    database.orders.insert_one({"_id": ObjectId(), "text": "another kind of key"})
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    database.orders.update_many({}, {"$unset": {"gone": 1}})
    play(spark, found)
    clean = verify.run(spark, found, verify.VerifyOptions())
    assert clean.is_equal, only(clean).differences
    assert (only(clean).documents, only(clean).equal) == (301, 301)
    tables = delta.layout(found.lakehouse)
    planted = plant(spark, tables.gold(database.name, "orders"))
    wrong = verify.run(spark, found, verify.VerifyOptions(collection=f"{database.name}.orders"))
    assert {kind: sorted(keys) for kind, keys in kinds(only(wrong)).items()} == planted
    assert only(wrong).equal == 301 - 9 * PER_KIND
    paths = {each.key: [path.path for path in each.paths] for each in only(wrong).differences}
    assert {name: paths[str(first)] for name, (first, _) in CHANGED.items()} == {
        name: ["odd" if name == "__rescued" else name] for name in CHANGED
    }
    with pytest.raises(errors.DecisionNeeded, match="orders: gold differs from the source"):
        verify.refuse(wrong)
    assert "lost $unset" not in verify.to_json(wrong)
    mended = verify.run(spark, found, verify.VerifyOptions(repair=True))
    assert (only(mended).is_equal, only(mended).repaired) == (True, 10 * PER_KIND), only(mended).differences
    again = verify.run(spark, found, verify.VerifyOptions())
    assert again.is_equal and only(again).equal == 301
    noted = spark.table(str(tables.ops("verifications"))).orderBy("at_ms").collect()
    assert [row.is_equal for row in noted] == [True, False, True, True]
    assert {each["key"] for each in json.loads(noted[1].differences)} == set(sum(planted.values(), []))
    silver_table = tables.silver(database.name, "orders")
    spark.sql(f"UPDATE {silver_table} SET nested.inner.n = 1, odd = 7 WHERE _id = 13")
    (difference,) = only(verify.run(spark, found, verify.VerifyOptions(layer=Layer.SILVER))).differences
    assert (difference.key, [path.path for path in difference.paths]) == ("13", ["nested.inner.n", "odd"])
    gold_table = tables.gold(database.name, "orders")
    for key, number in (("NULL", 20), ("'planted'", 21), ("__key", 22)):
        names = [f"{key} AS `__key`" if name == "__key" else f"`{name}`" for name in spark.table(str(gold_table)).columns]
        spark.sql(f"INSERT INTO {gold_table} SELECT {', '.join(names)} FROM {gold_table} WHERE _id = {number} LIMIT 1")
    twice = only(verify.run(spark, found, verify.VerifyOptions()))
    assert kinds(twice) == {"extra": ["", "planted"], "different": ["22"]}
    assert [each.what for each in twice.differences[1].paths] == ["2 rows"]
    assert not only(verify.run(spark, found, verify.VerifyOptions(repair=True))).is_equal


def test_nothing_is_reported_while_the_source_is_written_to(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """While a pipeline runs and a writer inserts, updates and deletes, no difference is reported except a planted one."""
    database.orders.insert_many([document(number) for number in range(400)])
    quick = {"commit.interval.ms": 300, "signal.poll.interval.ms": 200}
    found = pipeline(mongodb_uri, lakehouse, database.name, **quick)
    stop, written, paused = threading.Event(), threading.Event(), threading.Event()
    writer = Aside(lambda: write(database.orders, written, paused))
    with Aside(lambda: layers.run(spark, found, once=False, stop=stop)), writer:
        try:
            until(lambda: delta.exists(spark, delta.layout(found.lakehouse).gold(database.name, "orders")), seconds=240)
            first = only(verify.run(spark, found, verify.VerifyOptions()))
            assert first.is_equal, first.differences
            assert first.equal + first.waiting + first.changing >= 200
            table = delta.layout(found.lakehouse).gold(database.name, "orders")
            # The UPDATE takes seconds, and would conflict with commits every few tenths of a second.
            paused.set()
            until(lambda: is_planted(spark, f"UPDATE {table} SET text = 'planted' WHERE _id IN (390, 391)"))
            paused.clear()
            mended = only(verify.run(spark, found, verify.VerifyOptions(repair=True, sample=400)))
            assert (mended.is_equal, mended.repaired) == (True, 2), mended
        finally:
            written.set()
            stop.set()


def is_planted(spark: Any, sql: str) -> bool:
    """Whether a statement succeeded between the pipeline's commits."""
    try:
        spark.sql(sql).collect()
    except Exception as error:
        assert table_errors.is_conflict(error), error
        return False
    return True


def write(orders: Any, stop: threading.Event, paused: threading.Event) -> None:
    """Write to the first 380 documents, one after the other, except while `paused`; the last documents are not changed."""
    number = 0
    while not stop.wait(0.01):
        if paused.is_set():
            continue
        number += 1
        match number % 4:
            case 0:
                orders.delete_one({"_id": number % 380})
            case 1:
                orders.replace_one({"_id": (number - 1) % 380}, document(number) | {"_id": (number - 1) % 380}, upsert=True)
            case _:
                orders.update_one({"_id": number * 7 % 380}, {"$inc": {"count": 1}, "$set": {"text": f"now {number}"}})


class Aside:
    """Runs a function in a thread during a block, and raises its error at the end."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body, self._error = body, None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Aside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(90)
        if self._error is not None:
            raise self._error
