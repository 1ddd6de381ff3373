"""Operations over every document of a collection, from MongoDB to gold, each verb a command of its own.

    python -m bench.whole_collections [--documents 100000] [--shape nested] [--seed N]

The operations of a migration: increment a field, add one, rename it, change a type, remove a field; then delete most documents and insert
them again, update and delete them before the capture looks them up, and drop the collection. The baselines, in the same run: the raw drain
(pymongo's change stream over raw BSON), and the first operation, which does not change the schema: the last column is the rate relative to
it. Rates are without the start of Python and Spark. Each row is printed when it is measured.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pymongo.collection import Collection

from bench import capture, end_to_end, ground
from pipelines.mongodb import client as mongodb

Operation = Callable[[Collection[dict[str, Any]]], object]
UPDATES: dict[str, Operation] = {
    "$inc of a field": lambda held: held.update_many({}, {"$inc": {"revision": 1}}),
    "$set of a new field": lambda held: held.update_many({}, {"$set": {"extra.deep": [1, 2, {"a": "x"}]}}),
    "$rename": lambda held: held.update_many({}, {"$rename": {"extra": "other"}}),
    "another type": lambda held: held.update_many({}, [{"$set": {"revision": {"$toString": "$revision"}}}]),
    "$unset": lambda held: held.update_many({}, {"$unset": {"other": 1}}),
}


def update_and_delete(held: Collection[dict[str, Any]], ids: Sequence[Any]) -> None:
    """Update documents and delete them before a capture can look them up."""
    held.update_many({"_id": {"$in": ids}}, {"$inc": {"revision": 1}})
    held.delete_many({"_id": {"$in": ids}})


DROP = "drop"
"""One event, which removes every row."""


def operation_rows(uri: str, shape: str, *, documents: int, seed: int) -> Iterator[ground.Row]:
    """Yields a row for each operation."""
    db = "bench_whole"
    client = mongodb.client(uri)
    try:
        source = end_to_end.Source(client[db]["things"], shape, seed)
        source.insert(documents)
        held = source.collection
        gone = [
            each["_id"] for each in held.aggregate([{"$sample": {"size": documents * 6 // 10}}, {"$project": {"_id": 1}}])
        ]
        again = [*held.find({"_id": {"$in": gone}})]
        operations: list[tuple[str, int, Operation]] = [
            *((name, documents, operation) for name, operation in UPDATES.items()),
            ("delete_many of 60 %", len(gone), lambda held: held.delete_many({"_id": {"$in": gone}})),
            ("insert of the same", len(gone), lambda held: held.insert_many(again, ordered=False)),
            ("$inc of 60 %, then deleted", 2 * len(gone), lambda held: update_and_delete(held, gone)),
            (DROP, documents, lambda held: held.drop()),
        ]
        with ground.lakehouse() as root:
            config = end_to_end.settings(root / "whole", uri, db)
            starts = end_to_end.measured(config, is_direct=True, starts=None).starts  # and the first load
            plain = 0.0
            for name, events, operation in operations:
                before = client.admin.command("hello")["$clusterTime"]["clusterTime"]
                operation(held)
                raw = "" if name == DROP else capture.raw_drain(uri, db, start=before, events=events)
                rates = end_to_end.measured(config, is_direct=True, starts=starts).rates(events)
                plain = plain or rates[3]
                yield (f"{shape}, {name}", events, raw, *rates[:4], f"{rates[3] / plain:.2f}")
    finally:
        client.drop_database(db)
        client.close()


COLUMNS = ("operation", "documents", "raw drain/s", *(f"{verb}/s" for verb in end_to_end.VERBS), "all/s", "of the first")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--shape", default="nested", choices=list(end_to_end.SHARE))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args(argv)
    with ground.server() as uri:
        found = operation_rows(uri, arguments.shape, documents=arguments.documents, seed=arguments.seed)
        rows = list(ground.told(found))
    ground.show(f"Operations over every document, seed {arguments.seed}", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
