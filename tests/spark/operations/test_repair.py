"""Tables whose log names missing data files: the error is one line, and after the repair no document is lost silently."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.operations import quarantine, rebuild, repair
from pipelines.silver import run as silver
from pipelines.spark import failures, parallel
from tests.harness import bronze_rows
from tests.harness.layers import Hop, document, lose, pipeline, rows_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = "orders"


def test_silver_gold_and_facts_come_again(spark: SparkSession, tmp_path: Path) -> None:
    """The error names the table and the command; after the repair the next run restores every document."""
    hop = Hop(spark, pipeline(tmp_path))
    hop.bronze.append({ORDERS: [{"op": "c", "key": key, "at": key, "after": {"_id": key, "v": 1}} for key in (1, 2, 3)]})
    hop.run()
    hop.bronze.append(
        {ORDERS: [{"op": "u", "key": 1, "at": 11, "after": {"_id": 1, "v": 2}}, {"op": "d", "key": 2, "at": 12}]}
    )
    hop.run()
    wanted = hop.documents(ORDERS)
    lost = [hop.silver_table(ORDERS), hop.gold_table(ORDERS), hop.layout.ops("collections")]
    names = [lose(spark, table) for table in lost]

    with pytest.raises(Exception) as raised:
        rows_by_spark(spark, hop.silver_table(ORDERS))
    told = failures.translated(raised.value)
    assert isinstance(told, errors.FilesMissing)
    assert str(tmp_path / "silver") in str(told) and names[0] in str(told) and "medallion repair" in str(told)

    found = repair.run(spark, hop.settings, is_trial=True, failures=parallel.Failures())
    assert [(each.missing, each.version) for each in found] == [((name,), None) for name in (names[1], names[2], names[0])]
    repair.run(spark, hop.settings, failures=parallel.Failures())
    assert repair.run(spark, hop.settings, failures=parallel.Failures()) == []
    hop.run()
    assert hop.documents(ORDERS) == wanted


def test_events_that_come_again_change_no_newer_row(spark: SparkSession, tmp_path: Path) -> None:
    """All of bronze is applied again, range by range: meanwhile the remaining rows must not become older, nor deleted ones come back."""
    hop = Hop(spark, pipeline(tmp_path))
    for events in (
        [{"op": "c", "key": key, "at": key, "after": {"_id": key, "v": 1}} for key in (1, 3)],
        [{"op": op, "key": key, "at": 10 + key, "after": {"_id": key, "v": 2}} for op, key in (("u", 1), ("c", 2))],
        [{"op": "u", "key": 1, "at": 21, "after": {"_id": 1, "v": 3}}, {"op": "d", "key": 2, "at": 22}],
    ):
        hop.bronze.append({ORDERS: events})
        hop.silver()
    table = hop.silver_table(ORDERS)
    wanted = hop.rows(ORDERS)
    (first,) = (file for file in delta.data_files(spark, table) or () if (file.between("__key") or ("",))[-1] == "3")
    (Path(table.path or "") / first.name).unlink()
    repair.run(spark, hop.settings, failures=parallel.Failures())
    for to in (1, 2, 3):
        silver.run(spark, hop.settings, to=to)
        assert hop.rows(ORDERS) == wanted


def test_bronze_goes_back_to_before_the_first_missing_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Later events are read from the source again, and get batch numbers that were never used."""
    hop = Hop(spark, pipeline(tmp_path, name="none"))
    settings = pipeline(tmp_path)
    ref = hop.layout.bronze("hand")
    log = bronze.BronzeLog.open(spark, ref)
    for token in ("82", "83", "84"):
        log.heartbeat({}, token=token, ts_ms=1)
    log.close()
    lose(spark, ref, 1)
    [found] = repair.run(spark, settings, failures=parallel.Failures())
    assert (len(found.missing), found.taken_out) == (1, 2)
    again = bronze.BronzeLog.open(spark, ref)
    assert again.position == bronze.BronzePosition("82", 1, 0)
    again.heartbeat({}, token="83", ts_ms=1)
    again.close()
    assert [(row.batch, row.resume_token) for row in spark.table(str(ref)).orderBy("offset").collect()] == [
        (1, "82"),
        (4, "83"),
    ]


def test_nothing_that_was_made_of_lost_events_is_taken_for_whole(spark: SparkSession, tmp_path: Path) -> None:
    """A repaired history asks for a snapshot if bronze was trimmed; if deletes are lost, gold removes the documents that they deleted."""
    hop = Hop(spark, pipeline(tmp_path, {"versions": {"history": True}}))
    hop.bronze.append({"versions": [document(1, 10, "c")], ORDERS: [document(key, 10, "c") for key in (1, 2)]})
    hop.run()
    hop.bronze.append({"versions": [document(1, 20)], ORDERS: [{"op": "d", "key": 2, "at": 20}]})
    hop.silver()
    spark.sql(f"DELETE FROM {hop.bronze.table} WHERE batch = 1")
    spark.sql(f"ALTER TABLE {hop.bronze.table} SET TBLPROPERTIES ('{bronze.TRIMMED}' = '6')")
    lose(spark, hop.layout.history(bronze_rows.DB, "versions"))
    lose(spark, hop.layout.deletes(bronze_rows.DB, ORDERS))
    told = [each.next for each in repair.run(spark, hop.settings, failures=parallel.Failures())]
    assert [("execute-snapshot" in each, "medallion gold will rewrite" in each) for each in told] == [
        (True, False),
        (False, True),
    ]
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
        hop.gold()
    assert [row["_id"] for row in hop.documents(ORDERS)] == [1]


def test_events_of_a_lost_quarantine_are_in_bronze(spark: SparkSession, tmp_path: Path) -> None:
    """The sentence names the command that brings them back, also where the whole table is gone, of which no log tells."""
    hop = Hop(spark, pipeline(tmp_path))
    hop.bronze.append({ORDERS: [document(1, 10, "c"), document(1, 11) | {"text": '{"_id": 1, "name": '}]})
    hop.silver()
    table = hop.layout.quarantine(bronze_rows.DB, ORDERS)

    def held() -> list[str]:
        return [each.reason for each in quarantine.listed(spark, table)]

    reasons = held()
    assert len(reasons) == 1
    for _ in range(2):
        lose(spark, table)
        [found] = repair.run(spark, hop.settings, failures=parallel.Failures())
        assert "medallion rebuild" in found.next and "lost" not in found.next
        assert held() == []
        rebuild.run(spark, hop.settings, collection=f"{bronze_rows.DB}.{ORDERS}")
        assert held() == reasons
    shutil.rmtree(table.path or "")
    assert repair.run(spark, hop.settings, failures=parallel.Failures()) == []
    rebuild.run(spark, hop.settings, collection=f"{bronze_rows.DB}.{ORDERS}")
    assert held() == reasons
    spark.sql(f"ALTER TABLE {hop.bronze.table} SET TBLPROPERTIES ('{bronze.TRIMMED}' = '6')")
    lose(spark, table)
    [found] = repair.run(spark, hop.settings, failures=parallel.Failures())
    assert "execute-snapshot" in found.next and "medallion rebuild" not in found.next


def test_a_file_that_a_power_failure_left_without_its_rows_is_missing(spark: SparkSession, tmp_path: Path) -> None:
    """The file exists, but its last writes are lost. Silver reports an empty file of bronze, which Spark would read as a file without
    rows. After the repair every document is restored.
    """
    hop = Hop(spark, pipeline(tmp_path))
    for key in (1, 2):
        hop.bronze.append({ORDERS: [{"op": "c", "key": key, "at": key, "after": {"_id": key}}]})
        hop.silver()
    wanted = hop.rows(ORDERS)
    emptied = _emptied(hop.silver_table(ORDERS).path)
    assert [each.missing for each in repair.run(spark, hop.settings, failures=parallel.Failures())] == [(emptied,)]
    hop.silver()
    assert hop.rows(ORDERS) == wanted

    hop.bronze.append({ORDERS: [{"op": "c", "key": 3, "at": 3, "after": {"_id": 3}}]})
    emptied = _emptied(hop.bronze.table.path)
    with pytest.raises(Exception) as raised:
        hop.silver()
    told = failures.translated(raised.value)
    assert isinstance(told, errors.FilesMissing) and emptied in str(told)
    found = repair.run(spark, hop.settings, is_trial=True, failures=parallel.Failures())
    assert [each.missing for each in found] == [(emptied,)]


@pytest.mark.parametrize("is_emptied", (False, True))
def test_a_file_whose_deleted_rows_are_not_known_any_more_is_missing(
    spark: SparkSession, tmp_path: Path, is_emptied: bool
) -> None:
    """A VACUUM by a tool without deletion vectors, or a power failure, may lose them: nobody can read the rows of the data file."""
    hop = Hop(spark, pipeline(tmp_path))
    for n in (1, 2):
        hop.bronze.append(
            {ORDERS: [{"op": "u", "key": key, "at": 3 * n + key, "after": {"_id": key, "n": n}} for key in (1, n + 1)]}
        )
        hop.silver()
    wanted = hop.rows(ORDERS)
    emptied = _emptied(hop.silver_table(ORDERS).path, "*.bin")
    if not is_emptied:
        (Path(hop.silver_table(ORDERS).path or "") / emptied).unlink()
    with pytest.raises(Exception) as raised:
        rows_by_spark(spark, hop.silver_table(ORDERS))
    assert isinstance(failures.translated(raised.value), errors.FilesMissing)
    assert [each.taken_out for each in repair.run(spark, hop.settings, failures=parallel.Failures())] == [1]
    hop.silver()
    assert hop.rows(ORDERS) == wanted


def _emptied(folder: str | None, names: str = "*.parquet") -> str:
    """Empty a table's newest file; returns its name."""
    newest = max(Path(folder or "").glob(names), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(b"")
    return newest.name
