"""Silver: events from bronze to the merged table, beside a plain append and a plain MERGE of the same rows.

    python -m bench.silver [--rows 1000000] [--events 200000] [--rounds 3] [--partial]

A table of documents of 1 KB gets updates with the whole document, over uniform and over recent-heavy keys. The baselines, in the same
run: parsing the same events and appending them to a Delta table; and `MERGE … UPDATE SET * … INSERT *` of the same rows, already parsed
and reduced to one per key, into a plain Delta table of the same documents. Both are warmed up. Because a JVM becomes faster for minutes,
and machines vary, kinds and contestants alternate in rounds, and the medians count. With `--partial` the updates only contain the changes,
which silver folds onto its stored documents; the plain MERGE gets the resulting rows.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import ground
from cdc_core.bronze import columns
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import resume_token
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog
from pipelines.silver import run as silver
from pipelines.snapshot import bronze_rows, chunks
from pipelines.spark import session as sparks

DB, COLLECTION = "bench", "orders"
CHUNK = 50_000
BASE_SECONDS = 1_700_000_000
WARM_UP = 25_000
"""Updates that both merge before the measurement: a JVM's first MERGE compiles for seconds."""
PLAIN_SCHEMA = (
    "_id STRUCT<`$oid`: STRING>, number INT, total DOUBLE, placed STRUCT<`$date`: STRUCT<`$numberLong`: STRING>>, "
    "points STRUCT<`$numberLong`: STRING>, paid BOOLEAN, customer STRUCT<name: STRING, city: STRING>, "
    "lines ARRAY<STRUCT<sku: STRING, quantity: INT>>, note STRING, comment STRING"
)
PLAIN_COLUMNS = """
    d._id.`$oid` AS _id, d.number, d.total, timestamp_millis(CAST(d.placed.`$date`.`$numberLong` AS BIGINT)) AS placed,
    CAST(d.points.`$numberLong` AS BIGINT) AS points, d.paid, d.customer, d.lines, d.note, d.comment
"""


class Documents:
    """The texts of documents of 1 KB, by number and version."""

    def __init__(self, seed: int = 1) -> None:
        rng = random.Random(seed)
        self._texts = ["".join(rng.choices(string.ascii_letters, k=700)) for _ in range(500)]

    def key(self, number: int) -> str:
        return f'{{"$oid":"{BASE_SECONDS + number // 1000:08x}{number:016x}"}}'

    def text(self, number: int, version: int) -> str:
        letters = self._texts[(number * 7 + version * 13) % len(self._texts)]
        return (
            f'{{"_id":{self.key(number)},"number":{number},"total":{number % 977}.25,'
            f'"placed":{{"$date":{{"$numberLong":"{1_700_000_000_000 + number}"}}}},'
            f'"points":{{"$numberLong":"{number * 3}"}},"paid":{"true" if version % 2 else "false"},'
            f'"customer":{{"name":"{letters[:160]}","city":"{letters[160:180]}"}},'
            f'"lines":[{{"sku":"{letters[200:208]}","quantity":{version}}},{{"sku":"{letters[208:216]}","quantity":2}}],'
            f'"note":"{letters[220:540]}","comment":"{letters[540:700]}{version}"}}'
        )

    def change(self, number: int, version: int) -> dict[str, Any]:
        """An update's description: a changed field, one in an array, a new field, and a removed one."""
        letters = self._texts[(number * 7 + version * 13) % len(self._texts)]
        fields = f'{{"paid":{"true" if version % 2 else "false"},"lines.0.quantity":{version},"comment":"{letters[540:700]}","seen":{version}}}'
        return {"updatedFields": fields, "removedFields": ["points"], "truncatedArrays": []}


def fill(log: bronze.BronzeLog, documents: Documents, *, rows: int, start: int = 0, name: str = COLLECTION) -> None:
    """Commit a snapshot of the documents from number `start` to `rows`."""
    collection = catalog.SourceCollection(DB, name, None)
    state = snapshot_state.SnapshotState("bench", (f"{DB}.{name}",))
    log.heartbeat(state.begun(), token=token(0), ts_ms=0)
    for first in range(start, rows, CHUNK):
        numbers = range(first, min(first + CHUNK, rows))
        chunk = pa.table(
            {
                "key": [documents.key(n) for n in numbers],
                "after": [documents.text(n, 0) for n in numbers],
                "payload": [None for _ in numbers],
            },
            schema=chunks.ROWS,
        )

        def numbered(batch: int, first: int, chunk: pa.Table = chunk) -> pa.Table:
            found = bronze_rows.snapshot_rows(
                chunk, name="bench", collection=collection, at=(BASE_SECONDS, 1), label="snapshot:bench:1",
                batch=batch, first_offset=first, ts_ms=0,
            )  # fmt: skip
            beat = bronze.heartbeat_row({}, token=token(0), batch=batch, offset=first + len(found), ts_ms=0)
            return pa.concat_tables([found, beat])

        log.append(numbered)


def update(
    log: bronze.BronzeLog,
    documents: Documents,
    numbers: Sequence[int],
    *,
    version: int,
    is_partial: bool = False,
    names: Sequence[str] = (COLLECTION,),
    chunk: int = CHUNK,
) -> None:
    """Commit updates with the whole document, or only with the changes, `chunk` at a time, of these collections in turn."""
    for start in range(0, len(numbers), chunk):
        some = numbers[start : start + chunk]

        def numbered(batch: int, first: int, some: Sequence[int] = some, start: int = start) -> pa.Table:
            count = len(some)
            values: dict[str, Any] = {
                "resume_token": [token(version * 10_000_000 + start + i) for i in range(count)],
                "offset": range(first, first + count),
                "batch": [batch] * count,
                "kind": [columns.RowKind.CHANGE.value] * count,
                "op": [columns.Op.UPDATE.value] * count,
                "db": [DB] * count,
                "collection": [names[(start + i) % len(names)] for i in range(count)],
                "key": [documents.key(n) for n in some],
                "sequence": [
                    resume_token.sequence(resume_token.TokenPosition(BASE_SECONDS + version, start + i, 0))
                    for i in range(count)
                ],
                "ts_ms": [0] * count,
            }
            if is_partial:
                values["updateDescription"] = [documents.change(n, version) for n in some]
            else:
                values["after"] = [documents.text(n, version) for n in some]
            arrays = [
                pa.array(values[f.name], f.type) if f.name in values else pa.nulls(count, f.type) for f in columns.SCHEMA
            ]
            return pa.Table.from_arrays(arrays, schema=columns.SCHEMA)

        log.append(numbered)


def token(number: int) -> str:
    """A token that sorts by its number."""
    return f"82{BASE_SECONDS + number // 1_000_000:08X}{number % 1_000_000:08X}2B022C0100296E04"


def chosen(kind: str, *, rows: int, events: int, turn: int = 0) -> list[int]:
    """The numbers of documents to update: `uniform`, or mostly the newest ones."""
    rng = random.Random(f"{kind} {turn}")
    if kind == "uniform":
        return [rng.randrange(rows) for _ in range(events)]
    return [max(0, rows - 1 - int(rng.expovariate(1 / (rows / 20)))) for _ in range(events)]


def events_of(spark: Any, table: Any, batches: tuple[int, int]) -> Any:
    """The updates of bronze batches (a, b], parsed, as plain columns with key and sequence."""
    spark.sql(
        f"SELECT key, sequence, from_json(after, '{PLAIN_SCHEMA}') AS d FROM {table} "
        f"WHERE batch > {batches[0]} AND batch <= {batches[1]} AND op = 'u'"
    ).createOrReplaceTempView("bench_events")
    return spark.sql(f"SELECT key, sequence, {PLAIN_COLUMNS} FROM bench_events")


def timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Turn:
    """The number of keys in one batch of updates, and each contestant's seconds; `appended` is 0 if it was not run."""

    keys: int
    appended: float
    merged: float
    ours: float


@dataclass
class Contest:
    """Silver's table and a plain one, brought from the same bronze to the same state batch by batch."""

    spark: Any
    root: Path
    log: bronze.BronzeLog
    settings: Settings
    rows: int
    is_partial: bool
    documents: Documents = field(default_factory=Documents)
    version: int = 0

    def loaded(self) -> float:
        """Seconds of silver's first load; also creates the plain table."""
        fill(self.log, self.documents, rows=self.rows)
        seconds = timed(self._silver)
        self.plain = plain_table(self.spark, self.root, self.log.table)
        return seconds

    def turn(self, kind: str, count: int) -> Turn:
        """Apply the next batch of `count` updates to both; for the plain MERGE they are parsed and reduced beforehand."""
        self.version += 1
        before = bronze.newest(self.spark, self.log.table).batch
        numbers = chosen(kind, rows=self.rows, events=count, turn=self.version)
        update(self.log, self.documents, numbers, version=self.version, is_partial=self.is_partial)
        reduced, parsed = f"{self.root}/reduced{self.version}", f"{self.root}/appended{self.version}"
        appended = 0.0
        if not self.is_partial:
            found = events_of(self.spark, self.log.table, (before, bronze.newest(self.spark, self.log.table).batch))
            appended = timed(lambda: found.write.format("delta").save(parsed))
            last = f"SELECT max_by(struct(*), sequence) AS last FROM delta.`{parsed}` GROUP BY key"
            self.spark.sql(f"SELECT last.* FROM ({last})").drop("key", "sequence").write.format("delta").save(reduced)
        ours = timed(self._silver)
        if self.is_partial:
            silver_table = self.spark.table(str(delta.layout(self.settings.lakehouse).silver(DB, COLLECTION)))
            rows = silver_table.where(f"`__batch` > {before}")
            rows.select(self.spark.table(self.plain).columns).write.format("delta").save(reduced)
        merged = timed(lambda: merge_plainly(self.spark, self.plain, reduced))
        keys = self.spark.table(f"delta.`{reduced}`").count()
        for folder in (reduced, parsed):
            shutil.rmtree(folder, ignore_errors=True)
        return Turn(keys, appended, merged, ours)

    def _silver(self) -> None:
        silver.run(self.spark, self.settings, sessions=sparks.sessions(self.spark))


def measured(spark: Any, root: Path, *, rows: int, events: int, rounds: int, is_partial: bool) -> Iterator[ground.Row]:
    """Rows of the result: work, keys, rates of append, plain MERGE and ours, and ours over MERGE."""
    mode = {"capture.mode": "change_streams"} if is_partial else {}
    settings = ground.pipeline("mongodb://127.0.0.1", root, **{"collection.include.list": f"{DB}.{COLLECTION}", **mode})
    log = bronze.BronzeLog.open(spark, delta.layout(settings.lakehouse).bronze("bench"))
    contest = Contest(spark, root, log, settings, rows, is_partial)
    yield (f"first load of {rows:,}", rows, "", "", rows / contest.loaded(), "")
    contest.turn("uniform", WARM_UP)
    turns: dict[str, list[Turn]] = {"uniform": [], "recent-heavy": []}
    for number in range(1, rounds + 1):
        for kind, those in turns.items():
            those.append(contest.turn(kind, events))
            yield _told(f"{kind} updates, round {number}", those[-1:], events)
    for kind, those in turns.items():
        yield _told(f"{kind} updates, median", those, events)
    log.close()


def _told(work: str, turns: Sequence[Turn], events: int) -> ground.Row:
    """A row with the medians of some turns."""
    keys, appended, merged, ours = (statistics.median(each) for each in zip(*map(astuple, turns)))
    return (work, int(keys), events / appended if appended else "", events / merged, events / ours, merged / ours)


def plain_table(spark: Any, root: Path, bronze_table: Any) -> str:
    """Create a plain Delta table of the documents of bronze's snapshot; returns its name in SQL."""
    spark.sql(f"SELECT key, from_json(after, '{PLAIN_SCHEMA}') AS d FROM {bronze_table} WHERE kind = 'snapshot'").selectExpr(
        *_expressions()
    ).write.format("delta").mode("overwrite").save(f"{root}/plain")
    return f"delta.`{root}/plain`"


def merge_plainly(spark: Any, plain: str, reduced: str) -> None:
    """The usual MERGE, of parsed rows with one row per key."""
    spark.sql(
        f"MERGE INTO {plain} t USING delta.`{reduced}` s ON t._id = s._id "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    ).collect()


def _expressions() -> list[str]:
    found, depth, current = [], 0, ""
    for sign in PLAIN_COLUMNS.replace("\n", " "):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += sign
    return [*found, current.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--partial", action="store_true", help="updates that say what changed, folded onto what silver keeps"
    )
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "4g"})
    with ground.lakehouse() as root:
        results = measured(
            spark, root, rows=arguments.rows, events=arguments.events, rounds=arguments.rounds, is_partial=arguments.partial
        )
        rows = list(ground.told(results))
    sparks.stop()
    ground.show(
        "Bronze to silver, documents of 1 KB, events/s",
        ("work", "keys", "parse and append", "plain MERGE", "ours", "ours / MERGE"),
        rows,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
