"""The tables that silver keeps of a collection: its documents, and the deletes that it has seen."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cdc_core.schema import names as column_names
from cdc_core.tables import layout as tables
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PROPERTIES = {
    "delta.enableDeletionVectors": "true",
    "delta.enableTypeWidening": "true",
    # No document's column: they are written with each commit, and nothing in silver looks rows up by them.
    "delta.dataSkippingStatsColumns": "`__key`,`__sequence`,`__batch`",
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    # Gold reads what changed between two versions of this table: it may come back after days and still find them.
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
ENGINE_DDL = (
    "`__incomplete` BOOLEAN, `__known` STRING, `__rescued` MAP<STRING, STRING>, "
    "`__key` STRING, `__sequence` STRING, `__batch` BIGINT"
)
"""The columns that a new table has; the documents' come with the documents."""

ALWAYS = ("__incomplete", "__known", "__rescued", "__key", "__sequence", "__batch")
"""The columns of `ENGINE_DDL`."""

DELETES_DDL = "`__key` STRING, `__sequence` STRING, `__batch` BIGINT"


def create(spark: SparkSession, table: tables.TableRef) -> None:
    """Make a collection's table where there is none, without any column of documents."""
    delta.create(spark, table, columns=ENGINE_DDL, properties=PROPERTIES, cluster_by=("__key",))


def has_documents(spark: SparkSession, table: tables.TableRef, *, added: Collection[str]) -> bool:
    """Whether a table has columns of documents; those that settings `added` are none."""
    return not {*column_names.ENGINE, *added}.issuperset(delta.columns(spark, table))


def create_deletes(spark: SparkSession, table: tables.TableRef) -> None:
    """Make the table of a collection's remembered deletes where there is none."""
    delta.create(spark, table, columns=DELETES_DDL, properties=ops_tables.PROPERTIES)
