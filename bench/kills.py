"""Kills each layer many times at random moments during a workload, and shows whether anything was lost.

python -m bench.kills --rounds 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from tests.harness import kills


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial and print the outcome; 0 if nothing was lost, doubled or different."""
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description="Kill each layer, again and again.")
    parser.add_argument("--rounds", type=int, default=20, help="kills of each of capture, silver and gold")
    parser.add_argument("--rate", type=float, default=60, help="changed documents a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    torment = kills.Torment(rounds=arguments.rounds, rate=arguments.rate, seed=arguments.seed)
    with ground.trial("kills", keep=arguments.keep) as trial:
        outcome = kills.run(trial.pipeline, torment, trial.say)
    return ground.verdict(outcome, good="nothing lost, nothing twice, gold equals the source")


if __name__ == "__main__":
    raise SystemExit(main())
