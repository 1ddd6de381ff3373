"""RESTORE TO TIMESTAMP, whose commit does not name the version: every table continues from the version that Delta restored."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.operations import repair
from pipelines.silver import run as silver_run
from pipelines.spark import parallel
from tests.harness import bronze_rows, environments
from tests.harness.layers import Hop, lose, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = "orders"


def restore_to_time(spark: SparkSession, table: tables.TableRef, version: int) -> None:
    """Restore the table to a time at which `version` was the newest."""
    log = Path(table.path or "") / "_delta_log"
    now = (log / f"{table_history.version(spark, table):020}.json").stat().st_mtime
    for number in range(table_history.version(spark, table) + 1):
        at = now - (1000 if number <= version else 10) + number / 1000
        os.utime(log / f"{number:020}.json", (at, at))
    then = spark.sql(f"SELECT string(timestamp_seconds({now - 500:.0f}))").first()[0]
    spark.sql(f"RESTORE TABLE {table} TO TIMESTAMP AS OF '{then}'").collect()


@pytest.mark.journey
def test_every_layer_goes_on_from_the_version_of_a_time(spark: SparkSession, tmp_path: Path) -> None:
    """Silver applies the later events again, gold publishes them again, and bronze's newest batch is that of the restored version."""
    hop = Hop(spark, pipeline(tmp_path))
    silver, gold = hop.silver_table(ORDERS), hop.gold_table(ORDERS)
    insert = [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "v": 1}} for key in (1, 2)]
    hop.bronze.append({ORDERS: insert})
    hop.run()
    before = {table: table_history.version(spark, table) for table in (silver, gold, hop.layout.bronze("hand"))}
    hop.bronze.append(
        {ORDERS: [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "v": 2}}, {"op": "d", "key": 2, "at": 21}]}
    )
    hop.run()
    now = [{"_id": 1, "v": 2, "__key": "1"}]
    assert hop.documents(ORDERS) == now

    restore_to_time(spark, silver, before[silver])
    assert registry.silver_position(spark, silver).to == 1
    hop.gold()
    assert hop.documents(ORDERS) == now, "readers keep the newer documents until silver has applied the later events"
    hop.run()
    assert hop.documents(ORDERS) == now
    assert [row["v"] for row in hop.rows(ORDERS)] == [2]

    restore_to_time(spark, gold, before[gold])
    assert len(hop.documents(ORDERS)) == 2
    position = table_history.standing(spark, gold).position
    assert position is not None and position.metadata is not None and position.metadata["to"] == 1
    hop.run()
    assert hop.documents(ORDERS) == now

    restore_to_time(spark, hop.layout.bronze("hand"), before[hop.layout.bronze("hand")])
    assert bronze.newest(spark, hop.layout.bronze("hand")).batch == 1
    found = bronze.read_position(spark, hop.layout.bronze("hand"))
    assert found is not None and found.batch == 1


@pytest.fixture(scope="module")
def backed_up(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Hop, tables.TableRef]:
    """Two batches in both layers, a backup of silver from after the first, and an emptied silver table."""
    folder = tmp_path_factory.mktemp("backed_up")
    hop, backup = Hop(spark, pipeline(folder / "lakehouse")), tables.TableRef.at(str(folder / "backup"))
    silver = hop.silver_table(ORDERS)
    hop.bronze.append({ORDERS: [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "v": 1}} for key in (1, 2)]})
    hop.run()
    spark.table(str(silver)).write.format("delta").option("delta.enableTypeWidening", "true").save(backup.path)
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in delta.properties(spark, silver).items())
    spark.sql(f"ALTER TABLE {backup} SET TBLPROPERTIES ({properties})")
    hop.bronze.append(
        {ORDERS: [{"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "v": 2}}, {"op": "d", "key": 2, "at": 21}]}
    )
    hop.run()
    spark.sql(f"DELETE FROM {silver}").collect()  # CLONE accepts no table with rows
    return hop, backup


@pytest.mark.parametrize(
    "copied",
    [
        "CREATE OR REPLACE TABLE {} SHALLOW CLONE {}",
        "INSERT OVERWRITE {} SELECT * FROM {}",
        "INSERT INTO {} SELECT * FROM {}",  # the table was emptied
    ],
)
def test_a_backup_that_is_copied_over_silver_is_gone_on_from(
    spark: SparkSession, tmp_path: Path, backed_up: tuple[Hop, tables.TableRef], copied: str
) -> None:
    """The events after the backup are applied again, and gold follows."""
    hop, backup = backed_up[0].copied(tmp_path), backed_up[1]
    silver = hop.silver_table(ORDERS)
    spark.sql(copied.format(silver, backup)).collect()
    assert registry.silver_position(spark, silver).to == 1
    hop.gold()
    assert hop.documents(ORDERS) == [{"_id": 1, "v": 2, "__key": "1"}]
    hop.run()
    assert [row["v"] for row in hop.rows(ORDERS)] == [2]
    assert hop.documents(ORDERS) == [{"_id": 1, "v": 2, "__key": "1"}]


def test_where_the_log_goes_back_no_further_no_position_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """Silver then uses its rows, and gold is written again from the beginning; the position from before the restore is never used."""
    ref = tables.TableRef.at(str(tmp_path / "t"))
    delta.create(spark, ref, columns="n BIGINT")
    writer = Writer.claim(spark, ref)
    for to in (1, 2):
        writer.append(spark.sql(f"SELECT {to}L AS n"), to=to)
    restore_to_time(spark, ref, writer.version - 1)
    position = table_history.standing(spark, ref).position
    assert position is not None and position.metadata is not None and position.metadata["to"] == 1
    (Path(ref.path or "") / "_delta_log" / f"{writer.version:020}.json").rename(tmp_path / "gone.json")
    assert table_history.standing(spark, ref).position is None


def test_a_statement_that_began_beside_a_restore_is_undone(spark: SparkSession, tmp_path: Path) -> None:
    """Delta runs it on the restored rows, although its writer had looked before. The writer stops, and the next one begins with the rows
    and the position of the restored version: the rows between it and the statement's would be missing for good."""
    ref = tables.TableRef.at(str(tmp_path / "t"))
    delta.create(spark, ref, columns="n BIGINT", properties={"delta.appendOnly": "true"})
    with environments.session(spark, environments.Environment.STATEMENTS) as session:
        writer = Writer.claim(session, ref)
        first, _ = (writer.append(session.sql(f"SELECT {to}L AS n"), to=to) for to in (1, 2))
        look = writer.check_ownership

        def restored_after_the_look() -> None:
            look()
            writer.check_ownership = look  # type: ignore[method-assign]
            spark.sql(f"ALTER TABLE {ref} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
            spark.sql(f"RESTORE TABLE {ref} TO VERSION AS OF {first}").collect()

        writer.check_ownership = restored_after_the_look  # type: ignore[method-assign]
        with pytest.raises(errors.CommitConflict, match="restored"):
            writer.append(session.sql("SELECT 3L AS n"), to=3)
        with pytest.raises(errors.CommitConflict):
            writer.release()
        assert table_history.standing(session, ref).metadata["to"] == 1
        successor = Writer.claim(session, ref)
        assert successor.metadata["to"] == 1 and [row.n for row in session.table(str(ref)).collect()] == [1]
        assert delta.properties(session, ref)["delta.appendOnly"] == "true"
        successor.append(session.sql("SELECT 2L AS n"), to=2)
        assert table_history.standing(session, ref).metadata["to"] == 2


def test_silver_applies_nothing_again_from_a_trimmed_bronze(spark: SparkSession, tmp_path: Path) -> None:
    """The removed events would be missing, so the error asks for a snapshot; its sweep lets the collection continue.

    This holds whether the silver table was restored, removed or repaired. Other collections continue meanwhile.
    """
    hop = Hop(spark, pipeline(tmp_path))
    hop.bronze.is_timed = True
    lost, well = ("restored", "removed", "repaired"), "well"
    for key in (1, 2, 3):
        created = {"op": "c", "key": key, "at": 10 * key, "after": {"_id": key}}
        hop.bronze.append({name: [created] for name in (*lost, well)})
        if key != 2:
            hop.silver()
    hop.gold()
    silver = hop.silver_table("restored")
    version = next(
        each.version for each in table_history.newest_first(spark, silver) if (each.metadata or {}).get("to") == 1
    )
    service = silver_run._SilverRun(spark, hop.settings, False, parallel.Pool(spark, None), threading.Event())
    service.run_round()
    spark.sql(f"DELETE FROM {hop.bronze.table} WHERE batch <= 2")
    spark.sql(f"ALTER TABLE {hop.bronze.table} SET TBLPROPERTIES ('{bronze.TRIMMED}' = '3')")
    hop.run()
    spark.sql(f"RESTORE TABLE {silver} TO VERSION AS OF {version}").collect()
    hop.bronze.append({"restored": [{"op": "u", "key": 3, "at": 32, "after": {"_id": 3}}]})
    for _ in range(3):
        service.run_round()
    assert "execute-snapshot" in str(service.failures.by_name[f"{bronze_rows.DB}.restored"]), (
        "it began before anything was taken"
    )
    service.close()
    shutil.rmtree(hop.silver_table("removed").path or "")
    lose(spark, hop.silver_table("repaired"))
    (mended,) = repair.run(spark, hop.settings, failures=parallel.Failures())
    assert "execute-snapshot" in mended.next
    hop.bronze.append({well: [{"op": "c", "key": 4, "at": 35, "after": {"_id": 4}}]})
    for _ in range(2):
        with pytest.raises(errors.CollectionsFailed, match="execute-snapshot") as refused:
            hop.silver()
        assert all(f"{bronze_rows.DB}.{name}" in str(refused.value) for name in lost)
        assert len(hop.rows(well)) == 4
    read = [{"op": "r", "key": key, "at": 40, "after": {"_id": key}} for key in (1, 2, 3)]
    hop.bronze.append({name: [*read, {"sweep": 40}] for name in lost})
    hop.run()
    assert all([row["_id"] for row in hop.documents(name)] == [1, 2, 3] for name in lost)


def test_what_is_found_in_a_trimmed_bronze_is_applied(spark: SparkSession, tmp_path: Path) -> None:
    """A collection that is captured later has lost no events, whatever was removed of others."""
    hop = Hop(spark, pipeline(tmp_path))
    hop.bronze.append({ORDERS: [{"op": "c", "key": 1, "at": 10, "after": {"_id": 1}}]})
    hop.run()
    spark.sql(f"ALTER TABLE {hop.bronze.table} SET TBLPROPERTIES ('{bronze.TRIMMED}' = '{2**60}')")
    hop.bronze.append({"others": [{"op": "c", "key": 2, "at": 20, "after": {"_id": 2}}]})
    hop.run()
    assert len(hop.documents("others")) == len(hop.documents(ORDERS)) == 1
