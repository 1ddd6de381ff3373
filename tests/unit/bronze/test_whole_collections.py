"""Which collections can be rebuilt from a bronze from which old events were removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdc_core.snapshot.state import CollectionState, SnapshotKind, SnapshotState
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze
from pipelines.delta import tables as delta
from tests.harness import without_spark

READ = CollectionState(1, 1, None, "f", completed=True)


def heartbeats(at_ms: int, plan: SnapshotState, **states: CollectionState) -> list[dict[str, Any]]:
    """A snapshot that is planned at a time, and the progress of its collections."""
    payloads = [plan.begun(), *(plan.advanced(f"db.{name}", state).progress(f"db.{name}") for name, state in states.items())]
    return [{"ts_ms": at_ms, "payload": json.dumps(payload)} for payload in payloads]


def test_what_was_read_again_since_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot counts if it was planned after the removed events, and has read and swept a whole collection. Bronze's heartbeats are read
    once for thousands of collections, and again after its next commit."""
    kind = SnapshotKind.INCREMENTAL
    unswept, unread = CollectionState(1, 1, None, "f", completed=True, sweep=False), CollectionState(1, 1, None, "f")
    before, filtered = SnapshotState("1", ("db.a",)), SnapshotState("3", ("db.e",), kind=kind, conditions={"db.e": "{}"})
    rows = [
        *heartbeats(9, before, a=READ),
        *heartbeats(10, SnapshotState("2", ("db.b", "db.c", "db.d"), kind=kind), b=READ, c=unswept, d=unread),
        *heartbeats(10, filtered, e=READ),
    ]
    reads: list[int] = []

    def read(*_: Any, **__: Any) -> list[dict[str, Any]]:
        reads.append(len(rows))
        return rows

    monkeypatch.setattr(delta, "properties", lambda *_: {bronze.TRIMMED: "10"})
    monkeypatch.setattr(bronze, "_payload_rows", read)
    log = tmp_path / "_delta_log"
    log.mkdir()
    without_spark.write(tmp_path, 0, [])
    table = tables.TableRef.at(str(tmp_path))

    def whole() -> list[str]:
        return [name for name in "abcdefg" if bronze.is_whole(without_spark.SPARK, table, f"db.{name}")]

    assert (whole(), len(reads)) == (["b"], 1)
    rows += heartbeats(11, SnapshotState("4", ("db.f",), kind=kind), f=READ)
    without_spark.write(tmp_path, 1, [])
    assert (whole(), len(reads)) == (["b", "f"], 2)
    monkeypatch.setattr(delta, "properties", lambda *_: {})
    monkeypatch.setattr(bronze, "_first_batch", lambda *_: 1)
    without_spark.write(tmp_path, 2, [])
    assert whole() == [*"abcdefg"]
