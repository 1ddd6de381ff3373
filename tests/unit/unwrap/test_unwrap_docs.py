"""The examples in `docs/unwrap.md` match the code."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any

import pytest

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.unwrap import new_document_state as unwrap
from cdc_core.unwrap import printed_records
from tests.harness import recorded as lines_of

ROOT = pathlib.Path(__file__).parents[3]
CASES = ROOT / "tests" / "cases" / "unwrap"
DOCUMENT = (ROOT / "docs" / "unwrap.md").read_text(encoding="utf-8")

EXAMPLES = re.findall(r"```json options\n(.*?)```\n```json in\n(.*?)```\n```json out\n(.*?)```", DOCUMENT, re.DOTALL)
DIFFERENCES = re.findall(r"```json case (\S+) (\S+) (\S+)\n(.*?)```", DOCUMENT, re.DOTALL)


def rows(events: list[Any], options: dict[str, str]) -> list[Any]:
    def printed(result: Any) -> Any:
        match result:
            case printed_records.JsonRow():
                return result.to_json()
            case unwrap.UnchangedRecord():
                return printed_records.passed(result.event)
            case _:
                return {"dropped": True}

    return list(map(printed, printed_records.records(events, options=unwrap_options.parse(options))))


@pytest.mark.parametrize(("options", "events", "expected"), EXAMPLES)
def test_each_example_gives_the_rows_that_it_shows(options: str, events: str, expected: str) -> None:
    """Each line of input gives one line of output."""
    found = rows([json.loads(line) for line in events.splitlines()], json.loads(options))
    assert found == [json.loads(line) for line in expected.splitlines()]


@functools.cache
def recorded() -> dict[tuple[str, str, str], Any]:
    return {(case["set"], case["run"], case["case"]): case for case in lines_of.lines(CASES / "smt.jsonl.xz")}


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


@pytest.mark.parametrize(("option_set", "run", "name", "answers"), DIFFERENCES)
def test_each_difference_shows_both_answers(option_set: str, run: str, name: str, answers: str) -> None:
    """The recorded answer, and ours to the same event with the same options."""
    case, shown = recorded()[(option_set, run, name)], json.loads(answers)
    if "error" in case:
        assert case["error"].startswith(shown["real"])
    else:
        assert without_nulls(case["out"]["value"]) == shown["real"]
    [row] = rows([case["in"]], case["options"])
    assert row["value"] == shown["here"]


def test_every_option_has_an_example() -> None:
    """Including older options, and those without effect."""
    shown = {name for options, _, _ in EXAMPLES for name in json.loads(options)}
    assert shown == set(unwrap_options.NAMES)


def test_every_value_of_a_closed_set_has_an_example() -> None:
    """Except for `none`, which is the default."""
    shown = {value for options, _, _ in EXAMPLES for value in json.loads(options).values()}
    sets = (unwrap_options.ArrayEncoding, unwrap_options.FieldNameAdjustment, unwrap_options.DELETE_MODES)
    assert {member.value for members in sets for member in members} <= shown | {"none"}
