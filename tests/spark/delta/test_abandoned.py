"""A table whose creator was killed is created by the next process, in any kind of storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, table_errors
from pipelines.delta import tables as delta
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST = f"{0:020}.json"


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting, and a single attempt for the other process, because each attempt is a Spark statement."""
    monkeypatch.setattr("pipelines.delta.tables.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(delta, "ABANDONED_AFTER_ATTEMPTS", 1)
    monkeypatch.setattr(table_errors, "COMMIT_ATTEMPTS", 3)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tables.TableRef:
    """A table in a folder that the JVM sees, but this process does not."""
    monkeypatch.setattr(local_log, "folder", lambda _: None)
    return tables.TableRef.at(str(tmp_path / "begun"))


@pytest.fixture
def named(spark: SparkSession, tmp_path: Path) -> Iterator[tables.TableRef]:
    """A table of a catalog that has its first commit, but no catalog entry."""
    spark.sql(f"CREATE SCHEMA abandoned LOCATION 'file:{tmp_path}/abandoned'")
    made = tables.TableRef.named("spark_catalog", "abandoned", "t")
    delta.create(spark, made, columns="n BIGINT")
    shutil.copytree(tmp_path / "abandoned/t", tmp_path / "kept")
    spark.sql("DROP TABLE abandoned.t")
    shutil.copytree(tmp_path / "kept", tmp_path / "abandoned/t", dirs_exist_ok=True)
    yield made
    spark.sql("DROP SCHEMA abandoned CASCADE")


def _make_old(tmp_path: Path) -> None:
    os.utime(tmp_path / "abandoned/t/_delta_log" / FIRST, (1, 1))


@pytest.mark.parametrize("left", ("_delta_log", "_delta_log/_staged_commits"))
def test_a_log_without_a_commit_goes(spark: SparkSession, stored: tables.TableRef, left: str) -> None:
    """Placeholders for folders of an object store, and a commit that was not yet renamed, are removed."""
    folder = Path(str(stored.path), left)
    folder.mkdir(parents=True)
    (folder.parent / "_delta_log" if left == "_delta_log" else folder.parent).joinpath(".0.json.tmp").touch()
    delta.create(spark, stored, columns="n BIGINT")
    assert delta.exists(spark, stored)


def test_an_old_first_commit_that_no_catalog_names_goes(spark: SparkSession, named: tables.TableRef, tmp_path: Path) -> None:
    """The catalog entry is written after the first commit, and here it never was."""
    _make_old(tmp_path)
    delta.create(spark, named, columns="n BIGINT, m BIGINT")
    assert spark.table(str(named)).columns == ["n", "m"]


def test_a_new_first_commit_is_waited_for(spark: SparkSession, named: tables.TableRef, tmp_path: Path) -> None:
    """Its catalog entry may still be written."""
    with pytest.raises(errors.CommitConflict):
        delta.create(spark, named, columns="n BIGINT")
    assert (tmp_path / "abandoned/t/_delta_log" / FIRST).exists()


@pytest.mark.parametrize("kind", ("rows", "not ours", "another file"))
def test_what_may_be_needed_is_left_to_a_person(
    spark: SparkSession, named: tables.TableRef, tmp_path: Path, kind: str
) -> None:
    """The error names the folder if it holds rows, a table that this project did not create, or other files."""
    commit = tmp_path / "abandoned/t/_delta_log" / FIRST
    if kind == "rows":
        with commit.open("a") as log:
            log.write('{"add":{"path":"a.parquet","partitionValues":{},"size":1,"modificationTime":1,"dataChange":true}}\n')
    elif kind == "not ours":
        commit.write_text(commit.read_text().replace('"medallion.format"', '"somebody.format"'))
    else:
        (tmp_path / "abandoned/t/a.parquet").touch()
    _make_old(tmp_path)
    with pytest.raises(errors.DecisionNeeded, match="abandoned/t"):
        delta.create(spark, named, columns="n BIGINT")
    assert commit.exists()


def test_a_spark_elsewhere_leaves_it_to_a_person(
    spark: SparkSession, stored: tables.TableRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Spark Connect no process can look into the folder."""
    Path(str(stored.path), "_delta_log").mkdir(parents=True)
    monkeypatch.setattr(sparks, "is_classic", lambda _: False)
    with pytest.raises(errors.DecisionNeeded, match="started by a process"):
        delta.create(spark, stored, columns="n BIGINT")


def test_a_path_that_spark_takes_for_another_file_systems_is_told(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This happens on Databricks and with Hadoop's default file system: the table is created, but never visible here. A retry does not
    help.
    """
    monkeypatch.setattr(local_log, "folder", lambda _: tmp_path / "here")
    with pytest.raises(errors.DecisionNeeded, match="scheme"):
        delta.create(spark, tables.TableRef.at(str(tmp_path / "there")), columns="n BIGINT")
