"""What changed in a Delta table between two of its versions, without a change data feed: for models.

For a gold table of documents `current.GoldTable` finds them; what a rebuild of silver does to gold: `current.GoldWork.is_rewrite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from pipelines.delta import table_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY_FILES = 500
"""More changed files than these are not named in a query: both versions are read whole."""


def changed_keys(spark: SparkSession, table: tables.TableRef, before: int, after: int, columns: Sequence[str]) -> DataFrame:
    """The values of `columns` in the rows that one version of a table has and the other has not, as often as it has them.

    Only files that are not the same in both are compared: a file is the same where as many of its rows, at the same places,
    are there. That holds for tables with deletion vectors and without, after OPTIMIZE and RESTORE, and needs no change feed.
    """
    before, after = table_history.changed_between(spark, table, before, after)
    places = [_places(spark, table, version) for version in (before, after)]
    differing = {path for path in places[0].keys() | places[1].keys() if places[0].get(path) != places[1].get(path)}
    names = ", ".join(map(identifier, columns))
    # Rows are compared by a digest of their JSON, because Spark compares no maps. Its usual formats of timestamps end at
    # milliseconds: rows that differ in microseconds would be the same.
    formats = (
        "'timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX\", 'timestampNTZFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS\""
    )
    json = f"to_json(struct(*), map({formats}))"

    def rows(version: int, sign: int, wanted: set[str]) -> DataFrame:
        at = f"{table} VERSION AS OF {version}"
        listed = ", ".join(literal(path) for path in sorted(wanted))
        chosen = (
            f"WHERE _metadata.file_path IN ({listed})"
            if 0 < len(wanted) <= MANY_FILES
            else "WHERE false"
            if not wanted
            else ""
        )
        return spark.sql(f"SELECT {names}, sha2({json}, 256) AS `__row`, {sign} AS `__sign` FROM {at} {chosen}")

    old = rows(before, -1, differing & places[0].keys())
    new = rows(after, 1, differing & places[1].keys())
    keys = [f"__key_{number}" for number in range(len(columns))]
    both = old.unionByName(new).toDF(*keys, "__row", "__sign")
    # A row that both versions have counts once on each side and cancels out.
    return both.groupBy(*keys, "__row").agg(F.sum("__sign").alias("__sum")).where("`__sum` <> 0").select(*keys)


def _places(spark: SparkSession, table: tables.TableRef, version: int) -> dict[str, tuple[int, int]]:
    """The files of a version, each with the number of its rows and, in a table with deletion vectors, a sign of their
    places."""
    for places in ("bit_xor(xxhash64(_metadata.row_index))", "0"):
        try:
            rows = spark.sql(
                f"SELECT _metadata.file_path AS path, count(*) AS n, {places} AS places "
                f"FROM {table} VERSION AS OF {version} GROUP BY 1"
            )
        except AnalysisException:  # without deletion vectors rows have no places, and need none
            continue
        return {row.path: (row.n, row.places) for row in rows.collect()}
    raise errors.CommitConflict(f"{table.label}: version {version} cannot be read any more")
