"""When a start takes a snapshot, resumes one, and streams."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_core.snapshot import mode as snapshot_mode
from tests.harness.snapshotters import Never
from tests.harness.sources import source

BASED = "snapshot.mode.configuration.based"
DATA = {"snapshot.mode": "configuration_based", f"{BASED}.snapshot.data": True}
STREAM = {"snapshot.mode": "configuration_based", f"{BASED}.start.stream": True}
CUSTOM = {"snapshot.mode": "custom", "snapshot.mode.custom.name": "x:Y"}


@pytest.mark.parametrize(
    ("given", "first", "later", "unfinished"),
    [
        ({}, "takes streams", "streams", "resumes streams"),
        ({"snapshot.mode": "initial"}, "takes streams", "streams", "resumes streams"),
        ({"snapshot.mode": "when_needed"}, "takes streams", "streams", "resumes streams"),
        ({"snapshot.mode": "always"}, "takes streams", "takes streams", "resumes streams"),
        ({"snapshot.mode": "initial_only"}, "takes", "", "resumes"),
        ({"snapshot.mode": "no_data"}, "streams", "streams", "streams"),
        ({"snapshot.mode": "never"}, "streams", "streams", "streams"),
        ({"snapshot.mode": "configuration_based"}, "", "", ""),
        (DATA, "takes", "", "resumes"),
        (STREAM, "streams", "streams", "streams"),
        ({**DATA, **STREAM}, "takes streams", "streams", "resumes streams"),
        (CUSTOM, "streams", "streams", "streams"),
    ],
)
def test_what_a_start_does(given: dict[str, Any], first: str, later: str, unfinished: str) -> None:
    """Each mode decides for a first start, a later one, and one that finds an unfinished snapshot."""

    def words(*, has_position: bool, is_unfinished: bool = False) -> str:
        decision = snapshot_mode.decided(
            source(given), has_position=has_position, is_unfinished=is_unfinished, custom=Never()
        )
        return " ".join(name for name in ("takes", "resumes", "streams") if getattr(decision, name))

    assert words(has_position=False) == first
    assert words(has_position=True) == later
    assert words(has_position=True, is_unfinished=True) == unfinished


@pytest.mark.parametrize(
    ("given", "replaces"),
    [
        ({}, False),
        ({"snapshot.mode": "when_needed"}, True),
        (DATA, False),
        ({**DATA, f"{BASED}.snapshot.on.data.error": True}, True),
        ({**DATA, f"{BASED}.snapshot.on.schema.error": True}, False),
        (CUSTOM, False),
    ],
)
def test_a_lost_position(given: dict[str, Any], replaces: bool) -> None:
    """A lost position leads to a new snapshot in the modes for it, and to an error in the others."""
    assert snapshot_mode.replaces_lost_position(source(given), custom=Never()) is replaces


def test_a_schema_is_nothing_to_snapshot() -> None:
    """The switches for schemas have no effect: MongoDB has no schemas."""
    given = {**DATA, f"{BASED}.snapshot.schema": True, f"{BASED}.snapshot.on.schema.error": True}
    for has_position in (False, True):
        assert snapshot_mode.decided(source(given), has_position=has_position, is_unfinished=False) == snapshot_mode.decided(
            source(DATA), has_position=has_position, is_unfinished=False
        )
