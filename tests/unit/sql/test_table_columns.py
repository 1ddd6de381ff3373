from __future__ import annotations

import pytest
from pyspark.sql import types as T

from cdc_core.sql import table_columns
from tests.harness import pace

INT, LONG, DOUBLE, TEXT = T.IntegerType(), T.LongType(), T.DoubleType(), T.StringType()


def struct(**fields: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, type_) for name, type_ in fields.items()])


ALTERATIONS = [
    (struct(a=INT), struct(a=INT), (), (), ()),
    (struct(k=TEXT), struct(a=INT, b=TEXT, k=TEXT), ("ADD COLUMNS (`a` INT FIRST, `b` STRING AFTER `a`)",), (), ()),
    (struct(a=INT, old=TEXT), struct(a=LONG), (), ("ALTER COLUMN `a` TYPE BIGINT",), ()),
    (struct(a=LONG), struct(a=INT), (), (), ()),
    (struct(a=INT), struct(a=T.DecimalType(18, 2)), (), ("ALTER COLUMN `a` TYPE DECIMAL(18,2)",), ()),
    (struct(a=LONG), struct(a=T.DecimalType(18, 2)), (), (), ("`a`: bigint to decimal(18,2)",)),
    (struct(a=TEXT), struct(a=INT), (), (), ("`a`: string to int",)),
    (struct(a=INT, Note=INT), struct(a=INT, note=INT), (), (), ("`note` beside `Note`",)),
    (
        struct(n=struct(x=INT)),
        struct(n=struct(x=DOUBLE, y=T.ArrayType(TEXT))),
        ("ADD COLUMNS (`n`.`y` ARRAY<STRING>)",),
        ("ALTER COLUMN `n`.`x` TYPE DOUBLE",),
        (),
    ),
    (
        struct(l=T.ArrayType(struct(x=INT)), m=T.MapType(TEXT, struct(x=INT))),
        struct(l=T.ArrayType(struct(x=INT, y=INT)), m=T.MapType(TEXT, struct(x=LONG))),
        ("ADD COLUMNS (`l`.element.`y` INT)",),
        ("ALTER COLUMN `m`.value.`x` TYPE BIGINT",),
        (),
    ),
]


@pytest.mark.parametrize(("current", "wanted", "added", "widened", "impossible"), ALTERATIONS)
def test_alterations(
    current: T.StructType,
    wanted: T.StructType,
    added: tuple[str, ...],
    widened: tuple[str, ...],
    impossible: tuple[str, ...],
) -> None:
    """What a table lacks is added in its place or widened, at any depth; wider and additional columns stay."""
    assert table_columns.alterations(current, wanted) == table_columns.Alteration(added, widened, impossible)


def test_rows_may_stand_beside_others_of_the_same_names_and_types() -> None:
    """In any order of names, at any depth. An additional name, a missing name or another type makes a difference."""
    bigint, inner = T.MapType(T.StringType(), T.LongType()), T.StructField
    x, y = inner("x", T.IntegerType()), inner("y", bigint)
    a, b = inner("a", T.IntegerType()), inner("b", T.ArrayType(T.StructType([x, y])))
    held = T.StructType([a, b])
    assert table_columns.is_same(held, T.StructType([inner("b", T.ArrayType(T.StructType([y, x]), containsNull=False)), a]))
    for other in (
        [a],
        [a, b, inner("c", T.IntegerType())],
        [inner("a", T.LongType()), b],
        [a, inner("b", T.ArrayType(T.StructType([x, inner("y", T.MapType(T.StringType(), T.IntegerType()))])))],
        [a, inner("b", T.ArrayType(T.StructType([x])))],
    ):
        assert not table_columns.is_same(held, T.StructType(other))


def test_added_columns_stand_where_the_statements_would_put_them() -> None:
    current = struct(a=INT, n=struct(x=INT), l=T.ArrayType(struct(x=INT)))
    wanted = struct(z=TEXT, a=LONG, b=TEXT, n=struct(y=TEXT, x=INT), l=T.ArrayType(struct(x=INT, y=INT)))
    grown = struct(z=TEXT, a=INT, b=TEXT, n=struct(x=INT, y=TEXT), l=T.ArrayType(struct(x=INT, y=INT)))
    assert table_columns.with_added(current, wanted) == grown


def test_an_added_column_does_not_say_how_another_tables_was_widened() -> None:
    widened = T.StructType([T.StructField("x", LONG, metadata={"delta.typeChanges": []})])
    for type_ in (widened, T.ArrayType(widened), T.MapType(TEXT, widened)):
        assert (
            "typeChanges" not in table_columns.with_added(struct(a=struct(b=INT)), struct(a=struct(c=type_), n=type_)).json()
        )


def test_columns_are_looked_for_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's struct searches all of its fields for each name: with ten thousand columns a small batch took ten seconds."""
    inner = T.StructType([T.StructField("x", T.IntegerType())])
    current = T.StructType([T.StructField("a", T.IntegerType()), T.StructField("s", inner)])
    wanted = T.StructType([T.StructField("a", T.LongType()), T.StructField("s", T.StructType([*inner, *current[:1]]))])
    monkeypatch.setattr(T.StructType, "__getitem__", None)
    assert table_columns.alterations(current, wanted).statements == (
        "ADD COLUMNS (`s`.`a` INT)",
        "ALTER COLUMN `a` TYPE BIGINT",
    )


def test_a_table_that_is_written_anew_keeps_what_is_wider() -> None:
    """A type that is pinned to something narrower does not change a column, because its old values would not fit."""
    held = struct(b=LONG, a=INT, n=struct(y=LONG, x=INT), l=T.ArrayType(INT), old=TEXT)
    wanted = struct(a=LONG, b=INT, n=struct(x=DOUBLE, y=INT, new=TEXT), l=T.ArrayType(DOUBLE))
    grown = struct(b=LONG, a=LONG, n=struct(y=LONG, x=DOUBLE), l=T.ArrayType(DOUBLE), old=TEXT)
    assert table_columns.widened(held, wanted) == grown


def test_very_many_new_columns_are_placed_at_once() -> None:
    """Each is placed after its neighbour in the wanted columns, without a search among all of them."""
    held, wanted = (T.StructType([T.StructField(f"c{n}", T.StringType()) for n in range(count)]) for count in (8000, 16000))
    with pace.within(1):
        assert table_columns.with_added(held, wanted) == wanted
        assert table_columns.with_added(T.StructType([wanted["c1"], wanted["c7"]]), wanted) == wanted
