"""Documents with their expected columns, and the exact path, with which every other way of typing them is compared."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import column_types, document_schema
from cdc_core.schema.evolution import join
from cdc_core.schema.pins import Pins, parse_pins
from cdc_core.schema.shape import Shape
from cdc_core.typed import exact
from pipelines.schema import batch_evolution

_FILE = pathlib.Path(__file__).parents[1] / "cases" / "types" / "documents.jsonl"
DOCUMENTS: list[dict[str, Any]] = [json.loads(line) for line in _FILE.read_text().splitlines()]
OPTIONS = {
    "flatten": unwrap_options.parse({"flatten.struct": "true"}),
    "arrays_as_documents": unwrap_options.parse({"array.encoding": "document"}),
}


def texts_of(case: Mapping[str, Any]) -> list[str | None]:
    """A case's documents, as JSON."""
    return [orjson.dumps(document).decode() for document in case["documents"]]


def settings_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case's settings, as arguments of `batch_evolution.evolve`."""
    options = next((OPTIONS[name] for name in case.get("naming", {})), None)
    return {"pins": parse_pins(case.get("pins", {})), "options": options}


def mark(number: int) -> str:
    """The place of a document in the order of events."""
    return f"{number:024x}"


def check_schema(
    evolution: batch_evolution.Evolution,
    texts: Sequence[str | None],
    current: document_schema.DocumentSchema,
    *,
    first: int = 0,
    pins: Pins | None = None,
) -> None:
    """Assert that the evolved types are those of the documents' shapes, observed one by one."""
    shape = Shape()
    for number, text in enumerate(texts):
        exact.observed(shape, text or "", mark(first + number), values=evolution.schema.naming.values)
    expected, _ = join(current, shape, pins=pins, naming=evolution.schema.naming)
    assert types(evolution.schema.struct) == types(expected.struct)


def rows(texts: Sequence[str | None], schema: document_schema.DocumentSchema) -> list[dict[str, Any]]:
    """The documents typed by the exact path, in order."""
    blank = {"document": None, "rescued": None, "unreadable": False}
    return [blank if row is None else plain(row) for row in exact.rows(pa.array(texts), schema).to_pylist()]


def plain(value: Any) -> Any:
    """An Arrow value in a form to compare: floats as text, so that NaN equals NaN and -0.0 differs from 0.0, and maps as dicts."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        assert len(dict(value)) == len(value)
        return plain(dict(value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def types(type_: column_types.ColumnType) -> Any:
    """A type without the order of its fields and the names of their columns."""
    match type_:
        case column_types.Struct(fields):
            return {item.name: types(item.type) for item in fields}
        case column_types.Array(element):
            return [types(element)]
        case column_types.Map(value):
            return ("map", types(value))
        case _:
            return type_
