"""A model's query as Spark takes it, and what Spark says of it as a mistake of its file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException

from cdc_core import errors
from cdc_core.models import sql_model
from pipelines.spark import failures


def one_query(query: str) -> str:
    """The text as a query and nothing else: a statement that changes something does not parse there. Lines stay the same."""
    return f"SELECT * FROM ({query}\n)"


class NotThere(Exception):
    """A table that a query names is not there."""


@contextmanager
def said(model: sql_model.Model, *, knows_missing: bool = False) -> Iterator[None]:
    """What Spark says of a query's text, as a mistake of its file."""
    try:
        yield
    except ParseException as error:
        raise errors.SettingsError(errors.Problem(_place(model, error), f"it is no query: {_first_line(error)}")) from None
    except AnalysisException as error:
        if knows_missing and (error.getCondition() or "").startswith("TABLE_OR_VIEW_NOT_FOUND"):
            raise NotThere from None
        raise errors.SettingsError(errors.Problem(_place(model, error), _first_line(error))) from None


def _place(model: sql_model.Model, error: PySparkException) -> str:
    found = re.search(r"\bline (\d+)", str(error))
    return f"{model.where}:{found[1]}" if found else model.where


def _first_line(error: PySparkException) -> str:
    """Spark's sentence, without its code and the plan."""
    told = next((line for line in str(error).splitlines() if line.strip()), "")
    return re.sub(r"\s*SQLSTATE: \w+.*", "", told).strip().rstrip(";")


@contextmanager
def failing(model: sql_model.Model) -> Iterator[None]:
    """A query that fails over the rows, without what the rows hold."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        known = failures.translated(error)
        if known is not None:
            raise known from error
        condition = failures.condition(error) or type(error).__name__
        raise errors.DecisionNeeded(
            f"{model.where}: the query failed over the rows: {condition}. Nothing of it was published; the last good version stays"
        ) from error
