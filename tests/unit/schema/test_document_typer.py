"""Documents of this process are typed by a schema that holds all of them."""

from __future__ import annotations

import gc
import json
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.schema import document_schema, evolution
from cdc_core.schema.shape import Shape, observe
from cdc_core.settings.parse import CollectionSettings
from cdc_core.typed import exact
from pipelines.schema.document_typer import DocumentTyper


@pytest.mark.parametrize("step", [1, 25])
def test_no_rows_are_made_of_documents_before_the_schema_holds_them(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the looks for new documents made, on the exact path, were thrown away."""
    counts: list[int] = []
    made = exact.rows

    def counted(texts: Any, schema: document_schema.DocumentSchema) -> Any:
        counts.append(len(texts))
        return made(texts, schema)

    monkeypatch.setattr(exact, "rows", counted)
    schema, _ = evolution.join(document_schema.EMPTY, observe({"_id": 1, "n": 1}))
    texts = pa.array([json.dumps({"_id": n, "n": n, f"f{n // step}": n}, separators=(",", ":")) for n in range(500)])
    batch = pa.table([texts, pa.array([f"{n:024x}" for n in range(500)])], names=["after", "sequence"])
    result = DocumentTyper(CollectionSettings()).typed(texts, [batch], current=schema, reserved=frozenset())
    assert result is not None
    evolutions, rows = result
    assert len(evolutions[-1].schema.fields) == 2 + 500 // step
    assert rows.equals(made(texts, evolutions[-1].schema))
    assert sum(counts) == 0


def test_documents_are_inferred_from_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape has an object for each name, without cycles: of large documents that are used as maps, the collector took a third of the time."""
    states: list[bool] = []
    see = Shape.see

    def watched(self: Shape, *given: Any) -> bool:
        states.append(gc.isenabled())
        return see(self, *given)

    monkeypatch.setattr(Shape, "see", watched)
    texts = pa.array([f'{{"_id":{n},"by":{{"k{n}":1}}}}' for n in range(20)])
    batch = pa.table([texts, pa.array([f"{n:024x}" for n in range(20)])], names=["after", "sequence"])
    typer = DocumentTyper(CollectionSettings())
    assert typer.typed(texts, [batch], current=document_schema.EMPTY, reserved=frozenset()) is not None
    assert states and not any(states) and gc.isenabled()
