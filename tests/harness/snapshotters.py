"""Classes that `snapshot.mode.custom.name` can name."""

from __future__ import annotations


class Never:
    """Takes no snapshot, and streams."""

    def should_snapshot_data(self, has_position: bool, is_snapshot_unfinished: bool) -> bool:
        return False

    def should_stream(self) -> bool:
        return True

    def should_snapshot_on_data_error(self) -> bool:
        return False
