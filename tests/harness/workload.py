"""Runs a seeded random workload on a MongoDB: five collections, every kind of change, every BSON type.

    python -m tests.harness.workload mongodb://127.0.0.1:27017 --operations 20000 --seed 1 --threads 4 --database shop

The threads change the same documents: one is updated while another thread deletes it, is inserted again, replaced, and changed twice in one
transaction. Operations that the server refuses (a conflict, a path through a scalar) are counted and skipped. The seed determines the
operations and their values, but not how threads interleave.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import signal
import string
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bson
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteOne, InsertOne, MongoClient, ReplaceOne, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, InvalidOperation, OperationFailure

COLLECTIONS = ("customers", "orders", "stock.levels", "readings", "anything")
"""`stock.levels` has a dot in its name, `anything` has `_id`s, values and field names of every kind."""

DOCUMENTS = 400
"""The number of documents per collection that the threads share; inserts of new ones use higher numbers."""

UTC = datetime.UTC
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)

Document = dict[str, Any]
Random = random.Random


@dataclass(frozen=True)
class Plan:
    """The size of a run: the number of changed documents, the seed, the number of threads, and the maximum rate in documents a second."""

    operations: int = 20_000
    seed: int = 1
    threads: int = 4
    database: str = "shop"
    rate: float = 0
    odd_names: bool = True
    big_bytes: int = 300_000


@dataclass
class Progress:
    """The progress of a run, shared by its threads."""

    total: int
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, documents: int) -> None:
        with self.lock:
            self.done += documents
            self.counts[name] += documents

    @property
    def share(self) -> float:
        return min(1.0, self.done / max(1, self.total))


# --- values -------------------------------------------------------------------------------------------------


def text(rng: Random, length: int = 8) -> str:
    """Mostly letters; sometimes text that is hard to encode."""
    if rng.random() < 0.1:
        return rng.choice(
            (
                "",
                " ",
                "a\0b",
                "é ß ñ",
                "漢字",
                "x😊y",
                'a"b\\c',
                "line\nbreak\ttab",
                "\u2028",
                "null",
                "1",
                "NaN",
            )
        )
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, length)))


def double(rng: Random) -> float:
    return rng.choice(
        (
            rng.uniform(-1e3, 1e3),
            rng.random() * 10 ** rng.randint(-300, 300),
            1.0,
            -0.0,
            0.1,
            1e22,
            5e-324,
            2.0**53,
        )
        + (float("nan"), float("inf"), float("-inf"))
    )


def date(rng: Random) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=UTC) + datetime.timedelta(milliseconds=rng.randrange(-(2**41), 2**42))


def decimal(rng: Random) -> Decimal128:
    return Decimal128(
        rng.choice(
            (
                f"{rng.randrange(10**6)}.{rng.randrange(100):02d}",
                "1.50",
                "1E+3",
                "0E-10",
                "-0",
                "NaN",
                "Infinity",
            )
        )
    )


def small(rng: Random) -> Document:
    """A document of two or three fields."""
    found: Document = {"city": text(rng), "zip": rng.randrange(100_000)}
    if rng.random() < 0.5:
        found["geo"] = {"lat": round(rng.uniform(-90, 90), 6), "lon": round(rng.uniform(-180, 180), 6)}
    return found


def items(rng: Random) -> list[Any]:
    """An array of documents of similar shape."""
    return [
        {"sku": text(rng, 5), "quantity": rng.randrange(10)} | ({"note": text(rng)} if rng.random() < 0.3 else {})
        for _ in range(rng.randrange(5))
    ]


VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda rng: rng.randrange(-(2**31), 2**31),
    lambda rng: Int64(rng.choice((rng.randrange(100), rng.randrange(-(2**63), 2**63), 2**53 + 1, 2**63 - 1))),
    double,
    decimal,
    text,
    lambda rng: rng.random() < 0.5,
    lambda rng: None,
    date,
    lambda rng: DatetimeMS(rng.choice((-(2**63), 2**63 - 1, 253402300800000, -62135596800001, -1))),
    lambda rng: Timestamp(rng.randrange(2**32), rng.randrange(2**32)),
    lambda rng: ObjectId(rng.randbytes(12)),
    lambda rng: uuid.UUID(int=rng.getrandbits(128)),
    lambda rng: Binary(rng.randbytes(rng.randrange(20)), rng.choice((0, 1, 2, 5, 128))),
    lambda rng: Regex(text(rng).replace("\0", ""), rng.choice(("", "i", "imsx"))),
    lambda rng: Code("function() { return 1; }"),
    lambda rng: Code("f(y)", {"y": 1, "z": Int64(2)}),
    lambda rng: MinKey(),
    lambda rng: MaxKey(),
    lambda rng: DBRef("customers", rng.randrange(100), "shop"),
    lambda rng: {},
    lambda rng: [],
    small,
    items,
    lambda rng: {"a": None, "b": {"c": None}},
    lambda rng: {"a": 1, "A": "upper"},
    lambda rng: {"$numberLong": "5"},
    lambda rng: [1, "x", None, {"b": 1}, [1.5, []]],
    lambda rng: [[1, 2], [], [3]],
    lambda rng: [{"b": 1}, {"b": "x"}, {"c": [1, {"d": 2.5}]}],
    lambda rng: {f"k{rng.randrange(50)}": rng.randrange(10)},
)
"""One generator for each kind of value that pymongo can write."""

RARE: tuple[bytes, ...] = (
    b"\x0erare\0" + struct.pack("<i", 4) + b"sym\0",
    b"\x06rare\0",
    b"\x0crare\0" + struct.pack("<i", 2) + b"c\0" + bytes(range(12)),
    b"\x01rare\0" + bytes.fromhex("010000000000f87f"),
)
"""A field `rare` as raw BSON: symbol, undefined, dbPointer, and a NaN with a payload, which pymongo cannot write."""

ODD_NAMES = (
    "Name",
    "name",
    "NAME",
    "a b",
    "x.y",
    "",
    "€uro",
    "tab\there",
    "semi;colon",
    "p(q)=r,{s}",
    "`tick`",
    "__key",
    "$in",
)


def any_value(rng: Random) -> Any:
    return rng.choice(VALUES)(rng)


def with_rare(rng: Random, document: Document) -> RawBSONDocument:
    """The document with a field that only raw BSON can express."""
    body = bson.encode(document, codec_options=CODEC)[4:-1] + rng.choice(RARE)
    return RawBSONDocument(struct.pack("<i", len(body) + 5) + body + b"\0")


# --- documents ----------------------------------------------------------------------------------------------


def identity(rng: Random, collection: str, number: int) -> Any:
    """The `_id` of a document, determined by its number, except that equal numbers come in any numeric type."""
    if collection == "customers":
        return ObjectId(struct.pack(">Q", number).rjust(12, b"\x5f"))
    if collection == "orders":
        return number
    if collection == "stock.levels":
        return f"sku-{number:06d}"
    if collection == "readings":
        return {"sensor": number % 7, "at": number // 7}
    return any_identity(rng, number)


def any_identity(rng: Random, number: int) -> Any:
    special = (
        None,
        True,
        False,
        "",
        float("nan"),
        MinKey(),
        MaxKey(),
        Timestamp(1, 1),
        Code("f"),
        -0.0,
        float("inf"),
    )
    if number < len(special):
        return special[number]
    match number % 10:
        case 0:
            return ObjectId(struct.pack(">Q", number).rjust(12, b"\0"))
        case 1:
            return text(Random(number)) + str(number)
        case 2 | 3:
            same: Sequence[Any] = (number, Int64(number), float(number), Decimal128(str(number)))
            return rng.choice(same)
        case 4:
            return rng.choice((number + 0.5, Decimal128(f"{number}.5")))
        case 5:
            return datetime.datetime(2020, 1, 1, tzinfo=UTC) + datetime.timedelta(seconds=number)
        case 6:
            return uuid.UUID(int=number)
        case 7:
            return {"n": rng.choice((number, Int64(number))), "t": "x"}
        case 8:
            return Decimal128(f"{number}.1")
        case _:
            return Int64(2**53 + number)


def drifting(rng: Random, share: float) -> Any:
    """A value that is an int32 at first, then an int64, then a double, and finally a string."""
    number = rng.randrange(1000)
    return (number, Int64(2**40 + number), number + 0.25, f"n{number}")[min(3, int(share * 4))]


def document(rng: Random, collection: str, plan: Plan, share: float) -> Document:
    """The fields of a document, without `_id`."""
    found: Document = {"name": text(rng), "drift": drifting(rng, share), "seen": date(rng)}
    if rng.random() < 0.3:
        found[f"since_{int(share * 10)}"] = rng.choice((rng.randrange(100), text(rng), round(rng.random(), 3)))
    match collection:
        case "customers":
            found |= {
                "address": small(rng),
                "tags": [text(rng) for _ in range(rng.randrange(4))],
                "vip": rng.random() < 0.1,
            }
        case "orders":
            found |= {
                "total": Decimal128(f"{rng.randrange(10**4)}.{rng.randrange(100):02d}"),
                "items": items(rng),
            }
            found |= {"customer": ObjectId(rng.randbytes(12)), "address": rng.choice((small(rng), None, {}))}
        case "stock.levels":
            found |= {
                "levels": {f"w{n}": rng.randrange(100) for n in range(rng.randrange(4))},
                "price": double(rng),
            }
        case "readings":
            found |= {
                "value": rng.choice((rng.randrange(100), double(rng), Int64(rng.randrange(100)))),
                "raw": rng.randbytes(8),
            }
        case _:
            found |= {f"v{rng.randrange(8)}": any_value(rng) for _ in range(4)}
            found[f"only_{VALUES.index(rng.choice(VALUES))}"] = any_value(rng)
            if plan.odd_names:
                found |= {rng.choice(ODD_NAMES): rng.randrange(100) for _ in range(2)}
    if rng.random() < 0.0005:
        found["big"] = "x" * rng.randrange(plan.big_bytes)
    return found


def change(rng: Random, collection: str, share: float) -> Any:
    """One update: operators, or a pipeline."""
    match rng.randrange(16):
        case 0:
            return {"$set": {"name": text(rng), "drift": drifting(rng, share)}}
        case 1:
            return {"$set": {"address.city": text(rng), "address.geo.lat": rng.random()}}
        case 2:
            return {"$set": {f"address.more.f{rng.randrange(4)}": rng.choice((1, "one", 1.5, None))}}
        case 3:
            return {"$unset": {rng.choice(("name", "address.zip", "address.geo", "address", "drift", "tags.0")): ""}}
        case 4:
            return {"$push": {"items": {"sku": text(rng), "quantity": rng.randrange(9), "gift": True}}}
        case 5:
            return {"$push": {"tags": {"$each": [text(rng), text(rng)], "$slice": -6}}}
        case 6:
            return {"$pull": {"items": {"quantity": {"$lt": 5}}}}
        case 7:
            return {"$pop": {rng.choice(("tags", "items")): rng.choice((1, -1))}}
        case 8:
            return {"$set": {f"items.{rng.randrange(3)}.quantity": rng.choice((7, 7.5, "seven"))}}
        case 9:
            return {"$set": {f"tags.{rng.randrange(6)}": text(rng)}}
        case 10:
            return {"$inc": {"visits": 1, "address.zip": rng.choice((1, Int64(1), 0.5))}}
        case 11:
            return {"$rename": {"name": "title"}}
        case 12:
            return [
                {"$set": {"copied": "$name", "count": {"$size": {"$ifNull": ["$items", []]}}}},
                {"$unset": "raw"},
            ]
        case 13:
            return {"$set": {f"v{rng.randrange(8)}": any_value(rng)}} if collection == "anything" else {"$set": {"n": None}}
        case 14:
            return {
                "$set": {
                    rng.choice(("address", "tags", "items", "levels")): rng.choice(
                        (small(rng), items(rng), [], {}, "none", 5)
                    )
                }
            }
        case _:
            return {"$set": {"name": text(rng)}, "$unset": {"old": ""}, "$currentDate": {"changed": True}}


# --- operations ---------------------------------------------------------------------------------------------


class Writer:
    """One thread of a run."""

    def __init__(self, client: MongoClient[Document], plan: Plan, progress: Progress, thread: int) -> None:
        self.client, self.plan, self.progress = client, plan, progress
        self.rng = Random(plan.seed * 1009 + thread)
        self.db = client.get_database(plan.database, codec_options=CODEC)
        self.fresh = DOCUMENTS + thread
        self.deleted: list[tuple[str, int]] = []

    def run(self) -> None:
        """Perform random operations until the run's total is reached or the run is stopped."""
        begun = time.monotonic()
        names, weights = zip(*OPERATIONS.items(), strict=True)
        own = 0
        while not self.progress.stopped.is_set() and self.progress.done < self.progress.total:
            operation = self.rng.choices(names, weights)[0]
            try:
                count = operation(self)
                name = operation.__name__
            except (OperationFailure, InvalidOperation, bson.errors.BSONError) as error:
                count, name = _applied(error), "refused"
            self.progress.add(name, count)
            self.progress.counts["refusals"] += name == "refused"
            own += count
            if self.plan.rate:
                ahead = own / (self.plan.rate / self.plan.threads) - (time.monotonic() - begun)
                self.progress.stopped.wait(max(0.0, ahead))

    def pick(self) -> tuple[Collection[Document], str, Any]:
        """A collection, its name, and the `_id` of one of its shared documents, popular ones more often."""
        name = self.rng.choice(COLLECTIONS)
        number = int(DOCUMENTS * self.rng.random() ** 2)
        return self.db[name], name, identity(self.rng, name, number)

    def document(self, name: str) -> Document:
        return document(self.rng, name, self.plan, self.progress.share)

    def new(self, name: str) -> Document:
        """A document with a new number, which no other thread uses."""
        self.fresh += self.plan.threads
        return {"_id": identity(self.rng, name, self.fresh), **self.document(name)}

    def transact(self, work: Callable[[ClientSession], int], *, abort: bool = False) -> int:
        with self.client.start_session() as session:
            with session.start_transaction():
                count = work(session)
                if abort:
                    session.abort_transaction()
                    return 0
            return count


def insert(writer: Writer) -> int:
    collection, name, _ = writer.pick()
    found = writer.new(name)
    collection.insert_one(with_rare(writer.rng, found) if writer.rng.random() < 0.1 else found)
    return 1


def insert_many(writer: Writer) -> int:
    collection, name, _ = writer.pick()
    found = [writer.new(name) for _ in range(writer.rng.randint(2, 30))]
    return len(collection.insert_many(found, ordered=False).inserted_ids)


def update(writer: Writer) -> int:
    collection, name, key = writer.pick()
    return collection.update_one({"_id": key}, change(writer.rng, name, writer.progress.share)).modified_count


def upsert(writer: Writer) -> int:
    collection, name, key = writer.pick()
    collection.update_one({"_id": key}, {"$set": writer.document("customers"), "$setOnInsert": {"first": 1}}, upsert=True)
    return 1


def update_and_delete(writer: Writer) -> int:
    collection, name, key = writer.pick()
    done = collection.update_one({"_id": key}, {"$set": {"last": text(writer.rng)}}).modified_count
    return done + collection.delete_one({"_id": key}).deleted_count


def update_many(writer: Writer) -> int:
    collection, _, _ = writer.pick()
    match = {"drift": {"$gt": writer.rng.randrange(1000), "$lt": 1000}}
    keys = [found["_id"] for found in collection.find(match, {"_id": 1}).limit(10)]
    return collection.update_many({"_id": {"$in": keys}}, {"$inc": {"visits": 1}}).modified_count


def find_and_update(writer: Writer) -> int:
    collection, name, key = writer.pick()
    return int(collection.find_one_and_update({"_id": key}, {"$set": {"name": text(writer.rng)}}) is not None)


def replace(writer: Writer) -> int:
    collection, name, key = writer.pick()
    found = writer.document(name)
    if writer.rng.random() < 0.5:
        found = {"_id": key, **found}
    return collection.replace_one({"_id": key}, found).modified_count


def delete(writer: Writer) -> int:
    collection, _, key = writer.pick()
    return collection.delete_one({"_id": key}).deleted_count


def put_back(writer: Writer) -> int:
    """Insert one of the shared documents: the first time, or again after its delete."""
    collection, name, key = writer.pick()
    collection.insert_one({"_id": key, **writer.document(name)})
    return 1


def delete_and_insert(writer: Writer) -> int:
    collection, name, key = writer.pick()
    gone = collection.delete_one({"_id": key}).deleted_count
    collection.insert_one({"_id": key, **writer.document(name)})
    return gone + 1


def bulk(writer: Writer) -> int:
    collection, name, _ = writer.pick()
    requests: list[Any] = []
    for _ in range(writer.rng.randint(2, 12)):
        key = identity(writer.rng, name, int(DOCUMENTS * writer.rng.random()))
        match writer.rng.randrange(4):
            case 0:
                requests.append(InsertOne(writer.new(name)))
            case 1:
                requests.append(UpdateOne({"_id": key}, change(writer.rng, name, writer.progress.share)))
            case 2:
                requests.append(ReplaceOne({"_id": key}, writer.document(name), upsert=True))
            case _:
                requests.append(DeleteOne({"_id": key}))
    done = collection.bulk_write(requests, ordered=False)
    return done.inserted_count + done.modified_count + done.deleted_count + done.upserted_count


def transaction(writer: Writer) -> int:
    """Changes in several collections, some documents twice, in one transaction."""

    def work(session: ClientSession) -> int:
        count = 0
        for _ in range(writer.rng.randint(2, 6)):
            collection, name, key = writer.pick()
            done = collection.replace_one({"_id": key}, writer.document(name), upsert=True, session=session)
            count += 1
            done = collection.update_one({"_id": key}, {"$set": {"name": text(writer.rng)}}, session=session)
            count += done.modified_count
            if writer.rng.random() < 0.3:
                count += collection.delete_one({"_id": key}, session=session).deleted_count
        return count

    return writer.transact(work, abort=False)


def aborted_transaction(writer: Writer) -> int:
    """Changes that are rolled back, and must never be captured."""

    def work(session: ClientSession) -> int:
        collection, name, key = writer.pick()
        collection.replace_one({"_id": key}, {"aborted": True}, upsert=True, session=session)
        other, _, another = writer.pick()
        other.delete_one({"_id": another}, session=session)
        return 2

    return writer.transact(work, abort=True)


OPERATIONS: Mapping[Callable[[Writer], int], int] = {
    insert: 20,
    insert_many: 2,
    put_back: 12,
    update: 36,
    upsert: 3,
    update_and_delete: 3,
    update_many: 1,
    find_and_update: 3,
    replace: 8,
    delete: 6,
    delete_and_insert: 4,
    bulk: 3,
    transaction: 3,
    aborted_transaction: 1,
}


def _applied(error: Exception) -> int:
    """The number of documents that a bulk write changed although the server refused a part of it."""
    if not isinstance(error, BulkWriteError):
        return 0
    return sum(int(error.details.get(name, 0)) for name in ("nInserted", "nModified", "nRemoved", "nUpserted"))


def start(uri: str, plan: Plan) -> tuple[Progress, list[threading.Thread]]:
    """Start the threads of a run; each ends by itself, or soon after `progress.stopped` is set."""
    progress = Progress(plan.operations)

    def write(thread: int) -> None:
        with MongoClient(uri, uuidRepresentation="standard") as client:
            Writer(client, plan, progress, thread).run()

    threads = [threading.Thread(target=write, args=(n,), name=f"writer-{n}") for n in range(plan.threads)]
    for thread in threads:
        thread.start()
    return progress, threads


def run(uri: str, plan: Plan) -> Progress:
    """Run the workload to its end."""
    progress, threads = start(uri, plan)
    for thread in threads:
        thread.join()
    return progress


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.workload", description=__doc__.splitlines()[0])
    parser.add_argument("uri")
    parser.add_argument("--operations", type=int, default=Plan.operations, help="documents to change")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--database", default=Plan.database)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="documents a second at most, 0 for no bound")
    arguments = parser.parse_args(argv)
    uri = arguments.uri
    plan = Plan(**{name: value for name, value in vars(arguments).items() if name != "uri"})
    begun = time.monotonic()
    progress, threads = start(uri, plan)
    signal.signal(signal.SIGTERM, lambda *_: progress.stopped.set())
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    print(json.dumps({"documents": progress.done, "seconds": round(seconds, 1), "counts": progress.counts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
