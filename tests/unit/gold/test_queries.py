"""Which columns of models can be published."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.models import sql_model
from pipelines.gold import queries

MODEL = sql_model.parse("m", "SELECT 1", where="m.sql")
INT, ANY = T.IntegerType(), cast("Any", None)


def struct(**fields: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, type_) for name, type_ in fields.items()])


REFUSED = {
    "the column a has the type void (cast it to another one)": struct(a=T.ArrayType(T.NullType())),
    "the column a.b has the type void (cast it to another one)": struct(a=T.MapType(INT, struct(b=T.NullType()))),
    "the column a has the type variant (cast it to another one)": struct(a=T.ArrayType(T.ArrayType(T.VariantType()))),
    "the column a has the type time(6) (cast it to another one)": struct(a=T.TimeType()),
    "the column a has the type string collate UTF8_LCASE (cast it to another one)": struct(a=T.StringType("UTF8_LCASE")),
    "a table cannot have a column with the name a.b c (name it: … AS name, without blanks and any of ,;{}()=)": struct(
        a=T.ArrayType(struct(**{"b c": INT}))
    ),
    "the column a.b is there twice (give one of them another name)": struct(a=struct(b=INT, B=INT)),
    "__Gone is what statements over the table call a column of their own (give it another name)": struct(__Gone=INT),
    "_metadata is what statements over the table call a column of their own (give it another name)": struct(_metadata=INT),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_no_table_can_hold_is_told_of_its_column(told: str) -> None:
    """At any depth: Delta reports it only after the table exists, without rows, and some readers only when they fail."""
    frame = cast("Any", SimpleNamespace(schema=REFUSED[told]))
    with pytest.raises(errors.SettingsError) as refused:
        queries.check(ANY, MODEL, frame, ANY)
    assert f"m.sql: {told}" in str(refused.value).splitlines()


def test_what_a_table_can_hold_is_taken() -> None:
    given = struct(
        a=T.MapType(T.StringType(), struct(__gone=INT, b=T.ArrayType(T.DecimalType(38, 2)))), c=T.TimestampNTZType()
    )
    queries.check(ANY, MODEL, cast("Any", SimpleNamespace(schema=given)), ANY)


def test_keys_of_two_types_are_refused_where_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Spark Connect, too, '0007' and 7 would be one key. Each table is analysed once."""
    texts = "{{ config(materialized='incremental', unique_key='a') }} SELECT a FROM {{ ref('s.x', key='a') }} JOIN {{ ref('s.y', key='b') }}"
    schemas = {"s.x": struct(a=INT), "s.y": struct(b=T.StringType())}
    analysed: list[str] = []

    def sql(statement: str) -> Any:
        analysed.append(statement.removeprefix("SELECT * FROM "))
        return SimpleNamespace(schema=schemas[analysed[-1]])

    monkeypatch.setattr(queries.sparks, "is_classic", lambda _: False)
    frame = cast("Any", SimpleNamespace(schema=struct(a=INT)))
    with pytest.raises(
        errors.SettingsError, match=r"the key b of s\.y is string, and that of s\.x int: Spark takes different"
    ):
        queries.check(
            cast("Any", SimpleNamespace(sql=sql)),
            sql_model.parse("m", texts, where="m.sql"),
            frame,
            lambda ref: ref.name,
        )
    assert analysed == ["s.x", "s.y"]


@pytest.mark.parametrize("end", ["", "-- text", "-- text \\", "-- text \\\n", "-- text \\\n\\"])
def test_a_comment_at_the_end_of_a_query_ends_with_it(end: str) -> None:
    """Spark continues one over a line break after a backslash: the query had no closing parenthesis then."""
    query = queries.one_query(f"SELECT 1 {end}")
    assert re.sub(sql_model._COMMENT, "", query).split() == ["SELECT", "*", "FROM", "(SELECT", "1", ")"]
