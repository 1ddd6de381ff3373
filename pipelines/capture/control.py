"""Control events: signals, and renames that replace a captured collection.

The encoder returns a control event in its place between the events. Its effects are rows that follow the event's own row, so
that they are committed with the position after it. A snapshot begins when its plan is committed.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import event_rows as events
from cdc_core.extended_json import query
from cdc_core.signals import signal as signals
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import resume_token
from pipelines import signs
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log
from pipelines.capture.signal_reader import Inbox
from pipelines.capture.start import new_id
from pipelines.mongodb import snapshot_read
from pipelines.snapshot import queue as snapshot_queue

TURN_SECONDS = 1.0
"""For how long signals of the channels are handled before the next commit."""


@dataclass(frozen=True)
class ControlEvents:
    """Handles control events, in the main thread only."""

    deployment: Deployment
    snapshots: snapshot_queue.SnapshotQueue
    inbox: Inbox

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is left to read, and all signals that were there at the start are handled."""
        return self.inbox.is_read and self.snapshots.is_idle

    @property
    def is_blocking(self) -> bool:
        """Whether the stream waits for a blocking snapshot."""
        return self.snapshots.is_blocking

    def handle(self, rows: events.EventRows, event: Mapping[str, Any]) -> None:
        """Handle a control event of the stream, whose own row, if it has one, is the last of `rows`."""
        token = event["_id"]["_data"]
        # Only an insert is a signal, as in Debezium; an update or a delete is not.
        if event["operationType"] == "insert":
            try:
                signal = signals.from_document(event.get("fullDocument"))
            except signals.SignalRefused as error:
                log.warning("skipping a signal that cannot be read (%s): %s", error, event["documentKey"].get("_id"))
                return
            self._handle_signal(rows, signal, token=token, db=event["ns"]["db"], collection=event["ns"]["coll"])
        elif event["operationType"] == "rename":
            # The event's own row ends the collection under its old name. Under the new name its documents were never read.
            target = event["to"]
            if self.deployment.filter.includes(target["db"], target["coll"]):
                self._plan_replaced(rows, f"{target['db']}.{target['coll']}", token)

    def handle_received(self, rows: events.EventRows, *, token: str) -> None:
        """Handle the signals from the channels, at `token`, up to which the stream is in `rows` or in bronze.

        A channel drops a signal when its row is committed. A capture that is killed before the commit reads it again. Of many signals
        those that are left after `TURN_SECONDS` wait for the next call, so that rows are committed in between.
        """
        end = time.monotonic() + TURN_SECONDS
        for channel, received_signal in self.inbox.take():
            self._handle_signal(rows, received_signal.signal, token=token, row=received_signal.mark)
            rows.then.append(functools.partial(channel.handled, received_signal))
            if time.monotonic() >= end:
                return

    def _plan_replaced(self, rows: events.EventRows, namespace: str, token: str) -> None:
        """Plan the snapshot of a collection whose whole content was replaced; its older rows are swept."""
        log.info("%s was replaced by a rename: taking a snapshot of it", namespace)
        # Each shard has its own rename event: what was read before the last of them may lack a shard's documents.
        for state in self.snapshots.stop(
            lambda names: [namespace] * (namespace in names), kind=snapshot_state.SnapshotKind.REPLACED
        ):
            rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, state.controlled()))
        # Silver sweeps what is older than `first`: rows of the replaced collection, and none of the new one.
        collection_state = snapshot_state.CollectionState(first=resume_token.sequence_of(token))
        state = snapshot_state.SnapshotState(
            new_id(), (namespace,), {namespace: collection_state}, snapshot_state.SnapshotKind.REPLACED
        )
        rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, self._planned(rows, state)))

    def _planned(self, rows: events.EventRows, state: snapshot_state.SnapshotState) -> dict[str, Any]:
        """Plan a snapshot, which begins when the rows are committed; returns the payload of the heartbeat that records it."""
        # Queued now and begun later: the next signal may pause or stop it before its plan is committed.
        rows.then.append(self.snapshots.plan(state))
        return state.begun()

    def _handle_signal(
        self,
        rows: events.EventRows,
        signal: signals.Signal,
        *,
        token: str,
        db: str | None = None,
        collection: str | None = None,
        row: str | None = None,
    ) -> None:
        """Add a signal's row and execute the signal; a refused one has the reason in its row and in the log."""
        heartbeats: list[dict[str, Any]] = []
        refusal = {}
        try:
            heartbeats = self._executed(rows, signal, signals.request(signal), token)
        except signals.SignalRefused as error:
            # With a row as well: without one, each restart would read and refuse the signal again.
            refusal = {"refused": str(error)}
            log.warning("signal %s (%s) refused: %s", signal.id, signal.type, error)
        # The channel's mark: by it a restart knows which signals are handled.
        payload = signal.payload(**refusal, **({} if row is None else {"row": row}))
        rows.mark(events.OtherRow(token, bronze.RowKind.SIGNAL, payload, db, collection))
        # A start reads the snapshots' states from bronze: a plan, a pause or a stop without a row would end with the process.
        for heartbeat in heartbeats:
            rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, heartbeat))

    def _executed(
        self, rows: events.EventRows, signal: signals.Signal, request: signals.SignalRequest, token: str
    ) -> list[dict[str, Any]]:
        """Execute a signal; returns the payloads of the heartbeats that record it. Raises `SignalRefused`, with nothing executed."""
        match request.type:
            case signals.SignalType.EXECUTE_SNAPSHOT:
                return [self._planned(rows, self._requested(signal, request))]
            case signals.SignalType.STOP_SNAPSHOT:
                states = self._stopped(signal, request)
            case signals.SignalType.PAUSE_SNAPSHOT | signals.SignalType.RESUME_SNAPSHOT:
                states = self.snapshots.pause(request.type is signals.SignalType.PAUSE_SNAPSHOT)
            case signals.SignalType.LOG:
                log.info("%s", request.message.replace("{}", json.dumps({"resume_token": token})))
                return []
        log.info("signal %s (%s): %d snapshots affected", signal.id, signal.type, len(states))
        return [state.controlled() for state in states]

    def _stopped(self, signal: signals.Signal, request: signals.SignalRequest) -> list[snapshot_state.SnapshotState]:
        """Stop the collections that a signal names; returns the states of the snapshots that changed. Raises `SignalRefused`."""
        without_match = request.collections

        def chosen(namespaces: Iterable[str]) -> tuple[str, ...]:
            nonlocal without_match
            names = tuple(namespaces)
            # Here, because this may refuse the signal, and nothing is stopped yet.
            unmatched = frozenset(request.without_match(names))
            without_match = tuple(text for text in without_match if text in unmatched)
            return request.chosen(names)

        states = self.snapshots.stop(chosen)
        if without_match:
            log.warning("signal %s: no collection that is left to read matches %s", signal.id, signs.some(without_match, 20))
        return states

    def _requested(self, signal: signals.Signal, request: signals.SignalRequest) -> snapshot_state.SnapshotState:
        """The snapshot of the captured collections that a signal names. Raises `SignalRefused`."""
        namespaces = request.chosen(self.deployment.namespaces())
        if not namespaces:
            raise signals.SignalRefused(f"no captured collection matches {', '.join(request.collections)}")
        # Where a condition's expression matches nothing, its collection is read without the filter.
        if without_match := request.without_match(namespaces):
            log.warning("signal %s: no collection of its snapshot matches %s", signal.id, signs.some(without_match, 20))
        conditions = request.filters(namespaces)
        for namespace, condition in conditions.items():
            reason = snapshot_read.refusal_of_filter(self.deployment.client, namespace, query.loads(condition))
            if reason is not None:  # its snapshot could never be read
                raise signals.SignalRefused(f"its filter for {namespace} is refused by the server: {reason}")
        log.info("signal %s: snapshot (%s) of %s", signal.id, request.snapshot_type.value, ", ".join(namespaces))
        kind = snapshot_state.SnapshotKind(request.snapshot_type.value)
        return snapshot_state.SnapshotState(new_id(), namespaces, kind=kind, conditions=conditions, signal=signal.id or None)
