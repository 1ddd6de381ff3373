"""Keys: values that are equal in MongoDB's unique index have the same text, and any others have different ones."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.extended_json import json_to_bson, keys

CASES = json.loads((Path(__file__).parents[2] / "cases" / "keys" / "keys.json").read_text())


@pytest.mark.parametrize(("key", "documents"), CASES, ids=[case[0] for case in CASES])
def test_values_that_the_index_holds_equal_have_one_key(key: str, documents: list[str]) -> None:
    """All documents of a case have its key, from their bytes and from their value."""
    for document in documents:
        assert keys.canonical_raw(json_to_bson.loads(document.replace('"a"', '"_id"', 1))) == key
        value = json_to_bson.loads_value(document)
        if isinstance(value, dict):
            assert keys.canonical(value["a"]) == key


def test_cases_are_all_different() -> None:
    assert len({case[0] for case in CASES}) == len(CASES)


_numbers = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1).map(bson.Int64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(1 << 70), 1 << 70).map(float),
    st.builds(
        lambda digits, exponent: bson.Decimal128(Decimal(digits).scaleb(exponent)),
        st.integers(-(10**20), 10**20),
        st.integers(-30, 30),
    ),
)


def _exact(number: object) -> Decimal:
    return number.to_decimal() if isinstance(number, bson.Decimal128) else Decimal(number)


@given(_numbers, _numbers)
def test_numbers_share_a_key_when_their_exact_values_are_equal(left: object, right: object) -> None:
    """Numbers of any types have the same key if and only if they are equal."""
    assert (keys.canonical(left) == keys.canonical(right)) == (_exact(left) == _exact(right))


@given(_numbers)
def test_a_number_has_the_key_of_its_exact_value_in_other_types(number: object) -> None:
    """A number that is converted to another type without loss keeps its key."""
    exact = _exact(number)
    as_double = float(exact)
    if Decimal(as_double) == exact:
        assert keys.canonical(as_double) == keys.canonical(number)
    if exact == exact.to_integral_value() and -(1 << 63) <= exact < 1 << 63:
        assert keys.canonical(bson.Int64(int(exact))) == keys.canonical(number) == str(int(exact))
    digits = "".join(map(str, exact.as_tuple().digits)).strip("0")
    if len(digits) <= 34:
        assert keys.canonical(bson.Decimal128(exact)) == keys.canonical(number)


def test_a_key_is_json() -> None:
    """Every key is JSON, and valid Extended JSON."""
    for key, _documents in CASES:
        json.loads(key)
        json_to_bson.loads_value(key)


def test_quick_types_have_the_key_of_their_value() -> None:
    """Raw bytes and values give the same key, for types with a fast path and for the others."""
    quick = (bson.ObjectId(), 5, bson.Int64(-5), "é\0")
    for value in (*quick, 2.5, math.nan, True, None, {"a": [1.0]}, bson.Code("x", {})):
        raw = bson.encode({"other": {"_id": 7}, "_id": value})
        assert keys.canonical_raw(raw) == keys.canonical(value)


def test_a_document_without_the_field_raises() -> None:
    """A missing field is a KeyError; invalid bytes and values without a BSON type are a ValueError."""
    with pytest.raises(KeyError):
        keys.canonical_raw(bson.encode({"a": 1}))
    with pytest.raises(ValueError):
        keys.canonical_raw(b"\x10\0\0\0\x07_id\0")
    with pytest.raises(ValueError):
        keys.canonical(object())
