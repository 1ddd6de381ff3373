"""Compaction by the writers of silver and gold, by Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import maintenance
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTORS = {definition.DELETION_VECTORS: "true"}


def test_a_writer_compacts_what_is_new_and_files_with_many_deleted_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each compaction of a table below a gigabyte would write all of it anew, while its collection waits."""
    monkeypatch.setattr(maintenance, "SMALL_CUBE_BYTES", 1)
    table = tables.TableRef.at(str(tmp_path / "t"))
    delta.create(spark, table, columns="`__key` STRING, n BIGINT", properties=VECTORS, cluster_by=("__key",))

    def rows(first: int, end: int) -> object:
        return spark.range(first, end, numPartitions=2).selectExpr("CAST(id AS STRING) AS `__key`", "id AS n")

    def paths() -> set[str]:
        assert writer.live is not None and writer.live.move_to(writer.version)
        return {each["path"] for each in writer.live.files()}

    with Writer.claim(spark, table).released() as writer:
        writer.append(rows(0, 100), to=1)
        maintenance._optimize(writer)
        (first,) = paths()
        writer.append(rows(100, 110), to=2)
        assert len(paths()) == 3
        maintenance._optimize(writer)
        assert len(paths()) == 2 and first in paths()
        spark.sql(f"DELETE FROM {table} WHERE n < 60").collect()
        writer.append(rows(110, 120), to=3)
        assert first in paths()
        maintenance._optimize(writer)
        assert first not in paths()
        assert spark.table(str(table)).count() == 60
