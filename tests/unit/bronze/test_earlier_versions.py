"""What earlier versions wrote is understood: their commits, although they lack later fields, their words, and a whole lakehouse."""

from __future__ import annotations

import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pyarrow as pa
import pytest

from cdc_core.bronze import collection_ends, columns
from cdc_core.schema import evolution
from cdc_core.silver import quarantine
from cdc_core.snapshot import state as snapshot_state
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.bronze import registry
from pipelines.delta import live_files, ops_tables
from pipelines.gold import history_position
from tests.harness import layers, without_spark

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


LAKEHOUSE = Path(__file__).parents[2] / "cases" / "earlier_version.tar.xz"
"""What the version of 26 November 2026 made of four batches (34 events) of a collection, with `history` and `keep.document`."""


def test_a_lakehouse_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """The new batch alone is applied: the rows that were there stay in their files, and no column is another one."""
    with tarfile.open(LAKEHOUSE) as archive:
        archive.extractall(tmp_path, filter="data")
    with without_spark.running():
        hop = without_spark.Hop(tmp_path, **{"keep.document": True, "history": True})
        hop._batch, hop._offset = 4, 34
        places = (hop.silver_table, hop.gold_table, hop.layout.history("cases", "t"))
        rows, files = [row_list(place) for place in places], [live_names(place) for place in places]
        defined = [columns_of(place) for place in places]
        update = {"updatedFields": '{"late":4}', "removedFields": ["c"]}
        hop.append((2, update), (13, None), (15, bson.encode({"_id": 15, "a": 1})))
        hop.run()
        (silver, gold, history), now = (row_list(place) for place in places), [columns_of(place) for place in places]
        assert now == defined
        assert all(before & live_names(place) for before, place in zip(files, places))
        at = registry.silver_position(without_spark.SPARK, hop.silver_table)
        assert (at.to, at.log, at.origin) == (5, "one", "6b25d28abf69")
    documents = {row["_id"]: row for row in rows[1]}
    late, new = {**documents[2], "c": None, "late": 4}, {**dict.fromkeys(documents[2]), "__key": "15", "_id": 15, "a": 1}
    expected = {key: row for key, row in {**documents, 2: late, 15: new}.items() if key != 13}
    assert {row["_id"]: row for row in gold} == expected
    assert {row["_id"] for row in silver} == expected.keys()
    assert len(history) == len(rows[2]) + 2
    ended = [row for row in rows[2] if row not in history]
    assert sorted((row["_id"], row["__until"]) for row in ended) == [(2, None), (13, None)]


def row_list(table: tables.TableRef) -> list[dict[str, Any]]:
    return layers.table_rows(without_spark.SPARK, table)


def live(table: tables.TableRef) -> live_files.LiveFiles:
    found = live_files.LiveFiles(Path(table.path or ""))
    assert found.move_to_newest()
    return found


def live_names(table: tables.TableRef) -> set[str]:
    return {file["path"] for file in live(table).files()}


def columns_of(table: tables.TableRef) -> pa.Schema:
    return live(table).schema


def test_words_in_tables_stay() -> None:
    """They are compared with those in rows of earlier versions: a quarantined event with another reason would never be released."""
    assert [each.value for each in quarantine.Reason] == [
        "it has no key",
        "it has no place in the order",
        "op is not one of c, u, d, r",
        "it has no document",
        "after is not a JSON document",
        "updatedFields is not a JSON document",
        "disambiguatedPaths is not a JSON document",
        "it follows an event that could not be read",
        "before is not a JSON document; it was applied without",
        "superseded by a later document or delete",
        "applied when it came again",
    ]
    kinds = "change snapshot heartbeat transaction schema_change signal notification"
    assert [each.value for each in columns.RowKind] == kinds.split()
    assert [each.value for each in snapshot_state.SnapshotKind] == ["initial", "incremental", "blocking", "replaced"]
    assert [each.value for each in evolution.ChangeKind] == ["added", "widened", "retyped", "removed", "rebuilt"]
    assert [each.value for each in collection_ends.SweepCause] == ["snapshot", "drop", "rename"]
