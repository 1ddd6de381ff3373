"""The commits of one writer to one table: fenced, retried, and looked up in the log.

Every commit of ours carries the table's position and its writer's claim as `userMetadata`, and is fenced: one constant
`txnAppId` a table, `txnVersion` = the version that was read + 1. Delta skips a transaction version that it has already
seen without a word, so each commit is looked up afterwards; one that is not there was fenced off, and the writer stops.

So a writer stops whose claim another one took over. That a second one is refused beside a living first is in `owners`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.tables import claims, definition
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.delta import direct_log, local_log, owners, table_errors, table_history, upsert
from pipelines.delta.local_log import Commit
from pipelines.spark import failures as spark_failures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Said = Callable[[], tuple[object, Mapping[str, object] | None]]
"""Position and extras of a commit, computed anew for each attempt: a commit that landed after all changes what the last
one said."""

REFUSED = (errors.OwnershipLost, errors.CommitConflict, errors.StorageExhausted, *table_errors.SPARK_ERRORS)
"""What a commit raises that is known to be in no log."""


class FencedCommits:
    """The commits of a claim's holder: who it is, the last version that it knows, and what its last commit said.

    A commit goes through a statement of Spark or through the direct log; both are tried again where others committed first.
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
        """Whether `version` was looked up just now, so that the next statement does not look again."""
        self.surplus_files = 0
        """Files that the last compaction of this writer left beyond those that the size explains."""
        self._unanswered: dict[str, Any] | None = None
        self._last: tuple[int, tuple[int, int] | None] = (self.version, None)
        """The last commit, with what tells its file on a disk from another one of its number."""
        # A weak reference: a writer that was dropped without a release must not hold its table.
        owners.HELD[identity.writer] = self

    @functools.cached_property
    def direct(self) -> direct_log.DirectLog | None:
        """The table's direct log, reached once; None where commits go through Spark."""
        return direct_log.of(self.spark, self.table)

    def last_metadata(self) -> tuple[object, dict[str, Any]]:
        """Position and extras of the last commit, for one that changes neither."""
        return self.metadata.get("to"), carried(self.metadata)

    def user_metadata(self, to: object, extra: Mapping[str, object] | None) -> str:
        """The `userMetadata` of a commit from now on. Each has an identifier, by which it is found in the log."""
        now_ms = clock.now_ms()
        return self.identity.metadata(now_ms=now_ms, to=to, extra={**(extra or {}), "commit": uuid.uuid4().hex[:12]})

    def check_ownership(self) -> None:
        """Move on to the newest version. Raise `OwnershipLost` if a claim of another writer is newer than this writer's last
        commit, `CommitConflict` if a RESTORE is, or another table has its place: what this writer would add does not follow on
        what the table holds then."""
        found = table_history.since(self.spark, self.table, self.version)
        newest = found[0]
        is_last = newest.version == self._last[0]
        if newest.version < self.version or (is_last and (newest.metadata or {}) != self.metadata):
            raise self._conflict("it was removed and made again, or is an older copy,")
        own = None
        for commit in found if newest.version > self.version else ():
            if commit.restored is not None:
                raise self._conflict("it was restored to an earlier version")
            if commit.metadata is not None and commit.metadata.get("writer") != self.identity.writer:
                raise self._lost()
            own = own or (commit if commit.metadata is not None else None)
        if own is not None:  # it got no answer, and came behind the look for it
            self._keep(own.version, own.metadata or {})
        self.version = newest.version

    def _conflict(self, what: str) -> errors.CommitConflict:
        return errors.CommitConflict(
            f"{self.table.label}: {what} while it was written; nothing was committed after that. Start again to "
            "continue from there"
        )

    def refuse_unanswered(self) -> None:
        """Raise `CommitUnknown` after a commit that got no answer: what would follow on it is not known."""
        if self._unanswered is not None:
            raise self._unknown()

    def through_spark(self, act: Callable[[dict[str, str]], None], said: Said) -> int:
        """A statement of Spark, which gets the options of the fence, as a fenced commit; the new version."""

        def fenced(metadata: str) -> None:
            act({"userMetadata": metadata, "txnAppId": definition.APP_ID, "txnVersion": str(self.version + 1)})

        return self._retried(fenced, said, is_statement=True)

    def through_log(self, commit: Callable[..., int], said: Said) -> int:
        """A commit through the direct log onto the last version, and onto the newest where others committed in between."""

        def onto_last(metadata: str) -> int:
            return commit(base=self.version, metadata=metadata)

        return self._retried(onto_last, said, is_statement=False)

    def _retried(self, act: Callable[[str], int | None], said: Said, *, is_statement: bool) -> int:
        """The version of the commit, tried again where others came first, each time with a fence on top of theirs."""
        self.refuse_unanswered()
        for attempt in table_errors.commit_attempts(self.table):
            if not self._is_held():
                raise self._lost()
            # Delta puts a statement onto whatever version it finds; the direct log compares the version itself.
            if is_statement and not self.is_newest:
                self.check_ownership()
            self.is_newest = False
            metadata = self.user_metadata(*said())
            try:
                new = self._outcome(metadata, functools.partial(act, metadata))
                break
            except direct_log.VersionTaken as error:
                self._after_conflict(attempt, error)
            except table_errors.SPARK_ERRORS as error:
                if not (is_statement and table_errors.is_conflict(error)):
                    raise table_errors.translated(error, self.table) from error
                self._after_conflict(attempt, error)
        return new

    def _outcome(self, metadata: str, act: Callable[[], int | None]) -> int:
        """The version in which `act` committed, by its answer or by the log; raises what it raises where it committed
        nothing.

        An answer may be an error although the commit is in the log, and a success although it was fenced off. Where there is
        no answer (the JVM is gone, an interrupt), the commit may be there, or come yet: `_unanswered` remembers it.
        """
        # Before the call: an interrupt may come at any moment of it, and leaves by none of the branches below.
        self._unanswered = said = claims.parsed(metadata) or {}
        try:
            new = act()
        except (upsert.NeedsMerge, upsert.NotCommitted):  # raised before anything was committed
            self._unanswered = None
            raise
        except (*table_errors.SPARK_ERRORS, direct_log.VersionTaken) as error:
            # The error is an answer, but that of a lost server: nothing of this commit is on its way any more, and the log says
            # whether it got there.
            landed = self._looked_up(said)
            if landed is None:
                if not spark_failures.is_server_gone(error):
                    self._unanswered = None
                raise
            return self._committed(landed, said)
        if new is None:
            # A statement does not tell its version, and Delta skips one whose fence it has seen as quietly as it commits
            # another.
            new = self._looked_up(said)
        if new is None:
            raise self._lost()
        return self._committed(new, said)

    def settle(self) -> None:
        """Take a commit that got no answer for the last one, where it is in the log; the next one follows on what the log has."""
        if self._unanswered is not None:
            landed = self._landed(self._unanswered)
            if landed is not None:
                self._committed(landed, self._unanswered)
            self._unanswered = None

    def _is_held(self) -> bool:
        """Whether the log has this writer's last commit, as far as a disk tells it: a table that was removed and made again may have come
        to the same version."""
        folder, (version, stamp) = local_log.folder(self.table), self._last
        if folder is None or stamp in (None, _stamp(folder, version)):
            return True
        found = local_log.commit(folder, version)  # of a copy that was brought back, or not there any more
        return found is None or found.metadata == self.metadata

    def _landed(self, said: Mapping[str, Any]) -> int | None:
        """The version whose commit says this, among those after this writer's last one."""
        found = table_history.since(self.spark, self.table, self.version)
        # Equal as a whole, and each has an identifier of its own (`user_metadata`): no other commit says the same.
        return next((commit.version for commit in found if commit.metadata == said), None)

    def _looked_up(self, said: Mapping[str, Any]) -> int | None:
        """`_landed`, or `CommitUnknown` where the log cannot be read, as in an outage of its store that took the
        answer, too."""
        try:
            return self._landed(said)
        except (errors.MedallionError, OSError, *table_errors.SPARK_ERRORS) as error:
            raise self._unknown() from error

    def _unknown(self) -> errors.CommitUnknown:
        return errors.CommitUnknown(
            f"{self.table.label}: the store did not confirm the last commit; start again, the table shows whether it "
            "succeeded"
        )

    def _committed(self, new_version: int, metadata: Mapping[str, Any]) -> int:
        self._keep(new_version, metadata)
        self._unanswered = None
        return new_version

    def _keep(self, version: int, metadata: Mapping[str, Any]) -> None:
        """Go on from a commit of this writer."""
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
    """`local_log.stamp`; None where it cannot be told, too: what was committed must not fail for it."""
    with contextlib.suppress(OSError):
        return local_log.stamp(folder, version)
    return None


def carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer added to the metadata, which a claim or a release hands on."""
    own = {"to", "writer", "host", "process", "started", "lease", "commit", "released", "errand"}
    return {name: value for name, value in metadata.items() if name not in own}
