"""Replaces the rows of few keys of a model, of which only the query itself is Spark's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from pipelines.delta import key_search, live_files, table_schema
from pipelines.delta.key_search import Places
from pipelines.delta.live_files import LiveFiles
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
    """The rows of the query for keys, at most one each and none of another key, and the places of these keys in the table."""

    rows: pa.Table
    places: Places
    rowless: pa.Table
    """The keys without a row."""


def computed(query: DataFrame, keys: pa.Table, writer: Writer) -> FewRows | None:
    """The rows of a query over the rows of these keys, with the columns and types of the writer's table.

    None where this process cannot read or compare them, and where a key repeats or is none of these: Spark's steps tell what is wrong.
    """
    live = writer.replaceable()
    if live is None:
        return None
    key_schema = pa.schema([live.schema.field(name) for name in keys.column_names])
    if [each.type for each in keys.schema] != key_schema.types or not all(map(_is_comparable, key_schema.types)):
        return None
    # Before the query, which Spark's steps would run again.
    places = None if _are_large(live, keys.num_rows) else _places(live, keys)
    if places is None:
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
    return FewRows(rows, places, keys.filter(pa.array([each not in own_keys for each in wanted], pa.bool_())))


def replaced(few: FewRows, writer: Writer, *, to: object, extra: Mapping[str, object]) -> int | None:
    """Replace the rows of the keys, as one commit; the new version, None where only Spark can do it."""
    live = writer.replaceable()
    if live is None:
        return None
    return writer.replace_arrow(
        [few.rows],
        schema=few.rows.schema,
        places=few.places,
        to=to,
        extra=extra,
    )


def _are_large(live: LiveFiles, count: int) -> bool:
    """Whether so many rows of the table's average size have more than `live_files.MANY_BYTES`: a row may collect a whole group."""
    size_bytes = sum(file["size"] for file in live.files())
    return count * size_bytes * live_files.IN_MEMORY > live_files.MANY_BYTES * live.row_count()


def _places(live: LiveFiles, keys: pa.Table) -> Places | None:
    """Where the table has rows of the keys; None where this process cannot replace them."""
    try:
        places = live_files.places_of(live, keys)
    except (OSError, pa.ArrowException, table_schema.NotReadable):
        return None
    return None if live_files.rewrites_many(live, [file for file, _ in places]) else places


def _is_comparable(type_: pa.DataType) -> bool:
    return any(is_type(type_) for is_type in _KEY_TYPES)
