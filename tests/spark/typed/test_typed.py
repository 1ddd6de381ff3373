"""Typing by executors gives the schema, rows and rescued values of the pure functions, whatever Spark optimizes."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from pyspark.sql import functions as sf

from cdc_core.schema import column_types, document_schema
from cdc_core.schema import names as column_names
from cdc_core.tables import layout as tables
from cdc_core.typed import plan as typed
from pipelines.schema import batch_evolution, looks
from pipelines.schema import log as schemas
from tests.harness import typed_cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("compiled")


def frame(spark: SparkSession, texts: list[str | None], first: int = 0) -> DataFrame:
    """The texts as in bronze, with a sequence, in two partitions."""
    marks = [typed_cases.mark(first + number) for number in range(len(texts))]
    table = pa.table({"after": pa.array(texts, pa.string()), "sequence": pa.array(marks, pa.string())})
    return spark.createDataFrame(table)


def native(df: DataFrame, plan: typed.Plan) -> list[dict[str, Any]]:
    """Documents as the plan types them, in order."""
    columns = ("document", "rescued", "unreadable")
    rows = typed.documents(df, plan=plan).orderBy("sequence").select(*columns).toArrow().to_pylist()
    return [typed_cases.plain(row) for row in rows]


def evolution_of(df: DataFrame, **named: Any) -> batch_evolution.Evolution:
    return batch_evolution.evolve(looks.SparkDocuments(df), **named)


def check(
    spark: SparkSession,
    texts: list[str | None],
    current: document_schema.DocumentSchema,
    first: int = 0,
    **named: Any,
) -> batch_evolution.Evolution:
    """Evolve and type one batch, and compare both with the pure functions."""
    df = frame(spark, texts, first)
    evolution = evolution_of(df, current=current, **named)
    typed_cases.check_schema(evolution, texts, current, first=first, pins=named.get("pins"))
    for left, right in zip(native(df, evolution.plan), typed_cases.rows(texts, evolution.schema), strict=True):
        assert left == right
    return evolution


SETTINGS = [case for case in typed_cases.DOCUMENTS if case.get("pins") or case.get("naming")]
"""Cases of pinned types and other layouts. All cases are tested with the decoder in `tests/unit/typed/test_typed_cases.py`."""


@pytest.mark.parametrize("case", SETTINGS, ids=[case["case"] for case in SETTINGS])
def test_settings_are_those_of_the_executors(spark: SparkSession, case: dict[str, Any]) -> None:
    """Pinned types and layouts give the result of the pure functions."""
    check(spark, typed_cases.texts_of(case), document_schema.EMPTY, **typed_cases.settings_of(case))


SCALARS: list[Any] = [
    None, True, False, 0, 5, -2147483648, 2147483647, 1.5, -0.0, 0.1, 12345678.9, 1e22, 5e-324, 1e-7, 3.0, "", "x", "5",
    "-0.0", '{"$oid":"x"}', "nul\x00", "tab\tnew\n\x1f", "é\U0001f600", "[1]", "{}", "NaN",
    {"$numberLong": "5"}, {"$numberLong": "9007199254740993"}, {"$numberLong": "-9223372036854775808"},
    {"$numberLong": "9223372036854775807"}, {"$numberDouble": "NaN"}, {"$numberDouble": "-Infinity"},
    {"$numberDecimal": "1.50"}, {"$numberDecimal": "1E+3"}, {"$numberDecimal": "NaN"}, {"$oid": "64b7f0000000000000000001"},
    {"$date": {"$numberLong": "-1"}}, {"$date": {"$numberLong": "253402300799999"}}, {"$date": {"$numberLong": "253402300800000"}},
    {"$date": {"$numberLong": "-62135596800000"}}, {"$date": {"$numberLong": "-62135596800001"}},
    {"$date": {"$numberLong": "9223372036854775807"}}, {"$timestamp": {"t": 4294967295, "i": 1}},
    {"$binary": {"base64": "AQI=", "subType": "80"}}, {"$binary": {"base64": "", "subType": "00"}},
    {"$binary": {"base64": "AAAAAAAAAAAAAAAAAAAAAA==", "subType": "04"}},
    {"$regularExpression": {"pattern": "^a\"\\", "options": "i"}}, {"$symbol": "sy"}, {"$code": "f()"},
    {"$code": "f()", "$scope": {"a": 1}}, {"$code": "f()", "$scope": {"a": 1e22, "b": {"$oid": "x"}}}, {"$minKey": 1},
    {"$maxKey": 1}, {"$undefined": True}, {"$dbPointer": {"$ref": "a.b", "$id": {"$oid": "64b7f0000000000000000001"}}},
    [], {}, [None], [[]], [{}], {"a": None}, {"a": []},
    {"$ref": "c", "$id": {"$oid": "64b7f0000000000000000001"}, "$db": "d"}, {"$$oid": "x"}, {"$$$date": 5},
]  # fmt: skip
NAMES = ["a", "A", "b", "", "a.b", "$id", "x y", "é", "__key", "`", "${x}", "'\"\\", "_id"]


def value(chance: random.Random, depth: int, few: list[Any]) -> Any:
    """A value: usually one of a few, sometimes any other, sometimes a nested one."""
    draw = chance.random()
    if depth and draw < 0.2:
        return [value(chance, depth - 1, few) for _ in range(chance.randrange(4))]
    if depth and draw < 0.4:
        return {name: value(chance, depth - 1, few) for name in chance.sample(NAMES, chance.randrange(4))}
    return chance.choice(few if draw < 0.9 else SCALARS)


def history(seed: int, count: int) -> Iterator[str]:
    """Documents of one collection; the higher the seed, the fewer kinds of values."""
    chance = random.Random(seed)
    few = chance.sample(SCALARS, max(1, 12 - seed))
    for _ in range(count):
        document = {name: value(chance, 3, few) for name in chance.sample(NAMES, chance.randrange(7))}
        yield orjson.dumps(document).decode()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(more, marks=pytest.mark.journey) for more in range(2, 6))])
def test_any_documents(spark: SparkSession, seed: int) -> None:
    """Batches of documents of any shape give the result of the pure functions."""
    texts: list[str | None] = [*history(seed, 500)]
    options = [None, typed_cases.OPTIONS["flatten"]][seed % 2]
    schema, first = document_schema.EMPTY, 0
    for size in (1, 40, 459):
        schema = check(spark, texts[first : first + size], schema, first, options=options).schema
        first += size


def test_any_value_after_any_other(spark: SparkSession) -> None:
    """Any value after any other in the same path is in the column or rescued, as with the pure functions."""
    firsts = {f"f{number}": first for number, first in enumerate(SCALARS)}
    schema = check(spark, [orjson.dumps(firsts).decode()], document_schema.EMPTY).schema
    seconds = [orjson.dumps(dict.fromkeys(firsts, second)).decode() for second in SCALARS]
    for start in range(0, len(seconds), 20):
        check(spark, seconds[start : start + 20], schema, 1)


def test_many_new_documents_are_looked_at_the_same_here_and_there(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only some of the documents are inspected, and Spark and this process choose the same ones."""
    monkeypatch.setattr(looks, "BEGINNING", 20)
    current = evolution_of(frame(spark, ['{"_id":1,"a":1}'])).schema
    fields = [f'"n{number // 100}":{"1" if number % 100 < 60 else "2.5"},"a":{number}' for number in range(300)]
    texts: list[str | None] = [f'{{"_id":{number},{each}}}' for number, each in enumerate(fields)]
    df = frame(spark, texts)
    there = evolution_of(df, current=current, also={"even": "sequence LIKE '%0'"})
    rows = df.toArrow()
    texts_and_places = (rows[name].combine_chunks() for name in ("after", "sequence"))
    here = batch_evolution.evolve(looks.LocalDocuments(*texts_and_places), current=current)
    assert [change.to_type for change in there.changes] == ["DOUBLE"] * 3
    assert (there.schema, there.changes, there.seen_at) == (here.schema, here.changes, here.seen_at)
    assert there.also == {"even": 19}


def test_documents_with_one_sequence_are_told_apart(spark: SparkSession) -> None:
    """Rows of a snapshot's chunk share their sequence, and each is still a document of its own."""
    texts = ['{"_id":1,"a":"x"}', '{"_id":2,"a":5}', '{"_id":3,"a":{"b":1}}']
    df = frame(spark, texts).withColumn("sequence", sf.lit("0" * 24))
    evolved = [evolution_of(rows).schema for rows in (df, df.orderBy("after"))]
    first, second = (schema.struct.by_name["a"].type for schema in evolved)
    assert first == second and first is not column_types.Scalar.TEXT


def test_what_cannot_be_read(spark: SparkSession) -> None:
    """Corrupt text is unreadable. A repeated field keeps its last value and rescues the others. Null stays null."""
    texts = [
        '{"_id":1,"a":1}', '{"_id":1', "", "[1]", "5", "null", "x", '{"_id":2,"a":1,"a":2}', '{"a":"\\ud800"}', None,
        '{"_id":{"$oid":{}}}', '{"_id":1}x', '{"_id":1}{"_id":2}',
    ]  # fmt: skip
    evolution = evolution_of(frame(spark, texts))
    rows = native(frame(spark, texts), evolution.plan)
    assert [row["unreadable"] for row in rows[:7]] == [False, True, True, True, True, True, True]
    assert rows[7]["document"]["a"] == 2 and rows[7]["rescued"] == {"a": "1"}
    assert rows[9] == {"document": None, "rescued": None, "unreadable": False}
    assert rows[11]["unreadable"]


@pytest.mark.journey
def test_deep_and_wide(spark: SparkSession) -> None:
    """A hundred levels and five thousand fields are typed."""
    deep: Any = {"end": 1.5}
    for _ in range(99):
        deep = {"d": deep}
    wide = {f"f{number}": number for number in range(5000)}
    check(spark, [orjson.dumps({"_id": 1, "deep": deep}).decode()], document_schema.EMPTY)
    check(spark, [orjson.dumps({"_id": 1, **wide}).decode()], document_schema.EMPTY)
    check(spark, [orjson.dumps({"_id": 1, "m": wide}).decode()], document_schema.EMPTY)


def test_empty_batch(spark: SparkSession) -> None:
    """A batch without documents changes no schema."""
    evolution = evolution_of(frame(spark, [None]))
    assert evolution.schema.columns == () and evolution.changes == ()


def test_a_recorded_schema_is_read_back(spark: SparkSession, tmp_path: pathlib.Path) -> None:
    """The latest schema is read as it was appended, with its changes."""
    table = tables.TableRef.at(str(tmp_path / "ops" / "schemas"))
    assert schemas.latest(spark, table) == {}
    one = evolution_of(frame(spark, ['{"_id":1,"a":1}']))
    schemas.append(spark, table, collection="shop.orders", version=1, batch=7, evolution=one)
    two = evolution_of(frame(spark, ['{"_id":1,"a":2.5}'], 1), current=one.schema)
    schemas.append(spark, table, collection="shop.orders", version=2, batch=9, evolution=two)
    schemas.append(spark, table, collection="shop.o'ther", version=1, batch=9, evolution=one)
    assert schemas.latest(spark, table) == {
        "shop.orders": schemas.SchemaVersion(2, two.schema),
        "shop.o'ther": schemas.SchemaVersion(1, one.schema),
    }
    kept = spark.table(str(table)).where("version = 2")
    rows = kept.select("path", "change", "from", "to", "batch").collect()
    assert [tuple(row) for row in rows] == [("a", "widened", "INT", "DOUBLE", 9)]


def test_columns_keep_their_names(spark: SparkSession) -> None:
    """Columns keep their names if a later field would have the same name."""
    first = evolution_of(frame(spark, ['{"_id":1,"b":{"c":1}}']), options=typed_cases.OPTIONS["flatten"])
    assert first.schema.naming == column_names.ColumnNaming.of(typed_cases.OPTIONS["flatten"])
    later = frame(spark, ['{"_id":2,"b_c":"x"}'], 1)
    second = evolution_of(later, current=first.schema, options=typed_cases.OPTIONS["flatten"])
    assert [column.name for column in second.schema.columns] == ["_id", "b_c", "b_c_2"]
