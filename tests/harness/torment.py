"""Injects every kind of fault into capture, silver and gold during a workload, then compares bronze and gold with the source.

Each layer is a process, with a thread that injects its faults: first interrupts and broken connections at boundaries of commits, several
per process, because a JVM takes long to start; then one that ends it, at a boundary or from outside. Then every layer catches up, the
recorder and the reader of `tests.harness.kills` find what is missing, and `medallion repair --dry-run` finds tables with missing files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import faults, kills, processes
from tests.harness.faults import Boundary, Fault, Kind

LAYERS = kills.LAYERS
PATIENCE = 300.0
LEASE_MS = 4000
IN_A_PROCESS = (4, 16)
"""The least and greatest number of faults per process that leave it alive."""

TABLES = {"capture": ("bronze/",), "silver": ("silver/", "ops/deletes"), "gold": ("gold/", "_history")}
SELDOM = ("ops/collections", "ops/schemas")
"""Tables to which silver rarely commits: a fault there may not strike for a long time, so it is the last one of its process."""
SELDOM_SHARE = 0.1
OURS = ("bronze/", "ops/collections", "ops/schemas")
"""Tables whose data files the product writes itself; those of the others may be Spark's."""
UNTIL_IT_COMES = 90.0
ENDS_BY_ITSELF = 20.0

FROM_OUTSIDE = (
    "Python killed", "JVM killed", "both killed", "SIGTERM", "SIGTERM twice", "SIGINT", "SIGINT twice", "SIGSTOP past the lease",
)  # fmt: skip
ENDING = (Kind.EXIT, Kind.JVM, Kind.BOTH)
EXPECTED = {0, 3, 75, 130, 137, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""The possible exit codes after a fault, which may strike before the process handles signals; 1 is a bug."""


@dataclass
class Outcome(kills.Outcome):
    """The result, the number of faults of each kind, and the ends that are bugs."""

    struck: Counter[str] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    """Seconds from each SIGTERM or SIGINT to the end of the process."""
    is_over: bool = False

    @property
    def faults(self) -> dict[str, object]:
        return {**super().faults, **({"unreadable": self.unreadable} if self.unreadable else {}), **self._bugs}

    @property
    def _bugs(self) -> dict[str, object]:
        return {"bugs": self.bugs[:5]} if self.bugs else {}


def run(
    pipeline: processes.Pipeline,
    *,
    count: int,
    seconds: float = math.inf,
    before: int = 500,
    rate: float = 30,
    seed: int = 1,
    say: kills.Say = lambda text: None,
) -> Outcome:
    """Inject `count` faults into the three layers, or as many as strike within `seconds`."""
    begun = time.monotonic()
    outcome = Outcome()
    pipeline.write_settings(silver="{defaults: {history: true}}")
    assert pipeline.workload(operations=before, seed=seed).run() == 0
    writing, recording = pipeline.workload(rate=rate, seed=seed + 1), pipeline.recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.all_killed(writing, recording))
        recording.start()
        processes.until(lambda: "ready" in recording.said, seconds=60, what="the recorder", alive=[recording])
        writing.start()
        tormentors: list[_Tormentor] = []
        for name in LAYERS:
            source = tormentors[-1] if tormentors else None
            tormentors.append(
                _Tormentor(pipeline, name, count, outcome, random.Random(f"{seed} {name}"), say, source, begun + seconds)
            )
        for each in tormentors:
            stack.enter_context(each.commands())
        kills._in_threads(tormentors)  # type: ignore[arg-type]
        say("the last fault is done")
        writing.terminate()
        assert writing.wait(60) == 0, writing.said
        time.sleep(2)
        recording.terminate()
        assert recording.wait(60) == 0, recording.said
    kills.caught_up(pipeline)
    kills.judge(pipeline, outcome)
    outcome.unreadable = unreadable(pipeline)
    outcome.seconds = time.monotonic() - begun
    return outcome


def unreadable(pipeline: processes.Pipeline) -> list[str]:
    """The tables that name missing files."""
    looked = pipeline.command("repair", "--dry-run", "--json", log="repair")
    assert looked.run(300) == 0, looked.said[-3000:]
    said = looked.said[looked.said.rindex("\n{") :]  # the log also has its earlier runs
    return [each["table"] for each in json.loads(said)["tables"]]


@dataclass
class _Tormentor:
    """Injects faults into one layer, one process after another."""

    pipeline: processes.Pipeline
    name: str
    count: int
    outcome: Outcome
    rng: random.Random
    say: kills.Say
    source: _Tormentor | None
    end: float

    def __post_init__(self) -> None:
        self.told = self.pipeline.folder / f"{self.name}.faults"
        self.over = self.told.with_name(self.told.name + faults.OVER)
        self.layer = self._command("--continuous", log=self.name)
        self.other = self._command("--continuous", "--take-over", log=f"{self.name}-other")

    def _command(self, *options: str, log: str) -> processes.Command:
        arguments = ["-m", "tests.harness.faults", self.name, "--config", str(self.pipeline.settings), "--debug", *options]
        return processes.Command(arguments, self.pipeline.folder / f"{log}.log")

    @contextlib.contextmanager
    def commands(self) -> Iterator[None]:
        with processes.all_killed(self.layer, self.other):
            yield

    def __call__(self) -> None:
        if (source := self.source) is not None:
            processes.until(lambda: source.moves() > 0, seconds=PATIENCE, what=f"{source.name} begins")
        try:
            while (
                sum(self.outcome.struck.values()) < self.count and time.monotonic() < self.end and not self.outcome.is_over
            ):
                self._one_process()
        except BaseException as error:
            self.outcome.is_over = True
            self.say(f"{self.name}: {error}")
            raise

    def _one_process(self) -> None:
        """Run one process: first with faults at boundaries that only end a run of the command, then with one that ends the process."""
        last = self.rng.choice(("a border", "a border", *FROM_OUTSIDE))
        planned = [
            self._fault(self.rng.choice(faults.IN_PROCESS), TABLES[self.name])
            for _ in range(self.rng.randint(*IN_A_PROCESS))
        ]
        if last == "a border":
            is_seldom = self.name == "silver" and self.rng.random() < SELDOM_SHARE
            planned.append(self._fault(self.rng.choice(ENDING), SELDOM if is_seldom else TABLES[self.name]))
        self._start(planned)
        self._until_struck(len(planned))
        self.over.touch()
        if last != "a border" and self.rng.random() < 0.7:
            moves = self.moves() + self.rng.randint(0, 4)  # the first ones are claims
            self._until(lambda: self.moves() > moves or not self.layer.is_running)
            time.sleep(self.rng.uniform(0, 3))
        if last != "a border" and self.layer.is_running:
            self._strike(last)
            self._count(last)
        self._ended()
        for fault in self._struck():
            self._count(f"{fault.kind.value} {fault.boundary.value}")

    # --- at boundaries of commits

    def _fault(self, kind: Kind, tables: Sequence[str]) -> Fault:
        where = self.rng.choice(tables)
        left_out = {
            *([] if where in OURS else [Boundary.BEFORE_FILE]),
            *([Boundary.INSIDE_COMMIT] if kind in faults.IN_PROCESS else []),
        }
        boundary = self.rng.choice([each for each in Boundary if each not in left_out])
        return Fault(boundary, kind, where, 1 if tables is SELDOM else self.rng.randint(1, 3))

    def _until_struck(self, planned: int) -> None:
        """Wait until all planned faults have struck, or the next one does not: its boundary may never be reached."""
        seen, end = 0, time.monotonic() + PATIENCE  # a start may take minutes if three share two cores
        while seen < planned and self.layer.is_running and time.monotonic() < end:
            time.sleep(0.2)
            told = len(self.told.read_text().splitlines()) if self.told.exists() else 0
            if told > seen:
                seen, end = told, time.monotonic() + UNTIL_IT_COMES

    def _struck(self) -> list[Fault]:
        if not self.told.exists():
            return []
        found = [Fault.from_json(line) for line in self.told.read_text().splitlines()]
        self.told.unlink()
        return found

    # --- from outside, at any moment

    def _strike(self, kind: str) -> None:
        match kind:
            case "Python killed":
                self.layer.kill_alone()
            case "JVM killed":
                for child in children(self.layer.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            case "both killed":
                self.layer.kill()
            case "SIGSTOP past the lease":
                self._stopped()
            case _:
                number = signal.SIGTERM if kind.startswith("SIGTERM") else signal.SIGINT
                asked = time.monotonic()
                os.kill(self.layer.pid, number)
                if kind.endswith("twice"):
                    time.sleep(self.rng.uniform(0, 1))
                    if self.layer.is_running:
                        os.kill(self.layer.pid, number)
                self.layer.wait(PATIENCE)
                self.outcome.stops.append(time.monotonic() - asked)

    def _stopped(self) -> None:
        """Stop it for longer than its lease while another process takes over; when resumed, it commits nothing more and ends."""
        self.layer.signal_group(signal.SIGSTOP)
        moves = self.moves()
        with self.other.start():
            self._until(lambda: self.moves() > moves or not self.other.is_running)
            time.sleep(LEASE_MS / 1000)
            self.layer.signal_group(signal.SIGCONT)
            self._ended()
        self._check_end(self.other)

    # --- the process

    def _start(self, planned: list[Fault]) -> None:
        self.over.unlink(missing_ok=True)
        self.layer.environment = {
            faults.VARIABLE: json.dumps([fault.to_json() for fault in planned]),
            faults.TOLD_VARIABLE: str(self.told),
            faults.LEASE_VARIABLE: str(LEASE_MS),
        }
        self.other.environment = {faults.LEASE_VARIABLE: str(LEASE_MS)}
        self.layer.start()

    def _ended(self) -> None:
        """Wait for the end of the process, if necessary after a SIGTERM, and check how it ended."""
        if self.layer.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.layer.process.wait(ENDS_BY_ITSELF)
        if self.layer.is_running:
            os.kill(self.layer.pid, signal.SIGTERM)
            self.layer.wait(PATIENCE)
        self._check_end(self.layer)
        self.layer.process = None

    def _check_end(self, command: processes.Command) -> None:
        code, said = command.wait(0), command.said
        if code not in EXPECTED or "this is a bug" in said:
            last = [line for line in said.splitlines() if "bug" in line][-1:]
            self.outcome.bugs.append(f"{self.name} ended with {code}: {last}")
            command.log.rename(command.log.with_suffix(f".{len(self.outcome.bugs)}.bug"))

    def _until(self, true: Callable[[], bool]) -> None:
        """Wait until `true` returns true, but no longer than `UNTIL_IT_COMES`: a layer makes no progress while the one before it is
        stopped by faults. The result is judged at the end."""
        with contextlib.suppress(AssertionError):
            processes.until(true, seconds=UNTIL_IT_COMES, what=f"{self.name} moves")

    def _count(self, kind: str) -> None:
        self.outcome.struck[kind] += 1
        self.outcome.kills[self.name] += 1
        self.say(f"{sum(self.outcome.struck.values())} {self.name}: {kind}")

    def moves(self) -> int:
        """The number of commits to the tables of this layer."""
        if self.name == "capture":
            return processes.version(self.pipeline.bronze)
        return sum(processes.version(log.parent) for log in self.pipeline.root.glob(f"{self.name}/*/*/_delta_log"))


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
