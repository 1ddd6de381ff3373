"""Who may write a table: the claim in the `userMetadata` of each of our commits.

A JSON object: `to` (the position), `writer` (a UUID), `host`, `process` (its pid), `started` (the process's start as
the operating system reports it, so that a reused pid is not taken for the owner), `lease` (milliseconds since 1970
until which the claim is valid), `commit` (the name of this commit, see `commit_name`), and fields of the layer.
`released`: the owner stopped cleanly. `errand`: the owner holds the table for this short task, such as `maintain`.

`pipelines.delta.owners` refuses a second writer at its start, `pipelines.delta.fenced_commits` stops one that lost its claim.
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
    """One writer of one table: a process on a host, for one run."""

    writer: str
    host: str
    process: int
    started: str
    errand: str = ""

    def metadata(self, *, now_ms: int, to: object, extra: Mapping[str, object] | None = None) -> str:
        """The `userMetadata` of a commit of this writer: position, identity, and a lease that starts at `now_ms`."""
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


_OF_A_CLAIM = frozenset({"to", "host", "lease", "released", "commit"})
"""Fields of `userMetadata` that distinguish our commits from those of a program that names its `writer`, too."""


def parsed(user_metadata: str | None) -> dict[str, object] | None:
    """The JSON object of one of our commits; None for a foreign commit."""
    if not isinstance(user_metadata, str):
        return None
    try:
        fields = json.loads(user_metadata)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(fields, dict) and "writer" in fields and not _OF_A_CLAIM.isdisjoint(fields)
    return fields if is_ours else None


def commit_name(base: int, unique: str) -> str:
    """The name of a commit: a unique one behind the version that its writer had read."""
    return f"{base}-{unique}"


def commit_base(claim: Mapping[str, object]) -> int | None:
    """The version that the commit's writer had read; None for a commit of an earlier version of this project."""
    base = str(claim.get("commit") or "").rpartition("-")[0]
    return int(base) if base.isdecimal() else None


class Availability(Enum):
    """Whether another writer can take the table."""

    FREE = "free"
    OWNER_ALIVE = "owner alive on this host"
    LEASE_RUNNING = "lease of another host not over"


def verdict(
    claim: Mapping[str, object] | None, *, host: str, now_ms: int, is_alive: bool, committed_ms: int = 0
) -> Availability:
    """Whether a new writer on `host` can take the table at `now_ms`.

    `is_alive`: the claim's process still runs (only used for claims of the same host). `committed_ms` is the time of
    the claim's commit, for a lease given as a duration in seconds.
    """
    if claim is None or claim.get("released"):
        return Availability.FREE
    if claim.get("host") == host:
        return Availability.OWNER_ALIVE if is_alive else Availability.FREE
    return Availability.LEASE_RUNNING if now_ms < lease_end(claim, committed_ms=committed_ms) else Availability.FREE


def lease_end(claim: Mapping[str, object], *, committed_ms: int) -> int:
    """When the claim's lease expires, in milliseconds since 1970."""
    lease = claim.get("lease")
    if not isinstance(lease, (int, float)):
        return committed_ms + LEASE_MS
    is_length = lease < 1_000_000_000
    return committed_ms + int(lease * 1000) if is_length else int(lease)
