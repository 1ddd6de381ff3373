"""Runs a random workload during the snapshot and the stream, then compares gold with the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from tests.harness import kills, processes

Act = Callable[[threading.Event, bool], object]
"""``(stop, once)``: what `medallion run` does, until `stop` is set, or once."""


@dataclass
class Here:
    """The pipeline in a thread, on this process' Spark, with the methods of a `processes.Command`."""

    act: Act
    arguments: tuple[str, ...] = ("run", "here")
    said: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.act(self.stop, False)
        except BaseException as error:
            self.said = repr(error)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def terminate(self) -> None:
        self.stop.set()

    def wait(self, seconds: float) -> int:
        self._thread.join(seconds)
        return int(self.is_running or bool(self.said))

    def __enter__(self) -> Here:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop.set()


def run(
    pipeline: processes.Pipeline,
    *,
    operations: int = 20_000,
    seed: int = 1,
    rate: float = 0,
    here: Act | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> kills.Outcome:
    """Perform a quarter of the operations before the first start, for the snapshot, and the others during the snapshot and after it.

    Four threads write to the same documents, at most `rate` changed documents a second. The pipeline runs as `here` until they have
    ended, and then once; without `here` it runs as two commands.
    """
    begun = time.monotonic()
    before = operations // 4
    assert pipeline.workload(operations=before, seed=seed).run(600) == 0
    say(f"{before:,} operations are there")
    writing, recording = pipeline.workload(operations=operations - before, seed=seed + 1, rate=rate), pipeline.recorder()
    running = pipeline.command("run") if here is None else Here(here)
    with processes.all_killed(writing, recording), running:
        recording.start()
        processes.until(lambda: "ready" in recording.said, seconds=60, what="the recorder", alive=[recording])
        running.start()
        processes.until(
            lambda: processes.version(pipeline.bronze) >= 2, seconds=120, what="the snapshot has begun", alive=[running]
        )
        writing.start()
        say("the pipeline and the writers run")
        assert writing.wait(3600) == 0, writing.said[-3000:]
        say("the writers are done")
        running.terminate()
        recording.terminate()
        assert recording.wait(60) == 0, recording.said
        assert running.wait(300) == 0, running.said[-3000:]
    if here is None:
        kills.caught_up(pipeline, times=1)
    else:
        here(threading.Event(), True)
    say("the pipeline has caught up")
    outcome = kills.Outcome()
    kills.judge(pipeline, outcome)
    outcome.seconds = time.monotonic() - begun
    return outcome
