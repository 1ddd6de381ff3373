"""Where a capture continues: the position of bronze, whose token must be one of the change stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.stream import resume_token
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def read(spark: SparkSession, table: tables.TableRef) -> bronze_log.BronzePosition | None:
    """The position in the rows; None for an empty table. Raises `DecisionNeeded` if the last row has no token of the stream."""
    position = bronze_log.read_position(spark, table)
    if position is None:
        return None
    try:
        resume_token.position(position.token or "")
    except ValueError as error:
        raise errors.DecisionNeeded(
            f"{table.label}: the last row (batch {position.batch}, offset {position.offset}) has no resume token of MongoDB's change "
            "stream, so it is unknown where the capture continues. Each commit of a capture ends with one: another program has written "
            "or deleted rows. Nothing was changed. Restore the version before that, or move this table away and start again with a "
            "snapshot"
        ) from error
    return position
