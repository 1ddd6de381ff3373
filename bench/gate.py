"""The gate: a model of a million rows published with expectations and without, whole and by the keys that changed.

    python -m bench.gate [--rows 1000000] [--changed 20000] [--rounds 3]

The baseline is the same run without expectations, in alternation: the query, the check of its key, and the commit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench import ground
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import expectations, models
from pipelines.gold.candidate import Audit, no_audit
from pipelines.spark import session as sparks
from tests.harness import gold_shop

MODEL = """\
{{ config(materialized='incremental', unique_key='_id') }}
SELECT _id, customer, amount, note FROM {{ ref('cases.orders', key='_id') }}
"""
SUITE = """\
expectations:
  - {type: expect_column_values_to_not_be_null, kwargs: {column: customer}}
  - {type: expect_column_values_to_be_between, kwargs: {column: amount, min_value: 0, max_value: 1000000}}
  - {type: expect_column_values_to_match_regex, kwargs: {column: note, regex: '^note [0-9]+$'}}
  - {type: expect_column_values_to_be_unique, kwargs: {column: _id}}
  - {type: expect_column_sum_to_be_between, kwargs: {column: amount, min_value: 1}}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "3g"})
    with ground.lakehouse() as root:
        files = {"copy": MODEL}
        shop = gold_shop.made(spark, root, files, suites={"copy.yml": SUITE})
        audits: dict[str, Audit] = {"without": no_audit, "with": expectations.Gate.of(shop.settings)}
        _write(shop, arguments.rows, mark=0, changed=arguments.rows)
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for name, audit in audits.items():
                kinds = {"whole": True, f"{arguments.changed:,} keys": False}
                for kind, is_anew in kinds.items():
                    if not is_anew:
                        _write(shop, arguments.rows, mark=2 * number + (name == "with") + 1, changed=arguments.changed)
                    seconds = _seconds(spark, shop, audit, is_anew)
                    if number:
                        found.setdefault((kind, name), []).append(seconds)
    sparks.stop()
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        plain, gated = (statistics.median(found[kind, name]) for name in audits)
        rows.append((kind, arguments.rows, plain, gated, gated - plain))
    ground.show(
        "The gate", ("published", "rows of the table", "s without", "s with five expectations", "s for the gate"), rows
    )
    return 0


def _seconds(spark: Any, shop: gold_shop.Shop, audit: Audit, is_anew: bool) -> float:
    began = time.perf_counter()
    (made,) = models.run(spark, shop.settings, audit=audit, is_anew=is_anew).models
    assert made.did == ("whole" if is_anew else "changed"), made
    return time.perf_counter() - began


def _write(shop: gold_shop.Shop, rows: int, *, mark: int, changed: int) -> None:
    """Publish the documents; the amounts of the first `changed` ones depend on `mark`."""
    spark = shop.spark
    table = delta.layout(shop.settings.lakehouse).gold("cases", "orders")
    ddl = ", ".join(f"{name} {type_}" for name, type_ in gold_shop.COLUMNS["orders"].items())
    if not delta.exists(spark, table):
        delta.create(spark, table, columns=ddl)
        registry.note(spark, shop.settings, new=[registry.Namespace("cases", "orders")], discovered=1, log=None)
    writer = Writer.claim(spark, table)
    documents = (
        "CAST(id AS INT) AS _id, CAST(id % 5000 AS INT) AS customer, "
        f"CAST(id % 1000 + IF(id < {changed}, {mark}, 0) AS INT) AS amount, concat('note ', id) AS note"
    )
    writer.overwrite(spark.sql(f"SELECT {documents} FROM range({rows})"), to=mark + 1)
    writer.release()


if __name__ == "__main__":
    raise SystemExit(main())
