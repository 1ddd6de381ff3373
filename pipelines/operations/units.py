"""Formats amounts for people. Apart from `terminal`, so that messages need no terminal library."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A duration in its two largest units, as `3 d 4 h`."""
    remaining, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining = divmod(remaining, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
