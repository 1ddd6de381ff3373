"""Compares source and gold after a random workload that ran beside the snapshot and the stream.

python -m bench.agreement --operations 20000
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipelines import embedded_mongodb
from tests import agreement, processes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it and prints the outcome; 0 when bronze holds each token once and gold equals the source."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description="Does gold equal the source?")
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=0, help="changed documents a second; 0 for as many as go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="medallion-agreement-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with embedded_mongodb.EmbeddedMongoDB(folder / "mongodb") as server:
            pipeline = processes.Pipeline(folder, server.uri, f"agreement_{uuid.uuid4().hex[:8]}").write_settings()
            outcome = agreement.run(
                pipeline, operations=arguments.operations, seed=arguments.seed, rate=arguments.rate, say=say
            )
    print(f"{outcome.events:,} events in bronze, {outcome.documents:,} documents, {outcome.seconds:,.0f} s")
    for fault, found in outcome.faults.items():
        print(f"{fault}: {found}")
    print("each event once, and gold equals the source" if not outcome.faults else "FAULTS: see above")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
