"""Document schemas: what is observed, which type holds it, and what does not fit."""

from __future__ import annotations

import datetime
import decimal
import json
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from cdc_core import errors
from cdc_core.extended_json import wrappers
from cdc_core.properties.unwrap import ArrayEncoding, FieldValues
from cdc_core.schema import cast, column_types, document_schema, evolution, kinds, retype
from cdc_core.schema import names as column_names
from cdc_core.schema.column_types import Array, Decimal, Map, Scalar
from cdc_core.schema.kinds import Kind
from cdc_core.schema.pins import parse_pins
from cdc_core.schema.shape import Shape, observe
from cdc_core.sql.names import identifier

CASES = pathlib.Path(__file__).parents[2] / "cases" / "types"
DOCUMENTS = [json.loads(line) for line in (CASES / "documents.jsonl").read_text().splitlines()]


def table_ddl(schema: document_schema.DocumentSchema) -> str:
    """The table's columns as in Spark's CREATE TABLE."""
    return ", ".join(f"{identifier(name)} {column_types.ddl(type_)}" for name, type_ in schema.table())


def joined(
    documents: list[Any], *, start: document_schema.DocumentSchema = document_schema.EMPTY, **named: Any
) -> document_schema.DocumentSchema:
    """The schema after joining the documents one by one."""
    schema = start
    for document in documents:
        if named.get("naming"):
            document = kinds.laid_out(document, named["naming"].values)
        schema, _ = evolution.join(schema, observe(document), **named)
    return schema


def together(documents: list[Any], **named: Any) -> document_schema.DocumentSchema:
    """The schema after joining all documents at once."""
    shape = Shape()
    for number, document in enumerate(documents):
        shape.see(document, f"{number:06}")
    return evolution.join(document_schema.EMPTY, shape, **named)[0]


@pytest.mark.parametrize(
    ("counts", "grown"),
    [((0, 300), []), ((1, 100, 101, 102), [101]), ((50, 999, 1000, 1001), [999, 1000]), ((200, 300), [])],
)
def test_a_nested_document_grows_like_a_map(counts: tuple[int, ...], grown: list[int]) -> None:
    """Many fields at first sight tell nothing of what comes later."""
    schema, found = document_schema.EMPTY, []
    for count in counts:
        wide = [{"b": {f"k{number}": 1 for number in range(count)}}]
        before, schema = schema, joined([{"a": wide, **{f"c{number}": 1 for number in range(count)}}], start=schema)
        found.append(evolution.grown(before, schema))
    assert [each for each in found if each] == [{"a.b": count} for count in grown]


PLAIN = st.none() | st.booleans() | st.text(max_size=1) | st.sampled_from([0, 1, -(2**31), 2**31 - 1, 2**31, -(2**40), 1.5])


@hypothesis.given(st.lists(st.lists(PLAIN, max_size=6) | PLAIN, max_size=6))
def test_elements_of_one_kind_show_the_same_once(elements: list[Any]) -> None:
    """Also where numbers of both sizes and other values are mixed."""
    each = Shape()
    for item in elements:
        each.see([item], "")
    seen = observe(elements).element or Shape()
    expected = each.element or Shape()
    assert seen.kinds == expected.kinds
    assert (seen.element or Shape()).kinds == (expected.element or Shape()).kinds


@pytest.mark.parametrize("case", DOCUMENTS, ids=[case["case"] for case in DOCUMENTS])
def test_documents_become_rows(case: dict[str, Any]) -> None:
    """Each case's documents, joined one by one, give its columns and its rows."""
    named = {
        "pins": parse_pins(case.get("pins", {})),
        "naming": column_names.ColumnNaming.from_json({**column_names.ColumnNaming().to_json(), **case.get("naming", {})}),
    }
    schema = joined(case["documents"], **named)
    assert table_ddl(schema) == case["columns"]
    for document, expected in zip(case["documents"], case["rows"], strict=True):
        row, rescued = cast.row(document, schema)
        assert rescued == expected.get("rescued", {})
        columns = {name: value for name, value in expected.items() if name != "rescued"}
        assert json.loads(json.dumps(row, default=str)) == dict.fromkeys(row) | columns


ABSENT = (Kind.NULL, Kind.UNDEFINED)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.sampled_from(
        [
            {"$numberLong": "5"},
            {"$numberLong": "9007199254740993"},
            {"$numberDouble": "NaN"},
            {"$numberDecimal": "1.50"},
            {"$oid": "64b7f0000000000000000001"},
            {"$date": {"$numberLong": "-1"}},
            {"$date": {"$numberLong": "99999999999999999"}},
            {"$timestamp": {"t": 4294967295, "i": 1}},
            {"$binary": {"base64": "AQI=", "subType": "80"}},
            {"$regularExpression": {"pattern": "a", "options": "i"}},
            {"$code": "f"},
            {"$code": "f", "$scope": {"a": 1}},
            {"$minKey": 1},
            {"$undefined": True},
            {"$dbPointer": {"$ref": "a.b", "$id": {"$oid": "64b7f0000000000000000001"}}},
        ]
    ),
)
NAMES = st.sampled_from(["a", "A", "b", "", "a.b", "$$oid", "$id", "x y"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
DOCUMENT = st.dictionaries(NAMES, VALUES, max_size=5)
HISTORY = st.lists(DOCUMENT, max_size=6)


@hypothesis.given(HISTORY, st.booleans())
@hypothesis.example([{"a": {"x": 1}}, {"a.b": 1}, {"a": {"b": 2}}], True)
@hypothesis.example([{"_id": {"x": 1}, "_id.y": 1}, {"_id": {"x": 1, "y": 2}}], True)
@hypothesis.example([{"a": {"x": 1}, "a.pattern": 1}, {"a": {"regex": {"pattern": 1}}}], True)
def test_batches_do_not_matter(history: list[Any], flatten: bool) -> None:
    """The columns, their order, names and types are the same whether documents are joined one by one or all at once."""
    # With this delimiter flattened names collide with fields that contain it.
    naming = column_names.ColumnNaming(flatten=flatten, delimiter=".")
    one, other = joined(history, naming=naming), together(history, naming=naming)
    assert (one.columns, one.fields) == (other.columns, other.fields)


@hypothesis.given(HISTORY)
def test_a_second_join_changes_nothing(history: list[Any]) -> None:
    schema = joined(history)
    for document in history:
        again, changes = evolution.join(schema, observe(document))
        assert (again, changes) == (schema, ())


@hypothesis.given(HISTORY, DOCUMENT)
def test_every_value_is_in_a_column_or_rescued(history: list[Any], document: Any) -> None:
    """With any schema, every value of any document is in its column or rescued."""
    schema = joined(history)
    _, rescued = cast.cast(document, schema.struct)
    assert not lost(document, schema.struct, rescued, None)


def lost(value: Any, type_: column_types.ColumnType, rescued: dict[str, str], path: str | None) -> list[str]:
    """The paths of values that are neither in a column nor rescued."""
    if path in rescued or kinds.kind(value) in ABSENT:
        return []
    result, _ = cast.cast(value, type_)
    if result is None:
        return [path or ""]
    match type_:
        case column_types.Struct():
            below = ((wrappers.unescape_key(key), item) for key, item in value.items())
            paths: list[str] = []
            for name, item in below:
                here = name if path is None else f"{path}.{name}"
                known = type_.by_name.get(name)
                if known is not None:
                    paths += lost(item, known.type, rescued, here)
                elif here not in rescued and kinds.kind(item) not in ABSENT:
                    paths.append(here)
            return paths
        case Array(element):
            return [where for index, item in enumerate(value) for where in lost(item, element, rescued, f"{path}.{index}")]
        case _:
            return []


@hypothesis.given(HISTORY)
def test_json_round_trip(history: list[Any]) -> None:
    schema = joined(history, naming=column_names.ColumnNaming(flatten=True))
    assert document_schema.DocumentSchema.from_json(schema.to_json()) == schema
    shape = observe(history)
    assert msgspec.json.decode(msgspec.json.encode(shape), type=Shape) == shape


def test_the_fields_of_a_wide_document_are_put_by_name_once() -> None:
    """Once per schema, and not for each column of each row: with 3,000 fields a document took a third of a second."""
    schema = joined([{f"f{number}": number for number in range(50)}])
    assert schema.struct is schema.struct
    before = schema.struct.by_name
    assert cast.row({"f7": 7}, schema)[0]["f7"] == 7 and len(schema.table()) == 50
    assert schema.struct.by_name is before


def test_dates_have_the_range_of_spark() -> None:
    """The first and the last instant of Spark's TIMESTAMP fit; their neighbours are rescued."""
    for milliseconds in (cast.MIN_DATE_MS, cast.MAX_DATE_MS):
        value = {"$date": {"$numberLong": str(milliseconds)}}
        held, rescued = cast.cast(value, Scalar.TIMESTAMP, path="d")
        assert isinstance(held, datetime.datetime) and not rescued
    for milliseconds in (cast.MIN_DATE_MS - 1, cast.MAX_DATE_MS + 1):
        value = {"$date": {"$numberLong": str(milliseconds)}}
        rescued = {"d": cast.ejson(value)}
        assert cast.cast(value, Scalar.TIMESTAMP, path="d") == (None, rescued)


NOTHING_AT_ALL = [None, {}, [], {"a": {}}, {"a": [None, {"b": []}]}, [[], {"c": None}], {"$undefined": True}]


@pytest.mark.parametrize(
    "value", [*NOTHING_AT_ALL, 0, "", {"a": {}, "b": 0}, [None, [False]], {"$oid": "0" * 24}, *DOCUMENTS]
)
def test_something_is_seen_at_its_first_sign(value: Any) -> None:
    """What a column could hold is found as by looking at all of the value."""
    assert kinds.holds_something(value) == Shape().see(value, "") == (value not in NOTHING_AT_ALL)


def test_deep_documents_end_in_text() -> None:
    """Below the maximum depth a document becomes its JSON text."""
    document: Any = 1
    for _ in range(100):
        document = {"a": document}
    schema = joined([document])
    type_, depth = schema.fields[0].type, 1
    while isinstance(type_, column_types.Struct):
        type_, depth = type_.fields[0].type, depth + 1
    assert (type_, depth) == (Scalar.TEXT, evolution.MAX_DEPTH)
    row, rescued = cast.row(document, schema)
    assert not rescued and row["a"]


def test_a_document_of_many_fields_is_a_map() -> None:
    """A nested document with more fields than the limit when first seen becomes a MAP of their common type."""
    document = {"_id": 1, "m": {f"k{number}": number for number in range(evolution.MAX_FIELDS + 1)}}
    assert joined([document]).fields[1].type == Map(Scalar.INT)
    assert len(joined([{f"k{number}": number for number in range(5000)}]).columns) == 5000


DATA_NAMES = {
    "digests": "a{0:031x}",
    "numbers": "{0}",
    "versions": "{0}.1",
    "paths": "src/file{0}.py",
    "addresses": "a{0}@example.org",
    "uuids": "abcdef00-0000-4000-8000-{0:012d}",
    "urls": "urn:a{0}",
}


@pytest.mark.parametrize("pattern", DATA_NAMES.values(), ids=DATA_NAMES)
def test_a_document_with_data_as_names_is_a_map(pattern: str) -> None:
    """Far fewer fields make a MAP where their names are no names of fields."""
    count = evolution.MANY_FIELDS + 1
    document = {"_id": 1, "m": {pattern.format(number): {"a": number} for number in range(count)}}
    assert joined([document]).fields[1].type == Map(struct_of({"a": 1}))
    few = {"_id": 1, "m": {pattern.format(number): {"a": number} for number in range(count - 1)}}
    assert len(struct_of(few["m"]).fields) == count - 1


@pytest.mark.parametrize("pattern", ["k{0}", "_{0}", "question {0}", "line_{0}.city"])
def test_many_fields_with_names_stay_columns(pattern: str) -> None:
    """Numbered fields, indexes of an array that is laid out as a document, and names with spaces or with single dots are fields."""
    fields = {pattern.format(number): number for number in range(evolution.MANY_FIELDS + 1)}
    assert len(struct_of(fields).fields) == len(fields)


@pytest.mark.parametrize("other", ["x", {"a": 1}, [1]])
def test_data_as_names_with_values_of_several_types_stay_columns(other: Any) -> None:
    """In a MAP they would all be texts; numbers of several types are numbers."""
    fields: dict[str, Any] = {f"{number}": number for number in range(evolution.MANY_FIELDS + 1)}
    assert struct_of({**fields, "x": {"$numberLong": "7"}, "y": None}) == Map(Scalar.BIGINT)
    assert isinstance(struct_of({**fields, "x": other}), column_types.Struct)


def test_a_pin_below_a_name_keeps_columns() -> None:
    """Whoever pins the type of one field means columns, not a MAP."""
    document = {"_id": 1, "m": {f"{number}": number for number in range(evolution.MANY_FIELDS + 1)}}
    assert isinstance(joined([document], pins=parse_pins({"m.7": "bigint"})).fields[1].type, column_types.Struct)
    assert joined([document], pins=parse_pins({"m.*": "bigint"})).fields[1].type == Map(Scalar.BIGINT)


def struct_of(document: Any) -> Any:
    """The type of a nested document."""
    return joined([{"_id": 1, "m": document}]).fields[1].type


def test_fields_beyond_the_limit_are_rescued() -> None:
    """A struct does not grow without limit: fields that exceed it are rescued."""
    first = {"_id": 1, "m": {f"k{number}": number for number in range(evolution.MAX_FIELDS)}}
    schema = joined([first, {"_id": 1, "m": {"one more": 1}}])
    assert cast.row({"_id": 1, "m": {"one more": 1}}, schema)[1] == {"m.one more": "1"}


def test_changes_are_told() -> None:
    """A join lists each new column and each widening, with the types before and after."""
    schema = joined([{"_id": 1, "a": {"b": 1}, "c": [1]}])
    new = {"_id": 2, "a": {"b": 2.5, "d": "x"}, "c": [{"$numberLong": "1"}], "e": [{"f": 1}]}
    _, changes = evolution.join(schema, observe(new))
    assert [(change.path, change.what.value, change.from_type, change.to_type) for change in changes] == [
        ("a.b", "widened", "INT", "DOUBLE"),
        ("a.d", "added", None, "STRING"),
        ("c", "widened", "ARRAY<INT>", "ARRAY<BIGINT>"),
        ("e", "added", None, "ARRAY<STRUCT<`f`: INT>>"),
    ]


def test_a_pin_widens_what_delta_can_widen() -> None:
    """A later pin applies to a column that Delta can widen in place, and leaves any other as it is."""
    schema = joined([{"_id": 1, "a": 1, "b": "x"}])
    pins = parse_pins({"a": "decimal(12,2)", "b": "int"})
    shape = observe({"_id": 2, "a": 2, "b": "y"})
    widened, _ = evolution.join(schema, shape, pins=pins)
    assert [item.type for item in widened.fields[1:]] == [Decimal(12, 2), Scalar.STRING]
    assert cast.row({"a": 2.25}, widened)[0]["a"] == decimal.Decimal("2.25")


def test_bad_pins_are_refused_together() -> None:
    """Every invalid pin is named, not just the first."""
    with pytest.raises(errors.SettingsError) as refused:
        parse_pins({"a": "decimal(39,2)", "b": "varchar", "c": "map<int>"}, where="schema")
    assert [problem.path for problem in refused.value.problems] == ["schema.a", "schema.b"]


def test_a_map_of_maps_is_pinned_at_two_paths() -> None:
    """The type of the inner values is pinned at the path of the inner maps; a nested type in one pin is refused."""
    pins = parse_pins({"m": "map", "m.*": "map<bigint>"})
    assert table_ddl(joined([{"m": {"a": {"b": 1}}}], pins=pins)) == "`m` MAP<STRING, MAP<STRING, BIGINT>>"
    for text in ("map<map<bigint>>", "map<string, map>"):
        with pytest.raises(errors.SettingsError, match="a map of maps"):
            parse_pins({"m": text})


LATTICE = pathlib.Path(__file__).parents[3] / "docs" / "types.md"
MEETINGS: dict[str, list[Any]] = {
    "int32": [5, -2147483648],
    "int64": [{"$numberLong": "5"}, {"$numberLong": "9007199254740993"}],
    "double": [2.5, -0.0],
    "NaN, ±∞": [{"$numberDouble": "NaN"}, {"$numberDouble": "-Infinity"}],
    "decimal128": [{"$numberDecimal": "1.5"}, {"$numberDecimal": "1.005"}],
    "text": [
        "x",
        {"$symbol": "s"},
        {"$code": "f"},
        {"$oid": "64b7f0000000000000000001"},
        {"$minKey": 1},
        {"$maxKey": 1},
    ],
    "bool": [True],
    "date, timestamp": [
        {"$date": {"$numberLong": "0"}},
        {"$timestamp": {"t": 1, "i": 2}},
        {"$date": {"$numberLong": "253402300800000"}},
    ],
    "binary": [{"$binary": {"base64": "AQI=", "subType": "04"}}],
    "regex": [{"$regularExpression": {"pattern": "a", "options": ""}}],
    "code with scope": [{"$code": "f", "$scope": {}}],
    "dbPointer": [{"$dbPointer": {"$ref": "a", "$id": {"$oid": "64b7f0000000000000000001"}}}],
    "document": [{"a": "x"}],
    "`{}`": [{}],
    "array": [["x"]],
    "`[]`": [[]],
}
COLUMNS: dict[str, tuple[Any, str | None]] = {
    "INT": (1, None),
    "BIGINT": ({"$numberLong": "1"}, None),
    "DOUBLE": (1.5, None),
    "DECIMAL, pinned": (1, "decimal(18,2)"),
    "STRING": ("x", None),
    "STRING of anything": ("x", "string"),
    "BOOLEAN": (True, None),
    "TIMESTAMP": ({"$date": {"$numberLong": "0"}}, None),
    "BINARY": ({"$binary": {"base64": "AQI=", "subType": "00"}}, None),
    "STRUCT of a regex": ({"$regularExpression": {"pattern": "a", "options": "i"}}, None),
    "STRUCT of code with scope": ({"$code": "f", "$scope": {}}, None),
    "STRUCT of a dbPointer": (MEETINGS["dbPointer"][0], None),
    "STRUCT": ({"a": "x"}, None),
    "MAP, pinned": ({"a": "x"}, "map"),
    "ARRAY": (["x"], None),
}


def met(first: Any, pin: str | None, value: Any) -> str:
    """What happens to the column's type and to a value that it meets."""
    pins = parse_pins({"v": pin} if pin else {})
    before = joined([{"v": first}], pins=pins)
    after, _ = evolution.join(before, observe({"v": value}), pins=pins)
    row, rescued = cast.row({"v": value}, after)
    types = [column_types.ddl(schema.fields[0].type) for schema in (before, after)]
    if types[0] != types[1]:
        return f"→ {types[1]}"
    return "–" if rescued else "fits"


def test_each_meeting_is_as_documented() -> None:
    """Every cell of the table in docs/types.md is what happens."""
    lines = [line for line in LATTICE.read_text().splitlines() if line.startswith("|")]
    start = next(number for number, line in enumerate(lines) if line.startswith("| column"))
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:])
    assert header[1:] == list(MEETINGS)
    assert [cells[0] for cells in rows[: len(COLUMNS)]] == list(COLUMNS)
    for cells, (first, pin) in zip(rows, COLUMNS.values()):
        for cell, values in zip(cells[1:], MEETINGS.values(), strict=True):
            results = {met(first, pin, value) for value in values}
            assert results == set(cell.split(" or ")), (cells[0], cell, results)


@pytest.mark.parametrize("first", [1, "x", ["x"], {}, None])
def test_a_pinned_map_is_one_whatever_comes_first(first: Any) -> None:
    """A value that is no document does not choose another type: it is rescued, and the column is added with the first document."""
    pins = parse_pins({"v": "map"})
    before = joined([{"v": first}], pins=pins)
    assert not before.fields
    after, _ = evolution.join(before, observe({"v": {"a": "x"}}), pins=pins)
    assert [column_types.ddl(each.type) for each in after.fields] == ["MAP<STRING, STRING>"]
    _, rescued = cast.row({"v": first}, after)
    assert bool(rescued) is (first not in ({}, None))


@pytest.mark.parametrize("empty", [[], {}, [None], {"x": []}])
@pytest.mark.parametrize("pin", ["string", "double", "map<double>"])
def test_a_pinned_field_gets_its_column_with_its_first_value(empty: Any, pin: str) -> None:
    """As for any field: of two whose names collide, the same one keeps its name, in one batch and in several."""
    documents, pins = [{"v": empty}, {"V": 1}, {"v": 2.5}], parse_pins({"v": pin})
    for naming in (column_names.ColumnNaming(), column_names.ColumnNaming(flatten=True)):
        for schema in (joined(documents, pins=pins, naming=naming), together(documents, pins=pins, naming=naming)):
            assert [(column.path, column.name) for column in schema.columns] == [(("V",), "V"), (("v",), "v_2")]


@pytest.mark.parametrize("pin", ["int", "bigint", "double", "string", "decimal(20,2)"])
@pytest.mark.parametrize("value", [{"$numberLong": "5"}, 1.5, "x"])
def test_the_values_of_a_pinned_map_stay_as_they_are_pinned(value: Any, pin: str) -> None:
    """In one batch and in several, for any value."""
    documents, pins = [{"v": {"a": 1}}, {"v": {"b": value}}], parse_pins({"v": f"map<{pin}>"})
    ddl = "STRING" if pin == "string" else pin.upper()
    for schema in (joined(documents, pins=pins), together(documents, pins=pins)):
        assert table_ddl(schema) == f"`v` MAP<STRING, {ddl}>"


INT64, INEXACT = {"$numberLong": "5"}, {"$numberLong": "9007199254740993"}
REGEX = {"$regularExpression": {"pattern": "^a", "options": ""}}
RETYPED = (
    ([{"a": INT64}, {"a": 1.5}], "`a` DOUBLE"),
    ([{"a": INT64}, {"a": {"$numberDouble": "NaN"}}], "`a` DOUBLE"),
    ([{"a": 1.5}, {"a": INEXACT}], "`a` STRING"),
    ([{"a": 1}, {"a": "x"}], "`a` STRING"),
    ([{"a": "x"}, {"a": 1}], "`a` STRING"),
    ([{"a": INT64}, {"a": {"$numberDecimal": "1"}}], "`a` STRING"),
    ([{"a": True}, {"a": 1}], "`a` STRING"),
    ([{"a": {"b": 1}}, {"a": 1}], "`a` STRING"),
    ([{"a": 1}, {"a": {"b": 1}}], "`a` STRING"),
    ([{"a": [1]}, {"a": 1}], "`a` STRING"),
    ([{"a": REGEX}, {"a": "x"}], "`a` STRING"),
    ([{"a": [INT64]}, {"a": [1.5]}], "`a` ARRAY<DOUBLE>"),
    ([{"a": [{"b": 1, "c": 1}]}, {"a": [{"b": "x"}]}], "`a` ARRAY<STRUCT<`b`: STRING, `c`: INT>>"),
    ([{"a": {"b": {"c": 1}}}, {"a": {"b": {"c": "x"}}}], "`a` STRUCT<`b`: STRUCT<`c`: STRING>>"),
    ([{"a": {"b": INT64, "c": 1}}, {"a": {"b": 0.5}}, {"a": 1}], "`a` STRING"),
    ([{"a.b": 1, "a": {"b": 1}}, {"a.b": "x"}], "`a.b` STRING, `a` STRUCT<`b`: STRING>"),
    ([{"a": {"x.y": 1}}, {"a": {"x.y": "s"}}], "`a` STRUCT<`x.y`: STRING>"),
    ([{"a": {"$date": {"$numberLong": "0"}}}, {"a": {"$date": {"$numberLong": "-99999999999999"}}}], "`a` TIMESTAMP"),
    ([{"a": 1}, {"a": []}, {"a": {}}], "`a` INT"),
)


def conflicts(schema: document_schema.DocumentSchema, documents: list[Any]) -> list[retype.Conflict]:
    """The conflicts in the rescued values of the documents."""
    entries = [entry for document in documents for entry in cast.row(document, schema)[1].items()]
    return [each for path, text in entries for each in retype.conflicts(schema, path, text)]


@pytest.mark.parametrize(("documents", "columns"), RETYPED, ids=lambda value: str(value)[:60])
def test_columns_are_retyped_for_what_was_rescued(documents: list[Any], columns: str) -> None:
    """Numbers join to DOUBLE if that is exact, all else to STRING; then only values that have no other type are rescued."""
    schema = joined(documents)
    first, _ = retype.with_wider_types(schema, conflicts(schema, documents))
    after, _ = retype.with_wider_types(first, conflicts(first, documents))
    assert table_ddl(after) == columns
    assert conflicts(after, documents) == []
    assert evolution.join(after, observe(documents[0])) == (after, ())


def test_a_number_that_no_double_holds_makes_text_of_the_column() -> None:
    """A BIGINT that met a double becomes DOUBLE; if that is not exact for a value, it then becomes STRING."""
    documents = [{"a": INEXACT}, {"a": 1.5}]
    schema = joined(documents)
    first, changes = retype.with_wider_types(schema, conflicts(schema, documents))
    assert [(c.path, c.from_type, c.to_type) for c in changes] == [("a", "BIGINT", "DOUBLE")]
    second, _ = retype.with_wider_types(first, conflicts(first, documents))
    assert [cast.row(document, second) for document in documents] == [
        ({"a": '{"$numberLong":"9007199254740993"}'}, {}),
        ({"a": "1.5"}, {}),
    ]


def test_retyping_leaves_pins_alone() -> None:
    """The rescued values of a pinned column stay rescued."""
    documents = [{"a": 1, "m": {"x": 1}}, {"a": "x", "m": {"y": "z"}}]
    pins = parse_pins({"a": "int", "m": "map<int>"})
    schema = joined(documents, pins=pins)
    found = conflicts(schema, documents)
    assert {each.steps for each in found} == {("a",), ("m", column_types.VALUE)}
    after, changes = retype.with_wider_types(schema, found, pins=pins)
    assert (changes, table_ddl(after)) == ((), "`a` INT, `m` MAP<STRING, INT>")
    unpinned, changes = retype.with_wider_types(schema, found, pins=parse_pins({"a": "int", "m": "map"}))
    assert [change.path for change in changes] == ["m.*"]
    assert table_ddl(unpinned) == "`a` INT, `m` MAP<STRING, STRING>"


def test_retyping_flattened_documents_takes_their_columns_together() -> None:
    """A flattened document that met a scalar becomes one column; the others keep their names and places."""
    naming = column_names.ColumnNaming(flatten=True)
    documents = [{"a": {"b": 1, "c": 1}, "d": 1}, {"a": "x"}]
    schema = joined(documents, naming=naming)
    assert table_ddl(schema) == "`a_b` INT, `a_c` INT, `d` INT"
    after, changes = retype.with_wider_types(schema, conflicts(schema, documents))
    assert table_ddl(after) == "`d` INT, `a` STRING"
    assert cast.row(documents[0], after) == ({"d": 1, "a": '{"b":1,"c":1}'}, {})
    assert evolution.differences(schema, after) == changes


def test_an_element_is_retyped_beside_a_field_that_is_called_like_its_index() -> None:
    """With `array.encoding: document` the path `a.0` leads to the field `0` of a document, and to the first element of an array."""
    naming = column_names.ColumnNaming(values=FieldValues(ArrayEncoding.DOCUMENT))
    documents = [{"a": {"0": "x", "b": 1}}, {"a": [1]}, {"a": ["y"]}, {"a": [{"$oid": "64b7f0000000000000000001"}]}]
    schema = joined(documents, naming=naming)
    assert table_ddl(schema) == "`a` STRUCT<`0`: STRING, `b`: INT, `_0`: INT>"
    after, _ = retype.with_wider_types(schema, conflicts(schema, documents))
    assert table_ddl(after) == "`a` STRUCT<`0`: STRING, `b`: INT, `_0`: STRING>"
    assert all(cast.row(document, after)[1] == {} for document in documents)


def test_differences_name_each_field_once() -> None:
    """Added, retyped and removed fields, at any depth; equal schemas have none."""
    before, after = joined([{"a": {"b": 1, "x": 1}, "c": 1}]), joined([{"c": 1, "a": {"b": "s"}, "d": True}])
    told = {(c.path, c.what.value, c.from_type, c.to_type) for c in evolution.differences(before, after)}
    assert told == {
        ("a.b", "retyped", "INT", "STRING"),
        ("a.x", "removed", "INT", None),
        ("d", "added", None, "BOOLEAN"),
    }
    assert evolution.differences(before, before) == ()


def test_keys_that_are_data_two_levels_deep_have_an_end() -> None:
    """A table has a maximum of columns, however they are nested: fields beyond it are rescued, and known fields are still typed."""
    first = {"_id": 1, "per_day": {f"day{day}": {f"user{user}": user for user in range(500)} for day in range(30)}}
    before = joined([first])
    per_day = before.fields[1].type
    assert isinstance(per_day, column_types.Struct) and len(per_day.fields) == 20
    after, changes = evolution.join(before, observe({"_id": 1, "new": 1, "per_day": {"day0": {"another": 1}}}))
    assert (after, changes) == (before, ())
    row, rescued = cast.row({"_id": 2, "new": 1, "per_day": {"day0": {"user7": 7}}}, before)
    assert row["per_day"]["day0"]["user7"] == 7 and set(rescued) == {"new"}


def test_a_value_of_two_columns_has_both_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one more column, a flattened regular expression is rescued whole, and later batches leave the schema as it is."""
    monkeypatch.setattr(evolution, "MAX_COLUMNS", 3)
    document = {"_id": 1, "a": 1, "r": {"$regularExpression": {"pattern": "a+", "options": "i"}}}
    naming = column_names.ColumnNaming(flatten=True)
    schema = joined([document], naming=naming)
    row, rescued = cast.row(document, schema)
    assert (row, set(rescued)) == ({"_id": 1, "a": 1}, {"r"})
    assert evolution.join(schema, observe(document), naming=naming) == (schema, ())
    assert [column.name for column in joined([document, {"_id": 2, "b": 1}], naming=naming).columns] == ["_id", "a", "b"]
