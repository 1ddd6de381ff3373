"""Decoding by column against the exact path: for random schemas and documents, also corrupt ones, both give the same."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.extended_json import wrappers
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import cast, column_types, document_schema, evolution
from cdc_core.schema import names as column_names
from cdc_core.schema.pins import Pins, parse_pins
from cdc_core.schema.shape import Shape, observe
from cdc_core.typed import decoding, document_readers, exact
from tests.harness import pace, typed_cases

NUMBERS = [
    0, 5, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1, 10**30,
    1.5, -0.0, 0.1, 1e22, 5e-324, 1.7976931348623157e308, 3.0, 123456789.125, 1e-7,
]  # fmt: skip
LONGS = [
    "5",
    "-7",
    "9007199254740993",
    "-9223372036854775808",
    "9223372036854775807",
    "9223372036854775808",
    " 5",
    "1_0",
    "x",
    "",
]
DATES = [
    "0",
    "-1",
    "253402300799999",
    "253402300800000",
    "-62135596800000",
    "-62135596800001",
    "9223372036854775808",
    "1e3",
    "\u0665",
]
SCALARS: list[Any] = [
    None, True, False, *NUMBERS, "", "x", "5", "nul\x00", "tab\t\n\x1f", "é\U0001f600", "[1]", '{"a":1}', ':x', ' : "', '\\', '":', "NaN",
    *({"$numberLong": text} for text in LONGS), *({"$date": {"$numberLong": text}} for text in DATES),
    *({"$numberDouble": text} for text in ("NaN", "Infinity", "-Infinity", "1.5", "inf", "x")), {"$numberInt": "5"}, {"$numberInt": "x"},
    *({"$numberDecimal": text} for text in ("1.50", "1E+3", "NaN", "-12345678901234567890.123", "x")),
    {"$oid": "64b7f0000000000000000001"}, {"$oid": 5}, {"$oid": {}}, {"$date": "2020-01-01T00:00:00Z"}, {"$date": {"$numberLong": 5}},
    {"$timestamp": {"t": 4294967295, "i": 1}}, {"$timestamp": {"t": "x", "i": 1}}, {"$binary": {"base64": "AQI=", "subType": "80"}},
    {"$binary": {"base64": "!", "subType": "00"}}, {"$binary": {"base64": "AQI="}}, {"$regularExpression": {"pattern": "^a\"\\", "options": "i"}},
    {"$symbol": "sy"}, {"$code": "f()"}, {"$code": "f()", "$scope": {"a": 1e22, "b": {"$oid": "x"}}}, {"$minKey": 1}, {"$maxKey": 1},
    {"$undefined": True}, {"$dbPointer": {"$ref": "a.b", "$id": {"$oid": "64b7f0000000000000000001"}}}, [], {}, [None], [[]], [{}],
    {"a": None}, {"a": []}, {"$ref": "c", "$id": {"$oid": "64b7f0000000000000000001"}, "$db": "d"}, {"$$ref": 1}, {"$$oid": "x"},
    {"$$$date": 5}, {"$oid": "x", "a": 1, "b": 2}, [1, "a", {"b": 2}], [[1], [2.5]], [{"a": 1}, {"a": "x"}],
]  # fmt: skip
NAMES = [
    "a",
    "A",
    "b",
    "c",
    "",
    "a.b",
    "$id",
    "x y",
    "é",
    "__key",
    "`",
    "${x}",
    "'\"\\",
    "_id",
    "$$oid",
    "$ref",
    "m",
    "0",
    "a#2",
    "$$numberLong",
    "$$code",
    "_0",
    "e\u0301",
    "\u212a",
    "k",
    "n" * 300,
    "f0",
    "\u2028",
    ".",
]
TYPES: list[column_types.ColumnType] = [
    *column_types.Scalar,
    column_types.Decimal(10, 2),
    column_types.Decimal(38, 0),
]


def value(chance: random.Random, depth: int, few: list[Any], names: list[str]) -> Any:
    """A value: mostly one of a few, sometimes any, sometimes nested."""
    draw = chance.random()
    if depth and draw < 0.15:
        return [value(chance, depth - 1, few, names) for _ in range(chance.randrange(4))]
    if depth and draw < 0.3:
        return {
            name: value(chance, depth - 1, few, names)
            for name in chance.sample(names, chance.randrange(min(5, len(names) + 1)))
        }
    return chance.choice(few if draw < 0.98 else SCALARS)


def column_type(chance: random.Random, depth: int, names: list[str]) -> column_types.ColumnType:
    """A type that inference may not produce."""
    draw = chance.random()
    if depth and draw < 0.15:
        return column_types.Array(column_type(chance, depth - 1, names))
    if depth and draw < 0.25:
        return column_types.Map(column_type(chance, depth - 1, names))
    if depth and draw < 0.45:
        return column_types.Struct(fields(chance, depth - 1, names))
    return chance.choice(TYPES)


def fields(chance: random.Random, depth: int, names: list[str]) -> tuple[column_types.Field, ...]:
    taken = column_names.UsedNames()
    chosen = {wrappers.unescape_key(name) for name in chance.sample(names, chance.randrange(1, len(names) + 1))}
    return tuple(
        column_types.Field(name, taken.unique(column_names.fit(name)), column_type(chance, depth, names))
        for name in sorted(chosen)
    )


def schema_of(chance: random.Random, texts: list[str], names: list[str]) -> tuple[document_schema.DocumentSchema, Pins]:
    """A schema that fits some of the documents, or a random one."""
    numbered = {"array.encoding": "document"}
    flat = {"flatten.struct": "true"}
    options = chance.choice([{}] * 8 + [flat] * 3 + [numbered] * 2 + [numbered | flat] * 3)
    naming = column_names.ColumnNaming.of(unwrap_options.parse(options))
    pins = {}
    if chance.random() < 0.2:
        pins = parse_pins(
            {name: chance.choice(["int", "bigint", "double", "string", "decimal(20,2)", "map"]) for name in ("a", "b")}
        )
    shape = Shape()
    if chance.random() < 0.5:
        for number, text in enumerate(texts[: chance.randrange(1, 30)]):
            exact.observed(shape, text, f"{number:09d}", values=naming.values)
        return evolution.join(document_schema.EMPTY, shape, pins=chance.choice([pins, {}]), naming=naming)[0], pins
    drawn = document_schema.DocumentSchema(fields(chance, 2, names), (), naming)
    return evolution.join(drawn, shape, naming=naming)[0], pins


def harmed(chance: random.Random, text: str) -> str:
    """The text, sometimes with something in it that no BSON library writes."""
    draw = chance.randrange(40)
    at = chance.randrange(len(text))
    match draw:
        case 0:
            return text[:-1] + (',"a":1}' if len(text) > 2 else '"a":1}')
        case 1:
            return text[:-1] + (',"b":{"c":1,"c":{"a":"x"}}}' if len(text) > 2 else '"b":[{"c":1,"c":2}]}')
        case 2:
            return text.replace('":', '" :', chance.randrange(1, 3)).replace("{", "{\n", 1)
        case 3:
            return text.replace('"a"', '"\\u0061"')
        case 4:
            return text.replace(
                '"x"', chance.choice(['"\\ud800"', '"\\ud83d\\ude00"', '"\\uDC00x"', '"\\\\":1"', '"\\u005c\\":"'])
            )
        case 5:
            return (
                text[:at]
                + chance.choice(['"', "}", "{", ",", "\\", "\x01", "1", "e", "-", "NaN", " ", "[", "]", ":", "\ufeff"])
                + text[at:]
            )
        case 6:
            return text[:at] + text[at + 1 :]
        case 7:
            return text.replace(
                "1.5",
                chance.choice(["1e400", "NaN", "-Infinity", "01", "1.", "-0", "1E5", "-0.0", "1.50", "0.1e1", "1e-400"]),
            )
        case 8:
            return json.dumps(json.loads(text), indent=1)
        case 9:
            return json.dumps(json.loads(text), ensure_ascii=True)
        case _:
            return text


def agree(seed: int, count: int) -> int:
    """Types the documents of a random collection in both ways and compares them; returns how many took the fast path."""
    chance = random.Random(seed)
    few = chance.sample(SCALARS, chance.choice([2, 5, 12]))
    names = chance.sample(NAMES, chance.randrange(2, 8))
    texts: list[str | None] = []
    for _ in range(count):
        document = {name: value(chance, 3, few, names) for name in chance.sample(names, chance.randrange(len(names)))}
        texts.append(harmed(chance, json.dumps(document, separators=(",", ":"), ensure_ascii=False)))
    schema, pins = schema_of(chance, [text for text in texts if text], names)
    decoder, fast = decoding.Decoder(schema, pins), 0
    texts[chance.randrange(count)] = None
    for start in range(0, count, 64):
        part = pa.array(texts[start : start + 64], pa.string())
        typed, expected = decoder.typed(part), exact.rows(part, schema)
        assert typed.rows.type == expected.type
        for number, (left, right) in enumerate(zip(typed.rows.to_pylist(), expected.to_pylist(), strict=True)):
            assert typed_cases.plain(left) == typed_cases.plain(right), (seed, start + number, texts[start + number])
        typed.rows.validate(full=True)
        for text, isnt_known in zip(part.to_pylist(), typed.new.to_pylist()):
            shape = Shape()
            if text is not None and not isnt_known:
                exact.observed(shape, text, "", values=schema.naming.values)
                assert evolution.join(schema, shape, pins=pins)[1] == (), (seed, text)
        fast += len(part) - typed.exact
    return fast


def test_large_documents_are_decoded_a_few_at_a_time() -> None:
    """Decoded numbers take many times the memory of their text, however many such documents a batch has."""
    assert 8 < decoding.slice_rows(pa.array(["x" * 2**20] * 100)) <= 16
    assert decoding.slice_rows(pa.array(["x" * 2**25] * 2)) == 1
    assert decoding.slice_rows(pa.array(["x" * 2**13] * 1000)) == decoding.SLICE_ROWS  # each column has a fixed cost


def test_the_decoder_learns_from_the_first_large_document() -> None:
    """The exact path takes twenty times as long. What it shows of the first one, an ObjectId, is true of the others."""
    texts = pa.array([f'{{"_id":{{"$oid":"{number:024x}"}},"list":{[0.5] * 50_000}}}' for number in range(10)])
    schema = evolution.join(document_schema.EMPTY, observe(json.loads(texts[0].as_py())))[0]
    assert decoding.Decoder(schema).typed(texts).exact == 1


@pytest.mark.parametrize("are_sparse", [False, True])
@pytest.mark.parametrize("start", [0, 10, 20, 30])
def test_any_documents(start: int, are_sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document gives the same by column as alone, also when read key by key.

    All documents that would change the schema are reported.
    """
    if are_sparse:
        monkeypatch.setattr(document_readers, "DocumentReader", document_readers.SparseReader)
    fast = sum(agree(seed, 80) for seed in range(start, start + 10))
    assert fast > 200


@pytest.mark.parametrize(("value", "text"), [({}, "{}"), ("x", '"x"')])
def test_an_empty_document_is_kept_beside_another_of_its_path(value: Any, text: str) -> None:
    """Flattened, an empty document has no column: the value of a field with dots in its name does not represent it."""
    shape, documents = Shape(), [{"a.b": {"x": 1}, "a": {"b": {"y": 1}, "c": 1}}, {"a.b": value, "a": {"b": {}, "c": 1}}]
    shape.see(documents[0], "")
    naming = column_names.ColumnNaming(flatten=True)
    schema, _ = evolution.join(document_schema.EMPTY, shape, naming=naming)
    texts = pa.array(map(json.dumps, documents), pa.string())
    for rows in (exact.rows(texts, schema), decoding.Decoder(schema).typed(texts).rows):
        assert rows.field("rescued").to_pylist() == [None, [("a.b", text), ("a.b#2", "{}")]]


def test_what_is_expected_is_fast() -> None:
    """Documents that fit take the fast path, including nulls, empty values, far dates and values of another type."""
    documents = [
        {
            "_id": {"$oid": "64b7f0000000000000000001"},
            "at": {"$date": {"$numberLong": "253402300800000" if number % 7 == 0 else "5"}},
            "empty": [],
            "nothing": None,
            "items": [{"price": 1.5, "options": {}}, {"price": "free" if number % 5 == 0 else 2}],
            "total": {"$numberDecimal": "1.50"},
            "n": {"$numberLong": "5"} if number % 2 else 7,
            "d": {"$numberDouble": "NaN"} if number % 2 else 2.5,
            "text": 'a ":" in {"json":"text"}',
            "when": {"$date": {"$numberLong": str(number * 1000)}} if number % 4 else {"$numberLong": "5"},
            "ref": {"$oid": "64b7f0000000000000000001"} if number % 3 else {"$numberDecimal": "1.50"},
        }
        for number in range(3000)
    ]  # fmt: skip
    texts = pa.array([json.dumps(document, separators=(",", ":")) for document in documents])
    shape = Shape()
    for number, text in enumerate(texts[1:3].to_pylist()):
        exact.observed(shape, text, str(number), values=unwrap_options.FieldValues())
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape)[0])
    typed = decoder.typed(texts)
    assert typed.exact < 100 and typed.new.true_count == 0
    expected = exact.rows(texts, decoder.schema)
    assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(expected.to_pylist())


def test_what_a_pin_makes_of_plain_values_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in a pinned DECIMAL, plain values in a pinned STRING, and empty values without a column are read without a call for each.

    What a DECIMAL cannot hold is rescued as usual.
    """
    decimals = ("12.50", "-0.10", "0", "-0.0", "99999999.99", "7")
    numbers: list[Any] = [*({"$numberDecimal": text} for text in decimals), 5, -0.0, 12.25]
    documents = [
        {"money": number, "whole": 7, "any": value, "tags": [], "more": {}}
        for number in numbers
        for value in (5, -0.0, 1e22, True, "x")
    ]
    odd: list[Any] = ["1E+3", "NaN", "100000000", "0.001", "1.500", "-0E-3", "0" * 9 + "1", "x", " 1"]
    odd = [{"$numberDecimal": text} for text in odd] + [1e8, 1e-3, 2**63, {"$numberLong": "5"}, "5", True, [], {}]
    texts = pa.array([json.dumps(document, separators=(",", ":")) for document in documents])
    pins = parse_pins({"money": "decimal(10,2)", "whole": "decimal(20,0)", "any": "string"})
    shape = Shape()
    exact.observed(shape, texts[0].as_py(), "", values=unwrap_options.FieldValues())
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape, pins=pins)[0], pins)
    expected = exact.rows(texts, decoder.schema)
    for document in [*({"money": value} for value in odd), *({"whole": value} for value in odd)]:
        both = pa.array([texts[0].as_py(), json.dumps(document)])
        assert typed_cases.plain(decoder.typed(both).rows.to_pylist()) == typed_cases.plain(
            exact.rows(both, decoder.schema).to_pylist()
        ), document
    decoder = decoding.Decoder(decoder.schema, pins)
    decoder.typed(texts)
    monkeypatch.setattr(cast, "cast", lambda *_: pytest.fail("a plain value was cast alone"))
    assert typed_cases.plain(decoder.typed(texts).rows.to_pylist()) == typed_cases.plain(expected.to_pylist())


def test_what_a_pinned_int_cannot_hold_is_no_change_of_the_schema() -> None:
    """Without the pin the column would widen. Documents that seem to change the schema are all inferred from, batch after batch, which
    takes ten times as long.
    """
    values: list[Any] = [{"$numberLong": str(2**40)}, {"$numberLong": "5"}, 2**40, 1.5, {"$numberDouble": "NaN"}, "x"]
    texts = pa.array([json.dumps({"a": value}, separators=(",", ":")) for value in values] * 20)
    shape = Shape()
    exact.observed(shape, '{"a":1}', "", values=unwrap_options.FieldValues())
    pins = parse_pins({"a": "int"})
    for given in (pins, {}):
        decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape, pins=given)[0], given)
        decoder.typed(texts)
        typed = decoder.typed(texts)
        assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(exact.rows(texts, decoder.schema).to_pylist())
        assert bool(typed.new.true_count) is not bool(given)


@pytest.mark.parametrize("options", [{}, {"flatten.struct": "true"}])
def test_arrays_as_documents_are_fast(options: dict[str, str]) -> None:
    """With `array.encoding: document` the values of known columns are read by column, arrays and others.

    Other values, and other places in an array, are rescued. Flattened, an array without elements is rescued as `[]`.
    """
    documents = [
        {
            "_id": number,
            "list": [number, None, {"a": "x", "inner": [1.5]}][: number % 4 if number else 3],
            "at": {"$timestamp": {"t": number * 1_000_000, "i": 1}},
            "text": "none",
            "long": [0.5] * (2 if number % 50 else 100),
        }
        for number in range(1000)
    ]
    odd: list[Any] = [{"list": [1, None, {"a": 5}]}, {"list": [1, 2]}, {"list": "x"}, {"text": [1]}, {"list": [[1]]}]
    texts = pa.array([json.dumps(document, separators=(",", ":")) for document in [*documents, *odd]])
    naming = column_names.ColumnNaming.of(unwrap_options.parse({**options, "array.encoding": "document"}))
    shape = Shape()
    exact.observed(shape, texts[0].as_py(), "", values=naming.values)
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape, naming=naming)[0])
    typed = decoder.typed(texts)
    assert typed.exact < 50
    assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(exact.rows(texts, decoder.schema).to_pylist())
    assert dict(typed.rows.to_pylist()[1000]["rescued"])["list.2.a"] == "5"


@pytest.mark.parametrize(
    "text",
    [
        ":smile:",
        '{"a" : 1}',
        json.dumps({"b": json.dumps({"a": json.dumps({"c": ":"})})}),
        '{\n  "a": 1\n}',
        json.dumps("\U0001f600"),
        '"\\\\":',
    ],
)
def test_strings_that_look_like_keys_are_fast(text: str) -> None:
    """Messages that begin with a colon, and JSON in strings, do not change the count of a document's fields.

    A document with a repeated field is found among them.
    """
    documents = [{"_id": number, "text": text, "in": {"texts": [text, ":"]}} for number in range(500)]
    texts = [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in documents]
    texts[400] = texts[400][:-1] + ',"text":"twice"}'
    texts[401] = texts[401].replace('"_id":', '"_id" :\n')
    shape = Shape()
    exact.observed(shape, texts[0], "", values=unwrap_options.FieldValues())
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape)[0])
    typed = decoder.typed(pa.array(texts))
    assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(
        exact.rows(pa.array(texts), decoder.schema).to_pylist()
    )
    assert typed.exact == 1


def test_documents_of_few_of_very_many_fields_are_read_key_by_key() -> None:
    """Also at any depth, once the decoder has seen that documents are so. A new key among them is still found."""
    chance = random.Random(1)

    def few(count: int) -> dict[str, Any]:
        return {f"k{chance.randrange(300)}": {"$numberLong": str(chance.randrange(9))} for _ in range(count)}

    documents: list[dict[str, Any]] = [{"_id": number, "counts": few(9), "list": [few(3)]} for number in range(600)]
    shape = Shape()
    for document in documents:
        exact.observed(shape, json.dumps(document), "", values=unwrap_options.FieldValues())
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape)[0])
    documents[500]["counts"]["stranger"] = 1
    documents[501]["counts"]["k1"] = "text"
    texts = pa.array([json.dumps(document, separators=(",", ":")) for document in documents])
    typed = decoder.typed(texts)
    assert {place[-1:] for place in decoder.sparse} == {("counts",), (column_types.ELEMENT,)}
    assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(exact.rows(texts, decoder.schema).to_pylist())
    assert [number for number, is_new in enumerate(typed.new.to_pylist()) if is_new] == [500]
    assert typed.exact < 20


@pytest.mark.parametrize("are_frequent", [False, True])
def test_keys_that_no_struct_has_are_read_key_by_key_if_frequent(are_frequent: bool) -> None:
    """Quotes, backslashes and control characters, at any depth and also without a column; rare ones slow down nothing else."""
    odd = ('it"s', "back\\", "line\nbreak", 'end"', '\\":')

    def document(number: int) -> dict[str, Any]:
        keys = odd if are_frequent or number % 50 == 0 else ()
        inner = {key: {"$numberLong": str(number)} for key in keys}
        return {"_id": number, **dict.fromkeys(keys, number), "in": [{"a": 1, **inner}], **({'nu"ll': None} if keys else {})}

    shape = Shape()
    documents = [document(number) for number in range(600)]
    for each in documents:
        exact.observed(shape, json.dumps(each), "", values=unwrap_options.FieldValues())
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, shape)[0])
    documents[550]['new"key'] = 1
    texts = pa.array([json.dumps(each, separators=(",", ":")) for each in documents])
    typed = decoder.typed(texts)
    assert decoder.sparse == ({(), ("in", column_types.ELEMENT)} if are_frequent else set())
    assert typed_cases.plain(typed.rows.to_pylist()) == typed_cases.plain(exact.rows(texts, decoder.schema).to_pylist())
    new = {number for number, is_new in enumerate(typed.new.to_pylist()) if is_new}
    assert new == (
        {550} if are_frequent else {500, 550}
    )  # documents that take the exact path together are reported together
    assert typed.exact < 40


def test_a_decoder_learns_also_after_ten_thousand_refused_documents() -> None:
    """Among millions of documents so many may be refused; documents of a new kind still become fast."""
    decoder = decoding.Decoder(evolution.join(document_schema.EMPTY, observe({"_id": 1}))[0])
    decoder._refused = 10_000
    texts = pa.array([f'{{"_id":{number},"middle":null}}' for number in range(500)])
    decoder.typed(texts)
    assert decoder.typed(texts).exact == 0


@pytest.mark.parametrize("limit", ["MAX_FIELDS", "MAX_COLUMNS"])
def test_a_field_without_room_does_not_count_as_new(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """It changes no schema: documents that have it need no second look. A value that widens a column still counts."""
    schema = evolution.join(document_schema.EMPTY, observe({"_id": 1, "in": {"a": 1, "b": "x"}}))[0]
    monkeypatch.setattr(evolution, limit, evolution.leaf_count(schema.struct) - (limit == "MAX_FIELDS"))
    decoder = decoding.Decoder(schema)
    texts = pa.array([f'{{"_id":{number},"in":{{"a":1,"b":"x","beyond":{number}}}}}' for number in range(500)])
    decoder.typed(texts)
    typed = decoder.typed(texts)
    assert (typed.exact, typed.new.true_count) == (0, 0)
    assert typed.rows.to_pylist() == exact.rows(texts, schema).to_pylist()
    assert decoder.typed(pa.array(['{"_id":1,"in":{"a":2.5,"b":"x","beyond":1}}'])).new.true_count == 1


def test_a_name_that_is_repeated_many_times_is_numbered_from_its_last_number() -> None:
    """A faulty writer may repeat a field in each of many thousand subdocuments: counted from the first one each time, a single document would
    stop its collection for hours. A field whose own name is such a number keeps it.
    """
    with pace.within(3):
        elements = ",".join(['{"x":1,"x":2}'] * 20_000)
        _, *names = _rescued(f'{{"_id":1,"a":[{elements}]}}', {"_id": 1})
        assert names == ["x", *(f"x#{number}" for number in range(2, 20_001))]
    rescued = _rescued('{"x#3":1,"x#3":2,"x":3,"x":4,"x":5,"x":6,"x":7}', {"x#3": 2, "x": 7})
    assert rescued == {"x#3": "1", "x": "3", "x#2": "4", "x#4": "5", "x#5": "6"}


def test_the_values_of_a_repeated_name_are_numbered_after_one_that_does_not_fit() -> None:
    assert _rescued('{"x":1,"x":2,"x":"text"}', {"x": 1}) == {"x": '"text"', "x#2": "1", "x#3": "2"}


def _rescued(text: str, known: dict[str, Any]) -> dict[str, str]:
    """What a document leaves out of the columns of another one."""
    schema, _ = evolution.join(document_schema.EMPTY, observe(known))
    (row,) = exact.rows(pa.array([text]), schema).to_pylist()
    return dict(row["rescued"])


def test_the_collector_pauses_until_the_last_thread_has_decoded() -> None:
    """A thread that ended enabled it for the others. One that began in that moment left it disabled for ever."""
    threads = contextlib.ExitStack(), contextlib.ExitStack()
    for thread in threads:
        thread.enter_context(decoding.without_collector())
    for thread, is_enabled in zip(threads, (False, True)):
        thread.close()
        assert gc.isenabled() is is_enabled
