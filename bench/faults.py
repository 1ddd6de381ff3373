"""Injects every kind of fault into capture, silver and gold, around commits and at random moments, and checks the tables.

python -m bench.faults --count 1000
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from tests.harness import torment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial, print the number of faults of each kind and what was lost, doubled or broken; 0 if nothing was."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="Every kind of fault, again and again.")
    parser.add_argument("--count", type=int, default=1000, help="faults over all layers")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more faults after so long, whatever the count")
    parser.add_argument("--rate", type=float, default=30, help="changed documents a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    with ground.trial("faults", keep=arguments.keep) as trial:
        outcome = torment.run(
            trial.pipeline,
            count=arguments.count,
            seconds=arguments.minutes * 60,
            rate=arguments.rate,
            seed=arguments.seed,
            say=trial.say,
        )
    for kind, count in sorted(outcome.struck.items()):
        print(f"{count:6,}  {kind}")
    if outcome.stops:
        print(
            f"{max(outcome.stops):6.1f}  seconds at most from a signal to the end, {sum(outcome.stops) / len(outcome.stops):.1f} on average"
        )
    lost, doubled, broken = len(outcome.missing), len(outcome.doubled), len(outcome.unreadable)
    print(f"{sum(outcome.struck.values()):6,}  faults: {lost} events lost, {doubled} doubled, {broken} tables broken")
    return ground.verdict(outcome, good="nothing lost, nothing twice, gold equals the source, every table readable")


if __name__ == "__main__":
    raise SystemExit(main())
