"""Verify: a collection compared with gold while it is written to, beside a full export and a comparison by hand.

    python -m bench.verify [--documents 1000000] [--writes 200] [--size 400]

The baseline is the comparison by hand: stop writing, export the whole collection, read the whole table, compare in one process. It only
works without writers. mongod shares the machine. Each row also has the load on the source, from its own counters: documents read and
returned by queries, and bytes sent, to compare with the size of the collection; with concurrent writes they include the pipeline's and
the writer's.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench import ground
from pipelines import run as layers
from pipelines.capture import service as capture
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.mongodb import client as mongodb
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from pipelines.verify import run as verify
from pipelines.verify.result import CollectionVerification

DB, COLLECTION = "verify", "orders"
COMPARED = ("number", "total", "points", "paid", "customer", "lines", "note", "comment")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--writes", type=float, default=200, help="updates a second beside the comparison; 0 for none")
    parser.add_argument("--size", type=int, default=400, help="bytes a document")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "3g"})
    rows: list[tuple[Any, ...]] = []
    with ground.server() as uri, ground.lakehouse() as root:
        settings = ground.pipeline(uri, root, **{"collection.include.list": f"{DB}.{COLLECTION}"})
        ground.insert(uri, (DB, COLLECTION), count=arguments.documents, size=arguments.size)
        for layer in (capture, silver, gold):
            layer.run(spark, settings, once=True, sessions=sparks.sessions(spark))
        client = mongodb.client(uri)
        size = client[DB].command("collStats", COLLECTION)["size"] / 1e6
        before = load(client)
        seconds, differing = by_hand(spark, uri, settings)
        rows.append(("by hand, nobody writes", arguments.documents, seconds, differing, "", *since(before, client)))
        for options in ({}, {"sample": 1000}):
            before = load(client)
            quiet = verify.run(spark, settings, verify.VerifyOptions(**options)).collections[0]
            name = "verify, nobody writes" if not options else "verify --sample 1000, nobody writes"
            rows.append((*told(name, quiet), *since(before, client)))
        if arguments.writes:
            before = load(client)
            found = told(f"verify beside {arguments.writes:.0f} writes a second", beside(spark, uri, settings, arguments))
            rows.append((*found, *since(before, client)))
        client.close()
    sparks.stop()
    columns = ("work", "documents", "seconds", "reported", "on their way", "read", "returned", "MB sent")
    ground.show(f"Source against gold: a collection of {size:,.0f} MB", columns, rows)
    return 0


def load(client: Any) -> tuple[int, int, int]:
    """The source's counters since it started: documents read by queries, documents returned, and bytes sent."""
    status = client.admin.command("serverStatus")
    metrics = status["metrics"]
    return metrics["queryExecutor"]["scannedObjects"], metrics["document"]["returned"], status["network"]["bytesOut"]


def since(before: tuple[int, int, int], client: Any) -> tuple[Any, ...]:
    """The difference of `load` since `before`, bytes in megabytes."""
    scanned, returned, sent = (now - then for now, then in zip(load(client), before))
    return scanned, returned, sent / 1e6


def told(name: str, found: CollectionVerification) -> tuple[Any, ...]:
    wrong = found.missing + found.extra + found.different
    return name, found.documents, found.seconds, wrong, found.waiting + found.changing


def by_hand(spark: Any, uri: str, settings: Any) -> tuple[float, int]:
    """Seconds and the number of differing documents of a comparison in one process, document by document."""
    began = time.perf_counter()
    client = mongodb.client(uri)
    exported = {str(document["_id"]): document for document in client[DB][COLLECTION].find()}
    client.close()
    table = delta.layout(settings.lakehouse).gold(DB, COLLECTION)
    differing = 0
    for batch in spark.table(str(table)).drop("__key", "__rescued").toArrow().to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            document = exported.pop(row["_id"], {})
            differing += any(document.get(name) != row[name] for name in COMPARED)
    return time.perf_counter() - began, differing + len(exported)


def beside(spark: Any, uri: str, settings: Any, arguments: argparse.Namespace) -> CollectionVerification:
    """A comparison while the pipeline runs and a writer updates random documents."""
    stop = threading.Event()
    pipeline = threading.Thread(target=lambda: layers.run(spark, settings, once=False, stop=stop))
    writer = threading.Thread(target=lambda: write(uri, arguments.writes, stop))
    pipeline.start()
    writer.start()
    try:
        time.sleep(10)
        return verify.run(spark, settings, verify.VerifyOptions()).collections[0]
    finally:
        stop.set()
        writer.join()
        pipeline.join()


def write(uri: str, rate: float, stop: threading.Event) -> None:
    client = mongodb.client(uri)
    collection = client[DB][COLLECTION]
    ids = [each["_id"] for each in collection.aggregate([{"$sample": {"size": 5000}}, {"$project": {"_id": 1}}])]
    number = 0
    while not stop.wait(1 / rate):
        collection.update_one({"_id": ids[number % len(ids)]}, {"$set": {"touched": number}})
        number += 1
    client.close()


if __name__ == "__main__":
    raise SystemExit(main())
