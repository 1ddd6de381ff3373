"""A few changes on their way from bronze to gold: seconds and Spark jobs of a batch, warm, beside a plain MERGE of the same rows.

    python -m bench.small_batches [--rows 100000] [--events 5] [--batches 12] [--behind 120] [--partial]

This is the fixed cost of a batch in `medallion run`: planning, commits and lookups. With `--partial` the updates only contain the changes,
as in `bench.silver`; the plain MERGE gets the resulting rows. The tables have `--behind` earlier batches and their logs checkpoints, from
which each run starts, as a scheduled run does.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import ground
from bench import silver as bench_silver
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import session as sparks


def measured(
    spark: Any, root: Path, *, rows: int, events: int, batches: int, behind: int = 0, is_partial: bool = False
) -> Iterator[ground.Row]:
    """A row for each layer with medians over the batches, without the first third."""
    mode = {"capture.mode": "change_streams"} if is_partial else {}
    chosen = ground.pipeline("mongodb://127.0.0.1", root, **mode)
    silver_table = delta.layout(chosen.lakehouse).silver(bench_silver.DB, bench_silver.COLLECTION)
    documents = bench_silver.Documents()
    log = bronze.BronzeLog.open(spark, delta.layout(chosen.lakehouse).bronze(chosen.name))
    bench_silver.fill(log, documents, rows=rows)
    silver.run(spark, chosen)
    gold.run(spark, chosen)
    plain = bench_silver.plain_table(spark, root, log.table)

    def change(version: int) -> None:
        numbers = [(version * 7919 + number * 104_729) % rows for number in range(events)]
        bench_silver.update(log, documents, numbers, version=version, is_partial=is_partial)

    for version in range(1, behind + 1):
        change(version)
        silver.run(spark, chosen)
        gold.run(spark, chosen)
    found: dict[str, list[tuple[float, int]]] = {"silver": [], "gold": [], "plain MERGE": []}
    for version in range(behind + 1, behind + batches + 1):
        before = log.position
        change(version)
        assert before is not None and log.position is not None
        span = (before.batch, log.position.batch)
        found["silver"].append(_counted(spark, lambda: silver.run(spark, chosen)))
        found["gold"].append(_counted(spark, lambda: gold.run(spark, chosen)))
        folder = f"{root}/reduced{version}"
        if is_partial:
            applied = spark.table(str(silver_table)).where(f"`__batch` > {before.batch}")
            rows_of_it = applied.select(spark.table(plain).columns)
        else:
            rows_of_it = bench_silver.events_of(spark, log.table, span).drop("key", "sequence")
        rows_of_it.write.format("delta").save(folder)
        found["plain MERGE"].append(_counted(spark, functools.partial(bench_silver.merge_plainly, spark, plain, folder)))
    log.close()
    for layer, measures in found.items():
        warm = measures[len(measures) // 3 :]
        yield (layer, events, statistics.median(each for each, _ in warm), int(statistics.median(jobs for _, jobs in warm)))


def _counted(spark: Any, act: Callable[[], object]) -> tuple[float, int]:
    """Seconds and Spark jobs of `act`."""
    scheduler = spark._jsc.sc().dagScheduler()
    jobs, began = int(scheduler.numTotalJobs()), time.monotonic()
    act()
    return time.monotonic() - began, int(scheduler.numTotalJobs()) - jobs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--behind", type=int, default=120, help="so many batches come before, not counted")
    parser.add_argument("--partial", action="store_true", help="updates that say what changed")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench")
    with ground.lakehouse() as root:
        found = measured(
            spark,
            root,
            rows=arguments.rows,
            events=arguments.events,
            batches=arguments.batches,
            behind=arguments.behind,
            is_partial=arguments.partial,
        )
        rows = list(ground.told(found))
    sparks.stop()
    ground.show(f"A batch over {arguments.rows:,} rows", ("layer", "events", "seconds", "Spark jobs"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
