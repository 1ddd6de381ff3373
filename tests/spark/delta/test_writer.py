"""Concurrent writers of one table: who may commit."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import abandoned, direct_log, live_files, log_actions, ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.delta.fenced_commits import CommitPosition
from pipelines.delta.writer import Writer
from tests.harness import sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMES = 10


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> tables.TableRef:
    """A table that nobody has claimed."""
    made = tables.TableRef.at(str(tmp_path / "held"))
    delta.create(spark, made, columns="n BIGINT")
    return made


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


@pytest.fixture
def owner_commits(spark: SparkSession, table: tables.TableRef, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """An owner of the table that commits another row while the next writer reads the position that it takes over."""
    owner = Writer.claim(spark, table)
    found = table_history.standing

    def meanwhile(*asked: Any) -> Any:
        at = found(*asked)
        if not owner.metadata.get("to"):
            owner.append_arrow(rows(1), to="after one")
        return at

    monkeypatch.setattr(table_history, "standing", meanwhile)
    return owner


def test_take_over_while_the_owner_commits(spark: SparkSession, table: tables.TableRef, owner_commits: Writer) -> None:
    """The new owner reads the position again and continues after the old owner's last commit."""
    new = Writer.claim(spark, table, take_over=True)
    assert new.metadata["to"] == "after one"
    with pytest.raises(errors.OwnershipLost):
        owner_commits.append_arrow(rows(2), to="after two")
    new.append_arrow(rows(3), to="after three")
    assert sorted(row.n for row in spark.table(str(table)).collect()) == [1, 3]


def test_without_taking_over_the_owner_is_named(spark: SparkSession, table: tables.TableRef, owner_commits: Writer) -> None:
    with pytest.raises(errors.TableOwned, match=f"process {os.getpid()} on this host writes it"):
        Writer.claim(spark, table)
    assert table_history.version(spark, table) == owner_commits.version


def test_a_table_that_was_removed_before_its_claim_is_made_by_the_next_try(
    spark: SparkSession, table: tables.TableRef
) -> None:
    """A layer claims the tables that it has read without asking again whether they exist."""
    Writer.claim(spark, table).release()
    shutil.rmtree(str(table.path))
    with pytest.raises(errors.CommitConflict, match="removed"):
        Writer.claim(spark, table)
    assert not delta.exists(spark, table)


def test_a_holder_on_an_errand_is_waited_for(spark: SparkSession, table: tables.TableRef) -> None:
    """Maintenance holds a table for a minute: a second writer is told to try again, and no decision is needed."""
    passing = Writer.claim(spark, table, errand="medallion maintain")
    passing.alter("SET TBLPROPERTIES ('a.b' = 'c')")
    with pytest.raises(
        errors.LeaseHeld, match="medallion maintain is using it and releases it by itself; try again"
    ) as held:
        Writer.claim(spark, table)
    assert errors.code(held.value) == 75
    passing.release()
    Writer.claim(spark, table).release()


def test_a_fence_holds_whatever_the_session_is_set_to(spark: SparkSession, table: tables.TableRef) -> None:
    """Threads share sessions, so that settings may change during a commit."""
    done = threading.Event()

    def unsettle() -> None:
        while not done.is_set():
            spark.conf.unset("spark.databricks.delta.maxCommitAttempts")

    with ThreadPoolExecutor(1) as pool:
        unsettling = pool.submit(unsettle)
        try:
            for number in range(TIMES):
                old = Writer.claim(spark, table, take_over=True)
                log = old.direct
                assert log is not None
                transaction, actions = log._at(old.version), log_actions.fenced(spark, None, old.version)
                Writer.claim(spark, table, take_over=True)
                with pytest.raises(direct_log.VersionTaken):
                    log._committed(
                        transaction, actions, log_actions.Fence(old.version, old.user_metadata(CommitPosition(number)))
                    )
        finally:
            done.set()
        unsettling.result()


def test_commits_behind_new_columns_take_no_job(spark: SparkSession, table: tables.TableRef) -> None:
    """The commits of the next claim start no job either, as in another command. Delta would read all files to list them in a checksum."""
    first = Writer.claim(spark, table)
    first.append_arrow(rows(1), to=1)
    assert first.live is not None and first.live.move_to(first.version)
    spark.range(1).collect()
    before = max(sessions.jobs(spark))
    assert first.define(T.StructType([*first.live.spark_schema(), T.StructField("new", T.StringType())]))
    first.append_arrow(rows(2), to=2)
    first.release()
    second = Writer.claim(spark, table)
    second.append_arrow(rows(3), to=3)
    second.release()
    assert max(sessions.jobs(spark)) == before
    assert sorted(row.n for row in spark.table(str(table)).where("new IS NULL").collect()) == [1, 2, 3]


def test_a_take_over_just_before_an_alter_is_seen(
    spark: SparkSession, table: tables.TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALTER cannot be fenced: a claim between the last check and the ALTER ends the old owner, which would otherwise commit after it. The
    new owner continues from its own position; it must not mistake the ALTER for another claim, which would end both.
    """
    owner, successors = Writer.claim(spark, table), []
    looked = Writer.check_ownership

    def too_early(self: Writer) -> None:
        looked(self)
        successors.append(Writer.claim(spark, table, take_over=True))
        successors[0].append_arrow(rows(1), to="one")

    with monkeypatch.context() as late:
        late.setattr(Writer, "check_ownership", too_early)
        with pytest.raises(errors.OwnershipLost):
            owner.alter("ADD COLUMNS (m BIGINT)")
    with pytest.raises(errors.OwnershipLost):
        owner.append_arrow(rows(2), to="two")
    at = table_history.standing(spark, table).position
    assert at is not None and at.metadata == successors[0].metadata
    successors[0].append_arrow(rows(3), to="three")
    assert sorted(row.n for row in spark.table(str(table)).collect()) == [1, 3]


def test_rows_that_got_old_go_also_where_a_table_was_made_append_only(spark: SparkSession, tmp_path: Path) -> None:
    """An earlier version or a cluster's default may have set this, and then Delta refuses to delete rows."""
    facts = tables.TableRef.at(str(tmp_path / "facts"))
    delta.create(spark, facts, columns="n BIGINT", properties={"delta.appendOnly": "true"})
    ops_tables.append_rows(spark, facts, rows(1, 2))
    writer = Writer.claim(spark, facts)
    with pytest.raises(errors.DecisionNeeded, match="append-only.*ALTER TABLE"):
        writer.remove("n = 1", to=1)
    assert [ops_tables.delete(spark, facts, f"n = {n}") for n in (1, 2)] == [1, 1]


def test_a_compaction_takes_no_rows_that_it_has_not_read(spark: SparkSession, table: tables.TableRef) -> None:
    """The number of rows comes from the log, and nothing is read from a version that was not loaded."""
    writer = Writer.claim(spark, table)
    for number in range(2):
        writer.append_arrow(rows(number), to=number)
    held = live_files.LiveFiles(Path(table.label))
    assert held.move_to(writer.version) and len(held.files()) == 2
    assert writer.compact_files(held.files()) is None
    assert writer.live is not None and writer.live.move_to(writer.version)
    assert writer.compact_files(held.files()) is not None
    assert spark.table(str(table)).count() == 2


def test_a_row_that_somebody_s_constraint_refuses_is_for_a_person(spark: SparkSession, table: tables.TableRef) -> None:
    """The error names the constraint and contains no values, for each way to write rows."""
    writer = Writer.claim(spark, table)
    writer.alter("SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    writer.alter("ADD CONSTRAINT small CHECK (n < 10)")
    df = spark.createDataFrame(rows(4711))
    for write in (writer.append, functools.partial(writer.upsert, touched=None)):
        with pytest.raises(errors.DecisionNeeded, match="violates small.*DROP CONSTRAINT small") as refused:
            write(df, to=1)
        assert "4711" not in str(refused.value)
    assert spark.table(str(table)).count() == 0


@pytest.mark.parametrize("left", ("_delta_log", "_delta_log/_staged_commits"))
def test_a_creator_that_was_killed_before_its_commit_leaves_no_table(spark: SparkSession, tmp_path: Path, left: str) -> None:
    """Delta mistakes the folder of a log for a table, and creates none. The empty folders are removed and the table is created."""
    (tmp_path / "begun" / left).mkdir(parents=True)
    facts = tables.TableRef.at(str(tmp_path / "begun"))
    delta.create(spark, facts, columns="n BIGINT", properties=ops_tables.PROPERTIES)
    assert delta.exists(spark, facts)
    ops_tables.append_rows(spark, facts, rows(1))
    assert spark.table(str(facts)).count() == 1


def test_a_creator_that_was_taken_for_killed_makes_the_table(spark: SparkSession, tmp_path: Path) -> None:
    """Another process removes the folder that a slow creator has begun; the creator starts again.

    The rival only has a short time for this, and tries with one table after the other until it succeeds.
    """
    cleared, is_over = threading.Event(), threading.Event()
    folders = [tmp_path / "begun0"]

    def clear() -> None:
        while not (cleared.is_set() or is_over.is_set()):
            folder = folders[-1]
            if (folder / "_delta_log").is_dir():
                abandoned.clear(spark, tables.TableRef.at(str(folder)), str(folder))
                if not folder.exists():
                    cleared.set()

    rival = threading.Thread(target=clear, daemon=True)
    rival.start()
    try:
        while not cleared.is_set() and len(folders) < 30:
            made = tables.TableRef.at(str(folders[-1]))
            delta.create(spark, made, columns="n BIGINT")
            assert delta.exists(spark, made)
            folders.append(tmp_path / f"begun{len(folders)}")
        assert cleared.is_set()
    finally:
        is_over.set()
        rival.join()
