"""Opens the change stream: after bronze's position, at `capture.start.op.time`, or now.

Bronze's position is the last token of its rows (`pipelines.bronze.stream_position`). `pipelines.mongodb.change_stream` opens the
stream at the cluster time of an event's token, and after a high-water mark or an invalidate by `startAfter`
(`resume_token.resumes_alone` says why). Repeated events are dropped there (`Replay`) and, where the stream begins at a time without
a token, by `intake`.

Nothing here writes: a capture that cannot resume must have changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bson.timestamp import Timestamp
from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.bronze import last_event
from cdc_core.properties.source import Source
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.stream import filters, resume_token
from pipelines.bronze import log as bronze_log
from pipelines.bronze import stream_position
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog, change_stream
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server

AHEAD_SECONDS = 60
"""Seconds by which a position may be ahead of the server's time: a mongos learns its cluster's time with a delay."""


@dataclass(frozen=True)
class ExistingBronze:
    """What is read from a bronze table before it is claimed: its position, whether it was written with another filter, and the
    name of the replica set that it was captured from and its last event, where its commits name them.

    `is_forgotten`: the position is an event of an earlier filter, and nothing has come with this one."""

    unclaimed: bronze_log.UnclaimedPosition | None = None
    is_other_stream: bool = False
    replica_set: str | None = None
    last_event: str | None = None
    is_forgotten: bool = False

    @property
    def position(self) -> bronze_log.BronzePosition | None:
        return self.unclaimed.position if self.unclaimed is not None else None

    @staticmethod
    def read(spark: SparkSession, table: bronze_log.tables.TableRef, *, fingerprint: str) -> ExistingBronze:
        """Read the table; `fingerprint` is that of the settings' filter. Raises `TableNotOurs`, or `DecisionNeeded`
        without a position."""
        standing = table_history.standing(spark, table)
        if standing.version < 0:
            return ExistingBronze()
        delta.check_ours(spark, table)
        # After a RESTORE, the metadata of the restored version: it describes how the rows were captured.
        metadata = standing.metadata or (standing.last.metadata if standing.last else None) or {}
        old_fingerprint = metadata.get("stream")
        is_other = old_fingerprint is not None and not filters.is_same_stream(old_fingerprint, fingerprint)
        position = stream_position.read(spark, table)
        token = None if position is None else position.token
        event = last_event.LastEvent.of(metadata, token)
        unclaimed = bronze_log.UnclaimedPosition(standing.version, position)
        return ExistingBronze(unclaimed, is_other, metadata.get("replica_set"), event.token, event.is_forgotten(token))


@dataclass(frozen=True)
class OpenStream:
    """An open change stream.

    `bronze_token` is the token of bronze's last row where the stream may repeat events up to there. `gap` describes the lost
    changes where the oplog does not hold the position.
    """

    stream: change_stream.ChangeStream
    bronze_token: str | None = None
    gap: Mapping[str, object] | None = None


@dataclass(frozen=True)
class StreamOpener:
    """Opens the change stream of a run.

    `is_other_stream`: bronze's position is of another filter, whose tokens may be unknown to this stream. `replica_sets` are the
    names of the replica set that bronze was captured from and of the source's, `last_event` the token of bronze's last event; None
    where unknown.
    """

    deployment: Deployment
    options: change_stream.StreamOptions
    halt: threading.Event
    custom: snapshot_mode.Snapshotter | None = None
    is_other_stream: bool = False
    replica_sets: tuple[str | None, str | None] = (None, None)
    last_event: str | None = None

    @staticmethod
    def of(
        existing: ExistingBronze,
        deployment: Deployment,
        options: change_stream.StreamOptions,
        halt: threading.Event,
        *,
        replica_set: str | None,
        custom: snapshot_mode.Snapshotter | None = None,
    ) -> StreamOpener:
        """The opener of a run that goes on with this bronze; `replica_set` is the source's."""
        is_other = existing.is_other_stream or existing.is_forgotten
        replica_sets = (existing.replica_set, replica_set)
        return StreamOpener(deployment, options, halt, custom, is_other, replica_sets, existing.last_event)

    def open_or_restart(self, position: bronze_log.BronzePosition | None) -> OpenStream:
        """`open`, or a stream that begins now, with the gap before it, where the position is lost and the snapshot mode replaces it.

        A first start whose `capture.start.op.time` is lost begins now, without a gap: it takes a snapshot anyway.
        """
        try:
            return self.open(position)
        except errors.PositionLost:
            if not snapshot_mode.replaces_lost_position(self.deployment.source, custom=self.custom):
                raise
            if position is not None:
                self._wait_for_time_of(position)
            # The gap ends where this stream begins.
            stream = self._first_accepted([change_stream.StreamStart()], None)
            if position is None:
                log.warning("the oplog no longer reaches back to capture.start.op.time: starting now, with a snapshot")
                return OpenStream(stream)
            lost_at = tokens.utc(position.token)
            log.warning("the oplog no longer holds the position of %s: taking a new snapshot", lost_at)
            return OpenStream(stream, gap={"from": position.token, "to": stream.begins, "since": lost_at})

    def open(self, position: bronze_log.BronzePosition | None) -> OpenStream:
        """A stream that resumes after the position; without one, it begins at `capture.start.op.time` or now.

        A token of a stream with another filter, or one that the server refuses, is replaced by its cluster time; `intake` drops
        repeated events by their tokens. Raises `PositionLost` where the oplog does not reach back to the position.
        """
        if position is None:
            return OpenStream(self._first_accepted([first_start(self.deployment.source, self.deployment.client)], None))
        with mongodb_failures.translating("opening the change stream"):
            # First: a snapshot, which replaces a lost position, would be behind bronze as well.
            self._check_not_ahead(position)
        self._check_replica_set(position)
        by_time = change_stream.StreamStart(at=tokens.cluster_time(position.token))
        # A resume token is valid for the pipeline that returned it: with another filter the server may not find its event. A
        # cluster time is valid for any.
        by_token = change_stream.StreamStart(position.token, event=self.last_event)
        starts = [by_time] if self.is_other_stream else [by_token, by_time]
        return OpenStream(self._first_accepted(starts, position), bronze_token=position.token)

    def _first_accepted(
        self, starts: Sequence[change_stream.StreamStart], position: bronze_log.BronzePosition | None
    ) -> change_stream.ChangeStream:
        """A stream from the first of these places that the server accepts."""
        history_error: mongodb_failures.HistoryLost | None = None
        for start in starts:
            stream = self._stream(start)
            try:
                with mongodb_failures.translating("opening the change stream"):
                    # The server that is read: a secondary's oplog may reach further back than the primary's.
                    if position is not None and not change_stream.reaches(stream.server, position.token):
                        raise mongodb_failures.HistoryLost(mongodb_failures.CHANGE_STREAM_HISTORY_LOST)
                    with mongodb_failures.translating_opening():
                        stream.open()
                    # The server reports a lost position with the first batch, not when the stream is opened.
                    stream.probe()
                    self._check_held(stream, start, position)
                return stream
            except mongodb_failures.HistoryLost as error:
                stream.close()
                history_error = error
                if error.code == mongodb_failures.CHANGE_STREAM_HISTORY_LOST:
                    break  # The place is older than the oplog, by token or by time.
        raise tokens.lost(position, history_error)

    def _check_replica_set(self, position: bronze_log.BronzePosition) -> None:
        """Raise `PositionLost` where bronze was captured from another replica set.

        Its oplog may span the position, and for a position that is not an event nothing else shows that it is another deployment.
        """
        bronze_set, source_set = self.replica_sets
        if None not in self.replica_sets and bronze_set != source_set:
            log.warning(
                "bronze was captured from the replica set %s, but the source is %s, which is a different deployment",
                bronze_set,
                source_set,
            )
            raise tokens.lost(position, None)

    def _check_not_ahead(self, position: bronze_log.BronzePosition) -> None:
        """Raise `SourceUnsuitable` for a position in the server's future.

        All events until then would count as older than silver's rows.
        """
        if _is_ahead(self.deployment.client, tokens.cluster_time(position.token).time):
            raise errors.SourceUnsuitable(
                f"source: the server's time is behind bronze's position {tokens.utc(position.token)}. It is not the "
                "deployment that was captured, or its clock was set back. Nothing was changed. Capture it with another "
                "lakehouse root (or schema_prefix): in these tables its documents would count as older than the existing ones"
            )

    def _wait_for_time_of(self, position: bronze_log.BronzePosition) -> None:
        """Wait until the server's time reaches the position, which may be slightly ahead of it (`_check_not_ahead`).

        Documents that are read from another deployment before that would count as older than the existing ones.
        """
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
        """Raise `HistoryLost` where the stream begins at the position's time and the oplog does not hold the position's event:
        the source is another deployment than before. With another filter this cannot be checked."""
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
            # A database that was dropped and created again may be spelled in another case, and the stream's scope depends on it.
            resolved=lambda: replace(self.deployment.stream_options(), max_await_ms=self.options.max_await_ms),
        )


def first_start(source: Source, client: mongodb.Client) -> change_stream.StreamStart:
    """The start of a stream without a position: `capture.start.op.time`, or now.

    Raises `SettingsError` for a time in the server's future: the server would wait for it, and the changes until then be lost.
    """
    op_time = source.capture_start_op_time
    if op_time < 0:
        return change_stream.StreamStart()
    at = Timestamp(op_time >> 32, op_time & 0xFFFFFFFF)
    if _is_ahead(client, at.time):
        message = "it is in the server's future, and all changes until then would be missing"
        hint = "seconds since 1970 * 2^32 + increment, or -1 for now"
        raise errors.SettingsError(errors.Problem("source.capture.start.op.time", message, hint))
    return change_stream.StreamStart(at=at)


def _is_ahead(client: mongodb.Client, seconds: int) -> bool:
    """Whether a cluster time is in the server's future."""
    least_time = seconds - AHEAD_SECONDS
    if least_time <= mongodb_server.operation_time(client).time:
        return False
    # A newly started mongos learns the cluster time from its shards' first answers.
    catalog.database_names(client)
    return least_time > mongodb_server.operation_time(client).time
