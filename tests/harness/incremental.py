"""Kills an incremental snapshot of a large collection during writes, then compares gold with the source."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc
from pymongo import MongoClient
from pymongo.collection import Collection

from tests.harness import kills, oracle, processes

NAME = "measurements"
BATCH = 10_000
THREADS = 3


@dataclass
class Outcome:
    """The result; `faults` is empty if gold equals the source."""

    documents: int = 0
    changes: int = 0
    kills: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def run(
    pipeline: processes.Pipeline,
    *,
    documents: int = 1_000_000,
    rounds: int = 2,
    rate: float = 300,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Fill the collection before the capture starts, which takes no initial snapshot; a signal requests one."""
    begun, outcome = time.monotonic(), Outcome()
    with MongoClient(pipeline.uri) as client:
        collection = client[pipeline.database][NAME]
        for start in range(0, documents, BATCH):
            some = range(start, min(start + BATCH, documents))
            collection.insert_many([_document(number) for number in some], ordered=False)
        say(f"{documents:,} documents are there")
        running, stop, writers = pipeline.command("run"), threading.Event(), _Writers(collection, documents, rate)
        with processes.all_killed(running):
            running.start()
            _until(lambda: processes.version(pipeline.bronze) >= 1, "the capture has begun", running)
            threads = [threading.Thread(target=writers.write, args=(number, stop)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            try:
                asked = pipeline.command("signal", "execute-snapshot", "--data-collections", f"{pipeline.database}.{NAME}")
                assert asked.run() == 0, asked.said[-3000:]
                say("the snapshot is asked for")
                for number in range(rounds):
                    wanted = documents * (number + 1) // (rounds + 1)
                    _until(lambda wanted=wanted: _read(pipeline) >= wanted, "the snapshot goes on", running)
                    running.kill()
                    outcome.kills += 1
                    say(f"killed after {_read(pipeline):,} documents of the snapshot")
                    running.start()
                _until(lambda: _is_completed(pipeline), "the snapshot is complete", running)
                say("the snapshot is complete")
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            running.terminate()
            assert running.wait(300) == 0, running.said[-3000:]
        kills.caught_up(pipeline, times=1)
        say("the pipeline has caught up")
        outcome.changes = writers.changes
        outcome.documents = collection.count_documents({})
        outcome.faults = _differences(collection, pipeline)
    outcome.seconds = time.monotonic() - begun
    return outcome


def _document(number: int) -> dict[str, Any]:
    return {"_id": number, "n": 0, "text": f"{number:x}" * 20}


@dataclass
class _Writers:
    """Threads that update, replace, delete and insert documents anywhere in the collection."""

    collection: Collection[dict[str, Any]]
    documents: int
    rate: float
    changes: int = 0

    def write(self, thread: int, stop: threading.Event) -> None:
        rng = random.Random(thread)
        new = self.documents + thread
        while not stop.wait(THREADS / self.rate):
            number = rng.randrange(self.documents)
            match rng.randrange(8):
                case 0:
                    self.collection.delete_one({"_id": number})
                case 1:
                    self.collection.insert_one(_document(new))
                    new += THREADS
                case 2:
                    self.collection.replace_one({"_id": number}, {"n": -1, "text": "replaced"}, upsert=True)
                case _:
                    self.collection.update_one({"_id": number}, {"$inc": {"n": 1}, "$set": {"text": f"{rng.random()}"}})
            self.changes += 1


def _until(predicate: Callable[[], bool], what: str, running: processes.Command) -> None:
    processes.until(predicate, seconds=900, what=what, alive=[running])


def _read(pipeline: processes.Pipeline) -> int:
    """The number of snapshot rows in bronze."""
    return int(pc.sum(pc.equal(oracle.read(pipeline.bronze, columns=["kind"])["kind"], "snapshot")).as_py() or 0)


def _is_completed(pipeline: processes.Pipeline) -> bool:
    table = oracle.read(pipeline.bronze, columns=["kind", "payload"])
    beats = table.filter(pc.equal(table["kind"], "heartbeat"))["payload"]
    return any('"completed":true' in payload.replace(" ", "") for payload in beats.to_pylist() if payload)


def _differences(collection: Collection[dict[str, Any]], pipeline: processes.Pipeline) -> list[str]:
    gold = oracle.read(pipeline.gold(NAME), columns=["_id", "n", "text"]).to_pylist()
    found = {row["_id"]: row for row in gold}
    faults = [f"{len(gold) - len(found)} rows are there twice"] if len(gold) != len(found) else []
    for document in collection.find():
        row = found.pop(document["_id"], None)
        if row != document:
            faults.append(f"{document['_id']}: {document} in the source, {row} in gold")
    return [*faults, *(f"{number}: in gold, not in the source" for number in found)][:20]
