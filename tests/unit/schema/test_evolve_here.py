"""A batch's documents and its collection's schema, looked at by the process that runs the job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.schema import document_schema
from cdc_core.typed import plan
from pipelines.schema import log as schemas


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def evolution(texts: list[str], current: document_schema.DocumentSchema) -> schemas.Evolution:
    places = pa.array([f"{n:024x}" for n in range(len(texts))])
    return schemas.evolve_here(pa.array(texts), places, current=current, options=UnwrapOptions(), pins={})


@pytest.mark.usefixtures("often_interrupted")
def test_collections_of_one_schema_are_looked_at_side_by_side() -> None:
    """Of tenants, whose collections are alike, in the threads of one service: each sees its own documents."""
    shared = evolution(['{"_id": 1, "a": "x", "deep": {"known": 1}}'], document_schema.EMPTY).schema

    def names(tenant: int) -> set[str]:
        values = {True: None, False: 1}
        texts = [json.dumps({"_id": n, "a": "x", f"f{tenant}_{n % 40}": values[n % 3 > 0]}) for n in range(300)]
        return set(re.findall(r"f[0-9]+_[0-9]+", evolution(texts, shared).schema.to_json()))

    with ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            plan._decoder.cache_clear()  # what it has learned by then hides what learning beside others does
            for tenant, seen in enumerate(pool.map(names, range(4))):
                assert seen == {f"f{tenant}_{n}" for n in range(40)}


def test_no_schema_begins_with_a_document_that_may_belong_to_quarantine() -> None:
    """It would leave a column behind: all documents are looked at first, and those that cannot be read are put apart."""
    texts = ['{"_id": 1, "a": 1}', '{"_id": 2, "ghost": NaN}']
    settings: dict[str, Any] = {"options": UnwrapOptions(), "pins": {}}
    places = pa.array(["1", "2"])
    assert schemas.begun_here(pa.array(texts), places, **settings) is None
    begun = schemas.begun_here(pa.array(texts[:1]), places[:1], **settings)
    assert begun is not None and [column.name for column in begun.schema.columns] == ["_id", "a"]


def test_new_columns_have_the_order_of_the_first_document_that_has_one() -> None:
    """And not of one before it that only lay beside it: which ones do depends on how documents were cut into partitions."""
    current = evolution(['{"_id": 1, "b": 1}'], document_schema.EMPTY).schema
    texts = ['{"_id": 1, "b": 1, "n": null}', '{"_id": 2, "b": 1, "z": 1, "a": 2}', '{"_id": 3, "b": 1, "y": 1}']
    plan._decoder.cache_clear()  # one that knows `n` does not name its document
    assert [column.name for column in evolution(texts, current).schema.columns] == ["_id", "b", "z", "a", "y"]


@pytest.mark.parametrize("around", ["%s", '{"d": %s}', '{"d": [%s]}'])
def test_of_two_names_that_differ_in_case_the_later_one_is_changed(around: str) -> None:
    """However documents are cut into batches: a rebuild would else give the column of one field to the other."""
    history = ['{"x": 1}', '{"userid": "u"}', '{"userId": 5, "b": 1, "B": 2}', '{"B": 1, "X": 1}']
    texts = [around % fields for fields in history]
    schema = document_schema.EMPTY
    for text in texts:
        schema = evolution([text], schema).schema
    assert evolution(texts, document_schema.EMPTY).schema == schema
    assert re.findall(r'"name":"(\w+)","column":"(\w+_2)"', schema.to_json()) == [
        ("userId", "userId_2"),
        ("B", "B_2"),
        ("X", "X_2"),
    ]
