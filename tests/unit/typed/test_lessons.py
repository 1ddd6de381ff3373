"""What a decoder learns from documents that it refuses."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.schema import document_schema, evolution
from cdc_core.schema.pins import Pins, parse_pins
from cdc_core.schema.shape import observe
from cdc_core.typed import decoding, exact
from tests.harness import typed_cases

ITEMS: list[Any] = [5, "x", None, [], {}, {"$undefined": True}, {"$numberLong": "7"}, {"a": [1, {"b": 2}]}, [None]]


def schema_of(fields: int) -> document_schema.DocumentSchema:
    """The schema of a nested document `by` of so many fields."""
    return evolution.join(document_schema.EMPTY, observe({"_id": 0, "by": {f"k{number}": 1 for number in range(fields)}}))[0]


def typed(texts: list[str], pins: Pins, schema: document_schema.DocumentSchema) -> decoding.TypedTexts:
    """The texts typed by a new decoder; the rows are compared with the exact path."""
    result, expected = decoding.Decoder(schema, pins).typed(pa.array(texts)), exact.rows(pa.array(texts), schema)
    assert result.rows.field("document").equals(expected.field("document"))
    for name in ("rescued", "unreadable"):
        assert typed_cases.plain(result.rows.field(name).to_pylist()) == typed_cases.plain(expected.field(name).to_pylist())
    return result


@pytest.mark.parametrize("pins", [{}, {"by.k7": "bigint"}, {"by.other": "bigint"}])
@pytest.mark.parametrize("is_full", [True, False])
def test_ever_new_keys_leave_few_documents_to_the_exact_path(is_full: bool, pins: dict[str, str]) -> None:
    """Ids or words as names, which no lesson can hold: each value is rescued, and where there is room its document is new."""
    documents = [
        {"_id": number, "by": {"k3": number, f"id{number}": ITEMS[number % len(ITEMS)], f"word{number}": None}}
        for number in range(1000)
    ]
    parsed_pins, schema = parse_pins(pins), schema_of(evolution.MAX_FIELDS if is_full else 20)
    result = typed([json.dumps(each, separators=(",", ":")) for each in documents], parsed_pins, schema)
    # With a pin for what may be a new key, the exact path finds out.
    assert result.exact < 250 or (pins and not is_full)
    assert not (is_full and result.new.true_count)
    for document, is_new in zip(documents if not is_full else (), result.new.to_pylist()):
        assert is_new or not evolution.join(schema, observe(document), pins=parsed_pins)[1]


def test_keys_that_may_be_wrappers_keep_their_documents_on_the_exact_path() -> None:
    """Among ever new keys there may be escaped ones, and a typed value instead of a document."""
    odd = [
        '{"$$oid":"x"}',
        '{"$numberLong":"5"}',
        '{"$ref":"c","$id":1}',
        '{"a":1,"a":2}',
        '{"a\\"b":1}',
        '{"é":{"b":1,"b":2}}',
    ]
    texts = [f'{{"_id":{number},"by":{{"id{number}":1}}}}' for number in range(1000)]
    texts += [f'{{"_id":{number},"by":{each}}}' for number, each in enumerate(odd)]
    typed(texts, {}, schema_of(20))
