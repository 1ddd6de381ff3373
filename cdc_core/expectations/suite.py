"""A suite: the expectations that a version of a gold table or model must meet before it is published.

A file holds one suite, in the JSON of Great Expectations or the same as YAML:

    table: shop.orders            # a collection or a model; default: the file's name without its extension
    expectations:
      - type: expect_column_values_to_be_between
        kwargs: {column: total, min_value: 0}
        severity: critical        # or warning, info; default: critical

`kwargs` are passed to the library, which validates them.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cdc_core import errors
from cdc_core.properties import types as values


class Severity(enum.Enum):
    """How a failed expectation affects publishing: critical keeps the last good version, the others publish anyway."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


TABLE_EXPECTATIONS = frozenset(
    {
        "expect_column_values_to_be_unique",
        "expect_compound_columns_to_be_unique",
        "expect_column_values_to_be_increasing",
        "expect_column_values_to_be_decreasing",
        "expect_column_value_z_scores_to_be_less_than",
        "expect_column_values_to_not_be_outliers",
    }
)
"""Expectations that only hold for a whole table, not for single rows."""

_COLUMNS = ("column", "column_A", "column_B")
_CONDITION = "row_condition"
"""The argument that limits an expectation to some rows, by any columns."""
_OF_ROW_COUNT = frozenset({"expect_table_row_count_to_be_between", "expect_table_row_count_to_equal"})


@dataclass(frozen=True)
class Expectation:
    """One expectation; `kwargs` as in the file, `where` is its location for messages."""

    type: str
    kwargs: Mapping[str, object]
    severity: Severity
    where: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that must exist to evaluate it."""
        names: list[object] = [self.kwargs.get(name) for name in _COLUMNS]
        column_list = self.kwargs.get("column_list") if self.type != "expect_table_columns_to_match_ordered_list" else None
        names += column_list if isinstance(column_list, list) else []
        return tuple(name for name in names if isinstance(name, str) and self.type != "expect_column_to_exist")

    def with_columns(self, names: Mapping[str, str]) -> Expectation:
        """The expectation with its columns renamed."""
        renamed = {name: names.get(str(self.kwargs[name])) or self.kwargs[name] for name in _COLUMNS if name in self.kwargs}
        column_list = self.kwargs.get("column_list")
        if isinstance(column_list, list):
            renamed["column_list"] = [names.get(column, column) for column in column_list]
        return replace(self, kwargs={**self.kwargs, **renamed})

    @property
    def is_partial(self) -> bool:
        """Whether only a share of the rows must meet it (`mostly`), which needs the whole table."""
        return self.kwargs.get("mostly", 1) not in (1, 1.0)

    @property
    def label(self) -> str:
        """The expectation with its columns, for messages."""
        return f"{self.type} of {', '.join(self.columns)}" if self.columns else self.type


@dataclass(frozen=True)
class Suite:
    """The expectations of one table."""

    table: str
    expectations: tuple[Expectation, ...]
    where: str

    @property
    def digest(self) -> str:
        """A short hash that changes with the suite."""
        fields = [[expectation.type, expectation.kwargs, expectation.severity.value] for expectation in self.expectations]
        return hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


_KEYS = ("table", "name", "expectations", "meta", "notes", "id")
_OLDER_KEYS = ("expectation_suite_name", "data_asset_type", "ge_cloud_id")
"""Keys that the library wrote before 1.0; ignored."""
_PARAMETERS = ("suite_parameters", "evaluation_parameters")
_EXPECTATION_KEYS = (
    "type",
    "expectation_type",
    "kwargs",
    "severity",
    "meta",
    "notes",
    "description",
    "id",
    "rendered_content",
)


def parse(document: object, *, name: str, where: str) -> Suite:
    """The suite in a file called `name`. Raises `SettingsError` with all mistakes."""
    problems: list[errors.Problem] = []
    section = _section(document, (*_KEYS, *_OLDER_KEYS, *_PARAMETERS), where, "", problems)
    problems += [
        errors.Problem(f"{where}: {key}", "nothing sets parameters here", "write the values directly")
        for key in _PARAMETERS
        if section.get(key)
    ]
    entries = section.get("expectations")
    if not isinstance(entries, list) or not entries:
        message = "it names no expectation" if entries == [] else f"a list is expected, found {values.shown(entries)}"
        problems.append(errors.Problem(where, f"expectations: {message}"))
        entries = []
    table = section.get("table") or name
    expectations = [_expectation(entry, f"expectations[{number}]", where, problems) for number, entry in enumerate(entries)]
    if problems:
        raise errors.SettingsError(problems)
    return Suite(str(table), tuple(expectation for expectation in expectations if expectation is not None), where)


def _expectation(entry: object, place: str, where: str, problems: list[errors.Problem]) -> Expectation | None:
    section = _section(entry, _EXPECTATION_KEYS, where, place, problems)
    type_ = section.get("type") or section.get("expectation_type")
    if not isinstance(type_, str):
        problems.append(errors.Problem(f"{where}: {place}.type", "expected the name of an expectation", "expect_column_…"))
        return None
    kwargs = section.get("kwargs") or {}
    if not isinstance(kwargs, Mapping):
        problems.append(errors.Problem(f"{where}: {place}.kwargs", f"a mapping is expected, found {values.shown(kwargs)}"))
        return None
    for key in _keys(kwargs):
        if not isinstance(key, str):
            problems.append(
                errors.Problem(f"{where}: {place}.kwargs.{key}", "a text is expected as key", f'put it in quotes: "{key}"')
            )
            return None
    parameters = [name for name, value in kwargs.items() if isinstance(value, Mapping) and "$PARAMETER" in value]
    if parameters:
        message = "nothing sets parameters here"
        problems.append(errors.Problem(f"{where}: {place}.kwargs.{parameters[0]}", message, "write the value"))
        return None
    severity = section.get("severity", "critical")
    severities = [member.value for member in Severity]
    if severity not in severities:
        hint = values.did_you_mean(str(severity), severities)
        message = f"one of {', '.join(severities)} is expected, found {values.shown(severity)}"
        problems.append(errors.Problem(f"{where}: {place}.severity", message, hint))
        return None
    return Expectation(type_, kwargs, Severity(severity), f"{where}: {place}")


def _keys(value: object) -> Iterator[object]:
    """The keys of all mappings in a value."""
    if isinstance(value, Mapping):
        yield from value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        yield from _keys(item)


def _section(
    entry: object, known: tuple[str, ...], where: str, place: str, problems: list[errors.Problem]
) -> Mapping[str, object]:
    location = f"{where}: {place}" if place else where
    if not isinstance(entry, Mapping):
        problems.append(errors.Problem(location, f"a mapping is expected, found {values.shown(entry)}"))
        return {}
    for key in entry:
        if key not in known:
            hint = values.did_you_mean(str(key), known) or f"known are {', '.join(known[:4])}"
            problems.append(errors.Problem(f"{location}{'.' if place else ': '}{key}", "there is no such key", hint))
    return entry


def columns_read(expectations: Iterable[Expectation], columns: Sequence[str]) -> list[str] | None:
    """Those of a table's columns that the expectations read; None if one of them may read any of them."""
    names: dict[str, None] = {}
    for each in expectations:
        if each.type in _OF_ROW_COUNT and _CONDITION not in each.kwargs:
            continue
        if not each.columns or _CONDITION in each.kwargs:
            return None
        names |= dict.fromkeys(name if name in columns else name.partition(".")[0] for name in each.columns)
    return [*names]


def missing_columns(suite: Suite, columns: Sequence[str], *, table: str) -> Iterator[tuple[Expectation, errors.Problem]]:
    """The expectations on columns that the table does not have, each with its problem."""
    for expectation in suite.expectations:
        for name in expectation.columns:
            if name not in columns and name.partition(".")[0] not in columns:
                hint = values.did_you_mean(name, columns) or f"it has {', '.join(columns[:20])}"
                yield (
                    expectation,
                    errors.Problem(expectation.where, f"{expectation.type}: {table} has no column {name}", hint),
                )
