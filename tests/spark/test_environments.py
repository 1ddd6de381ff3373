"""The layers where this process sees no files of the tables, and where the session also accepts no settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.sql import merge
from cdc_core.tables import layout as tables
from pipelines.delta import query_execution, statement_commits, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from tests.harness import environments, history_tables, layers, model
from tests.harness.environments import Environment
from tests.harness.layers import CASES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ELSEWHERE = [each for each in Environment if each is not Environment.DISK]
AWAY = pytest.mark.parametrize("session", ELSEWHERE, indirect=True, ids=lambda each: each.value)
EVERYWHERE = pytest.mark.parametrize("session", list(Environment), indirect=True, ids=lambda each: each.value)


@pytest.fixture
def session(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[SparkSession]:
    with environments.session(spark, request.param) as own:
        yield own


FEW = ("late_delete", "null_after", "sweep")
"""Cases whose batches need all clauses of a MERGE."""


@pytest.mark.journey
@AWAY
@pytest.mark.parametrize("names", [FEW, [*CASES]], ids=["few", "all"])
@pytest.mark.timeout(1800)
def test_cases_of_silver_and_gold(session: SparkSession, lakehouse: Path, names: Sequence[str]) -> None:
    """Cases of silver, applied batch by batch, give the expected rows in both layers."""
    hop = layers.Hop(session, layers.pipeline(lakehouse, {name: CASES[name].get("options", {}) for name in names}))
    steps = max(len(CASES[name]["batches"]) for name in names)
    for step in range(steps):
        layers.with_cases(hop, step, names)
        hop.silver()
        if step >= steps - 2:
            hop.gold()
    for name in names:
        case = CASES[name]
        assert layers.expected(case, hop.rows(name)) == case["silver"], name
        assert hop.documents(name) == case["gold"], name


@pytest.fixture(scope="module")
def four_rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a table that tests only copy."""
    table = tables.TableRef.at(str(tmp_path_factory.mktemp("four_rows") / "t"))
    delta.create(spark, table, columns="__key STRING, v INT, s STRUCT<a: INT, b: ARRAY<STRUCT<x: INT, y: INT>>>")
    writer = Writer.claim(spark, table)
    rows = [{"__key": key, "v": v, "s": {"a": v, "b": [{"x": v, "y": 0}]}} for v, key in enumerate("abcd", 1)]
    inner = pa.struct([("x", pa.int32()), ("y", pa.int32())])
    types = {"__key": pa.string(), "v": pa.int32(), "s": pa.struct([("a", pa.int32()), ("b", pa.list_(inner))])}
    writer.append_arrow(pa.Table.from_pylist(rows, schema=pa.schema(types)), to=0)
    writer.release()
    return Path(table.path or "")


@EVERYWHERE
def test_a_writer_replaces_rows_by_their_keys_or_by_their_range(
    session: SparkSession, lakehouse: Path, four_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge deletes, updates, inserts and keeps the same rows in every environment, in one commit with its position."""
    table = tables.TableRef.at(str(lakehouse / "t"))
    shutil.copytree(four_rows, lakehouse / "t")
    writer = Writer.claim(session, table)
    # The fields have another order than in the table.
    other = "named_struct('b', array(named_struct('y', 9, 'x', v)), 'a', v) AS s"
    given = "SELECT stack(3, 'a', 10, false, 'b', 20, true, 'e', 50, false) AS (`__key`, v, `__gone`)"
    statement = merge.Merge("t.`__key` = s.`__key`", merge.replacing(["__key", "v", "s"]))
    wanted = [("a", 10, (10, [(10, 9)])), ("c", 3, (3, [(3, 0)])), ("d", 4, (4, [(4, 0)])), ("e", 50, (50, [(50, 9)]))]
    # Where settings are not accepted the statement names the keys, or their range if they are many.
    limits = (5_000,) if query_execution.takes_settings(session) else (5_000, 1)
    for number, most in enumerate(limits, 1):
        monkeypatch.setattr(statement_commits, "MANY_KEYS", most)
        version = writer.merge(session.sql(f"SELECT *, {other} FROM ({given})"), statement, to=number)
        assert table_history.commits(session, table, limit=1)[0].version == version
        found = table_history.standing(session, table).position
        assert found is not None and found.metadata is not None and found.metadata["to"] == number
        rows = session.table(str(table)).orderBy("__key").collect()
        assert [
            (row["__key"], row.v, (row.s.a, [tuple(each[n] for n in ("x", "y")) for each in row.s.b])) for row in rows
        ] == wanted
    writer.remove("v >= 10", to=3)
    assert sorted(row.v for row in session.table(str(table)).collect()) == [3, 4]


@EVERYWHERE
def test_a_replaced_writer_merges_nothing(session: SparkSession, lakehouse: Path) -> None:
    """A writer whose table was taken over merges nothing, whichever way it commits."""
    table = tables.TableRef.at(str(lakehouse / "t"))
    delta.create(session, table, columns="__key STRING, v INT")
    first = Writer.claim(session, table)
    Writer.claim(session, table, take_over=True).append(session.sql("SELECT 'a' AS `__key`, 1 AS v"), to=1)
    with pytest.raises(errors.OwnershipLost):
        first.merge(
            session.sql("SELECT 'a' AS `__key`, 2 AS v, false AS `__gone`"),
            merge.Merge("t.`__key` = s.`__key`", merge.replacing(["__key", "v"])),
            to=2,
        )
    assert [row.v for row in session.table(str(table)).collect()] == [1]


@pytest.mark.parametrize("session", [Environment.STATEMENTS], indirect=True)
def test_how_often_spark_is_asked(session: SparkSession, lakehouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of a table's history is a job: a claim needs two and a commit two; whether a table exists needs none. A few small rows
    become one file.
    """
    asked: list[str] = []
    sql = type(session).sql
    monkeypatch.setattr(
        type(session), "sql", lambda self, query, *rest: asked.append(query.split(" delta.")[0]) or sql(self, query, *rest)
    )
    table = tables.TableRef.at(str(lakehouse / "t"))
    assert delta.create(session, table, columns="n BIGINT") and not delta.create(session, table, columns="n BIGINT")
    assert asked == ["SHOW TBLPROPERTIES", "CREATE TABLE IF NOT EXISTS", "SHOW TBLPROPERTIES", "SHOW TBLPROPERTIES"]
    asked.clear()
    writer = Writer.claim(session, table)
    assert asked == ["SHOW TBLPROPERTIES", *["DESCRIBE HISTORY"] * 2]
    asked.clear()
    writer.append(session.range(3).withColumnRenamed("id", "n"), to=1)
    assert asked == ["DESCRIBE HISTORY"] * 2
    files = len(session.table(str(table)).inputFiles())
    writer.append_arrow(pa.table({"n": range(10)}), to=2)
    assert len(session.table(str(table)).inputFiles()) == files + 1
    assert table_history.standing(session, tables.TableRef.at(str(lakehouse / "none"))) == table_history.NOT_THERE


@pytest.mark.journey
@AWAY
def test_histories(session: SparkSession, lakehouse: Path) -> None:
    """Versions are ended, begun and swept as on a disk."""
    modes = [mode for mode in model.MODES if mode.value in ("drop", "rewrite")]
    hop = history_tables.HistoryHop(
        session, lakehouse, {mode.value: {"delete.tombstone.handling.mode": mode.value} for mode in modes}
    )
    change = history_tables.change
    hop.bronze.append(
        {mode.value: [change("c", 1, 10, "a"), change("u", 1, 20, "b"), change("c", 2, 15, "x")] for mode in modes}
    )
    hop.run()
    hop.bronze.append({mode.value: [change("d", 1, 30), change("u", 2, 40, "y")] for mode in modes})
    hop.run()
    for mode in modes:
        assert hop.at(mode.value, 12) == {1: "a"}
        assert hop.at(mode.value, 25) == {1: "b", 2: "x"}
        assert hop.at(mode.value, 45) == ({1: "b", 2: "y"} if mode.value == "drop" else {2: "y"})


def test_a_session_that_takes_no_settings_is_known(spark: SparkSession) -> None:
    with environments.session(spark, Environment.REFUSING) as refusing:
        assert not query_execution.takes_settings(refusing)
    assert query_execution.takes_settings(spark)
