"""Extended JSON that is exact: any document survives BSON to text and back."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path

import bson
import orjson
import pytest
from bson import json_util
from bson.codec_options import DatetimeConversion
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS, RawBSONDocument
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_core.extended_json import bson_to_json, json_to_bson, raw_bson, wrappers

CASES = json.loads((Path(__file__).parents[2] / "cases" / "extended_json" / "values.json").read_text())
READER = json_util.JSONOptions(json_mode=json_util.JSONMode.CANONICAL, datetime_conversion=DatetimeConversion.DATETIME_MS)


def element(kind: int, content: bytes, name: bytes = b"a") -> bytes:
    return bytes([kind]) + name + b"\0" + content


def document(*elements: bytes) -> bytes:
    body = b"".join(elements)
    return struct.pack("<i", len(body) + 5) + body + b"\0"


def counted(text: bytes) -> bytes:
    return struct.pack("<i", len(text) + 1) + text + b"\0"


# Raw BSON as MongoDB may store it: types that drivers no longer write, repeated names, names like wrappers.

_reserved = st.builds(
    lambda dollars, name: "$" * dollars + name[1:],
    st.integers(0, 3),
    st.sampled_from(sorted(wrappers.RESERVED | {"$id", "$db", "$scope", "$options", "$type", "$t"})),
)
_text = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6), _reserved, st.just("\0"), st.just("null")
).map(str.encode)
_name = st.one_of(
    st.sampled_from([b"_id", b"a", b"b", b""]),
    _reserved.map(str.encode),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4).map(str.encode),
)
_cstring = _text.map(lambda text: text.replace(b"\0", b"") + b"\0")
_options = st.one_of(_cstring, st.sampled_from([b"ix\0", b"xi\0", b"gi\0"]))
_finite_doubles = st.one_of(
    st.floats(allow_nan=False),
    st.sampled_from([-0.0, 0.0, 1.0, 1e15, 1e16, 1e22, 5e-324, 1.7e308, 123456789012345680.0]),
)
_doubles = st.one_of(_finite_doubles, st.just(math.nan)).map(lambda number: struct.pack("<d", number))
_int64s = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([0, 5, -1, -62135596800001, 253402300800000, (1 << 63) - 1]),
).map(lambda number: struct.pack("<q", number))


@st.composite
def _decimals(draw: st.DrawFn) -> bytes:
    digits = draw(st.one_of(st.integers(0, 10**34 - 1), st.integers(0, 99), st.just(10**34 - 1)))
    exponent = draw(st.one_of(st.integers(0, 12287), st.integers(6160, 6190)))
    sign = draw(st.integers(0, 1))
    return (sign << 127 | exponent << 113 | digits).to_bytes(16, "little")


_decimal_specials = st.sampled_from([0x7C, 0x78, 0xF8]).map(lambda top: b"\0" * 15 + bytes([top]))


@st.composite
def _binaries(draw: st.DrawFn) -> bytes:
    payload = draw(st.binary(max_size=20))
    subtype = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 128, 255]))
    content = struct.pack("<i", len(payload)) + payload if subtype == 2 else payload
    return struct.pack("<i", len(content)) + bytes([subtype]) + content


def _documents_of(values: st.SearchStrategy[tuple[int, bytes]]) -> st.SearchStrategy[bytes]:
    items = st.tuples(_name, values).map(lambda item: element(item[1][0], item[1][1], item[0]))
    return st.lists(items, max_size=4).map(lambda elements: document(*elements))


def _arrays_of(values: st.SearchStrategy[tuple[int, bytes]]) -> st.SearchStrategy[bytes]:
    return st.lists(values, max_size=4).map(
        lambda items: document(*(element(kind, content, str(index).encode()) for index, (kind, content) in enumerate(items)))
    )


def _scoped_code(code: bytes, scope: bytes) -> bytes:
    content = counted(code) + scope
    return struct.pack("<i", len(content) + 4) + content


def _typed(kind: int, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[int, bytes]]:
    return contents.map(lambda content: (kind, content))


_scalars = st.one_of(
    _typed(0x01, _doubles),
    _typed(0x02, _text.map(counted)),
    _typed(0x05, _binaries()),
    _typed(0x06, st.just(b"")),
    _typed(0x07, st.binary(min_size=12, max_size=12)),
    _typed(0x08, st.sampled_from([b"\0", b"\1"])),
    _typed(0x09, _int64s),
    _typed(0x0A, st.just(b"")),
    _typed(0x0B, st.tuples(_cstring, _options).map(b"".join)),
    _typed(0x0C, st.tuples(_text.map(counted), st.binary(min_size=12, max_size=12)).map(b"".join)),
    _typed(0x0D, _text.map(counted)),
    _typed(0x0E, _text.map(counted)),
    _typed(0x10, st.integers(-(1 << 31), (1 << 31) - 1).map(lambda number: struct.pack("<i", number))),
    _typed(0x11, st.binary(min_size=8, max_size=8)),
    _typed(0x12, _int64s),
    _typed(0x13, st.one_of(_decimals(), _decimal_specials)),
    _typed(0x7F, st.just(b"")),
    _typed(0xFF, st.just(b"")),
)
_values = st.recursive(
    _scalars,
    lambda values: st.one_of(
        _typed(0x03, _documents_of(values)),
        _typed(0x04, _arrays_of(values)),
        _typed(0x0F, st.builds(_scoped_code, _text, _documents_of(values))),
        _typed(0x03, st.just(bson.encode({"$ref": "c", "$id": 1, "$db": "d", "x": None}))),
        _typed(0x03, st.just(bson.encode({"x": math.inf, "$id": 1, "$ref": "c"}))),
    ),
    max_leaves=12,
)
_documents = _documents_of(_values)


@settings(max_examples=600)
@given(_documents)
def test_any_document_comes_back_byte_for_byte(raw: bytes) -> None:
    """BSON to text and back gives the same bytes for everything that JSON can express, and nothing is flagged."""
    encoded = bson_to_json.encode(raw)
    assert not encoded.lossy
    assert json_to_bson.loads(encoded.text) == raw


@settings(max_examples=300)
@given(_documents)
def test_any_reader_of_extended_json_takes_the_text(raw: bytes) -> None:
    """The driver's reader and a plain JSON parser accept every text."""
    text = bson_to_json.dumps(raw)
    json_util.loads(text.decode(), json_options=READER)
    orjson.loads(text)


@settings(max_examples=300)
@given(_documents)
def test_both_ways_of_writing_agree(raw: bytes) -> None:
    """A document that takes the fast path has the same text as when encoded by elements."""
    by_elements = bson_to_json.dumps_value(raw_bson.decoded(0x03, raw))
    assert bson_to_json.dumps(raw) == by_elements
    value = json_to_bson.loads_value(by_elements)
    assert bson_to_json.dumps_value(value) == by_elements


@settings(max_examples=300)
@given(_documents, st.data())
def test_bytes_that_are_no_document_raise_one_error(raw: bytes, data: st.DataObject) -> None:
    """Truncated or changed bytes are either another document or raise ValueError, and no other error."""
    at = data.draw(st.integers(0, len(raw) - 1))
    altered = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    for broken in (raw[:at], altered):
        try:
            orjson.loads(bson_to_json.encode(broken).text)
        except ValueError:
            continue


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_values(case: dict[str, str]) -> None:
    """Each kind of value has one text: the wrapper that the specification defines."""
    raw = bytes.fromhex(case["bson"])
    text = case["text"].encode()
    assert bson_to_json.dumps(raw) == text
    assert json_to_bson.loads(text).hex() == case.get("back", case["bson"])


def test_text_that_is_not_utf8_is_replaced_and_flagged() -> None:
    """A string or a name that is not UTF-8 never stops a stream: it is repaired, and the document is flagged."""
    in_value = bson_to_json.encode(document(element(0x02, counted(b"x\xff"))))
    in_name = bson_to_json.encode(document(element(0x10, b"\1\0\0\0", name=b"\xed\xa0\x80")))
    assert in_value == ('{"a":"x\ufffd"}'.encode(), True)
    assert in_name == ('{"\ufffd\ufffd\ufffd":1}'.encode(), True)


def test_the_payload_of_a_nan_does_not_survive() -> None:
    """Every NaN, whatever its sign and payload, becomes the one that JSON can express."""
    for payload in (b"\1\0\0\0\0\0\xf8\x7f", b"\0\0\0\0\0\0\xf8\xff", b"\xff" * 8):
        raw = document(element(0x01, payload))
        assert bson_to_json.dumps(raw) == b'{"a":{"$numberDouble":"NaN"}}'


def test_decimals_that_are_not_canonical_are_their_value() -> None:
    """A coefficient of more than 34 digits is zero in IEEE 754."""
    too_large = ((1 << 113) - 1 | 6176 << 113).to_bytes(16, "little")
    large_form = (3 << 125 | 6176 << 111 | 1).to_bytes(16, "little")
    for bid in (too_large, large_form):
        assert bson_to_json.dumps(document(element(0x13, bid))) == b'{"a":{"$numberDecimal":"0"}}'


@settings(max_examples=500)
@given(st.binary(min_size=16, max_size=16))
def test_decimals_are_spelled_as_the_driver_spells_them(bid: bytes) -> None:
    """Any sixteen bytes have the same text as in the driver."""
    value = bson.Decimal128.from_bid(bid)
    assert bson_to_json.decimal_text(value) == str(value)


def test_names_of_array_elements_do_not_count() -> None:
    """An array with wrong element names is written in its order."""
    misnamed = document(element(0x10, b"\7\0\0\0", b"9"), element(0x10, b"\5\0\0\0", b"9"))
    raw = document(element(0x04, misnamed))
    assert bson_to_json.encode(raw) == (b'{"a":[7,5]}', False)


def test_special_doubles_are_never_missed() -> None:
    """NaN and infinity never become null, whatever the bytes around them."""
    chance = random.Random(7)
    noise = [None, -1, bson.Int64(-1), 1.5, b"\x01\x7f\xff\xff\0", "\x01\x7f", [], {}, bson.MinKey()]
    for _ in range(3_000):
        exponent = bytes([0xF0 | chance.randrange(16), chance.choice((0x7F, 0xFF))])
        special = struct.unpack("<d", chance.randbytes(6) + exponent)[0]
        names = [chance.choice(("", "n", "name")) + str(index) for index in range(chance.randrange(5))]
        fields = [(name, chance.choice(noise)) for name in names]
        fields.insert(chance.randrange(len(fields) + 1), (chance.choice(("x", "", "\x01\x7f")), special))
        text = bson_to_json.dumps(bson.encode(dict(fields)))
        assert text.count(b"$numberDouble") == 1


def test_nesting_as_deep_as_a_server_allows() -> None:
    """A document of 250 levels survives; a far deeper one raises ValueError."""
    nested: dict[str, object] = {"a": bson.Int64(1)}
    for level in range(248):
        nested = {"$oid" if level == 100 else "a": nested}
    raw = bson.encode(nested)
    assert json_to_bson.loads(bson_to_json.dumps(raw)) == raw
    too_deep = document()
    for _ in range(2_000):
        too_deep = document(element(0x03, too_deep))
    with pytest.raises(ValueError, match="deeper"):
        bson_to_json.encode(too_deep)


def test_repeated_fields_may_be_at_every_level() -> None:
    """A server accepts documents of 200 levels from any client, and each of them must survive."""
    nested = document(element(0x10, b"\1\0\0\0"), element(0x10, b"\2\0\0\0"))
    for _ in range(199):
        nested = document(element(0x03, nested), element(0x10, b"\3\0\0\0"))
    assert json_to_bson.loads(bson_to_json.dumps(nested)) == nested


def test_fields_split_a_document_without_decoding_it() -> None:
    """Each top-level element has a type byte and a raw value; an embedded document is a document itself."""
    inner = bson.encode({"x": 1})
    parts = raw_bson.fields(bson.encode({"_id": 1, "a": {"x": 1}, "s": "é", "n": None}))
    assert parts == {
        "_id": (0x10, b"\1\0\0\0"),
        "a": (0x03, inner),
        "s": (0x02, counted("é".encode())),
        "n": (0x0A, b""),
    }


def test_a_part_of_a_proven_document_takes_the_fast_way() -> None:
    """What was decoded from proven bytes has the same text with and without them, including values that need care."""
    event = {"_id": {"_data": "82"}, "fullDocument": {"_id": bson.Int64(1), "$oid": math.nan, "n": None}}
    for raw in (bson.encode(event), bson.encode({"a": 1, **event})):
        decoded = bson.decode(raw, raw_bson.CODEC_OPTIONS)
        assert bson_to_json.is_exact(decoded, raw)
        part = decoded["fullDocument"]
        assert bson_to_json.dumps_value(part, proven=raw) == bson_to_json.dumps_value(part)


def test_a_large_document_that_the_driver_left_raw_is_written_too() -> None:
    """From 4 KB on the driver gives a view of the surrounding bytes; in this document a field is repeated."""
    twice = bson.encode({"text": "x" * 5000, "b": 1, "c": 2}).replace(b"\x10c\0", b"\x10b\0")
    found = bson.decode(bson.encode({"v": RawBSONDocument(twice)}), DEFAULT_RAW_BSON_OPTIONS)
    assert bson_to_json.dumps_value(found["v"]).endswith(b'x","b":1,"b":2}')


def test_a_field_order_with_the_id_inside_is_exact() -> None:
    """`_id` may be anywhere, as in the events of a transaction."""
    raw = document(element(0x10, b"\1\0\0\0"), element(0x10, b"\2\0\0\0", b"_id"))
    assert bson_to_json.is_exact(bson.decode(raw, raw_bson.CODEC_OPTIONS), raw)
    assert json_to_bson.loads(bson_to_json.dumps(raw)) == raw


def test_keys_that_look_like_wrappers_are_escaped_and_come_back() -> None:
    """A reserved name gets one more `$`, however many it has; other names are unchanged."""
    for name in wrappers.RESERVED:
        assert wrappers.escape_key(name) == "$" + name
        assert wrappers.escape_key("$$" + name) == "$$$" + name
        assert wrappers.unescape_key("$" + name) == name
        assert wrappers.unescape_key(name) == name
    for name in ("", "a", "$", "$$", "$set", "$id", "oid", "$oid ", "$oid\n", "a$oid", "$oids"):
        assert wrappers.escape_key(name) == name
        assert wrappers.unescape_key(name) == name


def test_wrappers_are_told_from_documents() -> None:
    """A typed value is a wrapper; a user's document is not, whatever it looks like."""
    values = {"a": bson.Int64(1), "b": {"$oid": 1}, "c": {}, "d": {"$ref": 1, "$id": 2}, "e": {"x": 1}}
    parsed = orjson.loads(bson_to_json.dumps(bson.encode(values)))
    assert {name: wrappers.is_wrapper(value) for name, value in parsed.items()} == {
        "a": True, "b": False, "c": False, "d": False, "e": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"$oid":5}}',
        '{"a":{"$oid":"xyz"}}',
        '{"a":{"$numberLong":"9223372036854775808"}}',
        '{"a":{"$numberLong":"x"}}',
        '{"a":{"$date":"yesterday"}}',
        '{"a":{"$binary":{"base64":"*","subType":"00"}}}',
        '{"a":{"$timestamp":{"t":-1,"i":0}}}',
        '{"a":{"$code":"x","$scope":5}}',
        '{"a":{"$oid":"000000000000000000000000","x":1}}',
        '{"a":{"$numberDecimal":"1E999999"}}',
        '{"a":123456789012345678901234567890}',
        '{"a":NaN}',
        '{"a":"\\ud800"}',
        '{"a\\u0000":1}',
        '{"a":1',
        "[1]",
        "5",
    ],
)
def test_text_that_is_no_document_is_refused(text: str) -> None:
    """Text that is not valid Extended JSON raises ValueError, and no other error."""
    with pytest.raises(ValueError):
        json_to_bson.loads(text)


def test_text_of_others_is_read() -> None:
    """Canonical and relaxed Extended JSON of other writers is read."""
    text = (
        '{"i":{"$numberInt":"5"},"d":{"$numberDouble":"1.5"},'
        '"u":{"$uuid":"73ffd264-44b3-4c69-90e8-e7d1dfc035d4"},'
        '"t":{"$date":"2024-01-02T03:04:05.678Z"},"l":5000000000}'
    )
    assert bson.decode(json_to_bson.loads(text), raw_bson.CODEC_OPTIONS) == {
        "i": 5,
        "d": 1.5,
        "u": bson.Binary(bytes.fromhex("73ffd26444b34c6990e8e7d1dfc035d4"), 4),
        "t": bson.datetime_ms.DatetimeMS(1704164645678),
        "l": 5_000_000_000,
    }


def test_python_values_that_bson_cannot_hold_are_refused() -> None:
    """A value without a BSON type raises ValueError."""
    for value in (object(), {1, 2}, 1 << 63, {"a": {"b": object()}}, {5: 1}, "\ud800"):
        with pytest.raises(ValueError):
            bson_to_json.dumps_value(value)
