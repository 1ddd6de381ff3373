"""Injects faults at any statement of the product, then compares bronze and gold with the source.

A process runs capture, silver and gold with `--once`, and a workload changes five collections between the runs. First it records which
statements each layer executes. Then each run has a fault at one of them, chosen so that a statement that runs once is as likely as one
that runs a thousand times: an interrupt or an exception, after which the process goes on with the next run. The last fault ends Python,
the JVM, or both. The run after a fault must succeed. When the process has ended, every layer catches up, and the result is judged as in
`tests.harness.kills`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from cdc_core.tables import claims
from tests.harness import faults, kills, processes, torment, workload

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(
    str(ROOT / name) + os.sep
    for name in (
        *(f"pipelines/{name}" for name in ("capture", "snapshot", "bronze", "silver", "gold", "delta", "mongodb", "schema")),
        *(f"cdc_core/{name}" for name in ("bronze", "silver", "snapshot", "stream", "tables")),
    )
)
"""The code that writes, or decides what is written: a fault while settings are read proves nothing."""
LEASE_MS = 2000
OPERATIONS = 20
"""Changed documents between two runs."""
SUCCEEDED = 0
ENDS = (0, 137)
"""How a process ends after all its faults; other exit codes are bugs."""

Say = Callable[[str], None]


@dataclass(frozen=True, order=True)
class Statement:
    """A line of a file that a run executes, and whether in the main thread."""

    file: str
    line: int
    is_main: bool

    def __str__(self) -> str:
        return f"{Path(self.file).relative_to(ROOT)}:{self.line}"


class Failure(Exception):
    """An exception that can occur at any statement, and that no code of the product expects."""


@contextlib.contextmanager
def _traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def recorded(statements: set[Statement]) -> Iterator[None]:
    """Record every statement of the product that the block executes, also in threads that it starts."""
    ours: dict[str, bool] = {}

    def is_ours(code: CodeType) -> bool:
        name = code.co_filename
        if name not in ours:
            ours[name] = name.startswith(PACKAGES)
        return ours[name]

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            is_main = threading.current_thread() is threading.main_thread()
            statements.add(Statement(frame.f_code.co_filename, frame.f_lineno, is_main))
        return lines

    with _traced(lambda frame, event, _: lines if is_ours(frame.f_code) else None):
        yield


@contextlib.contextmanager
def armed(statement: Statement, nth: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before the statement runs for the nth time."""
    seen = 0

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        is_main = threading.current_thread() is threading.main_thread()
        if event == "line" and frame.f_lineno == statement.line and is_main == statement.is_main:
            seen += 1
            if seen == nth:
                act()
        return lines

    with _traced(lambda frame, event, _: lines if frame.f_code.co_filename == statement.file else None):
        yield


@dataclass
class Striker:
    """The process with faults; writes each fault and its result to `told`, one JSON object per line."""

    uri: str
    database: str
    settings: Path
    told: Path
    rng: random.Random
    statements: dict[str, list[Statement]] = field(default_factory=dict)

    def run(self, count: int, *, ends: bool) -> int:
        for name in torment.LAYERS:
            found: set[Statement] = set()
            self._change()
            with recorded(found):
                code = self._run(name)
            if code != SUCCEEDED:
                return self._failed(name, code, "a run without a fault")
            self.statements[name] = sorted(found)
        for number in range(count):
            is_last = ends and number == count - 1
            name = self.rng.choice(torment.LAYERS)
            statement = self.rng.choice(self.statements[name])
            kind = self._kind(statement, is_last)
            self._change()
            struck = self._struck(name, statement, kind)
            if not struck:
                continue
            if (code := self._clean(name)) != SUCCEEDED:
                return self._failed(name, code, f"after {kind} at {statement} of {name}")
        return 0

    def _kind(self, statement: Statement, is_last: bool) -> str:
        if is_last:
            return self.rng.choice(("Python ends", "the JVM ends", "both end"))
        return self.rng.choice(("KeyboardInterrupt", "Failure")) if statement.is_main else "Failure"

    def _struck(self, name: str, statement: Statement, kind: str) -> bool:
        struck = False

        def act() -> None:
            nonlocal struck
            struck = True
            self._tell({"layer": name, "kind": kind, "statement": str(statement), "nth": nth})
            match kind:
                case "KeyboardInterrupt":
                    raise KeyboardInterrupt
                case "Failure":
                    raise Failure
                case "Python ends":
                    faults.strike(faults.Kind.EXIT)
                case "the JVM ends":
                    faults.strike(faults.Kind.JVM)
                case "both end":
                    faults.strike(faults.Kind.BOTH)

        nth = self.rng.choice((1, 1, 1, 2, 3))
        with armed(statement, nth, act):
            code = self._run(name)
        if struck:
            self._tell({"code": code})
        if struck and kind == "the JVM ends":
            os._exit(0)  # the next run needs another JVM, which the parent's next process starts
        return struck

    def _clean(self, name: str) -> int:
        """A run that must succeed, if necessary after the lease of the interrupted one has expired."""
        code = self._run(name)
        if code == 75:
            time.sleep(LEASE_MS / 1000)
            code = self._run(name)
        return code

    def _run(self, name: str) -> int:
        from jobs import command_line

        try:
            return command_line.main([name, "--config", str(self.settings), "--once", "--debug"])
        except KeyboardInterrupt:
            return 130

    def _change(self) -> None:
        plan = workload.Plan(operations=OPERATIONS, seed=self.rng.randrange(1 << 30), threads=2, database=self.database)
        workload.run(self.uri, plan)

    def _failed(self, name: str, code: int, what: str) -> int:
        self._tell({"failed": f"{name} ended with {code} {what}"})
        return 1

    def _tell(self, said: dict[str, object]) -> None:
        with self.told.open("a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


@dataclass
class Outcome(torment.Outcome):
    """The result, and the number of faults at each statement."""

    statements: Counter[str] = field(default_factory=Counter)


def run(pipeline: processes.Pipeline, *, count: int, seed: int = 1, a_process: int = 25, say: Say = print) -> Outcome:
    """Inject `count` faults, `a_process` of them in each process, and judge the result after each process."""
    outcome, begun = Outcome(), time.monotonic()
    pipeline.write_settings(silver="{defaults: {history: true}}")
    assert pipeline.workload(operations=300, seed=seed).run() == 0
    recording = pipeline.recorder()
    told = pipeline.folder / "statements.jsonl"
    with processes.all_killed(recording):
        recording.start()
        processes.until(lambda: "ready" in recording.said, seconds=60, what="the recorder", alive=[recording])
        first = pipeline.command("run", "--once", log="first")
        assert first.run(300) == 0, first.said[-3000:]
        while sum(outcome.struck.values()) < count and not outcome.faults:
            told.unlink(missing_ok=True)
            seed += 1
            size = min(a_process, count - sum(outcome.struck.values()))
            where = [pipeline.uri, pipeline.database, str(pipeline.settings), str(told)]
            process = processes.Command(
                ["-m", "tests.harness.statements", *where, "--count", str(size), "--seed", str(seed)],
                pipeline.folder / f"statements-{seed}.log",
            )
            code = process.run(1800)
            _count(told, outcome)
            if code not in ENDS and not outcome.bugs:
                outcome.bugs.append(f"the process ended with {code}: {process.said[-1000:]}")
            time.sleep(1)
            kills.caught_up(pipeline, times=1)
            time.sleep(1)
            kills.judge(pipeline, outcome)
            outcome.unreadable = torment.unreadable(pipeline)
            say(f"{sum(outcome.struck.values())} faults: {outcome.faults or 'all is there'}")
    outcome.seconds = time.monotonic() - begun
    return outcome


def _count(told: Path, outcome: Outcome) -> None:
    for line in told.read_text().splitlines() if told.exists() else []:
        said = json.loads(line)
        if "failed" in said:
            outcome.bugs.append(said["failed"])
        if "kind" in said:
            outcome.struck[said["kind"]] += 1
            outcome.statements[said["statement"]] += 1
            outcome.kills[said["layer"]] += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process with faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.statements")
    parser.add_argument("uri")
    parser.add_argument("database")
    parser.add_argument("settings", type=Path)
    parser.add_argument("told", type=Path)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    claims.LEASE_MS = LEASE_MS
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(arguments.seed)
    striker = Striker(arguments.uri, arguments.database, arguments.settings, arguments.told, rng)
    return striker.run(arguments.count, ends=True)


if __name__ == "__main__":
    raise SystemExit(main())
