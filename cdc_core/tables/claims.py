"""Who may write a table: the claim that every commit of ours carries in its `userMetadata`.

One JSON object: `to` (the position), `writer` (a UUID), `host`, `process` (its pid), `started` (when the process began,
as the operating system counts it, so that a pid that is used again is not taken for the owner), `lease` (milliseconds
since 1970 until which the claim holds), and what a layer adds. `released` says that the owner left cleanly, `errand` for
which short task (one of `maintain`, say) it holds the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

LEASE_MS = 120_000
"""A lease lasts 120 seconds, and each commit renews it."""


@dataclass(frozen=True)
class WriterIdentity:
    """One writer of one table: a process on a host, for the time of one run."""

    writer: str
    host: str
    process: int
    started: str
    errand: str = ""

    def metadata(self, *, now_ms: int, to: object, extra: Mapping[str, object] | None = None) -> str:
        """The `userMetadata` of a commit of this writer: position, identity, and a lease from `now_ms` on."""
        fields = {
            "to": to,
            "writer": self.writer,
            "host": self.host,
            "process": self.process,
            "started": self.started,
            "lease": now_ms + LEASE_MS,
            **({"errand": self.errand} if self.errand else {}),
        }
        return json.dumps(fields | dict(extra or {}), separators=(",", ":"))


def parsed(user_metadata: str | None) -> dict[str, object] | None:
    """The JSON object of one of our commits, or None for a commit that is somebody else's."""
    if not user_metadata:
        return None
    try:
        fields = json.loads(user_metadata)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "writer" in fields else None


class Availability(Enum):
    """How free a table is for another writer."""

    FREE = "free"
    OWNER_ALIVE = "owner alive on this host"
    LEASE_RUNNING = "lease of another host not over"


def verdict(
    claim: Mapping[str, object] | None, *, host: str, now_ms: int, is_alive: bool, committed_ms: int = 0
) -> Availability:
    """Whether the table is free for a new writer on `host` at `now_ms`.

    `is_alive` tells whether the claim's process still runs (looked at only for a claim of the same host); `committed_ms`
    is when the claim was committed, for a lease that is given as a length in seconds.
    """
    if claim is None or claim.get("released"):
        return Availability.FREE
    if claim.get("host") == host:
        return Availability.OWNER_ALIVE if is_alive else Availability.FREE
    return Availability.LEASE_RUNNING if now_ms < lease_end(claim, committed_ms=committed_ms) else Availability.FREE


def lease_end(claim: Mapping[str, object], *, committed_ms: int) -> int:
    """Milliseconds since 1970 at which the claim's lease is over."""
    lease = claim.get("lease")
    if not isinstance(lease, (int, float)):
        return committed_ms + LEASE_MS
    is_length = lease < 1_000_000_000
    return committed_ms + int(lease * 1000) if is_length else int(lease)
