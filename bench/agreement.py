"""Compares source and gold after a random workload during the snapshot and the stream.

python -m bench.agreement --operations 20000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import ground
from cdc_core.properties.source import CaptureMode
from tests.harness import agreement


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workload and print the result; 0 if bronze has each token once and gold equals the source."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description="Does gold equal the source?")
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=0, help="changed documents a second; 0 for as many as go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    parser.add_argument(
        "--capture-mode", default=CaptureMode.UPDATE_FULL.value, choices=[mode.value for mode in CaptureMode]
    )
    arguments = parser.parse_args(argv)
    source = f"  capture.mode: {arguments.capture_mode}"
    with ground.trial("agreement", keep=arguments.keep, source=source) as trial:
        outcome = agreement.run(
            trial.pipeline, operations=arguments.operations, seed=arguments.seed, rate=arguments.rate, say=trial.say
        )
    return ground.verdict(outcome, good="each event once, and gold equals the source")


if __name__ == "__main__":
    raise SystemExit(main())
