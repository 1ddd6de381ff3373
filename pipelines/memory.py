"""Memory that this process has freed, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim() -> None:
    """Give back what glibc keeps of freed memory, in milliseconds; nothing where another library allocates.

    It gives back by itself only what is free at the end of its heaps, where some value that is in use is enough to keep hundreds of megabytes.
    """
    _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda _: 0
    return found
