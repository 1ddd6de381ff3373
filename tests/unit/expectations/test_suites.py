"""How a suite of expectations is read."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_core import errors
from cdc_core.expectations import suite
from pipelines.gold import great_expectations

SUITE = {
    "name": "orders",
    "table": "shop.orders",
    "expectations": [
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "total"}},
        {
            "type": "expect_column_pair_values_to_be_equal",
            "kwargs": {"column_A": "a", "column_B": "b.c"},
            "severity": "warning",
        },
        {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}},
    ],
}


def test_a_suite_names_its_table_or_has_its_name_from_the_file() -> None:
    """The severity is critical by default; missing columns are reported with the nearest name."""
    found = suite.parse(SUITE, name="orders", where="orders.yml")
    assert found.table == "shop.orders"
    assert [each.severity for each in found.expectations] == [
        suite.Severity.CRITICAL,
        suite.Severity.WARNING,
        suite.Severity.CRITICAL,
    ]
    assert suite.parse({**SUITE, "table": None}, name="totals", where="totals.json").table == "totals"
    (first, missing), (_, other) = suite.missing_columns(found, ("totals", "b"), table="shop.orders")
    assert str(missing) == (
        "orders.yml: expectations[0]: expect_column_values_to_not_be_null: shop.orders has no column total (did you mean totals?)"
    )
    assert "no column a" in str(other) and first is found.expectations[0]


def test_mistakes_of_a_suite_are_told_at_once() -> None:
    """Unknown keys and severities and wrong types are all reported, each with its place."""
    wrong = {
        "expectation": [],
        "expectations": [
            {"type": "x", "severity": "fatal"},
            {"kwargs": {}},
            {"type": "x", "kwargs": 1},
            {"type": "x", "kwargs": {"column": "a", True: 1}},
            {"type": "x", "kwargs": {"column": "a", "values": [{"b": 1, 2: 3}]}},
        ],
    }
    with pytest.raises(errors.SettingsError) as refused:
        suite.parse(wrong, name="a", where="a.yml")
    assert str(refused.value).splitlines() == [
        "a.yml: expectation: there is no such key (did you mean expectations?)",
        "a.yml: expectations[0].severity: one of critical, warning, info is expected, found fatal",
        "a.yml: expectations[1].type: expected the name of an expectation (expect_column_…)",
        "a.yml: expectations[2].kwargs: a mapping is expected, found 1",
        'a.yml: expectations[3].kwargs.True: a text is expected as key (put it in quotes: "True")',
        'a.yml: expectations[4].kwargs.2: a text is expected as key (put it in quotes: "2")',
    ]


def test_what_the_library_wrote_is_read() -> None:
    """Suites that Great Expectations writes today and wrote before 1.0 are read. Parameters are refused, because nothing sets them."""
    between = {"column": "total", "max_value": 5.0}
    rows = {"unexpected_rows_query": "SELECT * FROM {batch} WHERE total < 0"}
    written = {
        "name": "orders",
        "id": None,
        "expectations": [
            {
                "type": "expect_column_values_to_be_between",
                "kwargs": between,
                "meta": {},
                "notes": ["a note"],
                "severity": "warning",
            },
            {
                "type": "unexpected_rows_expectation",
                "kwargs": rows,
                "meta": {},
                "description": "none",
                "severity": "critical",
            },
        ],
        "meta": {"great_expectations_version": "1.24.1"},
        "notes": None,
    }
    found = suite.parse(written, name="shop.orders", where="a.json")
    assert (found.table, [each.severity.value for each in found.expectations]) == ("shop.orders", ["warning", "critical"])
    assert [great_expectations.is_about_rows(each) for each in found.expectations] == [True, False]
    assert not list(great_expectations.mistakes(found))
    kwargs = {"column": "total"}
    older = {
        "expectation_suite_name": "orders",
        "data_asset_type": None,
        "ge_cloud_id": None,
        "expectations": [{"expectation_type": "expect_column_values_to_not_be_null", "kwargs": kwargs, "meta": {}}],
        "meta": {"great_expectations_version": "0.18.22"},
    }
    assert not list(great_expectations.mistakes(suite.parse(older, name="orders", where="a.json")))
    with pytest.raises(errors.SettingsError) as refused:
        wrong = {"type": "expect_table_row_count_to_equal", "kwargs": {"value": {"$PARAMETER": "rows"}}}
        suite.parse({"suite_parameters": {"rows": 5}, "expectations": [wrong]}, name="a", where="a.json")
    assert str(refused.value).splitlines() == [
        "a.json: suite_parameters: nothing sets parameters here (write the values directly)",
        "a.json: expectations[0].kwargs.value: nothing sets parameters here (write the value)",
    ]


NULL, UNIQUE, COUNT = (
    "expect_column_values_to_not_be_null",
    "expect_compound_columns_to_be_unique",
    "expect_table_row_count_to_equal",
)


@pytest.mark.parametrize(
    ("expectations", "columns"),
    [
        ([(NULL, {"column": "total"}), (UNIQUE, {"column_list": ["a.b", "c.d"]})], ["total", "a", "c.d"]),
        ([("expect_column_pair_values_to_be_equal", {"column_A": "a", "column_B": "total"})], ["a", "total"]),
        ([(COUNT, {"value": 5})], []),
        ([(NULL, {"column": "total", "row_condition": "a.b = 1", "condition_parser": "spark"})], None),
        ([(COUNT, {"value": 5, "row_condition": "total > 1", "condition_parser": "spark"})], None),
        ([(NULL, {"column": "total"}), ("unexpected_rows_expectation", {"unexpected_rows_query": "SELECT 1"})], None),
        ([("expect_table_column_count_to_equal", {"value": 5})], None),
        ([("expect_column_to_exist", {"column": "total"})], None),
    ],
)
def test_columns_that_expectations_read(expectations: list[tuple[str, dict[str, Any]]], columns: list[str] | None) -> None:
    """All columns are needed where an expectation counts them, runs a query of its own, or has a condition on rows."""
    entries = [{"type": kind, "kwargs": kwargs} for kind, kwargs in expectations]
    parsed = suite.parse({"expectations": entries}, name="t", where="t.yml").expectations
    assert suite.columns_read(parsed, ["total", "a", "c.d"]) == columns


TRACEBACKS = {
    'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: a document\'s text': "ValueError",
    'Traceback (most recent call last):\n  File "x.py", line 1\ngreat_expectations.exceptions.MetricError: x\n': "MetricError",
    "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
    "pyspark.errors.exceptions.captured.AnalysisException: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x`\n"
    "'Filter ('x = secret)\n+- LogicalRDD [_id#1, odd.name#2, d#3], false\n": (
        "AnalysisException UNRESOLVED_COLUMN.WITH_SUGGESTION"
    ),
    "": "Exception",
}


@pytest.mark.parametrize("text", TRACEBACKS)
def test_why_an_expectation_could_not_be_judged_is_told_without_values(text: str) -> None:
    """The class of the exception and Spark's condition are shown, without the message, which may quote documents."""
    info = {"raised_exception": True, "exception_traceback": text}
    assert great_expectations._exception(info) == TRACEBACKS[text]
    assert great_expectations._exception({"a metric": info, "other": {"raised_exception": False}}) == TRACEBACKS[text]
    assert great_expectations._exception({"raised_exception": False}) is None
