"""The rule of "source equals gold" for one document and one row."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import cast, document_schema, evolution, kinds, pins, retype
from cdc_core.schema import names as column_names
from cdc_core.schema.shape import observe
from cdc_core.snapshot import key_filter
from cdc_core.verify import equality
from tests.harness import pace

UTC = datetime.UTC


def schema_of(*documents: Any, flatten: bool = False) -> document_schema.DocumentSchema:
    """The schema after these documents, in their order."""
    schema = document_schema.EMPTY
    for number, each in enumerate(documents):
        naming = column_names.ColumnNaming(flatten=flatten)
        schema, _ = evolution.join(schema, observe(each, mark=f"{number:03}"), naming=naming)
    return schema


def row(columns: dict[str, Any], rescued: dict[str, str] | None = None, **others: Any) -> equality.TableRow:
    return equality.TableRow(columns, rescued or {}, others)


def found(document: Any, held: equality.TableRow, schema: document_schema.DocumentSchema) -> dict[str, str]:
    read = equality.ExactDocument.read(json.dumps(document))
    return {each.path: each.what for each in equality.differences(read, held, schema)}


TYPED = {
    "_id": 1,
    "n": 5,
    "x": 1.5,
    "s": "5",
    "d": {"a": 1, "b": {"c": "x"}},
    "l": [1, 2],
    "at": {"$date": {"$numberLong": "0"}},
}
HELD = {
    "_id": 1,
    "n": 5,
    "x": 1.5,
    "s": "5",
    "d": {"a": 1, "b": {"c": "x"}},
    "l": [1, 2],
    "at": datetime.datetime(1970, 1, 1, tzinfo=UTC),
}


@pytest.mark.parametrize(
    ("changed", "path", "what"),
    [
        ({"n": 6}, "n", "another value"),
        ({"n": "5"}, "n", "whole number in the source, string in the table"),
        ({"n": None}, "n", "in the source, not in the table"),
        ({"s": 5}, "s", "string in the source, whole number in the table"),
        ({"x": 1.25}, "x", "another value"),
        ({"d": {"a": 1, "b": {"c": "y"}}}, "d.b.c", "another value"),
        ({"d": {"a": 1, "b": None}}, "d.b", "in the source, not in the table"),
        ({"l": [1]}, "l", "2 elements in the source, 1 in the table"),
        ({"l": [1, 3]}, "l.1", "another value"),
        ({"at": datetime.datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)}, "at", "another value"),
        ({"at": 0}, "at", "time in the source, whole number in the table"),
    ],
)
def test_every_difference_has_its_path_and_shows_no_value(changed: dict[str, Any], path: str, what: str) -> None:
    """One changed cell is one difference, with its path and in words; the digest changes too."""
    schema = schema_of(TYPED)
    assert found(TYPED, row(HELD), schema) == {}
    assert found(TYPED, row(HELD | changed), schema) == {path: what}
    assert equality.digest(row(HELD | changed)) != equality.digest(row(HELD))


def test_absent_is_null_and_nan_is_nan_and_the_order_of_fields_does_not_count() -> None:
    """What the rule ignores is no difference, and does not change the digest."""
    schema = schema_of({"_id": 1, "a": 1, "b": {"c": 1, "d": 2}, "x": 1.5})
    document = {"x": {"$numberDouble": "NaN"}, "b": {"d": 2, "c": None}, "_id": 1}
    held = row({"_id": 1, "a": None, "b": {"c": None, "d": 2}, "x": float("nan")})
    assert found(document, held, schema) == {}
    read = equality.ExactDocument.read(json.dumps(document))
    assert equality.digest(read.expected(schema)) == equality.digest(held)
    assert equality.digest(row({"x": 0.0})) != equality.digest(row({"x": -0.0}))
    assert equality.digest(row({"x": Decimal("1.50")})) != equality.digest(row({"x": "1.50"}))
    assert equality.digest(row({"x": {}})) != equality.digest(row({"x": None})) != equality.digest(row({"x": []}))


def test_what_was_rescued_before_its_column_came_is_equal() -> None:
    """A row of an earlier schema has `[]`, or a part of a document, in `__rescued`, while today's schema has columns for them."""
    schema = schema_of({"_id": 1, "a.b": 1}, {"_id": 2, "list": [7], "deep": {"x": 1, "more": {"y": 2}}})
    document = {"_id": 1, "list": [], "deep": {"x": 1, "more": {}}}
    assert found(document, row({"_id": 1, "list": [], "deep": {"x": 1, "more": {}}}), schema) == {}
    early = row({"_id": 1, "list": None, "deep": {"x": 1, "more": None}}, {"list": "[]", "deep.more": "{ }"})
    assert found(document, early, schema) == {}
    assert found(document, row({"_id": 1, "deep": {"x": 1, "more": {}}}, {"list": "[1]"}), schema) == {
        "list": "in the source, not in the table"
    }


@pytest.mark.parametrize("last", ["[]", "5", "null"])
def test_the_values_of_a_repeated_field_are_equal_whatever_their_numbers(last: str) -> None:
    """The last value was rescued before its column came: without it, the others count from one."""
    document = equality.ExactDocument.read(f'{{"_id":1,"x":2,"x":3,"x":{last}}}')
    before, _ = evolution.join(document_schema.EMPTY, observe({"_id": 1}))
    schema, _ = evolution.join(before, observe({"x": [7]} if last == "[]" else {"x": 7}))
    row = document.expected(before)
    assert equality.differences(document, row, schema) == ()
    texts = [*row.rescued.values()]
    for number, path in enumerate(row.rescued):
        planted = {**row.rescued, path: texts[number - 1]}
        assert equality.differences(document, equality.TableRow(row.columns, planted, {}), schema)
        del planted[path]
        assert equality.differences(document, equality.TableRow(row.columns, planted, {}), schema)


def test_a_flattened_document_of_which_nothing_was_in_a_column_is_equal() -> None:
    """It was rescued as `{}` beside its values. Today one of these has a column, and the other still does not fit."""
    schema = schema_of({"_id": 1, "a": {"n": 1}}, {"_id": 2, "a": {"list": [7]}}, flatten=True)
    early = {"a.n": '"x"', "a.list": "[]", "a": "{}"}
    assert found({"_id": 3, "a": {"n": "x", "list": []}}, row({"_id": 3}, early), schema) == {}
    assert found({"_id": 3, "a": {"n": "x", "list": [7]}}, row({"_id": 3}, early), schema)


def test_a_value_in_an_array_that_is_a_map_is_rescued_under_its_index() -> None:
    """With `array.encoding: document`, arrays can be the documents of a MAP; later the value gets a column, and is still found."""
    first, document, later = {"m": {"k": {"a": 1}}}, {"m": [{"b": {}}]}, {"m": {"k": {"b": {"c": 1}}}}
    naming = column_names.ColumnNaming.of(unwrap_options.parse({"array.encoding": "document"}))
    schemas = [document_schema.EMPTY]
    for number, each in enumerate((first, later)):
        shape = observe(kinds.laid_out(each, naming.values), mark=f"{number}")
        schemas.append(evolution.join(schemas[-1], shape, naming=naming, pins=pins.parse_pins({"m": "map"}))[0])
    columns, rescued = cast.row(document, schemas[1])
    assert rescued == {"m.0.b": "{}"}
    assert found(document, row({"m": {"_0": {"a": None, "b": None}}}, rescued), schemas[2]) == {}


def test_a_rescued_value_is_equal_by_its_type_and_not_by_its_print() -> None:
    """`"5"`, 5.0 and an int64 5 in `__rescued` are different values; a value that is missing is reported."""
    schema = schema_of({"_id": 1, "n": 1})
    texts = {'"5"': "5", "5.0": 5.0, '{"$numberLong":"5"}': {"$numberLong": "5"}}
    for text, value in texts.items():
        document = {"_id": 1, "n": value}
        assert equality.ExactDocument.read(json.dumps(document)).expected(schema).rescued == {"n": text}
        assert found(document, row({"_id": 1}, {"n": text}), schema) == {}
        for other in texts.keys() - {text}:
            assert found(document, row({"_id": 1}, {"n": other}), schema)
    assert found({"_id": 1, "n": "5"}, row({"_id": 1}), schema) == {"n": "neither in its column nor rescued"}


@pytest.mark.parametrize(
    ("value", "planted"),
    [(5, 5.0), (1, True), (0.0, -0.0), ({"$numberDecimal": "1.10"}, {"$numberDecimal": "1.1"}), ({"k": [1]}, {"k": [1.0]})],
)
@pytest.mark.parametrize("place", ["rescued", "rescued, then a column", "within what is rescued", "text"])
def test_numbers_that_only_compare_equal_are_differences(value: Any, planted: Any, place: str) -> None:
    """In Python 5, 5.0 and true are equal, and so are both zeros.

    In `__rescued` and in text columns they differ, even if the row was written before its column was added.
    """
    array = schema_of({"_id": 1, "n": [1, "a", {"b": 1}]})
    schema = array if place == "text" else schema_of({"_id": 1, "n": {"$binary": {"base64": "", "subType": "00"}}})
    now = schema_of({"_id": 1, "n": {"k": [7]}} if isinstance(value, dict) else {"_id": 1, "n": value})
    document, other = ({"_id": 1, "n": [each] if place != "rescued" else each} for each in (value, planted))
    later = now if place == "rescued, then a column" else schema
    held, wrong = (equality.ExactDocument.read(json.dumps(each)).expected(schema) for each in (document, other))
    assert found(document, held, later) == {}
    assert found(document, wrong, later) != {}
    assert equality.digest(held) != equality.digest(wrong)


def test_columns_that_no_document_has_are_differences() -> None:
    """A value in a column that the schema does not know was written by someone else."""
    schema = schema_of({"_id": 1})
    assert found({"_id": 1}, row({"_id": 1}, None, planted=1, empty=None), schema) == {"planted": "no field of the source"}
    assert equality.digest(row({"_id": 1}, None, planted=1)) != equality.digest(row({"_id": 1}, None, empty=None))


def test_types_that_no_column_of_ours_has_are_differences() -> None:
    """If someone else retyped a column, its values differ from those of any document."""
    schema = schema_of({"_id": 1, "at": {"$date": {"$numberLong": "0"}}})
    document = {"_id": 1, "at": {"$date": {"$numberLong": "0"}}}
    held = datetime.datetime(1970, 1, 1, tzinfo=UTC)
    assert found(document, row({"_id": 1, "at": held}), schema) == {}
    for other in (held.replace(tzinfo=None), held.date(), held - held, held.time()):
        assert list(found(document, row({"_id": 1, "at": other}), schema)) == ["at"]
        assert equality.digest(row({"_id": 1, "at": other})) != equality.digest(row({"_id": 1, "at": held}))


def test_only_what_a_document_can_have_is_a_key() -> None:
    """Other values in the key column of a table belong to no document, and are never queried."""
    keys = ["5", '"x"', "null", '{"$oid":"65f0c0ffee0123456789abcd"}', '{"a":{"$numberDecimal":"1E-1"}}']
    keys += ['"' + "[" * 700 + '"', '{"a":' * 179 + '{"$oid":"65f0c0ffee0123456789abcd"}' + "}" * 179]
    assert [key_filter.is_key(each) for each in keys] == [True] * len(keys)
    others = ["", "planted", "5 ", "05", "5.0", '5,"_id":6', "5}", '{"$oid":"x"}', '{"a":', "NaN", "[" * 3000, '"\\ud800"']
    # The server refuses a command with such a value, whatever depth this Python can read.
    others += [
        opening * levels + "5" + closing * levels
        for levels in (182, 230, 700)
        for opening, closing in ("[]", ('{"a":', "}"))
    ]
    assert [each for each in others if key_filter.is_key(each)] == []
    assert [each for each in others if key_filter.can_ask(each)] == []


def test_a_repair_travels_as_a_condition() -> None:
    """The keys survive the filter, and become the condition of `find`."""
    keys = ["5", '"x"', '{"$oid":"65f0c0ffee0123456789abcd"}', '{"a":{"$numberDecimal":"1E-1"}}']
    assert key_filter.keys_of(key_filter.filter_of(keys)) == tuple(keys)
    assert key_filter.keys_of('{"state": "new"}') is None and key_filter.keys_of(None) is None
    assert key_filter.keys_of('{"$comment": "not a medallion repair []"}') is None
    for said in ("5", "{}", "[5]", "null", "[" * 100_000):
        assert key_filter.keys_of(json.dumps({"$comment": f"medallion repair {said}"})) is None
    assert [str(each) for each in key_filter.condition(keys[:3])["_id"]["$in"]] == ["5", "x", "65f0c0ffee0123456789abcd"]


def test_keys_are_asked_for_as_far_as_a_command_has_room() -> None:
    """Also for large keys: the `_id` of a document may be a document of some MB."""
    large = [f'"{each * 900_000}"' for each in "abc"]
    found = [*key_filter.portions(["1", "2", "3", *large, "4"], most=3)]
    assert found == [["1", "2", "3"], large[:2], [large[2], "4"]]
    assert [*key_filter.portions([], most=3)] == []


def test_a_repair_asks_for_the_very_bytes_or_not_at_all() -> None:
    """A value that Python or a driver has converted may match no document, and then the row would be deleted."""
    repeated = b"\x03_id\0" + bson({"a": 1}, {"a": 2})
    keys = [
        '{"a":1,"a":2}',
        '{"$dbPointer":{"$ref":"x","$id":{"$oid":"64b7f0000000000000000001"}}}',
        '{"$bytes":{"base64":"AwAAAP//AA==","type":2}}',
        '{"$minKey":1}',
        '{"b":{"$undefined":true}}',
    ]
    assert all(map(key_filter.can_ask, keys))
    raw = key_filter.condition(keys)["_id"].raw
    assert repeated[5:] in raw and b"\x02" + b"2\0" + b"\x03\0\0\0\xff\xff\0" in raw
    assert not any(map(key_filter.can_ask, ['{"$undefined":true}', '{"$size":1}', "planted", "", '"\\ud800"', "05"]))


def bson(*fields: dict[str, int]) -> bytes:
    body = b"".join(
        b"\x10" + name.encode() + b"\0" + value.to_bytes(4, "little") for each in fields for name, value in each.items()
    )
    return (len(body) + 5).to_bytes(4, "little") + body + b"\0"


EXACT = {
    ('{"a":1,"b":2}', '{"b":2,"a":1}'): (),
    ('{"a":1}', '{"a":1.0}'): (("a", "int32 in the source, double in the table"),),
    ('{"a":1}', '{"a":{"$numberLong":"1"}}'): (("a", "int32 in the source, int64 in the table"),),
    ('{"a":0.0}', '{"a":-0.0}'): (("a", "another value"),),
    ('{"a":null}', "{}"): (("a", "in the source, not in the table"),),
    ('{"a":{"b":1}}', '{"a":{"b":1,"$$oid":2}}'): (("a.$oid", "in the table, not in the source"),),
    ('{"a":{"$oid":"5f"}}', '{"a":{"$oid":"6f"}}'): (("a", "another value"),),
    ('{"a":[1,[2]]}', '{"a":[1,[3]]}'): (("a.1.0", "another value"),),
    ('{"a":[]}', '{"a":{}}'): (("a", "[] in the source, {} in the table"),),
    ('{"a":[1]}', '{"a":[1,1]}'): (("a", "1 elements in the source, 2 in the table"),),
    ('{"a":1,"a":2}', '{"a":2}'): (("a", "it is there twice"),),
    ('{"a":{"$binary":{"base64":"","subType":"00"}}}', '{"a":{"$binary":{"base64":"","subType":"05"}}}'): (
        ("a", "another value"),
    ),
}


@pytest.mark.parametrize(("source", "held"), EXACT)
def test_documents_of_bronze_are_compared_as_they_are(source: str, held: str) -> None:
    """Types, null against absent, and repeated fields matter; the order of fields does not. Digests agree."""
    found = equality.exact_differences(source, held)
    assert tuple((each.path, each.what) for each in found) == EXACT[source, held]
    assert (equality.exact_digest(source) == equality.exact_digest(held)) is (not found)


def test_a_rescued_name_of_very_many_dots_is_found() -> None:
    """Only parts of a path that are existing names are tried, not each prefix of the path."""
    name = "." * 20_000
    schema, _ = evolution.join(document_schema.EMPTY, observe({"_id": 1, "a": {"b.c": 1}}))
    document = equality.ExactDocument.read(json.dumps({"_id": 1, "a": {"b.c": 1, name: "x"}}))
    row = equality.TableRow({"_id": 1, "a": {"b.c": 1}}, {f"a.{name}": '"x"'}, {})
    with pace.within(1):
        assert not equality.differences(document, row, schema)
        assert equality._pruned(document.parsed, ["a", *name.split(".")], "x") == {"_id": 1, "a": {"b.c": 1, name: None}}
        assert not retype.conflicts(schema, f"a.{name}", '"x"')
        assert [each.steps for each in retype.conflicts(schema, "a.b.c", '"x"')] == [("a", "b.c")]


def test_a_document_costs_by_its_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep it is, no part is written out more than once, and however many of its fields are rescued, none is searched for."""
    written: list[int] = []
    as_text = equality._as_text
    monkeypatch.setattr(equality, "_as_text", lambda value: written.append(len(text := as_text(value))) or text)
    texts = [f'{{"a":[{{"n":{{"n":{{"n":{{"long":"{"x" * 1000}","last":{last}}}}}}}}}]}}' for last in (1, 2)]
    (difference,) = equality.exact_differences(*texts)
    assert difference.path == "a.0.n.n.n.last" and sum(written) < 3 * len(texts[0])

    class Names(dict):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("its names were searched")

    held = Names({"$$ref": 1, "a": 2, "a.b": 3})
    assert equality._readings(held, ["a", "b"]) == [(1, "a"), (2, "a.b")]
    assert equality._readings(held, ["$ref", "b"]) == [(1, "$$ref")] and equality._readings(held, ["$$ref"]) == []
