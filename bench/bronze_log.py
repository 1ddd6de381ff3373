"""The price of a bronze commit early and late: on a new table, and behind a log of 10,000 commits.

    python -m bench.bronze_log [--commits 10000]

The log is synthetic: each commit adds one small file, and every `COMPACT_EVERY` commits a compaction replaces these files by one, as in a
capture; then comes a checkpoint. The measured commits are real.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ground
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.spark import session as sparks


def commit_times(log: bronze.BronzeLog, *, count: int) -> list[float]:
    """Seconds of each of `count` commits of one heartbeat row."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        log.heartbeat({}, token="82" + "0" * 16, ts_ms=0)
        times.append(time.perf_counter() - began)
    return times


def synthesise(folder: Path, *, commits: int) -> None:
    """Add commits to the table's log; their files all have the content of one real file with one row."""
    log = folder / "_delta_log"
    sample = next(folder.glob("*.parquet"))
    version = max(int(path.stem) for path in log.glob("*.json"))
    size, pending = sample.stat().st_size, []
    for number in range(1, commits + 1):
        version += 1
        batch = 1_000_000 + number
        stats = {
            "numRecords": 1,
            "minValues": {"batch": batch, "offset": batch},
            "maxValues": {"batch": batch, "offset": batch},
            "nullCount": {"batch": 0},
        }
        actions: list[dict[str, Any]] = [_info(version)]
        if number % bronze.COMPACT_EVERY == 0:
            actions += [_remove(path) for path in pending]
            pending = []
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        (folder / name).hardlink_to(sample)
        actions.append(
            {
                "add": {
                    "path": name,
                    "partitionValues": {},
                    "size": size,
                    "modificationTime": 0,
                    "dataChange": False,
                    "stats": json.dumps(stats),
                }
            }  # fmt: skip
        )
        pending.append(name)
        (log / f"{version:020d}.json").write_text("\n".join(json.dumps(action) for action in actions) + "\n")


def _info(version: int) -> dict[str, Any]:
    return {"commitInfo": {"timestamp": int(time.time() * 1000), "operation": "WRITE", "operationParameters": {},
                           "readVersion": version - 1, "isBlindAppend": True}}  # fmt: skip


def _remove(path: str) -> dict[str, Any]:
    now = int(time.time() * 1000)
    return {"remove": {"path": path, "deletionTimestamp": now, "dataChange": False, "extendedFileMetadata": False}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--measure", type=int, default=120, help="commits to time early and late, checkpoints included")
    arguments = parser.parse_args(argv)
    spark = sparks.session("bench")
    with ground.lakehouse() as root:
        table = tables.Layout(root=str(root)).bronze("bench")
        log = bronze.BronzeLog.open(spark, table)
        commit_times(log, count=20)
        early = commit_times(log, count=arguments.measure)
        log.close()
        folder = Path(table.path or "")
        synthesise(folder, commits=arguments.commits)
        spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        found = spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(folder))
        found.checkpoint(found.unsafeVolatileSnapshot(), spark._jvm.scala.Option.empty())
        began = time.perf_counter()
        log = bronze.BronzeLog.open(spark, table)
        opened = time.perf_counter() - began
        # The statistics of the synthetic files name batches that their shared content does not have.
        log.position = bronze.BronzePosition("82" + "0" * 16, 2_000_000, 2_000_000)
        late = commit_times(log, count=arguments.measure)
        log.close()
        shutil.rmtree(folder)
    sparks.stop()
    rows = [
        ("early", 20, statistics.median(early), statistics.mean(early), max(early)),
        ("late", arguments.commits, statistics.median(late), statistics.mean(late), max(late)),
        (
            "late / early",
            "",
            statistics.median(late) / statistics.median(early),
            statistics.mean(late) / statistics.mean(early),
            max(late) / max(early),
        ),
    ]
    ground.show(
        f"A bronze commit, seconds (opening the late log: {opened:.1f} s)",
        ("log", "commits before", "median", "mean", "max"),
        rows,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
