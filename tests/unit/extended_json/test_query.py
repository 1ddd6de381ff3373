"""Filters and stages that a user writes as JSON."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from bson.regex import Regex

from cdc_core.stream import filters
from pipelines.snapshot import chunks
from tests.harness.sources import source

CASES: dict[str, tuple[str, Any]] = {
    "beside another operator": ('{"a": {"$regex": "^x", "$ne": "xy"}}', {"a": {"$regex": "^x", "$ne": "xy"}}),
    "with options": (
        '{"a": {"$nin": ["xy"], "$regex": "^x", "$options": "i"}}',
        {"a": {"$nin": ["xy"], "$regex": "^x", "$options": "i"}},
    ),
    "alone": ('{"a": {"$in": [{"$regex": "^x", "$options": ""}]}}', {"a": {"$in": [Regex("^x")]}}),
    "another type": ('{"a": {"$gt": {"$date": "2024-01-01T00:00:00Z"}}}', {"a": {"$gt": datetime.datetime(2024, 1, 1)}}),
}


@pytest.mark.parametrize(("text", "meant"), CASES.values(), ids=CASES)
def test_a_filter_says_all_that_was_written(text: str, meant: Any) -> None:
    """A `$regex` keeps the operators beside it: documents that the filter excludes are not read by snapshot or stream."""
    spec: Any = SimpleNamespace(condition=text)
    assert chunks._condition(spec) == meant
    assert filters.user_stages(source({"cursor.pipeline": f'[{{"$match": {text}}}]'})) == [{"$match": meant}]
