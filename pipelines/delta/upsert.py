"""Parts of an upsert without a MERGE: the locations of rows, pending deletes, and how it ends without a commit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

KEY = "__key"
"""The column that identifies the rows to replace."""

ROW_LOCATION = ("__file", "__row")
"""Columns with the file and row number of a row in a version of a table."""

RowFinder: TypeAlias = "Callable[[], DataFrame]"
"""Returns the `ROW_LOCATION` of rows. Called for each attempt, because a DataFrame keeps the columns and files of its creation."""


class NotCommitted(Exception):
    """The caller cancelled the commit after the rows were written."""


class NeedsMerge(Exception):
    """Only a MERGE can do it; for example, the table has no deletion vectors, or has a change feed whose readers need updates."""


@dataclass(frozen=True)
class PendingDelete:
    """A search for the actions that remove rows from a version of a table."""

    version: int
    actions: Future[Any]


def located(rows: DataFrame, keys: DataFrame, spans: Sequence[tuple[str, str]]) -> DataFrame:
    """The `ROW_LOCATION` of those `rows`, with `KEY` and `ROW_LOCATION`, whose keys are among `keys`.

    `spans` are ranges of keys, both ends included, that cover all `keys`: with them Delta skips files, where the join would read all.
    """
    if spans:
        rows = rows.where(functools.reduce(operator.or_, (F.col(KEY).between(*span) for span in spans)))
    return rows.join(keys, KEY, "left_semi").select(*ROW_LOCATION)
