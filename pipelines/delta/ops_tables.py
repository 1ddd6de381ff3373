"""Tables of facts, to which any process appends a few rows without a claim. Order and repetition of rows have no meaning."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from cdc_core.sql import arrow
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import catalog_places, data_file, direct_log, local_log, store_exclusion, table_errors
from pipelines.delta import tables as delta

PROPERTIES = {
    "delta.enableDeletionVectors": "false",
    # A checkpoint is a Spark job, for which an append has to wait. Delta's default is every ten commits.
    "delta.checkpointInterval": "50",
}
"""Properties of a table of facts."""

_APPENDING: defaultdict[tables.TableRef, threading.Lock] = defaultdict(threading.Lock)
"""Threads of one process append one after the other: otherwise all but one would have to retry."""


def append_rows(
    spark: SparkSession, table: tables.TableRef, rows: pa.Table, *, statistics: Sequence[str] = ()
) -> int | None:
    """Append a few rows to a table of facts, in parallel with other writers; the new version, None where Spark appends them.

    `statistics` is as in `Writer.append_arrow`. Takes no Spark job where there is a direct log.
    """
    store_exclusion.check(spark, catalog_places.locate(spark, table) or delta.catalog_location(spark, table))
    direct = direct_log.of(spark, table)
    if direct is None:
        with table_errors.translating(table):
            spark.createDataFrame(rows).coalesce(1).writeTo(str(table)).append()
        return None
    # On an error the file stays, because a commit without an answer may name it. VACUUM removes it otherwise.
    file = data_file.ParquetFile.write(direct.store, [rows], schema=rows.schema, statistics=statistics, table=table)
    with _APPENDING[table]:
        return _appended(direct, file, table)


def append(rows: DataFrame, table: tables.TableRef) -> None:
    """Append rows to a table of facts by a statement of Spark.

    Raises `CommitConflict` where the rows are read from the table itself, and a compaction of it, which is no claim, was committed meanwhile.
    """
    try:
        rows.writeTo(str(table)).append()
    except table_errors.SPARK_ERRORS as error:
        if table_errors.is_conflict(error):
            raise table_errors.conflict(table) from error
        raise  # it may be one of the tables that the rows are read from


def _appended(direct: direct_log.DirectLog, file: data_file.ParquetFile, table: tables.TableRef) -> int:
    """Commit the file on top of the newest version, which is read again where other commits came first; the new version."""
    for attempt in table_errors.commit_attempts(table):
        try:
            return direct.append(file)
        except table_errors.SPARK_ERRORS as error:
            if not table_errors.is_conflict(error) or attempt + 1 == table_errors.COMMIT_ATTEMPTS:
                raise table_errors.translated(error, table) from error
        # The other commits are short appends, too.
        time.sleep(0.05 * 2**attempt)
    raise table_errors.conflict(table)


def note(
    spark: SparkSession,
    table: tables.TableRef,
    rows: Sequence[Mapping[str, object]],
    schema: pa.Schema,
    *,
    statistics: Sequence[str] = (),
) -> None:
    """Append a few rows to a table of facts, which is created if it is missing.

    Adds missing columns to a table that an earlier version created: otherwise Delta would not read them, and a compaction would lose them.
    """
    delta.create(spark, table, columns=arrow.columns_ddl(schema), properties=PROPERTIES)
    with _APPENDING[table]:  # otherwise each thread would add the columns
        existing_columns = delta.columns(spark, table)
        missing_columns = pa.schema([each for each in schema if each.name not in existing_columns])
        if len(missing_columns):
            try:
                spark.sql(f"ALTER TABLE {table} ADD COLUMNS ({arrow.columns_ddl(missing_columns)})")
            except table_errors.SPARK_ERRORS:
                if not delta.columns(spark, table).issuperset(missing_columns.names):  # else another process has added them
                    raise
    append_rows(spark, table, pa.Table.from_pylist([dict(row) for row in rows], schema=schema), statistics=statistics)


def rows(spark: SparkSession, table: tables.TableRef, schema: pa.Schema) -> pa.Table:
    """All rows of a table of facts, in no order, with the columns of `schema`."""
    folder = local_log.readable(spark, table)
    local_rows = None if folder is None else local_log.rows(folder, schema)
    return local_rows if local_rows is not None else _by_spark(spark, table, schema)


def parts(
    spark: SparkSession, table: tables.TableRef, schema: pa.Schema, *, among: tuple[str, Sequence[str]] | None = None
) -> Iterator[pa.Table]:
    """The rows of `rows`, a few at a time, for tables with long texts. Some rows come twice where a file is removed meanwhile.

    `among` is a STRING column with the wanted values; without it all rows are wanted.
    """
    for part in _all_parts(spark, table, schema, among):
        yield part if among is None else part.filter(pc.is_in(part[among[0]], value_set=pa.array(among[1], pa.string())))


def _all_parts(
    spark: SparkSession, table: tables.TableRef, schema: pa.Schema, among: tuple[str, Sequence[str]] | None
) -> Iterator[pa.Table]:
    """The parts of all files that may have wanted rows, with their other rows."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    if folder is None or files is None:
        yield _by_spark(spark, table, schema)
        return
    try:
        for file in files:
            if among is None or file.may_hold(*among):
                yield from local_log.parts(folder, file, schema)
    except (OSError, pa.ArrowException):  # removed meanwhile, or damaged, which Spark reports
        yield _by_spark(spark, table, schema)


def _by_spark(spark: SparkSession, table: tables.TableRef, schema: pa.Schema) -> pa.Table:
    with table_errors.translating(table):
        return local_log.aligned(spark.table(str(table)).toArrow(), schema)


def delete(spark: SparkSession, table: tables.TableRef, where: str) -> int:
    """Remove the rows that match a SQL condition from a table of facts, in parallel with other writers; the number of rows."""
    with table_errors.translating(table):
        count = int(spark.sql(f"SELECT count(*) AS n FROM {table} WHERE {where}").collect()[0].n)
        if not count:
            return 0
        # An earlier version of this project, or a default of the cluster, may have created the table as append-only.
        if definition.is_on(delta.properties(spark, table), "delta.appendOnly"):
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')").collect()
        spark.sql(f"DELETE FROM {table} WHERE {where}").collect()
    return count
