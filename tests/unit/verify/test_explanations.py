"""Explanations of differences, for example an unfinished snapshot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.silver import quarantine
from cdc_core.snapshot.state import SnapshotKind, SnapshotState
from pipelines.bronze import registry
from pipelines.verify import bronze_state, explanations
from pipelines.verify.explanations import Explanations
from pipelines.verify.result import KeyDifference, KeyVerdict
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


@pytest.mark.parametrize("kind", [KeyVerdict.MISSING, KeyVerdict.EXTRA, KeyVerdict.DIFFERENT])
@pytest.mark.parametrize("is_being_read", [True, False])
def test_what_a_snapshot_has_not_read_waits(monkeypatch: pytest.MonkeyPatch, kind: KeyVerdict, is_being_read: bool) -> None:
    """Rows from before a gap are outdated until the snapshot that fills it ends."""
    unused: Any = None
    known = {
        "_in_silver": lambda *_: set(),
        "_left_by_a_drop": lambda _: "false",
        "_quarantined": lambda *_: set(),
        "keeps_rows": lambda _: False,
        "_is_being_read": lambda _: is_being_read,
    }
    for name, said in known.items():
        monkeypatch.setattr(Explanations, name, said)
    (found,) = Explanations(unused, unused, has_source=True).explained([KeyDifference("1", kind)])
    assert found.kind is (KeyVerdict.WAITING if is_being_read else kind)


@pytest.mark.parametrize(("key", "kind"), [("1", KeyVerdict.KEPT), ("garbage", KeyVerdict.EXTRA)])
def test_only_rows_of_documents_are_kept_by_the_settings(
    monkeypatch: pytest.MonkeyPatch, key: str, kind: KeyVerdict
) -> None:
    """Another program wrote a row with a key that no document can have, and `drop` seemed to have kept it."""
    unused: Any = None
    for name, said in {"keeps_rows": True, "_is_being_read": False, "_in_silver": set(), "_quarantined": set()}.items():
        monkeypatch.setattr(Explanations, name, lambda *_, said=said: said)
    (found,) = Explanations(unused, unused, has_source=True).explained([KeyDifference(key, KeyVerdict.EXTRA)])
    assert found.kind is kind


@pytest.mark.parametrize(
    ("snapshot_mode", "kind", "is_paused", "is_awaited"),
    [
        ("initial", SnapshotKind.INITIAL, False, True),
        ("no_data", SnapshotKind.INITIAL, False, False),
        ("no_data", SnapshotKind.INCREMENTAL, False, True),
        ("initial", SnapshotKind.INCREMENTAL, True, False),
        ("custom", SnapshotKind.INITIAL, False, True),
        ("no_data", SnapshotKind.REPLACED, True, True),
    ],
)
def test_a_snapshot_that_goes_on_by_itself_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, snapshot_mode: str, kind: SnapshotKind, is_paused: bool, is_awaited: bool
) -> None:
    """A snapshot that is paused, or that `snapshot.mode` does not resume, changes nothing: differences are wrong until somebody acts."""
    state = SnapshotState("s", ("shop.a",), kind=kind)
    paused = SnapshotState("p", ("shop.b",), kind=SnapshotKind.INCREMENTAL, is_paused=True)
    told = [state.begun(), *([paused.begun(), paused.controlled()] if is_paused else [])]
    monkeypatch.setattr(explanations.bronze_log, "snapshot_heartbeats", lambda *_: told)
    source = {"mongodb.connection.string": "mongodb://h", "snapshot.mode": snapshot_mode}
    source |= {"snapshot.mode.custom.name": "a:B"} if snapshot_mode == "custom" else {}
    chosen = settings.parse({"name": "shop", "lakehouse": {"root": "lake"}, "source": source})
    progress: Any = SimpleNamespace(namespace=registry.Namespace("shop", "a"), spark=None, bronze=None)
    assert Explanations(chosen, progress, has_source=True)._is_being_read() is is_awaited


def test_what_is_advised_names_the_one_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`medallion signal` takes regular expressions, in which the dots of a collection's name must be escaped."""
    monkeypatch.setattr(bronze_state.bronze_log, "is_whole", lambda *_: False)
    unused: Any = None
    with pytest.raises(errors.DecisionNeeded, match=r"--data-collections 'shop\\.a\\.b'"):
        bronze_state.check_whole(unused, unused, registry.Namespace("shop", "a.b"))


def test_of_many_events_in_quarantine_those_of_the_keys_that_are_asked_for_are_known(tmp_path: Path) -> None:
    """Differing keys are looked up by some thousands: listing all events each time would take hours."""
    with without_spark.running():
        hop = Hop(tmp_path)
        progress: Any = SimpleNamespace(spark=SPARK, layout=hop.layout, namespace=registry.Namespace("cases", "t"))
        known = Explanations(hop.settings, progress, has_source=True)
        assert known._quarantined(["1"]) == set()
        hop.note_fact(1, quarantine.Reason.NO_DOCUMENT, to=1, events=30_000)
        assert known._quarantined(["1", "2"]) == {"1"}
