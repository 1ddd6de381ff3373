"""Partial updates as a real server reports them: folding gives the documents of the collection."""

from __future__ import annotations

import contextlib
import datetime
import random
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import bson
import orjson
import pyarrow as pa
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import event_rows as events
from cdc_core.extended_json import bson_to_json
from cdc_core.silver import fold

PADDING = "p" * 3000
"""An update by a pipeline of a smaller document is sent as a replacement, so that no array would be truncated."""

RAW = bson.CodecOptions(document_class=RawBSONDocument)
UPDATES = pa.list_(pa.struct([("sequence", pa.string()), ("updateDescription", bronze.UPDATE_DESCRIPTION)]))

Histories = tuple[list["History"], Counter[str]]
"""The histories of some documents, and how often each part of a description occurred."""


@dataclass(frozen=True)
class History:
    """A document's states as texts, and the updates between them."""

    states: list[str]
    updates: list[dict[str, Any]]


def content(text: str | bytes | None) -> str:
    """The text of a document with its fields sorted."""
    return orjson.dumps(orjson.loads(text or "null"), option=orjson.OPT_SORT_KEYS).decode()


def recorded(collection: Collection[Any], documents: list[Any], operations: Iterator[tuple[int, Any]]) -> Histories:
    """Run the operations one by one; returns each document's history, and how often each part of a description occurred."""
    raw: Any = collection.with_options(codec_options=RAW)
    at: dict[bson.Timestamp | None, str] = {}
    rows = events.EventRows("test")
    with (
        raw.watch(show_expanded_events=True, batch_size=1000) as stream,
        collection.database.client.start_session() as session,
    ):
        collection.insert_many(documents)
        inserted = {str(document["_id"]): content(bson_to_json.dumps(document.raw)) for document in raw.find()}
        for key, operation in operations:
            with contextlib.suppress(OperationFailure):  # a path through a scalar, for example
                changed = raw.find_one_and_update({"_id": key}, operation, return_document=True, session=session)
                after = content(bson_to_json.dumps(changed.raw))
                at.setdefault(session.operation_time, after)  # an update without a change has the time of the one before it
        while (event := stream.try_next()) is not None:
            rows.add(event.raw)
    histories = {key: History([state], []) for key, state in inserted.items()}
    for row in rows.table(batch=1, first_offset=0, ts_ms=0).to_pylist():
        if row["op"] == "u":
            assert row["updateDescription"] is not None, "the document was too small: it came as a replacement"
            seconds, increment = int(row["sequence"][:8], 16), int(row["sequence"][8:16], 16)
            histories[row["key"]].states.append(at[bson.Timestamp(seconds, increment)])
            histories[row["key"]].updates.append({name: row[name] for name in ("sequence", "updateDescription")})
    described = [each["updateDescription"] for one in histories.values() for each in one.updates]
    kinds = Counter(name for description in described for name, content_ in description.items() if content_)
    return [*histories.values()], kinds


def steps(histories: list[History]) -> list[tuple[str, dict[str, Any], str]]:
    """Every update with the states before and after it."""
    return [
        (one.states[number], update, one.states[number + 1])
        for one in histories
        for number, update in enumerate(one.updates)
    ]


def folded(rows: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[tuple[str, bool]]:
    bases, updates = zip(*rows, strict=True)
    columns = [pa.array(map(str, range(len(rows)))), pa.array(bases), pa.array(updates, UPDATES)]
    batch = pa.RecordBatch.from_arrays(columns, names=["__key", "base", "updates"])
    results = [row for of in fold.fold_batch(batch) for row in of.to_pylist()]
    return [(content(row["document"]), row["incomplete"]) for row in results]


# --- the workload ---


NAMES = ("a", "b", "c", "0", "1", "$x", "$oid")


def value(rng: random.Random, names: Sequence[str], depth: int = 0) -> Any:
    """A small value of any shape."""
    shape = rng.random()
    if depth < 3 and shape < 0.3:
        return {name: value(rng, names, depth + 1) for name in rng.sample(names, rng.randrange(min(4, len(names) + 1)))}
    if depth < 3 and shape < 0.55:
        return [value(rng, names, depth + 1) for _ in range(rng.randrange(5))]
    return rng.choice(
        [
            *(None, True, rng.randrange(99), 5.0, -0.0, rng.random(), 1e22, "text", "\u20ac\0"),
            *(bson.Int64(5), bson.Decimal128("1.50"), bson.ObjectId(), bson.Timestamp(1, 2), b"bytes"),
            *(bson.MaxKey(), bson.Code("f", {"a": 1}), bson.Regex("a.b", "i"), float("nan")),
            datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        ]
    )


def path(rng: random.Random) -> str:
    return ".".join(rng.choice(("a", "b", "c", "0", "1", "2", "4")) for _ in range(rng.choice((1, 1, 2, 2, 3))))


def operators(rng: random.Random) -> Any:
    """An update with operators, on one path or two."""
    field, of = path(rng), value(rng, NAMES[:5])
    return rng.choice(
        [
            {"$set": {field: of}},
            {"$set": {field: of, path(rng) + "x": 1}},
            {"$set": {field: of}, "$unset": {path(rng) + "x": 1}},
            {"$unset": {field: ""}},
            {"$push": {field: of}},
            {"$push": {field: {"$each": [of, 1], "$slice": rng.choice((-2, 1, 3))}}},
            {"$pop": {field: rng.choice((1, -1))}},
            {"$pull": {field: {"$type": "number"}}},
            {"$addToSet": {field: of}},
            {"$inc": {field: rng.choice((1, 0.5, bson.Int64(1)))}},
            {"$rename": {field: "renamed"}},
            {"$currentDate": {field: True}},
        ]
    )


def pipeline(rng: random.Random) -> Any:
    """An update by a pipeline: arrays are truncated, and names that begin with a dollar are added and removed."""
    field = rng.choice(("a", "b", "c"))
    cut = {
        "$cond": [
            {"$isArray": f"${field}"},
            {"$slice": [f"${field}", rng.choice((1, 2))]},
            value(rng, ("a", "b")),
        ]
    }
    name = {"$literal": rng.choice(("$x", "$oid"))}
    literal = {"$literal": value(rng, NAMES)}
    return rng.choice(
        [
            [{"$set": {field: cut}}],
            [{"$set": {field: {"$literal": [1, [2, 3, 4, 5], {"a": [1, 2, 3]}]}}}],
            [{"$set": {field: cut}}, {"$unset": rng.choice(("a", "b.0", "c.a"))}],
            [{"$replaceWith": {"$setField": {"field": name, "input": "$$ROOT", "value": literal}}}],
            [{"$replaceWith": {"$unsetField": {"field": name, "input": "$$ROOT"}}}],
        ]
    )


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20)


@pytest.fixture(scope="module")
def histories(mongo: MongoClient[dict[str, Any]]) -> Iterator[Histories]:
    """Forty documents and their histories after three thousand operations."""
    rng, name = random.Random(20), f"test_{uuid.uuid4().hex[:12]}"
    documents = [{"_id": n, "pad": PADDING, **{f: value(rng, NAMES) for f in "abc"}} for n in range(40)]
    operations = ((rng.randrange(40), rng.choice((operators, operators, pipeline))(rng)) for _ in range(3000))
    yield recorded(mongo[name]["anything"], documents, operations)
    mongo.drop_database(name)


def test_updates_of_a_real_server(histories: Histories) -> None:
    """Folding the updates one by one, or all at once, gives the collection's documents with their types."""
    of, kinds = histories
    assert kinds["truncatedArrays"] > 50 and kinds["removedFields"] > 50 and kinds["updatedFields"] > 1000
    whole = [(one.states[0], one.updates) for one in of]
    assert folded(whole) == [(one.states[-1], False) for one in of]
    single = steps(of)
    assert folded([(before, [each]) for before, each, _ in single]) == [(after, False) for _, _, after in single]


def test_a_base_that_is_newer_than_its_updates(histories: Histories, rng: random.Random) -> None:
    """The updates from any state on, in any order, lead from a state that already contains some of them to the last state."""
    rows, expected = [], []
    for one in histories[0]:
        for _ in range(100):
            start = rng.randrange(len(one.updates))
            rest = one.updates[start:]
            rng.shuffle(rest)
            rows.append((rng.choice(one.states[start:]), rest))
            expected.append((one.states[-1], False))
    assert folded(rows) == expected


def with_dots(rng: random.Random) -> Any:
    """A pipeline that sets or removes a name with dots, on top level or in nested documents."""
    name = {"$literal": rng.choice(("x.y", "x.z", "x.y.z"))}
    field = rng.choice(("a", "b"))
    literal = {"$literal": value(rng, ("a", "x.y", "0"), 1)}
    inside = {"$setField": {"field": name, "input": {"$ifNull": [f"${field}", {}]}, "value": literal}}
    return rng.choice(
        [
            [{"$replaceWith": {"$setField": {"field": name, "input": "$$ROOT", "value": literal}}}],
            [{"$replaceWith": {"$unsetField": {"field": name, "input": "$$ROOT"}}}],
            [{"$set": {field: {"$cond": [{"$eq": [{"$type": f"${field}"}, "object"]}, inside, {}]}}}],
            {"$set": {f"{field}.c": value(rng, ("a", "x.y", "0"))}},
            {"$set": {f"{field}.c.a": value(rng, ("a", "x.y", "0"), 2)}},
            {"$unset": {f"{field}.c": ""}},
            {"$set": {"c": rng.randrange(9)}},
        ]
    )


def test_names_with_dots(database: Database[Any], rng: random.Random) -> None:
    """A document with dots in its field names is folded correctly, or marked as incomplete."""
    documents = [{"_id": n, "pad": PADDING, "a": {}, "b": {"c": 1}} for n in range(30)]
    operations = ((rng.randrange(30), with_dots(rng)) for _ in range(2000))
    of, _ = recorded(database["dotted"], documents, operations)
    single = steps(of)
    results = folded([(before, [each]) for before, each, _ in single])
    counts: Counter[str] = Counter()
    for (document, incomplete), (_, _, after) in zip(results, single, strict=True):
        assert incomplete or document == after
        counts["incomplete" if incomplete else "right"] += 1
    assert counts["right"] > 300 and counts["incomplete"] > 100
