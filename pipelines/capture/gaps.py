"""Gaps: changes of a collection that bronze can never hold, because they were not read in time.

There are two kinds. A position was lost, and a snapshot makes up for what it reads. Or the settings left a collection, an
operation or a field out for a while: its changes come again from now on, and a signal may ask for a snapshot. Each gap is a heartbeat's
payload, by which `status` says what is incomplete (`cdc_core.snapshot.state.unrepaired`).
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
    """What a start notes of changed settings, as payloads, and the snapshots that it plans with them."""

    payloads: Sequence[Mapping[str, Any]] = ()
    states: tuple[snapshot_state.SnapshotState, ...] = ()


@dataclass(frozen=True)
class Gaps:
    """What a start writes down about lost changes, from the settings, the source and bronze as they are now."""

    spark: SparkSession
    deployment: Deployment
    log: bronze_log.BronzeLog

    def after_lost_position(
        self, gap: Mapping[str, object], state: snapshot_state.SnapshotState, token: str
    ) -> tuple[snapshot_state.SnapshotState, Mapping[str, Any]]:
        """The snapshot that makes up for a lost position, and the payload of the gap.

        The stream begins at `token`. Of collections that do not exist any more there is nothing to read, and all rows are to
        go: they are added to the snapshot.
        """
        captured, known = self.deployment.namespaces(), self._known()
        # A drop in the gap has left no event: without a sweep their documents would stay in silver for good.
        state = _with_gone(state, [name for name in known if name not in captured], token)
        self._warn_of_unread(captured, state)
        return state, {"gap": {**gap, "collections": sorted({*captured, *known})}}

    def of_other_stream(self, states: Sequence[snapshot_state.SnapshotState], *, fingerprint: str, id_: str) -> OtherStream:
        """What is to be noted where the settings let in other events from here on; names the collections that are new.
        `id_` is for a snapshot, if one is to be planned.

        Their changes come; what they held, or what became of it meanwhile, comes when a signal asks for it.
        """
        captured, notes = self.deployment.namespaces(), bronze_log.notes(self.spark, self.log.table)
        before = set(self._in_bronze())
        if notes:
            # What has rows and was not left out was captured, too: it was made since.
            known = notes[-1].captured | (before - notes[-1].left_out)
        else:
            # A table of before there were such notes: what has rows or a plan was captured.
            known = frozenset(before).union(*(state.planned for state in states))
        new = [name for name in captured if name not in known]
        # By the settings alone: one that was dropped and is captured is not left out, nor is one that was made since.
        ever = known.union(*(note.left_out for note in notes[-1:]))
        left_out = sorted(name for name in ever if not self._is_captured(name))
        note = {"stream": fingerprint, "captured": captured, "left_out": left_out}
        again = self._let_in_again(notes)
        gone = [name for name in again if name not in captured]
        # Who wants no snapshots at all is not told to take one.
        if new and self.deployment.source.snapshot_mode is not SnapshotMode.NO_DATA:
            log.warning(
                "%s: captured from now on. To read the existing documents, run %s",
                ", ".join(new),
                signals.snapshot_command(*new),
            )
        back = filters.no_longer_left_out(self.log.writer.metadata.get("stream") or "", self.deployment.source)
        lost = self._no_longer_left_out(notes, back) if back else {}
        # One of which there is no row may have lost what was inserted, and nothing else.
        incomplete = captured if back - _CHANGES else [name for name in captured if name in known]
        found = [
            *({**lost, "collections": [name]} for name in incomplete if lost),
            *({**gap, "collections": [name]} for name, gap in again.items()),
        ]
        payloads: list[Mapping[str, Any]] = [note, *({"gap": gap} for gap in found)]
        if not gone:
            return OtherStream(payloads)
        # Their drop was left out, too: nothing is to be read of them, and all rows are to go.
        empty = snapshot_state.SnapshotState(id_, kind=snapshot_state.SnapshotKind.REPLACED)
        state = _with_gone(empty, gone, tokens.token_of(self.log))
        return OtherStream([*payloads, state.begun()], (state,))

    def of_other_fields(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads to be noted where fields are left out or renamed otherwise than up to here. `payloads` tell of the snapshots and gaps
        up to here.

        A collection is incomplete where fields are let in again, and where updates would be folded onto the names of before: also where
        those come only now, and the names are older.
        """
        folds = not self.deployment.source.capture_mode.has_full_updates
        changed = self._with_other_fields()
        older = snapshot_state.unrepaired(payloads, of="folded") if folds else {}
        are_open = snapshot_state.unrepaired(payloads) if older else {}
        waiting = [name for name in older if name not in are_open and name not in changed and self._is_captured(name)]
        if told := [*changed, *waiting]:
            log.warning(
                "field.exclude.list or field.renames changed: documents of %s keep their old fields until %s. To read "
                "them again, run %s",
                ", ".join(told),
                "they are read again" if folds else "they change, or are read again",
                signals.snapshot_command(*told),
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
        """The collections of which fields are left out or renamed otherwise than up to here; whether some are let in again."""
        before = self.log.writer.metadata.get("fields")
        lists: Any = (before, said_of(self.deployment.source)["fields"])
        if before is None or lists[0] == lists[1]:
            return {}
        read, known, found = [field_filters.read(*each) for each in lists], {*self._known()}, {}
        for name in (each for each in self.deployment.namespaces() if each in known):
            old, new = (each.of(*name.split(".", 1)) or field_filters.FieldRules() for each in read)
            if {*old.excluded} != {*new.excluded} or old.renamed != new.renamed:
                found[name] = bool({*old.excluded} - {*new.excluded})
        return found

    def of_other_snapshots(self, payloads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The payloads to be noted where snapshots have read less than the settings would have them read from here on: what another filter
        let through, or nothing; and the end of such a gap where the settings ask for no more any longer. `payloads` tell of the snapshots and gaps
        up to here."""
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
        # Of one that has another filter now not all is wanted: no snapshot would end its gap.
        noted = self._from_now((name for name in found if name not in chosen), cause)
        said = said_of(self.deployment.source)
        # Where nothing is noted it is told once, and not at each start.
        if noted or (found and any(said[name] != self.log.writer.metadata.get(name) for name in ("snapshots", "filters"))):
            log.warning(
                "%s changed: the snapshot did not read all of %s that these settings now include. To read it, run %s",
                settings,
                ", ".join(found),
                signals.snapshot_command(*found),
            )
        withdrawn: Mapping[str, Any] = {"gap": {"cause": cause, "collections": [], "withdrawn": unwanted}}
        return [*noted, withdrawn] if unwanted else noted

    def _is_wanted_whole(self, namespace: str) -> bool:
        """Whether snapshots are to read all of a collection; also of one that is not captured for now."""
        is_listed = self.deployment.filter.is_snapshotted(*namespace.split(".", 1)) or not self._is_captured(namespace)
        return is_listed and namespace not in self.deployment.source.snapshot_collection_filter_overrides

    def _now_listed(self, states: Sequence[snapshot_state.SnapshotState]) -> set[str]:
        """The collections that `snapshot.include.collection.list` lets in from here on, and no snapshot was planned for."""
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
        """The gaps of collections that the settings ask more of from here on than is in bronze."""
        to = tokens.token_of(self.log)
        return [
            {"gap": {"from": to, "to": to, "since": tokens.utc(to), "cause": cause, "collections": [name]}}
            for name in collections
        ]

    def _let_in_again(self, notes: Sequence[bronze_log.FilterChange]) -> dict[str, Mapping[str, Any]]:
        """The collections with rows that the settings left out until now, each with what was lost of it."""
        to = tokens.token_of(self.log)
        found: dict[str, Mapping[str, Any]] = {}
        for name in sorted(notes[-1].left_out if notes else ()):
            if self._is_captured(name):
                *_, first = itertools.takewhile(lambda note: name in note.left_out, reversed(notes))  # noqa: B023
                found[name] = {"from": first.token, "to": to, "since": tokens.utc(first.token)}
        return found

    def _no_longer_left_out(self, notes: Sequence[bronze_log.FilterChange], back: frozenset[str]) -> Mapping[str, Any]:
        """What was lost while the stream left out what comes `back` from now on."""
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
        """The collections that are captured and have documents in bronze."""
        found = bronze_log.captured_collections(self.spark, self.log.table)
        return [f"{db}.{name}" for db, name in found if self.deployment.filter.includes(db, name)]

    def _in_bronze(self) -> list[str]:
        """The collections that have documents in bronze, without those that a command made for its own time."""
        found = (registry.Namespace(*each) for each in bronze_log.captured_collections(self.spark, self.log.table))
        return [str(each) for each in found if not each.is_temporary]

    def _warn_of_unread(self, captured: Sequence[str], state: snapshot_state.SnapshotState) -> None:
        """Name what the snapshot after a gap leaves as it was: `snapshot.mode` reads what the settings let it read."""
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
"""The operations on documents that are there."""


def said_of(source: Source) -> dict[str, object]:
    """What each commit of bronze says of the settings, for a start with others to see it (`bronze_log.OF_THE_STREAM`)."""
    return {
        "stream": filters.fingerprint(source),
        "fields": [list(source.field_exclude_list), list(source.field_renames)],
        "snapshots": list(source.snapshot_include_collection_list),
        "filters": filters.digest(dict(source.snapshot_collection_filter_overrides))[:12],
    }


def _with_gone(state: snapshot_state.SnapshotState, gone: Sequence[str], token: str) -> snapshot_state.SnapshotState:
    """A snapshot after a gap, with the collections that are not there any more: nothing to read, and all rows to go."""
    at = tokens.cluster_time(token)
    first = snapshot_state.CollectionState(first=resume_token.snapshot_sequence(at.time, at.inc))
    return replace(state, planned=(*state.planned, *gone), collections=dict.fromkeys(gone, first))


def _as_settings(left_out: frozenset[str]) -> Iterator[str]:
    """Which settings left it out."""
    skipped = sorted(left_out & filters.OPERATIONS)
    if skipped:
        yield f"skipped.operations: {', '.join(skipped)}"
    if left_out - filters.OPERATIONS:
        yield "cursor.pipeline: what stages may have left out that are gone or changed"
