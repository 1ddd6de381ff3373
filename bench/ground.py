"""Support for the benchmarks: a server, documents of a given size, a lakehouse, settings, and output."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import string
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bson.int64 import Int64
from rich.console import Console
from rich.table import Table

from cdc_core.settings import parse as settings
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from tests.harness import kills, processes

Row = tuple[object, ...]
SIZES = {"400 B": 400, "1 KB": 1000, "3.6 KB": 3600, "20 KB": 20000}


@contextlib.contextmanager
def server(**options: Any) -> Iterator[str]:
    """Run a single-node replica set for a benchmark; yields its connection string."""
    with tempfile.TemporaryDirectory(prefix="medallion-bench-") as folder:
        chosen = embedded_mongodb.ServerOptions(cache_gb=1.0, oplog_mb=4096, **options)
        running = embedded_mongodb.EmbeddedMongoDB(Path(folder) / "mongodb", chosen).start()
        try:
            yield running.uri
        finally:
            running.stop()


def _speaker(to: TextIO) -> Callable[[str], None]:
    """A function that prints lines with the seconds since now."""
    begun = time.monotonic()
    return lambda text: print(f"{time.monotonic() - begun:7.1f} s  {text}", file=to, flush=True)


@dataclass(frozen=True)
class Trial:
    """A pipeline of processes with its own server, and a function that prints progress."""

    pipeline: processes.Pipeline
    say: Callable[[str], None]


@contextlib.contextmanager
def trial(name: str, *, keep: Path | None, source: str = "") -> Iterator[Trial]:
    """A trial in a temporary folder, or in `keep`; `source` is additional YAML of the settings' source section."""
    say = _speaker(sys.stdout)
    with tempfile.TemporaryDirectory(prefix=f"medallion-{name}-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with embedded_mongodb.EmbeddedMongoDB(folder / "mongodb") as running:
            pipeline = processes.Pipeline(folder, running.uri, f"{name}_{uuid.uuid4().hex[:8]}")
            yield Trial(pipeline.write_settings(source=source), say)


def verdict(outcome: kills.Outcome, *, good: str) -> int:
    """Print a trial's outcome; returns the exit code."""
    for layer, count in sorted(outcome.kills.items()):
        print(f"{layer:10} killed {count} times")
    print(f"{outcome.events:,} events in bronze, {outcome.documents:,} documents, {outcome.seconds:,.0f} s")
    for fault, found in outcome.faults.items():
        print(f"{fault}: {found}")
    print("FAULTS: see above" if outcome.faults else good)
    return 1 if outcome.faults else 0


@contextlib.contextmanager
def lakehouse() -> Iterator[Path]:
    """A temporary folder for tables."""
    with tempfile.TemporaryDirectory(prefix="medallion-bench-") as folder:
        yield Path(folder)


def document(size: int, *, rng: random.Random) -> dict[str, Any]:
    """A document of about `size` bytes of BSON: strings, numbers, a date, nesting, an array."""
    text = size - 260

    def letters(count: int) -> str:
        return "".join(rng.choices(string.ascii_letters, k=max(1, count)))

    return {
        "number": rng.randrange(1_000_000),
        "total": rng.random() * 100,
        "placed": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        "points": Int64(rng.randrange(2**40)),
        "paid": True,
        "customer": {"name": letters(text // 4), "city": letters(20)},
        "lines": [{"sku": letters(8), "quantity": line} for line in range(2)],
        "note": letters(text // 2),
        "comment": letters(text // 4),
    }


def insert(uri: str, namespace: tuple[str, str], *, count: int, size: int) -> None:
    """Insert `count` documents of about `size` bytes, in large batches."""
    rng = random.Random(size)
    batch = min(1000, max(1, 8_000_000 // size))
    templates = [document(size, rng=rng) for _ in range(min(batch, count))]
    client = mongodb.client(uri)
    try:
        collection = client[namespace[0]][namespace[1]]
        for start in range(0, count, batch):
            some = [dict(template) for template in templates[: count - start]]
            collection.insert_many(some, ordered=False)
    finally:
        client.close()


def pipeline(uri: str, root: Path | str, *, name: str = "bench", **source: Any) -> settings.Settings:
    """The settings of a pipeline from `uri` into `root`."""
    return settings.parse(
        {
            "name": name,
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": uri, "oplog.headroom.warning.hours": 0, **source},
        }
    )


def processor_seconds(pid: int) -> float:
    """The processor seconds of a process."""
    user, system, *_ = _ticks(Path(f"/proc/{pid}/stat"))[1]
    return (user + system) / os.sysconf("SC_CLK_TCK")


def family_processor_seconds(pid: int) -> float:
    """The processor seconds of a process and its children, also of those that have ended."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent, own_ticks = _ticks(file)
            if pid in (int(file.parent.name), parent):
                ticks += sum(own_ticks)
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(stat: Path) -> tuple[int, Sequence[int]]:
    """A process's parent, and its ticks: utime, stime, and cutime and cstime of its ended children (proc(5))."""
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[1]), [*map(int, fields[11:15])]


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, each printed to stderr as soon as it is measured."""
    say = _speaker(sys.stderr)
    for row in rows:
        say(" · ".join(text for text in map(_text, row) if text))
        yield row


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print the result of a benchmark as a table."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(_text, row))
    Console(width=140).print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
