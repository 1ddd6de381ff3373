"""Runs all benchmarks one after another, each in its own process: `python -m bench [--quick] [hop …]`."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

HOPS: dict[str, tuple[str, ...]] = {
    "capture": (),
    "silver": (),
    "silver_growth": (),
    "gold": (),
    "history": (),
    "small_batches": (),
    "bronze_log": (),
    "freshness": (),
    "memory": (),
    "gate": (),
    "verify": (),
    "end_to_end": (),
    "service": (),
    "whole_collections": (),
    "environments": (),
}
QUICK: dict[str, tuple[str, ...]] = {
    "capture": ("--events", "100000", "--sizes", "1 KB", "3.6 KB"),
    "silver": (),
    "silver_growth": ("--rows", "100000", "--collections", "10"),
    "gold": ("--rows", "100000", "--events", "20000", "--sizes", "100000", "1000000"),
    "history": ("--rows", "100000"),
    "small_batches": ("--rows", "20000", "--batches", "6"),
    "bronze_log": ("--commits", "2000", "--measure", "40"),
    "freshness": ("--seconds", "15", "--collections", "1"),
    "memory": ("--gigabytes", "0.5"),
    "gate": ("--rows", "100000", "--changed", "2000"),
    "verify": ("--documents", "100000"),
    "end_to_end": ("--documents", "20000"),
    "service": ("--documents", "20000"),
    "whole_collections": ("--documents", "20000"),
    "environments": ("--batches", "4"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="All benchmarks, or the hops that are named.")
    parser.add_argument("hops", nargs="*", choices=[*HOPS, []], help=f"of {', '.join(HOPS)}")
    parser.add_argument("--quick", action="store_true", help="smaller, for a look")
    arguments = parser.parse_args(argv)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}", flush=True)
    print(
        ", ".join(f"{name} {metadata.version(name)}" for name in ("pyspark", "delta-spark", "pymongo", "pyarrow")),
        flush=True,
    )
    failed = []
    for hop in arguments.hops or HOPS:
        options = (QUICK if arguments.quick else HOPS)[hop]
        code = subprocess.run([sys.executable, "-m", f"bench.{hop}", *options]).returncode
        if code:
            failed.append(hop)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
