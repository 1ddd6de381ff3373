from __future__ import annotations

import pytest
from pyspark.sql import types as T

from cdc_core.silver import merge

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
    """What a table lacks is added in its place or widened, at any depth; what is wider or beside stays."""
    assert merge.alterations(current, wanted) == merge.Alteration(added, widened, impossible)


def statement(**named: object) -> str:
    made = merge.SilverMerge(["_id", "__incomplete", "__known", "__sequence", "__batch"], **named)  # type: ignore[arg-type]
    return made.merge().render("t", "s")


def test_rows_may_stand_beside_others_of_the_same_names_and_types() -> None:
    """In any order of names, at any depth; a name more, a name less or another type cannot."""
    bigint, inner = T.MapType(T.StringType(), T.LongType()), T.StructField
    x, y = inner("x", T.IntegerType()), inner("y", bigint)
    a, b = inner("a", T.IntegerType()), inner("b", T.ArrayType(T.StructType([x, y])))
    held = T.StructType([a, b])
    assert merge.is_same(held, T.StructType([inner("b", T.ArrayType(T.StructType([y, x]), containsNull=False)), a]))
    for other in (
        [a],
        [a, b, inner("c", T.IntegerType())],
        [inner("a", T.LongType()), b],
        [a, inner("b", T.ArrayType(T.StructType([x, inner("y", T.MapType(T.StringType(), T.IntegerType()))])))],
        [a, inner("b", T.ArrayType(T.StructType([x])))],
    ):
        assert not merge.is_same(held, T.StructType(other))


def test_only_documents() -> None:
    """A range of whole documents needs two clauses, and the bounds of its keys."""
    lines = statement(keys=[("1", "it's")]).splitlines()
    assert lines[0].endswith(r"t.`__key` = s.`__key` AND (t.`__key` BETWEEN '1' AND 'it\u0027s')")
    assert [line.split(" THEN ")[0] for line in lines[1:]] == [
        "WHEN MATCHED AND s.`__guard` > coalesce(t.`__known`, t.`__sequence`)",
        "WHEN NOT MATCHED",
    ]


def test_every_clause_is_guarded() -> None:
    """Whatever a range holds, a row that is newer is left alone, and a removed row is not inserted."""
    text = statement(removes=True, marks_deleted=True, has_incomplete=True, is_late=True)
    matched = [line for line in text.splitlines() if line.startswith("WHEN MATCHED")]
    assert len(matched) == 4
    assert all("> t.`__sequence`" in line or "> coalesce(t.`__known`" in line for line in matched)
    assert "WHEN NOT MATCHED AND s.`__action` <> 'remove' THEN INSERT" in text


def test_added_columns_stand_where_the_statements_would_put_them() -> None:
    current = struct(a=INT, n=struct(x=INT), l=T.ArrayType(struct(x=INT)))
    wanted = struct(z=TEXT, a=LONG, b=TEXT, n=struct(y=TEXT, x=INT), l=T.ArrayType(struct(x=INT, y=INT)))
    grown = struct(z=TEXT, a=INT, b=TEXT, n=struct(x=INT, y=TEXT), l=T.ArrayType(struct(x=INT, y=INT)))
    assert merge.with_added(current, wanted) == grown


def test_an_added_column_does_not_say_how_another_tables_was_widened() -> None:
    widened = T.StructType([T.StructField("x", LONG, metadata={"delta.typeChanges": []})])
    for type_ in (widened, T.ArrayType(widened), T.MapType(TEXT, widened)):
        assert "typeChanges" not in merge.with_added(struct(a=struct(b=INT)), struct(a=struct(c=type_), n=type_)).json()


def test_columns_are_looked_for_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's struct looks through all of its fields for each: of ten thousand columns a small batch took ten seconds."""
    inner = T.StructType([T.StructField("x", T.IntegerType())])
    current = T.StructType([T.StructField("a", T.IntegerType()), T.StructField("s", inner)])
    wanted = T.StructType([T.StructField("a", T.LongType()), T.StructField("s", T.StructType([*inner, *current[:1]]))])
    monkeypatch.setattr(T.StructType, "__getitem__", None)
    assert merge.alterations(current, wanted).statements == ("ADD COLUMNS (`s`.`a` INT)", "ALTER COLUMN `a` TYPE BIGINT")
