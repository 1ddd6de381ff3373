"""Tables of facts, without Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import AnalysisException, PySparkException

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import quarantine_table
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta


@pytest.mark.parametrize("is_there", [True, False])
def test_columns_that_another_process_has_just_added_are_there(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """A capture and silver of a newer version may start together and both add the missing column."""
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


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off"])
def test_a_file_that_is_cut_off_is_left_to_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    """A power failure may truncate a file that a compaction wrote: Spark's error names the damaged file and what to do."""
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    (file,) = tmp_path.glob("*.parquet")
    file.write_bytes(content)
    schema = pa.schema([("a", pa.int64())])
    monkeypatch.setattr(ops_tables, "_by_spark", lambda *given: schema.empty_table())
    table, no_spark = tables.TableRef.at(str(tmp_path)), cast(Any, None)
    assert [part.num_rows for part in ops_tables.parts(no_spark, table, schema)] == [0]
    assert ops_tables.rows(no_spark, table, schema).num_rows == 0


def test_facts_beside_a_compaction_are_appended_at_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts about a quarantine are read from it, so that Delta refuses them after a compaction by `maintain`: no bug, and the range is repeated."""

    class ConcurrentDeleteReadException(PySparkException):
        pass

    facts = MagicMock()
    facts.where.return_value.withColumns.return_value.select.return_value = facts
    facts.isEmpty.return_value = False
    facts.writeTo.return_value.append.side_effect = ConcurrentDeleteReadException("another commit came first")
    monkeypatch.setattr(delta, "exists", lambda *_: True)
    for name in ("F", "quarantine_rules"):
        monkeypatch.setattr(quarantine_table, name, MagicMock(held=lambda _: facts))
    quarantine_table.F.col.return_value.__lt__.return_value = True  # type: ignore[attr-defined]  # the mock
    with pytest.raises(errors.CommitConflict):
        quarantine_table.supersede(MagicMock(), tables.TableRef.at("/lake/quarantine/t"), before="f", to=1)
