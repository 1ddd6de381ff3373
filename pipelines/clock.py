"""The driver's clock, in the unit of every `…_ms` that a table or a commit holds."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
