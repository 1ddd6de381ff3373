"""Freshness: from an insert in MongoDB to its visibility in bronze, and in gold, at one-second commits.

    python -m bench.freshness [--seconds 60] [--rate 100] [--collections 1 10] [--mix] [--beside]

A writer inserts at a steady rate into the collections in turn; a reader outside Spark (delta-rs) polls the tables and compares with the
times of the inserts. With `--mix` the documents are nested, and of ten writes five update an earlier document and one deletes one; use two
minutes or more, so that the tables reach their checkpoints (`delta.checkpointInterval`). With `--beside` gold has one more collection, which
is not measured: values of changing types make silver write its table anew all the time (`schema.on.conflict: retype`). Bronze is the capture
alone; gold is `medallion run`. The measurement begins after two documents of each collection have arrived; the time of the start is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from bson import json_util
from deltalake import DeltaTable, QueryBuilder

from bench import ground, shapes
from cdc_core.settings import parse
from pipelines import run as layers
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.mongodb import client as mongodb
from pipelines.spark import session as sparks

PAUSE_SECONDS = 0.1
"""Between two polls of the tables."""

BESIDE, BESIDE_SECONDS = "beside", 0.5
"""The collection of `--beside`, and the seconds between its inserts."""

INSERTS, UPDATES = 4, 5
"""Numbers of ten writes of the mix; the others are deletes."""


@dataclass
class Trial:
    """The times of one collection's inserts, and the seconds until each was visible."""

    table: Path
    key: str
    inserted: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Record the documents that are visible now; they arrive in the order of their numbers."""
        if (newest := self.newest()) is None:
            return
        now = time.time()
        while len(self.seen) <= newest and len(self.seen) < len(self.inserted):
            self.seen.append(now - self.inserted[len(self.seen)])

    def newest(self) -> int | None:
        """The greatest number in the table, None without rows."""
        if not (self.table / "_delta_log").is_dir():
            return None
        try:
            held = QueryBuilder().register("held", DeltaTable(str(self.table)))
            rows = pa.table(held.execute(f"SELECT max({self.key}) AS newest FROM held"))
        except Exception:  # the table is being created
            return None
        found = rows["newest"][0].as_py()
        return None if found is None else int(found)


def measured(
    spark: Any,
    uri: str,
    *,
    seconds: float,
    rate: float,
    collections: int,
    into: str,
    is_mix: bool = False,
    is_beside: bool = False,
) -> list[float]:
    """The seconds from insert to visibility, for all inserts."""
    with ground.lakehouse() as root:
        db = f"fresh_{into}_{collections}"
        settings = ground.pipeline(uri, root, **{"collection.include.list": f"{db}[.].*"})
        retyped = dataclasses.replace(settings.silver.defaults, on_conflict=parse.OnConflict.RETYPE)
        silver = dataclasses.replace(settings.silver, collections={f"{db}.{BESIDE}": retyped})
        settings = dataclasses.replace(settings, silver=silver)
        layout, stop = delta.layout(settings.lakehouse), threading.Event()
        names = [f"orders{number}" for number in range(collections)]
        if into == "bronze":
            trials = [Trial(Path(layout.bronze(settings.name).path or ""), "CAST(key AS BIGINT)") for _ in names]
            work: Callable[[], object] = functools.partial(capture.run, spark, settings, stop=stop)
        else:
            trials = [Trial(Path(layout.gold(db, name).path or ""), "_id") for name in names]
            work = functools.partial(layers.run, spark, settings, once=False, stop=stop)
        client = mongodb.client(uri)
        running = threading.Thread(target=work)
        began = time.monotonic()
        for probe in (-2, -1):
            for name in names:
                client[db][name].insert_one({"_id": probe})
            if probe == -2:
                running.start()
            _until(functools.partial(_holds, trials, probe), 240)
        print(f"{collections} collections in {into} after {time.monotonic() - began:.1f} s", flush=True)
        writer = threading.Thread(target=_write, args=(client[db], names, trials, seconds, rate, is_mix))
        beside = threading.Thread(
            target=_write_beside, args=(client[db][BESIDE], seconds if is_beside and into == "gold" else 0.0)
        )
        beside.start()
        writer.start()
        while writer.is_alive() or any(len(trial.seen) < len(trial.inserted) for trial in trials):
            for trial in trials:
                trial.look()
            time.sleep(PAUSE_SECONDS)
        stop.set()
        beside.join()
        running.join()
        client.close()
    return [each for trial in trials for each in trial.seen]


def _write(database: Any, names: Sequence[str], trials: Sequence[Trial], seconds: float, rate: float, is_mix: bool) -> None:
    began, number, rng = time.time(), 0, random.Random(1)
    templates = [json_util.loads(json.dumps(shapes.SHAPES["nested"](rng))) for _ in range(100)] if is_mix else [{}]
    while time.time() - began < seconds:
        turn = number % len(names)
        trial, collection = trials[turn], database[names[turn]]
        kind = (number // len(names)) % 10 if is_mix else 0
        document = {**templates[number % len(templates)], "at": number}
        if kind < INSERTS or not trial.inserted:
            trial.inserted.append(time.time())
            collection.insert_one({"_id": len(trial.inserted) - 1, **document})
        elif kind < INSERTS + UPDATES:
            collection.update_one({"_id": rng.randrange(1 + len(trial.inserted) // 2)}, {"$set": document})
        else:
            collection.delete_one({"_id": rng.randrange(1 + len(trial.inserted) // 2)})
        number += 1
        time.sleep(max(0.0, began + number / rate - time.time()))


def _write_beside(collection: Any, seconds: float) -> None:
    end, rng = time.time() + seconds, random.Random(2)
    while time.time() < end:
        number = rng.randrange(1000)
        collection.insert_one({"v": rng.choice([number, str(number), number + 0.5]), "w": {f"k{number % 30}": number}})
        time.sleep(BESIDE_SECONDS)


def _holds(trials: Sequence[Trial], number: int) -> bool:
    return all(trial.newest() == number for trial in trials)


def _until(predicate: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > end:
            raise TimeoutError("the pipeline did not come up")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=100, help="inserts a second, over all collections")
    parser.add_argument("--collections", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--beside", action="store_true", help="beside a collection whose table is written anew all the time")
    parser.add_argument("--mix", action="store_true", help="nested documents, changed and deleted, too")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench")
    rows = []
    with ground.server() as uri:
        for into, collections in (("bronze", 1), *(("gold", count) for count in arguments.collections)):
            given = {
                "seconds": arguments.seconds,
                "rate": arguments.rate,
                "is_mix": arguments.mix,
                "is_beside": arguments.beside,
            }
            seen = sorted(measured(spark, uri, collections=collections, into=into, **given))
            row = (f"insert → {into}", collections, len(seen), statistics.median(seen), seen[int(len(seen) * 0.95)])
            rows += ground.told([row])
    sparks.stop()
    ground.show("Freshness, seconds", ("way", "collections", "inserts", "p50", "p95"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
