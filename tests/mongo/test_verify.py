"""Verify against a real server and real tables: what was planted is found and repaired, and nothing is reported where nothing is."""

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
from pipelines import run as layers
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from pipelines.verify import run as verify
from pipelines.verify.rows import Layer
from tests.mongo.test_capture import pipeline, until

PER_KIND = 5


def play(spark: Any, found: Any) -> None:
    """One run of each layer."""
    for layer in (capture, silver, gold):
        layer.run(spark, found, once=True, sessions=sparks.sessions(spark))


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


def kinds(found: verify.CollectionResult) -> dict[str, list[str]]:
    """The keys of each kind of difference."""
    told: dict[str, list[str]] = {}
    for each in found.differences:
        told.setdefault(each.kind.value, []).append(each.key)
    return told


def only(result: verify.Result, name: str = "orders") -> verify.CollectionResult:
    (found,) = [each for each in result.collections if each.collection.endswith(f".{name}")]
    return found


PLANTS: dict[str, tuple[str, str]] = {
    "missing": ("DELETE FROM {table} WHERE _id IN ({ids})", "missing"),
    "another value": ("UPDATE {table} SET text = concat(text, '!') WHERE _id IN ({ids})", "different"),
    "lost unset": ("UPDATE {table} SET gone = 'still here' WHERE _id IN ({ids})", "different"),
    "older version": ("UPDATE {table} SET count = count - 1, ratio = 0.5 WHERE _id IN ({ids})", "different"),
    "nested": ("UPDATE {table} SET nested.inner.n = nested.inner.n + 1 WHERE _id IN ({ids})", "different"),
    "an array": ("UPDATE {table} SET late = NULL WHERE _id IN ({ids})", "different"),
    "prints alike": (
        "UPDATE {table} SET `__rescued` = map_from_arrays(map_keys(`__rescued`), "
        "transform(map_values(`__rescued`), v -> trim(BOTH '\"' FROM v))) WHERE _id IN ({ids})",
        "different",
    ),
    "of another type": ("UPDATE {table} SET ratio = CAST('NaN' AS DOUBLE) WHERE _id IN ({ids})", "different"),
    "a time": ("UPDATE {table} SET at = at + INTERVAL 1 MILLISECOND WHERE _id IN ({ids})", "different"),
}


def plant(spark: Any, table: Any) -> dict[str, list[str]]:
    """Fifty differences, of every kind; their keys by what is to be said of them."""
    expected: dict[str, list[str]] = {"missing": [], "different": [], "extra": []}
    for place, (name, (sql, kind)) in enumerate(PLANTS.items()):
        ids = [100 + place * 10 + number for number in range(PER_KIND)]
        if name == "prints alike":
            ids = [3 + 10 * number for number in range(PER_KIND)]
        spark.sql(sql.format(table=table, ids=", ".join(map(str, ids))))
        expected[kind] += map(str, ids)
    extra = [1000 + number for number in range(PER_KIND)]
    columns = spark.table(str(table)).columns
    rest = ", ".join(f"`{name}`" for name in columns if name not in ("_id", "__key"))
    chosen = ", ".join(f"CAST(_id + 800 AS INT) AS _id" if n == "_id" else "CAST(_id + 800 AS STRING) AS `__key`" if n == "__key" else f"`{n}`" for n in columns)
    assert rest
    spark.sql(f"INSERT INTO {table} SELECT {chosen} FROM {table} WHERE _id BETWEEN 200 AND {200 + PER_KIND - 1}")
    expected["extra"] += map(str, extra)
    return {kind: sorted(keys) for kind, keys in expected.items()}


@pytest.mark.parametrize("layer", [Layer.GOLD, Layer.SILVER])
def test_fifty_planted_differences_are_found_and_repaired(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path, layer: Layer
) -> None:
    """Every planted difference is named by key and path, none else; repaired through bronze, a second run says equal."""
    database.orders.insert_many([document(number) | {"gone": "x"} for number in range(300)])
    database.orders.insert_one({"_id": ObjectId(), "text": "another kind of key"})
    database.empty.insert_one({"_id": 1})
    found = pipeline(mongodb_uri, lakehouse, database.name)
    play(spark, found)
    database.orders.update_many({}, {"$unset": {"gone": 1}})
    database.empty.delete_many({})
    play(spark, found)
    clean = verify.run(spark, found, verify.Asked(layer=layer))
    assert clean.is_equal, only(clean).differences
    assert (only(clean).documents, only(clean).equal) == (301, 301)
    tables = delta.layout(found.lakehouse)
    table = (tables.gold if layer is Layer.GOLD else tables.silver)(database.name, "orders")
    planted = plant(spark, table)
    wrong = verify.run(spark, found, verify.Asked(layer=layer, collection=f"{database.name}.orders"))
    assert {kind: sorted(keys) for kind, keys in kinds(only(wrong)).items()} == planted
    assert only(wrong).equal == 301 - 10 * PER_KIND + PER_KIND
    paths = {each.key: [path.path for path in each.paths] for each in only(wrong).differences}
    assert (paths["110"], paths["120"], paths["140"]) == (["text"], ["gone"], ["nested.inner.n"])
    assert paths["13"] == ["odd"]
    with pytest.raises(errors.DecisionNeeded, match=r"orders: (gold|silver) is not what the source holds"):
        verify.refuse(wrong)
    assert "text 1" not in verify.to_json(wrong)
    mended = verify.run(spark, found, verify.Asked(layer=layer, repair=True))
    assert (only(mended).is_equal, only(mended).repaired) == (True, 10 * PER_KIND)
    again = verify.run(spark, found, verify.Asked(layer=layer))
    assert again.is_equal and only(again).equal == 301
    if layer is Layer.SILVER:
        assert verify.run(spark, found, verify.Asked(layer=Layer.GOLD)).is_equal
    noted = spark.table(str(tables.ops("verifications"))).where("collection LIKE '%orders'").orderBy("at_ms").collect()
    assert [row.is_equal for row in noted[:4]] == [True, False, True, True]
    assert {each["key"] for each in json.loads(noted[1].differences)} == set(sum(planted.values(), []))


def test_nothing_is_reported_while_the_source_is_written_to(
    spark: Any, mongodb_uri: str, database: Any, lakehouse: Path
) -> None:
    """Beside a pipeline and a writer of inserts, updates and deletes no difference is reported, and a planted one is."""
    database.orders.insert_many([document(number) for number in range(400)])
    quick = {"commit.interval.ms": 300, "signal.poll.interval.ms": 200}
    found = pipeline(mongodb_uri, lakehouse, database.name, **quick)
    play(spark, found)
    stop, written = threading.Event(), threading.Event()
    with Aside(lambda: layers.run(spark, found, once=False, stop=stop)), Aside(lambda: write(database.orders, written)):
        try:
            until(lambda: delta.is_held(spark, delta.layout(found.lakehouse).gold(database.name, "orders")))
            first = only(verify.run(spark, found, verify.Asked()))
            assert first.is_equal, first.differences
            assert first.equal + first.waiting + first.changing >= 390
            sampled = only(verify.run(spark, found, verify.Asked(sample=50)))
            assert sampled.is_equal and sampled.is_sample and sampled.documents >= 50
            table = delta.layout(found.lakehouse).gold(database.name, "orders")
            until(lambda: is_planted(spark, f"UPDATE {table} SET text = 'planted' WHERE _id IN (390, 391)"))
            mended = only(verify.run(spark, found, verify.Asked(repair=True)))
            assert (mended.is_equal, mended.repaired) == (True, 2), mended.differences
        finally:
            written.set()
            stop.set()


def is_planted(spark: Any, sql: str) -> bool:
    """Whether a statement came between the pipeline's commits."""
    try:
        spark.sql(sql).collect()
    except Exception as error:
        assert delta.is_conflict(error), error
        return False
    return True


def write(orders: Any, stop: threading.Event) -> None:
    """Some writes to the first 380 documents, one after the other; the last ones are left alone."""
    number = 0
    while not stop.wait(0.01):
        number += 1
        match number % 4:
            case 0:
                orders.delete_one({"_id": number % 380})
            case 1:
                orders.replace_one({"_id": (number - 1) % 380}, document(number) | {"_id": (number - 1) % 380}, upsert=True)
            case _:
                orders.update_one({"_id": number * 7 % 380}, {"$inc": {"count": 1}, "$set": {"text": f"now {number}"}})


class Aside:
    """What a thread does beside a block; its error is raised at the end."""

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
