"""Tests of the oracle: it accepts equal rows and finds each kind of difference."""

from __future__ import annotations

import datetime
import random
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson import Binary, Code, Decimal128, Int64, ObjectId, Regex, Timestamp

from cdc_core.extended_json import bson_to_json, keys
from tests.harness import oracle, workload

UTC = datetime.UTC
RESCUED = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("_id", pa.int32()),
        ("number", pa.float64()),
        ("text", pa.string()),
        ("when", pa.timestamp("us", "UTC")),
        ("data", pa.binary()),
        ("inner", pa.struct([("a", pa.int64()), ("A_2", pa.string())])),
        ("many", pa.list_(pa.struct([("b", pa.string())]))),
        ("pattern", pa.struct([("regex", pa.string()), ("options", pa.string())])),
        ("a_b", pa.int32()),
        ("__rescued", RESCUED),
        ("__key", pa.string()),
    ]
)
DOCUMENT: dict[str, Any] = {
    "_id": 1,
    "number": 5,
    "text": ObjectId("5f" * 12),
    "when": datetime.datetime(2020, 1, 1, tzinfo=UTC),
    "data": Binary(b"xy", 5),
    "inner": {"a": Int64(7), "A": "upper", "gone": None},
    "many": [{"b": "x"}, {"b": 5}],
    "pattern": Regex("^a", "i"),
    "a b": 3,
    "far": bson.datetime_ms.DatetimeMS(2**62),
}
ROW: dict[str, Any] = {
    "_id": 1,
    "number": 5.0,
    "text": "5f" * 12,
    "when": datetime.datetime(2020, 1, 1, tzinfo=UTC),
    "data": b"xy",
    "inner": {"a": 7, "A_2": "upper"},
    "many": [{"b": "x"}, {"b": None}],
    "pattern": {"regex": "^a", "options": "i"},
    "a_b": 3,
    "__rescued": [("far", f'{{"$date":{{"$numberLong":"{2**62}"}}}}'), ("many.1.b", "5")],
    "__key": "1",
}


def judged(document: dict[str, Any], row: dict[str, Any]) -> list[str]:
    table = pa.Table.from_pylist([row], schema=SCHEMA)
    return oracle.differences([oracle.read_bson(bson.encode(document))], table)


def test_an_equal_row_passes() -> None:
    """Widened numbers, adjusted names, rescued values and absent nulls are equal."""
    assert judged(DOCUMENT, ROW) == []


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("_id", 2, "int 1 is 2 in gold"),
        ("number", 5.5, "int 5 is 5.5 in gold"),
        ("text", None, "objectId is neither in a column nor rescued"),
        ("when", datetime.datetime(2020, 1, 2, tzinfo=UTC), "date 1577836800000 is"),
        ("inner", {"a": 7, "A_2": None}, "inner.A: string is neither in a column nor rescued"),
        ("inner", None, "inner: object is neither in a column nor rescued"),
        ("many", [{"b": "x"}], "2 elements in the source, 1 in gold"),
        ("many", [{"b": "x"}, {"b": "5"}], "many.1.b: rescued, and '5' in its column too"),
        ("a_b", None, "a b: int is neither in a column nor rescued"),
        ("__rescued", [("many.1.b", "5")], "far: date is neither in a column nor rescued"),
        ("__rescued", [*ROW["__rescued"], ("old", "1")], "old: rescued '1', nothing such in the source"),
        ("__rescued", [ROW["__rescued"][0], ("many.1.b", "5.0")], "many.1.b: int rescued as '5.0'"),
        ("__key", "2", "no row in gold"),
        ("__key", "2", "a row in gold, no document in the source"),
    ],
)
def test_each_kind_of_difference_is_found(field: str, value: Any, says: str) -> None:
    """A value that is wrong, missing, stale, or rescued with other text is reported with its path."""
    assert any(says in found for found in judged(DOCUMENT, ROW | {field: value}))


def test_a_value_that_was_unset_must_not_stay() -> None:
    """A column that still holds a value which the document no longer has is a difference."""
    document = {name: value for name, value in DOCUMENT.items() if name != "number"}
    assert judged(document, ROW) == ["1: number: 5.0 in gold, nothing in the source"]


def test_two_rows_of_one_document_are_found() -> None:
    table = pa.Table.from_pylist([ROW, ROW], schema=SCHEMA)
    found = oracle.differences([oracle.read_bson(bson.encode(DOCUMENT))], table)
    assert found == ["1: more than one row"]


def test_flattened_documents_are_found_by_their_paths() -> None:
    """With `flatten.struct` each leaf has its own column, and an empty document is rescued."""
    schema = pa.schema([("_id", pa.int32()), ("a_b_c", pa.int32()), ("__rescued", RESCUED), ("__key", pa.string())])
    document = {"_id": 1, "a": {"b": {"c": 5}}, "blank": {}}
    row = {"_id": 1, "a_b_c": 5, "__rescued": [("blank", "{}")], "__key": "1"}
    read = [oracle.read_bson(bson.encode(document))]
    assert oracle.differences(read, pa.Table.from_pylist([row], schema=schema), flatten="_") == []
    wrong = pa.Table.from_pylist([row | {"a_b_c": 6}], schema=schema)
    assert oracle.differences(read, wrong, flatten="_") == ["1: a.b.c: int 5 is 6 in gold"]


def test_judge_and_project_agree_on_json_and_keys() -> None:
    """Two independent implementations of the rules give the same JSON and the same equality of `_id`."""
    rng = random.Random(7)
    plan = workload.Plan()
    for number in range(1500):
        fields = {
            "_id": workload.identity(rng, "anything", number),
            **workload.document(rng, "anything", plan, 0.5),
        }
        raw = bytes(workload.with_rare(rng, fields).raw)
        value = oracle.read_bson(raw)
        assert oracle.is_json_of(bson_to_json.dumps(raw), value)
        assert oracle.key_of_text(keys.canonical_raw(raw)) == oracle.key(dict(value.held)["_id"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (5, Int64(5)),
        (5, 5.0),
        (5, Decimal128("5.00")),
        (0.5, Decimal128("0.5")),
        (0, -0.0),
        ({"a": 1}, {"a": 1.0}),
    ],
)
def test_numbers_that_the_index_holds_equal_are_one_key(one: Any, other: Any) -> None:
    """Equal numbers of different types are the same `_id`; values of different kinds are not."""

    def key(value: Any) -> Any:
        return oracle.key(dict(oracle.read_bson(bson.encode({"_id": value})).held)["_id"])

    assert key(one) == key(other)
    assert len({key(value) for value in (1, "1", True, Timestamp(0, 1), Code("1"), {"a": 1}, 0.1, Decimal128("0.1"))}) == 8
