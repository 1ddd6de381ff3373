"""Kills each layer many times at random moments while a workload runs, and shows whether anything was lost.

python -m bench.kills --rounds 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipelines import embedded_mongodb
from tests import kills, processes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it and prints the outcome; 0 when nothing was lost, doubled or different."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kills", description="Kill each layer, again and again."
    )
    parser.add_argument("--rounds", type=int, default=20, help="kills of each of capture, silver and gold")
    parser.add_argument("--rate", type=float, default=60, help="changed documents a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    torment = kills.Torment(rounds=arguments.rounds, rate=arguments.rate, seed=arguments.seed)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="medallion-kills-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with embedded_mongodb.EmbeddedMongoDB(folder / "mongodb") as server:
            pipeline = processes.Pipeline(
                folder, server.uri, f"kills_{uuid.uuid4().hex[:8]}"
            ).write_settings()
            outcome = kills.run(pipeline, torment, say)
    for layer, count in sorted(outcome.kills.items()):
        print(f"{layer:10} killed {count} times")
    print(f"{outcome.events:,} events in bronze, {outcome.documents:,} documents, {outcome.seconds:,.0f} s")
    for fault, found in outcome.faults.items():
        print(f"{fault}: {found}")
    print(
        "nothing lost, nothing twice, gold equals the source" if not outcome.faults else "FAULTS: see above"
    )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
