"""Which snapshot a start continues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.properties.source import SnapshotMode
from cdc_core.snapshot import mode as snapshot_mode
from cdc_core.snapshot import state as snapshot_state
from pipelines.capture.start import CaptureStart


@pytest.mark.parametrize(
    ("mode", "left_out", "goes_on"),
    [
        (SnapshotMode.ALWAYS, (), True),
        (SnapshotMode.ALWAYS, ("b",), False),  # nobody reads it any more, and each start takes a snapshot
        (SnapshotMode.INITIAL, ("b",), True),  # it continues when the collection is let in again
    ],
)
def test_what_is_left_out_keeps_no_start_from_a_new_snapshot(
    mode: SnapshotMode, left_out: tuple[str, ...], goes_on: bool
) -> None:
    unfinished = snapshot_state.SnapshotState("1", ("shop.a", "shop.b")).advanced(
        "shop.a", snapshot_state.CollectionState(completed=True)
    )
    filter_ = SimpleNamespace(includes=lambda db, name: name not in left_out)
    deployment: Any = SimpleNamespace(source=SimpleNamespace(snapshot_mode=mode), filter=filter_)
    nothing: Any = None
    assert CaptureStart(nothing, deployment, nothing, "", None, False)._goes_on(unfinished) is goes_on


@pytest.mark.parametrize(("mode", "left"), [(SnapshotMode.ALWAYS, ()), (SnapshotMode.INITIAL, ("shop.a",))])
def test_a_collection_that_fails_keeps_no_start_from_a_new_snapshot(
    mode: SnapshotMode, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each start takes a snapshot, that one reads the collection again; otherwise the old one does."""
    state = snapshot_state.SnapshotState("1", ("shop.a", "shop.b")).advanced(
        "shop.b", snapshot_state.CollectionState(completed=True)
    )
    failed = state.advanced("shop.a", snapshot_state.CollectionState(failed="refused"))
    deployment: Any = SimpleNamespace(source=SimpleNamespace(snapshot_mode=mode))
    log: Any = SimpleNamespace(table=None)
    nothing: Any = None
    (found,) = CaptureStart(nothing, deployment, log, "", None, False)._states([failed.begun(), failed.progress("shop.a")])
    assert found.missing == left


@pytest.mark.parametrize(("resumes", "is_told"), [(False, True), (True, False)])
def test_a_snapshot_that_is_left_unfinished_is_told(resumes: bool, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The connector refuses such a start; without a word, the documents that were not read would seem not to exist."""
    deployment: Any = SimpleNamespace(source=SimpleNamespace(snapshot_mode=SnapshotMode.NO_DATA))
    nothing: Any = None
    decision = snapshot_mode.SnapshotDecision(takes=False, resumes=resumes, streams=True)
    unfinished = snapshot_state.SnapshotState("1", ("shop.a",))
    CaptureStart(nothing, deployment, nothing, "", None, False)._warn_of_no_snapshot(decision, (unfinished,))
    assert ["no_data does not continue" in each.getMessage() for each in caplog.records] == [True] * is_told
