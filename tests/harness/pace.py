"""Limits of CPU time that hold on a slow machine, too: they find a step that grows with the square of its input, and no speed."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

LOOP = 300_000
LOOP_SECONDS = 0.01
"""The CPU time of the loop on the machine for which limits are stated."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that takes at most so much CPU time, or more in proportion where a loop, measured right after it, takes longer.

    Without the garbage collector, which goes through all that a whole suite has left behind.
    """
    gc.disable()
    try:
        began = time.process_time()
        yield
        taken = time.process_time() - began
    finally:
        gc.enable()
    assert taken < seconds * max(1.0, _loop_seconds() / LOOP_SECONDS)


def _loop_seconds() -> float:
    began, total = time.process_time(), 0
    for number in range(LOOP):
        total += number * number
    return time.process_time() - began
