"""The commit with which a run starts: where the stream begins, and which snapshot is planned.

A first start commits its position before the first event and the first chunk are read. A capture that is killed right after it
resumes from there, and its snapshot is later than the beginning of its stream. A capture that has a position resumes after the
last token in bronze (`stream_opener`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.bronze import last_event
from cdc_core.properties.source import SnapshotMode
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.snapshot import state as snapshot_state
from pipelines import clock, signs
from pipelines.bronze import log as bronze_log
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.gaps import Gaps, OtherStream
from pipelines.capture.logger import log
from pipelines.capture.stream_opener import OpenStream


@dataclass(frozen=True)
class StartPlan:
    """What a run does: whether it follows the stream, the `initial` snapshot that `snapshot.mode` requires or that is
    unfinished, and the `states` of all snapshots of earlier runs."""

    streams: bool
    initial: snapshot_state.SnapshotState | None
    states: tuple[snapshot_state.SnapshotState, ...] = ()


@dataclass(frozen=True)
class CaptureStart:
    """Starts a run whose stream is open and whose bronze is claimed."""

    spark: SparkSession
    deployment: Deployment
    log: bronze_log.BronzeLog
    fingerprint: str
    custom: snapshot_mode.Snapshotter | None
    is_other_stream: bool

    def begin(self, opened: OpenStream) -> StartPlan:
        """Commit the first position of a new stream, and what changed settings require; returns the plan of the run."""
        gap = opened.gap
        if gap is not None or self.is_other_stream:  # This source or stream may not have the event.
            self.log.event = last_event.LastEvent(forgotten=tokens.token_of(self.log))
        has_position = self.log.position is not None and gap is None
        heartbeats = (
            bronze_log.gap_and_snapshot_heartbeats(self.spark, self.log.table) if self.log.position is not None else []
        )
        states = self._states(heartbeats)
        # After a lost position an unfinished snapshot is useless: its chunks lie before the gap.
        unfinished_snapshot = _unfinished(states) if has_position else None
        decision = snapshot_mode.decided(
            self.deployment.source,
            has_position=has_position,
            is_unfinished=unfinished_snapshot is not None and self._goes_on(unfinished_snapshot),
            custom=self.custom,
        )
        gaps = Gaps(self.spark, self.deployment, self.log)
        other_stream = OtherStream()
        if self.is_other_stream and self.log.position is not None:
            other_stream = gaps.of_other_stream(states, fingerprint=self.fingerprint, id_=new_id())
        snapshot_gaps = () if decision.takes else gaps.of_other_snapshots(heartbeats)
        payloads = [*other_stream.payloads, *gaps.of_other_fields(heartbeats), *snapshot_gaps]
        states = (*states, *other_stream.states)
        if has_position and not decision.takes:
            if payloads:
                self.log.heartbeat(*payloads, token=tokens.token_of(self.log), ts_ms=clock.now_ms())
            self._warn_of_no_snapshot(decision, states)
            return StartPlan(decision.streams, unfinished_snapshot if decision.resumes else None, states)
        token = opened.stream.begins  # Not how far it has read: that is not in bronze yet.
        if token is None:
            raise errors.SourceUnsuitable("opening the change stream: the server returned no resume token")
        state = self._new_snapshot() if decision.takes or gap is not None else None
        if gap is not None and state is not None:
            state, gap_payload = gaps.after_lost_position(gap, state, token)
            payloads.append(gap_payload)
        payloads.append({"start": token} if state is None else state.begun())
        # In one commit: after a gap alone the next start would have a position, and take no snapshot.
        position_token = tokens.token_of(self.log) if has_position else token
        self.log.heartbeat(*payloads, token=position_token, ts_ms=clock.now_ms())
        return StartPlan(decision.streams, state, states)

    def _states(self, heartbeats: Iterable[Mapping[str, Any]]) -> tuple[snapshot_state.SnapshotState, ...]:
        """The snapshots in bronze's heartbeats. A failed one is retried, except a signal's, for which a new signal is sent.

        In mode `always` the next snapshot reads a failed collection: one that always fails would keep this one unfinished.
        """
        states = snapshot_state.states(each for each in heartbeats if "snapshot" in each)
        kinds_not_retried = {snapshot_state.SnapshotKind.INCREMENTAL, snapshot_state.SnapshotKind.BLOCKING}
        if self.deployment.source.snapshot_mode is SnapshotMode.ALWAYS:
            kinds_not_retried.add(snapshot_state.SnapshotKind.INITIAL)
        return tuple(state if state.kind in kinds_not_retried else state.retried() for state in states)

    def _goes_on(self, unfinished: snapshot_state.SnapshotState) -> bool:
        """Whether the unfinished snapshot is continued. In modes that take one at each start, only where a collection that it
        has not read is still captured; otherwise a new one is taken."""
        if self.deployment.source.snapshot_mode not in (SnapshotMode.ALWAYS, SnapshotMode.CUSTOM):
            return True
        return any(self.deployment.filter.includes(*name.split(".", 1)) for name in unfinished.missing)

    def _new_snapshot(self) -> snapshot_state.SnapshotState:
        """A snapshot of every captured collection that `snapshot.include.collection.list` includes."""
        if self.log.position is None:  # A first start: a person is there to see the error.
            self.deployment.check_collections()
        includes = self.deployment.filter.is_snapshotted
        namespaces = tuple(each.namespace for each in self.deployment.collections() if includes(each.db, each.name))
        return snapshot_state.SnapshotState(new_id(), namespaces)

    def _warn_of_no_snapshot(
        self, decision: snapshot_mode.SnapshotDecision, states: tuple[snapshot_state.SnapshotState, ...]
    ) -> None:
        """Warn where the snapshot mode leaves a snapshot unfinished, or takes one on a first start, but bronze has a position and
        never had one."""
        mode = self.deployment.source.snapshot_mode
        unfinished = _unfinished(states)
        if unfinished is not None and not decision.resumes:
            names = signs.some(unfinished.missing, 1)
            log.warning("snapshot.mode: %s does not continue the unfinished snapshot of %s", mode.value, names)
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
    """The newest initial snapshot, where it was not read to its end."""
    initial_states = [state for state in states if state.kind is snapshot_state.SnapshotKind.INITIAL]
    return initial_states[-1] if initial_states and not initial_states[-1].is_done else None


def new_id() -> str:
    """A new identifier for a snapshot or a notification."""
    return uuid.uuid4().hex[:12]
