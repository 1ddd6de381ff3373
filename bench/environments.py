"""What a batch costs by where its tables lie and how it is committed: seconds, CPU seconds, and requests of the store.

    python -m bench.environments [--rows 2000] [--events 50] [--batches 6] [--check]

The places are a local disk and an emulated S3, each with direct commits to Delta's log and through Spark's statements, Spark's own catalog
on the disk, and a session that takes no settings. `--check` fails if a batch costs more than `MAX_REQUESTS` requests to S3, or `MAX_CPU`
times the CPU seconds of the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ground
from bench import silver as bench_silver
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.demo.emulated_s3 import EmulatedS3
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from tests.harness import environments, object_store
from tests.harness.environments import Environment

MAX_REQUESTS = {"bronze": 5, "silver": 25, "gold": 24}
MAX_CPU = 1.5

PLACES = (
    ("disk", "file", Environment.DISK),
    ("Spark's catalog", tables.SPARK_CATALOG, Environment.DISK),
    ("S3", "s3a", Environment.STORE),
    ("S3, by statements", "s3a", Environment.STATEMENTS),
    ("disk, by statements", "file", Environment.STATEMENTS),
    ("disk, no settings", "file", Environment.REFUSING),
)


@dataclass(frozen=True)
class Cost:
    """The cost of one batch of one layer."""

    seconds: float
    cpu: float
    requests: int


@dataclass(frozen=True)
class Meter:
    """Measures the costs of this process, its JVM and the store."""

    spark: Any
    store: EmulatedS3

    def cost(self, act: Callable[[], object]) -> Cost:
        before = self._read()
        act()
        after = self._read()
        return Cost(after[0] - before[0], after[1] - before[1], int(after[2] - before[2]))

    def _read(self) -> tuple[float, float, int]:
        jvm = self.spark.sparkContext._gateway.proc.pid
        return time.monotonic(), time.process_time() + ground.processor_seconds(jvm), object_store.count(self.store)


def in_catalog(spark: Any, chosen: settings.Settings, folder: Path) -> settings.Settings:
    """The settings with tables in Spark's own catalog, in schemas below the folder."""
    lakehouse = dataclasses.replace(chosen.lakehouse, root=None, catalog=tables.SPARK_CATALOG, schema_prefix="bench_")
    for layer in tables.FOLDERS:
        schema = delta.layout(lakehouse).schema(layer)
        spark.sql(f"CREATE SCHEMA {schema} LOCATION 'file:{folder}/{layer}'")
    return dataclasses.replace(chosen, lakehouse=lakehouse)


def measured(meter: Meter, chosen: settings.Settings, *, rows: int, events: int, batches: int) -> dict[str, Cost]:
    """The median cost of a warm batch of each layer."""
    spark = meter.spark
    documents = bench_silver.Documents()
    log = bronze.BronzeLog.open(spark, delta.layout(chosen.lakehouse).bronze(chosen.name))
    bench_silver.fill(log, documents, rows=rows)
    layers: dict[str, Callable[[int], object]] = {
        "bronze": lambda version: bench_silver.update(
            log, documents, [(version * 7919 + n * 104_729) % rows for n in range(events)], version=version
        ),
        "silver": lambda _: silver.run(spark, chosen),
        "gold": lambda _: gold.run(spark, chosen),
    }
    found: dict[str, list[Cost]] = {name: [] for name in layers}
    for version in range(1, batches + 1):
        for name, act in layers.items():
            found[name].append(meter.cost(functools.partial(act, version)))
    log.close()
    return {name: _median(costs[len(costs) // 2 :]) for name, costs in found.items()}


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(each.seconds for each in costs),
        statistics.median(each.cpu for each in costs),
        int(statistics.median(each.requests for each in costs)),
    )


def places(spark: Any, store: EmulatedS3, folder: Path, **size: int) -> Iterator[tuple[str, dict[str, Cost]]]:
    """The costs at each place."""
    for number, (name, scheme, environment) in enumerate(PLACES):
        root = f"s3a://bench/{number}" if scheme == "s3a" else str(folder / str(number))
        with environments.session(spark, environment) as session:
            chosen = ground.pipeline("mongodb://127.0.0.1", root)
            if scheme == tables.SPARK_CATALOG:
                chosen = in_catalog(session, chosen, Path(root))
            yield name, measured(Meter(session, store), chosen, **size)


def too_dear(found: dict[str, dict[str, Cost]]) -> list[str]:
    """A line for each limit that is exceeded."""
    disk, s3 = found["disk"], found["S3"]
    missed = []
    for layer, cost in s3.items():
        if cost.requests > MAX_REQUESTS[layer]:
            missed.append(f"a batch of {layer} on S3 takes {cost.requests} requests")
        if cost.cpu > MAX_CPU * disk[layer].cpu:
            missed.append(f"{layer} on S3 takes {cost.cpu:.2f} CPU seconds, {disk[layer].cpu:.2f} on the disk")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    size = {"rows": arguments.rows, "events": arguments.events, "batches": arguments.batches}
    found: dict[str, dict[str, Cost]] = {}
    with object_store.elsewhere("bench") as store, ground.lakehouse() as folder:
        spark = sparks.session("bench", root="s3a://bench/lake", hadoop=store.hadoop)
        for name, costs in places(spark, store, folder, **size):
            found[name] = costs
            for layer, cost in costs.items():
                print(
                    f"{name:22} {layer:7} {cost.seconds:6.2f} s {cost.cpu:6.2f} CPU s {cost.requests:5} requests", flush=True
                )
        sparks.stop()
    rows = [
        (name, layer, cost.seconds, cost.cpu, cost.requests)
        for name, costs in found.items()
        for layer, cost in costs.items()
    ]
    ground.show(f"A batch of {arguments.events} events", ("place", "layer", "seconds", "CPU seconds", "requests"), rows)
    missed = too_dear(found)
    print("\n".join(missed))
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
