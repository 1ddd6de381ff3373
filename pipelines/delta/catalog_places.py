"""Where a catalog keeps the tables whose logs this process may read and commit to itself.

These are the tables of Spark's own catalog with Delta's implementation, as over a Hive metastore or AWS Glue: a table is a folder, and
the catalog takes no part in its commits. In Unity Catalog and on Databricks it does.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from cdc_core.tables import layout as tables
from pipelines.delta import table_errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import jvm
from pipelines.spark import session as sparks

_PREFIX = f"`{tables.SPARK_CATALOG}`."

_LOCATIONS: dict[str, str] = {}
"""The last answers of the catalog, by `TableRef.key`."""


def location(table: tables.TableRef) -> str | None:
    """The folder or URL of a table, as far as it is known without the catalog: a path, or the last answer of `locate`."""
    return table.path if table.path is not None else _LOCATIONS.get(table.key)


def locate(spark: SparkSession, table: tables.TableRef) -> str | None:
    """The folder or URL of a table, or where it would be created; None where only the catalog may read or write its log.

    The catalog is asked once, and again by `has`.
    """
    known_location = location(table)
    if known_location is None and is_open(spark, table):
        has(spark, table)
    return location(table)


def has(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether the catalog, for which `is_open` is true, has this table of Delta now: it may have been dropped, or be another one since."""
    place, is_there = _of_catalog(spark, table)
    if place is None:
        _LOCATIONS.pop(table.key, None)
    else:
        _LOCATIONS[table.key] = place
    return is_there


def _of_catalog(spark: SparkSession, table: tables.TableRef) -> tuple[str | None, bool]:
    """The location of a table, or of one that would be created, and whether it is there; no location for a view or another format."""
    state = spark._jsparkSession.sessionState()
    catalog, name = state.catalog(), state.sqlParser().parseTableIdentifier(table.identifier.removeprefix(_PREFIX))
    metadata = table_errors.unless_missing(table, lambda: catalog.getTableMetadata(name))
    if metadata is None:
        # None where the schema is missing, too.
        place = table_errors.unless_missing(table, lambda: catalog.defaultTablePath(name))
    elif metadata.provider().isEmpty() or metadata.provider().get().lower() != "delta":
        return None, False
    else:
        place = metadata.location()
    url = None if place is None else str(jvm.java_class(spark, "org.apache.hadoop.fs.Path")(place).toString())
    return url, metadata is not None


def is_open(spark: SparkSession, table: tables.TableRef) -> bool:
    """Whether no catalog takes part in the table's commits or sets properties of its own."""
    if table.path is not None:
        return True
    if not table.identifier.startswith(_PREFIX):
        return False
    # In Unity Catalog, too, this may be the catalog's name.
    is_of_delta = sparks.is_classic(spark) and spark.conf.get(spark_conf.IMPLEMENTATION, "") == spark_conf.CATALOG
    return is_of_delta and not sparks.is_databricks()
