"""Capture: change stream to committed bronze, and snapshot to committed bronze, beside the raw drains.

    python -m bench.capture [--events 200000] [--sizes "1 KB" "3.6 KB"] [--only stream|snapshot]

The baseline of the stream is pymongo's change stream over raw BSON, without decoding; that of the snapshot is a raw `find`. Both are
measured in the same run, on the same documents. mongod shares the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS
from bson.timestamp import Timestamp

from bench import ground
from pipelines.capture import service as capture
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from pipelines.spark import session as sparks

WARM_UP = 100_000
"""Documents that are captured before the measurement: enough to give every executor a chunk."""


def raw_drain(uri: str, db: str, *, start: Timestamp, events: int) -> float:
    """Events per second of pymongo's change stream over raw BSON, with update lookup."""
    client = mongodb.client(uri)
    try:
        database = client.get_database(db, codec_options=DEFAULT_RAW_BSON_OPTIONS)
        began, seen = time.perf_counter(), 0
        with database.watch(start_at_operation_time=start, full_document="updateLookup") as stream:
            while seen < events:
                if stream.try_next() is not None:
                    seen += 1
        return events / (time.perf_counter() - began)
    finally:
        client.close()


def raw_find(uri: str, db: str, collection: str) -> float:
    """Documents per second of a raw `find` over the whole collection."""
    client = mongodb.client(uri)
    try:
        began = time.perf_counter()
        batches = client[db][collection].find_raw_batches({}, batch_size=100_000)
        size = sum(len(batch) for batch in batches)
        count = client[db][collection].estimated_document_count()
        assert size > 0
        return count / (time.perf_counter() - began)
    finally:
        client.close()


def stream_rate(spark: object, uri: str, *, db: str, size: int, events: int) -> tuple[float, float]:
    """Rates of the raw drain and of the capture to committed bronze, in events per second."""
    client = mongodb.client(uri)
    client[db].create_collection("orders")
    start = mongodb_server.operation_time(client)
    client.close()
    with ground.lakehouse() as root:
        settings = ground.pipeline(uri, root, **{"collection.include.list": f"{db}.orders", "snapshot.mode": "no_data"})
        capture.run(spark, settings, once=True)  # the position before the documents
        ground.insert(uri, (db, "orders"), count=events, size=size)
        raw = raw_drain(uri, db, start=start, events=events)
        result = capture.run(spark, settings, once=True)
        assert result.events == events, (result.events, events)
    return raw, events / result.seconds


def snapshot_rate(spark: object, uri: str, *, db: str, events: int) -> tuple[float, float]:
    """Rates of a raw find and of the snapshot to committed bronze, in documents per second."""
    raw = raw_find(uri, db, "orders")
    with ground.lakehouse() as root:
        settings = ground.pipeline(uri, root, **{"collection.include.list": f"{db}.orders"})
        result = capture.run(spark, settings, once=True)
        assert result.snapshot_documents == events, (result.snapshot_documents, events)
    return raw, events / result.seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200_000, help="documents of up to 1 KB; larger ones are fewer")
    parser.add_argument("--sizes", nargs="*", default=list(ground.SIZES), choices=list(ground.SIZES))
    parser.add_argument("--only", choices=["stream", "snapshot"])
    arguments = parser.parse_args(argv)
    rows = []
    spark = sparks.session("bench", conf={"spark.driver.memory": "2g"})
    with ground.server() as uri:
        warm = "warm"
        stream_rate(spark, uri, db=warm, size=400, events=WARM_UP)
        snapshot_rate(spark, uri, db=warm, events=WARM_UP)
        for label in arguments.sizes:
            size = ground.SIZES[label]
            events = min(arguments.events, int(arguments.events * 1000 / size) if size > 1000 else arguments.events)
            db = f"size{size}"
            if arguments.only != "snapshot":
                raw, ours = stream_rate(spark, uri, db=db, size=size, events=events)
                rows.append((f"stream, inserts of {label}", events, raw, ours, ours / raw))
            else:
                ground.insert(uri, (db, "orders"), count=events, size=size)
            if arguments.only != "stream":
                raw, ours = snapshot_rate(spark, uri, db=db, events=events)
                rows.append((f"snapshot, {label}", events, raw, ours, ours / raw))
            client = mongodb.client(uri)
            client.drop_database(db)
            client.close()
    sparks.stop()
    ground.show("Capture to committed bronze", ("work", "documents", "raw drain/s", "ours/s", "ratio"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
