"""Lets two processes commit to one table at the same time, and checks its rows; `python -m tests.harness.racing` is one of them.

Each repeatedly takes the table over and commits one number, by an append or by a merge, or appends a fact, which needs no claim. The
number of a successful commit must be in the table once; that of a refused commit must not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc_core import errors
from cdc_core.sql import merge
from cdc_core.tables import layout as tables
from pipelines.delta import direct_log, ops_tables, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.demo.emulated_s3 import EmulatedS3
from pipelines.spark import conf as spark_conf
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("__key", pa.string()), ("number", pa.int64())])
ADDING = merge.Merge("t.`__key` = s.`__key`", (merge.Clause(merge.from_source(SCHEMA.names), is_matched=False),))


def _row(number: int) -> pa.Table:
    return pa.table({"__key": [str(number)], "number": [number]}, schema=SCHEMA)


def _by_append(writer: Writer, number: int) -> None:
    writer.append_arrow(_row(number), to=number)


def _by_merge(writer: Writer, number: int) -> None:
    writer.merge(writer.spark.createDataFrame(_row(number)), ADDING, to=number)


def _by_upsert(writer: Writer, number: int) -> None:
    writer.upsert(writer.spark.createDataFrame(_row(number)), touched=None, to=number)


def _by_statement(writer: Writer, number: int) -> None:
    writer.append(writer.spark.createDataFrame(_row(number)), to=number)


CLAIMED: dict[str, Callable[[Writer, int], None]] = {
    "append": _by_append,
    "merge": _by_merge,
    "upsert": _by_upsert,
    "statement": _by_statement,
}
"""How bronze commits, how silver and gold do without and with a direct log, and how bronze does without one."""
FACTS = "facts"
KINDS = (*CLAIMED, FACTS)


def table_of(root: str, kind: str) -> tables.TableRef:
    return tables.TableRef.at(f"{root}/{kind}")


def make(spark: SparkSession, root: str, kind: str) -> None:
    delta.create(
        spark,
        table_of(root, kind),
        columns="__key STRING, number BIGINT",
        properties={"delta.enableDeletionVectors": "true"},
    )


def commits(spark: SparkSession, root: str, kind: str, *, first: int, count: int) -> Iterator[int]:
    """Commit `count` numbers from `first` on; yields each number whose commit succeeded."""
    table = table_of(root, kind)
    for number in range(first, first + count):
        if kind == FACTS:
            ops_tables.append_rows(spark, table, _row(number))
            yield number
            continue
        with contextlib.suppress(errors.OwnershipLost, errors.CommitConflict):
            writer = Writer.claim(spark, table, take_over=True)
            CLAIMED[kind](writer, number)
            yield number


@dataclass(frozen=True)
class Outcome:
    """The result: successful commits of each process, and numbers that are missing, doubled, or in the table though refused."""

    through: tuple[int, int]
    missing: frozenset[int]
    doubled: frozenset[int]
    uninvited: frozenset[int]
    versions: int

    @property
    def is_right(self) -> bool:
        return not (self.missing or self.doubled or self.uninvited)


def race(spark: SparkSession, store: EmulatedS3, root: str, kind: str, *, count: int) -> Outcome:
    """Let two processes commit `count` times each to one table below `root`, and compare its rows with their output."""
    make(spark, root, kind)
    racers = [_started(store, root, kind, first=side * 1_000_000, count=count) for side in range(2)]
    through = [frozenset(json.loads(line) for line in _lines(racer)) for racer in racers]
    found = [row.number for row in spark.table(str(table_of(root, kind))).collect()]
    said, held = through[0] | through[1], frozenset(found)
    doubled = frozenset(number for number in held if found.count(number) > 1)
    version = table_history.version(spark, table_of(root, kind))
    return Outcome((len(through[0]), len(through[1])), said - held, doubled, held - said, version)


def _started(store: EmulatedS3, root: str, kind: str, *, first: int, count: int) -> subprocess.Popen[str]:
    arguments = [store.url, root, kind, str(first), str(count)]
    return subprocess.Popen([sys.executable, "-m", "tests.harness.racing", *arguments], stdout=subprocess.PIPE, text=True)


def _lines(racer: subprocess.Popen[str]) -> Sequence[str]:
    said, _ = racer.communicate(timeout=1500)
    assert racer.returncode == 0, said[-2000:]
    return said.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "root", "kind"):
        parser.add_argument(name)
    for name in ("first", "count"):
        parser.add_argument(name, type=int)
    asked = parser.parse_args()
    store = EmulatedS3(asked.url)
    conf = {**spark_conf.SHORT_RUN, "spark.driver.memory": "1g"}
    spark = sparks.session("racing", master="local[1]", conf=conf, root=asked.root, hadoop=store.hadoop)
    if asked.kind in ("merge", "statement"):
        direct_log.of = lambda *_: None  # type: ignore[assignment]
    for number in commits(spark, asked.root, asked.kind, first=asked.first, count=asked.count):
        print(number, flush=True)
    sparks.stop()


if __name__ == "__main__":
    main()
