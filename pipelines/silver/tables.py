"""The tables that silver keeps for a collection: its documents, and its remembered deletes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyspark.sql import SparkSession

from cdc_core.schema import names as column_names
from cdc_core.sql.names import identifier
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta

DELETES = {"__key": "STRING", "__sequence": "STRING", "__batch": "BIGINT"}
"""The columns of remembered deletes, with their types."""

ALWAYS = {"__incomplete": "BOOLEAN", "__known": "STRING", "__rescued": "MAP<STRING, STRING>", **DELETES}
"""The columns of a new table, with their types; those of documents are added with the documents."""

PROPERTIES = {
    "delta.enableDeletionVectors": "true",
    definition.TYPE_WIDENING: "true",
    # No columns of documents: statistics are written with each commit, and nothing in silver looks rows up by these columns.
    "delta.dataSkippingStatsColumns": ",".join(map(identifier, DELETES)),
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    # Gold reads this table at older versions, and may come back only after days.
    "delta.deletedFileRetentionDuration": "interval 7 days",
}


def create(spark: SparkSession, table: tables.TableRef) -> None:
    """Create a collection's table if it does not exist, without columns of documents."""
    delta.create(spark, table, columns=_ddl(ALWAYS), properties=PROPERTIES, cluster_by=("__key",))


def has_documents(spark: SparkSession, table: tables.TableRef, *, added: Collection[str]) -> bool:
    """Whether a table has columns of documents, beside the engine's and those in `added`."""
    return not {*column_names.ENGINE, *added}.issuperset(delta.columns(spark, table))


def create_deletes(spark: SparkSession, table: tables.TableRef) -> None:
    """Create the table of a collection's remembered deletes if it does not exist."""
    delta.create(spark, table, columns=_ddl(DELETES), properties=ops_tables.PROPERTIES)


def _ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{identifier(name)} {type_}" for name, type_ in columns.items())
