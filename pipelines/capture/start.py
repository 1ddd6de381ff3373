"""What a run commits before it reads anything: where the stream begins, and which snapshot is to be taken.

The first position is committed before the first event and the first chunk are read: a capture that is killed right after it
goes on from there, and its snapshot lies behind the beginning of its stream. A capture that has a position does not begin here:
`stream_opener` makes the last token in bronze the stream's start.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.properties.source import SnapshotMode
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.snapshot import state as snapshot_state
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.gaps import Gaps, OtherStream
from pipelines.capture.logger import log
from pipelines.capture.stream_opener import OpenStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class StartPlan:
    """What a run is to do: follow the stream or not, take or go on with the snapshot that `snapshot.mode` asks for, and go
    on with the `states` of snapshots that earlier runs began."""

    streams: bool
    initial: snapshot_state.SnapshotState | None
    states: tuple[snapshot_state.SnapshotState, ...] = ()


@dataclass(frozen=True)
class CaptureStart:
    """The start of a run whose stream is open and whose bronze is claimed."""

    spark: SparkSession
    deployment: Deployment
    log: bronze_log.BronzeLog
    fingerprint: str
    custom: snapshot_mode.Snapshotter | None
    is_other_stream: bool

    def begin(self, opened: OpenStream) -> StartPlan:
        """Commit the first position of a new stream; returns which snapshot is to be taken or continued."""
        gap = opened.gap
        has_position = self.log.position is not None and gap is None
        told = bronze_log.gap_and_snapshot_heartbeats(self.spark, self.log.table) if self.log.position is not None else []
        states = self._states(told)
        # After a lost position a snapshot that was half read is worth nothing: its chunks lie before the gap.
        unfinished = _unfinished(states) if has_position else None
        decision = snapshot_mode.decided(
            self.deployment.source,
            has_position=has_position,
            is_unfinished=unfinished is not None and self._goes_on(unfinished),
            custom=self.custom,
        )
        gaps = Gaps(self.spark, self.deployment, self.log)
        noted = OtherStream()
        if self.is_other_stream and self.log.position is not None:
            noted = gaps.of_other_stream(states, fingerprint=self.fingerprint, id_=new_id())
        unread = () if decision.takes else gaps.of_other_snapshots(told)
        payloads = [*noted.payloads, *gaps.of_other_fields(told), *unread]
        states = (*states, *noted.states)
        if has_position and not decision.takes:
            if payloads:
                self.log.heartbeat(*payloads, token=tokens.token_of(self.log), ts_ms=clock.now_ms())
            self._warn_of_no_snapshot(decision, states)
            return StartPlan(decision.streams, unfinished if decision.resumes else None, states)
        token = opened.stream.begins  # and not how far it has read: what it has read is not in bronze yet
        if token is None:
            raise errors.SourceUnsuitable("opening the change stream: the server returned no resume token")
        state = self._new_snapshot() if decision.takes or gap is not None else None
        if gap is not None and state is not None:
            state, lost = gaps.after_lost_position(gap, state, token)
            payloads.append(lost)
        payloads.append({"start": token} if state is None else state.begun())
        # In one commit: behind a gap alone the next start would have a position, and take no snapshot.
        position_token = tokens.token_of(self.log) if has_position else token
        self.log.heartbeat(*payloads, token=position_token, ts_ms=clock.now_ms())
        return StartPlan(decision.streams, state, states)

    def _states(self, told: Iterable[Mapping[str, Any]]) -> tuple[snapshot_state.SnapshotState, ...]:
        """The snapshots that bronze's heartbeats tell of. A failed one is tried again, except a signal's: that signal is to be sent again.

        In mode `always` a failed collection is left to the next snapshot: one that always fails would keep this one unfinished.
        """
        found = snapshot_state.states(each for each in told if "snapshot" in each)
        by_others = {snapshot_state.SnapshotKind.INCREMENTAL, snapshot_state.SnapshotKind.BLOCKING}
        if self.deployment.source.snapshot_mode is SnapshotMode.ALWAYS:
            by_others.add(snapshot_state.SnapshotKind.INITIAL)
        return tuple(state if state.kind in by_others else state.retried() for state in found)

    def _goes_on(self, unfinished: snapshot_state.SnapshotState) -> bool:
        """Whether the unfinished snapshot is taken further. In modes that take one at each start, only where a collection that it misses is
        still captured: a new one begins elsewhere."""
        if self.deployment.source.snapshot_mode not in (SnapshotMode.ALWAYS, SnapshotMode.CUSTOM):
            return True
        return any(self.deployment.filter.includes(*name.split(".", 1)) for name in unfinished.missing)

    def _new_snapshot(self) -> snapshot_state.SnapshotState:
        """A snapshot of every captured collection that `snapshot.include.collection.list` lets in."""
        if self.log.position is None:  # a person is there to see it
            self.deployment.check_collections()
        includes = self.deployment.filter.is_snapshotted
        planned = tuple(each.namespace for each in self.deployment.collections() if includes(each.db, each.name))
        return snapshot_state.SnapshotState(new_id(), planned)

    def _warn_of_no_snapshot(
        self, decision: snapshot_mode.SnapshotDecision, states: tuple[snapshot_state.SnapshotState, ...]
    ) -> None:
        """Say that a snapshot mode which would take a snapshot takes none, where bronze has a position and no snapshot."""
        mode = self.deployment.source.snapshot_mode
        if mode not in (SnapshotMode.INITIAL, SnapshotMode.INITIAL_ONLY, SnapshotMode.WHEN_NEEDED) or decision.resumes:
            return
        if any(state.kind is snapshot_state.SnapshotKind.INITIAL for state in states):
            return
        log.warning(
            "snapshot.mode: %s takes no snapshot now, because bronze already has a position (as with Debezium's "
            "offsets). To read all existing documents, run medallion signal execute-snapshot --data-collections '.*'",
            mode.value,
        )


def _unfinished(states: tuple[snapshot_state.SnapshotState, ...]) -> snapshot_state.SnapshotState | None:
    """The initial snapshot that was not read to its end."""
    initial = [state for state in states if state.kind is snapshot_state.SnapshotKind.INITIAL]
    return initial[-1] if initial and not initial[-1].is_done else None


def new_id() -> str:
    """An identifier for a snapshot, or for a notification about none."""
    return uuid.uuid4().hex[:12]
