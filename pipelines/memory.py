"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim() -> None:
    """Return the memory that glibc keeps after it was freed; takes milliseconds. Does nothing with other allocators.

    By itself glibc returns only the free end of each heap: one value in use there keeps hundreds of megabytes.
    """
    _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int]:
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda _: 0
    return function
