"""Commits of earlier versions are understood, although they lack later fields."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.bronze import registry
from pipelines.delta import ops_tables
from pipelines.gold import history_position
from tests.harness import without_spark

CLAIM = '"writer":"8032c1672e3f43ccbc8467596d95550b","host":"h","process":7,"started":"3b5e2946:26","lease":1795640401920'


@pytest.fixture
def table(tmp_path: Path) -> tables.TableRef:
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    return tables.TableRef.at(str(tmp_path / "t"))


def committed(table: tables.TableRef, said: str) -> None:
    without_spark.write(Path(table.path or ""), 0, [], userMetadata=f'{{{CLAIM},{said},"commit":"ba3f66976f3d"}}')


def test_a_silver_that_named_no_bronze(table: tables.TableRef) -> None:
    """It counts as made from the present bronze, and nothing is known of whole documents and added columns."""
    committed(
        table, '"to":3,"high":"6b074bae00000001ffffffff","swept":"6b074bae00000001ffffffff","generation":"","floor":""'
    )
    found = registry.silver_position(without_spark.SPARK, table)
    high = "6b074bae00000001ffffffff"
    assert found == registry.SilverPosition(3, high, high, version=0)
    assert (found.documents, found.bronze, found.is_of_other("03df0a45010d")) == (None, None, False)


def test_a_history_that_knew_of_no_gaps(table: tables.TableRef) -> None:
    committed(table, '"to":9,"floor":"6b07","log":"cb49be087648"')
    assert history_position.position(without_spark.SPARK, table) == history_position.HistoryPosition(
        9, "6b07", "cb49be087648"
    )


def test_a_bronze_that_had_no_name(table: tables.TableRef) -> None:
    committed(table, '"to":"826B07","stream":"f2d5d2d57ec85b88372b9bc25dd1410b","batch":22')
    found = bronze.newest(without_spark.SPARK, table)
    assert (found.batch, found.log, found.commit) == (22, None, (0, "ba3f66976f3d"))


def test_threads_give_a_table_of_facts_its_columns_once(table: tables.TableRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade several collections are recorded at once: a second ALTER would fail because the column exists."""
    held, statements = {"collection"}, []

    def altered(statement: str) -> None:
        time.sleep(0.05)
        held.add("version")
        statements.append(statement)

    schema = pa.schema([("collection", pa.string()), ("version", pa.int64())])
    monkeypatch.setattr(ops_tables.delta, "create", lambda *_, **__: None)
    monkeypatch.setattr(ops_tables.delta, "columns", lambda *_: frozenset(held))
    monkeypatch.setattr(ops_tables, "append_rows", lambda *_, **__: None)
    spark: Any = SimpleNamespace(sql=altered)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ops_tables.note(spark, table, [{}], schema), range(4)))
    assert len(statements) == 1
