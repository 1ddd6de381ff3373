"""Gaps: changes of a collection that bronze can never hold, because nobody read them in time.

There are two kinds. A position was lost, and a snapshot makes up for what it reads. Or the settings left a collection out for
a while: its changes come again from now on, and a signal may ask for a snapshot. Each gap is a heartbeat's payload, by which
`status` says what is incomplete (`cdc_core.snapshot.state.unrepaired`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cdc_core.properties.source import SnapshotMode
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import resume_token
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.capture import position as positions
from pipelines.capture.deployment import Deployment
from pipelines.capture.logger import log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        # A drop that nobody saw leaves no event: without a sweep their documents would stay in silver for good.
        state = _with_gone(state, [name for name in known if name not in captured], token)
        self._warn_of_unread(captured, state)
        return state, {"gap": {**gap, "collections": sorted({*captured, *known})}}

    def note_other_stream(self, states: Sequence[snapshot_state.SnapshotState], *, fingerprint: str) -> None:
        """Note that the settings let in other events from here on, and name the collections that were not captured before.

        Their changes come; what they held, or what became of it meanwhile, comes when a signal asks for it.
        """
        captured, notes = self.deployment.namespaces(), bronze_log.notes(self.spark, self.log.table)
        if notes:
            known = notes[-1].captured
        else:
            # A table of before there were such notes: what has rows or a plan was captured.
            known = frozenset(self._in_bronze())
            known = known.union(*(state.planned for state in states))
        new = [name for name in captured if name not in known]
        note = {"stream": fingerprint, "captured": captured}
        gaps = self._while_left_out(new, notes) if notes and new else []
        self.log.heartbeat(note, *gaps, token=positions.token_of(self.log), ts_ms=clock.now_ms())
        # Who wants no snapshots at all is not told to take one.
        if new and self.deployment.source.snapshot_mode is not SnapshotMode.NO_DATA:
            log.warning(
                "%s: captured from now on; what was there before comes with medallion signal execute-snapshot%s",
                ", ".join(new),
                _as_options(new),
            )

    def _while_left_out(self, new: Sequence[str], notes: Sequence[bronze_log.FilterChange]) -> list[Mapping[str, Any]]:
        """What was lost of collections that were captured once, then left out, and are let in again."""
        gaps: list[Mapping[str, Any]] = []
        before = set(self._in_bronze())
        for name in (name for name in new if name in before):
            left_out = next(note for at, note in enumerate(notes) if not any(name in later.captured for later in notes[at:]))
            if name not in self._in_bronze(behind=left_out.offset):  # else it was made since then, and the stream brought it
                since = positions.utc(left_out.token)
                gap = {"from": left_out.token, "to": positions.token_of(self.log), "since": since}
                gaps.append({"gap": {**gap, "collections": [name]}})
        return gaps

    def _known(self) -> list[str]:
        """The collections that are captured and have documents in bronze."""
        found = bronze_log.captured_collections(self.spark, self.log.table)
        return [f"{db}.{name}" for db, name in found if self.deployment.filter.includes(db, name)]

    def _in_bronze(self, *, behind: int = -1) -> list[str]:
        """The collections that have documents in bronze, or with a greater offset."""
        found = bronze_log.captured_collections(self.spark, self.log.table, behind=behind)
        return [f"{db}.{name}" for db, name in found]

    def _warn_of_unread(self, captured: Sequence[str], state: snapshot_state.SnapshotState) -> None:
        """Name what the snapshot after a gap leaves as it was: `snapshot.mode` reads what the settings let it read."""
        filtered = self.deployment.source.snapshot_collection_filter_overrides
        unread = [name for name in captured if name not in state.planned or name in filtered]
        if unread:
            log.warning(
                "changes were lost, and the snapshot does not read all of %s (snapshot.include.collection.list, "
                "snapshot.collection.filter.overrides): incomplete, as status says, until medallion signal execute-snapshot%s",
                ", ".join(unread),
                _as_options(unread),
            )


def _with_gone(state: snapshot_state.SnapshotState, gone: Sequence[str], token: str) -> snapshot_state.SnapshotState:
    """A snapshot after a gap, with the collections that are not there any more: nothing to read, and all rows to go."""
    at = positions.cluster_time(token)
    first = snapshot_state.CollectionState(first=resume_token.snapshot_sequence(at.time, at.inc))
    return replace(state, planned=(*state.planned, *gone), collections=dict.fromkeys(gone, first))


def _as_options(namespaces: Sequence[str]) -> str:
    """The collections as `medallion signal` takes them: as regular expressions."""
    quoted = (name if re.fullmatch(r"[\w.-]+", name) else f"'{re.escape(name)}'" for name in namespaces)
    return "".join(f" --data-collections {name}" for name in quoted)
