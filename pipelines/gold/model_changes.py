"""Finds the changes between two versions of a Delta table without a change data feed, for incremental models.

Changes of silver are found by `current.GoldTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from pipelines.delta import live_files, table_history, table_schema
from pipelines.delta.live_files import LiveFiles

MANY_FILES = 500
"""The most changed files that are named in a query; with more, both versions are read whole."""

FEW_ROWS = 250_000
"""The most changed rows of a version that this process reads by location. With more, Spark reads whole files of both versions."""

CHEAP_ROWS = 20_000
"""The most rows of both versions whose keys are computed twice: first for a look at whether there are few; that takes 0.5 s."""

READ_BYTES = 2**30
"""The most bytes of files that are read for them."""

# Rows are compared by a digest of their JSON, because Spark cannot compare maps. Its default formats of timestamps end at milliseconds, so
# that rows that differ in microseconds would be equal.
_FORMATS = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}
_OPTIONS = ", ".join(literal(text) for option in _FORMATS.items() for text in option)
_DIGEST = f"sha2(to_json(struct(*), map({_OPTIONS})), 256)"
_FILE = "substring_index(_metadata.file_path, '/', -1)"


class ChangedKeys(NamedTuple):
    """Keys of changed rows. If `are_cheap`, this process holds the rows, which are few: computing the keys again reads no table."""

    rows: DataFrame
    are_cheap: bool


def changed_keys(
    spark: SparkSession, table: tables.TableRef, before: int, after: int, columns: Sequence[str]
) -> ChangedKeys | None:
    """The values of `columns` (as `__key_0`, …) in the rows that only one of two versions of a table has, with repetitions; None if the
    versions have other types of them.

    Only rows of files that differ between the versions are compared: a file is the same if it has the same rows at the same places. This
    works with and without deletion vectors, and after OPTIMIZE and RESTORE.
    """
    before, after = table_history.changed_between(spark, table, before, after)
    files = _seen(spark, table, before, after)
    few_rows = _few_rows(files)
    are_cheap = few_rows is not None and sum(map(len, few_rows)) <= CHEAP_ROWS
    if few_rows is not None:
        old, new = map(spark.createDataFrame, few_rows)
    else:
        old, new = _rows_of_files(spark, table, (before, after), files)
    names = [f"{identifier(name)} AS `__key_{number}`" for number, name in enumerate(columns)]
    old, new = (
        rows.selectExpr(*names, f"{_DIGEST} AS `__row`", f"{sign} AS `__sign`") for rows, sign in ((old, -1), (new, 1))
    )
    # Spark would make numbers of texts: '7' and '0007' would be one key.
    if not table_columns.are_alike(old.schema, new.schema):
        return None
    all_rows = old.unionByName(new)
    keys = [f"__key_{number}" for number in range(len(columns))]
    # A row of both versions counts once on each side and cancels out.
    changed_rows = all_rows.groupBy(*keys, "__row").agg(F.sum("__sign").alias("__sum")).where("`__sum` <> 0")
    return ChangedKeys(changed_rows.select(*keys), are_cheap)


_Seen: TypeAlias = "tuple[LiveFiles, LiveFiles] | None"
"""The files of the two versions; None if this process cannot read them."""


def _seen(spark: SparkSession, table: tables.TableRef, before: int, after: int) -> _Seen:
    old, new = live_files.of(spark, table), live_files.of(spark, table)
    return (old, new) if old is not None and new is not None and old.move_to(before) and new.move_to(after) else None


def _few_rows(seen: _Seen) -> tuple[pa.Table, pa.Table] | None:
    """The rows that only the old version has, and those that only the new one has; None if they are too many to read here."""
    if seen is None:
        return None
    old, new = seen
    try:
        return _beyond(old, new), _beyond(new, old)
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return None


def _beyond(live: LiveFiles, other: LiveFiles) -> pa.Table:
    places = live_files.rows_beyond(live, other, limit=FEW_ROWS)
    columns, size_bytes = live.schema.names, live_files.MANY_BYTES
    return live_files.rows_at(live, places, columns=columns, size_bytes=size_bytes, read_bytes=READ_BYTES)


def _rows_of_files(
    spark: SparkSession, table: tables.TableRef, versions: tuple[int, int], seen: _Seen
) -> tuple[DataFrame, DataFrame]:
    """The rows of each version in files that differ in the other one."""
    if seen is not None:
        old, new = ({_name(file) for file in live.files() if not other.holds([file])} for live, other in (seen, seen[::-1]))
    else:
        places = [_places(spark, table, version) for version in versions]
        old, new = ({file for file in these if these[file] != others.get(file)} for these, others in (places, places[::-1]))
    before, after = versions
    return _rows(spark, table, before, old), _rows(spark, table, after, new)


def _name(file: dict[str, object]) -> str:
    """A file's name as `_FILE` has it, without its folder: the names are unique."""
    return str(file["path"]).rpartition("/")[2]


def _rows(spark: SparkSession, table: tables.TableRef, version: int, files: set[str]) -> DataFrame:
    rows = spark.sql(f"SELECT * FROM {table} VERSION AS OF {version}")
    if not files:
        return rows.where("false")
    return rows if len(files) > MANY_FILES else rows.where(f"{_FILE} IN ({', '.join(map(literal, sorted(files)))})")


def _places(spark: SparkSession, table: tables.TableRef, version: int) -> dict[str, tuple[int, int]]:
    """The files of a version, each with the number of its rows and, with deletion vectors, a digest of their places."""
    for places in ("bit_xor(xxhash64(_metadata.row_index))", "0"):
        try:
            rows = spark.sql(
                f"SELECT {_FILE} AS path, count(*) AS n, {places} AS places FROM {table} VERSION AS OF {version} GROUP BY {_FILE}"
            )
        except AnalysisException:  # without deletion vectors there is no row index, and none is needed
            continue
        return {row.path: (row.n, row.places) for row in rows.collect()}
    raise errors.CommitConflict(f"{table.label}: version {version} can no longer be read")
