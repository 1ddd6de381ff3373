"""Replaces the rows of few keys of a model, of which only the query itself is Spark's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from pipelines.delta import key_search, live_files, table_schema
from pipelines.delta.writer import Writer
from pipelines.spark import failures as spark_failures

_KEY_TYPES: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_string,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_timestamp,
)
"""The types whose values are equal in Python and in Arrow where they are in Spark."""


@dataclass(frozen=True)
class FewRows:
    """The rows of the query for `keys`: at most one each, and none of another key."""

    rows: pa.Table
    keys: pa.Table
    rowless: pa.Table
    """The keys without a row."""


def computed(query: DataFrame, keys: pa.Table, writer: Writer) -> FewRows | None:
    """The rows of a query over the rows of these keys, with the columns and types of the writer's table.

    None where this process cannot read or compare them, and where a key repeats or is none of these: Spark's steps tell what is wrong.
    """
    live = writer.live
    if live is None or not live.takes_rows(writer.version):
        return None
    key_schema = pa.schema([live.schema.field(name) for name in keys.column_names])
    if [each.type for each in keys.schema] != key_schema.types or not all(map(_is_comparable, key_schema.types)):
        return None
    try:
        # One more than there may be: then a key repeats, or is another one.
        rows = table_schema.conformed(query.limit(keys.num_rows + 1).toArrow(), live.schema)
    except table_schema.NotReadable:
        return None
    except (PySparkException, Py4JJavaError) as error:  # such as rows of more bytes than a driver takes
        spark_failures.of_one(error)  # raises where Spark is lost
        return None
    wanted, own = [*key_search.tuples(keys)], [*key_search.tuples(rows.select(keys.column_names))]
    own_keys = set(own)
    if len(own_keys) < len(own) or not own_keys <= set(wanted):
        return None
    return FewRows(rows, keys, keys.filter(pa.array([each not in own_keys for each in wanted], pa.bool_())))


def replaced(few: FewRows, writer: Writer, *, to: object, extra: Mapping[str, object]) -> int | None:
    """Replace the rows of the keys, as one commit; the new version, None where only Spark can do it."""
    live = writer.live
    if live is None or not live.takes_rows(writer.version):
        return None
    try:
        places = live_files.places_of(live, few.keys)
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return None
    return writer.replace_arrow(
        [few.rows],
        schema=few.rows.schema,
        places=places,
        to=to,
        extra=extra,
        statistics=live_files.measured_columns(live),
    )


def _is_comparable(type_: pa.DataType) -> bool:
    return any(is_type(type_) for is_type in _KEY_TYPES)
