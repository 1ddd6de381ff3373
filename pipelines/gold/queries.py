"""Analyses models' queries with Spark, and reports Spark's errors as mistakes in the model's file."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.models import lineage, sql_model
from cdc_core.properties import types as values
from cdc_core.schema import names as column_names
from cdc_core.sql import table_columns
from cdc_core.sql.names import identifier
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks

NOT_IN_NAMES = frozenset(" ,;{}()\n\t=")
"""Characters that Delta refuses in column names without column mapping."""
UNPUBLISHED = frozenset(
    {
        *("NullType", "VariantType", "TimeType", "GeometryType", "GeographyType"),
        *("CalendarIntervalType", "DayTimeIntervalType", "YearMonthIntervalType"),
    }
)
"""Types that Delta cannot store, or that many Delta readers do not support. By name: not every Spark version has all of them."""


OF_ROWS = frozenset(("0A", "21", "22", "23", "2F", "38", "39", "42", "54", "P0"))
"""SQLSTATE classes of errors that the same rows raise each time: values, cardinality, functions, limits."""


def check_syntax(spark: SparkSession, model: sql_model.Model) -> None:
    """Raise `SettingsError` if the text is not a query; its tables need not exist."""
    # Spark parses the text before it looks for tables: a missing table proves that the query parses.
    with suppress(NotThere), errors_of_file(model, knows_missing=True):
        spark.sql(one_query(model.query(lambda ref: "`not there yet`")))


def frame(spark: SparkSession, model: sql_model.Model, relation: Callable[[sql_model.Ref], str]) -> DataFrame:
    """The query as a lazy DataFrame, with `relation`'s SQL for each reference."""
    with errors_of_file(model):
        return spark.sql(one_query(model.query(relation)))


def check(spark: SparkSession, model: sql_model.Model, frame: DataFrame, relation: Callable[[sql_model.Ref], str]) -> None:
    """Raise `SettingsError` if the columns of a query, `frame`, cannot be published, if columns that the model names do not exist, or if
    rows of an incremental model may depend on rows with other keys than theirs, in tables with a `key`.

    Where there is no plan to read, as over Spark Connect, the model's rows alone tell of other keys (`model_table`).
    """
    is_incremental = model.materialized is sql_model.Materialization.INCREMENTAL
    schemas = {ref: spark.sql(f"SELECT * FROM {relation(ref)}").schema for ref in model.refs if is_incremental}
    _check_columns(model, frame.schema, schemas)
    if is_incremental:
        _check_key_types(model, schemas)
        if sparks.is_classic(spark):
            _check_lineage(spark, model, schemas)


def _check_columns(model: sql_model.Model, published: T.StructType, schemas: Mapping[sql_model.Ref, T.StructType]) -> None:
    problems = [errors.Problem(model.where, *each) for each in _unpublished(published)]
    named = [("the model", name, published.names) for name in (*model.unique_key, *(name for name, _ in model.columns))]
    named += [(f"key: {ref.name}", name, schema.names) for ref, schema in schemas.items() for name in ref.key]
    for what, name, names in named:
        if name not in names:
            hint = values.did_you_mean(name, names) or f"it has {', '.join(names[:20])}"
            problems.append(errors.Problem(model.where, f"{what} has no column {name}", hint))
    if problems:
        raise errors.SettingsError(problems)


def _check_lineage(spark: SparkSession, model: sql_model.Model, schemas: Mapping[sql_model.Ref, T.StructType]) -> None:
    views = {ref: f"keys_{uuid.uuid4().hex}" for ref in schemas}
    with ExitStack() as stack:
        for ref, view in views.items():
            # Without the tables, of which the plan would have all details.
            nulls = ", ".join(
                f"CAST(NULL AS {table_columns.ddl(each.dataType)}) AS {identifier(each.name)}" for each in schemas[ref]
            )
            spark.sql(f"SELECT {nulls} WHERE false").createOrReplaceTempView(view)
            stack.callback(spark.catalog.dropTempView, view)
        try:
            query = frame(spark, model, lambda ref: identifier(views[ref]))
            analysed = json.loads(query._jdf.queryExecution().analyzed().toJSON())
        # It names a column by its table in a catalog, or one that only files have; a platform's own node may have no JSON.
        except (errors.SettingsError, Py4JJavaError):
            return
        try:
            lineage.check(analysed, {views[ref]: ref.key for ref in views if ref.key}, model.unique_key)
        except lineage.Mixed as mixed:
            message = f"the rows of one {', '.join(model.unique_key)} cannot be computed separately: {mixed}"
            raise errors.SettingsError(errors.Problem(model.where, message, "use materialized='table'")) from None


def _check_key_types(model: sql_model.Model, schemas: Mapping[sql_model.Ref, T.StructType]) -> None:
    """Raise `SettingsError` if the keys of two tables have types of which Spark takes different values for equal."""
    types = {ref: [schema[name].dataType for name in ref.key] for ref, schema in schemas.items() if ref.key}
    first, *others = types
    for ref in others:
        for name, one, other in zip(ref.key, types[first], types[ref]):
            is_number = isinstance(one, T.IntegralType) and isinstance(other, T.IntegralType)
            if not is_number and one.simpleString() != other.simpleString():
                message = (
                    f"the key {name} of {ref.name} is {other.simpleString()}, and that of {first.name} {one.simpleString()}: "
                    "Spark takes different values of the two types for equal"
                )
                hint = "refer to a model that casts one of them, or use materialized='table'"
                raise errors.SettingsError(errors.Problem(model.where, message, hint))


def _unpublished(type_: T.DataType, path: str = "") -> Iterator[tuple[str, str]]:
    """Why rows of a type, or the column at a path, cannot be published: pairs of a problem and a hint."""
    match type_:
        case T.StructType():
            yield from _unnamed(type_.names, f"{path}." if path else "")
            for field in type_:
                yield from _unpublished(field.dataType, f"{path}.{field.name}" if path else field.name)
        case T.ArrayType():
            yield from _unpublished(type_.elementType, path)
        case T.MapType():
            yield from _unpublished(type_.keyType, path)
            yield from _unpublished(type_.valueType, path)
        case _ if type(type_).__name__ in UNPUBLISHED or " collate " in type_.simpleString():
            yield f"the column {path} has the type {type_.simpleString()}", "cast it to another one"


def _unnamed(names: Sequence[str], within: str) -> Iterator[tuple[str, str]]:
    """The problems and hints for names of columns, or of fields `within` one, that a table cannot have."""
    lower_names = [name.lower() for name in names]
    for name in sorted({name for name in names if lower_names.count(name.lower()) > 1}):
        yield f"the column {within}{name} is there twice", "give one of them another name"
    for name in names:
        if not name or NOT_IN_NAMES.intersection(name):
            hint = "name it: … AS name, without blanks and any of ,;{}()="
            yield f"a table cannot have a column with the name {within}{name}", hint
        if not within and name.lower() in column_names.RESERVED:
            yield f"{name} is what statements over the table call a column of their own", "give it another name"


def one_query(query: str) -> str:
    """The text as a subquery, where a statement that changes something does not parse. Line numbers stay the same."""
    # Two line breaks: a comment at the end goes on over one, where a backslash is before it.
    return f"SELECT * FROM ({query}\n\n)"


class NotThere(Exception):
    """A table that a query names does not exist."""


@contextmanager
def errors_of_file(model: sql_model.Model, *, knows_missing: bool = False) -> Iterator[None]:
    """Raises Spark's errors about a query's text as `SettingsError`, with the file and the line; with `knows_missing` a missing table as
    `NotThere`."""
    try:
        yield
    except ParseException as error:
        raise errors.SettingsError(
            errors.Problem(_place(model, error), f"not a valid query: {_first_line(error)}")
        ) from None
    except AnalysisException as error:
        if knows_missing and (error.getCondition() or "").startswith("TABLE_OR_VIEW_NOT_FOUND"):
            raise NotThere from None
        raise errors.SettingsError(errors.Problem(_place(model, error), _first_line(error))) from None


def _place(model: sql_model.Model, error: PySparkException) -> str:
    match = re.search(r"\bline (\d+)", str(error))
    return f"{model.where}:{match[1]}" if match else model.where


def _first_line(error: PySparkException) -> str:
    """Spark's message without its condition, SQLSTATE and plan."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    message = re.sub(r"\s*SQLSTATE: \w+.*", "", first).strip().rstrip(";")
    # The query is parsed inside parentheses, which are not in the file: errors about them are cut off.
    return re.sub(r"^\[\w+(?:\.\w+)*\]\s*|: (?:missing '\)'|extra input '[^']*')\.?$", "", message)


@contextmanager
def errors_of_rows(model: sql_model.Model) -> Iterator[None]:
    """Raises a query's runtime failure with its error condition only: Spark's message may quote values."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        failure = spark_failures.translated(error)
        if failure is not None:
            raise failure from error
        condition = spark_failures.condition(error) or spark_failures.class_name(error)
        consequence = "Nothing was published; the last good version stays"
        if spark_failures.sql_state(error)[:2] in OF_ROWS:
            raise errors.DecisionNeeded(
                f"{model.where}: the query failed on these rows: {condition}. {consequence}"
            ) from error
        # A lost executor, memory, an unreadable file: the same rows may pass the next time.
        raise errors.Temporary(
            f"{model.where}: the query could not be computed: {condition}. {consequence}; try again"
        ) from error
