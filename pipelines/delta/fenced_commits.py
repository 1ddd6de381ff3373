"""The commits of one writer to one table: fenced, retried, and verified in the log.

Each commit carries the table's position and its writer's claim as `userMetadata`, and is fenced: a constant `txnAppId`, and `txnVersion` =
the version that was read + 1. Delta silently skips a `txnVersion` that it has already seen, so each commit is looked up afterwards. Where
it is not in the log, it was fenced off, and the writer stops.

This stops a writer whose claim another one took over. `owners` refuses a second writer beside a live one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import direct_log, local_log, owners, table_errors, table_history, upsert
from pipelines.delta.local_log import Commit
from pipelines.delta.log_actions import Fence
from pipelines.spark import failures as spark_failures

REFUSED = (errors.OwnershipLost, errors.CommitConflict, errors.StorageExhausted, *table_errors.SPARK_ERRORS)
"""Errors of a commit that is certainly not in the log."""


@dataclass(frozen=True)
class CommitPosition:
    """What the metadata of a commit says beside its claim: the position `to`, and what its layer adds, `extra`.

    With `is_last` they are those of the last commit, and `extra` comes on top. They are read at each attempt, because an earlier commit
    without an answer may turn out to be in the log.
    """

    to: object = None
    extra: Mapping[str, object] | None = None
    is_last: bool = False


LAST = CommitPosition(is_last=True)


class FencedCommits:
    """Commits for the holder of a claim; knows its identity, the last version that it read, and the metadata of its last commit.

    A commit is a Spark statement or goes through the direct log. Both are retried where other commits came first.
    """

    def __init__(
        self, spark: SparkSession, table: tables.TableRef, *, identity: claims.WriterIdentity, base: Commit | None
    ) -> None:
        self.spark = spark
        self.table = table
        self.identity = identity
        self.version = base.version if base else 0
        self.metadata: dict[str, Any] = dict(base.metadata or {}) if base else {}
        self.properties: Mapping[str, str] = {}
        """The table's properties when it was claimed."""
        self.is_newest = False
        """Whether `version` has just been read, so that the next statement does not read the log again."""
        self.surplus_files = 0
        """The surplus files (`maintenance.compact`) that the last compaction of this writer could not merge."""
        self._unanswered: dict[str, Any] | None = None
        self._last: tuple[int, tuple[int, int] | None] = (self.version, None)
        """The version of the last commit, and the stamp of its file on a disk (`local_log.stamp`)."""
        # A weak reference: a writer that is dropped without a release must not keep its claim.
        owners.HELD[identity.writer] = self

    @functools.cached_property
    def direct(self) -> direct_log.DirectLog | None:
        """The table's direct log, reached once; None where commits go through Spark."""
        return direct_log.of(self.spark, self.table)

    def last_metadata(self) -> tuple[object, dict[str, Any]]:
        """Position and extras of the last commit, for a commit that changes neither."""
        return self.metadata.get("to"), carried(self.metadata)

    def user_metadata(self, position: CommitPosition) -> str:
        """The `userMetadata` of a commit now, as JSON. Its `commit` is a new name, by which the commit is found in the log."""
        to, extra = self.last_metadata() if position.is_last else (position.to, {})
        extra |= {**(position.extra or {}), "commit": claims.commit_name(self.version, uuid.uuid4().hex[:12])}
        return self.identity.metadata(now_ms=clock.now_ms(), to=to, extra=extra)

    def check_ownership(self) -> None:
        """Move on to the newest version.

        Raises `OwnershipLost` where another writer has committed after this writer's last commit. Raises `CommitConflict` where the table
        was restored after it, or replaced by another one: the next commit of this writer would not follow on the table's rows.
        """
        # From this writer's last commit on: a table that was made again may have more commits than that.
        own_version = self._last[0] if self.metadata else self.version
        commits = table_history.since(self.spark, self.table, own_version - 1)
        newest = commits[0]
        own_commit = next((each for each in commits if each.version == own_version), None)
        is_other = own_commit is not None and (own_commit.metadata or {}) != self.metadata
        if newest.version < self.version or is_other:
            raise self._conflict("it was removed and made again, or is an older copy,")
        new_commits = [commit for commit in commits if commit.version > self.version]
        for commit in new_commits:
            if commit.restored is not None:
                raise self._conflict("it was restored to an earlier version")
            if commit.metadata is not None and commit.metadata.get("writer") != self.identity.writer:
                raise self._lost()
        late_commit = next((commit for commit in new_commits if commit.metadata is not None), None)
        if late_commit is not None:  # a commit without an answer, which arrived after it had been looked up
            self._keep(late_commit.version, late_commit.metadata or {})
        self.version = newest.version

    def _conflict(self, what: str) -> errors.CommitConflict:
        return errors.CommitConflict(
            f"{self.table.label}: {what} while it was written; nothing was committed after that. Start again to "
            "continue from there"
        )

    def refuse_unanswered(self) -> None:
        """Raise `CommitUnknown` after a commit without an answer: the position of the next commit is not known."""
        if self._unanswered is not None:
            raise self._unknown()

    def commit(self, act: Callable[[Fence], int | None], position: CommitPosition, *, is_statement: bool = False) -> int:
        """Commit by a method of the direct log, which returns the version, or by a Spark statement, which does not; the new version.

        `act` is called with a fence on top of the last version. Where other commits came first, it is called again with one on top of them.
        """
        self.refuse_unanswered()
        for attempt in table_errors.commit_attempts(self.table):
            if not self._is_held():
                raise self._lost()
            # Delta runs a statement on the newest version, whatever it is; the direct log compares the version itself.
            if is_statement and not self.is_newest:
                self.check_ownership()
            self.is_newest = False
            try:
                new_version = self._outcome(act, Fence(self.version, self.user_metadata(position)))
                break
            except direct_log.VersionTaken as error:
                self._after_conflict(attempt, error)
            except table_errors.SPARK_ERRORS as error:
                if not (is_statement and table_errors.is_conflict(error)):
                    raise table_errors.translated(error, self.table) from error
                self._after_conflict(attempt, error)
        return new_version

    def _outcome(self, act: Callable[[Fence], int | None], fence: Fence) -> int:
        """The version in which `act` committed, by its answer or by the log. Raises the error of `act` where it committed nothing.

        The answer may be an error although the commit is in the log, or a success although it was fenced off. Without an answer (the JVM is
        gone, or an interrupt) the commit may be in the log, or arrive later: `_unanswered` has its metadata.
        """
        # Before the call: an interrupt may come at any time, and takes none of the branches below.
        self._unanswered = parsed = claims.parsed(fence.metadata) or {}
        try:
            new_version = act(fence)
        except (upsert.NeedsMerge, upsert.NotCommitted):  # raised before anything was committed
            self._unanswered = None
            raise
        except (*table_errors.SPARK_ERRORS, direct_log.VersionTaken) as error:
            # The error is an answer, unless the server is gone, or the store did not answer: a request that timed out may still take
            # effect. Otherwise the commit cannot arrive later, and the log shows whether it succeeded.
            landed = self._looked_up(parsed)
            if not landed:
                if not spark_failures.is_unanswered(error):
                    self._unanswered = None
                raise
            return self._found(landed, parsed)
        if new_version is None:
            # A statement does not return its version, and Delta silently skips one whose fence it has seen.
            landed = self._looked_up(parsed)
            if not landed:
                raise self._lost()
            return self._found(landed, parsed)
        return self._committed(new_version, parsed)

    def settle(self) -> None:
        """Look up a commit without an answer: where it is in the log, it becomes the last one. Then the next commit is allowed."""
        if self._unanswered is not None:
            landed = self._landed(self._unanswered)
            if landed:
                self._found(landed, self._unanswered)
            self._unanswered = None

    def _is_held(self) -> bool:
        """Whether a log on a disk still has this writer's last commit; true in a store.

        A table that was removed and created again may have reached the same version.
        """
        folder, (version, stamp) = local_log.folder(self.table), self._last
        if folder is None or stamp in (None, _stamp(folder, version)):
            return True
        commit = local_log.commit(folder, version)  # in a restored copy of the folder the commit has another stamp
        return commit is None or commit.metadata == self.metadata

    def _landed(self, parsed: Mapping[str, Any]) -> list[Commit]:
        """The commit with this metadata, and those between this writer's last one and it, newest first; empty where there is none."""
        commits = table_history.since(self.spark, self.table, self.version)
        # The metadata contains a unique name (`user_metadata`).
        return [*itertools.dropwhile(lambda commit: commit.metadata != parsed, commits)]

    def _looked_up(self, parsed: Mapping[str, Any]) -> list[Commit]:
        """`_landed`; raises `CommitUnknown` where the log cannot be read, as in an outage of its store."""
        try:
            return self._landed(parsed)
        except (errors.MedallionError, OSError, *table_errors.SPARK_ERRORS) as error:
            raise self._unknown() from error

    def _unknown(self) -> errors.CommitUnknown:
        return errors.CommitUnknown(
            f"{self.table.label}: the store did not confirm the last commit; start again, the table shows whether it "
            "succeeded"
        )

    def _found(self, landed: Sequence[Commit], metadata: Mapping[str, Any]) -> int:
        """Take the commit of a statement, given with those that came between, as the last one.

        Raises `CommitConflict` where one of these restored the table. It came before the statement had begun, which Delta then ran on the
        restored rows: its position is not theirs (`table_history.VoidCommit`).
        """
        if any(commit.restored is not None for commit in landed[1:]):
            self._unanswered = None
            raise self._conflict("it was restored to an earlier version")
        return self._committed(landed[0].version, metadata)

    def _committed(self, new_version: int, metadata: Mapping[str, Any]) -> int:
        self._keep(new_version, metadata)
        self._unanswered = None
        return new_version

    def _keep(self, version: int, metadata: Mapping[str, Any]) -> None:
        """Take a commit of this writer as its last one."""
        self.version = version
        self.metadata = dict(metadata)
        folder = local_log.folder(self.table)
        self._last = version, None if folder is None else _stamp(folder, version)

    def _after_conflict(self, attempt: int, error: BaseException) -> None:
        if attempt + 1 == table_errors.COMMIT_ATTEMPTS:
            raise table_errors.conflict(self.table) from error
        time.sleep(min(0.1 * 2**attempt, 5.0))
        self.check_ownership()

    def _lost(self) -> errors.OwnershipLost:
        return errors.OwnershipLost(
            f"{self.table.label}: another writer took over this table; this one stopped and committed nothing more. If "
            "this one should run, stop the other and start this one with --take-over"
        )


def _stamp(folder: Path, version: int) -> tuple[int, int] | None:
    """`local_log.stamp`; None on an error, too, so that a successful commit does not fail."""
    with contextlib.suppress(OSError):
        return local_log.stamp(folder, version)
    return None


def carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The extras that a layer added to the metadata, which a claim or a release carries over."""
    claim_fields = {"to", "writer", "host", "process", "started", "lease", "commit", "released", "errand"}
    return {name: value for name, value in metadata.items() if name not in claim_fields}
