"""Which tables are maintained, and what maintenance removes from bronze."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import duckdb
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from cdc_core import errors
from cdc_core.properties.source import CaptureMode
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.operations import maintain
from pipelines.spark import parallel
from tests.harness import bronze_rows, oracle, without_spark
from tests.harness.without_spark import SPARK, Hop


def test_a_folder_of_models_that_is_missing_keeps_no_table_from_its_maintenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models' tables are unknown then; the others are maintained, and the error is reported with their results."""
    seen: list[str] = []
    monkeypatch.setattr(maintain._MaintenanceRun, "maintained", lambda _, table: seen.append(table.kind.value))
    with without_spark.running():
        hop = Hop(tmp_path / "lake")
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        settings: Any = replace(hop.settings, gold=replace(hop.settings.gold, models=str(tmp_path / "models")))
        maintain.run(SPARK, settings, failures=(failures := parallel.Failures()))
    with pytest.raises(errors.SettingsError, match="there is no folder"):
        failures.raised()
    assert {"bronze", "silver", "gold", "ops"} <= set(seen)


def test_a_log_that_only_spark_writes_is_not_looked_at_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a catalog that would be a statement for each table."""
    monkeypatch.setattr(maintain.maintenance.table_history, "standing", lambda *_: pytest.fail("looked at"))
    assert not maintain.maintenance.checkpoint(SPARK, tables.TableRef.named("main", "shop_silver", "t"))


def test_a_table_with_nothing_to_do_takes_no_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of thousands of tables were not written since the last run, and a night has time for some thousand statements."""
    monkeypatch.setattr(maintain.delta, "size", lambda *_, **__: maintain.delta.TableSize(1, 10))
    monkeypatch.setattr(maintain.maintenance, "checkpoint", lambda *_: False)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})), (2, bson.encode({"_id": 2})))
        hop.run()
        maintaining = maintain._MaintenanceRun(SPARK, hop.settings, beside_writers=False, now_ms=0)
        (silver,) = [each for each in maintaining.tables("cases.t") if each.kind is maintain.TableKind.SILVER]
        assert maintaining.maintained(silver).after.files == 1
        folder = Path(silver.ref.path or "")
        (folder / "left.parquet").write_bytes(b"of a killed commit")
        with pytest.raises(without_spark.NeedsSpark):
            maintaining.maintained(silver)
        (folder / "left.parquet").unlink()
        assert maintaining.maintained(silver).after.files == 1
        hop.append((1, bson.encode({"_id": 1, "v": 2})))
        hop.run()
        with pytest.raises(without_spark.NeedsSpark):
            maintaining.maintained(silver)


def test_what_a_killed_rebuild_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a copy of the whole table, also of documents that were erased since. A running rebuild, which holds the table, keeps its own.

    That it was removed is not said of the files of another user, which stay.
    """
    monkeypatch.setattr(maintain._MaintenanceRun, "_compacted", lambda *_: None)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        maintaining = maintain._MaintenanceRun(SPARK, hop.settings, beside_writers=False, now_ms=clock.now_ms())
        (silver,) = [each for each in maintaining.tables("cases.t") if each.kind is maintain.TableKind.SILVER]

        def removed() -> list[str]:
            maintaining._remove_and_compact(silver, words := maintain._ResultLines())
            return words.done

        assert removed() == []
        position = registry.silver_position(SPARK, silver.ref)
        left = Path(maintaining.layout.shadow("cases", "t", "abc-0").root or "") / "silver"
        left.mkdir(parents=True)
        running = Writer.claim(SPARK, silver.ref)
        assert removed() == [] and left.exists()
        running.release()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as where this user may not
            assert removed() == [] and "can only be removed by the user who started it" in caplog.text
        assert removed() == ["what a killed rebuild left removed"]
        assert not (tmp_path / "ops" / "rebuild").exists() and removed() == []
        assert registry.silver_position(SPARK, silver.ref).to == position.to


def test_files_that_a_running_writer_adds_meanwhile_are_no_work_of_maintenance() -> None:
    """It said that 3 files became 4, and in the same line that they were not compacted."""
    sizes = [delta.TableSize(files, 10, stored) for files, stored in ((3, 30), (4, 30), (1, 10))]
    assert [*maintain._size_changes(sizes[0], sizes[1])] == []
    assert [*maintain._size_changes(sizes[0], sizes[2])] == ["3 files became 1", "0.0 MB freed"]


def test_incomplete_rows_keep_no_events_where_nothing_is_folded(tmp_path: Path) -> None:
    """If deletes have no effect, a document that was gone at its lookup stays incomplete for ever: bronze would keep all its events."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "drop"})
        hop.append((1, bson.encode({"_id": 1})))
        hop.append((1, {"updatedFields": '{"v": 2}'}), (1, None))
        hop.silver()
        assert oracle.read(hop.silver_table.path or "")["__incomplete"].to_pylist() == [True]
        words = maintain._ResultLines()
        namespace = registry.Namespace(bronze_rows.DB, "t")
        maintaining = maintain._MaintenanceRun(SPARK, hop.settings, beside_writers=False, now_ms=0)
        assert not maintaining._waits(namespace, words) and not words.left


def test_incomplete_rows_keep_events_behind_a_change_of_the_capture_mode(tmp_path: Path) -> None:
    """Silver still folds the events before it: without some of the updates, a row would count as complete and lack their values."""
    with without_spark.running():
        hop = Hop(tmp_path)
        folding = replace(hop.settings, source=replace(hop.settings.source, capture_mode=CaptureMode.CHANGE_STREAMS))
        lookups, hop.settings = hop.settings, folding
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        namespace = registry.Namespace(bronze_rows.DB, "t")
        for settings in (folding, lookups):
            maintaining = maintain._MaintenanceRun(SPARK, settings, beside_writers=False, now_ms=0)
            with pytest.raises(without_spark.NeedsSpark):  # counting them needs Spark
                maintaining._waits(namespace, maintain._ResultLines())
        hop.settings = lookups
        hop.append((2, bson.encode({"_id": 2})))
        hop.silver()
        maintaining = maintain._MaintenanceRun(SPARK, lookups, beside_writers=False, now_ms=0)
        assert not maintaining._waits(namespace, maintain._ResultLines())


def test_an_old_position_is_repeated_before_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compaction's commit has none, and may be one with which Delta removes expired commits. A table that is held stays as it is."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()

        def kept(running_ms: int = 0) -> tuple[int, registry.SilverPosition]:
            maintaining = maintain._MaintenanceRun(SPARK, hop.settings, False, clock.now_ms() - running_ms)
            maintaining._keep_position(hop.silver_table)
            found = registry.silver_position(SPARK, hop.silver_table)
            return found.version, replace(found, version=0)

        version, position = kept()
        assert kept() == (version, position)
        now_ms = clock.now_ms() + maintain.DAY_MS
        monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
        assert kept() == (version + 2, position)  # a claim and its release
        assert kept() == (version + 2, position)
        holder = Writer.claim(SPARK, hop.silver_table)
        now_ms += maintain.DAY_MS
        assert kept() == (version + 3, position)
        holder.release()
        now_ms += maintain.DAY_MS
        assert kept(running_ms=3_600_000) == (version + 6, position)  # the run began before the position was old


@pytest.mark.parametrize("is_old", [True, False])
def test_of_a_bronze_that_is_held_no_collection_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """A pipeline that maintains its tables each night holds bronze: with thousands of collections each would take a useless query."""
    monkeypatch.setattr(maintain, "_has_rows", lambda *_: is_old)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        kept = replace(hop.settings.maintenance, bronze_retention_days=1)
        maintaining = maintain._MaintenanceRun(SPARK, replace(hop.settings, maintenance=kept), True, now_ms=0)
        words, capture = maintain._ResultLines(), Writer.claim(SPARK, hop.bronze)
        maintaining._trim(hop.bronze, words)
        assert words.left == ["events older than 1 days kept: the capture is running"] * is_old
        capture.release()
        with pytest.raises(without_spark.NeedsSpark):
            maintaining._trim(hop.bronze, words)


def test_a_take_over_applies_to_owners_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is known to be gone keeps no table from being maintained until its lease is over; one that came since does."""
    monkeypatch.setattr(maintain, "_has_rows", lambda *_: True)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        gone = Writer.claim(SPARK, hop.bronze)
        kept = replace(hop.settings, maintenance=replace(hop.settings.maintenance, bronze_retention_days=1))
        bronze = maintain._Table(hop.bronze, maintain.TableKind.BRONZE)

        def left(now_ms: int, take_over: bool) -> list[str]:
            words = maintain._ResultLines()
            maintaining = maintain._MaintenanceRun(SPARK, kept, False, now_ms, take_over=take_over)
            monkeypatch.setattr(maintaining, "_compacted", lambda *_: None)
            maintaining._remove_and_compact(bronze, words)
            return words.left

        refusals = ["events older than 1 days kept: the capture is running", maintain.HELD]
        assert left(clock.now_ms(), take_over=False) == refusals
        assert left(0, take_over=True) == refusals  # the writer claimed bronze after the start
        with pytest.raises(without_spark.NeedsSpark):
            left(clock.now_ms(), take_over=True)
        taking = maintain._MaintenanceRun(SPARK, kept, False, clock.now_ms(), take_over=True)
        with maintain._claimed(functools.partial(taking._claim, hop.bronze), None), pytest.raises(errors.OwnershipLost):
            gone.mark(to=1)


@contextlib.contextmanager
def bronze_in_duckdb(rows: Mapping[str, Sequence[Any]]) -> Iterator[Callable[[str], Any]]:
    """Spark's `sql` over rows of bronze."""
    with duckdb.connect() as engine:
        engine.register("bronze", pa.table(dict(rows)))

        def sql(text: str) -> Any:
            found = engine.execute(text.replace("FROM VALUES", "FROM (VALUES").replace(" AS bounds(", ") AS bounds("))
            names = [column[0] for column in found.description or ()]
            return SimpleNamespace(collect=lambda: [SimpleNamespace(**dict(zip(names, row))) for row in found.fetchall()])

        yield sql


def test_no_old_event_is_removed_after_a_younger_one() -> None:
    """A replayed event keeps its old time. If it were removed alone, an event would be missing between those that are left."""
    namespace, old, young = registry.Namespace(bronze_rows.DB, "t"), 5, 10**12
    rows: dict[str, list[Any]] = {"batch": [1, 2, 3, 4], "ts_ms": [old, young, old, young]}
    rows |= {name: [value] * 4 for name, value in (*namespace._asdict().items(), ("kind", "change"))}
    with bronze_in_duckdb(rows) as sql:
        run: Any = SimpleNamespace(
            spark=SimpleNamespace(sql=sql), bronze="bronze", _applied=lambda _: 4, _waits=lambda *_: False
        )
        found = maintain._MaintenanceRun._trimmed(run, [namespace], 10**9, maintain._ResultLines())
    assert found == {namespace: 2}


def test_only_a_collection_with_events_to_remove_is_looked_at() -> None:
    """It takes a query for each, and most of thousands of collections have nothing that is old. What silver has quarantined up to a batch
    is only known to be there once its position is at that batch."""
    idle, busy = (registry.Namespace(bronze_rows.DB, name) for name in ("idle", "busy"))
    rows: dict[str, list[Any]] = {"batch": [1, 2, 3], "ts_ms": [5, 5, 5], "kind": ["change"] * 3, "db": [bronze_rows.DB] * 3}
    looked: list[str] = []

    def position(of: registry.Namespace) -> int:
        looked.append(f"the position of {of.collection}")
        return 3

    def waits(of: registry.Namespace, _: object) -> bool:
        looked.append(f"what {of.collection} waits for")
        return False

    with bronze_in_duckdb({**rows, "collection": ["idle", "busy", "busy"]}) as sql:
        run: Any = SimpleNamespace(spark=SimpleNamespace(sql=sql), bronze="bronze", _applied=position, _waits=waits)
        found = maintain._MaintenanceRun._trimmed(run, [idle, busy], 10**9, maintain._ResultLines())
    assert found == {busy: 3}
    assert looked == ["the position of idle", "the position of busy", "what busy waits for"]


def test_the_days_of_a_year_are_found_by_one_query() -> None:
    """Bronze has no statistics of times: with two queries per day, the first run after a change of the setting reads bronze too often."""
    texts: list[str] = []
    rows = {"batch": [1, 2, 3, 4, 5], "ts_ms": [each * maintain.DAY_MS for each in (7, 7, 9, 8, 9)]}
    with bronze_in_duckdb(rows) as sql:

        def counted(text: str) -> Any:
            texts.append(text)
            return sql(text)

        given: tuple[Any, ...] = (SimpleNamespace(sql=counted), "bronze", "batch < 5")
        days = maintain._days(*given)
    assert days == [f"batch >= {low} AND batch <= {high}" for low, high in ((1, 2), (3, 3), (4, 4))]
    assert len(texts) == 1


def test_a_pipeline_removes_old_rows_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one in the lakehouse may keep its cuts and results for longer. Rows of earlier versions name no pipeline."""
    names, old = ["hand", "hand", "other", None], 5
    removed: list[tuple[object, ...]] = []
    with duckdb.connect() as engine:
        engine.register("cuts", pa.table({"name": names, "made_ms": [old, 10**13, old, old]}))

        def remove(spark: object, table: object, where: str) -> int:
            found = engine.execute(f"SELECT name FROM cuts WHERE {where.replace('`', '')}")
            removed.extend(found.fetchall())
            return len(removed)

        monkeypatch.setattr(maintain.ops_tables, "delete", remove)
        monkeypatch.setattr(maintain.delta, "exists", lambda *_: False)
        hop = Hop(tmp_path)
        spark: Any = SimpleNamespace(table=lambda _: SimpleNamespace(columns=["name", "made_ms"]))
        run = maintain._MaintenanceRun(spark, hop.settings, False, clock.now_ms())
        table = maintain._Table(hop.layout.ops("cuts"), maintain.TableKind.OPS, age="made_ms")
        run._expire(table, maintain._ResultLines())
    assert removed == [("hand",), (None,)]


def test_two_runs_that_note_forgotten_deletes_at_once_are_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduled run beside the quiet hours of a service: the one that comes second leaves the deletes to the next run."""

    class MetadataChangedException(PySparkException):
        pass

    def sql(text: str) -> Any:
        if text.startswith("ALTER"):
            raise MetadataChangedException("another commit came first")
        return SimpleNamespace(collect=lambda: [SimpleNamespace(found=3)])

    monkeypatch.setattr(maintain._MaintenanceRun, "_compacted", lambda *_: None)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.append((1, None))
        hop.silver()
        run = maintain._MaintenanceRun(SPARK, hop.settings, False, clock.now_ms())
        [deletes] = [each for each in run.tables(None) if each.kind is maintain.TableKind.DELETES]
        run.spark = SimpleNamespace(sql=sql)  # type: ignore[assignment]  # the two statements
        run._remove_and_compact(deletes, words := maintain._ResultLines())
    assert words.left == ["nothing removed: another process committed first"]
