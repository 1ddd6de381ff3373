"""Replacing the rows of few keys of a model, given the rows of its query."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import data_file, direct_log, key_search, live_files
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import model_in_process
from tests.harness import oracle, without_spark
from tests.harness.without_spark import SPARK

SCHEMA = pa.schema([("at", pa.timestamp("us", "UTC")), ("day", pa.date32()), ("n", pa.int64())])
YEAR_10000 = 253_402_300_800_000_000
"""Microseconds since 1970."""


def _rows(*values: tuple[int | None, int | None, int]) -> pa.Table:
    """Rows of `SCHEMA`, given the numbers of microseconds and days."""
    numbers = zip(*values) if values else ([], [], [])
    types = (pa.int64(), pa.int32(), pa.int64())
    columns = [pa.array(each, type_).view(field.type) for each, type_, field in zip(numbers, types, SCHEMA, strict=True)]
    return pa.table(columns, schema=SCHEMA)


def _writer(root: Path, rows: pa.Table, *, vectors: bool = True) -> Writer:
    table = tables.Layout(str(root)).model("sums")
    properties = {definition.DELETION_VECTORS: str(vectors).lower()}
    delta.create(SPARK, table, columns="`at` TIMESTAMP, `day` DATE, `n` BIGINT", properties=properties)
    writer = Writer.claim(SPARK, table)
    writer.append_arrow(rows, to=1)
    return writer


def _query(rows: pa.Table) -> Any:
    return SimpleNamespace(limit=lambda count: SimpleNamespace(toArrow=lambda: rows.slice(0, count)))


def _unused() -> Any:
    def refused(_: int) -> Any:
        pytest.fail("the query ran")

    return SimpleNamespace(limit=refused)


def _stored(writer: Writer) -> list[tuple[Any, ...]]:
    rows = oracle.read(writer.table.path or "")
    numbers = [
        rows[name].cast(type_).to_pylist() for name, type_ in (("at", pa.int64()), ("day", pa.int32()), ("n", pa.int64()))
    ]
    return sorted(zip(*numbers), key=repr)


@pytest.mark.parametrize("names", [["at"], ["day"], ["at", "day"]])
def test_keys_may_be_days_that_python_lacks(tmp_path: Path, names: list[str]) -> None:
    """MongoDB has dates until the year 292,278,994, and Spark until 294,247."""
    with without_spark.running():
        writer = _writer(tmp_path, _rows((YEAR_10000, 3_000_000, 1), (YEAR_10000 + 1, 3_000_001, 2), (None, None, 3)))
        keys = _rows((YEAR_10000, 3_000_000, 0), (YEAR_10000 + 1, 3_000_001, 0), (None, None, 0)).select(names)
        few = model_in_process.computed(_query(_rows((YEAR_10000, 3_000_000, 7), (None, None, 8))), keys, writer)
        assert few is not None and few.rowless.equals(keys.slice(1, 1))
        assert model_in_process.replaced(few, writer, to=2, extra={}) == writer.version
        assert _stored(writer) == sorted([(YEAR_10000, 3_000_000, 7), (None, None, 8)], key=repr)


@pytest.mark.parametrize("reason", ["many rows", "large rows", "large files", "a store", "commits go through Spark"])
def test_a_query_whose_rows_cannot_be_replaced_here_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Spark's steps would run it again."""
    with without_spark.running():
        writer = _writer(tmp_path, _rows((1, 1, 1), (2, 2, 2)), vectors=reason != "large files")
        if reason == "many rows":
            monkeypatch.setattr(live_files, "MANY_KEYS", 1)
        elif reason == "large rows":
            monkeypatch.setattr(live_files, "MANY_BYTES", 100)
        elif reason == "large files":
            monkeypatch.setattr(live_files, "MANY_REWRITTEN_BYTES", 1)
        elif reason == "a store":
            monkeypatch.setattr(key_search, "places_of", _large)
        else:  # as over Spark Connect
            monkeypatch.setattr(writer, "direct", None)
        assert model_in_process.computed(_unused(), _rows((1, 1, 0)).select(["at"]), writer) is None


def _large(*_: Any) -> Any:
    raise OSError("too large")


@pytest.mark.parametrize("vectors", [True, False])
def test_rows_that_another_program_has_added_meanwhile_are_for_spark(tmp_path: Path, vectors: bool) -> None:
    """They may be of these keys: a key would have two rows."""
    with without_spark.running():
        writer = _writer(tmp_path, _rows((1, 1, 1)), vectors=vectors)
        rows = _rows((1, 1, 7))
        few = model_in_process.computed(_query(rows), rows.select(["at"]), writer)
        assert few is not None
        log: Any = direct_log.of(SPARK, writer.table)
        log.append(
            data_file.ParquetFile.write(log.store, [_rows((1, 1, 5))], schema=SCHEMA, statistics=(), table=writer.table)
        )
        assert model_in_process.replaced(few, writer, to=2, extra={}) is None
        assert _stored(writer) == [(1, 1, 1), (1, 1, 5)]
