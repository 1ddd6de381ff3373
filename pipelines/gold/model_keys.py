"""The keys of an incremental model whose rows may have changed, and comparisons with them."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.gold import key_ranges
from cdc_core.models import sql_model
from cdc_core.sql.names import identifier
from pipelines.delta import query_execution
from pipelines.gold import current, model_changes
from pipelines.gold.model_inputs import ModelInputs
from pipelines.spark import failures as spark_failures

# Log lines show this name: searches in logs must not depend on how the code is split into modules.
log = logging.getLogger("pipelines.gold.model_table")

FEW_KEYS = 1000
"""The most keys whose rows this process replaces itself: the rows of one may have megabytes."""


@dataclass(frozen=True)
class ModelKeys:
    """Different values of a model's `unique_key`. `few` has them in this process, too, unless there are more than `FEW_KEYS`."""

    rows: DataFrame
    few: pa.Table | None = None

    def close(self) -> None:
        """Release what Spark holds of them."""
        if self.few is None:
            query_execution.unpersist(self.rows)


def affected(
    spark: SparkSession, model: sql_model.Model, inputs: ModelInputs, positions: Mapping[str, Any], moved: Sequence[str]
) -> ModelKeys | None:
    """The keys of the rows of the `moved` tables that changed after these positions, both before and after the change, as a row may move to
    another key; None if an older version cannot be read, or has keys of another type."""
    changes: list[model_changes.ChangedKeys] = []
    try:
        for ref in model.refs:
            if ref.name not in moved or not ref.key:
                continue
            source = inputs.table(ref.name)
            assert source is not None
            before = positions[ref.name]["version"]
            changed = model_changes.changed_keys(spark, source.table, before, source.version, ref.key)
            if changed is None:
                return None
            changes.append(changed)
        rows = functools.reduce(DataFrame.unionByName, (each.rows.toDF(*model.unique_key) for each in changes)).distinct()
        few = rows.limit(FEW_KEYS + 1).toArrow() if all(each.are_cheap for each in changes) else None
        if few is None or few.num_rows > FEW_KEYS:
            return ModelKeys(query_execution.materialized(rows))
        return ModelKeys(spark.createDataFrame(few, rows.schema), few)
    except (PySparkException, Py4JJavaError, errors.CommitConflict) as error:
        condition = spark_failures.condition(error) or type(error).__name__
        log.info("%s: computing the whole model, because the changes are not known (%s)", model.name, condition)
        return None


def is_same(model: sql_model.Model, rows: DataFrame, keys: DataFrame) -> Column:
    """The join condition that `rows`, as `l`, and `keys`, as `k`, have the same key.

    Values of two types must be equal in both: Spark's comparison takes '007' and '7' for the number 7.
    """
    types = [{each.name: each.dataType for each in frame.schema} for frame in (rows, keys)]
    return functools.reduce(
        operator.and_, (_is_same_value(name, *(each[name] for each in types)) for name in model.unique_key)
    )


def _is_same_value(name: str, left: T.DataType, right: T.DataType) -> Column:
    """The condition that a column has the same value in `l` and `k`, whose types may differ."""
    ours, theirs = F.col(f"l.{identifier(name)}"), F.col(f"k.{identifier(name)}")
    if left == right:
        return ours.eqNullSafe(theirs)
    return ours.eqNullSafe(theirs.try_cast(left)) & theirs.eqNullSafe(ours.try_cast(right))


def as_keys_of(row_type: T.StructType, keys: DataFrame, names: Sequence[str]) -> DataFrame:
    """The keys with the types of a model's rows, without those that no row can have: '0007' is not the key of the row 7."""
    cast = {name: F.col(identifier(name)).try_cast(row_type[name].dataType) for name in names}
    is_kept = (F.col(identifier(name)).eqNullSafe(cast[name].try_cast(keys.schema[name].dataType)) for name in names)
    return keys.where(functools.reduce(operator.and_, is_kept)).withColumns(cast)


Spans: TypeAlias = "Mapping[str, tuple[Sequence[tuple[Any, Any]], bool]]"
"""For columns of a key: ranges of its values, and whether it may be null."""


def spans(keys: DataFrame) -> Spans:
    """Ranges that cover the keys, for each of their columns with texts or whole numbers."""
    types = {each.name: each.dataType for each in keys.schema}
    names = [name for name in types if isinstance(types[name], T.IntegralType) or types[name] == T.StringType()]
    if not names:
        return {}
    columns = [F.col(identifier(name)) for name in names]
    rows = keys.select(*columns).limit(current.FEW_KEYS + 1).toArrow()
    if is_many := rows.num_rows > current.FEW_KEYS:
        ends = (keys.agg(*(end(column).alias(name) for column, name in zip(columns, names))) for end in (F.min, F.max))
        rows = pa.concat_tables(each.toArrow() for each in ends)
    limit = 1 if is_many else 16
    return {
        name: (key_ranges.covering(rows[name].drop_null().to_pylist(), limit=limit), is_many or rows[name].null_count > 0)
        for name in names
    }


def within(spans: Spans) -> str:
    """SQL that is true for all rows with the keys, given `spans` by columns in SQL. With its literals files and pages are skipped."""
    conditions = (key_ranges.condition(column, ranges, or_null=or_null) for column, (ranges, or_null) in spans.items())
    return " AND ".join(f"({each})" for each in conditions) or "true"
