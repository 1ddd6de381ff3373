"""Creates tables by copying the first commit of a similar one: Delta's statement takes a third of a second, its commit is a small file."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core.tables import definition
from pipelines import clock
from pipelines.delta import local_log
from pipelines.delta import tables as delta
from pipelines.spark import jvm
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.tables import layout as tables

by_statement = delta.create
"""The product's function."""

_MADE: dict[str, dict[str, str]] = {}
_making: dict[str, threading.Lock] = {}

STATISTICS = "delta.dataSkippingStatsColumns"
"""The property that names columns. Gold's tables differ only in it and in their columns, so that replacing both copies a table."""


def create(spark: SparkSession, table: tables.TableRef, **given: Any) -> bool:
    """`delta.create`, with a statement only for the first table of a definition; later ones copy its first commit.

    Tables with the property `STATISTICS` may also differ in their columns. Copies only new tables, on a disk that this process sees.
    Delta creates all others, also those without properties, which the tests of `delta.create` use.
    """
    folder = local_log.folder(table) if given.get("properties") or given.get("cluster_by") else None
    if folder is None or table.path is None:  # a catalog must hear of its tables
        return by_statement(spark, table, **given)
    properties = given.get("properties") or {}
    schema = _schema(spark, given["columns"], properties)
    alike = {**given, "columns": "", "properties": {**properties, STATISTICS: ""}} if schema else given
    key = json.dumps(alike, sort_keys=True, default=dict)
    with _making.setdefault(key, threading.Lock()):  # a concurrent caller waits for the first, and copies its table
        if key in _MADE and not folder.exists():
            own = definition.checkpoints(table, properties) | ({STATISTICS: properties[STATISTICS]} if schema else {})
            _copy(_MADE[key], folder / "_delta_log", own | ({"schemaString": schema} if schema else {}))
            return True
        is_made = by_statement(spark, table, **given)
        if is_made:
            first = {file.name: file.read_text() for file in (folder / "_delta_log").glob(f"{0:020}.*")}
            _MADE.setdefault(key, first)
        return is_made


def _schema(spark: SparkSession, columns: str, properties: Mapping[str, str]) -> str | None:
    """The columns as Delta's log holds them; None if a copy must have the same columns."""
    named = properties.get(STATISTICS)
    if named is None or not sparks.is_classic(spark) or set("'\\\"") & set(named):
        return None
    return str(jvm.java_class(spark, "org.apache.spark.sql.types.StructType").fromDDL(columns).json())


def _copy(first: Mapping[str, str], log: Path, own: Mapping[str, str]) -> None:
    """Write a copy of a first commit with a new table id, the current time, and the values in `own`.

    Changes its checksum file too, because Delta compares them.
    """
    log.mkdir(parents=True)
    (id_,) = set(re.findall(r'"metaData":{"id":"([^"]+)"', "".join(first.values())))
    own_id, now = str(uuid.uuid4()), clock.now_ms()
    for name, text in sorted(first.items(), key=lambda file: file[0].endswith(".json")):
        told = re.sub(r'"(timestamp|createdTime)":\d+', rf'"\1":{now}', text.replace(id_, own_id))
        for each, value in own.items():
            said = f'"{each}":{json.dumps(value, ensure_ascii=False)}'
            told = re.sub(rf'"{re.escape(each)}":"(?:[^"\\]|\\.)*"', lambda _, said=said: said, told)
        (log / f"{name}.made").write_text(told)
        (log / f"{name}.made").rename(log / name)
