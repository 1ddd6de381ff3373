"""History: what a batch costs as the table of versions grows, and a batch of five events.

    python -m bench.history [--rows 100000 1000000 5000000] [--events 20000]

Bronze is written directly and applied by silver before the measurement; measured is gold's run over a collection with `history: true`, of
which the current documents take a tenth of a second. The baseline, in the same run: a plain MERGE of the same versions, already typed,
into a copy, which ends open versions and inserts new ones.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import ground
from bench.silver import COLLECTION, DB, Documents, chosen, fill, timed, update
from cdc_core.settings.parse import Settings
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import session as sparks

MERGE = """
    MERGE INTO {copy} t USING {new} s ON t.__key = s.__key AND t.__sequence = s.__sequence
    WHEN MATCHED THEN UPDATE SET __until = s.__until, valid_to = s.valid_to WHEN NOT MATCHED THEN INSERT *
"""


@dataclasses.dataclass
class Contest:
    """A collection with a history table, and a plain copy of its versions in the same state."""

    spark: Any
    root: Path
    documents: Documents = dataclasses.field(default_factory=Documents)
    version: int = 0

    def __post_init__(self) -> None:
        plain = ground.pipeline("mongodb://127.0.0.1", self.root)
        layers = dataclasses.replace(plain.silver, defaults=dataclasses.replace(plain.silver.defaults, history=True))
        self.settings: Settings = dataclasses.replace(plain, silver=layers)
        layout = delta.layout(plain.lakehouse)
        self.log = bronze.BronzeLog.open(self.spark, layout.bronze("bench"))
        self.history = str(layout.history(DB, COLLECTION))
        self.copy, self.new = f"delta.`{self.root}/copy`", f"{self.root}/new"

    def fill(self, rows: int, *, start: int) -> float:
        """Seconds of the first versions of documents; also copies them."""
        fill(self.log, self.documents, rows=rows, start=start)
        took = self._gold()
        self.spark.table(self.history).write.format("delta").mode("overwrite").save(f"{self.root}/copy")
        return took

    def change(self, numbers: Sequence[int]) -> tuple[float, float]:
        """Seconds of one more version of these documents, and of a MERGE of the same versions into the copy."""
        self.version += 1
        update(self.log, self.documents, numbers, version=self.version)
        took = self._gold()
        is_new = f"substr(__sequence, 1, 8) = '{1_700_000_000 + self.version:08x}' OR substr(__until, 1, 8) = '{1_700_000_000 + self.version:08x}'"
        self.spark.table(self.history).where(is_new).write.format("delta").mode("overwrite").save(self.new)
        statement = MERGE.format(copy=self.copy, new=f"delta.`{self.new}`")
        return took, timed(lambda: self.spark.sql(statement).collect())

    def _gold(self) -> float:
        silver.run(self.spark, self.settings, sessions=sparks.sessions(self.spark))
        return timed(lambda: gold.run(self.spark, self.settings, sessions=sparks.sessions(self.spark)))


def growth(spark: Any, root: Path, *, sizes: Sequence[int], events: int) -> Iterator[ground.Row]:
    """A batch of updates of random keys, and one of five updates, for each number of documents."""
    contest, filled = Contest(spark, root), 0
    for rows in sizes:
        yield (f"first versions of {rows - filled:,} documents", rows - filled, "", contest.fill(rows, start=filled), "")
        filled = rows
        for count in (events, 5):
            found = [contest.change(chosen("uniform", rows=rows, events=count, turn=turn)) for turn in range(3)]
            ours, merged = sorted(found[1:])[0]
            yield (f"{count:,} updates over {rows:,} documents", count, merged, ours, merged / ours)
    contest.log.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--events", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench", conf={"spark.driver.memory": "4g"})
    with ground.lakehouse() as root:
        rows = list(ground.told(growth(spark, root, sizes=arguments.rows, events=arguments.events)))
    sparks.stop()
    ground.show("History, seconds a batch", ("work", "events", "plain MERGE", "ours", "MERGE / ours"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
