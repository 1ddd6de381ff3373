"""Tables that are made as Delta made one before: its statement takes a third of a second, the file that it leaves is a few lines."""

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
"""The product's own."""

_MADE: dict[str, dict[str, str]] = {}
_making: dict[str, threading.Lock] = {}

STATISTICS = "delta.dataSkippingStatsColumns"
"""What gold's tables say of their columns, beside the columns: with both replaced, one of them is as any other."""


def create(spark: SparkSession, table: tables.TableRef, **given: Any) -> bool:
    """`delta.create`: the first table of a definition is made by a statement, and others of the same definition as it was, or, where they
    name the columns with statistics, of the same but for columns.

    Only where nothing is yet, on a disk that this process sees: all else is asked of Delta, and so are tables without properties,
    which tests of making tables make.
    """
    folder = local_log.folder(table) if given.get("properties") or given.get("cluster_by") else None
    if folder is None:
        return by_statement(spark, table, **given)
    properties = given.get("properties") or {}
    schema = _schema(spark, given["columns"], properties)
    alike = {**given, "columns": "", "properties": {**properties, STATISTICS: ""}} if schema else given
    key = json.dumps(alike, sort_keys=True, default=dict)
    with _making.setdefault(key, threading.Lock()):  # whoever comes beside the first one takes it, too
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
    """The columns as Delta's log has them; None where they are not to be replaced."""
    named = properties.get(STATISTICS)
    if named is None or not sparks.is_classic(spark) or set("'\\\"") & set(named):
        return None
    return str(jvm.java_class(spark, "org.apache.spark.sql.types.StructType").fromDDL(columns).json())


def _copy(first: Mapping[str, str], log: Path, own: Mapping[str, str]) -> None:
    """A first commit as one of now, of a table of its own, with the texts that it has for itself. Delta compares what it says of the
    table with what its checksum says."""
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
