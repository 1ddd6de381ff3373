"""Gaps: changes of a collection that bronze does not hold, because they were not captured.

A gap begins where a position is lost, or where the settings exclude a collection, an operation or a field and include it again
later. A snapshot repairs it: after a lost position it is planned at once, otherwise a signal requests it. Each gap is a heartbeat's
payload, from which `status` reports what is incomplete (`cdc_core.snapshot.state.unrepaired`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cdc_core.properties.source import SnapshotMode, Source
from cdc_core.signals import signal as signals
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import fields as field_filters
from cdc_core.stream import filters, resume_token
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.capture import tokens
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class OtherStream:
    """The heartbeat payloads that a start commits for changed settings, and the snapshots that it plans for them."""

    payloads: Sequence[Mapping[str, Any]] = ()
    states: tuple[snapshot_state.SnapshotState, ...] = ()


@dataclass(frozen=True)
class Gaps:
    """Finds the gaps that a start records, from the settings, the source and bronze as they are now."""

    spark: SparkSession
    deployment: Deployment
    log: bronze_log.BronzeLog

    def after_lost_position(
        self, gap: Mapping[str, object], state: snapshot_state.SnapshotState, token: str
    ) -> tuple[snapshot_state.SnapshotState, Mapping[str, Any]]:
        """The snapshot that repairs a lost position, and the payload of the gap; the stream begins at `token`.

        Collections that no longer exist are added to the snapshot: nothing is read of them, and all their rows are swept.
        """
        captured, known = self.deployment.namespaces(), self._known()
        # A drop in the gap has no event: without a sweep, silver would keep its documents for ever.
        state = _with_gone(state, [name for name in known if name not in captured], token)
        self._warn_of_unread(captured, state)
        return state, {"gap": {**gap, "collections": sorted({*captured, *known})}}

    def of_other_stream(self, states: Sequence[snapshot_state.SnapshotState], *, fingerprint: str, id_: str) -> OtherStream:
        """The payloads and snapshots for a changed filter of the stream; logs the collections that are new.

        From now on their changes are captured; a signal requests a snapshot of their documents. `id_` is the identifier of a
        snapshot, if one is planned.
        """
        captured, notes = self.deployment.namespaces(), bronze_log.notes(self.spark, self.log.table)
        before = set(self._in_bronze())
        if notes:
            # What has rows and was not left out was captured too: it was created after that note.
            known = notes[-1].captured | (before - notes[-1].left_out)
        else:
            # No note, as in tables of older versions: what has rows or a plan was captured.
            known = frozenset(before).union(*(state.planned for state in states))
        new = [name for name in captured if name not in known]
        # By the settings alone: a captured collection that does not exist now is not left out.
        ever = known.union(*(note.left_out for note in notes[-1:]))
        left_out = sorted(name for name in ever if not self._is_captured(name))
        note = {"stream": fingerprint, "captured": captured, "left_out": left_out}
        again = self._let_in_again(notes)
        gone = [name for name in again if name not in captured]
        # `no_data` means that no snapshots are wanted.
        if new and self.deployment.source.snapshot_mode is not SnapshotMode.NO_DATA:
            log.warning(
                "%s: captured from now on. To read the existing documents, run %s",
                ", ".join(new),
                signals.snapshot_command(*new),
            )
        back = filters.no_longer_left_out(self.log.writer.metadata.get("stream") or "", self.deployment.source)
        lost = self._no_longer_left_out(notes, back) if back else {}
        # A collection without rows can only lack inserts.
        incomplete = captured if back - _CHANGES else [name for name in captured if name in known]
        found = [
            *({**lost, "collections": [name]} for name in incomplete if lost),
            *({**gap, "collections": [name]} for name, gap in again.items()),
        ]
        payloads: list[Mapping[str, Any]] = [note, *({"gap": gap} for gap in found)]
        if not gone:
            return OtherStream(payloads)
        # Their drop was not captured: nothing is read of them, and all their rows are swept.
        empty = snapshot_state.SnapshotState(id_, kind=snapshot_state.SnapshotKind.REPLACED)
        state = _with_gone(empty, gone, tokens.token_of(self.log))
        return OtherStream([*payloads, state.begun()], (state,))

    def of_other_fields(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads for changed `field.exclude.list` or `field.renames`; `payloads` are the snapshots and gaps so far.

        A collection is incomplete where fields are included again, and where partial updates are folded onto documents with the old
        field names: also where `capture.mode` changed to partial updates later than the names.
        """
        folds = not self.deployment.source.capture_mode.has_full_updates
        changed = self._with_other_fields()
        older = snapshot_state.unrepaired(payloads, of="folded") if folds else {}
        are_open = snapshot_state.unrepaired(payloads) if older else {}
        waiting = [name for name in older if name not in are_open and name not in changed and self._is_captured(name)]
        if namespaces := [*changed, *waiting]:
            log.warning(
                "field.exclude.list or field.renames changed: documents of %s keep their old fields until %s. To read "
                "them again, run %s",
                ", ".join(namespaces),
                "they are read again" if folds else "they change, or are read again",
                signals.snapshot_command(*namespaces),
            )
        cause = "field.exclude.list or field.renames was changed"
        found = [name for name, lacks_fields in changed.items() if folds or lacks_fields]
        folded = [name for name in changed if name not in found]
        later = (
            [{"gap": {"cause": cause, "since": tokens.utc(tokens.token_of(self.log)), "collections": [], "folded": folded}}]
            if folded
            else []
        )
        return [*self._from_now([*found, *waiting], cause), *later]

    def _with_other_fields(self) -> dict[str, bool]:
        """The collections whose excluded or renamed fields changed, each with whether excluded fields are included again."""
        before = self.log.writer.metadata.get("fields")
        lists: Any = (before, settings_metadata(self.deployment.source)["fields"])
        if before is None or lists[0] == lists[1]:
            return {}
        read, known, found = [field_filters.read(*each) for each in lists], {*self._known()}, {}
        for name in (each for each in self.deployment.namespaces() if each in known):
            old, new = (each.of(*name.split(".", 1)) or field_filters.FieldRules() for each in read)
            if {*old.excluded} != {*new.excluded} or old.renamed != new.renamed:
                found[name] = bool({*old.excluded} - {*new.excluded})
        return found

    def of_other_snapshots(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads for collections of which snapshots have read less than the settings now include, and for the end of such gaps
        where the settings no longer include more. `payloads` are the snapshots and gaps so far."""
        states = snapshot_state.states(each for each in payloads if "snapshot" in each)
        chosen = self.deployment.source.snapshot_collection_filter_overrides
        filtered: dict[str, str | None] = {}
        for state in states:
            whole = (name for name in state.planned if name not in state.conditions and state.of(name).completed)
            filtered |= {name: state.of(name).filter for name in whole}
        less = {name for name, read in filtered.items() if read not in (None, chosen.get(name))} | self._now_listed(states)
        settings = "snapshot.include.collection.list or snapshot.collection.filter.overrides"
        cause, are_open = f"{settings} was changed", snapshot_state.unrepaired(payloads)
        unwanted = [name for name, gap in are_open.items() if cause in gap.causes and not self._is_wanted_whole(name)]
        known = are_open.keys() - set(unwanted)
        found = [name for name in self.deployment.namespaces() if name in less and name not in known] if less else []
        # A collection that has a filter now is not wanted whole: no snapshot would end its gap.
        noted = self._from_now((name for name in found if name not in chosen), cause)
        current = settings_metadata(self.deployment.source)
        # Where nothing is recorded, warn once and not at each start.
        if noted or (
            found and any(current[name] != self.log.writer.metadata.get(name) for name in ("snapshots", "filters"))
        ):
            log.warning(
                "%s changed: the snapshot did not read all of %s that these settings now include. To read it, run %s",
                settings,
                ", ".join(found),
                signals.snapshot_command(*found),
            )
        withdrawn: Mapping[str, Any] = {"gap": {"cause": cause, "collections": [], "withdrawn": unwanted}}
        return [*noted, withdrawn] if unwanted else noted

    def _is_wanted_whole(self, namespace: str) -> bool:
        """Whether the settings want snapshots of the whole collection, also where it is not captured for now."""
        is_listed = self.deployment.filter.is_snapshotted(*namespace.split(".", 1)) or not self._is_captured(namespace)
        return is_listed and namespace not in self.deployment.source.snapshot_collection_filter_overrides

    def _now_listed(self, states: Sequence[snapshot_state.SnapshotState]) -> set[str]:
        """The collections that `snapshot.include.collection.list` newly includes, and for which no snapshot was planned."""
        source, listed = self.deployment.source, self.log.writer.metadata.get("snapshots")
        if listed is None or listed == list(source.snapshot_include_collection_list) or not states:
            return set()
        now, before = self.deployment.filter, filters.of(replace(source, snapshot_include_collection_list=tuple(listed)))
        planned = {name for state in states for name in state.planned}
        names = (name for name in self.deployment.namespaces() if name not in planned)
        return {
            name for name in names if now.is_snapshotted(*name.split(".", 1)) > before.is_snapshotted(*name.split(".", 1))
        }

    def _from_now(self, collections: Iterable[str], cause: str) -> list[Mapping[str, Any]]:
        """One gap for each of the collections, at bronze's position."""
        to = tokens.token_of(self.log)
        return [
            {"gap": {"from": to, "to": to, "since": tokens.utc(to), "cause": cause, "collections": [name]}}
            for name in collections
        ]

    def _let_in_again(self, notes: Sequence[bronze_log.FilterChange]) -> dict[str, Mapping[str, Any]]:
        """The collections with rows that the settings include again, each with the range of its lost changes."""
        to = tokens.token_of(self.log)
        found: dict[str, Mapping[str, Any]] = {}
        for name in sorted(notes[-1].left_out if notes else ()):
            if self._is_captured(name):
                *_, first = itertools.takewhile(lambda note: name in note.left_out, reversed(notes))  # noqa: B023
                found[name] = {"from": first.token, "to": to, "since": tokens.utc(first.token)}
        return found

    def _no_longer_left_out(self, notes: Sequence[bronze_log.FilterChange], back: frozenset[str]) -> Mapping[str, Any]:
        """The range in which the stream left out what is captured again (`back`), with a warning."""
        streams = list(itertools.takewhile(lambda note: back & filters.left_out(note.stream), reversed(notes)))
        first = streams[-1].token if streams else bronze_log.first_token(self.spark, self.log.table)
        log.warning(
            "%s captured from now on. Earlier changes are missing, so medallion status shows collections as "
            "incomplete. To read all documents, run medallion signal execute-snapshot --data-collections '.*'",
            " and ".join(_as_settings(back)),
        )
        return {"from": first, "to": tokens.token_of(self.log), "since": tokens.utc(first)}

    def _is_captured(self, namespace: str) -> bool:
        return self.deployment.filter.includes(*namespace.split(".", 1))

    def _known(self) -> list[str]:
        """The captured collections that have documents in bronze."""
        found = bronze_log.captured_collections(self.spark, self.log.table)
        return [f"{db}.{name}" for db, name in found if self.deployment.filter.includes(db, name)]

    def _in_bronze(self) -> list[str]:
        """The collections that have documents in bronze, without MongoDB's temporary ones."""
        found = (registry.Namespace(*each) for each in bronze_log.captured_collections(self.spark, self.log.table))
        return [str(each) for each in found if not each.is_temporary]

    def _warn_of_unread(self, captured: Sequence[str], state: snapshot_state.SnapshotState) -> None:
        """Warn of the collections that the snapshot after a gap does not read whole, because of the settings."""
        filtered = self.deployment.source.snapshot_collection_filter_overrides
        unread = [name for name in captured if name not in state.planned or name in filtered]
        if unread:
            log.warning(
                "changes were lost, and the new snapshot does not read all of %s (snapshot.include.collection.list, "
                "snapshot.collection.filter.overrides). medallion status shows them as incomplete. To read them, run %s",
                ", ".join(unread),
                signals.snapshot_command(*unread),
            )


_CHANGES = filters.OPERATIONS - {"insert"}
"""The operations on existing documents."""


def settings_metadata(source: Source) -> dict[str, object]:
    """The settings that each bronze commit carries, so that a start sees changed ones (`bronze_log.OF_THE_STREAM`)."""
    return {
        "stream": filters.fingerprint(source),
        "fields": [list(source.field_exclude_list), list(source.field_renames)],
        "snapshots": list(source.snapshot_include_collection_list),
        "filters": filters.digest(dict(source.snapshot_collection_filter_overrides))[:12],
    }


def _with_gone(state: snapshot_state.SnapshotState, gone: Sequence[str], token: str) -> snapshot_state.SnapshotState:
    """A snapshot after a gap, with the collections that no longer exist: nothing is read of them, and all rows are swept."""
    at = tokens.cluster_time(token)
    first = snapshot_state.CollectionState(first=resume_token.snapshot_sequence(at.time, at.inc))
    return replace(state, planned=(*state.planned, *gone), collections=dict.fromkeys(gone, first))


def _as_settings(left_out: frozenset[str]) -> Iterator[str]:
    """The settings that left out these operations or stages."""
    skipped = sorted(left_out & filters.OPERATIONS)
    if skipped:
        yield f"skipped.operations: {', '.join(skipped)}"
    if left_out - filters.OPERATIONS:
        yield "cursor.pipeline: what stages may have left out that are gone or changed"
