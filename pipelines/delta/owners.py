"""The owner of a table: the identity in a writer's claim, and whether the claim's process is still alive.

`refuse_second` refuses a second writer (the rule is in `cdc_core.tables.claims`). `fenced_commits` stops a writer whose claim was taken
over.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import table_history
from pipelines.delta.local_log import Commit
from pipelines.spark import scratch

HELD: WeakValueDictionary[str, object] = WeakValueDictionary()
"""The writers of this process that still hold their claim, by the `writer` of their identity."""


def is_held(spark: SparkSession, table: tables.TableRef, *, take_over: bool = False, since_ms: int = 0) -> bool:
    """Whether a writer holds the table: a live process of this host, or one of another host whose lease has not expired.

    With `take_over` only one that claimed it after `since_ms`.
    """
    return holder(spark, table) is not None and (not take_over or came_since(spark, table, since_ms))


def holder(spark: SparkSession, table: tables.TableRef) -> Mapping[str, Any] | None:
    """The claim of the writer that holds the table (`is_held`); None where there is none."""
    last_commit = table_history.standing(spark, table).last
    return None if last_commit is None or _verdict(last_commit) is claims.Availability.FREE else last_commit.metadata


def _verdict(last: Commit | None) -> claims.Availability:
    if last is None or last.metadata is None:
        return claims.Availability.FREE
    claim = last.metadata
    return claims.verdict(
        claim, host=platform.node(), now_ms=clock.now_ms(), is_alive=_has_living_owner(claim), committed_ms=last.timestamp_ms
    )


def refuse_second(table: tables.TableRef, last: Commit | None) -> None:
    """Raise `TableOwned` or `LeaseHeld` where another writer holds the table; `last` is the newest commit with a claim."""
    if last is None or last.metadata is None:
        return
    claim = last.metadata
    verdict = _verdict(last)
    if claim.get("errand") and verdict is not claims.Availability.FREE:
        raise errors.LeaseHeld(
            f"{table.label}: {claim['errand']} is using it and releases it by itself; try again in a minute"
        )
    match verdict:
        case claims.Availability.FREE:
            return
        case claims.Availability.OWNER_ALIVE:
            raise errors.TableOwned(
                f"{table.label}: process {claim.get('process')} on this host writes it. Stop that process first, or use "
                "--take-over if you know that it is gone"
            )
        case claims.Availability.LEASE_RUNNING:
            end = claims.lease_end(claim, committed_ms=last.timestamp_ms)
            seconds = max(1, (end - clock.now_ms()) // 1000)
            raise errors.LeaseHeld(
                f"{table.label}: a writer on host {claim.get('host')} holds the lease for {seconds} s more. Try again "
                "then, or use --take-over if you know that the writer is gone"
            )


def came_since(spark: SparkSession, table: tables.TableRef, since_ms: int) -> bool:
    """Whether the table's last writer claimed it after a time, so that a decision of that time did not consider it."""
    last_writer = None
    for commit in table_history.newest_first(spark, table):
        if commit.metadata is not None:
            last_writer = last_writer or commit.metadata["writer"]
            if commit.metadata["writer"] != last_writer:
                return True
            if commit.timestamp_ms <= since_ms:
                return False
    return True


def _has_living_owner(claim: Mapping[str, Any]) -> bool:
    """Whether the claim's process is alive; for this process, whether one of its writers still holds the claim."""
    if claim.get("process") == os.getpid() and claim.get("started") == _started(os.getpid()):
        return claim.get("writer") in HELD
    return _is_alive(claim.get("process"), claim.get("started"))


def identity(errand: str = "") -> claims.WriterIdentity:
    return claims.WriterIdentity(uuid.uuid4().hex, platform.node(), os.getpid(), _started(os.getpid()) or "", errand)


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start of a process as `boot:ticks`; empty where it cannot be read, None where the process is gone."""
    try:
        # Fields are counted from the end of the second one: the program's name in brackets, which may contain blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if scratch.is_gone(str(pid)) else ""
    # A zombie has ended; only its parent has not read its exit code.
    is_gone = fields[0] in ("Z", "X")
    # Field 22 is the start in clock ticks after the boot. The boot's identifier is added because process numbers are reused.
    return None if is_gone else f"{_boot()}:{fields[19]}"


def _is_alive(pid: object, started: object) -> bool:
    start = _started(pid) if isinstance(pid, int) else None  # empty where /proc hides processes of other users
    return start is not None and (not started or start in ("", started))
