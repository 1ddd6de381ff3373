"""Commits with an unknown outcome: no file that they may name is removed, and no writer continues as if the outcome was known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException

from cdc_core import errors
from cdc_core.sql import merge
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.channels import signals
from pipelines.delta import direct_log, ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.operations import rebuild
from tests.harness import bronze_rows, faults, oracle
from tests.harness.faults import Boundary, Fault, Kind
from tests.harness.layers import Hop, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEN = (KeyboardInterrupt, Py4JNetworkError)
PLACES = tuple(each for each in Boundary if each is not Boundary.INSIDE_COMMIT)
ORDERS = "orders"


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> tables.TableRef:
    """A table that nobody has claimed."""
    made = tables.TableRef.at(str(tmp_path / "held"))
    delta.create(spark, made, columns="n BIGINT")
    return made


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def numbers(table: tables.TableRef) -> list[int]:
    """The table's numbers, read without Spark, whose query would take many times as long."""
    return sorted(oracle.read(table.path or "")["n"].to_pylist())


def by_arrow(writer: Writer, number: int) -> None:
    writer.append_arrow(rows(number), to=number)


def by_spark(writer: Writer, number: int) -> None:
    writer.append(writer.spark.createDataFrame(rows(number)), to=number)


def by_merge(writer: Writer, number: int) -> None:
    inserting = merge.Merge("t.n = s.n", (merge.Clause(merge.from_source(["n"]), is_matched=False),))
    writer.merge(writer.spark.createDataFrame(rows(number)), inserting, to=number)


@pytest.mark.parametrize("kind", faults.IN_PROCESS)
@pytest.mark.parametrize("commit", [by_arrow, by_spark, by_merge])
def test_what_a_commit_without_an_answer_names_stays(
    spark: SparkSession, table: tables.TableRef, commit: Callable[[Writer, int], None], kind: Kind
) -> None:
    """At each boundary the rows are there or not, and the table can be read. The writer commits nothing more, its release contains the
    valid position, and the next writer in the same process continues from it.
    """
    held: list[int] = []
    for number, boundary in enumerate(PLACES):
        writer = Writer.claim(spark, table)
        with faults.injected(Fault(boundary, kind)) as injection, contextlib.suppress(*SEEN):
            commit(writer, number)
        is_sparks_file = boundary is Boundary.BEFORE_FILE and commit is not by_arrow
        assert injection.has_struck or is_sparks_file, boundary
        if boundary is Boundary.AFTER_COMMIT or not injection.has_struck:
            held.append(number)
        assert numbers(table) == held
        if injection.has_struck and boundary is not Boundary.BEFORE_FILE:
            with pytest.raises(errors.CommitUnknown):
                commit(writer, 99)
        writer.release()
        assert writer.metadata["to"] == (held[-1] if held else None)


@pytest.mark.parametrize("kind", faults.IN_PROCESS)
def test_a_fact_whose_commit_got_no_answer_stays(spark: SparkSession, tmp_path: Path, kind: Kind) -> None:
    """Signals stand for all tables that only grow: at each boundary the rows can be read."""
    hop = Hop(spark, pipeline(tmp_path))
    ref = hop.layout.ops("signals")
    delta.create(spark, ref, columns="row STRING, name STRING, id STRING, type STRING, data STRING, ts_ms BIGINT")
    for number, boundary in enumerate(PLACES):
        with faults.injected(Fault(boundary, kind)) as injection, pytest.raises(SEEN):
            signals.send(spark, hop.settings, type_="log", data={"message": "x"}, id_=str(number), ts_ms=number)
        assert injection.has_struck
    assert [row["id"] for row in ops_tables.rows(spark, ref, signals.SCHEMA).to_pylist()] == ["2"]
    assert [row.id for row in spark.table(str(ref)).collect()] == ["2"]


def test_a_file_that_no_commit_names_is_removed(spark: SparkSession, table: tables.TableRef) -> None:
    """A commit that the log refused and does not contain leaves no file."""
    old = Writer.claim(spark, table)
    Writer.claim(spark, table, take_over=True)
    with pytest.raises(errors.OwnershipLost):
        old.append_arrow(rows(1), to=1)
    assert not list(Path(table.path or "").glob("*.parquet"))


def test_a_file_stays_whose_commit_cannot_be_looked_up(spark: SparkSession, table: tables.TableRef) -> None:
    """A store accepts the commit and then does not answer: the log names the file."""
    writer = Writer.claim(spark, table)
    committed = direct_log.DirectLog._committed
    unreachable = mock.Mock(side_effect=AnalysisException("the store does not answer"))

    def then_fails(self: Any, *given: Any) -> int:
        committed(self, *given)
        return int(unreachable())

    with (
        mock.patch.object(direct_log.DirectLog, "_committed", then_fails),
        mock.patch.object(table_history, "since", unreachable),
        pytest.raises(errors.CommitUnknown),
    ):
        writer.append_arrow(rows(7), to=7)
    with pytest.raises(errors.CommitUnknown):
        by_arrow(writer, 8)
    assert numbers(table) == [7]


def test_an_error_after_the_commit_is_no_reason_to_commit_twice(spark: SparkSession, table: tables.TableRef) -> None:
    """The answer may be an error although the commit is in the log: it counts once."""
    writer = Writer.claim(spark, table)
    committed = direct_log.DirectLog._committed

    def then_fails(self: Any, *given: Any) -> int:
        committed(self, *given)
        raise direct_log.VersionTaken

    with mock.patch.object(direct_log.DirectLog, "_committed", then_fails):
        writer.append_arrow(rows(7), to=7)
    assert numbers(table) == [7]
    assert writer.metadata["to"] == 7


def test_a_writer_that_could_not_release_is_no_owner_in_its_own_process(spark: SparkSession, table: tables.TableRef) -> None:
    """A full disk during the commit leaves a claim in the log; a retry in the same process succeeds."""
    writer = Writer.claim(spark, table)

    def full(*_: object, **__: object) -> int:
        raise errors.StorageExhausted("no space left")

    with mock.patch.object(direct_log.DirectLog, "_committed", full):
        for act in (lambda: writer.append_arrow(rows(1), to=1), writer.release):
            with pytest.raises(errors.StorageExhausted):
                act()
    assert not list(Path(table.path or "").glob("*.parquet"))
    Writer.claim(spark, table).append_arrow(rows(2), to=2)
    assert numbers(table) == [2]


def test_bronze_numbers_no_batch_twice(spark: SparkSession, tmp_path: Path) -> None:
    """After a commit with an unknown outcome an append of another thread is refused. The next start continues after the existing
    batches.
    """
    ref = tables.TableRef.at(str(tmp_path / "bronze"))

    def heartbeat(log: bronze.BronzeLog, token: str) -> None:
        log.heartbeat({}, token=token, ts_ms=1)

    log = bronze.BronzeLog.open(spark, ref)
    heartbeat(log, "82")
    with faults.injected(Fault(Boundary.AFTER_COMMIT, Kind.NETWORK)), pytest.raises(Py4JNetworkError):
        heartbeat(log, "83")
    with pytest.raises(errors.CommitUnknown):
        heartbeat(log, "84")
    log.close()
    again = bronze.BronzeLog.open(spark, ref)
    assert again.position == bronze.BronzePosition("83", 2, 1)
    heartbeat(again, "85")
    again.close()
    found = spark.table(str(ref)).orderBy("offset").collect()
    assert [(row.batch, row.resume_token) for row in found] == [(1, "82"), (2, "83"), (3, "85")]
    assert bronze.newest(spark, ref).batch == 3


LAYERS = (f"silver/{bronze_rows.DB}", f"gold/{bronze_rows.DB}/{ORDERS}'", "_history")


def test_every_layer_goes_on_from_every_border(spark: SparkSession, tmp_path: Path) -> None:
    """The first commit with rows to each kind of table is interrupted at each boundary. After another run in the same process silver,
    gold and history are as without the interruption.
    """
    hop = Hop(spark, pipeline(tmp_path, history=True))
    hop.bronze.append({ORDERS: [{"op": "c", "key": 1, "at": 1, "after": {"_id": 1, "v": 1}}]})
    hop.run()
    for old, boundary in enumerate(PLACES[1:], 1):
        new, at = old + 1, 10 * old
        created = {"op": "c", "key": new, "at": at, "after": {"_id": new, "v": new}}
        hop.bronze.append({ORDERS: [created, {"op": "d", "key": old, "at": at + 1}]})
        for layer in ("silver/", "gold/", "_history"):
            with faults.injected(Fault(boundary, Kind.INTERRUPT, layer, nth=2)) as injection, contextlib.suppress(*SEEN):
                hop.run()
            assert injection.has_struck, (boundary, layer)
        hop.run()
        assert [row["_id"] for row in hop.documents(ORDERS)] == [new]
        versions = spark.table(str(hop.layout.history(bronze_rows.DB, ORDERS))).orderBy("_id").collect()
        ended = [(row["_id"], row["v"], row["valid_to"] is None) for row in versions]
        assert ended == [(key, key, key == new) for key in range(1, new + 1)]


def test_a_rebuild_that_got_no_answer(spark: SparkSession, tmp_path: Path) -> None:
    """The table holds the old rows or the new ones, all readable, and the next rebuild succeeds."""
    hop = Hop(spark, pipeline(tmp_path))
    hop.bronze.append({ORDERS: [{"op": "c", "key": 1, "at": 1, "after": {"_id": 1}}]})
    hop.run()
    table = f"silver/{bronze_rows.DB}/{ORDERS}"
    name = f"{bronze_rows.DB}.{ORDERS}"
    for boundary in PLACES[1:]:
        with faults.injected(Fault(boundary, Kind.INTERRUPT, table, nth=2)) as injection, pytest.raises(KeyboardInterrupt):
            rebuild.run(spark, hop.settings, collection=name)
        assert injection.has_struck, boundary
        assert [row["_id"] for row in hop.rows(ORDERS)] == [1], boundary
    rebuild.run(spark, hop.settings, collection=name)
    hop.run()
    assert [row["_id"] for row in hop.documents(ORDERS)] == [1]
