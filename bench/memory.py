"""Memory: the resident size of a capture process that has a backlog to catch up with, also of 16 MB documents.

    python -m bench.memory [--gigabytes 2]

The limit in `docs/benchmarks.md` is for the Python process and its JVM together. The baseline is the same process before it reads
anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from pipelines.mongodb import client as mongodb


def resident_mb(pid: int) -> float:
    """Resident megabytes of a process and its children."""
    total = 0.0
    for line in subprocess.run(["ps", "-eo", "pid,ppid,rss"], capture_output=True, text=True).stdout.splitlines()[1:]:
        found, parent, size = map(int, line.split())
        if found == pid or parent == pid:
            total += size / 1024
    return total


def peak(uri: str, root: Path, db: str) -> tuple[float, float, float]:
    """Start and peak megabytes, and the seconds, of one run that captures everything in `db`."""
    config = root / "bench.yml"
    config.write_text(
        f"name: bench\nlakehouse: {{root: {root}/lakehouse}}\nsource:\n"
        f"  mongodb.connection.string: {uri}\n  collection.include.list: {db}.big\n  snapshot.mode: no_data\n"
    )
    command = [sys.executable, "-m", "jobs.command_line", "capture", "--once", "--config", str(config)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sizes = [0.0]
    while process.poll() is None:
        sizes.append(resident_mb(process.pid))
        time.sleep(0.2)
    assert process.returncode == 0, process.returncode
    return sizes[min(len(sizes) - 1, 25)], max(sizes), time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of backlog, for each size of document")
    arguments = parser.parse_args(argv)
    rows = []
    with ground.server() as uri:
        for label, size in {"1 KB": 1_000, "16 MB": 16_000_000}.items():
            db = f"m{size}"
            with ground.lakehouse() as root:
                client = mongodb.client(uri)
                client[db].create_collection("big")
                peak(uri, root, db)  # the position before the documents
                count = max(4, int(arguments.gigabytes * 1e9 / size))
                writer = threading.Thread(
                    target=ground.insert, args=(uri, (db, "big")), kwargs={"count": count, "size": size}
                )
                writer.start()
                writer.join()
                start, most, seconds = peak(uri, root, db)
                rows.append((f"{label} documents", count, start, most, seconds))
                client.drop_database(db)
                client.close()
    ground.show("Resident megabytes of capture", ("backlog of", "documents", "start", "peak", "seconds"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
