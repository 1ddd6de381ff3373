"""Source equals gold: a random workload beside a snapshot and a stream, and what the tables say afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.harness import kills, processes


def run(
    pipeline: processes.Pipeline,
    *,
    operations: int = 20_000,
    seed: int = 1,
    rate: float = 0,
    catch_up: Callable[[], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> kills.Outcome:
    """A quarter of the operations before the first start, for the snapshot; the others while it is read and after.

    The writers are four threads that meet in the same documents. `rate` is in changed documents a second. What is left when they
    have ended is for `catch_up`, and without one for another command.
    """
    begun = time.monotonic()
    before = operations // 4
    assert pipeline.workload(operations=before, seed=seed).run(600) == 0
    say(f"{before:,} operations are there")
    writing, recording = pipeline.workload(operations=operations - before, seed=seed + 1, rate=rate), pipeline.recorder()
    running = pipeline.command("run")
    with processes.all_killed(writing, recording, running):
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
    if catch_up is None:
        kills.caught_up(pipeline, times=1)
    else:
        catch_up()
    say("the pipeline has caught up")
    outcome = kills.Outcome()
    kills.judge(pipeline, outcome)
    outcome.seconds = time.monotonic() - begun
    return outcome
