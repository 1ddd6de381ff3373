"""The driver's clock, in the unit of every `…_ms` field of a table or a commit."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
