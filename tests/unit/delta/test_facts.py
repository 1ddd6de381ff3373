"""Tables of facts, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from cdc_core.tables import layout as tables
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta


@pytest.mark.parametrize("is_there", [True, False])
def test_columns_that_another_process_has_just_added_are_there(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """A capture and silver of a newer version are started together, and both find that a column is lacking."""
    held, noted = {"a"}, []

    def refused(statement: str) -> None:
        held.update({"b"} if is_there else ())
        raise AnalysisException("FIELD_ALREADY_EXISTS")

    monkeypatch.setattr(delta, "create", lambda *_, **__: False)
    monkeypatch.setattr(delta, "columns", lambda *_: frozenset(held))
    monkeypatch.setattr(ops_tables, "append_rows", lambda *given, **_: noted.append(given[2].to_pylist()))
    spark: Any = SimpleNamespace(sql=refused)
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])

    def note() -> None:
        ops_tables.note(spark, tables.TableRef.at("/lake/ops/facts"), [{"a": 1, "b": 2}], schema)

    if is_there:
        note()
    else:
        with pytest.raises(AnalysisException):
            note()
    assert noted == [[{"a": 1, "b": 2}]] * is_there
