"""Compares source and gold after an incremental snapshot of a large collection that was killed on the way, with concurrent writes.

python -m bench.incremental --documents 1000000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from tests.harness import incremental


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial and print the outcome; 0 if gold equals the source."""
    parser = argparse.ArgumentParser(prog="python -m bench.incremental", description="An incremental snapshot, killed.")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2, help="kills of the pipeline while the snapshot is read")
    parser.add_argument("--rate", type=float, default=300, help="changed documents a second")
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    with ground.trial("incremental", keep=arguments.keep, source="  snapshot.mode: no_data") as trial:
        outcome = incremental.run(
            trial.pipeline, documents=arguments.documents, rounds=arguments.rounds, rate=arguments.rate, say=trial.say
        )
    print(f"{outcome.documents:,} documents, {outcome.changes:,} changes, {outcome.kills} kills, {outcome.seconds:,.0f} s")
    for fault in outcome.faults:
        print(fault)
    print("FAULTS: see above" if outcome.faults else "gold equals the source")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
