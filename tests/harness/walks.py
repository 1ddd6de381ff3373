"""Starts a capture repeatedly with random changes of settings, signals and source, kills many of the starts, and checks gold.

A walk is one pipeline over one database, drawn from a seed. After it everything is captured with the first settings. Then every
collection that is not reported as incomplete must be in gold as in the source; after a snapshot of all of them, every collection must be.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bson import Decimal128, Int64, MaxKey, MinKey, ObjectId
from pymongo.errors import PyMongoError

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import state as snapshot_state
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.capture import service as capture
from pipelines.channels import signals
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from tests.harness import captures, layers, oracle, sessions

if TYPE_CHECKING:
    from pymongo.database import Database
    from pyspark.sql import SparkSession

COLLECTIONS = ("a", "A", "c.d", "x y")
"""The first two differ only in case, which include and exclude lists ignore."""

Change = Callable[[random.Random, Sequence[str]], dict[str, Any]]
"""``(rng, the names of the collections) -> properties`` of one start."""


def _filtered(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    name = rng.choice(names)
    of_snapshots = "snapshot.collection.filter.overrides"
    return {of_snapshots: name, f"{of_snapshots}.{name}": '{"g": 1}'}


def _scoped(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    target = rng.choice([names[0].partition(".")[0], *names])
    return {"capture.scope": "collection" if "." in target else "database", "capture.target": target}


STAGES = ('{"$match": {"fullDocument.g": {"$ne": 2}}}', '{"$unset": "fullDocument.f"}')
MODES = ("change_streams", "change_streams_update_full", "change_streams_with_pre_image")
CHANGES: Mapping[str, Change] = {
    "included": lambda rng, names: {"collection.include.list": ",".join(rng.sample(names, rng.randint(1, 3)))},
    "excluded": lambda rng, names: {"collection.exclude.list": rng.choice(names)},
    "operations": lambda rng, names: {"skipped.operations": rng.choice(["d", "u", "c", "u,d"])},
    "mode": lambda rng, names: {"capture.mode": rng.choice(MODES)},
    "images": lambda rng, names: {"capture.mode.full.update.type": "post_image"},
    "fields": lambda rng, names: {"field.exclude.list": f"{names[0]}.{rng.choice(['f', 'n.p', 'n'])}"},
    "snapshot mode": lambda rng, names: {"snapshot.mode": rng.choice(["always", "no_data", "when_needed", "initial_only"])},
    "snapshot list": lambda rng, names: {"snapshot.include.collection.list": ",".join(rng.sample(names, 2))},
    "snapshot filter": _filtered,
    "scope": _scoped,
    "stages": lambda rng, names: {"cursor.pipeline": f"[{rng.choice(STAGES)}]"},
    "transactions": lambda rng, names: {"provide.transaction.metadata": True},
}
"""The properties that may change from one start to the next."""


@contextlib.contextmanager
def dying(appends: int, *, after: bool) -> Iterator[None]:
    """Let the process die right before or after the `appends`-th commit of rows: from then on it commits and releases nothing."""
    real, lock, left, is_dead = (
        {name: getattr(Writer, name) for name in ("append_arrow", "mark")},
        threading.Lock(),
        appends,
        False,
    )

    def append(writer: Writer, *args: Any, **named: Any) -> None:
        nonlocal left, is_dead
        with lock:
            left -= 1
            is_dead = is_dead or (left <= 0 and not after)
            if is_dead:
                raise layers.Killed
            real["append_arrow"](writer, *args, **named)
            is_dead = left <= 0
        if is_dead:
            raise layers.Killed

    def mark(writer: Writer, *args: Any, **named: Any) -> None:
        if is_dead:
            raise layers.Killed
        real["mark"](writer, *args, **named)

    Writer.append_arrow, Writer.mark = append, mark  # type: ignore[method-assign]
    try:
        yield
    finally:
        Writer.append_arrow, Writer.mark = real["append_arrow"], real["mark"]  # type: ignore[method-assign]


@dataclass
class Walk:
    """One pipeline, its source, and their random choices."""

    spark: SparkSession
    uri: str
    database: Database[dict[str, Any]]
    root: Path
    seed: int
    say: Callable[[str], None] = lambda text: None
    starts: int = 0
    written: int = 0
    rng: random.Random = field(init=False)
    base: dict[str, Any] = field(init=False)
    changes: list[Change] = field(init=False)
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        names = rng.sample(sorted(CHANGES), rng.randint(1, 4))
        self.say(f"walk {self.seed}: {', '.join(names)}")
        self.changes = [CHANGES[name] for name in names]
        self.base = {
            **captures.QUICK,
            "signal.poll.interval.ms": 100,
            "filters.match.mode": "literal",
            "capture.mode": rng.choice(MODES[:2]),
            "max.batch.size": rng.choice([3, 1000]),
            "commit.max.bytes": rng.choice([1500, 1 << 20]),
            "incremental.snapshot.chunk.size": rng.choice([1, 2, 5]),
        }
        for name in COLLECTIONS:
            self.database[name].insert_many([{"_id": number, **self._document()} for number in range(rng.randint(1, 8))])

    @property
    def names(self) -> list[str]:
        return [f"{self.database.name}.{name}" for name in COLLECTIONS]

    def run(self, starts: int) -> dict[str, Any]:
        """Start the capture `starts` times; returns the faults afterwards, none if all is well."""
        for _ in range(starts):
            self.start()
        return self.faults()

    def start(self) -> None:
        """Change the settings and the source, then start the capture during more changes; it catches up, is stopped, or is killed."""
        rng = self.rng
        if self.starts and rng.random() < 0.65:
            self.given = {
                name: value for each in self.changes if rng.random() < 0.5 for name, value in each(rng, self.names).items()
            }
        found = self._settings(**self.given)
        self._act(found, actions=rng.randint(0, 10))
        stop, is_killed, has_ended = threading.Event(), rng.random() < 0.4, threading.Event()
        ends: list[object] = []

        def run() -> None:
            try:
                ends.append(
                    capture.run(self.spark, found, once=once, take_over=True, stop=stop, sessions=sessions.kept(self.spark))
                )
            except (layers.Killed, errors.MedallionError) as error:
                ends.append(error)
            finally:
                has_ended.set()

        once = rng.random() < 0.5
        with dying(rng.randint(1, 8) if is_killed else 1 << 30, after=rng.random() < 0.5):
            threading.Thread(target=run, daemon=True).start()
            until = time.monotonic() + rng.uniform(0.1, 1.5)
            while time.monotonic() < until:
                self._act(found, actions=1)
                time.sleep(rng.uniform(0, 0.08))
            if not once:
                stop.set()
            assert has_ended.wait(90), "the capture stands still"
        assert ends, "the capture ended with a bug"
        assert not isinstance(ends[0], errors.MedallionError), ends[0]
        self.starts += 1
        self.say(f"  {self.given}: {'killed' if isinstance(ends[0], layers.Killed) else 'caught up' if once else 'stopped'}")
        if rng.random() < 0.3:
            self._layers(found)

    def faults(self) -> dict[str, Any]:
        """The faults: differences that nothing reports, events that are there twice, and what is wrong after a snapshot of everything."""
        found = self._settings()
        captures.once(self.spark, found, take_over=True)
        self._layers(found)
        landed = captures.rows(None, found)
        captures.check_numbers(landed)
        events = Counter((row.resume_token, row.key) for row in landed if row.kind in ("change", "schema_change"))
        faults = {
            "silent": self._differences(found, without=self._incomplete(found)),
            "twice": [event for event, times in events.items() if times > 1],
        }
        for type_, data in (
            ("stop-snapshot", {}),
            ("resume-snapshot", {}),
            ("execute-snapshot", {"data-collections": [".*"]}),
        ):
            self._signal(found, type_, data)
        captures.once(self.spark, found, take_over=True)
        self._layers(found)
        faults["incomplete"] = self._incomplete(found, existing=self.database.list_collection_names())
        faults["behind a snapshot"] = self._differences(found)
        return {name: value for name, value in faults.items() if value}

    def _settings(self, **given: Any) -> Settings:
        source = {**self.base, **given}
        is_listed = "collection.include.list" in source
        # The settings refuse these combinations.
        if is_listed or source.get("capture.scope") == "collection":
            source.pop("collection.exclude.list", None)
        if is_listed:
            source.pop("capture.scope", None)
            source.pop("capture.target", None)
        chosen = {} if is_listed else {"database.include.list": self.database.name}
        return captures.pipeline(self.uri, self.root, self.database.name, **chosen, **source)

    def _layers(self, found: Settings) -> None:
        silver.run(self.spark, found, sessions=sessions.kept(self.spark))
        gold.run(self.spark, found, sessions=sessions.kept(self.spark))

    def _incomplete(self, found: Settings, *, existing: Sequence[str] = COLLECTIONS) -> list[str]:
        """The collections that are reported as incomplete, as a whole or in a row."""
        payloads = bronze_log.gap_and_snapshot_heartbeats(self.spark, captures.table(found))
        told = {name.partition(".")[2] for name in snapshot_state.incomplete(payloads)}
        layout = delta.layout(found.lakehouse)
        for name in COLLECTIONS:
            table = layout.silver(self.database.name, name)
            if delta.exists(self.spark, table) and any(
                row.get("__incomplete") for row in layers.table_rows(self.spark, table)
            ):
                told.add(name)
        return sorted(told.intersection(existing).intersection(COLLECTIONS))

    def _differences(self, found: Settings, *, without: Sequence[str] = ()) -> dict[str, list[str]]:
        layout = delta.layout(found.lakehouse)
        held = {name: layout.gold(self.database.name, name) for name in COLLECTIONS if name not in without}
        there = {name: table for name, table in held.items() if delta.exists(self.spark, table)}
        judged = {name: oracle.compare(self.database[name], table.path or "")[:5] for name, table in there.items()}
        judged |= {name: ["no table"] for name in held if name not in there and self.database[name].find_one() is not None}
        return {name: differences for name, differences in judged.items() if differences}

    # --- changes

    def _act(self, found: Settings, *, actions: int) -> None:
        """Change documents; rarely also change a collection or send a signal."""
        rng = self.rng
        for _ in range(actions):
            with contextlib.suppress(PyMongoError):  # the server refuses some changes
                self._change_document(self.database[rng.choice(COLLECTIONS)])
        if self.starts and rng.random() < 0.06:
            with contextlib.suppress(PyMongoError):
                self._change_collection(rng.choice(COLLECTIONS), rng.choice(COLLECTIONS))
        if self.starts and rng.random() < 0.06:
            type_ = rng.choice(
                ["execute-snapshot", "execute-snapshot", "pause-snapshot", "resume-snapshot", "stop-snapshot"]
            )
            chosen = [rf"\Q{name}\E" for name in rng.sample(self.names, rng.randint(1, 3))]
            data: dict[str, Any] = {"data-collections": chosen}
            if type_ == "execute-snapshot":
                data["type"] = rng.choice(["incremental", "incremental", "blocking"])
                filter_ = rng.choice(['{"g": 1}', '{"$where": "throw 1"}'])
                data |= (
                    {"additional-conditions": [{"data-collection": chosen[0], "filter": filter_}]}
                    if rng.random() < 0.3
                    else {}
                )
            self._signal(found, type_, data)

    def _signal(self, found: Settings, type_: str, data: Mapping[str, Any]) -> None:
        self.say(f"  {type_} {json.dumps(data)}")
        signals.send(self.spark, found, type_=type_, data=data, id_=None, ts_ms=clock.now_ms())

    def _document(self) -> dict[str, Any]:
        self.written += 1
        return {
            "v": self.written,
            "g": self.rng.randrange(3),
            "f": f"f{self.written}",
            "n": {"p": self.written, "q": [1, 2]},
        }

    def _id(self) -> Any:
        n = self.rng.randrange(12)
        every = [
            n,
            Int64(n),
            n + 0.5,
            f"s{n}",
            ObjectId(f"{n:024x}"),
            {"k": n},
            {"a": None},
            {},
            None,
            True,
            Decimal128("0.25"),
        ]
        return self.rng.choice([*every, MinKey(), MaxKey()])

    def _change_document(self, collection: Any) -> None:
        rng, held = self.rng, list(collection.aggregate([{"$sample": {"size": 1}}, {"$project": {"_id": 1}}]))
        chosen = held[0] if held else {"_id": self._id()}
        kind = rng.choice(["insert", "insert", "update", "update", "update", "replace", "delete", "transaction"])
        if kind == "insert":
            collection.insert_one({"_id": self._id(), **self._document()})
        elif kind == "update":
            updates = [{"$set": {"v": self._document()["v"]}}, {"$set": {"n.p": self.written}}, {"$unset": {"f": 1}}]
            collection.update_one(chosen, rng.choice([*updates, {"$push": {"n.q": 5}}, {"$set": {"g": rng.randrange(3)}}]))
        elif kind == "replace":
            collection.replace_one(chosen, self._document())
        elif kind == "delete":
            collection.delete_one(chosen)
        else:
            with self.database.client.start_session() as session, session.start_transaction():
                for each in self.database.list_collection_names():
                    self.database[each].insert_one({"_id": ObjectId(), **self._document()}, session=session)

    def _change_collection(self, name: str, other: str) -> None:
        database, kind = self.database, self.rng.choice(["drop", "rename", "replace", "out", "outside", "away", "swap"])
        self.say(f"  {kind} {name} {other}")
        match kind:
            case "drop":
                database[name].drop()
            case "rename":
                database[name].rename(other)
            case "replace":
                database[name].rename(other, dropTarget=True)
            case "out":
                list(database[name].aggregate([{"$match": {"g": {"$lt": 2}}}, {"$out": other}]))
            case "outside":
                database["elsewhere"].insert_many([{"_id": self._id(), **self._document()}])
                database["elsewhere"].rename(name, dropTarget=True)
            case "away":
                database[name].rename("gone", dropTarget=True)
                database["gone"].drop()
            case _:
                database[name].rename("between", dropTarget=True)
                database[other].rename(name)
                database["between"].rename(other)
