"""Silver: what a batch costs as the table grows, as documents grow wider, and as collections grow more.

    python -m bench.silver_growth [--rows 100000 1000000 5000000] [--events 20000] [--fields 300] [--collections 50]

Measures a batch of updates over tables of increasing size, a batch of documents with many fields, and a batch with events of many
collections, each beside a plain MERGE of the same rows, already parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import ground
from bench.silver import COLLECTION, DB, Documents, chosen, events_of, fill, merge_plainly, plain_table, timed, update
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.silver import run as silver
from pipelines.spark import parallel
from pipelines.spark import session as sparks

COMMITS, IN_A_COMMIT = 390, 20
"""The commits of some minutes that silver was not running. Every four hundred, the capture compacts them."""


class Wide(Documents):
    """Documents with many fields: numbers, strings and dates."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.fields = fields

    def text(self, number: int, version: int) -> str:
        parts = [f'"_id":{self.key(number)}']
        for field in range(self.fields):
            value = number + field + version
            match field % 3:
                case 0:
                    parts.append(f'"n{field}":{value % 100_000}')
                case 1:
                    parts.append(f'"t{field}":"{value:08x}"')
                case _:
                    parts.append(f'"d{field}":{{"$date":{{"$numberLong":"{1_700_000_000_000 + value}"}}}}')
        return "{" + ",".join(parts) + "}"


def _begun(spark: Any, root: Path, **source: Any) -> tuple[bronze.BronzeLog, Any]:
    settings = ground.pipeline("mongodb://127.0.0.1", root, **source)
    return bronze.BronzeLog.open(spark, delta.layout(settings.lakehouse).bronze("bench")), settings


def _ours(spark: Any, settings: Any) -> float:
    return timed(lambda: silver.run(spark, settings, sessions=sparks.sessions(spark)))


def growth(spark: Any, root: Path, *, sizes: Sequence[int], events: int) -> Iterator[ground.Row]:
    """A batch of updates for each size of table."""
    documents, version, filled = Documents(), 0, 0
    log, settings = _begun(spark, root)
    for rows in sizes:
        fill(log, documents, rows=rows, start=filled)
        filled = rows
        _ours(spark, settings)
        plain = plain_table(spark, root, log.table)
        for is_warm in (False, True):
            version += 1
            before = bronze.newest(spark, log.table).batch
            update(log, documents, chosen("uniform", rows=rows, events=events, turn=version), version=version)
            parsed = events_of(spark, log.table, (before, bronze.newest(spark, log.table).batch))
            reduced = f"{root}/reduced{version}"
            parsed.dropDuplicates(["key"]).drop("key", "sequence").write.format("delta").save(reduced)
            ours = _ours(spark, settings)
            merged = timed(lambda reduced=reduced, plain=plain: merge_plainly(spark, plain, reduced))
            if is_warm:
                yield (f"{events:,} updates over {rows:,} rows", events, merged, ours, merged / ours)
    log.close()


class Plain:
    """Plain copies of silver's tables, brought to the same state by one MERGE each of the rows of silver's batch."""

    def __init__(self, spark: Any, root: Path, settings: Any, names: Sequence[str]) -> None:
        self.spark, self.root = spark, root
        layout = delta.layout(settings.lakehouse)
        self.silver = {name: str(layout.silver(DB, name)) for name in names}
        for name in names:
            self._rows(name, "true").write.format("delta").save(f"{root}/plain/{name}")

    def merged(self, after: int) -> float:
        """Seconds of the MERGEs of the rows that silver wrote after a batch, as many in parallel as in silver."""
        for name in self.silver:
            self._rows(name, f"`__batch` > {after}").write.format("delta").mode("overwrite").save(self._reduced(name))
        return timed(self._merge)

    def _merge(self) -> None:
        with ThreadPoolExecutor(parallel.THREADS) as pool:
            for done in [pool.submit(self._merge_one, name) for name in self.silver]:
                done.result()

    def _merge_one(self, name: str) -> None:
        merge_plainly(self.spark, f"delta.`{self.root}/plain/{name}`", self._reduced(name))

    def _reduced(self, name: str) -> str:
        return f"{self.root}/reduced/{name}"

    def _rows(self, name: str, condition: str) -> Any:
        rows = self.spark.table(self.silver[name]).where(condition)
        return rows.select([column for column in rows.columns if not column.startswith("__")])


def wide(spark: Any, root: Path, *, fields: int, rows: int, events: int) -> Iterator[ground.Row]:
    """Loading and updating documents with `fields` fields."""
    documents = Wide(fields)
    log, settings = _begun(spark, root)
    fill(log, documents, rows=rows)
    yield (f"first load of {rows:,} documents of {fields} fields", rows, "", _ours(spark, settings), "")
    plain = Plain(spark, root, settings, [COLLECTION])
    for version in (1, 2):
        before = bronze.newest(spark, log.table).batch
        update(log, documents, chosen("uniform", rows=rows, events=events, turn=version), version=version)
        ours, merged = _ours(spark, settings), plain.merged(before)
    yield (f"{events:,} updates of documents of {fields} fields", events, merged, ours, merged / ours)
    log.close()


def many(spark: Any, root: Path, *, collections: int, events: int) -> Iterator[ground.Row]:
    """One batch with events of many collections."""
    documents = Documents()
    log, settings = _begun(spark, root)
    names = [f"{COLLECTION}{number}" for number in range(collections)]
    for name in names:
        fill(log, documents, rows=1000, name=name)
    yield (f"first load of {collections} collections of 1,000", collections * 1000, "", _ours(spark, settings), "")
    each = max(1, events // collections)
    plain = Plain(spark, root, settings, names)
    for version in (1, 2):
        before = bronze.newest(spark, log.table).batch
        for name in names:
            update(log, documents, chosen("uniform", rows=1000, events=each), version=version, names=(name,))
        ours, merged = _ours(spark, settings), plain.merged(before)
    yield (f"{each * collections:,} updates of {collections} collections", each * collections, merged, ours, merged / ours)
    for version in (3, 4):
        before = bronze.newest(spark, log.table).batch
        numbers = chosen("uniform", rows=1000, events=COMMITS * IN_A_COMMIT)
        update(log, documents, numbers, version=version, names=names, chunk=IN_A_COMMIT)
        ours, merged = _ours(spark, settings), plain.merged(before)
    yield (f"{len(numbers):,} updates of them in {COMMITS} commits", len(numbers), merged, ours, merged / ours)
    log.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--fields", type=int, default=300, help="0 for none of wide documents")
    parser.add_argument("--collections", type=int, default=50, help="0 for none of many collections")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "4g"})
    rows: list[ground.Row] = []
    with ground.lakehouse() as root:
        if arguments.rows:
            rows += ground.told(growth(spark, root / "growth", sizes=arguments.rows, events=arguments.events))
        if arguments.fields:
            rows += ground.told(wide(spark, root / "wide", fields=arguments.fields, rows=50_000, events=arguments.events))
        if arguments.collections:
            rows += ground.told(many(spark, root / "many", collections=arguments.collections, events=arguments.events))
    sparks.stop()
    ground.show("Silver, seconds a batch", ("work", "events", "plain MERGE", "ours", "MERGE / ours"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
