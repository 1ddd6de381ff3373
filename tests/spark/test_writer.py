"""Who may commit to a table, where several want to at the same moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import tables as delta

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
def owner_commits(spark: SparkSession, table: tables.TableRef, monkeypatch: pytest.MonkeyPatch) -> delta.Writer:
    """An owner of the table who commits a row once more, while the next writer looks for what it takes over."""
    owner = delta.Writer.claim(spark, table)
    found = delta.position

    def meanwhile(*asked: Any) -> Any:
        position = found(*asked)
        if not owner.metadata.get("to"):
            owner.append_arrow(rows(1), to="after one")
        return position

    monkeypatch.setattr(delta, "position", meanwhile)
    return owner


def test_take_over_while_the_owner_commits(spark: SparkSession, table: tables.TableRef, owner_commits: delta.Writer) -> None:
    """The new owner looks again, and goes on behind what the old one committed last."""
    new = delta.Writer.claim(spark, table, take_over=True)
    assert new.metadata["to"] == "after one"
    with pytest.raises(errors.OwnershipLost):
        owner_commits.append_arrow(rows(2), to="after two")
    new.append_arrow(rows(3), to="after three")
    assert sorted(row.n for row in spark.table(str(table)).collect()) == [1, 3]


@pytest.mark.usefixtures("owner_commits")
def test_without_taking_over_the_owner_is_named(spark: SparkSession, table: tables.TableRef) -> None:
    before = delta.version(spark, table)
    with pytest.raises(errors.TableOwned):
        delta.Writer.claim(spark, table)
    assert delta.version(spark, table) == before


def test_a_fence_holds_whatever_the_session_is_set_to(spark: SparkSession, table: tables.TableRef) -> None:
    """Sessions are shared: another thread's settings come and go while a commit is made."""
    done = threading.Event()

    def unsettle() -> None:
        while not done.is_set():
            spark.conf.unset("spark.databricks.delta.maxCommitAttempts")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(unsettle)
        try:
            for number in range(TIMES):
                old = delta.Writer.claim(spark, table, take_over=True)
                assert old._has_direct_log()
                transaction, actions = old._log._at(old.version), old._log._actions(None, old.version + 1)
                delta.Writer.claim(spark, table, take_over=True)
                with pytest.raises(delta._VersionTaken):
                    old._log._committed(transaction, actions, base=old.version, metadata=old._metadata(number, None))
        finally:
            done.set()


def test_a_take_over_just_before_an_alter_is_seen(
    spark: SparkSession, table: tables.TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fence holds an ALTER: what came between the look and it ends the old owner, who would commit on top of it."""
    owner = delta.Writer.claim(spark, table)
    looked = delta.Writer.check_ownership

    def too_early(self: delta.Writer) -> None:
        looked(self)
        delta.Writer.claim(spark, table, take_over=True)

    with monkeypatch.context() as late:
        late.setattr(delta.Writer, "check_ownership", too_early)
        with pytest.raises(errors.OwnershipLost):
            owner.alter("ADD COLUMNS (m BIGINT)")
    with pytest.raises(errors.OwnershipLost):
        owner.append_arrow(rows(1), to="one")


def test_a_table_of_facts_is_append_only_again(spark: SparkSession, tmp_path: Path) -> None:
    """A run that was killed between its two ALTERs left the table without it: the next one sets it."""
    facts = tables.TableRef.at(str(tmp_path / "facts"))
    delta.create(spark, facts, columns="n BIGINT", properties={**delta.FACTS, "delta.appendOnly": "false"})
    delta.append_rows(spark, facts, rows(1, 2))
    assert delta.delete(spark, facts, "n = 1") == 1
    assert delta.properties(spark, facts)["delta.appendOnly"] == "true"
