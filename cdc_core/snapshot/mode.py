"""When a start takes a snapshot, and whether a stream follows: Debezium's `snapshot.mode`.

Source: Debezium "MongoDB connector", properties `snapshot.mode` and `snapshot.mode.configuration.based.*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cdc_core.properties.source import SnapshotMode, Source


class Snapshotter(Protocol):
    """The interface of the class that `snapshot.mode.custom.name` names; it is created without arguments."""

    def should_snapshot_data(self, has_position: bool, is_snapshot_unfinished: bool) -> bool:
        """Whether this start takes a snapshot."""

    def should_stream(self) -> bool:
        """Whether a stream follows."""

    def should_snapshot_on_data_error(self) -> bool:
        """Whether to take a new snapshot if the oplog no longer has the position."""


@dataclass(frozen=True)
class SnapshotDecision:
    """What a start does: take a new snapshot, resume an unfinished one, stream afterwards."""

    takes: bool
    resumes: bool
    streams: bool


def decided(
    source: Source,
    *,
    has_position: bool,
    is_unfinished: bool,
    custom: Snapshotter | None = None,
) -> SnapshotDecision:
    """The decision for a start whose position, if there is one, can be resumed."""
    match source.snapshot_mode:
        # They differ only if the position is lost (`replaces_lost_position`).
        case SnapshotMode.INITIAL | SnapshotMode.WHEN_NEEDED:
            return SnapshotDecision(not has_position, is_unfinished, True)
        case SnapshotMode.ALWAYS:
            return SnapshotDecision(not is_unfinished, is_unfinished, True)
        case SnapshotMode.INITIAL_ONLY:
            return SnapshotDecision(not has_position, is_unfinished, False)
        case SnapshotMode.NO_DATA:
            return SnapshotDecision(False, False, True)
        case SnapshotMode.CONFIGURATION_BASED:
            reads_data = source.snapshot_mode_configuration_based_snapshot_data
            streams = source.snapshot_mode_configuration_based_start_stream
            return SnapshotDecision(reads_data and not has_position, reads_data and is_unfinished, streams)
        case SnapshotMode.CUSTOM:
            assert custom is not None
            reads_data = custom.should_snapshot_data(has_position, is_unfinished)
            return SnapshotDecision(reads_data and not is_unfinished, reads_data and is_unfinished, custom.should_stream())


def replaces_lost_position(source: Source, *, custom: Snapshotter | None = None) -> bool:
    """Whether a position that the oplog no longer has leads to a new snapshot instead of an error."""
    match source.snapshot_mode:
        case SnapshotMode.WHEN_NEEDED:
            return True
        case SnapshotMode.CONFIGURATION_BASED:
            return source.snapshot_mode_configuration_based_snapshot_on_data_error
        case SnapshotMode.CUSTOM:
            return custom is not None and custom.should_snapshot_on_data_error()
        case _:
            return False
