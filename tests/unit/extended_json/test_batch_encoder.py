"""Documents that are encoded in a batch have the same texts as when encoded one by one."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

from cdc_core.extended_json import batch_encoder, batch_walk, bson_to_json, field_order

NAMES = (
    *("_id", "a", "b", "aa", "abcdefg", "abcdefgh", "a.b", "0", "", "é", "日本", '"q', "\\", "\x01", "\u2028", "🎉"),
    *("$oid", "$numberLong", "$$x", "$ref", "$id", "x" * 63, "y" * 64, "z" * 65, "w" * 300),
)
TEXTS = (
    "",
    "x",
    "é日",
    '"',
    "\\",
    "\n",
    "\0",
    "\u2028",
    "🎉",
    "\x7f",
    "\x1f",
    "a" * 300,
    '{"$oid":1}',
    "null",
    " ",
    "\ud7ff",
)
DOUBLES = (
    0.0,
    -0.0,
    1.0,
    1e15,
    1e16,
    1e21,
    1e22,
    5e-324,
    1.7976931348623157e308,
    0.1,
    1 / 3,
    1e-5,
    1e-7,
    123456789012345680.0,
    *map(float, ("nan", "inf", "-inf")),
)
DECIMALS = (
    *("0", "-0", "0.00", "-0.00", "NaN", "-Infinity", "1E-6176", "1E-7", "1E-6", "0.0000001", "1E+3", "12.50", "-0.10"),
    *("9223372036854775807", "9223372036854775808", "-92233720368547758.07", "1234567890123456789012345678901234"),
)


def drawn(draw: random.Random, kind: str) -> Any:
    """A random value of a kind, often a limit."""
    whole = draw.choice([0, -1, 2**31, 2**63 - 1, -(2**63), draw.getrandbits(63), draw.randrange(1000)])
    made: Mapping[str, Callable[[], Any]] = {
        "string": lambda: (
            draw.choice(TEXTS) if draw.random() < 0.5 else "".join(draw.choices('abc é"\\日', k=draw.randrange(20)))
        ),
        "int": lambda: draw.choice([0, -1, 2**31 - 1, -(2**31), draw.randrange(1000)]),
        "long": lambda: Int64(whole),
        "double": lambda: draw.choice([*DOUBLES, draw.random() * 10.0 ** draw.randrange(-20, 20)]),
        "decimal": lambda: Decimal128(draw.choice([*DECIMALS, f"{draw.randrange(10**9)}.{draw.randrange(100):02}"])),
        "date": lambda: DatetimeMS(whole),
        "bool": lambda: draw.random() < 0.5,
        "null": lambda: None,
        "oid": lambda: ObjectId(draw.randbytes(12)),
        "timestamp": lambda: Timestamp(draw.getrandbits(32), draw.getrandbits(32)),
        "binary": lambda: Binary(draw.randbytes(draw.randrange(20)), draw.choice([0, 2, 3, 4, 128])),
        "rare": lambda: draw.choice([Regex("a", "i"), Code("f"), Code("f", {"a": 1}), MaxKey(), DBRef("c", 1)]),
    }
    return made[kind]()


KINDS = ("string", "int", "long", "double", "decimal", "date", "bool", "null", "oid", "timestamp", "binary")
Shape = list[tuple[str, str, Any]]


def shape(draw: random.Random, depth: int) -> Shape:
    """Names, each with the kind of its values: documents of a collection are alike."""
    kinds = [*KINDS, "document", "array"] if depth else KINDS
    names = draw.sample(NAMES, draw.randrange(8))
    return [(name, draw.choice(kinds), shape(draw, depth - 1) if depth else draw.choice(KINDS)) for name in names]


def value_of(draw: random.Random, kind: str, inner: Any, odd: float) -> Any:
    if draw.random() < odd:
        kind = draw.choice([*KINDS, "rare"])
    match kind:
        case "document" if isinstance(inner, list):
            return document_of(draw, inner, odd)
        case "array" if isinstance(inner, list):
            kinds = [each for _, each, _ in inner if each in KINDS] or ["document"]
            return [value_of(draw, kinds[0], inner, odd) for _ in range(draw.randrange(14))]
    return drawn(draw, kind)


def document_of(draw: random.Random, fields: Shape, odd: float) -> dict[str, Any]:
    """A document of a shape, sometimes with deviations."""
    kept = [each for each in fields if each[0] == "_id" or draw.random() > 0.2]
    if draw.random() < odd:
        draw.shuffle(kept)
    return {name: value_of(draw, kind, inner, odd) for name, kind, inner in kept}


def torn(draw: random.Random, raw: bytes) -> bytes:
    """The document with a few bytes changed."""
    bytes_ = bytearray(raw)
    for _ in range(draw.randrange(1, 3)):
        place = draw.randrange(len(bytes_))
        bytes_[place] = draw.choice([0, 1, 2, 3, 4, 255, 127, 128, bytes_[place] ^ 1, draw.getrandbits(8)])
    if draw.random() < 0.2:
        bytes_[4:4] = bytes_[4 : draw.randrange(4, len(bytes_))]
    if draw.random() < 0.2:
        bytes_ += b"\0"
    if draw.random() < 0.7:
        bytes_[:4] = struct.pack("<i", len(bytes_))
    return bytes(bytes_)


def is_document(raw: bytes) -> bool:
    try:
        bson_to_json.encode(raw)
    except ValueError:
        return False
    return True


def assert_as_alone(encoder: batch_encoder.BatchEncoder, documents: list[bytes]) -> None:
    alone = [bson_to_json.encode(each) for each in documents]
    found = encoder.encode(documents)
    found.texts.validate(full=True)
    assert [text.as_buffer().to_pybytes() for text in found.texts] == [each.text for each in alone]
    assert sorted(found.lossy) == [place for place, each in enumerate(alone) if each.lossy]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are tried regardless of how many documents there are, and how different."""
    monkeypatch.setattr(batch_encoder, "MIN_DOCUMENTS", 1)
    monkeypatch.setattr(batch_walk, "VALUES_PER_STEP", 0.1)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.usefixtures("always")
def test_any_documents_have_the_texts_that_each_has_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned from some documents applies to others, and corrupt bytes are recognized."""
    draw = random.Random(seed)
    monkeypatch.setattr(batch_encoder, "GROUP_BYTES", draw.choice([2000, 20_000]))
    encoder, fields = batch_encoder.BatchEncoder(), shape(draw, 2)
    odd, share_torn = draw.choice([0, 0.02, 0.3]), draw.choice([0, 0, 0.2])
    for count in (40, 3, 20):
        documents = [bson.encode(document_of(draw, fields, odd)) for _ in range(count)]
        documents = [torn(draw, each) if draw.random() < share_torn else each for each in documents]
        for each in documents:
            if not is_document(each):
                with pytest.raises(ValueError):
                    batch_encoder.BatchEncoder().encode([each, each])
        assert_as_alone(encoder, [each for each in documents if is_document(each)])


@pytest.mark.usefixtures("always")
def test_any_byte_may_be_another_one() -> None:
    """Changed bytes that are still a document have the same text as when encoded alone; those that are not a document are odd."""
    draw = random.Random(1)
    array = [{"s": "é", "n": Int64(5)}, {"s": "x", "n": Int64(6)}]
    document = {kind[:2]: drawn(draw, kind) for kind in KINDS if kind != "string"}
    whole = bson.encode(
        {
            "s": 'a "text"',
            **document,
            "bi": Binary(b"xyz", 4),
            "d": {"a": True, "b": "é"},
            "l": array,
            "m": [1, "x", None, 2.5],
        }
    )
    changed = [
        whole[:place] + bytes([byte]) + whole[place + 1 :]
        for place in range(len(whole))
        for byte in {
            0,
            1,
            2,
            3,
            4,
            5,
            8,
            10,
            16,
            18,
            127,
            128,
            255,
            whole[place] ^ 1,
            (whole[place] + 1) % 256,
            whole[place] ^ 64,
        }
    ]
    assert_as_alone(batch_encoder.BatchEncoder(), [whole, *filter(is_document, changed)])
    broken = [each for each in changed if not is_document(each)]
    assert len(broken) > 500
    orders: dict[batch_walk.Path, field_order.FieldOrder] = {}
    assert not batch_walk.BatchWalk([whole], orders).is_odd.any()
    assert batch_walk.BatchWalk([whole, *broken, whole], orders).is_odd.tolist() == [False, *[True] * len(broken), False]


@pytest.mark.usefixtures("always")
def test_most_documents_are_not_written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional fields, values of other types, arrays of any length, and new names are all encoded in batches."""
    draw = random.Random(1)

    def document(number: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            f"field_{place}": drawn(draw, KINDS[place % 10]) for place in range(40) if draw.random() < 0.7
        }
        lines = [{"sku": drawn(draw, "string"), "price": 0.5} for _ in range(draw.randrange(5))]
        note = draw.choice([None, "a text", 5])
        return {"_id": number, **made, "lines": lines, "note": note, **({"later": {"x": [number]}} if number > 200 else {})}

    documents = [bson.encode(document(number)) for number in range(400)]
    alone: list[bytes] = []
    encode = bson_to_json.encode
    monkeypatch.setattr(bson_to_json, "encode", lambda raw: alone.append(raw) or encode(raw))  # type: ignore[func-returns-value]
    encoder = batch_encoder.BatchEncoder()
    texts = [encoder.encode(documents[at : at + 100]).texts for at in range(0, 400, 100)]
    assert not alone
    assert [text.as_py().encode() for each in texts for text in each] == [encode(each).text for each in documents]


def test_documents_that_do_not_look_alike_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If names are data, like the keys of a map, batches are only tried now and then, because each attempt takes as long as encoding."""
    documents = [bson.encode({"_id": number, f"key {number}": 1, "text": "x" * 50}) for number in range(200)]
    tried: list[int] = []
    walk = batch_encoder.BatchWalk

    def counted(group: list[bytes], orders: dict[batch_walk.Path, field_order.FieldOrder]) -> batch_walk.BatchWalk:
        tried.append(len(group))
        return walk(group, orders)

    monkeypatch.setattr(batch_encoder, "BatchWalk", counted)
    encoder = batch_encoder.BatchEncoder()
    for _ in range(40):
        assert_as_alone(encoder, documents)
    assert len(tried) == 3


def test_an_order_is_learned_from_documents_that_lack_fields() -> None:
    """Even if no document has all of them. A document with another order, or with a repeated field, teaches nothing."""
    order = field_order.FieldOrder()
    assert order.learn([(b"a", b"c"), (b"b", b"d"), (b"a", b"b"), (b"c", b"d"), (b"b", b"c")])
    assert order.names == (b"a", b"b", b"c", b"d")
    assert not order.learn([(b"d", b"a"), (b"a", b"a"), (b"a", b"c")])
    assert order.names == (b"a", b"b", b"c", b"d")
