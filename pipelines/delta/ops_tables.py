"""Tables of facts: a few rows that any process appends, without a claim; their order means nothing, and neither does a
repetition."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.sql import arrow
from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import data_file, direct_log, local_log, store_exclusion, table_errors
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTIES = {
    "delta.enableDeletionVectors": "false",
    # A checkpoint is a Spark job, for which whoever appends has to wait; by itself Delta makes one every ten commits.
    "delta.checkpointInterval": "50",
}
"""Properties of a table to which anybody appends a few rows."""

_APPENDING: defaultdict[tables.TableRef, threading.Lock] = defaultdict(threading.Lock)
"""Threads of one process append one after the other: where they meet, all but one would have to wait and try again."""


def append_rows(spark: SparkSession, table: tables.TableRef, rows: pa.Table, *, statistics: Sequence[str] = ()) -> None:
    """Append a few rows, whoever else appends; a table of facts, in which order and repetition mean nothing.

    `statistics` as in `Writer.append_arrow`. Without a Spark job where there is a direct log; elsewhere by Spark.
    """
    store_exclusion.check(spark, table.path or delta.catalog_location(spark, table))
    direct = direct_log.of(spark, table)
    if direct is None:
        with table_errors.translating(table):
            spark.createDataFrame(rows).coalesce(1).writeTo(str(table)).append()
        return
    # Where this fails the file stays: a commit that got no answer may name it. VACUUM takes what none names.
    file = data_file.ParquetFile.write(direct.store, [rows], schema=rows.schema, statistics=statistics, table=table)
    with _APPENDING[table]:
        _appended(direct, file, table)


def _appended(direct: direct_log.DirectLog, file: data_file.ParquetFile, table: tables.TableRef) -> None:
    """Commit the file, again where others came first.

    Delta would do that by itself, but not while another thread's fenced commit has told the shared session not to.
    """
    for attempt in table_errors.commit_attempts(table):
        try:
            return direct.append(file)
        except table_errors.SPARK_ERRORS as error:
            if not table_errors.is_conflict(error) or attempt + 1 == table_errors.COMMIT_ATTEMPTS:
                raise table_errors.translated(error, table) from error
        # Others append a few rows, as this does: the wait is short.
        time.sleep(0.05 * 2**attempt)


def note(
    spark: SparkSession,
    table: tables.TableRef,
    rows: Sequence[Mapping[str, object]],
    schema: pa.Schema,
    *,
    statistics: Sequence[str] = (),
) -> None:
    """Append a few facts to a table of them, which is made where there is none, and gets the columns that it lacks where an
    earlier version of the schema made it: Delta would not read them of the rows' files, and a compaction would lose them."""
    delta.create(spark, table, columns=arrow.columns_ddl(schema), properties=PROPERTIES)
    with _APPENDING[table]:  # each thread would add the columns
        held = delta.columns(spark, table)
        lacking = pa.schema([each for each in schema if each.name not in held])
        if len(lacking):
            try:
                spark.sql(f"ALTER TABLE {table} ADD COLUMNS ({arrow.columns_ddl(lacking)})")
            except table_errors.SPARK_ERRORS:
                if not delta.columns(spark, table).issuperset(lacking.names):  # another process was before this one
                    raise
    append_rows(spark, table, pa.Table.from_pylist([dict(row) for row in rows], schema=schema), statistics=statistics)


def rows(spark: SparkSession, table: tables.TableRef, schema: pa.Schema) -> pa.Table:
    """All rows of a table of facts, in no order, as `schema` has its columns."""
    folder = local_log.readable(spark, table)
    found = None if folder is None else local_log.rows(folder, schema)
    return found if found is not None else _by_spark(spark, table, schema)


def parts(
    spark: SparkSession, table: tables.TableRef, schema: pa.Schema, *, among: tuple[str, Sequence[str]] | None = None
) -> Iterator[pa.Table]:
    """The same, a few rows at a time, for tables with long texts; some rows twice where a file is removed meanwhile.

    `among` is a column with the values that are wanted.
    """
    for part in _all_parts(spark, table, schema, among):
        yield part if among is None else part.filter(pc.is_in(part[among[0]], value_set=pa.array(among[1], pa.string())))


def _all_parts(
    spark: SparkSession, table: tables.TableRef, schema: pa.Schema, among: tuple[str, Sequence[str]] | None
) -> Iterator[pa.Table]:
    """The parts of those files that may hold what is wanted."""
    folder = local_log.readable(spark, table)
    files = None if folder is None else local_log.files(folder)
    if folder is None or files is None:
        yield _by_spark(spark, table, schema)
        return
    try:
        for file in files:
            if among is None or file.may_hold(*among):
                yield from local_log.parts(folder, file, schema)
    except OSError:
        yield _by_spark(spark, table, schema)


def _by_spark(spark: SparkSession, table: tables.TableRef, schema: pa.Schema) -> pa.Table:
    with table_errors.translating(table):
        return local_log.aligned(spark.table(str(table)).toArrow(), schema)


def delete(spark: SparkSession, table: tables.TableRef, where: str) -> int:
    """Remove rows from a table of facts, beside whoever appends to it; how many."""
    with table_errors.translating(table):
        count = int(spark.sql(f"SELECT count(*) AS n FROM {table} WHERE {where}").collect()[0].n)
        if not count:
            return 0
        # As an earlier version made some, or a cluster that makes all of its tables so.
        if definition.is_on(delta.properties(spark, table), "delta.appendOnly"):
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')").collect()
        spark.sql(f"DELETE FROM {table} WHERE {where}").collect()
    return count
