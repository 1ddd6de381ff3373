"""Unwrap of DataFrames with keys and values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.unwrap import frames as unwrap_frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOURCE = {"db": "shop", "collection": "orders"}


def event(identity: int, after: dict[str, object] | None, **envelope: object) -> tuple[str, str]:
    text = None if after is None else json.dumps({"_id": identity, **after})
    value = {"op": "c", "after": text, "source": SOURCE, **envelope}
    return json.dumps({"id": str(identity)}), json.dumps(value)


BINARY = {"$binary": "AAE=", "$type": "00"}
EVENTS = [
    event(1, {"total": 5, "at": {"$date": 1580122032311}, "to": {"city": "Oslo"}, "bin": BINARY}),
    event(2, {"total": {"$numberLong": "1099511627776"}, "to": {"zip": [1, "x"]}}),
    event(3, {"total": "many", "to": None}),
    event(3, None, op="d", before='{"_id": 3, "total": 7}'),
    (json.dumps({"id": "3"}), None),
    (json.dumps({"serverName": "dbz"}), '{"ts_ms": 5}'),
    (json.dumps({"id": "4"}), '{"op": "c", "after": "{bad", "source": {}}'),
    (json.dumps({"id": "5"}), "{bad"),
]


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(EVENTS, "key STRING, value STRING").coalesce(1)


def test_events_become_typed_rows(events: DataFrame) -> None:
    """All rows have one schema. Values that do not fit are rescued, dropped events are removed, and the order is kept."""
    options = unwrap_options.parse(
        {"delete.tombstone.handling.mode": "rewrite", "add.headers": "op,ord", "add.fields": "op"}
    )
    rows = [row.asDict(recursive=True) for row in unwrap_frames.unwrapped(events, options=options).collect()]
    first, second, third, deleted, heartbeat, bad_document, bad_value = rows
    assert first["value"].pop("at").timestamp() == 1580122032.311
    assert first == {
        "key": '{"id":1}',
        "value": {
            "_id": 1,
            "total": 5,
            "to": {"city": "Oslo", "zip": None},
            "bin": bytearray(b"\x00\x01"),
            "__deleted": False,
            "__op": "c",
            "__rescued": None,
        },
        "deleted": False,
        "headers": [{"name": "__op", "value": "c"}, {"name": "__ord", "value": None}],
        "collection": "shop.orders",
        "passed": None,
        "error": None,
    }
    assert (second["value"]["total"], second["value"]["to"]) == (1099511627776, {"city": None, "zip": ["1", "x"]})
    assert (third["value"]["total"], third["value"]["__rescued"]) == (None, {"total": '"many"'})
    assert (deleted["deleted"], deleted["value"]["__deleted"], deleted["value"]["total"]) == (True, True, 7)
    assert heartbeat["passed"] == '{"ts_ms": 5}' and heartbeat["error"] is None and heartbeat["value"] is None
    assert bad_document["passed"] == EVENTS[6][1] and bad_document["error"]
    assert bad_value["passed"] == "{bad" and bad_value["error"]


def test_a_given_schema_is_kept(events: DataFrame) -> None:
    """Later events are read with the schema of earlier ones, without inspecting them first."""
    options = unwrap_options.parse({})
    schema = unwrap_frames.schema_of(events.limit(1), options=options)
    rows = unwrap_frames.unwrapped(events, options=options, schema=schema)
    assert [field.name for field in rows.schema["value"].dataType] == ["_id", "total", "at", "to", "bin", "__rescued"]
    assert [row.value["__rescued"] for row in rows.where("value IS NOT NULL").collect()] == [
        None,
        {"total": '{"$numberLong":"1099511627776"}', "to.zip": '[1,"x"]'},
        {"total": '"many"'},
    ]


def test_values_may_come_alone_and_as_bytes(spark: SparkSession) -> None:
    """A DataFrame needs no column `key`, for example from a file of values."""
    df = spark.createDataFrame([(EVENTS[0][1].encode(),)], "value BINARY")
    [row] = unwrap_frames.unwrapped(df, options=unwrap_options.parse({"flatten.struct": "true"})).collect()
    assert (row.key, row.value["to_city"]) == (None, "Oslo")


def test_unreadable_values_are_errors_of_their_rows(spark: SparkSession) -> None:
    """Bytes that are not text and documents that are nested too deeply do not end the query for other rows."""
    good, deep = EVENTS[0][1].encode(), json.dumps({"op": "c", "after": '{"a":' * 5000 + "1" + "}" * 5000, "source": {}})
    values = [(good.replace(b"Oslo", b"Os\xfflo"),), (b"\xff\xfe{",), (deep.encode(),)]
    df = spark.createDataFrame(values, "value BINARY").coalesce(1)
    first, *others = unwrap_frames.unwrapped(df, options=unwrap_options.parse({})).collect()
    assert (first.value["to"]["city"], first.error) == ("Os\ufffdlo", None)
    assert [(row.value, bool(row.error)) for row in others] == [(None, True)] * 2


def test_two_values_of_one_path_are_rescued_both(spark: SparkSession) -> None:
    """A value whose column name another field has, and a value of that other field that does not fit."""
    options = unwrap_options.parse({"flatten.struct": "true", "flatten.struct.delimiter": "."})
    df = spark.createDataFrame(
        [event(1, {"a": {"b": 1}}), event(2, {"a.b": "x", "a": {"b": "y"}})], "key STRING, value STRING"
    )
    rows = unwrap_frames.unwrapped(df.coalesce(1), options=options).collect()
    assert [row.value["__rescued"] for row in rows] == [None, {"a.b": '"x"', "a.b#2": '"y"'}]
