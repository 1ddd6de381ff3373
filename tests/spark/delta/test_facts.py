"""Tables of facts accept appends from several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import direct_log, local_log, maintenance, ops_tables
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("thread", pa.int64()), ("n", pa.int64())])
THREADS, TIMES = 4, 6


def test_facts_of_many_threads_are_all_there(spark: SparkSession, tmp_path: Path) -> None:
    """This holds even while the same session makes fenced commits, which Delta must not retry."""
    facts, held = tables.TableRef.at(str(tmp_path / "facts")), tables.TableRef.at(str(tmp_path / "held"))
    delta.create(spark, held, columns="n BIGINT")
    writer = Writer.claim(spark, held)

    def fenced(_: int) -> None:
        for number in range(TIMES * 3):
            writer.mark(to=number)

    def noted(thread: int) -> None:
        for number in range(TIMES):
            ops_tables.note(spark, facts, [{"thread": thread, "n": number}], SCHEMA)

    with ThreadPoolExecutor(THREADS + 1) as pool:
        done = [pool.submit(noted, thread) for thread in range(THREADS)] + [pool.submit(fenced, 0)]
        for each in done:
            each.result()
    found = ops_tables.rows(spark, facts, SCHEMA)
    assert sorted(zip(*found.to_pydict().values())) == [(t, n) for t in range(THREADS) for n in range(TIMES)]


def test_a_table_of_an_earlier_version_gets_the_columns_that_it_lacks(spark: SparkSession, tmp_path: Path) -> None:
    """Existing rows have null in the new columns. No commit is made if no column is missing."""
    table = tables.TableRef.at(str(tmp_path / "facts"))
    before = pa.schema([("a", pa.string())])
    now = pa.schema([*before, ("b", pa.string()), ("n", pa.int64())])
    ops_tables.note(spark, table, [{"a": "old"}], before)
    for number in range(2):
        ops_tables.note(spark, table, [{"a": "new", "b": "x", "n": number}], now)
    found = ops_tables.rows(spark, table, now).to_pylist()
    assert sorted(found, key=str) == [
        {"a": "new", "b": "x", "n": 0},
        {"a": "new", "b": "x", "n": 1},
        {"a": "old", "b": None, "n": None},
    ]
    assert len(list((tmp_path / "facts" / "_delta_log").glob("*.json"))) == 5


def test_facts_are_appended_without_a_list_of_their_log(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silver appends deletes with each batch, and a log of a month has millions of files. Commits of others are still noticed."""
    facts = tables.TableRef.at(str(tmp_path / "facts"))
    row = pa.table({"thread": [1], "n": [1]}, schema=SCHEMA)
    delta.create(spark, facts, columns="thread BIGINT, n BIGINT")
    ops_tables.append_rows(spark, facts, row)
    listed: list[int] = []
    newest = direct_log.DirectLog._newest
    monkeypatch.setattr(direct_log.DirectLog, "_newest", lambda self: listed.append(1) or newest(self))
    ops_tables.append_rows(spark, facts, row)
    assert not listed
    commits = tmp_path / "facts" / "_delta_log"
    (commits / f"{3:020}.json").write_text('{"commitInfo":{"timestamp":1,"operation":"WRITE","operationParameters":{}}}\n')
    ops_tables.append_rows(spark, facts, row)
    assert listed and ops_tables.rows(spark, facts, SCHEMA).num_rows == 3 and (commits / f"{4:020}.json").exists()


def test_many_files_of_facts_are_put_together(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch with deletes adds a file. After a compaction, the next one waits for as many files again."""
    facts = tables.TableRef.at(str(tmp_path / "facts"))
    monkeypatch.setattr(maintenance, "MANY_FACTS", 4)
    left = maintenance.compact_facts(spark, facts, 0)  # the table does not exist yet
    counts = []
    for number in range(6):
        ops_tables.note(spark, facts, [{"thread": number, "n": number}], SCHEMA)
        left = maintenance.compact_facts(spark, facts, left)
        counts.append(local_log.size(tmp_path / "facts").files)
    assert counts == [1, 2, 3, 1, 2, 3]
    assert sorted(ops_tables.rows(spark, facts, SCHEMA)["n"].to_pylist()) == list(range(6))


def test_facts_that_cannot_be_put_together_stop_nobody(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost file with old deletes must not block new events, which do not need them; and the failed compaction is not repeated in each
    round.
    """
    facts, tried = tables.TableRef.at(str(tmp_path / "facts")), []
    monkeypatch.setattr(maintenance, "MANY_FACTS", 2)
    for number in range(2):
        ops_tables.note(spark, facts, [{"thread": number, "n": number}], SCHEMA)
    next((tmp_path / "facts").glob("*.parquet")).unlink()
    optimize = maintenance.optimize
    monkeypatch.setattr(maintenance, "optimize", lambda *given, **named: tried.append(1) or optimize(*given, **named))
    left = maintenance.compact_facts(spark, facts, 0)
    assert left == 2 and maintenance.compact_facts(spark, facts, left) == 2 and tried == [1]
