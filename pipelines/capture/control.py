"""Control events: what the capture does because of an event, or of a signal from another channel.

A control event is a signal, or a rename that put another collection in a captured one's place. The encoder gives it out, in
its place between the events, and nothing else of the capture looks into it. What is done about it is noted in rows that
follow the event's own, so that it is committed with the position behind it; a snapshot begins when its plan is committed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import event_rows as events
from cdc_core.extended_json import query
from cdc_core.signals import signal as signals
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import resume_token
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log
from pipelines.capture.signal_reader import Inbox
from pipelines.capture.start import new_id
from pipelines.mongodb import snapshot_read
from pipelines.snapshot import queue as snapshot_queue


@dataclass(frozen=True)
class ControlEvents:
    """Acts on control events; only the main thread does."""

    deployment: Deployment
    snapshots: snapshot_queue.SnapshotQueue
    inbox: Inbox

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is to be read, nor a signal to be acted on that was there at the start."""
        return self.inbox.is_read and self.snapshots.is_idle

    @property
    def is_blocking(self) -> bool:
        """Whether the stream waits, because a blocking snapshot is read."""
        return self.snapshots.is_blocking

    def handle(self, rows: events.EventRows, event: Mapping[str, Any]) -> None:
        """Act on an event of the stream, whose own row, if it has one, is the last of `rows`."""
        token = event["_id"]["_data"]
        # Only an inserted document is a signal, as in Debezium: a later change of it, or its removal, is none.
        if event["operationType"] == "insert":
            try:
                signal = signals.from_document(event.get("fullDocument"))
            except signals.SignalRefused as error:
                log.warning("skipping a signal that cannot be read (%s): %s", error, event["documentKey"].get("_id"))
                return
            self._handle_signal(rows, signal, token=token, db=event["ns"]["db"], collection=event["ns"]["coll"])
        elif event["operationType"] == "rename":
            # The event's own row ends the collection of the old name; what now stands under the new one was never read under
            # it.
            target = event["to"]
            if self.deployment.filter.includes(target["db"], target["coll"]):
                self._plan_replaced(rows, f"{target['db']}.{target['coll']}", token)

    def handle_received(self, rows: events.EventRows, *, token: str) -> None:
        """Act on what came from the channels, at `token`, up to which the stream is in `rows` or in bronze.

        A channel forgets a signal when its row is committed: until then a capture that is killed reads it again.
        """
        for channel, received in self.inbox.take():
            self._handle_signal(rows, received.signal, token=token, row=received.mark)
            rows.then.append(functools.partial(channel.handled, received))

    def _plan_replaced(self, rows: events.EventRows, namespace: str, token: str) -> None:
        """Read a collection whose whole content was replaced; what is older than that is gone."""
        log.info("%s was replaced by a rename: taking a snapshot of it", namespace)
        # Each shard renames its part, and says so: what was read before the last one has done it may lack a part.
        for state in self.snapshots.stop(
            lambda names: [namespace] * (namespace in names), kind=snapshot_state.SnapshotKind.REPLACED
        ):
            rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, state.controlled()))
        # Silver sweeps what is older than `first`: rows of the collection that was replaced, and none that the rename
        # brought.
        first = snapshot_state.CollectionState(first=resume_token.sequence_of(token))
        state = snapshot_state.SnapshotState(
            new_id(), (namespace,), {namespace: first}, snapshot_state.SnapshotKind.REPLACED
        )
        self._plan(rows, state, token)

    def _plan(self, rows: events.EventRows, state: snapshot_state.SnapshotState, token: str) -> None:
        """Note a snapshot in the rows; it begins when they are committed."""
        rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, state.begun()))
        # Added now, begun later: a signal behind this one may pause or stop it before its plan is committed.
        rows.then.append(self.snapshots.plan(state))

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
        """Note a signal in the rows, and do what it says; one that cannot be done says why, in the log and in its row."""
        try:
            request, refused = signals.request(signal), {}
            self._check_filters(request)
        except signals.SignalRefused as error:
            # It gets its row all the same: a restart would read a signal without one again, and refuse it again.
            request, refused = None, {"refused": str(error)}
            log.warning("signal %s (%s) refused: %s", signal.id, signal.type, error)
        # The row of a table, the offset of a topic: by it a restart knows which signals are done.
        marked = signal.payload(**refused, **({"row": row} if signal.channel in ("table", "kafka") else {}))
        rows.mark(events.OtherRow(token, bronze.RowKind.SIGNAL, marked, db, collection))
        match request:
            case None:
                return
            case signals.SignalRequest(type=signals.SignalType.EXECUTE_SNAPSHOT):
                self._execute_snapshot(rows, signal, request, token)
                return
            case signals.SignalRequest(type=signals.SignalType.STOP_SNAPSHOT):
                changed = self.snapshots.stop(request.chosen)
            case signals.SignalRequest(type=signals.SignalType.PAUSE_SNAPSHOT | signals.SignalType.RESUME_SNAPSHOT):
                changed = self.snapshots.pause(request.type is signals.SignalType.PAUSE_SNAPSHOT)
            case signals.SignalRequest(type=signals.SignalType.LOG):
                offset = json.dumps({"resume_token": token})
                log.info("%s", request.message.replace("{}", offset))
                return
        log.info("signal %s (%s): %d snapshots affected", signal.id, signal.type, len(changed))
        for state in changed:
            # A snapshot's state is read from bronze at a start: what is not noted there (a pause, a stop) ends with the
            # process.
            rows.mark(events.OtherRow(token, bronze.RowKind.HEARTBEAT, state.controlled()))

    def _check_filters(self, request: signals.SignalRequest) -> None:
        """Raise `signals.SignalRefused` for a filter that the server would refuse: a snapshot of it could never be read."""
        if not request.conditions:
            return
        # The server checks it now: in a chunk it would be refused later, and the snapshot with it.
        captured = self.deployment.namespaces()
        for namespace, condition in request.filters(request.chosen(captured)).items():
            reason = snapshot_read.refusal_of_filter(self.deployment.client, namespace, query.loads(condition))
            if reason is not None:
                raise signals.SignalRefused(f"its filter for {namespace} is refused by the server: {reason}")

    def _execute_snapshot(
        self, rows: events.EventRows, signal: signals.Signal, request: signals.SignalRequest, token: str
    ) -> None:
        """Plan the snapshot of those captured collections that the signal means."""
        planned = request.chosen(self.deployment.namespaces())
        if not planned:
            log.warning("signal %s: no captured collection matches %s", signal.id, ", ".join(request.collections))
            return
        log.info("signal %s: an %s snapshot of %s", signal.id, request.snapshot_type.value, ", ".join(planned))
        kind = snapshot_state.SnapshotKind(request.snapshot_type.value)
        filters = request.filters(planned)
        state = snapshot_state.SnapshotState(new_id(), planned, kind=kind, conditions=filters, signal=signal.id or None)
        self._plan(rows, state, token)
