"""Where the change stream begins: behind bronze's position, at the start of the settings, or now.

Bronze's position is the last token of its rows (`pipelines.bronze.log.read_position`). `pipelines.mongodb.change_stream` opens the stream
behind an event's token at its cluster time, and behind a high-water mark or an invalidate by `startAfter`
(`resume_token.resumes_alone` says why). What comes again is dropped there (`Replay`) and, where the stream begins at a time alone,
by `intake`.

Nothing here writes: a capture whose stream cannot go on must have changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bson.timestamp import Timestamp

from cdc_core import errors
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.stream import filters, resume_token
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AHEAD_SECONDS = 60
"""A position may be so far ahead of what a server says: a mongos knows of its cluster's time by hearsay."""


@dataclass(frozen=True)
class ExistingBronze:
    """What is read from a bronze table before it is claimed: its position, whether it was written through another filter, and from
    which replica set, where its writer said so."""

    found: bronze_log.UnclaimedPosition | None = None
    is_other_stream: bool = False
    replica_set: str | None = None

    @property
    def position(self) -> bronze_log.BronzePosition | None:
        return self.found.position if self.found is not None else None

    @staticmethod
    def read(spark: SparkSession, table: bronze_log.tables.TableRef, *, fingerprint: str) -> ExistingBronze:
        """Read it; `fingerprint` is that of the settings' filter. Raises `TableNotOurs`."""
        at = table_history.standing(spark, table)
        if at.version < 0:
            return ExistingBronze()
        delta.check_ours(spark, table)
        # After a RESTORE what its version said: by those settings, and from there, its rows were captured.
        said = at.said or (at.last.metadata if at.last else None) or {}
        before = said.get("stream")
        is_other = before is not None and not filters.is_same_stream(before, fingerprint)
        found = bronze_log.UnclaimedPosition(at.version, bronze_log.read_position(spark, table))
        return ExistingBronze(found, is_other, said.get("replica_set"))


@dataclass(frozen=True)
class OpenStream:
    """An open change stream.

    `bronze_token` is the token of bronze's last row where the stream may give events once more up to there. `gap` says what
    was lost where the stream begins behind a position that the oplog no longer holds.
    """

    stream: change_stream.ChangeStream
    bronze_token: str | None = None
    gap: Mapping[str, object] | None = None


@dataclass(frozen=True)
class StreamOpener:
    """Opens the change stream of a run.

    `is_other_stream` says that bronze was written through another filter: the tokens of that stream are none of this one.
    `replica_sets` are the names of the one that bronze was written from, and of the source; None for what is not known.
    """

    deployment: Deployment
    options: change_stream.StreamOptions
    halt: threading.Event
    custom: snapshot_mode.Snapshotter | None = None
    is_other_stream: bool = False
    replica_sets: tuple[str | None, str | None] = (None, None)

    def open_or_restart(self, position: bronze_log.BronzePosition | None) -> OpenStream:
        """The stream, and the gap before it where the position was lost and the snapshot mode says to start over.

        A first start whose `capture.start.op.time` is lost begins now: it takes a snapshot anyway.
        """
        try:
            return self.open(position)
        except errors.PositionLost:
            if not snapshot_mode.replaces_lost_position(self.deployment.source, custom=self.custom):
                raise
            if position is not None:
                self._wait_for_time_of(position)
            # Opened before the gap is written down: the gap ends where this stream begins.
            stream = self._first_accepted([change_stream.StreamStart()], None)
            if position is None:
                log.warning("the oplog no longer reaches back to capture.start.op.time: starting now, with a snapshot")
                return OpenStream(stream)
            lost_at = tokens.utc(position.token)
            log.warning("the oplog no longer holds the position of %s: taking a new snapshot", lost_at)
            return OpenStream(stream, gap={"from": position.token, "to": stream.begins, "since": lost_at})

    def open(self, position: bronze_log.BronzePosition | None) -> OpenStream:
        """A stream that continues behind the position, or begins now.

        A token of a stream with another filter, or one that the server refuses, is replaced by its cluster time; what
        comes again is dropped by its token (`intake`). Raises `PositionLost` where the oplog no longer reaches back.
        """
        if position is None:
            return OpenStream(self._first_accepted([self._first_start()], None))
        with mongodb_failures.translating("opening the change stream"):
            # First: a lost position is made up for by a snapshot, which would be as far behind.
            self._check_not_ahead(position)
        self._check_replica_set(position)
        by_time = change_stream.StreamStart(at=tokens.cluster_time(position.token))
        # A resume token holds for the pipeline that gave it: the server may not find its event through another filter. A
        # time holds for any.
        starts = [by_time] if self.is_other_stream else [change_stream.StreamStart(position.token), by_time]
        return OpenStream(self._first_accepted(starts, position), bronze_token=position.token)

    def _first_accepted(
        self, starts: Sequence[change_stream.StreamStart], position: bronze_log.BronzePosition | None
    ) -> change_stream.ChangeStream:
        """A stream from the first of these places that the server takes."""
        lost: mongodb_failures.HistoryLost | None = None
        for start in starts:
            stream = self._stream(start)
            try:
                with mongodb_failures.translating("opening the change stream"):
                    if position is not None:
                        self._check_begins_within(stream, position)
                    stream.open()
                    # Opening alone proves nothing: the server says that a position is lost with the first batch.
                    stream.probe()
                    self._check_held(stream, start, position)
                return stream
            except mongodb_failures.HistoryLost as error:
                stream.close()
                lost = error
                if error.code == mongodb_failures.CHANGE_STREAM_HISTORY_LOST:
                    break  # the place is older than the oplog, however it is named
        raise tokens.lost(position, lost)

    def _check_replica_set(self, position: bronze_log.BronzePosition) -> None:
        """Raise `PositionLost` where bronze was written from another replica set.

        Its oplog may span the position, and behind a position that names no event nothing else would tell that the events are others.
        """
        before, now = self.replica_sets
        if None not in self.replica_sets and before != now:
            log.warning(
                "bronze was captured from the replica set %s, but the source is %s, which is a different deployment",
                before,
                now,
            )
            raise tokens.lost(position, None)

    @staticmethod
    def _check_begins_within(stream: change_stream.ChangeStream, position: bronze_log.BronzePosition) -> None:
        """Raise `HistoryLost` for a position from before the oplog.

        An oplog that never rolled takes any earlier time for its beginning: then it is that of another deployment.
        """
        # Of the server that is read: a secondary's oplog may reach further back than the primary's.
        window = mongodb_server.oplog_window(stream.server)
        if window is not None and tokens.cluster_time(position.token).time < window.first:
            raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)

    def _check_not_ahead(self, position: bronze_log.BronzePosition) -> None:
        """Raise `SourceUnsuitable` for a position from the server's future.

        No event would come until then, and what silver holds would be newer than all of them.
        """
        latest, client = tokens.cluster_time(position.token).time - AHEAD_SECONDS, self.deployment.client
        if latest <= mongodb_server.operation_time(client).time:
            return
        # A mongos that was just started knows of its shards' time when they have answered it.
        catalog.database_names(client)
        if latest > mongodb_server.operation_time(client).time:
            raise errors.SourceUnsuitable(
                f"source: the server's time is behind bronze's position {tokens.utc(position.token)}. It is not the "
                "deployment that was captured, or its clock was set back. Nothing was changed. Capture it under another "
                "name or lakehouse root: in these tables its documents would count as older than the existing ones"
            )

    def _wait_for_time_of(self, position: bronze_log.BronzePosition) -> None:
        """Wait until the server's time is that of a position which it may be behind (`_check_not_ahead`), as another deployment is whose clock
        is a little slow: what is read of it before that would count as older than what is there."""
        for _ in range(2 * AHEAD_SECONDS):
            if mongodb_server.operation_time(self.deployment.client) >= tokens.cluster_time(position.token):
                return
            self.halt.wait(1.0)
        raise errors.SourceUnreachable(
            "opening the change stream: the server's time has not reached bronze's position "
            f"{tokens.utc(position.token)}; start again"
        )

    def _check_held(
        self,
        stream: change_stream.ChangeStream,
        start: change_stream.StreamStart,
        position: bronze_log.BronzePosition | None,
    ) -> None:
        """Raise `HistoryLost` where a stream goes on by its position's time in an oplog that does not hold the position's event:
        another deployment has taken the place of the one that was captured. Of a stream with another filter that is not known."""
        if position is None or start.at is None or self.is_other_stream or resume_token.resumes_alone(position.token):
            return
        if not stream.holds(position.token):
            raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)

    def _stream(self, start: change_stream.StreamStart) -> change_stream.ChangeStream:
        source = self.deployment.source
        return change_stream.ChangeStream(
            self.deployment.client,
            self.options,
            start,
            retries=source.errors_max_retries,
            initial_delay=source.errors_retry_delay_initial_ms / 1000,
            max_delay=source.errors_retry_delay_max_ms / 1000,
            stopped=self.halt,
            # A database that was dropped and made anew may be spelled in another case, which a stream's scope is bound to.
            resolved=lambda: replace(self.deployment.stream_options(), max_await_ms=self.options.max_await_ms),
        )

    def _first_start(self) -> change_stream.StreamStart:
        """Where a stream without a position begins: `capture.start.op.time`, or now."""
        at = self.deployment.source.capture_start_op_time
        return change_stream.StreamStart() if at < 0 else change_stream.StreamStart(at=Timestamp(at >> 32, at & 0xFFFFFFFF))
