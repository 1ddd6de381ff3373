"""Gold: from silver's documents to the tables of current documents, beside a plain copy and a plain MERGE of the same rows.

    python -m bench.gold [--rows 300000] [--events 60000] [--sizes 100000 1000000 5000000] [--changes 20000]

Silver's tables are written directly, so that only gold is measured: nested documents of 1 KB (thirty values, an array of eight documents)
for the first load and for mixes of inserts, updates and deletes, and short documents for the cost of a batch as the table grows. The
baselines, in the same run: reading and writing the same columns again, and `MERGE … UPDATE SET * … INSERT *` of the same rows into a copy.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import ground
from bench.silver import COLLECTION, DB, timed
from cdc_core.settings.parse import Settings
from pipelines.bronze import registry
from pipelines.delta import ops_tables, query_execution
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.silver import tables as silver_tables
from pipelines.spark import session as sparks

FIRST_LOOKS = 8
"""A service reads a large table's keys several times before it caches their places (`pipelines.delta.key_index`)."""

NESTED = """
    substr(h, 1, 24) AS customer_id, substr(h, 3, 24) AS cart_id, concat('ORD-', id) AS number, concat('status', id % 7 + v) AS status,
    CAST(id % 90000 AS INT) AS quantity, id * 3000000000 + v AS points, id % 977 + 0.25D AS total, CAST(id % 31 AS DOUBLE) / 3 AS discount,
    concat(id % 100000, '.', 10 + id % 90) AS price, concat(id % 1000, '.5') AS tax, id % 2 = 0 AS paid, id % 3 = 0 AS gift,
    timestamp_millis(1700000000000 + id) AS placed, timestamp_millis(1700000000000 + id * 7) AS shipped,
    substr(h, 5, 40) AS note, concat(substr(h, 2, 12), '@example.org') AS email, concat('+49', id) AS phone, 'EUR' AS currency,
    substr(h, 7, 30) AS comment, CAST(v AS INT) AS version,
    named_struct('name', substr(h, 1, 18), 'tier', id % 5, 'address', named_struct('street', substr(h, 4, 20), 'city', concat('city', id % 1000),
      'zip', concat(10000 + id % 80000), 'place', named_struct('lat', id % 90 + 0.5D, 'lon', id % 180 + 0.25D))) AS customer,
    named_struct('source', concat('web', id % 9), 'campaign', substr(h, 9, 10), 'seen', timestamp_millis(1690000000000 + id)) AS origin,
    transform(sequence(1, 8), n -> named_struct('sku', substr(h, n, 10), 'quantity', CAST(n AS INT), 'price', id % 50 + n / 4.0D,
      'ref', substr(h, n, 24), 'weight', concat(n, '.', id % 100), 'added', timestamp_millis(1690000000000 + id * n))) AS lines
"""
SHORT = "concat('status', id % 7 + v) AS status, CAST(id % 90000 AS INT) AS quantity, id % 977 + 0.25D AS total, substr(h, 1, 40) AS note"
ENGINE = "false AS __incomplete, CAST(NULL AS STRING) AS __known, CAST(NULL AS MAP<STRING, STRING>) AS __rescued"


@dataclass
class Silver:
    """A collection's silver table and its remembered deletes, written batch by batch without bronze."""

    spark: Any
    settings: Settings
    columns: str
    batch: int = 0

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.table = self.layout.silver(DB, COLLECTION)
        self.deletes = self.layout.deletes(DB, COLLECTION)
        silver_tables.create(self.spark, self.table)
        silver_tables.create_deletes(self.spark, self.deletes)
        self.writer = Writer.claim(self.spark, self.table)
        added = [each for each in self.rows([0]).schema if not each.name.startswith("__")]
        self.writer.alter(f"ADD COLUMNS ({', '.join(f'{each.name} {each.dataType.simpleString()}' for each in added)})")
        registry.note(self.spark, self.settings, new=[registry.Namespace(DB, COLLECTION)], discovered=0, log=None)

    def rows(self, numbers: Sequence[int] | range) -> Any:
        """The rows of the documents with these numbers in the current batch."""
        if isinstance(numbers, range):
            found = self.spark.range(numbers.start, numbers.stop)
        else:
            found = self.spark.createDataFrame(pa.table({"id": pa.array(numbers, pa.int64())}))
        named = found.selectExpr("id", f"{self.batch} AS v", f"concat(sha2(concat(id, '/', {self.batch}), 256), md5(concat(id, 'x'))) AS h", "substr(sha2(concat('k', id), 256), 1, 24) AS _id")  # fmt: skip
        named.createOrReplaceTempView("bench_documents")
        return self.spark.sql(
            f"SELECT _id, {self.columns}, {ENGINE}, concat('{{\"$oid\":\"', _id, '\"}}') AS __key, '{self._sequence()}' AS __sequence, "
            f"CAST({self.batch} AS BIGINT) AS __batch FROM bench_documents"
        )

    def _sequence(self) -> str:
        return f"{1_700_000_000 + self.batch:08x}{1:08x}{0:08x}"

    def _extra(self) -> dict[str, object]:
        return registry.SilverPosition(self.batch, self._sequence()).extra

    def load(self, numbers: range) -> None:
        """Append documents in a new batch."""
        self.batch += 1
        self.writer.append(self.rows(numbers), to=self.batch, extra=self._extra())

    def change(self, written: Sequence[int], removed: Sequence[int] = ()) -> None:
        """Upsert and delete documents in a new batch."""
        self.batch += 1
        rows = query_execution.materialized(self.rows(list(written)))
        gone = self.rows(list(removed)).select("__key", "__sequence", "__batch") if removed else None
        if gone is not None:
            ops_tables.append_rows(self.spark, self.deletes, gone.toArrow())
        touched = rows.select("__key") if gone is None else rows.select("__key").union(gone.select("__key"))
        assert self.writer.upsert(rows, touched=touched, to=self.batch, extra=self._extra()) is not None


@dataclass
class Contest:
    """Gold, and a plain copy of the same columns, brought to the same state."""

    spark: Any
    root: Path
    silver: Silver

    def __post_init__(self) -> None:
        self.copy = f"delta.`{self.root}/copy`"

    def gold(self) -> float:
        return timed(lambda: gold.run(self.spark, self.silver.settings, sessions=sparks.sessions(self.spark)))

    def copied(self) -> float:
        """Seconds of reading and writing silver's columns."""
        rows = self._plain(self.spark.table(str(self.silver.table)))
        return timed(lambda: rows.write.format("delta").mode("overwrite").save(f"{self.root}/copy"))

    def merged(self) -> float:
        """Seconds of a plain MERGE of the rows that silver's last batch wrote."""
        rows = self.spark.table(str(self.silver.table)).where(f"__batch = {self.silver.batch}")
        self._plain(rows).write.format("delta").mode("overwrite").save(f"{self.root}/reduced")
        return timed(
            lambda: self.spark.sql(
                f"MERGE INTO {self.copy} t USING delta.`{self.root}/reduced` s ON t.__key = s.__key "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            ).collect()
        )

    def _plain(self, rows: Any) -> Any:
        return rows.select([name for name in rows.columns if not name.startswith("__")] + ["__key"])


def _begun(spark: Any, root: Path, columns: str) -> Contest:
    settings = ground.pipeline("mongodb://127.0.0.1", root)
    return Contest(spark, root, Silver(spark, settings, columns))


def nested(spark: Any, root: Path, *, rows: int, events: int, rounds: int) -> Iterator[ground.Row]:
    """A first load, and mixes: of eight changes five inserts, two updates and a delete."""
    warm = _begun(spark, root / "warm", NESTED)
    warm.silver.load(range(20_000))
    warm.gold(), warm.copied()
    contest = _begun(spark, root / "nested", NESTED)
    contest.silver.load(range(rows))
    ours, copied = contest.gold(), contest.copied()
    yield (f"first load of {rows:,}", rows / ours, rows / copied, copied / ours)
    rng = random.Random(7)
    for turn in range(rounds):
        inserts = list(range(rows, rows + events * 5 // 8))
        old = rng.sample(range(rows), events - len(inserts))
        updates, deletes = old[: events // 4], old[events // 4 :]
        rows += len(inserts)
        contest.silver.change(inserts + updates, deletes)
        ours, merged = contest.gold(), contest.merged()
        yield (f"a mix of {events:,} over {rows:,}, round {turn + 1}", events / ours, events / merged, merged / ours)


def growth(spark: Any, root: Path, *, sizes: Sequence[int], changes: int) -> Iterator[ground.Row]:
    """A batch of updates of random keys, for each size of table."""
    contest = _begun(spark, root, SHORT)
    filled, first = 0, None
    for size in sizes:
        contest.silver.load(range(filled, size))
        filled = size
        contest.gold(), contest.copied()
        rng, found = random.Random(size), []
        for turn in range(FIRST_LOOKS + 4):
            contest.silver.change(rng.sample(range(size), changes))
            found.append((contest.gold(), contest.merged() if turn >= FIRST_LOOKS else 0.0))
        ours, merged = sorted(found[1 + FIRST_LOOKS :])[1]
        first = first or ours
        yield (f"{changes:,} updates over {size:,}: seconds {ours:.2f}, {ours / first:.2f} of the first", changes / ours, changes / merged, merged / ours)  # fmt: skip
        contest.silver.change(rng.sample(range(size), 1))
        one, plain = contest.gold(), contest.merged()
        yield (f"one update over {size:,}: seconds {one:.2f}", 1 / one, 1 / plain, plain / one)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000, help="0 for no nested documents")
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--changes", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "3g"})
    rows: list[ground.Row] = []
    with ground.lakehouse() as root:
        if arguments.rows:
            rows += ground.told(nested(spark, root, rows=arguments.rows, events=arguments.events, rounds=arguments.rounds))
        if arguments.sizes:
            rows += ground.told(growth(spark, root / "growth", sizes=arguments.sizes, changes=arguments.changes))
    sparks.stop()
    ground.show("Silver to gold, documents/s", ("work", "ours", "plain copy or MERGE", "ours / plain"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
