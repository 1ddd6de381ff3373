"""The cases of types, decoded by column as in executors: the schema, rows and rescued values are those of the exact path."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa
import pytest

from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.schema import document_schema
from cdc_core.typed import plan
from pipelines.schema import batch_evolution, looks
from tests.harness import typed_cases


def check(
    texts: list[str | None], current: document_schema.DocumentSchema, *, first: int = 0, **named: Any
) -> document_schema.DocumentSchema:
    """Evolves the schema and types one batch, and compares both with the pure functions."""
    options, pins = named.get("options") or UnwrapOptions(), named.get("pins") or {}
    places = pa.array([typed_cases.mark(first + number) for number in range(len(texts))])
    evolution = batch_evolution.evolve(
        looks.LocalDocuments(pa.array(texts, pa.string()), places), current=current, options=options, pins=pins
    )
    typed_cases.check_schema(evolution, texts, current, first=first, pins=pins)
    decoder = plan.decoder_of(evolution.schema.to_json(), tuple(pins.items()))
    typed = decoder.typed(pa.array(texts, pa.string())).with_doubts().to_pylist()
    decoded = [{name: row[name] for name in ("document", "rescued", "unreadable")} for row in typed]
    assert [typed_cases.plain(row) for row in decoded] == typed_cases.rows(texts, evolution.schema)
    return evolution.schema


@pytest.mark.parametrize("case", typed_cases.DOCUMENTS, ids=[case["case"] for case in typed_cases.DOCUMENTS])
def test_cases(case: dict[str, Any]) -> None:
    """Each case's documents give the same by column as by the exact path."""
    check(typed_cases.texts_of(case), document_schema.EMPTY, **typed_cases.settings_of(case))


@pytest.mark.parametrize("kind", ["doubles", "dates", "texts", "arrays"])
def test_a_mix_where_arrays_are_typed_for_good(kind: str) -> None:
    """These columns keep their type for any value, so mixed arrays are not examined; nothing of them is lost."""
    values: dict[str, Any] = {"doubles": 1.5, "dates": {"$date": {"$numberLong": "1"}}, "texts": "x", "arrays": [2.5]}
    firsts = {"one": [values[kind]], "two": [[values[kind]]]}
    schema = check([orjson.dumps(firsts).decode()], document_schema.EMPTY)
    seconds: list[Any] = ["text", {"b": 1}, [{"b": 1}, {"b": "x"}, {"c": [1, {"d": 2.5}]}], [[1, 2], [], [3]], firsts["two"]]
    check([orjson.dumps(dict.fromkeys(firsts, second)).decode() for second in seconds], schema, first=1)
