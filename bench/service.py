"""How far `medallion run` falls behind: a first load, then changes as fast as they can be written.

    python -m bench.service [--documents 200000] [--shape nested] [--seed N]

The columns are the seconds until gold holds everything, including the start of Python and Spark for the first load, and from the last
write on for the changes; and the processor seconds and the most resident memory of the service, with its JVM and its helpers. The baseline
is the writer: the seconds in which it wrote the changes, on the same cores.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from bench import end_to_end, ground, memory
from pipelines.mongodb import client as mongodb

LIMIT_SECONDS = 1800


def service_rows(uri: str, shape: str, *, documents: int, seed: int) -> Iterator[ground.Row]:
    """Yields the row of the first load, then that of the changes."""
    db, changes = f"bench_service_{shape}", int(documents * 0.64)
    client = mongodb.client(uri)
    try:
        source = end_to_end.Source(client[db]["things"], shape, seed)
        source.insert(documents)
        with ground.lakehouse() as root:
            config, gold = end_to_end.settings(root, uri, db), root / "lakehouse" / "gold" / db / "things"
            command = [sys.executable, "-m", "jobs.command_line", "run", "--config", str(config)]
            began = time.monotonic()
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                peak = _peak_until(running, gold, rows=documents, last=documents - 1)
                processor = ground.family_processor_seconds(running.pid)
                yield ("first load", documents, "", time.monotonic() - began, processor, peak)
                began = time.monotonic()
                source.change(changes)
                source.insert(1)  # the last event of all: with it, gold has all others
                written = time.monotonic()
                peak = _peak_until(running, gold, rows=1, last=source.next - 1)
                seconds, used = time.monotonic() - written, ground.family_processor_seconds(running.pid) - processor
                yield ("mix", changes, written - began, seconds, used, peak)
            finally:
                running.send_signal(signal.SIGTERM)
                running.wait(120)
    finally:
        client.drop_database(db)
        client.close()


def _peak_until(running: subprocess.Popen[bytes], gold: Path, *, rows: int, last: int) -> float:
    """Wait until gold has this many rows, and the document with this number; returns the most resident megabytes meanwhile."""
    peak, end = 0.0, time.monotonic() + LIMIT_SECONDS
    while not _holds(gold, rows=rows, last=last):
        if running.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the service ended with {running.returncode}, or is not done after {LIMIT_SECONDS} s")
        peak = max(peak, memory.resident_mb(running.pid))
        time.sleep(0.2)
    return peak


def _holds(gold: Path, *, rows: int, last: int) -> bool:
    try:
        held = QueryBuilder().register("held", DeltaTable(str(gold)))
    except TableNotFoundError:
        return False
    key = end_to_end._id(last)
    found = pa.table(held.execute(f"SELECT count(*) AS rows, count(*) FILTER (WHERE _id = '{key}') AS last FROM held"))
    return bool(found["rows"][0].as_py() >= rows and found["last"][0].as_py())


COLUMNS = ("documents", "count", "written in s", "in gold after s", "processor s", "MB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--shape", default="nested", choices=list(end_to_end.SHARE))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args(argv)
    with ground.server() as uri:
        found = service_rows(uri, arguments.shape, documents=arguments.documents, seed=arguments.seed)
        rows = list(ground.told(found))
    ground.show(f"medallion run, {arguments.shape} documents, seed {arguments.seed}", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
