"""What an upsert without a MERGE works with: where rows lie, which of them are deleted, and how it ends without a commit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY = "__key"
"""The column that rows are replaced by."""

ROW_LOCATION = ("__file", "__row")
"""Columns that say where a version of a table holds a row."""

Locating: TypeAlias = "Callable[[], DataFrame]"
"""The `ROW_LOCATION` of rows, looked for by each attempt: a frame goes on with the columns and files that it was made with."""


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


def located(rows: DataFrame, keys: DataFrame, spans: Sequence[tuple[str, str]]) -> DataFrame:
    """Those rows, which have `KEY` and `ROW_LOCATION`, whose keys are among `keys`: their `ROW_LOCATION`.

    `spans`, from a first key to a last, hold all of the keys: they let Delta skip files, where the join would read all.
    """
    if spans:
        rows = rows.where(functools.reduce(operator.or_, (F.col(KEY).between(*span) for span in spans)))
    return rows.join(keys, KEY, "left_semi").select(*ROW_LOCATION)
