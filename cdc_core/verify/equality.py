""" "Source equals gold" for one document: its values are in their columns or in `__rescued`, and nothing else is.

The expected row is that of the exact path (`exact.whole_row`). A row written under an earlier schema may have a value in
`__rescued` that would have a column today, which still counts as equal: such values are removed from the document
before the rest is compared. Absent equals null, NaN equals NaN, and the order of fields is ignored.

Differences are reported by path and in words, never by value, because readers of reports may not be allowed to see
documents.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson

from cdc_core.extended_json import wrappers
from cdc_core.schema import kinds
from cdc_core.schema.column_types import Array, ColumnType, Map, Scalar, Struct
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.typed import exact

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_NUMBERED = re.compile(r"#\d+$")
_INDEX = re.compile(r"[0-9]{1,9}")
_PLAIN = frozenset({bool, int, str})
_MARK = "\0"
"""Appears in no field name, so a tagged value is never confused with a document."""


@dataclass(frozen=True)
class TableRow:
    """A table's row: the cells of the document's columns and of columns that belong to no field, and what was rescued."""

    columns: Mapping[str, Any]
    rescued: Mapping[str, str]
    others: Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One place where document and row differ, in words."""

    path: str
    what: str


def canonical(value: Any) -> Any:
    """A cell as JSON values: equal for equal cells of a table's row and of an expected one."""
    kind = type(value)
    if kind in _PLAIN or value is None:
        return value
    if kind is dict:
        return {name: canonical(item) for name, item in value.items() if item is not None}
    if kind is list or kind is tuple:
        return [canonical(item) for item in value]
    if kind is float:
        # JSON has neither NaN nor infinities, and NaN must equal itself here.
        return value if math.isfinite(value) else {_MARK: "NaN" if math.isnan(value) else repr(value)}
    if kind is bytes:
        return {_MARK + "bytes": value.hex()}
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return {_MARK + "time": (value - _EPOCH) // _MICROSECOND}
    if kind is decimal.Decimal:
        return {_MARK + "decimal": format(value, "f")}
    # Not one of our column types: somebody else changed it, and no value of a document equals it.
    return {f"{_MARK}{type(value).__name__}": str(value)}


def _present(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {name: canonical(cell) for name, cell in cells.items() if cell is not None}


def _text(text: str) -> Any:
    """A rescued text parsed: blanks and order of fields do not matter, kinds of numbers do."""
    try:
        return _without_nulls(orjson.loads(text))
    except ValueError:
        return {_MARK + "text": text}


def _without_nulls(parsed: Any) -> Any:
    if isinstance(parsed, dict):
        fields = {name: _without_nulls(item) for name, item in parsed.items() if item is not None}
        return {_MARK: "undefined"} if fields == {"$undefined": True} else fields
    return [_without_nulls(item) for item in parsed] if isinstance(parsed, list) else parsed


def digest(row: TableRow) -> int:
    """64 bits: equal rows have equal digests, and different rows almost certainly different ones."""
    rescued = {path: _text(text) for path, text in row.rescued.items()}
    text = orjson.dumps([_present(row.columns), rescued, _present(row.others)], option=orjson.OPT_SORT_KEYS)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def exact_digest(text: str) -> int:
    """64 bits, equal for texts of one document in any field order; absent and null differ."""
    try:
        canonical_text = json.dumps(exact.parsed(text), sort_keys=True)
    except (ValueError, RecursionError):
        canonical_text = text
    return int.from_bytes(hashlib.blake2b(canonical_text.encode(), digest_size=8).digest(), "big", signed=True)


def exact_differences(source: str, table_text: str) -> tuple[Difference, ...]:
    """The differences between two documents as Extended JSON, ignoring the order of fields."""
    (source_document, source_repeated), (table_document, table_repeated) = exact.parsed(source), exact.parsed(table_text)
    names = dict.fromkeys((*source_repeated, *table_repeated))
    repeated_differences = (
        Difference(name, "it is there twice") for name in names if source_repeated.get(name) != table_repeated.get(name)
    )
    return (*_exactly_between(source_document, table_document, ""), *repeated_differences)


def _exactly_between(source_value: Any, table_value: Any, path: str) -> Iterator[Difference]:
    value_kinds = kinds.kind(source_value), kinds.kind(table_value)
    if _DOCUMENTS.issuperset(value_kinds):
        for name in dict.fromkeys((*source_value, *table_value)):
            field_name = wrappers.unescape_key(name)
            field_path = f"{path}.{field_name}" if path else field_name
            if name not in table_value:
                yield Difference(field_path, "in the source, not in the table")
            elif name not in source_value:
                yield Difference(field_path, "in the table, not in the source")
            else:
                yield from _exactly_between(source_value[name], table_value[name], field_path)
    elif isinstance(source_value, list) and isinstance(table_value, list) and len(source_value) == len(table_value):
        for number, (left, right) in enumerate(zip(source_value, table_value, strict=True)):
            yield from _exactly_between(left, right, f"{path}.{number}")
    elif isinstance(source_value, list) and isinstance(table_value, list):
        yield Difference(path, f"{len(source_value)} elements in the source, {len(table_value)} in the table")
    elif _as_text(source_value) != _as_text(table_value):
        description = f"{value_kinds[0].value} in the source, {value_kinds[1].value} in the table"
        yield Difference(path, "another value" if value_kinds[0] is value_kinds[1] else description)


_DOCUMENTS = frozenset({kinds.Kind.DOCUMENT, kinds.Kind.EMPTY_DOCUMENT})


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class ExactDocument:
    """A document as the exact path reads it, with the earlier values of repeated fields."""

    parsed: Mapping[str, Any]
    repeated: Mapping[str, Sequence[str]]

    @staticmethod
    def read(text: str) -> ExactDocument:
        """The document in an Extended JSON text; ValueError if it is none."""
        return ExactDocument(*exact.parsed(text))

    def expected(self, schema: DocumentSchema) -> TableRow:
        """The row that the schema makes of it."""
        columns, rescued = exact.whole_row(self.parsed, self.repeated, schema)
        return TableRow(columns, rescued, {})


def differences(document: ExactDocument, row: TableRow, schema: DocumentSchema) -> tuple[Difference, ...]:
    """The differences in no particular order; empty for a row that matches the document."""
    full_row = document.expected(schema)
    remaining, kept, unexplained_paths = document, {**row.rescued}, []
    for path, text in row.rescued.items():
        if path in full_row.rescued and _is_same(_text(full_row.rescued[path]), _text(text)):
            continue
        pruned = _pruned(remaining.parsed, path.split("."), _text(text))
        if pruned is None and _NUMBERED.search(path):
            pruned = _pruned(remaining.parsed, _NUMBERED.sub("", path).split("."), _text(text))
        if pruned is None:
            unexplained_paths.append(path)
        else:
            remaining = ExactDocument(pruned, remaining.repeated)
            del kept[path]
    expected = full_row if remaining is document else remaining.expected(schema)
    # With flattening, a document is rescued as `{}` if no column has a value of it. Without the pruned values, others have lower numbers.
    in_table, in_source = Counter(map(_unnumbered, kept.items())), Counter(map(_unnumbered, expected.rescued.items()))
    unknown, lost = in_table - in_source, in_source - in_table
    unknown_paths = [path for path in unexplained_paths if _unnumbered((path, row.rescued[path])) in unknown]
    lost_paths = [path for path, text in expected.rescued.items() if _unnumbered((path, text)) in lost]
    result = [Difference(path, "what is rescued is not what the source holds") for path in unknown_paths]
    result += (Difference(path, "neither in its column nor rescued") for path in lost_paths if path not in unknown_paths)
    types = dict(schema.table())
    for name, expected_value in expected.columns.items():
        result += _between(types[name], canonical(expected_value), canonical(row.columns.get(name)), name)
    result += (Difference(name, "no field of the source") for name in _present(row.others))
    return tuple(result)


def _unnumbered(rescued: tuple[str, str]) -> tuple[str, bytes]:
    """A path without the number of its value, and the value."""
    path, text = rescued
    return _NUMBERED.sub("", path), orjson.dumps(_text(text), option=orjson.OPT_SORT_KEYS)


def _pruned(value: Any, steps: list[str], source_value: Any) -> Any:
    """The value without the one at the path, if that equals the wanted one; else None.

    Names may contain dots, so a path may be read in several ways.
    """
    for end, key in _readings(value, steps):
        if end < len(steps):
            pruned = _pruned(value[key], steps[end:], source_value)
        else:
            pruned = _GONE if _is_same(_without_nulls(value[key]), source_value) else None
        if pruned is not None:
            copied = list(value) if isinstance(value, list) else dict(value)
            copied[key] = None if pruned is _GONE else pruned
            return copied
    return None


_GONE = object()


def _readings(value: Any, steps: list[str]) -> list[tuple[int, Any]]:
    """The keys or the index that a path can begin with, each with the number of steps that it takes, fewest first."""
    if isinstance(value, list):
        return [(1, int(steps[0]))] if _INDEX.fullmatch(steps[0]) and int(steps[0]) < len(value) else []
    readings, keys = [], value if isinstance(value, dict) else {}
    if len(keys) > len(steps):  # a document may have thousands of fields, and a path for each
        names = [".".join(steps[:end]) for end in range(1, len(steps) + 1)]
        keys = {key: None for key in (*names, *map(wrappers.escape_key, names)) if key in keys}
    for key in keys:
        parts = wrappers.unescape_key(key).split(".")
        if steps[: len(parts)] == parts:
            readings.append((len(parts), key))
    return sorted(readings, key=itemgetter(0))


def _between(type_: ColumnType, source_value: Any, table_value: Any, path: str) -> Iterator[Difference]:
    """The differences between an expected cell and the table's; both canonical."""
    if _is_same(source_value, table_value):
        return
    match type_:
        case Struct(fields) if isinstance(source_value, dict) and isinstance(table_value, dict):
            fields_by_column = {item.column: item for item in fields}
            for column in {**source_value, **table_value}:
                column_type = fields_by_column[column].type if column in fields_by_column else Scalar.STRING
                yield from _between(column_type, source_value.get(column), table_value.get(column), f"{path}.{column}")
        case Map(value) if isinstance(source_value, dict) and isinstance(table_value, dict):
            for name in {**source_value, **table_value}:
                yield from _between(value, source_value.get(name), table_value.get(name), f"{path}.{name}")
        case Array(element) if isinstance(source_value, list) and isinstance(table_value, list):
            if len(source_value) != len(table_value):
                yield Difference(path, f"{len(source_value)} elements in the source, {len(table_value)} in the table")
                return
            for number, (left, right) in enumerate(zip(source_value, table_value, strict=True)):
                yield from _between(element, left, right, f"{path}.{number}")
        case Scalar.TEXT if (
            isinstance(source_value, str) and isinstance(table_value, str) and _is_same_container(source_value, table_value)
        ):
            return
        case _:
            yield Difference(path, _words(source_value, table_value))


def _is_same(left: Any, right: Any) -> bool:
    """Whether two canonical values are equal: 1, 1.0 and true differ, and zero has a sign."""
    return left == right and orjson.dumps(left, option=orjson.OPT_SORT_KEYS) == orjson.dumps(
        right, option=orjson.OPT_SORT_KEYS
    )


def _is_same_container(source_text: str, table_text: str) -> bool:
    """Whether two texts are the same document or array. For other values the text itself counts: 1.10 and 1.1 are two
    decimals.
    """
    value = _text(source_text)
    return isinstance(value, dict | list) and _is_same(value, _text(table_text))


def _words(source_value: Any, table_value: Any) -> str:
    if table_value is None:
        return "in the source, not in the table"
    if source_value is None:
        return "in the table, not in the source"
    names = _kind(source_value), _kind(table_value)
    return "another value" if names[0] == names[1] else f"{names[0]} in the source, {names[1]} in the table"


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "whole number"
        case float():
            return "double"
        case str():
            return "string"
        case list():
            return "array"
        case dict() if len(value) == 1 and next(iter(value)).startswith(_MARK):
            return next(iter(value)).removeprefix(_MARK) or "double"
        case _:
            return "document"
