"""From MongoDB to gold, each verb a command of its own, on documents of the shapes that people have.

    python -m bench.end_to_end [--documents 200000] [--shapes flat nested wide sparse mixed] [--seed N] [--indirect]

For each shape: a first load, then a mix of changes (20 inserts, 10 updates and 2 deletes of 32), each by `medallion capture`, `silver`
and `gold`. Wall time is measured with the start of Python and Spark and without it: the start of a verb is a run with nothing to do, at
least a Spark session, which silver and gold do not start then.

Baselines: the raw drains (pymongo's `find` and change stream over raw BSON), and what a Spark user would write by hand over bronze's text
in one session: `from_json` with the right schema, written for the first load and merged for the mix.

With `--indirect` each shape runs again into a lakehouse without direct access to files and log: everything goes through Spark's
statements, as in a catalog; the last column is the rate relative to the direct run. Each row is printed when it is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bson import ObjectId, json_util
from pymongo import DeleteOne, InsertOne, UpdateOne
from pymongo.collection import Collection

from bench import capture, ground, shapes
from pipelines.mongodb import client as mongodb

VERBS = ("capture", "silver", "gold")
OF_THE_MIX = {"insert": 20, "update": 10, "delete": 2}
PORTION = 2000
"""Operations per bulk write."""
SHARE = {"flat": 1.0, "nested": 1.0, "wide": 0.1, "sparse": 0.5, "mixed": 0.5}
"""Documents of a shape, as a share of `--documents`: wide ones are ten times as large."""


@dataclass
class Source:
    """One collection of documents of one shape."""

    collection: Collection[dict[str, Any]]
    shape: str
    seed: int
    next: int = 0
    templates: list[dict[str, Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.shape} {self.seed}")
        texts = (json.dumps(shapes.SHAPES[self.shape](rng)) for _ in range(shapes.POOL))
        self.templates = [json_util.loads(text) for text in texts]

    def insert(self, count: int) -> None:
        """Insert `count` new documents."""
        end = self.next + count
        while self.next < end:
            numbers = range(self.next, min(end, self.next + PORTION))
            self.collection.bulk_write([InsertOne(self._document(number)) for number in numbers], ordered=False)
            self.next = numbers.stop

    def change(self, count: int) -> None:
        """Make `count` inserts, updates and deletes, over keys of the whole collection; each gives one event."""
        rng, weights = random.Random(self.seed), OF_THE_MIX
        held = self.next
        chosen = rng.sample(range(held), count * 2 * OF_THE_MIX["delete"] // sum(weights.values()))
        doomed, deletes = set(chosen), iter(chosen)
        for revision in range(1, count + 1, PORTION):
            size = min(PORTION, count + 1 - revision)
            writes: list[Any] = []
            for number, kind in enumerate(rng.choices(list(weights), list(weights.values()), k=size), revision):
                if kind == "insert":
                    writes.append(InsertOne(self._document(self.next)))
                    self.next += 1
                elif kind == "delete":
                    writes.append(DeleteOne({"_id": _id(next(deletes))}))
                else:
                    stays = next(each for each in iter(lambda: rng.randrange(held), None) if each not in doomed)
                    changed = self._document(stays, number)
                    writes.append(UpdateOne({"_id": changed.pop("_id")}, {"$set": changed}))
            self.collection.bulk_write(writes, ordered=False)

    def _document(self, number: int, version: int = 0) -> dict[str, Any]:
        template = self.templates[(number * 7 + version * 13) % len(self.templates)]
        return {"_id": _id(number), **template, "revision": version}


def _id(number: int) -> ObjectId:
    return ObjectId(f"{shapes.BASE_SECONDS + number // 1000:08x}{number:016x}")


INDIRECT = """
import sys
from jobs import command_line
from pipelines.delta import direct_log, local_log

local_log.folder, direct_log._reached = lambda table: None, lambda *_: "this benchmark has none"
sys.exit(command_line.main())
"""
"""A command without direct access to the tables' files and logs."""


def command(verb: str, config: Path, *, is_direct: bool = True) -> float:
    """Wall seconds of one `medallion` verb."""
    began = time.monotonic()
    program = ["-m", "jobs.command_line"] if is_direct else ["-c", INDIRECT]
    done = subprocess.run(
        [sys.executable, *program, verb, "--config", str(config), "--once"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"medallion {verb} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return time.monotonic() - began


@dataclass
class Measured:
    """Seconds of each verb including its start, and of each verb's start alone."""

    seconds: dict[str, float]
    starts: dict[str, float]

    def rates(self, count: int) -> tuple[float, ...]:
        """Rates per second: of each verb without its start, of all together without and with starts."""
        net = {verb: max(0.01, self.seconds[verb] - self.starts[verb]) for verb in VERBS}
        whole = sum(net.values()), sum(self.seconds.values())
        return (*(count / net[verb] for verb in VERBS), *(count / seconds for seconds in whole))


def measured(config: Path, *, is_direct: bool, starts: dict[str, float] | None) -> Measured:
    """Run each verb once over the new data, and once over nothing, unless `starts` were measured before."""
    seconds = {verb: command(verb, config, is_direct=is_direct) for verb in VERBS}
    if starts is None:
        session = spark_start()
        starts = {verb: max(command(verb, config, is_direct=is_direct), session) for verb in VERBS}
    return Measured(seconds, starts)


def spark_start() -> float:
    """Seconds of a process that creates the session of silver and gold, and runs one query."""
    began = time.monotonic()
    code = "from pipelines.spark import session; session.session('start').range(10).count()"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return time.monotonic() - began


# --- by hand

BY_HAND = "bench_by_hand"


def by_hand(config: Path, namespace: str) -> tuple[float, float]:
    """Seconds of the first load and of the mix, written by hand from bronze's text to a table, in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.end_to_end", "--by-hand", str(config), namespace], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the plain way ended with {done.returncode}:\n{done.stderr[-3000:]}")
    first, mix = json.loads(done.stdout.splitlines()[-1])
    return first, mix


def _by_hand(config: Path, namespace: str) -> int:
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    from pipelines.delta import tables as delta
    from pipelines.settings import file as settings_file
    from pipelines.spark import session as sparks

    settings = settings_file.load(config)
    spark = sparks.session("by hand")
    bronze = delta.layout(settings.lakehouse).bronze(settings.name)
    db, collection = namespace.split(".")
    rows = spark.table(str(bronze)).where(f"db = '{db}' AND collection = '{collection}' AND op IS NOT NULL")
    sample = rows.where("after IS NOT NULL").limit(shapes.POOL).select("after").toPandas()["after"].tolist()
    schema = spark.read.json(spark.sparkContext.parallelize(sample)).schema

    document = ", ".join(f"'{each.name}', {plain(each.dataType, f'd.`{each.name}`')}" for each in schema)

    def typed(found: Any) -> Any:
        parsed = found.withColumn("d", F.from_json("after", schema))
        return parsed.selectExpr("key", "op", f"named_struct({document}) AS document")

    folder = Path(settings.lakehouse.root or "") / BY_HAND
    began = time.monotonic()
    typed(rows.where("op = 'r'")).select("key", "document.*").write.format("delta").save(str(folder))
    first = time.monotonic() - began
    began = time.monotonic()
    newest = Window.partitionBy("key").orderBy(F.desc("sequence"))
    last = rows.where("op <> 'r'").withColumn("n", F.row_number().over(newest)).where("n = 1").drop("n")
    typed(last).select("key", "op", "document.*").createOrReplaceTempView("by_hand")
    names = ["key", *(each.name for each in schema)]
    spark.sql(
        f"MERGE INTO delta.`{folder}` t USING by_hand s ON t.key = s.key WHEN MATCHED AND s.op = 'd' THEN DELETE "
        f"WHEN MATCHED THEN UPDATE SET {', '.join(f't.`{name}` = s.`{name}`' for name in names)} WHEN NOT MATCHED AND s.op <> 'd' THEN "
        f"INSERT ({', '.join(f'`{name}`' for name in names)}) VALUES ({', '.join(f's.`{name}`' for name in names)})"
    ).collect()
    print(json.dumps([first, time.monotonic() - began]))
    return 0


WRAPPED = {
    "$oid": "{}.`$oid`",
    "$numberLong": "CAST({}.`$numberLong` AS BIGINT)",
    "$numberDecimal": "{}.`$numberDecimal`",
    "$date": "timestamp_millis(CAST({}.`$date`.`$numberLong` AS BIGINT))",
}


def plain(kind: Any, value: str, depth: int = 0) -> str:
    """SQL for the value of a column of parsed Extended JSON, without type wrappers."""
    from pyspark.sql import types as T

    if isinstance(kind, T.StructType):
        names = [each.name for each in kind]
        if len(names) == 1 and names[0] in WRAPPED:
            return WRAPPED[names[0]].format(value)
        inner = ", ".join(f"'{each.name}', {plain(each.dataType, f'{value}.`{each.name}`', depth)}" for each in kind)
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({inner}) END"
    if isinstance(kind, T.ArrayType):
        item = f"x{depth}"
        return f"transform({value}, {item} -> {plain(kind.elementType, item, depth + 1)})"
    return value


# --- all of it


def settings(folder: Path, uri: str, db: str, options: Sequence[str] = ()) -> Path:
    """Write the settings of a pipeline with a lakehouse in the folder, with options of silver (`flatten.struct=true`); returns their path."""
    folder.mkdir(exist_ok=True)
    silver = ", ".join(option.replace("=", ": ", 1) for option in options)
    config = folder / "bench.yml"
    config.write_text(
        f"name: bench\nlakehouse: {{root: {folder}/lakehouse}}\nsource:\n"
        f"  mongodb.connection.string: {uri}\n  collection.include.list: {db}.things\nsilver: {{defaults: {{{silver}}}}}\n"
    )
    return config


def shape_rows(
    uri: str, shape: str, *, documents: int, seed: int, indirect: bool = False, options: Sequence[str] = ()
) -> Iterator[ground.Row]:
    """Yields the rows of the first load and of the mix, each followed by the indirect one, then the starts and the rates by hand."""
    db, count = f"bench_{shape}", int(documents * SHARE[shape])
    changes = int(count * 0.64)
    client = mongodb.client(uri)
    try:
        source = Source(client[db]["things"], shape, seed)
        source.insert(count)
        with ground.lakehouse() as root:
            ways = (True, False)[: 1 + indirect]
            configs = {is_direct: settings(root / str(is_direct), uri, db, options) for is_direct in ways}
            found: dict[bool, Measured] = {}
            raw = capture.raw_find(uri, db, "things")
            for what, events in (("first load", count), ("mix", changes)):
                if what == "mix":
                    start = client.admin.command("hello")["$clusterTime"]["clusterTime"]
                    source.change(changes)
                    raw = capture.raw_drain(uri, db, start=start, events=changes)
                for is_direct, config in configs.items():
                    starts = found[is_direct].starts if is_direct in found else None
                    found[is_direct] = measured(config, is_direct=is_direct, starts=starts)
                    rates = found[is_direct].rates(events)
                    share = "" if is_direct else f"{rates[3] / found[True].rates(events)[3]:.2f}"
                    yield (f"{shape}, {what}" + ", indirect" * (not is_direct), events, raw, *rates, share)
            for is_direct, each in found.items():
                starts = each.starts
                way = ", indirect" * (not is_direct)
                yield (f"{shape}, starts (s){way}", "", "", *(starts[verb] for verb in VERBS), sum(starts.values()), "", "")
            for what, seconds in zip(("first load", "mix"), by_hand(configs[True], f"{db}.things")):
                yield (
                    f"{shape}, {what}, by hand *",
                    "",
                    "",
                    "",
                    (count if what == "first load" else changes) / seconds,
                    "",
                    "",
                    "",
                    "",
                )
    finally:
        client.drop_database(db)
        client.close()


COLUMNS = ("documents", "count", "raw drain/s", *(f"{verb}/s" for verb in VERBS), "all/s", "with starts/s", "of direct")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--shapes", nargs="*", default=list(SHARE), choices=list(SHARE))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--indirect", action="store_true", help="once more through Spark's statements alone")
    parser.add_argument("--options", nargs="*", default=[], metavar="OPTION=VALUE", help="of silver, as flatten.struct=true")
    parser.add_argument("--by-hand", nargs=2, metavar=("CONFIG", "NAMESPACE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.by_hand:
        return _by_hand(Path(arguments.by_hand[0]), arguments.by_hand[1])
    with ground.server() as uri:
        found = (
            row
            for shape in arguments.shapes
            for row in shape_rows(
                uri,
                shape,
                documents=arguments.documents,
                seed=arguments.seed,
                indirect=arguments.indirect,
                options=arguments.options,
            )
        )
        rows = list(ground.told(found))
    ground.show(f"MongoDB to gold, seed {arguments.seed}", COLUMNS, rows)
    print("* bronze's text to one table: parsed and written, parsed and merged; to be compared with silver")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
