"""The snapshots of one capture: the initial one, those of signals, and those of replaced collections.

A thread takes them one after the other, in the order in which they were planned. A paused snapshot is skipped until it is resumed.
Plans, pauses and stops are heartbeats in bronze (`cdc_core.snapshot.state`), from which a restart continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cdc_core.signals import notification as notifications
from cdc_core.snapshot.state import SnapshotKind, SnapshotState
from pipelines.snapshot import snapshot
from pipelines.snapshot.controls import SnapshotControls

if TYPE_CHECKING:
    from pipelines.channels import notifier

IDLE_WAIT = 0.5
SnapshotFactory = Callable[[SnapshotState, SnapshotControls], "snapshot.Snapshot | None"]
"""Prepares a snapshot; None where the capture ends before it begins."""


@dataclass
class _Entry:
    state: SnapshotState
    controls: SnapshotControls
    is_new: bool
    is_planned: bool = True
    """Whether its plan is in bronze."""
    current: snapshot.Snapshot | None = None
    """The running snapshot, whose state is newer than `state`."""

    @property
    def now(self) -> SnapshotState:
        """The current state, with the pauses and stops of signals."""
        # Derived each time: a signal may come while the running snapshot changes its state.
        current = self.current or self
        return replace(current.state, is_paused=self.controls.is_paused).without(self.controls.stopped)

    @property
    def is_paused(self) -> bool:
        """Whether it is paused and has anything left to read."""
        return self.controls.is_paused and not self.now.is_done


def _controls(state: SnapshotState) -> SnapshotControls:
    return SnapshotControls(is_paused=state.is_paused, stopped=state.stopped)


@dataclass
class SnapshotMetrics:
    """The newest snapshot of the service, for the metrics; `newest` is None where there was none. Times are seconds since 1970."""

    newest: snapshot.Snapshot | None = None
    is_skipped: bool = False
    is_aborted: bool = False
    began_at: float | None = None
    ended_at: float | None = None
    last_chunk_at: float | None = None

    def begun(self, newest: snapshot.Snapshot, *, at: float) -> None:
        self.newest, self.began_at, self.ended_at, self.is_aborted = newest, at, None, False

    def ended(self, *, at: float) -> None:
        """Note the end of the snapshot, and whether it was aborted: stopped, failed, or interrupted."""
        self.ended_at = at
        state = self.newest.state if self.newest is not None else None
        self.is_aborted = state is not None and (not state.is_done or bool(state.failed) or _is_stopped(state))


def _is_stopped(state: SnapshotState) -> bool:
    """Whether signals have stopped all of its collections."""
    return bool(state.planned) and state.stopped.issuperset(state.planned)


@dataclass
class SnapshotQueue:
    """The planned snapshots and the running one; every method but `run` may be called from any thread."""

    taking: SnapshotFactory
    notifier: notifier.Notifier
    halt: threading.Event
    metrics: SnapshotMetrics
    failed: dict[str, str] = field(default_factory=dict)
    """The collections that the last snapshot of them could not read, each with the reason; also those of earlier runs."""
    _entries: list[_Entry] = field(default_factory=list)
    _running: _Entry | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, state: SnapshotState, *, is_new: bool = True) -> None:
        """Add a snapshot to the end of the queue; `is_new`: no earlier run has begun it."""
        self._add(_Entry(state, _controls(state), is_new))

    def plan(self, state: SnapshotState) -> Callable[[], None]:
        """Add a snapshot that may begin when the returned function is called: when its plan is in bronze. It can be paused and
        stopped before that."""
        entry = _Entry(state, _controls(state), is_new=True, is_planned=False)
        self._add(entry)

        def begin() -> None:
            with self._changed:
                entry.is_planned = True
                self._changed.notify_all()

        return begin

    def _add(self, entry: _Entry) -> None:
        with self._changed:
            self._entries.append(entry)
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake `run`, to check for the end of the capture and for changes."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read now, or will be without a signal; paused snapshots, and those behind them, do not count."""
        with self._changed:
            return self._following() is None and all(entry.is_planned for entry in self._entries)

    @property
    def is_blocking(self) -> bool:
        """Whether a blocking snapshot is read now or next, for which the stream waits."""
        with self._changed:
            following = self._following()
            return following is not None and following.state.kind is SnapshotKind.BLOCKING

    def _following(self) -> _Entry | None:
        """The running snapshot, or else the first that is planned and not paused.

        A pause holds back all incremental snapshots, also one that is planned after it.
        """
        if self._running is not None:
            return self._running
        is_held = False
        for entry in self._entries:
            is_held = is_held or entry.is_paused
            # The snapshot of a replaced collection does not wait for a paused one (#14).
            is_free = entry.state.kind is not SnapshotKind.INCREMENTAL or not is_held or entry.now.is_done
            if entry.is_planned and is_free:
                return entry
        return None

    def pause(self, is_paused: bool) -> list[SnapshotState]:
        """Pause or resume all incremental snapshots; returns the states that changed."""
        states = []
        for entry in self._of(SnapshotKind.INCREMENTAL):
            if entry.controls.is_paused is not is_paused and not entry.now.is_done:
                entry.controls.pause(is_paused)
                states.append(entry.now)
                self._notify(
                    entry.now, notifications.NotificationType.PAUSED if is_paused else notifications.NotificationType.RESUMED
                )
        self.wake()
        return states

    def stop(
        self, chosen: Callable[[Iterable[str]], Iterable[str]], *, kind: SnapshotKind = SnapshotKind.INCREMENTAL
    ) -> list[SnapshotState]:
        """Stop the collections that `chosen` returns in all snapshots of a kind; returns the states that changed.

        The running snapshot of a replaced collection continues: of a collection that is replaced repeatedly none would end.
        """
        states = []
        entries = [each for each in self._of(kind) if kind is not SnapshotKind.REPLACED or each is not self._running]
        # All before the first stop: `chosen` may refuse.
        for entry, namespaces in [(each, tuple(chosen(each.now.missing))) for each in entries]:
            if namespaces:
                entry.controls.stop(namespaces)
                states.append(entry.now)
                self._notify(replace(entry.now, planned=namespaces), notifications.NotificationType.ABORTED)
        return states

    def run(self) -> None:
        """Take the snapshots one after the other until the capture ends."""
        while not self.halt.is_set():
            with self._changed:
                entry = self._running = self._following()
                if entry is None:
                    self._changed.wait(IDLE_WAIT)
                    continue
            has_paused = self._take(entry)
            with self._changed:
                # At the end of a run it stays the running one: `is_idle` must not be true.
                if not self.halt.is_set():
                    self._running = None
                    if not has_paused:
                        self._entries.remove(entry)

    def _of(self, kind: SnapshotKind) -> list[_Entry]:
        with self._changed:
            return [entry for entry in self._entries if entry.state.kind is kind]

    def _take(self, entry: _Entry) -> bool:
        """Read a snapshot to its end, or until it is paused; returns whether it was paused."""
        if entry.is_new and _is_stopped(
            entry.now
        ):  # Before its turn. It was announced as aborted, and nothing of it is read.
            return False
        running_snapshot = self.taking(entry.state, entry.controls)
        if running_snapshot is None:
            return False
        entry.current = running_snapshot
        if entry.is_new:
            self._notify(entry.state, notifications.NotificationType.STARTED)
            # A resumed snapshot has been announced.
            entry.is_new = False
        running_snapshot.notify = lambda what, data: self._notify(running_snapshot.state, what, **data)
        self.metrics.begun(running_snapshot, at=time.time())
        try:
            running_snapshot.run()
        finally:
            # Also after an error: the next attempt must not read committed chunks again.
            entry.state, entry.current = running_snapshot.state, None
            # In place: a failed snapshot of a signal is not taken again after a reconnect, so the next run's queue must know it.
            for name in self.failed.keys() & entry.state.planned:
                del self.failed[name]
            self.failed.update(entry.state.failed)
            if not running_snapshot.has_paused:
                self.metrics.ended(at=time.time())
        if running_snapshot.state.is_done and not _is_stopped(running_snapshot.state):
            is_whole = not running_snapshot.state.failed
            self._notify(
                running_snapshot.state,
                notifications.NotificationType.COMPLETED if is_whole else notifications.NotificationType.ABORTED,
            )
        return running_snapshot.has_paused

    def _notify(self, state: SnapshotState, type_: notifications.NotificationType, **data: str) -> None:
        is_incremental = state.kind is SnapshotKind.INCREMENTAL
        has_collections = is_incremental and type_ is not notifications.NotificationType.COMPLETED
        names = {"data_collections": ", ".join(state.planned)} if has_collections else {}
        aggregate = notifications.INCREMENTAL if is_incremental else notifications.INITIAL
        self.notifier.notify(aggregate, type_, id_=state.signal or state.id, data={**names, **data})
