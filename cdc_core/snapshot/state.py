"""The progress of snapshots, as recorded by heartbeats in bronze, from which a capture resumes after a kill.

A snapshot begins with a heartbeat that plans it. The commit of each chunk ends with one that has the progress of its
collection. A pause, a resume or a stop is another one. Together they are the whole state: a chunk that was read but not
committed is in no row, and `pipelines.snapshot.snapshot` reads it again.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cdc_core.extended_json import bson_to_json, json_to_bson


class SnapshotKind(StrEnum):
    """Why a snapshot is taken."""

    INITIAL = "initial"
    """Requested by `snapshot.mode`."""
    INCREMENTAL = "incremental"
    """Started by a signal; the stream continues beside it."""
    BLOCKING = "blocking"
    """Started by a signal; the stream waits for its end."""
    REPLACED = "replaced"
    """A rename replaced a captured collection by another one."""


@dataclass(frozen=True)
class CollectionState:
    """The progress of one collection's snapshot; everything below the `_id` `hi` is in bronze.

    `first` is the sequence of its first chunk, or the one that it was planned with: rows that are older are gone from
    the source. `filter` is the find filter that it was read with so far, `failed` the reason why reading stopped,
    `is_gone` whether the collection no longer exists.
    """

    chunks: int = 0
    documents: int = 0
    hi: bytes | None = None
    first: str | None = None
    completed: bool = False
    sweep: bool = True
    filter: str | None = None
    failed: str | None = None
    is_gone: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the snapshot covers the whole collection: it was read to its end and is swept, or the collection is gone."""
        return self.completed and (self.sweep or self.is_gone)

    def as_json(self) -> dict[str, Any]:
        """The state as in a heartbeat's payload."""
        optional = {"filter": self.filter, "failed": self.failed, "gone": self.is_gone or None}
        return {
            "chunks": self.chunks,
            "documents": self.documents,
            **_written_end(self.hi),
            "first": self.first,
            "completed": self.completed,
            "sweep": self.sweep,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> CollectionState:
        return CollectionState(
            chunks=fields["chunks"],
            documents=fields["documents"],
            hi=_end(fields),
            first=fields.get("first"),
            completed=fields["completed"],
            sweep=fields.get("sweep", True),
            filter=fields.get("filter"),
            failed=fields.get("failed"),
            is_gone=fields.get("gone", False),
        )


_NOT_BEGUN = CollectionState()


def _written_end(hi: bytes | None) -> dict[str, str | None]:
    """The `_id` as JSON, with base64 of its bytes if some text is not UTF-8: repaired text would be another place."""
    if hi is None:
        return {"hi": None}
    encoded = bson_to_json.encode(hi)
    exact_bytes = {"hi_bson": base64.b64encode(hi).decode()} if encoded.lossy else {}
    return {"hi": encoded.text.decode(), **exact_bytes}


def _end(fields: Mapping[str, Any]) -> bytes | None:
    """The `_id` below which everything is read, from its bytes if its text is not exact."""
    if "hi_bson" in fields:
        return base64.b64decode(fields["hi_bson"])
    hi = fields.get("hi")
    return None if hi is None else json_to_bson.loads(hi)


@dataclass(frozen=True)
class SnapshotState:
    """One snapshot: its planned collections, and the progress of each.

    `conditions` holds the find filter of each collection that is only read in part, `stopped` the collections that a
    signal removed, `signal` the identifier of the signal that started it.
    """

    id: str
    planned: tuple[str, ...] = ()
    collections: Mapping[str, CollectionState] = field(default_factory=dict)
    kind: SnapshotKind = SnapshotKind.INITIAL
    conditions: Mapping[str, str] = field(default_factory=dict)
    signal: str | None = None
    is_paused: bool = False
    stopped: frozenset[str] = frozenset()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to read."""
        # Reversed, because collections are read in order: an unread one is found at once among thousands.
        return not any(map(self.misses, reversed(self.planned)))

    @property
    def missing(self) -> tuple[str, ...]:
        """The collections that are still to be read."""
        return tuple(filter(self.misses, self.planned))

    def misses(self, namespace: str) -> bool:
        """Whether a planned collection is still to be read: neither complete, failed nor stopped."""
        state = self.of(namespace)
        return not (state.completed or state.failed or namespace in self.stopped)

    @property
    def failed(self) -> dict[str, str]:
        """The collections that could not be read, each with the reason."""
        reasons = ((name, self.of(name).failed) for name in self.planned if name not in self.stopped)
        return {name: reason for name, reason in reasons if reason is not None}

    @property
    def documents(self) -> int:
        """The number of documents in bronze."""
        return sum(state.documents for state in self.collections.values())

    def of(self, namespace: str) -> CollectionState:
        """The progress of one collection."""
        return self.collections.get(namespace, _NOT_BEGUN)

    def advanced(self, namespace: str, state: CollectionState) -> SnapshotState:
        """The snapshot after a chunk of one collection."""
        return replace(self, collections={**self.collections, namespace: state})

    def retried(self) -> SnapshotState:
        """The snapshot in which failed collections are read again."""
        retries = {name: replace(self.of(name), failed=None) for name in self.failed}
        return replace(self, collections={**self.collections, **retries})

    def without(self, namespaces: Iterable[str]) -> SnapshotState:
        """The snapshot after some of its collections are stopped."""
        newly_stopped = frozenset(namespaces) - self.stopped
        return replace(self, stopped=self.stopped | (newly_stopped & frozenset(self.planned))) if newly_stopped else self

    # --- as payloads of heartbeats

    def begun(self) -> dict[str, Any]:
        """The payload that plans the snapshot."""
        collections = {name: state.as_json() for name, state in self.collections.items()}
        plan: dict[str, Any] = {"id": self.id, "planned": list(self.planned), "collections": collections, **self._type()}
        if self.conditions:
            plan["conditions"] = dict(self.conditions)
        if self.signal is not None:
            plan["signal"] = self.signal
        return {"snapshot": plan}

    def progress(self, namespace: str) -> dict[str, Any]:
        """The payload after a chunk of one collection."""
        state = self.of(namespace).as_json()
        # With the type: the end of a replaced collection's snapshot sweeps by other rules (`collection_ends.Sweep.is_due`).
        return {"snapshot": {"id": self.id, "collections": {namespace: state}, "done": self.is_done, **self._type()}}

    def controlled(self) -> dict[str, Any]:
        """The payload after a pause, a resume or a stop."""
        control = {"paused": self.is_paused, "stopped": sorted(self.stopped), "done": self.is_done}
        return {"snapshot": {"id": self.id, "collections": {}, **control}}

    def _type(self) -> dict[str, str]:
        return {} if self.kind is SnapshotKind.INITIAL else {"type": self.kind.value}

    @staticmethod
    def _planned(payload: Mapping[str, Any]) -> SnapshotState:
        return SnapshotState(
            payload["id"],
            tuple(payload.get("planned", ())),
            kind=SnapshotKind(payload.get("type", SnapshotKind.INITIAL.value)),
            conditions=payload.get("conditions", {}),
            signal=payload.get("signal"),
        )


@dataclass(frozen=True)
class Gap:
    """An incomplete collection: `since` when, and `why`.

    `why` says what was lost, and why no snapshot has replaced it. `causes` are all causes, oldest first.
    """

    since: str
    why: str
    causes: tuple[str, ...] = ()


@dataclass
class _OpenGap:
    """A gap that is not repaired; `number` is its payload's, and only a later plan repairs it."""

    since: str
    number: int
    causes: tuple[str, ...]
    why: str = "no snapshot has read it again"


def unrepaired(payloads: Iterable[Mapping[str, Any]], *, of: str = "collections") -> dict[str, Gap]:
    """The collections with lost changes (or another `cause` of a gap), from the payloads of heartbeats in order.

    A gap is repaired when a later planned snapshot of the whole collection is complete. It ends when the collection is
    dropped or renamed (`ended`), or when all its causes are `withdrawn`.

    `of` selects the collections that are incomplete (`collections`), or those that become so only if updates are folded
    onto their documents (`folded`).
    """
    gaps: dict[str, _OpenGap] = {}
    plans: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for number, payload in enumerate(payloads):
        gap = payload.get("gap", {})
        cause = gap.get("cause", "changes were lost")
        for namespace in gap.get(of, ()):
            first = gaps.get(namespace) or _OpenGap(gap["since"], number, (cause,))
            gaps[namespace] = _OpenGap(first.since, number, tuple(dict.fromkeys((*first.causes, cause))))
        for namespace in gaps.keys() & set(gap.get("withdrawn", ())):
            gaps[namespace].causes = tuple(other_cause for other_cause in gaps[namespace].causes if other_cause != cause)
            if not gaps[namespace].causes:
                del gaps[namespace]
        gaps.pop(payload.get("ended", ""), None)
        snapshot = payload.get("snapshot")
        if snapshot is None:
            continue
        if "planned" in snapshot:
            plans[snapshot["id"]] = (number, snapshot)
            for namespace in snapshot["planned"]:
                if namespace in gaps:
                    gaps[namespace].why = "the snapshot that reads it again is not at its end"
        planned_at, plan = plans.get(snapshot["id"], (-1, snapshot))
        for namespace, fields in snapshot["collections"].items():
            if namespace in gaps and gaps[namespace].number < planned_at:
                _update_gap(
                    gaps, namespace, CollectionState.from_json(fields), is_part=namespace in plan.get("conditions", {})
                )
        for namespace in snapshot.get("stopped", ()):
            if namespace in gaps and gaps[namespace].number < planned_at:
                gaps[namespace].why = "the snapshot that read it again was stopped"
    return {namespace: Gap(gap.since, f"{gap.causes[0]}, and {gap.why}", gap.causes) for namespace, gap in gaps.items()}


def _update_gap(gaps: dict[str, _OpenGap], namespace: str, state: CollectionState, *, is_part: bool) -> None:
    """Update or close an open gap after a chunk of its collection."""
    if state.failed is not None:
        gaps[namespace].why = f"the snapshot that read it again failed: {state.failed}"
    elif state.is_whole and not is_part:
        del gaps[namespace]
    elif state.completed:
        gaps[namespace].why = "only what a filter lets through was read again"


def lost_at(payloads: Iterable[Mapping[str, Any]], time: str) -> set[str]:
    """The collections of which changes were lost before and after a cluster time (16 hex digits): their rows may be older than it.

    A later snapshot repairs a gap, and does not tell what the documents were within it.
    """
    names: set[str] = set()
    for gap in (payload.get("gap", {}) for payload in payloads):
        ends = [str(gap.get(end) or "")[2:18].lower() for end in ("from", "to")]
        if all(ends) and ends[0] <= time < ends[1]:
            names.update(gap["collections"])
    return names


def newest_unfinished(heartbeats: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[int, ...]:
    """The offsets of heartbeats that are the last of their collection in their snapshot and do not complete it.

    All other heartbeats of a collection that is not complete are superseded by a later one.
    """
    last: dict[tuple[str, str], tuple[int, bool]] = {}
    for offset, payload in heartbeats:
        fields = payload["snapshot"]
        if "planned" not in fields:
            last |= {(fields["id"], name): (offset, state["completed"]) for name, state in fields["collections"].items()}
    return tuple(sorted(offset for offset, is_end in last.values() if not is_end))


def states(payloads: Iterable[Mapping[str, Any]]) -> tuple[SnapshotState, ...]:
    """The state of every snapshot, from the payloads that have one, in order; sorted by their plans.

    Of the snapshots of `snapshot.mode` only the newest counts: it reads what the earlier ones did not.
    """
    by_id: dict[str, SnapshotState] = {}
    newest_fields: dict[str, dict[str, Mapping[str, Any]]] = {}
    for payload in payloads:
        fields = payload["snapshot"]
        # The first payload of a snapshot is its plan; later ones update it.
        state = by_id.get(fields["id"]) or SnapshotState._planned(fields)
        if "stopped" in fields:
            state = replace(state, is_paused=fields["paused"], stopped=frozenset(fields["stopped"]))
        by_id[state.id] = state
        newest_fields.setdefault(state.id, {}).update(fields["collections"])
    for id_, collections in newest_fields.items():
        collection_states = {name: CollectionState.from_json(state_fields) for name, state_fields in collections.items()}
        by_id[id_] = replace(by_id[id_], collections=collection_states)
    initial_ids = [state.id for state in by_id.values() if state.kind is SnapshotKind.INITIAL]
    return tuple(state for state in by_id.values() if state.kind is not SnapshotKind.INITIAL or state.id == initial_ids[-1])


def whole(heartbeats: Iterable[tuple[int, Mapping[str, Any]]], *, since_ms: int) -> frozenset[str]:
    """The collections of which a whole snapshot was planned at this time (ms since 1970) or later, and is complete.

    From the times and the payloads of heartbeats with a snapshot, in order.
    """
    all_heartbeats = list(heartbeats)
    # The first heartbeat of each snapshot is its plan.
    planned_ms = {payload["snapshot"]["id"]: at_ms for at_ms, payload in reversed(all_heartbeats)}
    return frozenset(
        name
        for state in states(payload for _, payload in all_heartbeats)
        if planned_ms[state.id] >= since_ms
        for name in state.planned
        if state.of(name).completed and state.of(name).sweep and name not in state.conditions
    )


def incomplete(payloads: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The collections that may lack documents, from the payloads of heartbeats in order.

    Either changes were lost, or no snapshot of the whole collection is complete: it is running, failed, or was stopped.
    A snapshot started by a signal only makes a complete collection incomplete while it reads it. A collection that is
    dropped or renamed (`ended`) after the snapshot's plan is not incomplete.
    """
    all_payloads = list(payloads)
    plan_numbers: dict[str, int] = {}
    end_numbers: dict[str, int] = {}
    for number, payload in enumerate(all_payloads):
        if "ended" in payload:
            end_numbers[payload["ended"]] = number
        elif "snapshot" in payload:
            plan_numbers.setdefault(payload["snapshot"]["id"], number)
    complete: set[str] = set()
    partial: set[str] = set()
    for state in states(payload for payload in all_payloads if "snapshot" in payload):
        missing = frozenset(state.missing)
        for name in state.planned:
            if end_numbers.get(name, -1) > plan_numbers[state.id]:
                partial.discard(name)
            elif state.of(name).completed and name not in state.conditions:
                complete.add(name)
                partial.discard(name)
            elif state.of(name).completed:
                continue
            elif name in missing or name not in complete or state.kind is SnapshotKind.REPLACED:
                partial.add(name)
    return tuple(sorted(partial | unrepaired(all_payloads).keys()))
