"""Debezium's JSON dialects: read as the SMT reads them, written as the connector writes them."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.dialects import Dialect
from tests.harness import recorded

CASES = pathlib.Path(__file__).parents[2] / "cases" / "unwrap"

MIXED = object()

WAYS = [
    # type-exact JSON, STRICT, RELAXED, EXTENDED; None: as the one before, MIXED: its content also follows the dialect
    (5, "5", "5", '{"$numberInt": "5"}'),
    (
        {"$numberLong": "1099511627776"},
        '{"$numberLong": "1099511627776"}',
        "1099511627776",
        '{"$numberLong": "1099511627776"}',
    ),
    (1.5, "1.5", "1.5", '{"$numberDouble": "1.5"}'),
    (1e10, "1.0E10", "1.0E10", '{"$numberDouble": "1.0E10"}'),
    (-0.0, "-0.0", "-0.0", '{"$numberDouble": "-0.0"}'),
    ({"$numberDouble": "NaN"}, "NaN", '{"$numberDouble": "NaN"}', '{"$numberDouble": "NaN"}'),
    ({"$numberDouble": "-Infinity"}, "-Infinity", '{"$numberDouble": "-Infinity"}', None),
    ({"$numberDecimal": "1E+3"}, '{"$numberDecimal": "1E+3"}', None, None),
    ({"$oid": "596e275826f08b2730779e1f"}, '{"$oid": "596e275826f08b2730779e1f"}', None, None),
    (
        {"$date": {"$numberLong": "1580122032311"}},
        '{"$date": 1580122032311}',
        '{"$date": "2020-01-27T10:47:12.311Z"}',
        '{"$date": {"$numberLong": "1580122032311"}}',
    ),
    (
        {"$date": {"$numberLong": "-5"}},
        '{"$date": -5}',
        '{"$date": {"$numberLong": "-5"}}',
        '{"$date": {"$numberLong": "-5"}}',
    ),
    (
        {"$binary": {"base64": "AAEC", "subType": "04"}},
        '{"$binary": "AAEC","$type": "04"}',
        '{"$binary": {"base64": "AAEC","subType": "04"}}',
        None,
    ),
    (
        {"$regularExpression": {"pattern": "^a", "options": "i"}},
        '{"$regex": "^a","$options": "i"}',
        '{"$regularExpression": {"pattern": "^a","options": "i"}}',
        None,
    ),
    ({"$timestamp": {"t": 4294967295, "i": 1}}, '{"$timestamp": {"t": 4294967295,"i": 1}}', None, None),
    ({"$code": "f", "$scope": {"y": 1}}, '{"$code": "f","$scope": {"y": 1}}', None, MIXED),
    ({"$minKey": 1}, '{"$minKey": 1}', None, None),
    ({"$undefined": True}, '{"$undefined": true}', None, None),
    ({"$symbol": "s"}, '{"$symbol": "s"}', None, None),
    ({"$$ref": "a2", "$id": 4}, '{"$ref": "a2","$id": 4}', None, MIXED),
    ({"a.b": [1, {"$foo": "é😊\t"}]}, '{"a.b": [1,{"$foo": "é\\ud83d\\ude0a\\t"}]}', None, MIXED),
]


@pytest.mark.parametrize(("value", "strict", "relaxed", "extended"), WAYS)
def test_each_type_is_read_and_written_in_each_dialect(value: Any, strict: str, relaxed: Any, extended: Any) -> None:
    """`None` in a dialect means the text of the dialect before it."""
    relaxed = strict if relaxed is None else relaxed
    extended = relaxed if extended is None else extended
    for text, dialect in ((strict, Dialect.STRICT), (relaxed, Dialect.RELAXED), (extended, Dialect.EXTENDED)):
        if text is MIXED:
            continue
        assert repr(debezium_json.parse(text)) == repr(value)
        assert debezium_json.render(value, dialect) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.0E+10", 1e10),
        ("2147483647", 2147483647),
        ("2147483648", {"$numberLong": "2147483648"}),
        ('{"$numberInt": "7"}', 7),
        ('{"$oid": "596E275826F08B2730779E1F"}', {"$oid": "596e275826f08b2730779e1f"}),
        ('{"$date": "2017-07-28T08:57:33Z"}', {"$date": {"$numberLong": "1501232253000"}}),
        ('{"$date": "2017-07-28T10:57:33.1+02:00"}', {"$date": {"$numberLong": "1501232253100"}}),
        ('{"$date": "1969-12-31T23:59:59.999Z"}', {"$date": {"$numberLong": "-1"}}),
        ('{"$binary": {"base64": "AAEC", "subType": "0"}}', {"$binary": {"base64": "AAEC", "subType": "00"}}),
        (
            '{"$uuid": "00000000-0000-0000-0000-000000000007"}',
            {"$binary": {"base64": "AAAAAAAAAAAAAAAAAAAABw==", "subType": "04"}},
        ),
        (
            '{"$dbPointer": {"$ref": "ns", "$id": {"$oid": "596e275826f08b2730779e1f"}}}',
            {"$dbPointer": {"$ref": "ns", "$id": {"$oid": "596e275826f08b2730779e1f"}}},
        ),
        ('{"_id" : {"$numberLong" : "1004"}}', {"_id": {"$numberLong": "1004"}}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('"\\ud83d\\ude0a\\ud83d"', "😊\ufffd"),
        ('{"v": 1e999}', {"v": {"$numberDouble": "Infinity"}}),
    ],
)
def test_other_writings_of_the_same_are_read_too(text: str, value: Any) -> None:
    """Later drivers' exponents, time zones, upper case, spaces, repeated fields, and unpaired surrogates."""
    assert debezium_json.parse(text) == value


@pytest.mark.parametrize(
    "document",
    [
        {"$oid": "x"},
        {"$oid": 5},
        {"$date": "soon"},
        {"$date": "2017-02-30T00:00:00Z"},
        {"$numberLong": "5", "also": 1},
        {"$numberInt": "99999999999"},
        {"$numberDecimal": "much"},
        {"$numberDouble": "1_000"},
        {"$numberDouble": " 5 "},
        {"$binary": "%", "$type": "00"},
        {"$binary": "é", "$type": "00"},
        {"$binary": {"base64": "AAEC", "subType": "00", "more": 1}},
        {"$timestamp": {"t": -1, "i": 0}},
        {"$timestamp": {"t": {"seconds": 1}, "i": 0}},
        {"$regex": "a"},
        {"$uuid": "no"},
        {"$$date": 5},
    ],
)
def test_what_no_dialect_writes_is_a_document_of_the_user(document: dict[str, Any]) -> None:
    """It keeps its fields; the first key is escaped in type-exact JSON."""
    parsed = debezium_json.parse(json.dumps(document))
    assert debezium_json.is_document(parsed)
    assert {wrappers.unescape_key(name): value for name, value in parsed.items()} == document


@pytest.mark.parametrize("text", ["", "{", "{bad}", '{"a": 99999999999999999999}', "nope", '{"a": 1} x'])
def test_what_is_no_json_raises_value_error(text: str) -> None:
    """No other exception."""
    with pytest.raises(ValueError):
        debezium_json.parse(text)


NAMES = st.text(st.characters(codec="utf-8"), max_size=5).map(wrappers.escape_key)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: {"$numberLong": str(number)}),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: {"$date": {"$numberLong": str(number)}}),
    st.sampled_from([value for value, *_ in WAYS if isinstance(value, dict) and not debezium_json.is_document(value)]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=12,
)


def looks_like_a_wrapper(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(looks_like_a_wrapper, value))
    if debezium_json.is_document(value):
        return any(name.startswith("$") for name in value) or any(map(looks_like_a_wrapper, value.values()))
    return False


@given(VALUES)
def test_what_was_written_is_read_back(value: Any) -> None:
    """STRICT and EXTENDED keep every type; `repr` distinguishes -0.0 from 0.0 and True from 1."""
    if not looks_like_a_wrapper(value):
        for dialect in (Dialect.STRICT, Dialect.EXTENDED):
            assert repr(debezium_json.parse(debezium_json.render(value, dialect))) == repr(value)


def test_recorded_texts_are_written_back_byte_for_byte() -> None:
    """Except doubles that Debezium's JDK writes with more digits than needed, and documents of users that look like wrappers."""
    seen: set[str] = set()
    for record in recorded.lines(CASES / "smt.jsonl.xz"):
        value = record["in"]["value"] or {}
        for name in ("before", "after"):
            text = value.get(name)
            if text and text not in seen and not re.search(r"1\.9999999999999998E23|4\.9E-324", text):
                seen.add(text)
                assert debezium_json.render(debezium_json.parse(text), Dialect.STRICT) == text
    assert len(seen) > 500
