"""What an upsert without a MERGE works with: where rows lie, which of them are deleted, and how it ends without a commit."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column

KEY = "__key"
"""The column that rows are replaced by."""

ROW_LOCATION = ("__file", "__row")
"""Columns that say where a version of a table holds a row."""


class NotCommitted(Exception):
    """Rows were written that shall not be committed, and were not."""


class NeedsMerge(Exception):
    """The table has no deletion vectors, or a change feed whose readers want updates."""


@dataclass(frozen=True)
class PendingDelete:
    """The actions that take rows out of a version of a table, as soon as they are found."""

    version: int
    actions: Future[Any]


def row_location() -> tuple[Column, Column]:
    """`ROW_LOCATION` of each row of a table that is read."""
    return F.col("_metadata.file_path").alias(ROW_LOCATION[0]), F.col("_metadata.row_index").alias(ROW_LOCATION[1])
