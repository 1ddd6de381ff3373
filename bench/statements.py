"""Injects faults at random statements of capture, silver and gold, and checks the tables after each process.

python -m bench.statements --count 200
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from tests.harness import statements


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial, print the number of faults of each kind and what was lost, doubled or broken; 0 if nothing was."""
    parser = argparse.ArgumentParser(prog="python -m bench.statements", description="A fault at any statement.")
    parser.add_argument("--count", type=int, default=200, help="faults over all layers")
    parser.add_argument("--a-process", type=int, default=25, help="faults in each process; everything is judged after it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args(argv)
    with ground.trial("statements", keep=arguments.keep) as trial:
        outcome = statements.run(
            trial.pipeline, count=arguments.count, seed=arguments.seed, a_process=arguments.a_process, say=trial.say
        )
    for kind, count in sorted(outcome.struck.items()):
        print(f"{count:6,}  {kind}")
    print(f"{len(outcome.statements):6,}  statements")
    return ground.verdict(outcome, good="nothing lost, nothing twice, gold equals the source, every table readable")


if __name__ == "__main__":
    raise SystemExit(main())
