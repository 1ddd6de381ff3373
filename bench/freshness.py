"""Freshness: from an insert in MongoDB to its visibility in bronze, and in gold, at one-second commits.

    python -m bench.freshness [--seconds 60] [--rate 200]

A writer inserts at a steady rate; a reader asks the tables for what is new and compares it with the times of the
inserts. Bronze is the capture alone; gold is capture, silver and gold in one application.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import ground
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.mongodb import client as mongodb
from pipelines.silver import run as silver
from pipelines.spark import session as sparks


def measured(
    spark: Any, uri: str, *, seconds: float, rate: float, query: Callable[[Any, Any], int | None], layers: bool
) -> list[float]:
    """Seconds from insert to visibility of the inserts that a reader saw."""
    with ground.lakehouse() as root:
        db = "fresh_gold" if layers else "fresh"
        settings = ground.pipeline(uri, root, **{"collection.include.list": f"{db}.orders"})
        inserted: list[float] = []
        seen: list[float] = []
        stop = threading.Event()
        threads = [threading.Thread(target=capture.run, args=(spark, settings), kwargs={"stop": stop})]
        if layers:
            sessions = sparks.sessions(spark)
            for hop in (silver, gold):
                more = {"once": False, "stop": stop, "sessions": sessions}
                threads.append(threading.Thread(target=hop.run, args=(sessions(), settings), kwargs=more))
        client = mongodb.client(uri)
        client[db].orders.insert_one({"_id": -1})
        for thread in threads:
            thread.start()
        _until(lambda: query(spark, settings) is not None, 120)
        writer = threading.Thread(target=_write, args=(client[db].orders, inserted, seconds, rate))
        writer.start()
        while writer.is_alive() or len(seen) < len(inserted):
            newest = query(spark, settings)
            now = time.time()
            while newest is not None and len(seen) <= newest and len(seen) < len(inserted):
                seen.append(now - inserted[len(seen)])
        stop.set()
        for thread in threads:
            thread.join()
        client.close()
    return seen


def newest_in_bronze(spark: Any, settings: Any) -> int | None:
    """The greatest `_id` in bronze."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    if not delta.exists(spark, table):
        return None
    found = spark.sql(f"SELECT max(CAST(key AS BIGINT)) AS newest FROM {table} WHERE key IS NOT NULL").collect()
    return found[0].newest


def newest_in_gold(spark: Any, settings: Any) -> int | None:
    """The greatest `_id` in gold."""
    table = delta.layout(settings.lakehouse).gold("fresh_gold", "orders")
    if not delta.exists(spark, table):
        return None
    return spark.sql(f"SELECT max(_id) AS newest FROM {table}").collect()[0].newest


def _write(collection: Any, inserted: list[float], seconds: float, rate: float) -> None:
    began = time.time()
    while time.time() - began < seconds:
        number = len(inserted)
        inserted.append(time.time())
        collection.insert_one({"_id": number, "at": number})
        time.sleep(1 / rate)


def _until(predicate: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > end:
            raise TimeoutError("the pipeline did not come up")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200, help="inserts a second")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench")
    rows = []
    with ground.server() as uri:
        for name, query, layers in (("bronze", newest_in_bronze, False), ("gold", newest_in_gold, True)):
            seen = sorted(measured(spark, uri, seconds=arguments.seconds, rate=arguments.rate, query=query, layers=layers))
            rows.append((f"insert → {name}", len(seen), statistics.median(seen), seen[int(len(seen) * 0.95)]))
    sparks.stop()
    ground.show("Freshness, seconds", ("way", "inserts", "p50", "p95"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
