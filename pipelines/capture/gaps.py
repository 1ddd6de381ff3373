"""Gaps: changes of a collection that bronze does not hold, because they were not captured.

A gap begins where a position is lost, or where the settings exclude a collection, an operation or a field and include it again
later. A snapshot repairs it: after a lost position it is planned at once, otherwise a signal requests it. Each gap is a heartbeat's
payload, from which `status` reports what is incomplete (`cdc_core.snapshot.state.unrepaired`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import SparkSession

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
        namespaces, in_bronze = self.deployment.namespaces(), self._known()
        # A drop in the gap has no event: without a sweep, silver would keep its documents for ever.
        state = _with_gone(state, [name for name in in_bronze if name not in namespaces], token)
        self._warn_of_unread(namespaces, state)
        return state, {"gap": {**gap, "collections": sorted({*namespaces, *in_bronze})}}

    def of_other_stream(self, states: Sequence[snapshot_state.SnapshotState], *, fingerprint: str, id_: str) -> OtherStream:
        """The payloads and snapshots for a changed filter of the stream; logs the collections that are new.

        From now on their changes are captured; a signal requests a snapshot of their documents. `id_` is the identifier of a
        snapshot, if one is planned.
        """
        namespaces, notes = self.deployment.namespaces(), bronze_log.notes(self.spark, self.log.table)
        in_bronze = set(self._in_bronze())
        if notes:
            # What has rows and was not left out was captured too: it was created after that note.
            captured_before = notes[-1].captured | (in_bronze - notes[-1].left_out)
        else:
            # No note, as in tables of older versions: what has rows or a plan was captured.
            captured_before = frozenset(in_bronze).union(*(state.planned for state in states))
        new_names = [name for name in namespaces if name not in captured_before]
        # By the settings alone: a captured collection that does not exist now is not left out.
        all_names = captured_before.union(*(note.left_out for note in notes[-1:]))
        left_out = sorted(name for name in all_names if not self._is_captured(name))
        note = {"stream": fingerprint, "captured": namespaces, "left_out": left_out}
        gaps = self._let_in_again(notes)
        dropped = [name for name in gaps if name not in namespaces]
        # `no_data` means that no snapshots are wanted.
        if new_names and self.deployment.source.snapshot_mode is not SnapshotMode.NO_DATA:
            log.warning(
                "%s: captured from now on. To read the existing documents, run %s",
                ", ".join(new_names),
                signals.snapshot_command(*new_names),
            )
        event_kinds = filters.no_longer_left_out(self.log.writer.metadata.get("stream") or "", self.deployment.source)
        lost_range = self._no_longer_left_out(notes, event_kinds) if event_kinds else {}
        # A collection without rows can only lack inserts.
        incomplete = namespaces if event_kinds - _CHANGES else [name for name in namespaces if name in captured_before]
        all_gaps = [
            *({**lost_range, "collections": [name]} for name in incomplete if lost_range),
            *({**gap, "collections": [name]} for name, gap in gaps.items()),
        ]
        payloads: list[Mapping[str, Any]] = [note, *({"gap": gap} for gap in all_gaps)]
        if not dropped:
            return OtherStream(payloads)
        # Their drop was not captured: nothing is read of them, and all their rows are swept.
        empty_snapshot = snapshot_state.SnapshotState(id_, kind=snapshot_state.SnapshotKind.REPLACED)
        state = _with_gone(empty_snapshot, dropped, tokens.token_of(self.log))
        return OtherStream([*payloads, state.begun()], (state,))

    def of_other_fields(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads for changed `field.exclude.list` or `field.renames`; `payloads` are the snapshots and gaps so far.

        A collection is incomplete where fields are included again, and where partial updates are folded onto documents with the old
        field names: also where `capture.mode` changed to partial updates later than the names.
        """
        folds = not self.deployment.source.capture_mode.has_full_updates
        collections = self._with_other_fields()
        folded_gaps = snapshot_state.unrepaired(payloads, of="folded") if folds else {}
        open_gaps = snapshot_state.unrepaired(payloads) if folded_gaps else {}
        waiting_names = [
            name for name in folded_gaps if name not in open_gaps and name not in collections and self._is_captured(name)
        ]
        if namespaces := [*collections, *waiting_names]:
            log.warning(
                "field.exclude.list or field.renames changed: documents of %s keep their old fields until %s. To read "
                "them again, run %s",
                ", ".join(namespaces),
                "they are read again" if folds else "they change, or are read again",
                signals.snapshot_command(*namespaces),
            )
        cause = "field.exclude.list or field.renames was changed"
        incomplete = [name for name, lacks_fields in collections.items() if folds or lacks_fields]
        folded = [name for name in collections if name not in incomplete]
        later_gaps = (
            [{"gap": {"cause": cause, "since": tokens.utc(tokens.token_of(self.log)), "collections": [], "folded": folded}}]
            if folded
            else []
        )
        return [*self._from_now([*incomplete, *waiting_names], cause), *later_gaps]

    def _with_other_fields(self) -> dict[str, bool]:
        """The collections whose excluded or renamed fields changed, each with whether excluded fields are included again."""
        old_lists = self.log.writer.metadata.get("fields")
        lists: Any = (old_lists, settings_metadata(self.deployment.source)["fields"])
        if old_lists is None or lists[0] == lists[1]:
            return {}
        field_lists, in_bronze, changes = [field_filters.read(*each) for each in lists], {*self._known()}, {}
        for name in (each for each in self.deployment.namespaces() if each in in_bronze):
            old, new = (each.of(*name.split(".", 1)) or field_filters.FieldRules() for each in field_lists)
            if {*old.excluded} != {*new.excluded} or old.renamed != new.renamed:
                changes[name] = bool({*old.excluded} - {*new.excluded})
        return changes

    def of_other_snapshots(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads for collections of which snapshots have read less than the settings now include, and for the end of such gaps
        where the settings no longer include more. `payloads` are the snapshots and gaps so far."""
        states = snapshot_state.states(each for each in payloads if "snapshot" in each)
        overrides = self.deployment.source.snapshot_collection_filter_overrides
        filters_by_name: dict[str, str | None] = {}
        for state in states:
            whole_names = (name for name in state.planned if name not in state.conditions and state.of(name).completed)
            filters_by_name |= {name: state.of(name).filter for name in whole_names}
        partly_read = {
            name for name, condition in filters_by_name.items() if condition not in (None, overrides.get(name))
        } | self._now_listed(states)
        settings = "snapshot.include.collection.list or snapshot.collection.filter.overrides"
        cause, open_gaps = f"{settings} was changed", snapshot_state.unrepaired(payloads)
        unwanted_names = [name for name, gap in open_gaps.items() if cause in gap.causes and not self._is_wanted_whole(name)]
        with_gap = open_gaps.keys() - set(unwanted_names)
        incomplete = (
            [name for name in self.deployment.namespaces() if name in partly_read and name not in with_gap]
            if partly_read
            else []
        )
        # A collection that has a filter now is not wanted whole: no snapshot would end its gap.
        gaps = self._from_now((name for name in incomplete if name not in overrides), cause)
        current = settings_metadata(self.deployment.source)
        # Where nothing is recorded, warn once and not at each start.
        if gaps or (
            incomplete and any(current[name] != self.log.writer.metadata.get(name) for name in ("snapshots", "filters"))
        ):
            log.warning(
                "%s changed: the snapshot did not read all of %s that these settings now include. To read it, run %s",
                settings,
                ", ".join(incomplete),
                signals.snapshot_command(*incomplete),
            )
        withdrawal: Mapping[str, Any] = {"gap": {"cause": cause, "collections": [], "withdrawn": unwanted_names}}
        return [*gaps, withdrawal] if unwanted_names else gaps

    def _is_wanted_whole(self, namespace: str) -> bool:
        """Whether the settings want snapshots of the whole collection, also where it is not captured for now."""
        is_listed = self.deployment.filter.is_snapshotted(*namespace.split(".", 1)) or not self._is_captured(namespace)
        return is_listed and namespace not in self.deployment.source.snapshot_collection_filter_overrides

    def _now_listed(self, states: Sequence[snapshot_state.SnapshotState]) -> set[str]:
        """The collections that `snapshot.include.collection.list` newly includes, and for which no snapshot was planned."""
        source, old_list = self.deployment.source, self.log.writer.metadata.get("snapshots")
        if old_list is None or old_list == list(source.snapshot_include_collection_list) or not states:
            return set()
        new, old = self.deployment.filter, filters.of(replace(source, snapshot_include_collection_list=tuple(old_list)))
        planned_names = {name for state in states for name in state.planned}
        names = (name for name in self.deployment.namespaces() if name not in planned_names)
        return {name for name in names if new.is_snapshotted(*name.split(".", 1)) > old.is_snapshotted(*name.split(".", 1))}

    def _from_now(self, collections: Iterable[str], cause: str) -> list[Mapping[str, Any]]:
        """One gap for each of the collections, at bronze's position."""
        token = tokens.token_of(self.log)
        return [
            {"gap": {"from": token, "to": token, "since": tokens.utc(token), "cause": cause, "collections": [name]}}
            for name in collections
        ]

    def _let_in_again(self, notes: Sequence[bronze_log.FilterChange]) -> dict[str, Mapping[str, Any]]:
        """The collections with rows that the settings include again, each with the range of its lost changes."""
        token = tokens.token_of(self.log)
        gaps: dict[str, Mapping[str, Any]] = {}
        for name in sorted(notes[-1].left_out if notes else ()):
            if self._is_captured(name):
                *_, first_note = itertools.takewhile(lambda note: name in note.left_out, reversed(notes))  # noqa: B023
                gaps[name] = {"from": first_note.token, "to": token, "since": tokens.utc(first_note.token)}
        return gaps

    def _no_longer_left_out(self, notes: Sequence[bronze_log.FilterChange], back: frozenset[str]) -> Mapping[str, Any]:
        """The range in which the stream left out what is captured again (`back`), with a warning."""
        changes = list(itertools.takewhile(lambda note: back & filters.left_out(note.stream), reversed(notes)))
        first_token = changes[-1].token if changes else bronze_log.first_token(self.spark, self.log.table)
        log.warning(
            "events that %s left out are captured from now on. Earlier ones are missing, so medallion status shows collections as "
            "incomplete. To read all documents, run medallion signal execute-snapshot --data-collections '.*'",
            " and ".join(_as_settings(back)),
        )
        return {"from": first_token, "to": tokens.token_of(self.log), "since": tokens.utc(first_token)}

    def _is_captured(self, namespace: str) -> bool:
        return self.deployment.filter.includes(*namespace.split(".", 1))

    def _known(self) -> list[str]:
        """The captured collections that have documents in bronze."""
        namespaces = bronze_log.captured_collections(self.spark, self.log.table)
        return [f"{db}.{name}" for db, name in namespaces if self.deployment.filter.includes(db, name)]

    def _in_bronze(self) -> list[str]:
        """The collections that have documents in bronze, without MongoDB's temporary ones."""
        namespaces = (registry.Namespace(*each) for each in bronze_log.captured_collections(self.spark, self.log.table))
        return [str(each) for each in namespaces if not each.is_temporary]

    def _warn_of_unread(self, captured: Sequence[str], state: snapshot_state.SnapshotState) -> None:
        """Warn of the collections that the snapshot after a gap does not read whole, because of the settings."""
        overrides = self.deployment.source.snapshot_collection_filter_overrides
        unread = [name for name in captured if name not in state.planned or name in overrides]
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
    cluster_time = tokens.cluster_time(token)
    collection_state = snapshot_state.CollectionState(
        first=resume_token.snapshot_sequence(cluster_time.time, cluster_time.inc)
    )
    return replace(state, planned=(*state.planned, *gone), collections=dict.fromkeys(gone, collection_state))


def _as_settings(left_out: frozenset[str]) -> Iterator[str]:
    """The settings that left out these operations or stages."""
    operations = sorted(left_out & filters.OPERATIONS)
    if operations:
        yield f"skipped.operations ({', '.join(operations)})"
    if left_out - filters.OPERATIONS:
        yield "former stages of cursor.pipeline"
