"""The report of expectations: for each table the result of the newest run, and of the runs before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

from cdc_core.settings.parse import Settings
from pipelines.delta import tables as delta

RUNS = 20
"""Runs of each table that are shown."""
MOST_ROWS = 10_000
_OTHERS = ("column", "column_A", "column_B", "column_list", "batch_id")
"""Arguments that are not shown: the columns are shown by themselves."""


@dataclass(frozen=True)
class ExpectationVerdict:
    """One expectation in the newest run; `past` has its verdicts in all shown runs, oldest first."""

    expectation: str
    columns: str
    arguments: str
    severity: str
    is_met: bool
    judged: str
    rows: int | None
    unexpected: int | None
    examples: tuple[str, ...]
    failure: str | None
    past: tuple[bool, ...]


@dataclass(frozen=True)
class TableAudit:
    """The newest run for one table; without `is_published` the last good version stayed."""

    table: str
    at_ms: int
    is_published: bool
    verdicts: tuple[ExpectationVerdict, ...]


def read(spark: SparkSession, settings: Settings) -> tuple[TableAudit, ...]:
    """The newest run of each table of the pipeline: unpublished tables first, then by name."""
    table = delta.layout(settings.lakehouse).ops("expectations")
    if not delta.exists(spark, table):
        return ()
    frame = spark.table(str(table))
    # Rows of earlier versions have no name: they may belong to any pipeline.
    results = frame.where(F.coalesce("name", F.lit(settings.name)) == settings.name) if "name" in frame.columns else frame
    place = F.dense_rank().over(Window.partitionBy("table").orderBy(F.col("at_ms").desc(), F.col("run")))
    # Choose the runs from narrow columns first: a month of checks with every change has millions of results of kilobytes each.
    runs = (
        results.select("table", "at_ms", "run").distinct().withColumn("place", place).where(F.col("place") <= RUNS).toArrow()
    )
    if not runs.num_rows:
        return ()
    shown_results = results.where(F.col("at_ms") >= pc.min(runs["at_ms"]).as_py())
    rows = shown_results.join(F.broadcast(spark.createDataFrame(runs)), ["table", "at_ms", "run"])
    arguments = F.get_json_object("result", "$.expectation_config.kwargs").alias("arguments")
    newest_rows = rows.orderBy("place").select("*", arguments).drop("result").limit(MOST_ROWS).collect()
    return audited([row.asDict() for row in newest_rows])


def audited(rows: Iterable[dict[str, Any]]) -> tuple[TableAudit, ...]:
    """The same from rows of `ops/expectations` with `place`, the rank of their run (1 is the newest), and `arguments` as JSON."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    audits = [_audit(name, table_rows) for name, table_rows in by_table.items()]
    return tuple(sorted(audits, key=lambda each: (each.is_published, each.table)))


def _audit(table: str, rows: Sequence[dict[str, Any]]) -> TableAudit:
    newest_rows = [row for row in rows if row["place"] == min(each["place"] for each in rows)]
    past: dict[tuple[str, str], list[bool]] = {}
    for row in sorted(rows, key=lambda each: each["place"], reverse=True):
        past.setdefault(_known_by(row), []).append(row["is_met"])
    # Unmet expectations first.
    sorted_rows = sorted(newest_rows, key=lambda row: (row["is_met"], row["severity"], row["expectation"], row["columns"]))
    return TableAudit(
        table,
        newest_rows[0]["at_ms"],
        all(row["is_published"] for row in newest_rows),
        tuple(_verdict(row, tuple(past[_known_by(row)])) for row in sorted_rows),
    )


def _known_by(row: dict[str, Any]) -> tuple[str, str]:
    """What identifies an expectation across runs: its type and its arguments."""
    return row["expectation"], _arguments(row, without=("batch_id",))


def _verdict(row: dict[str, Any], past: tuple[bool, ...]) -> ExpectationVerdict:
    return ExpectationVerdict(
        row["expectation"].removeprefix("expect_").replace("_", " "),
        ", ".join(row["columns"]),
        _arguments(row, without=_OTHERS),
        row["severity"],
        row["is_met"],
        row["judged"],
        row["rows"],
        row["unexpected"],
        tuple(row["examples"] or ()),
        row["failure"],
        past,
    )


def _arguments(row: dict[str, Any], *, without: Sequence[str]) -> str:
    arguments = json.loads(row["arguments"] or "{}")
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in sorted(arguments.items()) if name not in without)
