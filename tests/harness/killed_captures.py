"""Kills captures of a database at any of their statements, each with SIGKILL, without a JVM.

    python -m tests.harness.killed_captures URI --database shop --root FOLDER --kills 5 --seed 1

Each capture is a fork of this process, which takes milliseconds, after a random workload of five collections. The first one is not
killed: it shows which statements there are. Nor is the last one, nor one that does not reach its statement. The output is the number
of captures between them.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import random
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.capture import service as capture
from tests.harness import captures, statements, without_spark, workload

SMALL = {"commit.interval.ms": 50, "max.batch.size": 20, "commit.max.bytes": 65536}
"""Many commits, so that few documents reach every statement."""


def captured(uri: str, root: Path, database: str) -> None:
    with without_spark.running():
        capture.run(without_spark.SPARK, captures.pipeline(uri, root, database, **SMALL), once=True)


def recorded(act: Callable[[], None], to: Path) -> None:
    found: set[statements.Statement] = set()
    with statements.recorded(found):
        act()
    to.write_text(json.dumps([[each.file, each.line, each.is_main] for each in sorted(found)]))


def killed(act: Callable[[], None], statement: statements.Statement, nth: int) -> None:
    with statements.armed(statement, nth, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        act()


def ended(act: Callable[[], object]) -> int:
    """How a fork that calls `act` ends: 0, 1 after an error, or the negative number of its signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(uri: str, database: str, root: Path, *, kills: int, seed: int) -> int:
    """The number of captures that took so many kills. Raises AssertionError where a capture ends with an error."""
    draws, noted, count = random.Random(seed), root / "statements.json", 0

    def act() -> None:
        captured(uri, root, database)

    def change() -> None:
        plan = workload.Plan(operations=draws.choice([5, 60]), seed=draws.randrange(1 << 30), threads=2, database=database)
        assert ended(lambda: workload.run(uri, plan)) == 0

    root.mkdir()
    change()
    assert ended(lambda: recorded(act, noted)) == 0
    known = [statements.Statement(*each) for each in json.loads(noted.read_text())]
    while kills:
        change()
        statement, nth = draws.choice(known), draws.choice([1, 1, 2, 5])
        outcome = ended(functools.partial(killed, act, statement, nth))
        assert outcome in (0, -signal.SIGKILL), statement
        kills, count = kills - (outcome != 0), count + 1
    assert ended(act) == 0
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.killed_captures", description=__doc__.splitlines()[0])
    parser.add_argument("uri")
    parser.add_argument("--database", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    print(run(arguments.uri, arguments.database, arguments.root, kills=arguments.kills, seed=arguments.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
