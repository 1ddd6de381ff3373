"""Kills capture, silver and gold repeatedly with SIGKILL at random moments, then compares bronze and gold with the source.

A random workload runs all the time, over collections that a snapshot is still reading. Each layer is a process that is killed `rounds`
times: one time in three during its start, otherwise at some moment after a commit; sometimes with its JVM, sometimes alone, so that the
JVM is in the middle of its work when its input ends. Then every layer catches up, and an independent recorder and an independent reader
of the tables find what is missing.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pymongo import MongoClient

from tests.harness import oracle, processes, recorder, workload

LAYERS = ("capture", "silver", "gold")
PATIENCE = 300.0
"""Seconds within which a restarted layer must move its position."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Torment:
    """The size of a run: kills per layer, changed documents before the first start, and changed documents a second after it."""

    rounds: int = 3
    before: int = 1500
    rate: float = 60
    seed: int = 1
    flatten: str | None = None


@dataclass
class Outcome:
    """The result; `faults` is empty if nothing is missing, doubled, unexpected, out of order or different."""

    kills: Counter[str] = field(default_factory=Counter)
    events: int = 0
    documents: int = 0
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    is_in_order: bool = True
    differences: dict[str, list[str]] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, object]:
        """The findings, without those that are as they should be."""
        found: dict[str, object] = {
            "missing": self.missing[:5],
            "doubled": self.doubled[:5],
            "unexpected": self.unexpected[:5],
            "differences": {name: found[:10] for name, found in self.differences.items() if found},
            "out of order": not self.is_in_order,
        }
        return {name: value for name, value in found.items() if value}


def run(pipeline: processes.Pipeline, torment: Torment, say: Say = lambda text: None) -> Outcome:
    """Run everything. Raises AssertionError if a process ends by itself or makes no progress."""
    begun = time.monotonic()
    outcome = Outcome()
    assert pipeline.workload(operations=torment.before, seed=torment.seed).run() == 0
    writing, recording = pipeline.workload(rate=torment.rate, seed=torment.seed + 1), pipeline.recorder()
    layers = {name: pipeline.command(name, "--continuous") for name in LAYERS}
    with processes.all_killed(writing, recording, *layers.values()):
        recording.start()
        processes.until(lambda: "ready" in recording.said, seconds=60, what="the recorder", alive=[recording])
        writing.start()
        before: _Killer | None = None
        killers = []
        for name, layer in layers.items():
            before = _Killer(pipeline, layer, name, before, torment, outcome.kills, say)
            killers.append(before)
        _in_threads(killers)
        say("the last kill is done")
        for layer in layers.values():
            layer.terminate()
        writing.terminate()
        assert writing.wait(60) == 0, writing.said
        recording.terminate()
        assert recording.wait(60) == 0, recording.said
        for name, layer in layers.items():
            assert layer.wait(120) == 0, f"{name}:\n{layer.said[-3000:]}"
    caught_up(pipeline)
    judge(pipeline, outcome, flatten=torment.flatten)
    outcome.seconds = time.monotonic() - begun
    return outcome


def caught_up(pipeline: processes.Pipeline, *, times: int = 2) -> None:
    """Let every layer catch up, `times` times; the second time it has nothing left to do."""
    for attempt in range(times):
        last = pipeline.command("run", "--once", log=f"run-{attempt}")
        assert last.run(600) == 0, last.said[-3000:]


def judge(pipeline: processes.Pipeline, outcome: Outcome, *, flatten: str | None = None) -> None:
    """Compare bronze with the recording, and gold with the source."""
    first = oracle.first_token(pipeline.bronze)
    expected = [token for token in recorder.tokens(pipeline.recording) if token > first]
    found = oracle.bronze_tokens(pipeline.bronze)
    outcome.events = len(found)
    outcome.missing = sorted(set(expected) - set(found))
    outcome.unexpected = sorted(set(found) - set(expected))
    outcome.doubled = [token for token, times in Counter(found).items() if times > 1]
    outcome.is_in_order = found == sorted(found)
    with MongoClient(pipeline.uri) as client:
        for name in workload.COLLECTIONS:
            collection = client[pipeline.database][name]
            outcome.documents += collection.count_documents({})
            outcome.differences[name] = oracle.compare(collection, pipeline.gold(name), flatten=flatten)


@dataclass
class _Killer:
    """Kills one layer, waits until it makes progress, and kills it again."""

    pipeline: processes.Pipeline
    layer: processes.Command
    name: str
    source: _Killer | None
    torment: Torment
    kills: Counter[str]
    say: Say

    def __call__(self) -> None:
        rng = random.Random(f"{self.torment.seed} {self.name}")
        if self.source is not None:
            self.source.wait_for(1)
        self.layer.start()
        for number in range(self.torment.rounds):
            before = self.moves()
            if number % 3 != 2:
                self.wait_for(before + 1, alive=[self.layer])
            time.sleep(rng.uniform(0, 6))
            assert self.layer.is_running, f"{self.name} ended by itself:\n{self.layer.said[-3000:]}"
            kill, how = rng.choice(((self.layer.kill, "with its JVM"), (self.layer.kill_alone, "alone")))
            kill()
            self.kills[self.name] += 1
            self.say(f"{self.name}: kill {number + 1} {how}, after {self.moves() - before} moves")
            self.layer.start()
        self.wait_for(self.moves() + 1, alive=[self.layer])

    def moves(self) -> int:
        """How many positions the tables of this layer have had; claims do not move a position."""
        if self.name == "capture":
            return processes.version(self.pipeline.bronze)
        logs = self.pipeline.root.glob(f"{self.name}/*/*/_delta_log")
        return sum(len(processes.positions(log.parent)) for log in logs)

    def wait_for(self, moves: int, *, alive: Sequence[processes.Command] = ()) -> None:
        what = f"{self.name} has moved its position {moves} times"
        processes.until(lambda: self.moves() >= moves, seconds=PATIENCE, what=what, alive=alive)


def _in_threads(killers: list[_Killer]) -> None:
    """Run all killers at once; when all have ended, raise the first failure."""
    failures: list[BaseException] = []

    def guarded(killer: _Killer) -> None:
        try:
            killer()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(killer,)) for killer in killers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
